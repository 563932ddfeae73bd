#!/usr/bin/env bash
# Takes the cluster down and leaves nothing of it, whatever state it is in. CLUSTER=NAME chooses another one.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The kernel kills all processes of a PID namespace with its process 1: daemons, shims and pods. Mounts and interfaces go with
# the last of them.
stop_node() {
  local pid
  pid=$(node_pid "$1") || return 0
  strangers "$1" "$pid"
  kill -KILL "$pid"
  until_true 30 "the end of node $1" gone "/proc/$pid"
}
gone() { [ ! -e "$1" ]; }

# Commands that were started by exec.sh and still run keep the network namespace alive: they are the user's, so they are named.
strangers() {
  local network parent process
  network=$(readlink "/proc/$2/ns/net") parent=$(awk '/^PPid:/ {print $2}' "/proc/$2/status")
  for process in /proc/[0-9]*; do
    if [ "$(readlink "$process/ns/net")" = "$network" ] && [ "$process" != "/proc/$parent" ] &&
      [ "$(readlink "$process/ns/pid")" = "$(readlink /proc/self/ns/pid)" ]; then
      say "still on the network of node $1: ${process#/proc/} $(tr '\0' ' ' <"$process/cmdline")"
    fi
  done 2>/dev/null
}

# A group can be removed once its last process has been reaped.
remove_cgroups() {
  local tree
  for tree in $(cgroup_trees); do
    if [ -d "$tree/$CGROUP" ]; then find "$tree/$CGROUP" -depth -type d -exec rmdir {} +; fi
  done
}

remove_state() {
  rm -rf --one-file-system "$STATE"
  rmdir "$CACHE/cluster" 2>/dev/null || true
}

valid_name
need_root
# up.sh, which calls this for the rest of an earlier cluster, holds the lock.
[ -n "${LOCKED:-}" ] || lock
for node in "${NODES[@]}"; do step "node $node stopped" stop_node "$node"; done
step "cgroups removed" until_true 20 "the cgroups $CGROUP to become empty" remove_cgroups
step "$STATE removed" remove_state
