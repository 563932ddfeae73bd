# shellcheck shell=bash
# The cluster's certificates and kubeconfigs, made with openssl in STATE/pki. Sourced by up.sh.

PKI=$STATE/pki
DAYS=3650

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

# certificate FILE SUBJECT USES [SUBJECT-ALTERNATIVE-NAMES]
certificate() {
  local file=$PKI/$1 names=()
  [ $# -lt 4 ] || names=(-addext "subjectAltName=$4")
  new_key "$file.key"
  openssl req -x509 -new -config "$PKI/openssl.cnf" -key "$file.key" -subj "$2" -days "$DAYS" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" \
    -addext basicConstraints=critical,CA:FALSE -addext keyUsage=critical,digitalSignature,keyEncipherment \
    -addext "extendedKeyUsage=$3" "${names[@]}" -out "$file.crt"
}

# kubeconfig FILE CERTIFICATE SERVER: self-contained, so that it can be copied.
kubeconfig() {
  (umask 077 && cat >"$1") <<YAML
apiVersion: v1
kind: Config
clusters:
  - name: $CLUSTER
    cluster: {server: "$3", certificate-authority-data: $(base64 -w0 "$PKI/ca.crt")}
users:
  - name: $2
    user: {client-certificate-data: $(base64 -w0 "$PKI/$2.crt"), client-key-data: $(base64 -w0 "$PKI/$2.key")}
contexts:
  - name: $CLUSTER
    context: {cluster: $CLUSTER, user: $2}
current-context: $CLUSTER
YAML
}

# Needs $PORT. 127.0.0.1:PORT is the API server in node 1 and the forward to it on the host: one kubeconfig for both.
make_certificates() {
  local node name server
  server=https://$(node_address 1):$PORT
  mkdir -p "$PKI"
  printf '[req]\ndistinguished_name = subject\n[subject]\n' >"$PKI/openssl.cnf"
  new_key "$PKI/ca.key"
  openssl req -x509 -new -config "$PKI/openssl.cnf" -key "$PKI/ca.key" -subj "/CN=$CLUSTER" -days "$DAYS" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,digitalSignature,keyCertSign,cRLSign -out "$PKI/ca.crt"
  new_key "$PKI/service-account.key"
  openssl pkey -in "$PKI/service-account.key" -pubout -out "$PKI/service-account.pub"

  certificate admin "/O=system:masters/CN=admin" clientAuth
  certificate kubelet-client "/O=system:masters/CN=kube-apiserver-kubelet-client" clientAuth
  for name in kube-controller-manager kube-scheduler kube-proxy; do
    certificate "$name" "/CN=system:$name" clientAuth
    kubeconfig "$PKI/$name.kubeconfig" "$name" "$server"
  done
  for node in "${NODES[@]}"; do
    name=$(node_name "$node")
    certificate "$name" "/O=system:nodes/CN=system:node:$name" clientAuth,serverAuth "DNS:$name,IP:$(node_address "$node")"
    kubeconfig "$PKI/$name.kubeconfig" "$name" "$server"
  done
  name=kubernetes.default
  certificate kube-apiserver "/CN=kube-apiserver" serverAuth \
    "DNS:kubernetes,DNS:$name,DNS:$name.svc,DNS:$name.svc.$DOMAIN,DNS:localhost,IP:127.0.0.1,IP:$(node_address 1),IP:$API_SERVICE"
  kubeconfig "$KUBECONFIG_FILE" admin "https://127.0.0.1:$PORT"
}
