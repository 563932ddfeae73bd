#!/usr/bin/env bash
# Process 1 of a node. It gives the node its own /run, /var/lib and /var/log, so that all programs can use the paths they
# are made for while the host keeps nothing, and then only waits. It is started by node.sh.
#
#   node-init.sh FOLDER        under `unshare --mount --net --uts --pid --fork --mount-proc`
set -euo pipefail
folder=$1

# Pods that ask for it get mounts propagated inside the node; unshare has cut the node off from the host.
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock "$folder/var-lib" "$folder/var-log" "$folder/sysctl"
mount --bind "$folder/var-lib" /var/lib
mount --bind "$folder/var-log" /var/log

# The kubelet wants these values and writes them for the whole machine, unless it finds them there already.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  file=$folder/sysctl/$(basename "${setting%=*}")
  echo "${setting#*=}" >"$file"
  mount --bind "$file" "/proc/sys/${setting%=*}"
done

# These belong to the network namespace.
echo 1 >/proc/sys/net/ipv4/ip_forward
if [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ]; then echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables; fi
hostname "$(basename "$folder")"
ip link set lo up
touch "$folder/init.ready"

# As process 1, bash also collects the exit codes of orphans. SIGTERM must not reach it by accident; down.sh uses SIGKILL.
trap '' TERM INT HUP
while :; do sleep 3600 & wait $! || true; done
