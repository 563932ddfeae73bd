#!/usr/bin/env bash
# Starts a Kubernetes cluster of two nodes on this machine, from Go modules and Debian packages, without a registry, systemd
# or Docker. On a cluster that runs already it changes nothing and prints the same.
#
#   up.sh                    CLUSTER=NAME for another one beside it, API_PORT=N for a fixed port on 127.0.0.1
#   KUBECONFIG=FILE up.sh    uses that cluster: checks that it answers, starts nothing
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$HERE/packages.sh"
. "$HERE/certs.sh"
. "$HERE/control-plane.sh"
. "$HERE/node.sh"
. "$HERE/dns.sh"

use_foreign() {
  command -v kubectl >/dev/null || "$HERE/build.sh" kubectl
  kubectl --request-timeout=10s get --raw /readyz >/dev/null || die "KUBECONFIG is set to $KUBECONFIG, and that cluster does not answer"
  say "KUBECONFIG is set: using the cluster of $KUBECONFIG, nothing is started"
  kubectl version | sed 's/^/  /'
}

describe() {
  local prefix=''
  [ "$CLUSTER" = e2e ] || prefix="CLUSTER=$CLUSTER "
  cat <<TEXT
cluster '$CLUSTER' is up: 2 nodes, Kubernetes $(kubectl version --client | sed -nE 's/^Client Version: //p')
  export KUBECONFIG=$KUBECONFIG_FILE
  $BIN/kubectl get nodes,pods -A
  $prefix$HERE/exec.sh kubectl get pods -A     # where pod and Service addresses and cluster DNS work
TEXT
}

# Ports that cannot be taken by chance: below the range from which the kernel serves clients.
free_port() {
  local port
  for _ in {1..50}; do
    port=$((20000 + RANDOM % 10000))
    if ! (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port"; return; fi
  done
  die "found no free port on 127.0.0.1; set API_PORT"
}

is_up() {
  [ -e "$STATE/up" ] && node_pid 1 >/dev/null && node_pid 2 >/dev/null &&
    ours --request-timeout=5s get --raw /readyz >/dev/null 2>&1
}

small_images() {
  "$HERE/image.sh" kvrouter.local/pause:1 "$BIN/pause"
  "$HERE/image.sh" kvrouter.local/probe:1 "$BIN/probe"
}

# The API server needs a few seconds, in which images are imported; the kubelets wait for it by themselves.
bring_up() {
  mkdir -p "$STATE"
  resolver >"$STATE/resolv.conf"
  PORT=${API_PORT:-$(free_port)}
  echo "$PORT" >"$STATE/port"
  step "certificates and kubeconfigs" make_certificates
  load_modules
  step "namespaces of both nodes" each_node start_node
  step "network between them" connect_nodes
  step "cgroups" make_cgroups
  step "etcd, API server, controllers, scheduler started" start_control_plane
  step "containerd on both nodes" each_node start_containerd
  step "containerd answers" each_node await_containerd
  step "images for sandboxes and probes" small_images
  step "kubelets started" each_node start_kubelet
  step "kube-proxies started" each_node start_kube_proxy
  step "API server ready" await_apiserver
  step "DNS applied" apply_dns
  step "both nodes Ready" await_nodes
  step "DNS serves" await_dns
  touch "$STATE/up"
}

main() {
  valid_name
  if foreign_kubeconfig; then use_foreign; return; fi
  need_root
  lock
  packages
  "$HERE/build.sh"
  if is_up; then describe; return; fi
  if [ -e "$STATE" ]; then
    say "cluster '$CLUSTER' is there in part: it goes down first"
    LOCKED=1 "$HERE/down.sh" 8>&-
  fi
  trap 'say "up.sh failed; logs are in $STATE/node-*/*.log, down.sh removes the rest"' EXIT
  step "all" bring_up
  trap - EXIT
  describe
}

main
