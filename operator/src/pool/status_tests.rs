//! What is published of pools, in rows.

use std::sync::Arc;

use kvrouter_crds::conditions::{NAMED, reasons};
use serde_json::{Value, json};

use super::super::observe::RouterSeen;
use super::super::validate::validate;
use super::*;
use crate::sample::{
    WINDOW, around_pool, at, divided, engine, engine_seeded, engine_with, flags, merged, not_ready, pool,
    report, router_pod, target, worker, worker_heard,
};

/// The pool's status after the window has passed once.
fn settled(pool: &InferencePool, observed: &Observed, workloads: &[WorkloadStatus]) -> InferencePoolStatus {
    let mut pool = pool.clone();
    let mut memory = Memory::new(at(-100));
    for now in [at(-40), observed.now] {
        let observed = Observed { now, ..observed.clone() };
        let observed = Observed { routers: heard_at(&observed.routers, now), ..observed };
        let verdict = validate(&pool, &observed, &flags());
        let input = Input { pool: &pool, verdict: &verdict, observed: &observed, workloads, window: WINDOW };
        let outcome = status(&input, &memory);
        let again =
            Input { pool: &InferencePool { status: Some(outcome.status.clone()), ..pool.clone() }, ..input };
        let second = status(&again, &outcome.memory);
        assert_eq!(
            serde_json::to_string(&second.status).expect("JSON"),
            serde_json::to_string(&outcome.status).expect("JSON"),
            "on its own output it changes nothing"
        );
        memory = outcome.memory;
        pool.status = Some(outcome.status);
    }
    let status = pool.status.expect("published");
    for condition in &status.conditions {
        let type_ = ConditionType::of(&condition.type_).expect("a known type");
        let reasons = reasons(type_);
        assert!(
            reasons.iter().any(|reason| reason.as_str() == condition.reason),
            "{type_:?} may be {}",
            condition.reason
        );
    }
    status
}

fn heard_at(routers: &[RouterSeen], now: k8s_openapi::jiff::Timestamp) -> Vec<RouterSeen> {
    let mut routers = routers.to_vec();
    for pod in routers.iter_mut().flat_map(|router| &mut router.pods) {
        if let Some(report) = &mut pod.report {
            report.at = now;
        }
    }
    routers
}

#[track_caller]
fn check(
    why: &str,
    status: &InferencePoolStatus,
    type_: ConditionType,
    expected: (&str, &str),
    parts: &[&str],
) {
    let condition = find(&status.conditions, type_).expect("every type is present");
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        expected,
        "{why}: {}",
        condition.message
    );
    for part in parts {
        assert!(condition.message.contains(part), "{why}: {part:?} is not in {:?}", condition.message);
    }
}

/// Pods and one router that has these workers.
fn world(pods: Vec<Arc<Pod>>, workers: &[Value]) -> Observed {
    let pods_of_router = vec![router_pod("chat-1", json!({}), Some(report(workers, json!({}))))];
    let routers = vec![RouterSeen { name: "chat".to_owned(), pods: pods_of_router }];
    Observed { routers, ..around_pool(pods) }
}

fn plain(names: &[&str]) -> Vec<Arc<Pod>> {
    names.iter().map(|name| engine(name, json!({}))).collect()
}

fn paged(pod: &str, event: Option<u32>, reported: Option<u32>) -> Value {
    worker(pod, json!({"reportedPageSize": reported, "targets": [target(json!({"eventPageSize": event}))]}))
}

#[test]
fn every_type_is_there_from_the_first_pass() {
    let pool = pool(json!({}));
    let observed = around_pool(Vec::new());
    let verdict = validate(&pool, &observed, &flags());
    let input = Input { pool: &pool, verdict: &verdict, observed: &observed, workloads: &[], window: WINDOW };
    let status = status(&input, &Memory::new(at(0))).status;
    let types: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(types, POOL_TYPES.iter().map(|type_| type_.as_str()).collect::<Vec<_>>());
    check(
        "no pods",
        &status,
        ConditionType::Ready,
        ("Unknown", "NoPods"),
        &["kubectl get pods -n models -l app=qwen"],
    );
    assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
}

#[test]
fn a_healthy_pool_is_ready_and_not_degraded() {
    let status = settled(
        &pool(json!({})),
        &world(plain(&["a", "b"]), &[worker("a", json!({})), worker("b", json!({}))]),
        &[],
    );
    check("parity", &status, ConditionType::PageSizeParity, ("True", "SamePageSize"), &["16 tokens"]);
    check("events", &status, ConditionType::EventsConnected, ("True", "Connected"), &["Every router"]);
    check("quality", &status, ConditionType::Degraded, ("False", "AsExpected"), &[]);
    check("serving", &status, ConditionType::Ready, ("True", "Serving"), &[]);
    assert_eq!(status.endpoints.map(|endpoints| endpoints.summary).as_deref(), Some("2/2"));
    assert_eq!(status.page_sizes.len(), 1);
    assert_eq!((status.page_sizes[0].evidence.as_str(), status.page_sizes[0].pods), ("events", 2));
}

#[test]
fn half_a_pair_serves_nothing_and_degrades_what_mixed_pods_serve() {
    let status = |pods: &[(&str, &str, bool)]| {
        let pod = |(name, role, ready): &(&str, &str, bool)| {
            let change = if *ready { json!({}) } else { not_ready() };
            engine(name, merged(json!({"metadata": {"labels": {"role": role}}}), change))
        };
        let workers: Vec<Value> = pods.iter().map(|(name, ..)| worker(name, json!({}))).collect();
        let observed = world(pods.iter().map(pod).collect(), &workers);
        settled(&pool(json!({"roles": divided("SGLang")})), &observed, &[])
    };
    let told = |why: &str,
                pods: &[(&str, &str, bool)],
                ready: (&str, &str),
                degraded: (&str, &str),
                parts: &[&str]| {
        let status = status(pods);
        check(why, &status, ConditionType::Ready, ready, if ready.0 == "False" { parts } else { &[] });
        check(
            why,
            &status,
            ConditionType::Degraded,
            degraded,
            if degraded.0 == "True" { parts } else { &[] },
        );
    };
    let (p, d, m) = (("p", "prefill", true), ("d", "decode", true), ("m", "mixed", true));
    let (serving, fine) = (("True", "Serving"), ("False", "AsExpected"));
    told("both", &[p, d], serving, fine, &[]);
    let look = "kubectl get pods -n models -l app=qwen,role=decode";
    let none = ["No pod has the role decode", "nothing is served", look];
    told("no decode", &[p], ("False", "NoDecodeReady"), fine, &none);
    let late = ["No pod of the role decode is ready: d", "nothing is served"];
    told("not ready yet", &[p, ("d", "decode", false)], ("False", "NoDecodeReady"), fine, &late);
    told("no prefill", &[d], ("False", "NoPrefillReady"), fine, &["the role prefill"]);
    told("served by mixed", &[p, m], serving, ("True", "NoDecodeReady"), &["mixed pods serve all requests"]);
    told("mixed alone", &[m], serving, ("True", "NoPrefillReady"), &["the role prefill"]);
    told(
        "nobody",
        &[("p", "prefill", false)],
        ("False", "NoPodsReady"),
        fine,
        &["No pod of the pool is ready"],
    );
}

#[test]
fn page_sizes_are_told_by_the_best_evidence() {
    let type_ = ConditionType::PageSizeParity;
    let check_pages =
        |why: &str, pods: Vec<Arc<Pod>>, workers: &[Value], expected: (&str, &str), parts: &[&str]| {
            check(why, &settled(&pool(json!({})), &world(pods, workers), &[]), type_, expected, parts);
        };
    let same = ("True", "SamePageSize");
    check_pages("nobody is there", vec![], &[], ("Unknown", "NoPods"), &["app=qwen"]);
    check_pages("nothing shows it", plain(&["a"]), &[], ("Unknown", "NotObservable"), &["a"]);
    check_pages(
        "no default is assumed",
        plain(&["a"]),
        &[paged("a", None, None)],
        ("Unknown", "NotObservable"),
        &[],
    );
    check_pages("it starts", vec![engine("a", not_ready())], &[], ("Unknown", "EngineStarting"), &["a"]);
    check_pages(
        "starting ones do not count",
        vec![engine("a", not_ready()), engine("b", json!({}))],
        &[paged("b", Some(16), None)],
        same,
        &[],
    );
    check_pages(
        "arguments",
        vec![engine_with("a", &["vllm", "--block-size", "8"])],
        &[],
        same,
        &["8 tokens"],
    );
    check_pages(
        "the endpoint is better",
        vec![engine_with("a", &["--block-size=8"])],
        &[paged("a", None, Some(4))],
        same,
        &["4 tokens"],
    );
    check_pages(
        "events are best",
        vec![engine_with("a", &["--block-size=8"])],
        &[paged("a", Some(2), Some(4))],
        same,
        &["2 tokens"],
    );
    check_pages(
        "it does not divide the block",
        plain(&["a", "b"]),
        &[paged("a", Some(16), None), paged("b", Some(32), None)],
        ("False", "BlockSizeMismatch"),
        &["b (32 tokens)", "spec.blockSize 16", "set spec.blockSize to a multiple"],
    );
    check_pages(
        "the odd one is named",
        plain(&["a", "b", "c"]),
        &[paged("a", Some(16), None), paged("b", Some(8), None), paged("c", Some(16), None)],
        ("False", "MixedWithinRole"),
        &["the pool's page has 16 tokens", "but not that of b (8 tokens);"],
    );
}

/// The pods that are named are those that routers leave out, where they do.
#[test]
fn the_pools_page_is_decided_as_routers_decide_it() {
    let type_ = ConditionType::PageSizeParity;
    let check_pages =
        |why: &str, pods: Vec<Arc<Pod>>, workers: &[Value], expected: (&str, &str), parts: &[&str]| {
            check(why, &settled(&pool(json!({})), &world(pods, workers), &[]), type_, expected, parts);
        };
    check_pages(
        "of equals the larger, as routers have it",
        plain(&["a", "b"]),
        &[paged("a", Some(8), None), paged("b", Some(16), None)],
        ("False", "MixedWithinRole"),
        &["the pool's page has 16 tokens", "but not that of a (8 tokens);"],
    );
    let down =
        |pod: &str| merged(paged(pod, Some(8), None), json!({"ready": false, "reason": "unreachable"}));
    check_pages(
        "who may not be picked has no vote",
        plain(&["a", "b", "c"]),
        &[down("a"), down("b"), paged("c", Some(16), None)],
        ("False", "MixedWithinRole"),
        &["the pool's page has 16 tokens", "but not that of a (8 tokens), b (8 tokens);"],
    );
    let out = merged(paged("b", Some(8), None), json!({"ready": false, "reason": "page_size"}));
    check_pages(
        "whom routers leave out",
        plain(&["a", "b"]),
        &[paged("a", Some(16), None), out],
        ("False", "MixedWithinRole"),
        &["not that of b (8 tokens), and routers send no requests to b;"],
    );
    check_pages(
        "case K28: a hybrid model's page",
        plain(&["a"]),
        &[paged("a", Some(528), None)],
        ("False", "BlockSizeMismatch"),
        &["spec.blockSize 16: a (528 tokens)", "set spec.blockSize to a multiple of their page"],
    );
}

/// Case K29: a block below the smallest page of vLLM.
#[test]
fn a_block_below_the_engines_page_is_told() {
    let status = settled(
        &pool(json!({"blockSize": 8})),
        &world(vec![engine_with("a", &["vllm", "serve", "--block-size", "16"])], &[]),
        &[],
    );
    let parts = ["spec.blockSize 8: a (16 tokens)", "set spec.blockSize to a multiple of their page"];
    check("arguments", &status, ConditionType::PageSizeParity, ("False", "BlockSizeMismatch"), &parts);
    check("a loss", &status, ConditionType::Degraded, ("True", "BlockSizeMismatch"), &["a (16 tokens)"]);
}

#[test]
fn roles_may_not_differ_in_pages_either() {
    let role = |name: &str| json!({"name": name, "selector": {"matchLabels": {"role": name}}});
    let pool = pool(json!({"roles": [role("Prefill"), role("Decode")]}));
    let pod = |name: &str, role: &str, page: &str| {
        let container = json!({"name": "engine", "command": ["vllm", "--block-size", page]});
        engine(name, json!({"metadata": {"labels": {"role": role}}, "spec": {"containers": [container]}}))
    };
    let pods = vec![pod("d", "Decode", "8"), pod("p", "Prefill", "16"), pod("x", "Other", "4")];
    let status = settled(&pool, &around_pool(pods), &[]);
    check(
        "two roles",
        &status,
        ConditionType::PageSizeParity,
        ("False", "MixedAcrossRoles"),
        &["prefill 16, decode 8", "not that of d (8 tokens);"],
    );
    check("case K30", &status, ConditionType::Degraded, ("True", "MixedAcrossRoles"), &["d (8 tokens)"]);
    let roles = status.endpoints.expect("counted").roles;
    assert_eq!(roles.iter().map(|role| role.total).sum::<u32>(), 2, "a pod of no role is in none");
}

#[test]
fn a_message_names_at_most_five_pods() {
    let names: Vec<String> = (0..9).map(|at| format!("pod-{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let workers: Vec<Value> = names.iter().map(|name| paged(name, Some(32), None)).collect();
    let status = settled(&pool(json!({})), &world(plain(&names), &workers), &[]);
    let parts = ["pod-0 (32 tokens)", "pod-4 (32 tokens) and 4 more;"];
    check("nine", &status, ConditionType::PageSizeParity, ("False", "BlockSizeMismatch"), &parts);
    let message = &find(&status.conditions, ConditionType::PageSizeParity).expect("present").message;
    assert_eq!(message.matches("pod-").count(), NAMED);
}

// tidy: long, because it is one table.
#[test]
fn the_seed_is_judged_by_the_pods_that_run() {
    let type_ = ConditionType::HashSeedStable;
    let check_seed = |why: &str,
                      pods: Vec<Arc<Pod>>,
                      workers: &[Value],
                      expected: (&str, &str),
                      parts: &[&str]| {
        let status = settled(&pool(json!({})), &world(pods, workers), &[]);
        check(why, &status, type_, expected, parts);
        check(
            why,
            &status,
            ConditionType::Degraded,
            find(&status.conditions, ConditionType::Degraded)
                .map(|it| (it.status.as_str(), it.reason.as_str()))
                .expect("present"),
            &[],
        );
        assert!(
            !find(&status.conditions, ConditionType::Degraded).expect("present").reason.starts_with("Seed"),
            "{why}: routing does not depend on it"
        );
    };
    let version = |pod: &str, engine: &str, version: &str| {
        worker(pod, json!({"engine": engine, "engineVersion": version}))
    };
    check_seed("nobody", vec![], &[], ("Unknown", "NoPods"), &[]);
    check_seed(
        "set",
        vec![engine_seeded("a", "0"), engine_seeded("b", "0")],
        &[],
        ("True", "SeedSet"),
        &["is 0"],
    );
    check_seed(
        "missing",
        vec![engine_seeded("a", "0"), engine("b", json!({}))],
        &[],
        ("False", "SeedMissing"),
        &["in b;", "spec.workloads"],
    );
    check_seed(
        "it differs",
        vec![engine_seeded("a", "0"), engine_seeded("b", "7")],
        &[],
        ("False", "SeedDiffers"),
        &["b (7)"],
    );
    check_seed(
        "another spelling is another seed",
        vec![engine_seeded("a", "0"), engine_seeded("b", "00")],
        &[],
        ("False", "SeedDiffers"),
        &["b (00)"],
    );
    let store = ["vllm", "serve", "--kv-transfer-config", "{\"kv_connector\": \"MooncakeStoreConnector\"}"];
    check_seed(
        "case K53: a cache that is shared",
        vec![engine_with("a", &store)],
        &[],
        ("False", "SeedMissing"),
        &["in a, so that in the cache which they share (MooncakeStoreConnector) no engine finds"],
    );
    check_seed(
        "case K27: two releases of vLLM, both without a seed",
        plain(&["a", "b"]),
        &[version("a", "vllm", "0.28.0"), version("b", "vllm", "0.29.0")],
        ("False", "SeedDiffers"),
        &["their own, here in b,", "each process, here in a;"],
    );
    check_seed(
        "not needed",
        plain(&["a"]),
        &[version("a", "sglang", "0.5.20")],
        ("True", "NotRequired"),
        &[],
    );
    check_seed(
        "the engine's own",
        plain(&["a"]),
        &[version("a", "vllm", "0.29.0")],
        ("True", "EngineDefaultSeed"),
        &[],
    );
    check_seed(
        "just before",
        plain(&["a"]),
        &[version("a", "vllm", "0.28.9")],
        ("False", "SeedMissing"),
        &[],
    );
    check_seed(
        "a later major",
        plain(&["a"]),
        &[version("a", "vllm", "v1.0.0rc1")],
        ("True", "EngineDefaultSeed"),
        &[],
    );
    check_seed(
        "its own and ours differ",
        vec![engine("a", json!({})), engine_seeded("b", "0")],
        &[version("a", "vllm", "0.30.1")],
        ("False", "SeedDiffers"),
        &["a (the engine's own)"],
    );
    let env =
        json!([{"name": "PYTHONHASHSEED", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}]);
    let container = json!({"name": "engine", "command": ["vllm"], "env": env});
    check_seed(
        "by reference",
        vec![engine("a", json!({"spec": {"containers": [container]}}))],
        &[],
        ("Unknown", "NotObservable"),
        &["a"],
    );
    let unknown = json!({"spec": {"containers": [{"name": "engine", "image": "own"}]}});
    check_seed("an unknown engine", vec![engine("a", unknown)], &[], ("Unknown", "NotObservable"), &["a"]);
}

fn record(state: WorkloadState) -> WorkloadStatus {
    let record = json!({"kind": "Deployment", "name": "qwen", "state": state.as_str(), "message": "Deployment qwen is so."});
    serde_json::from_value(record).expect("a record")
}

#[test]
fn a_change_of_ours_that_is_stuck_is_the_reason() {
    use WorkloadState as State;
    let workload = json!({"kind": "Deployment", "name": "qwen"});
    let pool = pool(json!({"workloads": [workload], "kvEvents": {"bridge": "Inject"}}));
    let observed = world(plain(&["a"]), &[worker_heard("a", "nothing_heard")]);
    for (state, reason) in [
        (State::PatchFailed, "PatchFailed"),
        (State::PatchReverted, "PatchReverted"),
        (State::Paused, "Paused"),
        (State::RollingOut, "RollingOut"),
        (State::PatchingDisabled, "PatchingDisabled"),
    ] {
        let status = settled(&pool, &observed, &[record(state)]);
        let parts = ["Deployment qwen is so."];
        check("the seed", &status, ConditionType::HashSeedStable, ("False", reason), &parts);
        check("the bridge", &status, ConditionType::EventsConnected, ("False", reason), &parts);
        check("quality", &status, ConditionType::Degraded, ("True", reason), &parts);
        check("and it serves", &status, ConditionType::Ready, ("True", "Serving"), &[]);
    }
    let healthy = world(plain(&["a"]), &[worker("a", json!({}))]);
    let status = settled(&pool, &healthy, &[record(State::BridgeOutdated)]);
    check(
        "an old bridge works",
        &status,
        ConditionType::EventsConnected,
        ("True", "BridgeOutdated"),
        &["is so"],
    );
    check("and degrades nothing", &status, ConditionType::Degraded, ("False", "AsExpected"), &[]);
}

#[test]
fn events_are_as_good_as_the_worst_router_hears() {
    let type_ = ConditionType::EventsConnected;
    let both = |a: &str, b: &str| [worker_heard("a", a), worker_heard("b", b)];
    let check_heard = |why: &str, workers: &[Value], expected: (&str, &str), parts: &[&str]| {
        let status = settled(&pool(json!({})), &world(plain(&["a", "b"]), workers), &[]);
        check(why, &status, type_, expected, parts);
    };
    check_heard("all", &both("ok", "ok"), ("True", "Connected"), &[]);
    check_heard(
        "one",
        &both("ok", "silence"),
        ("False", "SomeEnginesSilent"),
        &["chat-1", "router chat", " b;"],
    );
    check_heard("none", &both("nothing_heard", "silence"), ("False", "NoPublishers"), &["a, b;"]);
    check_heard("foreign", &both("ok", "domain_mismatch"), ("False", "ForeignDomain"), &["b;"]);
    check_heard(
        "foreign is worse than silent",
        &both("silence", "domain_mismatch"),
        ("False", "ForeignDomain"),
        &[],
    );
    check_heard("what was heard is enough", &both("gap", "page_size_mismatch"), ("True", "Connected"), &[]);
    let waiting = worker("a", json!({"ready": false, "reason": "unreachable"}));
    check_heard("no worker", &[waiting], ("Unknown", "NoWorkers"), &["a: unreachable"]);

    let mut observed = world(plain(&["a"]), &both("ok", "ok"));
    let lost = report(&both("ok", "ok"), json!({"events": {"connected": false}}));
    let second =
        RouterSeen { name: "batch".to_owned(), pods: vec![router_pod("batch-1", json!({}), Some(lost))] };
    observed.routers.insert(0, second);
    let status = settled(&pool(json!({})), &observed, &[]);
    check("the worst is named", &status, type_, ("False", "NatsUnreachable"), &["batch-1", "router batch"]);

    observed.routers =
        vec![RouterSeen { name: "chat".to_owned(), pods: vec![router_pod("chat-1", json!({}), None)] }];
    observed.routers[0].pods[0].poll_failure = Some("connection refused".to_owned());
    check(
        "silence",
        &settled(&pool(json!({})), &observed, &[]),
        type_,
        ("Unknown", "RouterUnreachable"),
        &["chat-1 (connection refused)"],
    );
    observed.routers = Vec::new();
    check(
        "nobody listens",
        &settled(&pool(json!({})), &observed, &[]),
        type_,
        ("Unknown", "NoRouters"),
        &["spec.poolRef.name: qwen"],
    );
    let none = pool(json!({"kvEvents": {"transport": "None"}}));
    check("nobody wants any", &settled(&none, &observed, &[]), type_, ("True", "Disabled"), &[]);
}

#[test]
fn broken_specs_and_references_come_first() {
    let wrong = pool(json!({"blockSize": 0}));
    let status = settled(&wrong, &world(plain(&["a"]), &[]), &[]);
    check("the spec", &status, ConditionType::Accepted, ("False", "InvalidSpec"), &["spec.blockSize"]);
    check("what comes later", &status, ConditionType::ResolvedRefs, ("Unknown", "Pending"), &[]);
    check(
        "and it is not ready",
        &status,
        ConditionType::Ready,
        ("False", "InvalidSpec"),
        &["spec.blockSize"],
    );
    let missing = pool(json!({"workloads": [{"kind": "Deployment", "name": "x"}]}));
    let mut observed = world(plain(&["a"]), &[]);
    observed.workloads = vec![crate::pool::observe::WorkloadSeen {
        reference: missing.spec.workloads[0].clone(),
        found: None,
    }];
    let status = settled(&missing, &observed, &[]);
    check(
        "a workload",
        &status,
        ConditionType::ResolvedRefs,
        ("False", "WorkloadNotFound"),
        &["Deployment x"],
    );
    check("ready", &status, ConditionType::Ready, ("False", "WorkloadNotFound"), &["Deployment x"]);
    let down = world(vec![engine("a", not_ready())], &[]);
    check(
        "no engine",
        &settled(&pool(json!({})), &down, &[]),
        ConditionType::Ready,
        ("False", "NoPodsReady"),
        &["a"],
    );
}

#[test]
fn a_pod_that_is_gone_is_not_blamed_any_more() {
    let pool = pool(json!({}));
    let two = world(plain(&["a", "b"]), &[paged("a", Some(16), None), paged("b", Some(32), None)]);
    let verdict = validate(&pool, &two, &flags());
    let mut memory = Memory::new(at(-100));
    let mut published = pool.clone();
    for now in [at(-30), at(0)] {
        let observed = Observed { now, routers: heard_at(&two.routers, now), ..two.clone() };
        let input = Input {
            pool: &published,
            verdict: &verdict,
            observed: &observed,
            workloads: &[],
            window: WINDOW,
        };
        let outcome = status(&input, &memory);
        memory = outcome.memory;
        published.status = Some(outcome.status);
    }
    check(
        "it is blamed",
        published.status.as_ref().expect("published"),
        ConditionType::PageSizeParity,
        ("False", "BlockSizeMismatch"),
        &["b"],
    );
    let one = world(plain(&["a"]), &[paged("a", Some(16), None)]);
    let observed = Observed { now: at(1), routers: heard_at(&one.routers, at(1)), ..one };
    let input =
        Input { pool: &published, verdict: &verdict, observed: &observed, workloads: &[], window: WINDOW };
    check(
        "it is gone",
        &status(&input, &memory).status,
        ConditionType::PageSizeParity,
        ("True", "SamePageSize"),
        &[],
    );
}

#[test]
fn the_order_of_what_is_seen_does_not_matter() {
    let workers = [paged("a", Some(16), None), paged("b", Some(8), None), worker_heard("c", "silence")];
    let mut reversed = workers.to_vec();
    reversed.reverse();
    let one = settled(&pool(json!({})), &world(plain(&["a", "b", "c"]), &workers), &[]);
    let other = settled(&pool(json!({})), &world(plain(&["c", "b", "a"]), &reversed), &[]);
    assert_eq!(one, other);
}
