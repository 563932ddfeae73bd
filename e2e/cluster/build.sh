#!/usr/bin/env bash
# Builds the cluster's programs from Go modules into ~/.cache/kvrouter/tools/cluster/bin.
#
#   build.sh [PROGRAM...]      all programs by default; 12 minutes on 2 cores the first time, at once afterwards
#
# Each folder of tools/ is a module of its own, because the programs' dependencies do not fit into one: it pins the versions
# of one family. A program is built again when its go.mod, its source or the flags below change.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

JOBS=2  # compilers at once; they share the machine with whatever else is being built
export CGO_ENABLED=0 GOWORK=off GOFLAGS='-mod=readonly -buildvcs=false -trimpath'

# In the order in which others wait for them.
PROGRAMS=(etcd kube-apiserver kubectl helm containerd containerd-shim-runc-v2 ctr kubelet kube-controller-manager kube-scheduler
  kube-proxy coredns pause probe)

# Sets $family and $package, where the program is found.
locate() {
  case $1 in
    etcd) family=etcd package=go.etcd.io/etcd/server/v3 ;;
    kube-* | kubelet | kubectl) family=kubernetes package=k8s.io/kubernetes/cmd/$1 ;;
    helm) family=helm package=helm.sh/helm/v4/cmd/helm ;;
    containerd* | ctr) family=containerd package=github.com/containerd/containerd/v2/cmd/$1 ;;
    coredns) family=coredns package=github.com/coredns/coredns ;;
    pause | probe) family=pods package=./$1 ;;
    *) die "unknown program '$1'; known are ${PROGRAMS[*]}" ;;
  esac
}

# The version a family's go.mod asks for: pinned MODULE.
pinned() { sed -nE "s#^(require )?[[:space:]]*$1 (v[0-9.]+).*#\2#p" "$HERE/tools/$family/go.mod" | head -1; }

# Sets $tags and $ldflags of the family: without its version Kubernetes calls itself v0.0.0, and clients believe it.
flags() {
  tags='' ldflags='-s -w'
  case $family in
    containerd) tags=no_btrfs,no_devmapper,no_zfs ;;
    kubernetes)
      local version number pkg=k8s.io/component-base/version
      version=$(pinned k8s.io/kubernetes)
      IFS=. read -r -a number <<<"${version#v}"
      ldflags+=" -X $pkg.gitVersion=$version -X $pkg.gitMajor=${number[0]} -X $pkg.gitMinor=${number[1]} -X $pkg.gitTreeState=clean" ;;
  esac
}

cat_sources() { cd "$HERE/tools/$family" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 cat; }

build() {
  local program=$1 family package tags ldflags stamp began=$SECONDS
  locate "$program"
  flags
  stamp=$TOOLS/stamps/$program=$( (cat_sources && echo "$tags $ldflags") | sha256sum | cut -c1-16)
  if [ -e "$stamp" ] && [ -x "$BIN/$program" ]; then return; fi
  flock 9   # one build at a time; what is there already is never waited for
  if [ -e "$stamp" ] && [ -x "$BIN/$program" ]; then return; fi
  command -v go >/dev/null || die "$program is built with Go, and there is no go here"
  say "building $program ..."
  rm -f "$TOOLS/stamps/$program="*
  (cd "$HERE/tools/$family" && nice -n 10 go build -p "$JOBS" -tags "$tags" -ldflags "$ldflags" -o "$BIN/.$program" "$package")
  mv "$BIN/.$program" "$BIN/$program"   # the file of a running program can be replaced, not written to
  touch "$stamp"
  say "building $program: done in $((SECONDS - began)) s"
}

mkdir -p "$BIN" "$TOOLS/stamps"
exec 9>"$TOOLS/build.lock"
for program in "${@:-"${PROGRAMS[@]}"}"; do build "$program"; done
