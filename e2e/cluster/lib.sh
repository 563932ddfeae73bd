# shellcheck shell=bash disable=SC2034 # what is unused here is used by those who source it
# What every script here starts from: names, addresses, folders, messages, and the two notions "node" and "daemon".
# It is sourced, never run, and starts nothing by itself.
#
# A node is a PID namespace whose process 1 is node-init.sh, with a network and a mount namespace of its own. All of it ends
# when that process does: daemons, pods, mounts, interfaces. Nothing else needs to be remembered to find or stop a node.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter
TOOLS=$CACHE/tools/cluster
BIN=$TOOLS/bin

# Which cluster. Clusters of different names share nothing but the programs.
CLUSTER=${CLUSTER:-e2e}
STATE=$CACHE/cluster/$CLUSTER
KUBECONFIG_FILE=$STATE/kubeconfig
CGROUP=kvrouter-$CLUSTER

# Addresses are of ranges kept for documentation and benchmarks, and exist only inside the nodes' namespaces.
NODES=(1 2)
PODS=198.18.0.0/17
SERVICES=198.18.128.0/17
API_SERVICE=198.18.128.1
DNS_SERVICE=198.18.128.10
DOMAIN=cluster.local
node_name() { echo "node-$1"; }
node_address() { echo "192.0.2.$1"; }
node_pods() { echo "198.18.$((($1 - 1) * 64)).0/18"; }
node_folder() { echo "$STATE/$(node_name "$1")"; }

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# step TITLE COMMAND...: runs it and prints how long it took, in milliseconds because most steps are short.
step() {
  local title=$1 began=${EPOCHREALTIME/./} spent
  shift
  "$@"
  spent=$(((${EPOCHREALTIME/./} - began) / 1000))
  say "$(printf '%4d.%03d s  %s' $((spent / 1000)) $((spent % 1000)) "$title")"
}

# until_true SECONDS WHAT COMMAND...: repeats a silent check until it succeeds.
until_true() {
  local seconds=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || { echo "waited $seconds s in vain for $what" >&2; return 1; }
    sleep 0.2
  done
}

valid_name() { [[ $CLUSTER =~ ^[a-z][a-z0-9-]{0,19}$ ]] || die "CLUSTER=$CLUSTER: at most 20 of a-z, 0-9 and -, a letter first"; }
need_root() { [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || die "needs root on Linux: it makes namespaces, cgroups and mounts"; }

# One up or down at a time. Daemons are started with this descriptor closed.
lock() {
  mkdir -p "$TOOLS"
  exec 8>"$TOOLS/up.lock"
  flock -n 8 || die "another up.sh or down.sh is at work"
}

# A cluster that was there before us: someone else's KUBECONFIG.
foreign_kubeconfig() { [ -n "${KUBECONFIG:-}" ] && [ "$KUBECONFIG" != "$KUBECONFIG_FILE" ]; }

# The host's PID of a node's process 1; empty and false if the node is not there.
node_pid() {
  local file folder
  folder=$(node_folder "$1")
  while read -r file; do
    file=${file%/cmdline}
    if grep -qsE '^NSpid:.*[[:space:]]1$' "$file/status"; then echo "${file#/proc/}"; return; fi
  done < <(grep -slFxz -- "$folder" /proc/[0-9]*/cmdline)
  return 1
}

# in_node NODE COMMAND...: with the node's network, mounts and processes.
in_node() {
  local pid
  pid=$(node_pid "$1") || { echo "node $1 is not there" >&2; return 1; }
  nsenter --target "$pid" -m -n -u -p -- "${@:2}"
}

# on_network NODE COMMAND...: with nothing of the node but its network.
on_network() {
  local pid
  pid=$(node_pid "$1") || { echo "node $1 is not there" >&2; return 1; }
  nsenter --target "$pid" -n -- "${@:2}"
}

# launch NODE DAEMON NAMESPACES COMMAND...: in the background; its log grows in the node's folder. Nothing if it runs already.
# NAMESPACES are flags of nsenter.
launch() {
  local node file
  if running "$1" "$2"; then return; fi
  node=$(node_pid "$1") || { echo "node $1 is not there" >&2; return 1; }
  file=$(node_folder "$1")/$2
  # shellcheck disable=SC2016,SC2086 # expanded by the inner shell; a list of flags
  nsenter --target "$node" $3 -- setsid --fork bash -c 'echo $$ >"$1.pid"; exec "${@:2}" >>"$1.log" 2>&1 </dev/null' \
    daemon "$file" "${@:4}" 8>&-
}
start() { launch "$1" "$2" "-m -n -u -p" "${@:3}"; }
# With the network of the host.
start_outside() { launch "$1" "$2" "-m -u -p" "${@:3}"; }

# The daemon's PID as its node counts; false if it does not run. A number that now belongs to another program does not count.
daemon_pid() {
  local pid comm node
  node=$(node_pid "$1") && pid=$(cat "$(node_folder "$1")/$2.pid" 2>/dev/null) || return 1
  comm=$(cat "/proc/$node/root/proc/$pid/comm" 2>/dev/null) || return 1
  [ "$comm" = bash ] || [[ $2 == "$comm"* ]] || return 1
  echo "$pid"
}
running() { daemon_pid "$@" >/dev/null; }

# kill_daemon NODE DAEMON: SIGKILL, as a crash would be; returns when it is gone.
kill_daemon() {
  local pid
  pid=$(daemon_pid "$1" "$2") || return 0
  # shellcheck disable=SC2016 # expanded by the inner shell
  in_node "$1" bash -c 'kill -KILL "$1"; while [ -e "/proc/$1" ]; do sleep 0.05; done' kill "$pid"
}

# The end of a daemon's log, for a step that failed.
show_log() { echo "--- last lines of $(node_folder "$1")/$2.log" >&2; tail -n 15 "$(node_folder "$1")/$2.log" >&2 || true; }

# The roots of the cgroup hierarchies: version 2 has one tree, version 1 one per controller (some of them under two names).
cgroup_trees() {
  local tree
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; return; fi
  for tree in /sys/fs/cgroup/*; do
    if [ -e "$tree/cgroup.procs" ] && [ ! -L "$tree" ]; then echo "$tree"; fi
  done
}

ours() { kubectl --kubeconfig "$KUBECONFIG_FILE" "$@"; }

PATH=$BIN:$PATH:/usr/sbin:/sbin
