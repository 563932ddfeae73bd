#!/usr/bin/env bash
# Uses a running cluster as scenarios do and says what works; ends with the number of checks. A failed check ends it.
#
#   check.sh                 2 minutes; CLUSTER=NAME chooses another cluster
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if foreign_kubeconfig; then die "this checks the cluster of up.sh; unset KUBECONFIG"; fi
# The whole script runs where pods, Services and cluster DNS are reachable; descriptor 7 is the way back to the host's network.
if [ -z "${ON_NETWORK:-}" ]; then exec 7</proc/self/ns/net; exec "$HERE/exec.sh" env ON_NETWORK=1 "$HERE/check.sh"; fi

NAMESPACE=kvrouter-check
URL=http://web.$NAMESPACE.svc.$DOMAIN/
passed=0
work=$(mktemp -d)
running='' # the check in progress
trap 'rm -rf "$work"; [ -z "$running" ] || echo "FAILED: $running" >&2' EXIT

k() { kubectl -n "$NAMESPACE" "$@"; }
check() { running=$1; step "$@"; running=''; passed=$((passed + 1)); }
fails() { if "$@" >"$work/refusal" 2>&1; then echo "succeeded, and should not: $*" >&2; return 1; fi; }
answers() { fetch | grep "^$1 " >/dev/null; }
fetch() { curl -sS --fail --max-time 5 "$URL"; }
equal() { [ "$1" = "$2" ] || { echo "expected '$2', found '$1'" >&2; return 1; }; }
web_pods() { k get pods -l app=web --field-selector=status.phase=Running -o "jsonpath={range .items[*]}{$1}{\"\n\"}{end}"; }

on_both_nodes() { equal "$(web_pods .spec.nodeName | sort -u | paste -sd' ')" "node-1 node-2"; }

nodes_ready() {
  kubectl wait --for=condition=Ready node --all --timeout=30s >/dev/null
  equal "$(kubectl get nodes -o name | wc -l)" 2
}

images() { "$HERE/image.sh" kvrouter.local/getent:1 /usr/bin/getent; }

deployed() {
  k apply -f "$HERE/check.yaml" >/dev/null
  k rollout status deployment/web --timeout=60s >/dev/null
  on_both_nodes
}

sidecars_run() { equal "$(web_pods '.status.initContainerStatuses[0].state.running.startedAt' | grep -c T)" 2; }

priority_set() { equal "$(web_pods .spec.priority | sort -u)" 1000; }

# kube-proxy learns of a new pod up to a second after its rollout has ended.
both_pods_answer() { until_true 10 "both pods in the Service" answers_differ; }
answers_differ() {
  for _ in {1..30}; do fetch; done >"$work/answers"
  equal "$(sort -u "$work/answers" | wc -l)" 2
}

pods_reach_each_other() {
  local pod address
  for pod in $(web_pods .metadata.name); do
    k exec "$pod" -c web -- probe get http://web/ >/dev/null
    for address in $(web_pods .status.podIP); do k exec "$pod" -c web -- probe get "http://$address:8080/" >/dev/null; done
  done
}

c_library_resolves() {
  k wait --for=condition=Complete job/resolve --timeout=30s >/dev/null
  k logs job/resolve | grep "$(k get service web -o 'jsonpath={.spec.clusterIP}')" >/dev/null
}

logs_show_requests() { k logs --selector app=web -c web | grep 'request from' >/dev/null; }

# One client asks all the time; not one of its requests may fail.
update_is_seamless() {
  touch "$work/updating"
  while [ -e "$work/updating" ]; do fetch >>"$work/answers" || echo failed; done >"$work/failures" 2>&1 &
  k patch deployment web --type=json >/dev/null \
    -p '[{"op": "replace", "path": "/spec/template/spec/containers/0/args/1", "value": "second"}]'
  k rollout status deployment/web --timeout=60s >/dev/null
  rm "$work/updating"
  wait
  equal "$(cat "$work/failures")" ""
  until_true 10 "the last pod of before to leave the Service" answers second
}

privileged_pod_is_refused() {
  fails k run privileged --image=kvrouter.local/probe:1 --privileged
  grep -q 'violates PodSecurity' "$work/refusal"
}

drained() {
  kubectl drain node-2 --ignore-daemonsets --delete-emptydir-data --timeout=60s >/dev/null 2>&1
  k rollout status deployment/web --timeout=60s >/dev/null
  equal "$(web_pods .spec.nodeName | sort -u)" node-1
  until_true 20 "DNS after the drain" fetch
}

uncordoned() {
  kubectl uncordon node-2 >/dev/null
  k rollout restart deployment/web >/dev/null
  k rollout status deployment/web --timeout=60s >/dev/null
  until_true 30 "pods on both nodes" on_both_nodes
}

api_server_comes_back() {
  "$HERE/apiserver.sh" stop
  fails kubectl --request-timeout=2s get --raw /readyz
  fetch >/dev/null
  "$HERE/apiserver.sh" start
  equal "$(k get deployment web -o 'jsonpath={.spec.replicas}')" 2
}

kubelet_comes_back() {
  "$HERE/kubelet.sh" 2 stop
  fetch >/dev/null
  "$HERE/kubelet.sh" 2 start
  k rollout restart deployment/web >/dev/null
  k rollout status deployment/web --timeout=60s >/dev/null
}

chart_installs() {
  mkdir -p "$work/chart/templates"
  printf 'apiVersion: v2\nname: check\nversion: 0.1.0\n' >"$work/chart/Chart.yaml"
  printf 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: "{{ .Release.Name }}"}\ndata: {a: b}\n' >"$work/chart/templates/map.yaml"
  helm install check-chart "$work/chart" --namespace "$NAMESPACE" --wait >/dev/null
  equal "$(k get configmap check-chart -o 'jsonpath={.data.a}')" b
  helm uninstall check-chart --namespace "$NAMESPACE" --wait >/dev/null
}

# On the host there is nothing but the forwarded port.
host_reaches_the_api() { nsenter --net=/proc/self/fd/7 -- "$BIN/kubectl" --kubeconfig "$KUBECONFIG_FILE" get --raw /readyz >/dev/null; }

cleaned() { kubectl delete -f "$HERE/check.yaml" --ignore-not-found --wait --timeout=60s >/dev/null; }

main() {
  cleaned
  check "both nodes are Ready" nodes_ready
  check "kubectl works from the host as well" host_reaches_the_api
  check "an image of a program of this machine is on both nodes" images
  check "two replicas run, one per node" deployed
  check "native sidecars run" sidecars_run
  check "a PriorityClass takes effect" priority_set
  check "both answer through the Service, by its DNS name" both_pods_answer
  check "pods reach the Service and each other, across nodes" pods_reach_each_other
  check "a program that uses the C library resolves names in a pod" c_library_resolves
  check "logs show the requests" logs_show_requests
  check "a rolling update loses no request" update_is_seamless
  check "a privileged pod is refused" privileged_pod_is_refused
  check "drain moves the pods, the Service goes on" drained
  check "uncordon takes pods back" uncordoned
  check "the API server is killed and comes back, pods go on" api_server_comes_back
  check "the kubelet is killed and comes back" kubelet_comes_back
  check "helm installs and uninstalls a chart" chart_installs
  check "everything is removed" cleaned
  echo "$passed checks passed"
}

main
