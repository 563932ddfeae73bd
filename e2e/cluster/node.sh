# shellcheck shell=bash
# What makes a node: its namespaces, the link to the other node, its cgroup, containerd, kubelet and kube-proxy. Sourced by
# up.sh and kubelet.sh. Every daemon finds its usual paths (/run/containerd, /var/lib/kubelet, ...) as the node's own.

PKI=$STATE/pki

# Debian has these as modules, which a container runtime is expected to load; kernels that have them built in need nothing.
load_modules() { modprobe --all --quiet overlay br_netfilter veth nf_tables 2>/dev/null || true; }

# Namespaces, which live as long as their process 1.
start_node() {
  local folder
  folder=$(node_folder "$1")
  mkdir -p "$folder"
  rm -f "$folder/init.ready"
  setsid --fork unshare --mount --net --uts --pid --fork --kill-child --mount-proc \
    bash "$HERE/node-init.sh" "$folder" >>"$folder/init.log" 2>&1 </dev/null 8>&-
  until_true 10 "the namespaces of node $1" test -e "$folder/init.ready" || { show_log "$1" init; return 1; }
}

# A wire between the two nodes. There is no default route: what is neither a node, a pod nor a Service is unreachable at once.
# Service addresses never reach the wire, but a node's own processes need a route before kube-proxy's rules see a packet.
connect_nodes() {
  local node other
  on_network 1 ip link add nodes type veth peer name nodes netns "$(node_pid 2)"
  for node in "${NODES[@]}"; do
    other=$((3 - node))
    on_network "$node" ip address add "$(node_address "$node")/24" dev nodes
    on_network "$node" ip link set nodes up
    on_network "$node" ip route add "$(node_pods "$other")" via "$(node_address "$other")"
    on_network "$node" ip route add "$SERVICES" dev nodes
  done
}

# A group per node, for two kubelets in one group delete each other's pods.
make_cgroups() {
  local tree node
  for tree in $(cgroup_trees); do
    pass_controllers "$tree"
    make_cgroup "$tree" "$CGROUP"
    for node in "${NODES[@]}"; do make_cgroup "$tree" "$CGROUP/$(node_name "$node")"; done
  done
}

make_cgroup() {
  mkdir -p "$1/$2"
  pass_controllers "$1/$2"
  if [ ! -e "$1/$2/cgroup.controllers" ] && [ -e "$1/$2/cpuset.cpus" ]; then   # version 1, where a new cpuset is empty
    cat "$1/cpuset.cpus" >"$1/$2/cpuset.cpus"
    cat "$1/cpuset.mems" >"$1/$2/cpuset.mems"
  fi
}

# In version 2 a group's children have the controllers that it names. Some may be refused; the kubelet says which it needs.
pass_controllers() {
  local controller controllers
  [ -e "$1/cgroup.controllers" ] || return 0
  read -r -a controllers <"$1/cgroup.controllers" || return 0   # empty
  for controller in "${controllers[@]}"; do
    echo "+$controller" 2>/dev/null >"$1/cgroup.subtree_control" || true
  done
}

start_containerd() {
  local folder
  folder=$(node_folder "$1")
  mkdir -p "$folder/cni"
  cat >"$folder/cni/10-bridge.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true, "ipMasq": false,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(node_pods "$1")"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
  # restrict_oom_score_adj: without CAP_SYS_RESOURCE, runc cannot lower a container's score and fails.
  cat >"$folder/containerd.toml" <<TOML
version = 3
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "kvrouter.local/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "$folder/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
TOML
  start "$1" containerd "$BIN/containerd" --config "$folder/containerd.toml"
}

await_containerd() {
  until_true 30 "containerd of node $1" in_node "$1" "$BIN/ctr" version || { show_log "$1" containerd; return 1; }
}

# No image is ever collected or evicted for: what was imported cannot be pulled again.
start_kubelet() {
  local folder name
  folder=$(node_folder "$1")
  name=$(node_name "$1")
  : >"$folder/resolv.conf"
  cat >"$folder/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/$name.crt
tlsPrivateKeyFile: $PKI/$name.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: [$DNS_SERVICE]
clusterDomain: $DOMAIN
resolvConf: $folder/resolv.conf
volumePluginDir: /var/lib/kubelet/volume-plugins
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP/$name
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
enforceNodeAllocatable: []
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
imageGCHighThresholdPercent: 100
YAML
  start "$1" kubelet "$BIN/kubelet" --config "$folder/kubelet.yaml" --kubeconfig "$PKI/$name.kubeconfig" --hostname-override "$name" \
    --node-ip "$(node_address "$1")"
}

# The sizes of the connection table belong to the machine: 0 leaves them alone.
start_kube_proxy() {
  local folder
  folder=$(node_folder "$1")
  cat >"$folder/kube-proxy.yaml" <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: $(node_name "$1")
clientConnection: {kubeconfig: $PKI/kube-proxy.kubeconfig}
clusterCIDR: $PODS
conntrack: {maxPerCore: 0, min: 0}
oomScoreAdj: 0
YAML
  start "$1" kube-proxy "$BIN/kube-proxy" --config "$folder/kube-proxy.yaml"
}

each_node() { local node; for node in "${NODES[@]}"; do "$1" "$node"; done; }

await_nodes() {
  until_true 60 "the nodes to register" ours get node "$(node_name 1)" "$(node_name 2)" || { show_log 1 kubelet; return 1; }
  ours wait --for=condition=Ready node --all --timeout=60s >/dev/null || { show_log 1 kubelet; show_log 2 kubelet; return 1; }
}
