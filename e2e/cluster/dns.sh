# shellcheck shell=bash
# Cluster DNS: CoreDNS as the Service kube-dns, one pod per node. Sourced by up.sh.

apply_dns() {
  local image
  image=kvrouter.local/coredns:$("$BIN/coredns" -version | sed -nE 's/^CoreDNS-//p')
  "$HERE/image.sh" "$image" "$BIN/coredns"
  sed "s#@IMAGE@#$image#" "$HERE/coredns.yaml" | ours apply -f - >/dev/null
}

await_dns() {
  ours -n kube-system rollout status deployment/coredns --timeout=60s >/dev/null ||
    { ours -n kube-system describe pod -l k8s-app=kube-dns | tail -n 25 >&2; return 1; }
}

# What exec.sh puts in the place of /etc/resolv.conf.
resolver() { printf 'nameserver %s\nsearch default.svc.%s svc.%s %s\noptions ndots:5\n' "$DNS_SERVICE" "$DOMAIN" "$DOMAIN" "$DOMAIN"; }
