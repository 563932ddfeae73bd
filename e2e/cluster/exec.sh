#!/usr/bin/env bash
# Runs a command on node 1's network: pods, Services and cluster DNS are reachable, nothing outside is. Files and processes
# are the host's. KUBECONFIG, PATH (kubectl, helm, ctr) and containerd's address are set.
#
#   exec.sh COMMAND...         exec.sh curl http://web.default:8080/
#
# With a KUBECONFIG of yours the command is run as it is.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -gt 0 ] || die "usage: exec.sh COMMAND..."
if foreign_kubeconfig; then exec "$@"; fi
need_root
pid=$(node_pid 1) || die "cluster '$CLUSTER' is not up; run up.sh first"
export PATH CLUSTER KUBECONFIG=$KUBECONFIG_FILE
export CONTAINERD_ADDRESS=/proc/$pid/root/run/containerd/containerd.sock CONTAINERD_NAMESPACE=k8s.io CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1
# A mount namespace for this command alone, in which the resolver is the cluster's.
# shellcheck disable=SC2016 # expanded by the inner shell
exec nsenter --target "$pid" --net -- unshare --mount --propagation slave -- \
  bash -c 'if [ -e /etc/resolv.conf ]; then mount --bind "$0" /etc/resolv.conf; fi; exec "$@"' "$STATE/resolv.conf" "$@"
