//! Objects for tests: each is valid by itself, and a test changes what it is about.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kvrouter_crds::health::HealthReport;
use kvrouter_crds::{InferencePool, KvRouter};
use serde_json::{Value, json};

use crate::config::ChildFlags;
use crate::facts::{Reported, RouterPod};
use crate::{pool, router};

/// How long observations must last in tests.
pub(crate) const WINDOW: SignedDuration = SignedDuration::from_secs(30);

/// `seconds` after the beginning of all tests.
pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).expect("in range")
}

/// `base` with the fields of `change`; null removes one.
pub(crate) fn merged(mut base: Value, change: Value) -> Value {
    match (&mut base, change) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (key, change) in changes {
                let field = fields.remove(&key).unwrap_or_else(|| json!({}));
                match change {
                    Value::Null => {}
                    Value::Object(_) if field.is_object() => drop(fields.insert(key, merged(field, change))),
                    _ => drop(fields.insert(key, change)),
                }
            }
            base
        }
        (_, change) => change,
    }
}

pub(crate) fn flags() -> ChildFlags {
    ChildFlags {
        router_image: "kvrouter/kv-router:test".to_owned(),
        bridge_image: None,
        nats_url: Some("nats://nats.kvrouter-system:4222".to_owned()),
        router_cluster_role: "kvrouter-router".to_owned(),
        workload_patching: true,
    }
}

/// Pool `qwen` of the namespace `models`, with the changes in its spec.
pub(crate) fn pool(spec: Value) -> InferencePool {
    named_pool("qwen", spec)
}

pub(crate) fn named_pool(name: &str, spec: Value) -> InferencePool {
    let base = json!({
        "model": {"name": "Qwen/Qwen3-8B", "tokenizer": {"path": "/models/qwen"}},
        "selector": {"matchLabels": {"app": "qwen"}},
        "targetPorts": [{"number": 8000}],
    });
    let object = json!({
        "apiVersion": "kvrouter.dev/v1alpha1", "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "models", "generation": 3, "uid": "pool-uid"},
        "spec": merged(base, spec),
    });
    serde_json::from_value(object).expect("a pool")
}

/// All three roles, by the label `role` of their pods; prefill and decode speak this.
pub(crate) fn divided(protocol: &str) -> Value {
    let role = |name: &str, protocol: Value| json!({"name": name, "selector": {"matchLabels": {"role": name.to_lowercase()}}, "protocol": protocol});
    json!([role("Prefill", json!(protocol)), role("Decode", json!(protocol)), role("Mixed", Value::Null)])
}

/// Router `chat` of the pool `qwen`, with the changes in its spec.
pub(crate) fn router(spec: Value) -> KvRouter {
    let object = json!({
        "apiVersion": "kvrouter.dev/v1alpha1", "kind": "KvRouter",
        "metadata": {"name": "chat", "namespace": "models", "generation": 2, "uid": "router-uid"},
        "spec": merged(json!({"poolRef": {"name": "qwen"}}), spec),
    });
    serde_json::from_value(object).expect("a router")
}

/// A ready engine pod of the pool, with the changes.
pub(crate) fn engine(name: &str, change: Value) -> Arc<Pod> {
    let object = json!({
        "metadata": {"name": name, "namespace": "models", "uid": format!("{name}-uid"), "labels": {"app": "qwen"}},
        "spec": {"containers": [{
            "name": "engine", "image": "vllm/vllm-openai:v0.28.0", "command": ["vllm", "serve"],
            "ports": [{"containerPort": 8000}],
        }]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    });
    Arc::new(serde_json::from_value(merged(object, change)).expect("a pod"))
}

/// The same with words for its command line.
pub(crate) fn engine_with(name: &str, command: &[&str]) -> Arc<Pod> {
    let container = json!({"name": "engine", "command": command, "ports": [{"containerPort": 8000}]});
    engine(name, json!({"spec": {"containers": [container]}}))
}

/// The same with PYTHONHASHSEED.
pub(crate) fn engine_seeded(name: &str, seed: &str) -> Arc<Pod> {
    let container = json!({
        "name": "engine", "command": ["vllm"], "ports": [{"containerPort": 8000}],
        "env": [{"name": "PYTHONHASHSEED", "value": seed}],
    });
    engine(name, json!({"spec": {"containers": [container]}}))
}

/// Change that makes a pod not ready.
pub(crate) fn not_ready() -> Value {
    json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
}

/// A ready worker of the pod, with the changes.
pub(crate) fn worker(pod: &str, change: Value) -> Value {
    merged(
        json!({
            "worker": format!("{pod}:8000"), "pod": pod, "role": "mixed", "engine": "vllm",
            "engineVersion": "0.28.0", "ready": true, "reason": "ok", "reportedPageSize": 16,
            "rendering": rendering("confirmed", "same"),
            "targets": [target(json!({}))],
        }),
        change,
    )
}

/// What came of comparing a worker's tokens.
pub(crate) fn rendering(parity: &str, reason: &str) -> Value {
    let (probe, position) =
        if parity == "diverged" { (json!("tools"), json!(7)) } else { Default::default() };
    json!({"parity": parity, "reason": reason, "variant": "vllm", "compared": 8, "probe": probe,
           "position": position, "tokenizeMicrosecondsPerToken": 1.5, "tokenizeShareOfFirstByte": null})
}

/// An exact view, with the changes.
pub(crate) fn target(change: Value) -> Value {
    let base = json!({
        "rank": 0, "trust": "exact", "reason": "ok", "credited": true, "eventPageSize": 16, "hybrid": false,
        "epoch": 1, "seq": 7,
    });
    merged(base, change)
}

/// A worker whose only view has this reason.
pub(crate) fn worker_heard(pod: &str, reason: &str) -> Value {
    worker(pod, json!({"targets": [target(json!({"reason": reason}))]}))
}

/// A healthy report with these workers, with the changes.
pub(crate) fn report(workers: &[Value], change: Value) -> HealthReport {
    let base = json!({
        "schemaVersion": 1, "routerVersion": "0.1.0", "pool": "models/qwen",
        "config": {"start": "", "live": null}, "ready": true, "readyReason": "ok", "draining": false,
        "policy": "cache_plus_load", "blockSize": 16,
        "events": {"transport": "nats", "connected": true},
        "tokenizer": {"ready": true, "message": null},
        "liveSettings": {"watched": true, "refused": null},
        "workers": workers, "problems": [],
    });
    serde_json::from_value(merged(base, change)).expect("a report")
}

/// A ready router pod, with the changes, that sent this report just now.
pub(crate) fn router_pod(name: &str, change: Value, report: Option<HealthReport>) -> RouterPod {
    let object = json!({
        "metadata": {"name": name, "namespace": "models", "uid": format!("{name}-uid")},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    });
    RouterPod {
        pod: Arc::new(serde_json::from_value(merged(object, change)).expect("a pod")),
        report: report.map(|report| Reported { report: Arc::new(report), at: at(0) }),
        poll_failure: None,
        warnings: Vec::new(),
    }
}

/// What is seen around a pool with these pods and nothing else.
pub(crate) fn around_pool(pods: Vec<Arc<Pod>>) -> pool::observe::Observed {
    pool::observe::Observed {
        now: at(0),
        unresolved: None,
        pods,
        workloads: Vec::new(),
        other_pools: Vec::new(),
        routers: Vec::new(),
    }
}

/// What is seen around a router of this pool before anything runs.
pub(crate) fn around_router(pool: Option<InferencePool>) -> router::observe::Observed {
    router::observe::Observed {
        now: at(0),
        pool: pool.map(Arc::new),
        unresolved: None,
        other_pools: Vec::new(),
        deployment: None,
        pods: Vec::new(),
        taken: Vec::new(),
    }
}
