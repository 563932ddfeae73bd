#!/usr/bin/env bash
# Kills the API server and starts it again, for tests of what its clients do meanwhile. etcd keeps everything.
#
#   apiserver.sh stop | start      start returns when it is ready
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
. "$HERE/control-plane.sh"

node_pid 1 >/dev/null || die "cluster '$CLUSTER' is not up"
PORT=$(cat "$STATE/port")
case ${1:-} in
  stop) kill_daemon 1 kube-apiserver ;;
  start) start_apiserver && await_apiserver ;;
  *) die "usage: apiserver.sh stop|start" ;;
esac
