#!/usr/bin/env bash
# Makes a container image of a program and imports it into both nodes; there is no registry.
#
#   image.sh NAME:TAG PROGRAM [SOURCE:DESTINATION...]
#
# The image holds PROGRAM as /usr/local/bin/<its name>, which is the entry point, the shared libraries that ldd lists, at
# their paths, and the extra files; it runs as user 65532. Equal files make an equal image, and nothing happens if the nodes
# have it already. Use a tag other than `latest`, or imagePullPolicy IfNotPresent: there is nowhere to pull from.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

USER_ID=65532
HOME_OF_PROGRAMS=/usr/local/bin

[ $# -ge 2 ] || die "usage: image.sh NAME:TAG PROGRAM [SOURCE:DESTINATION...]"
[[ $1 == *:* ]] || die "'$1' has no tag; NAME:TAG"
if foreign_kubeconfig; then die "KUBECONFIG names a cluster of yours, into which this cannot import; push $1 to its registry"; fi
image=$1 program=$2
entrypoint=$HOME_OF_PROGRAMS/$(basename "$program")

# "SOURCE:DESTINATION" of everything in the image, libraries included, in an order of their own.
contents() {
  local file
  for file in "$program:$entrypoint" "$@"; do
    [ -f "${file%%:*}" ] || die "${file%%:*} is not a file"
    [[ ${file#*:} == /* ]] || die "'$file': SOURCE:DESTINATION, and the destination begins with /"
    echo "$file"
    # Of a static program or a text, ldd says that it is not dynamic, and fails.
    { ldd "${file%%:*}" 2>/dev/null || true; } | awk '/=> \// {print $3 ":" $3} /^[[:space:]]*\// {print $1 ":" $1}'
  done | LC_ALL=C sort -u
}

# Reads contents; prints a digest of names and bytes.
digest() {
  local line
  {
    echo "$image $entrypoint $USER_ID"
    while read -r line; do echo "${line#*:} $(sha256sum <"${line%%:*}")"; done
  } | sha256sum | cut -c1-64
}

# Reads contents; makes the tree of the image in a folder.
populate() {
  local line mode
  umask 022
  mkdir -p "$1"
  mkdir -m 1777 "$1/tmp"
  while read -r line; do
    mode=644
    if [ -x "${line%%:*}" ]; then mode=755; fi
    install -D -m "$mode" "${line%%:*}" "$1${line#*:}"
  done
}

reproducible_tar() { tar --create --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=gnu "$@"; }

# archive FOLDER: FOLDER/root becomes FOLDER/image.tar, in the form of `docker save`.
archive() {
  local layer architecture
  case $(uname -m) in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; *) architecture=$(uname -m) ;; esac
  mkdir "$1/archive"
  reproducible_tar --file "$1/archive/layer.tar" --directory "$1/root" .
  layer=$(sha256sum <"$1/archive/layer.tar" | cut -c1-64)
  cat >"$1/archive/config.json" <<JSON
{"architecture": "$architecture", "os": "linux", "created": "1970-01-01T00:00:00Z",
 "config": {"User": "$USER_ID:$USER_ID", "Env": ["PATH=$HOME_OF_PROGRAMS:/usr/bin:/bin"], "Entrypoint": ["$entrypoint"], "WorkingDir": "/"},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
JSON
  echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$image\"], \"Layers\": [\"layer.tar\"]}]" >"$1/archive/manifest.json"
  reproducible_tar --file "$1/image.tar" --directory "$1/archive" manifest.json config.json layer.tar
}

import() {
  local node
  for node in "${NODES[@]}"; do
    in_node "$node" env CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1 \
      "$BIN/ctr" --address /run/containerd/containerd.sock --namespace k8s.io images import "$1" >/dev/null ||
      die "node $node did not take $image"
  done
}

began=$SECONDS
list=$(contents "${@:3}")
want=$(digest <<<"$list")
stamp=$STATE/images/${image//\//_}
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then exit 0; fi
for node in "${NODES[@]}"; do node_pid "$node" >/dev/null || die "node $node of cluster '$CLUSTER' is not there; run up.sh first"; done
mkdir -p "$STATE/images"
work=$(mktemp -d "$STATE/images/making.XXXXXX")
trap 'rm -rf "$work"' EXIT
populate "$work/root" <<<"$list"
archive "$work"
import "$work/image.tar"
echo "$want" >"$stamp"
say "image $image is on both nodes ($(du -h "$work/image.tar" | cut -f1), $((SECONDS - began)) s)"
