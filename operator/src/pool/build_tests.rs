//! What workloads should have, in rows.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kvrouter_crds::InferencePool;
use serde_json::json;

use super::*;
use crate::pool::observe::{WorkloadFacts, WorkloadSeen};
use crate::pool::validate::validate;
use crate::sample::{around_pool, flags, merged, pool};

fn inject(spec: Value) -> InferencePool {
    let workload = json!({"kind": "Deployment", "name": "qwen"});
    let base = json!({
        "workloads": [workload],
        "kvEvents": {"bridge": "Inject", "nats": {"url": "nats://n:4222", "credentialsSecretRef": {"name": "c", "key": "x.creds"}}},
    });
    pool(merged(base, spec))
}

/// The patch of the pool's workload with this template.
fn patch_of(pool: &InferencePool, template: Value, flags: &ChildFlags) -> WantedPatch {
    let base = json!({
        "metadata": {"labels": {"app": "qwen"}},
        "spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]},
    });
    let template = serde_json::from_value(merged(base, template)).expect("a template");
    let facts =
        WorkloadFacts { uid: "u".into(), resource_version: "7".into(), template, ..Default::default() };
    let mut observed = around_pool(Vec::new());
    observed.workloads = vec![WorkloadSeen { reference: pool.spec.workloads[0].clone(), found: Some(facts) }];
    let valid = validate(pool, &observed, flags).expect("in order");
    build(&valid, flags).remove(0)
}

fn engine(env: Value) -> Value {
    json!({"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}], "env": env}]}})
}

#[test]
fn a_seed_is_set_where_it_lacks_and_never_over_anothers() {
    let observe = pool(
        json!({"workloads": [{"kind": "Deployment", "name": "qwen"}], "hashSeed": {"policy": "Observe"}}),
    );
    let enforce = |value: u32| inject(json!({"hashSeed": {"value": value}}));
    let check = |why: &str, pool: &InferencePool, template: Value, expected: Option<&str>| {
        assert_eq!(patch_of(pool, template, &flags()).seed.as_deref(), expected, "{why}");
    };
    let set = |value: &str| engine(json!([{"name": "PYTHONHASHSEED", "value": value}]));
    let ours = |value: &str| {
        merged(set(value), json!({"metadata": {"annotations": {"kvrouter.dev/hash-seed": value}}}))
    };
    check("absent", &enforce(0), json!({}), Some("0"));
    check("there", &enforce(0), set("0"), None);
    check("the user's own", &enforce(0), set("7"), None);
    check("random is the user's too", &enforce(0), set("random"), None);
    check("by reference", &enforce(0), engine(json!([{"name": "PYTHONHASHSEED", "valueFrom": {}}])), None);
    check("ours follows the spec", &enforce(9), ours("0"), Some("9"));
    check("ours is right", &enforce(0), ours("0"), None);
    check("only looked at", &observe, json!({}), None);
    let script = json!([{"name": "engine", "command": ["sh", "-c", "PYTHONHASHSEED=1 vllm"], "ports": [{"containerPort": 8000}]}]);
    check("in a script", &enforce(0), json!({"spec": {"containers": script}}), None);
    assert_eq!(patch_of(&observe, json!({}), &flags()).digest, None, "nothing is asked for");
}

#[test]
fn a_bridge_is_replaced_by_the_spec_and_never_by_the_operator() {
    let settings = patch_of(&inject(json!({})), json!({}), &flags()).bridge.expect("absent").settings;
    let with = |annotation: Option<&str>, image: &str| {
        json!({
            "metadata": {"annotations": {"kvrouter.dev/bridge-settings": annotation}},
            "spec": {"initContainers": [{"name": "kvrouter-bridge", "image": image}]},
        })
    };
    let now = "kvrouter/kv-router:test";
    let check = |why: &str, template: Value, lacks: bool, outdated: bool| {
        let patch = patch_of(&inject(json!({})), merged(json!({}), template), &flags());
        assert_eq!((patch.bridge.is_some(), patch.outdated_bridge.is_some()), (lacks, outdated), "{why}");
    };
    check("absent", json!({}), true, false);
    check("ours and right", with(Some(&settings), now), false, false);
    check("ours, of older settings", with(Some("0"), now), true, false);
    check("ours, of another release", with(Some(&settings), "old"), false, true);
    check("the user's own", with(None, "whatever"), false, false);
}

#[test]
fn the_digest_follows_the_spec_and_not_the_release() {
    let newer = ChildFlags { router_image: "kvrouter/kv-router:next".into(), ..flags() };
    let digest = |pool: &InferencePool, flags: &ChildFlags| patch_of(pool, json!({}), flags).digest;
    let base = digest(&inject(json!({})), &flags());
    assert!(base.is_some(), "something is asked for");
    assert_eq!(digest(&inject(json!({})), &newer), base, "another release");
    let applied = engine(json!([{"name": "PYTHONHASHSEED", "value": "0"}]));
    assert_eq!(patch_of(&inject(json!({})), applied, &flags()).digest, base, "whatever is there");
    for change in [
        json!({"hashSeed": {"value": 1}}),
        json!({"blockSize": 32}),
        json!({"kvEvents": {"port": 6000}}),
        json!({"dpSize": 2}),
        json!({"targetPorts": [{"number": 8000}, {"number": 8001}]}),
    ] {
        assert_ne!(digest(&inject(change.clone()), &flags()), base, "{change}");
    }
    for change in [json!({"pageSizePolicy": "RequireParity"}), json!({"model": {"tokenizer": null}})] {
        assert_eq!(digest(&inject(change.clone()), &flags()), base, "{change}");
    }
}

/// Engines must not restart because the operator was upgraded.
#[test]
fn the_digest_of_a_usual_bridge_is_that_of_earlier_releases() {
    let bridge = patch_of(&inject(json!({})), json!({}), &flags()).bridge.expect("absent");
    assert_eq!(bridge.settings, "21d9ff73abd90eb2");
}

/// On the host's network its port would be the node's, of which other engines' bridges want one too.
#[test]
fn a_bridge_on_the_hosts_network_opens_no_port() {
    let on_host = json!({"spec": {"hostNetwork": true}});
    let container = patch_of(&inject(json!({})), on_host, &flags()).bridge.expect("absent").container;
    assert!(container.ports.is_none() && container.liveness_probe.is_none());
    assert!(container.env.iter().flatten().all(|variable| variable.name != "KVROUTER_LISTEN_METRICS"));
}

#[test]
fn the_bridge_is_probed_and_scraped_by_the_name_of_its_port() {
    let container = patch_of(&inject(json!({})), json!({}), &flags()).bridge.expect("absent").container;
    let env = container.env.expect("variables");
    let listens =
        |variable: &k8s_openapi::api::core::v1::EnvVar| variable.value.as_deref() == Some("0.0.0.0:9092");
    assert!(env.iter().any(|it| it.name == "KVROUTER_LISTEN_METRICS" && listens(it)), "{env:?}");
    let ports = serde_json::to_value(container.ports).expect("JSON");
    assert_eq!(ports, json!([{"name": "bridge-metrics", "containerPort": 9092, "protocol": "TCP"}]));
    let probe = container.liveness_probe.expect("a probe").http_get.expect("by HTTP");
    assert_eq!(
        (probe.path.as_deref(), probe.port),
        (Some("/livez"), IntOrString::String("bridge-metrics".into()))
    );
    assert!(
        container.readiness_probe.is_none() && container.startup_probe.is_none(),
        "engines do not wait for it"
    );
}

#[test]
fn the_bridge_follows_every_rank_of_every_port() {
    let check = |spec: Value, expected: &[&str], memory: (&str, &str)| {
        let bridge = patch_of(&inject(spec.clone()), json!({}), &flags()).bridge.expect("absent");
        let args = bridge.container.args.expect("arguments");
        let about: Vec<&String> =
            args.iter().filter(|it| it.starts_with("--worker") || it.starts_with("--dp-size")).collect();
        assert_eq!(about, expected, "{spec}");
        let resources = serde_json::to_value(bridge.container.resources).expect("JSON");
        let found = (&resources["requests"]["memory"], &resources["limits"]["memory"]);
        assert_eq!(found, (&json!(memory.0), &json!(memory.1)), "{spec}");
    };
    let one = "--worker=$(KVROUTER_POD_IP):8000";
    check(json!({}), &[one], ("64Mi", "512Mi"));
    check(json!({"dpSize": 4}), &[one, "--dp-size=4"], ("256Mi", "2048Mi"));
    let ports = json!({"targetPorts": [{"number": 8000}, {"number": 8100}], "dpSize": 2});
    let expected = [one, "--worker=$(KVROUTER_POD_IP):8100", "--dp-size=2"];
    check(ports, &expected, ("256Mi", "2048Mi"));
}

#[test]
fn the_bridge_is_a_native_sidecar_with_the_pools_settings() {
    let spec = json!({"identitySeedSecretRef": {"name": "id", "key": "seed"}, "model": {"name": "a$(B)"}});
    let patch = patch_of(&inject(spec), json!({}), &flags());
    let bridge = patch.bridge.clone().expect("absent");
    let args = bridge.container.args.expect("arguments").join(" ");
    for part in [
        "bridge --worker=$(KVROUTER_POD_IP):8000",
        "--kv-events=tcp://127.0.0.1:5557",
        "--kv-replay=tcp://127.0.0.1:5657",
        "--nats-url=nats://n:4222",
        "--nats-credentials=/etc/kvrouter-nats/x.creds",
        "--namespace=models",
        "--pool=qwen",
        "--model=a$$(B)",
        "--revision=",
        "--block-size=16",
        "--identity-seed-file=/etc/kvrouter-identity/seed",
    ] {
        assert!(args.contains(part), "{part} in {args}");
    }
    assert_eq!(bridge.container.restart_policy.as_deref(), Some("Always"));
    let body = patch.strategic_merge();
    assert_eq!(body["metadata"]["resourceVersion"], "7");
    assert_eq!(body["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"], "0");
    assert_eq!(body["spec"]["template"]["spec"]["initContainers"][0]["name"], "kvrouter-bridge");
    assert_eq!(body["spec"]["template"]["spec"]["volumes"][1]["secret"]["secretName"], "c");
    assert_eq!(body["spec"]["template"]["metadata"]["annotations"]["kvrouter.dev/hash-seed"], "0");
}
