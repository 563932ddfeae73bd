#!/usr/bin/env bash
# Kills the kubelet of a node and starts it again. Pods keep running meanwhile; the node is NotReady after 50 s.
#
#   kubelet.sh 1|2 stop|start
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$HERE/node.sh"

case ${1:-} in 1 | 2) ;; *) die "usage: kubelet.sh 1|2 stop|start" ;; esac
node_pid "$1" >/dev/null || die "cluster '$CLUSTER' is not up"
case ${2:-} in
  stop) kill_daemon "$1" kubelet ;;
  start) start_kubelet "$1" ;;
  *) die "usage: kubelet.sh 1|2 stop|start" ;;
esac
