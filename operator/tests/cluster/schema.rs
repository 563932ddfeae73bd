//! What the API server refuses by itself, with the words that a person reads.
//!
//! Every row is a mistake that somebody could plausibly make; the message must
//! name the field and say what would do.

use crate::control_plane::ControlPlane;

/// The smallest pool.
pub(crate) const POOL: &str = "\
apiVersion: kvrouter.dev/v1alpha1
kind: InferencePool
metadata: {name: qwen}
spec:
  model: {name: Qwen/Qwen3-8B}
  selector: {matchLabels: {app: qwen}}
  targetPorts: [{number: 8000}]
";
/// The smallest router.
pub(crate) const ROUTER: &str = "\
apiVersion: kvrouter.dev/v1alpha1
kind: KvRouter
metadata: {name: qwen}
spec:
  poolRef: {name: qwen}
";

/// Applies `manifest` as people do; the message, if it is refused.
pub(crate) fn apply(manifest: &str) -> Result<String, String> {
    let plane = ControlPlane::shared();
    let (success, said) = plane.kubectl(&["apply", "--dry-run=server", "-f", "-"], Some(manifest));
    if success { Ok(said) } else { Err(said) }
}

#[track_caller]
fn refused(why: &str, manifest: &str, field: &str, hint: &str) {
    match apply(manifest) {
        Ok(said) => panic!("{why}: accepted: {said}"),
        Err(said) => {
            assert!(said.contains(field), "{why}: no `{field}` in: {said}");
            assert!(said.contains(hint), "{why}: no `{hint}` in: {said}");
        }
    }
}

/// `base` with more lines of its spec.
pub(crate) fn with(base: &str, lines: &str) -> String {
    lines.lines().fold(base.to_owned(), |text, line| format!("{text}  {line}\n"))
}

fn pool(why: &str, lines: &str, field: &str, hint: &str) {
    refused(why, &with(POOL, lines), field, hint);
}

fn router(why: &str, lines: &str, field: &str, hint: &str) {
    refused(why, &with(ROUTER, lines), field, hint);
}

#[test]
fn the_smallest_manifests_are_taken() {
    for manifest in [POOL, ROUTER] {
        apply(manifest).expect("accepted");
    }
}

#[test]
fn wrong_pools_are_refused_with_field_and_hint() {
    let target = "targetPorts";
    let replaced = |from: &str, to: &str| POOL.replace(from, to);
    refused("no model", &replaced("  model: {name: Qwen/Qwen3-8B}\n", ""), "spec.model", "Required value");
    refused(
        "no selector",
        &replaced("  selector: {matchLabels: {app: qwen}}\n", ""),
        "spec.selector",
        "name both, or gatewayPoolRef instead of them",
    );
    refused(
        "no port",
        &replaced("  targetPorts: [{number: 8000}]\n", ""),
        "spec.targetPorts",
        "name the ports that engines serve requests on",
    );
    let reference = "gatewayPoolRef: {name: gw}";
    pool("both", reference, "spec.gatewayPoolRef", "remove it, or both of them");
    refused(
        "both, without ports",
        &with(&replaced("  targetPorts: [{number: 8000}]\n", ""), reference),
        "spec.gatewayPoolRef",
        "remove it, or both of them",
    );
    let alone = replaced("  selector: {matchLabels: {app: qwen}}\n  targetPorts: [{number: 8000}]\n", "");
    apply(&with(&alone, reference)).expect("a reference alone");
    let (name, namespace) = ("gatewayPoolRef: {name: ''}", "gatewayPoolRef: {name: gw, namespace: other}");
    refused("a reference to nothing", &with(&alone, name), "spec.gatewayPoolRef.name", "at least 1");
    refused(
        "one of another namespace",
        &with(&alone, namespace),
        "spec.gatewayPoolRef.namespace",
        "unknown field",
    );
    // With the ports of another object, it is the operator that compares.
    apply(&with(&alone, &format!("{reference}\ndpSize: 8\nkvEvents: {{port: 8000}}")))
        .expect("its ports are not known");
    refused("an empty selector", &replaced("{app: qwen}", "{}"), "spec.selector.matchLabels", "at least 1");
    refused("port 0", &replaced("number: 8000", "number: 0"), target, "greater than or equal to 1");
    refused(
        "no such port",
        &replaced("number: 8000", "number: 80000"),
        target,
        "less than or equal to 65535",
    );
    refused(
        "a port twice",
        &replaced("[{number: 8000}]", "[{number: 8000}, {number: 8000}]"),
        target,
        "unique",
    );
    refused("a port by name", &replaced("number: 8000", "number: http"), target, "must be of type integer");
    refused(
        "a long name",
        &replaced("name: qwen}", &format!("name: {}}}", "q".repeat(51))),
        "metadata.name",
        "at most 50",
    );
    refused("a dotted name", &replaced("name: qwen}", "name: qwen.3}"), "metadata.name", "DNS label");
}

#[test]
fn contradictions_of_a_pool_are_refused_with_field_and_hint() {
    pool("no block", "blockSize: 0", "spec.blockSize", "greater than or equal to 1");
    pool("a huge block", "blockSize: 70000", "spec.blockSize", "less than or equal to 65536");
    pool("an engine we do not know", "engine: TensorRT", "spec.engine", "\"VLLM\"");
    pool(
        "an unknown role",
        "roles: [{name: Draft, selector: {matchLabels: {r: d}}}]",
        "spec.roles[0].name",
        "\"Prefill\"",
    );
    let twice = "roles: [{name: Decode, selector: {matchLabels: {r: a}}}, {name: Decode, selector: {matchLabels: {r: b}}}]";
    pool("a role twice", twice, "spec.roles", "may be named once");
    pool("a random seed", "hashSeed: {value: random}", "spec.hashSeed.value", "must be of type integer");
    pool("a seed beyond Python's", "hashSeed: {value: 4294967296}", "spec.hashSeed.value", "4294967295");
    pool("ports alike", "kvEvents: {port: 5557, replayPort: 5557}", "spec.kvEvents", "must differ");
    pool("events on the engine's port", "kvEvents: {port: 8000}", "spec.kvEvents", "different ports");
    pool(
        "a bridge without workloads",
        "kvEvents: {bridge: Inject}",
        "spec.kvEvents.bridge",
        "needs spec.workloads",
    );
    let zmq = "workloads: [{kind: Deployment, name: a}]\nkvEvents: {transport: ZMQ, bridge: Inject}";
    pool("a bridge without NATS", zmq, "spec.kvEvents.bridge", "needs transport: NATS");
    let nats = "kvEvents: {transport: ZMQ, nats: {url: 'nats://a:4222'}}";
    pool("a broker without NATS", nats, "spec.kvEvents.nats", "change the transport");
    pool(
        "a broker of another kind",
        "kvEvents: {nats: {url: 'http://a'}}",
        "spec.kvEvents.nats.url",
        "must be nats://host:port or tls://host:port",
    );
    for url in ["nats://a:port", "nats://a:b:4222", "tls://", "nats://a/b", ""] {
        let nats = format!("kvEvents: {{nats: {{url: '{url}'}}}}");
        pool(url, &nats, "spec.kvEvents.nats.url", "must be nats://host:port or tls://host:port");
    }
    for url in ["nats://nats.messaging.svc:4222", "tls://nats", "nats://[fd00::1]:4222"] {
        let nats = format!("kvEvents: {{nats: {{url: '{url}'}}}}");
        apply(&with(POOL, &nats)).expect(url);
    }
    let workloads = "workloads: [{kind: Deployment, name: a}, {kind: Deployment, name: a}]";
    pool("a workload twice", workloads, "spec.workloads", "named twice");
    pool(
        "a kind that is not patched",
        "workloads: [{kind: DaemonSet, name: a}]",
        "spec.workloads[0].kind",
        "\"StatefulSet\"",
    );
    pool("a field we do not know", "tokenizerless: 1", "spec.tokenizerless", "unknown field");
    let tokenizer =
        POOL.replace("{name: Qwen/Qwen3-8B}", "{name: a, tokenizer: {path: /a, configMap: {name: b}}}");
    refused("two tokenizers", &tokenizer, "spec.model.tokenizer", "exactly one of");
}

#[test]
fn wrong_routers_are_refused_with_field_and_hint() {
    refused(
        "no pool",
        &ROUTER.replace("  poolRef: {name: qwen}\n", "  replicas: 1\n"),
        "spec.poolRef",
        "Required value",
    );
    let elsewhere = ROUTER.replace("{name: qwen}\n", "{name: qwen, namespace: other}\n");
    refused("a pool of another namespace", &elsewhere, "spec.poolRef.namespace", "unknown field");
    router("a misspelt field", "overlapWeight: {default: 1}", "spec.overlapWeight", "unknown field");
    router("no such policy", "policy: Fastest", "spec.policy", "\"CachePlusLoad\"");
    router("a policy in lower case", "policy: kv-aware", "spec.policy", "\"KvAware\"");
    router("an unquoted on", "inFlightCredit: on", "spec.inFlightCredit", "\"Enabled\"");
    router("an unquoted off", "inFlightCredit: off", "spec.inFlightCredit", "\"Disabled\"");
    router(
        "a weight below zero",
        "overlapWeights: {default: -1}",
        "spec.overlapWeights.default",
        "greater than or equal to 0",
    );
    router(
        "a weight in words",
        "overlapWeights: {default: high}",
        "spec.overlapWeights.default",
        "must be of type number",
    );
    router(
        "load without its policy",
        "policy: KvAware\nloadWeights: {queue: 1}",
        "spec.loadWeights",
        "CachePlusLoad",
    );
    router(
        "its own shadow",
        "policy: KvAware\nshadowPolicies: [KvAware]",
        "spec.shadowPolicies",
        "is the real one",
    );
    router("minus one replica", "replicas: -1", "spec.replicas", "greater than or equal to 0");
    router(
        "no freshness",
        "freshness: {budgetSeconds: 0}",
        "spec.freshness.budgetSeconds",
        "greater than or equal to 3",
    );
    router("service port 0", "service: {port: 0}", "spec.service.port", "greater than or equal to 1");
    router("an external name", "service: {type: ExternalName}", "spec.service.type", "\"LoadBalancer\"");
    let tenancy = |more: &str| format!("tenancy: {{saltSecretRef: {{name: a, key: b}}, {more}}}");
    let header = "spec.tenancy.header";
    router("a header of a connection", &tenancy("header: HOST"), header, "cannot name a tenant");
    router("a header with a blank", &tenancy("header: a b"), header, "letters, digits");
    router("no header", &tenancy("header: ''"), header, "at least 1");
    router("an unquoted no", &tenancy("withoutHeader: no"), "spec.tenancy.withoutHeader", "\"Share\"");
    router("no secret", "tenancy: {header: X-Tenant}", "spec.tenancy.saltSecretRef", "Required value");
}

#[test]
fn a_router_keeps_its_pool() {
    let plane = ControlPlane::shared();
    plane.kubectl_ok(&["create", "namespace", "keeps-pool"], None);
    plane.kubectl_ok(&["apply", "-n", "keeps-pool", "-f", "-"], Some(ROUTER));
    let other = ROUTER.replace("poolRef: {name: qwen}", "poolRef: {name: other}");
    let (success, said) = plane.kubectl(&["apply", "-n", "keeps-pool", "-f", "-"], Some(&other));
    assert!(!success && said.contains("spec.poolRef") && said.contains("make another KvRouter"), "{said}");
}
