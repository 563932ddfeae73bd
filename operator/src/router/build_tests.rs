//! What a router consists of: names, limits, and what rolls its pods.

use std::path::PathBuf;

use kvrouter_crds::InferencePool;
use kvrouter_crds::config::{LiveSettings, RouterConfig, WithoutHeader};
use serde_json::{Value, json};

use super::*;
use crate::router::validate::validate;
use crate::sample::{around_router, flags, pool, router};

fn built(spec: Value, pool: InferencePool) -> Desired {
    let valid = validate(&router(spec), &around_router(Some(pool)), &flags()).expect("in order");
    build(&valid, &flags())
}

fn text(config_map: &ConfigMap, key: &str) -> String {
    config_map.data.as_ref().and_then(|data| data.get(key)).expect("the key").clone()
}

#[test]
fn both_settings_are_what_the_types_read() {
    let spec = json!({
        "policy": "KvAware", "overlapWeights": {"default": 2.5, "decode": 1}, "imageWeight": 7,
        "shadowPolicies": ["LMetric"], "inFlightCredit": "Disabled", "forwardTokenIds": "WhenConfirmed",
        "tenancy": {"header": "X-Team", "saltSecretRef": {"name": "t", "key": "salt"}},
    });
    let nats = json!({"url": "tls://n:4222", "credentialsSecretRef": {"name": "c", "key": "user.creds"}});
    let pool = pool(json!({
        "model": {"tokenizer": {"path": null, "image": {"reference": "r/tok:1", "path": "qwen"}}},
        "kvEvents": {"nats": nats}, "identitySeedSecretRef": {"name": "i", "key": "seed"},
        "pageSizePolicy": "RequireParity",
    }));
    let desired = built(spec, pool);
    let start = text(&desired.start_settings, START_SETTINGS_KEY);
    let live = text(&desired.live_settings, LIVE_SETTINGS_KEY);
    let start: RouterConfig =
        serde_json::from_value(yaml::documents(&start).expect("YAML").remove(0)).expect("start");
    let live: LiveSettings =
        serde_json::from_value(yaml::documents(&live).expect("YAML").remove(0)).expect("live");
    assert_eq!(start.model.tokenizer.map(|it| it.path), Some("/var/lib/kvrouter/tokenizer/qwen".into()));
    let nats = start.kv_events.nats.expect("a broker");
    assert_eq!(nats.credentials_file, Some("/etc/kvrouter-nats/user.creds".into()));
    assert_eq!(start.identity_seed_file, Some("/etc/kvrouter-identity/seed".into()));
    let tenancy = start.tenancy.expect("tenants");
    assert_eq!((tenancy.header.as_str(), tenancy.without_header), ("X-Team", WithoutHeader::Refuse));
    assert_eq!(tenancy.salt_secret_file, PathBuf::from("/etc/kvrouter-tenancy/salt"));
    let kubernetes = start.discovery.kubernetes.expect("pods");
    assert_eq!(kubernetes.live_settings_config_map.as_deref(), Some("chat-router-live"));
    assert_eq!((kubernetes.namespace.as_str(), kubernetes.target_ports), ("models", vec![8000]));
    assert_eq!(live.overlap_weights.map(|weights| weights.default), Some(2.5));
    assert_eq!(live.image_weight, Some(7.0));
    assert_eq!(live.page_size_policy, Some(kvrouter_crds::config::PageSizePolicy::RequireParity));
    assert_eq!(live.forward_token_ids, Some(kvrouter_crds::config::ForwardTokenIds::WhenConfirmed));
}

#[test]
fn the_default_of_the_image_weight_is_the_schemas() {
    let default = router(json!({})).spec.image_weight;
    let desired = built(json!({}), pool(json!({})));
    assert!(text(&desired.start_settings, START_SETTINGS_KEY).contains(&format!("imageWeight: {default:?}")));
}

#[test]
fn only_start_settings_roll_the_pods() {
    let before = built(json!({}), pool(json!({})));
    let template = |desired: &Desired| desired.deployment.spec.as_ref().map(|spec| spec.template.clone());
    for (why, change) in [
        ("weights", json!({"overlapWeights": {"default": 3}})),
        ("policy", json!({"policy": "KvAware"})),
        ("sessions", json!({"sessionAffinity": {"mode": "Both"}})),
        ("freshness", json!({"freshness": {"budgetSeconds": 5}})),
        ("overload", json!({"overload": {"maxQueuedTokens": 9}})),
        ("credit", json!({"inFlightCredit": "Disabled"})),
        ("pictures", json!({"imageWeight": 1})),
        ("shadows", json!({"shadowPolicies": ["LMetric"]})),
        ("forwarding", json!({"forwardTokenIds": "WhenConfirmed"})),
        ("load", json!({"loadWeights": {"queue": 1}})),
    ] {
        let after = built(change, pool(json!({})));
        assert_eq!(template(&after), template(&before), "{why}");
        assert_eq!(after.start_digest, before.start_digest, "{why}");
        assert_ne!(after.live_digest, before.live_digest, "{why}");
    }
    let parity = built(json!({}), pool(json!({"pageSizePolicy": "RequireParity"})));
    assert_eq!(
        (template(&parity), parity.live_digest != before.live_digest),
        (template(&before), true),
        "parity"
    );
    let secret = json!({"tenancy": {"saltSecretRef": {"name": "t", "key": "salt"}}});
    let tenants = built(secret, pool(json!({})));
    assert_ne!(template(&tenants), template(&before), "tenants");
    for (why, change) in [
        ("block", json!({"blockSize": 32})),
        ("model", json!({"model": {"name": "other"}})),
        ("ports", json!({"targetPorts": [{"number": 9000}]})),
        ("transport", json!({"kvEvents": {"transport": "ZMQ"}})),
    ] {
        let after = built(json!({}), pool(change));
        assert_ne!(template(&after), template(&before), "{why}");
        assert_ne!(after.start_settings.metadata.name, before.start_settings.metadata.name, "{why}");
    }
}

#[test]
fn pods_live_as_long_as_routers_drain() {
    let desired = built(json!({"drainTimeoutSeconds": 3600}), pool(json!({})));
    let start = text(&desired.start_settings, START_SETTINGS_KEY);
    assert!(start.contains("drainTimeoutSeconds: 3600"), "{start}");
    let spec = desired.deployment.spec.expect("a spec");
    let deadline = spec.progress_deadline_seconds;
    let pod = spec.template.spec.expect("a pod");
    assert_eq!(pod.termination_grace_period_seconds, Some(5 + 3600 + 15));
    assert_eq!(deadline, Some(5 + 3600 + 15 + 40), "a new router may wait for one that drains");
}

#[test]
fn the_pods_keep_to_the_contract() {
    let desired = built(json!({"replicas": 3}), pool(json!({})));
    let deployment = desired.deployment.spec.expect("a spec");
    let pod = deployment.template.spec.expect("a pod");
    let container = &pod.containers[0];
    assert_eq!(deployment.progress_deadline_seconds, Some(180));
    assert_eq!(pod.termination_grace_period_seconds, Some(5 + 120 + 15), "longer than draining");
    assert_eq!(
        container.command.as_ref().map(|words| words.join(" ")).as_deref(),
        Some("kv-router serve --config /etc/kvrouter/config.yaml")
    );
    let path = |probe: &Option<k8s_openapi::api::core::v1::Probe>| {
        probe.as_ref().and_then(|probe| probe.http_get.clone()).and_then(|get| get.path)
    };
    assert_eq!(path(&container.startup_probe).as_deref(), Some("/readyz"));
    assert_eq!(path(&container.readiness_probe).as_deref(), Some("/readyz"));
    assert_eq!(path(&container.liveness_probe).as_deref(), Some("/livez"));
    let security = container.security_context.as_ref().expect("a context");
    assert_eq!((security.run_as_user, security.read_only_root_filesystem), (Some(65532), Some(true)));
    let resources = serde_json::to_value(&container.resources).expect("JSON");
    assert_eq!(
        resources,
        json!({"limits": {"memory": "2Gi"}, "requests": {"cpu": "500m", "memory": "512Mi"}})
    );
    let spread = pod.topology_spread_constraints.expect("spread");
    assert!(spread.iter().all(|constraint| constraint.when_unsatisfiable == "ScheduleAnyway"));
    let labels = deployment.template.metadata.and_then(|metadata| metadata.labels).expect("labels");
    assert_eq!(labels.get("kvrouter.dev/router").map(String::as_str), Some("chat"));
    assert_eq!(labels.get("kvrouter.dev/pool").map(String::as_str), Some("qwen"));
    assert!(
        deployment.selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value))
    );
    assert_eq!(deployment.selector.match_labels.map(|labels| labels.len()), Some(3));
}

#[test]
fn a_budget_is_for_several_and_owners_for_those_who_have_one() {
    assert_eq!(built(json!({"replicas": 1}), pool(json!({}))).disruption_budget, None);
    assert!(built(json!({"replicas": 2}), pool(json!({}))).disruption_budget.is_some());
    let desired = built(json!({}), pool(json!({})));
    let owner = desired
        .service
        .metadata
        .owner_references
        .as_ref()
        .and_then(|owners| owners.first())
        .expect("an owner");
    assert_eq!(
        (owner.uid.as_str(), owner.controller, owner.kind.as_str()),
        ("router-uid", Some(true), "KvRouter")
    );
    let mut offline = router(json!({}));
    offline.metadata.uid = None;
    let valid = validate(&offline, &around_router(Some(pool(json!({})))), &flags()).expect("in order");
    assert_eq!(build(&valid, &flags()).service.metadata.owner_references, None, "offline");
}

#[test]
fn names_of_children_fit_with_the_longest_name() {
    let mut long = router(json!({}));
    long.metadata.name = Some("a".repeat(50));
    let valid = validate(&long, &around_router(Some(pool(json!({})))), &flags()).expect("in order");
    let desired = build(&valid, &flags());
    assert!(desired.deployment.metadata.name.is_some_and(|name| name.len() <= 63));
    assert!(desired.start_settings.metadata.name.is_some_and(|name| name.len() <= 253));
}

#[test]
fn equal_specs_give_equal_bytes() {
    let one = json!({"matchLabels": {"app": "qwen", "b": "1", "a": "2"}});
    let other = json!({"matchLabels": {"a": "2", "b": "1", "app": "qwen"}});
    let bytes = |selector: Value| {
        let desired = built(json!({}), pool(json!({"selector": selector})));
        let deployment = serde_json::to_string(&desired.deployment).expect("JSON");
        (deployment, text(&desired.start_settings, START_SETTINGS_KEY), desired.live_digest)
    };
    assert_eq!(bytes(one), bytes(other));
}
