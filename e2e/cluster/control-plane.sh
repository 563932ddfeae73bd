# shellcheck shell=bash
# The control plane: etcd, API server, controller manager and scheduler, all on node 1. Sourced by up.sh and apiserver.sh.
# Needs $PORT.

PKI=$STATE/pki

# Nothing is synced to disk: the store lives as long as the cluster.
start_etcd() {
  start 1 etcd "$BIN/etcd" --name "$CLUSTER" --data-dir "$(node_folder 1)/etcd-data" --unsafe-no-fsync --log-level warn \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster "$CLUSTER=http://127.0.0.1:2380"
}

# InternalIP: no resolver knows the nodes' names, and `kubectl logs` and `exec` would look them up.
start_apiserver() {
  start 1 kube-apiserver "$BIN/kube-apiserver" --etcd-servers http://127.0.0.1:2379 \
    --bind-address 0.0.0.0 --secure-port "$PORT" --advertise-address "$(node_address 1)" --service-cluster-ip-range "$SERVICES" \
    --client-ca-file "$PKI/ca.crt" --tls-cert-file "$PKI/kube-apiserver.crt" --tls-private-key-file "$PKI/kube-apiserver.key" \
    --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$PKI/service-account.pub" \
    --service-account-signing-key-file "$PKI/service-account.key" --authorization-mode Node,RBAC \
    --enable-admission-plugins NodeRestriction --allow-privileged --kubelet-preferred-address-types InternalIP \
    --kubelet-certificate-authority "$PKI/ca.crt" --kubelet-client-certificate "$PKI/kubelet-client.crt" \
    --kubelet-client-key "$PKI/kubelet-client.key"
}

start_controllers() {
  start 1 kube-controller-manager "$BIN/kube-controller-manager" --kubeconfig "$PKI/kube-controller-manager.kubeconfig" \
    --leader-elect=false --use-service-account-credentials --flex-volume-plugin-dir /var/lib/kubelet/volume-plugins --root-ca-file "$PKI/ca.crt" \
    --service-account-private-key-file "$PKI/service-account.key" \
    --cluster-signing-cert-file "$PKI/ca.crt" --cluster-signing-key-file "$PKI/ca.key"
  start 1 kube-scheduler "$BIN/kube-scheduler" --kubeconfig "$PKI/kube-scheduler.kubeconfig" --leader-elect=false
}

# From 127.0.0.1 on the host to node 1: a Unix socket crosses network namespaces. Both ends are processes of node 1, the outer
# one with the host's network, so they end with the node.
start_forward() {
  start 1 socat-inside socat UNIX-LISTEN:/run/apiserver.sock,fork "TCP:127.0.0.1:$PORT"
  start_outside 1 socat-outside socat "TCP-LISTEN:$PORT,bind=127.0.0.1,reuseaddr,fork" UNIX-CONNECT:/run/apiserver.sock
}

start_control_plane() { start_etcd && start_apiserver && start_controllers && start_forward; }

await_apiserver() {
  until_true 60 "the API server" ours get --raw /readyz || { show_log 1 etcd; show_log 1 kube-apiserver; return 1; }
}
