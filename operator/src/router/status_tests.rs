//! What is published of routers, in rows.

use std::sync::Arc;

use kvrouter_crds::conditions::{Status, find, reasons};
use kvrouter_crds::health::HealthReport;
use serde_json::{Value, json};

use super::super::build::build;
use super::super::validate::validate;
use super::*;
use crate::facts::{RouterPod, Warning};
use crate::sample::{
    WINDOW, around_router, at, divided, flags, merged, not_ready, pool, rendering, report, router,
    router_pod, target, worker, worker_heard,
};

/// A router, its pool and what is seen of them.
struct World {
    router: KvRouter,
    observed: Observed,
    apply_failure: Option<&'static str>,
}

impl World {
    /// Two replicas, rolled out and healthy.
    fn new() -> Self {
        Self::of(json!({}), pool(json!({})))
    }

    fn of(spec: Value, pool: InferencePool) -> Self {
        let router = router(spec);
        let mut observed = around_router(Some(pool));
        observed.deployment = Some(deployment(json!({})));
        let mut world = Self { router, observed, apply_failure: None };
        world.observed.pods = ["chat-1", "chat-2"]
            .map(|name| router_pod(name, json!({}), Some(world.report(&[worker("a", json!({}))], json!({})))))
            .to_vec();
        world
    }

    /// A report with the settings that the spec asks for, with the changes.
    fn report(&self, workers: &[Value], change: Value) -> HealthReport {
        let config = match validate(&self.router, &self.observed, &flags()) {
            Ok(valid) => {
                let desired = build(&valid, &flags());
                json!({"start": desired.start_digest, "live": desired.live_digest})
            }
            Err(_) => json!({}),
        };
        report(workers, merged(json!({"config": config}), change))
    }

    /// The first pod reports this instead.
    fn reporting(mut self, workers: &[Value], change: Value) -> Self {
        self.observed.pods[0] = router_pod("chat-1", json!({}), Some(self.report(workers, change)));
        self
    }

    /// The first pod is this instead, and no replica is available.
    fn down(mut self, pod: RouterPod) -> Self {
        self.observed.pods = vec![pod];
        self.observed.deployment =
            Some(deployment(json!({"status": {"availableReplicas": 0, "updatedReplicas": 1}})));
        self
    }

    /// The status after the window has passed once.
    fn settled(&self) -> KvRouterStatus {
        let mut router = self.router.clone();
        let mut memory = Memory::new(at(-100));
        for now in [at(-40), at(0)] {
            let mut observed = Observed { now, ..self.observed.clone() };
            for pod in &mut observed.pods {
                if let Some(report) = &mut pod.report {
                    report.at = now;
                }
            }
            let desired = validate(&router, &observed, &flags()).map(|valid| build(&valid, &flags()));
            let input = Input {
                router: &router,
                verdict: desired.as_ref(),
                observed: &observed,
                apply_failure: self.apply_failure,
                window: WINDOW,
            };
            let outcome = status(&input, &memory);
            let mut own = router.clone();
            own.status = Some(outcome.status.clone());
            let second = status(&Input { router: &own, ..input }, &outcome.memory);
            assert_eq!(
                serde_json::to_string(&second.status).expect("JSON"),
                serde_json::to_string(&outcome.status).expect("JSON"),
                "on its own output it changes nothing"
            );
            memory = outcome.memory;
            router = own;
        }
        let status = router.status.expect("published");
        for condition in &status.conditions {
            let type_ = ConditionType::of(&condition.type_).expect("a known type");
            let reasons = reasons(type_);
            assert!(
                reasons.iter().any(|it| it.as_str() == condition.reason),
                "{type_:?} may be {}",
                condition.reason
            );
        }
        status
    }

    #[track_caller]
    fn check(&self, why: &str, type_: ConditionType, expected: (&str, &str), parts: &[&str]) {
        let status = self.settled();
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
}

fn deployment(change: Value) -> Arc<Deployment> {
    let object = json!({
        "metadata": {"name": "chat-router", "generation": 1},
        "spec": {"replicas": 2, "selector": {}, "template": {}},
        "status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2},
    });
    Arc::new(serde_json::from_value(merged(object, change)).expect("a Deployment"))
}

#[test]
fn a_healthy_router_serves_as_asked() {
    let world = World::new();
    for (type_, expected) in [
        (ConditionType::Accepted, ("True", "Accepted")),
        (ConditionType::ResolvedRefs, ("True", "ResolvedRefs")),
        (ConditionType::Progressing, ("False", "RolloutComplete")),
        (ConditionType::RouterAvailable, ("True", "Available")),
        (ConditionType::ConfigApplied, ("True", "Applied")),
        (ConditionType::TokenizerReady, ("True", "Loaded")),
        (ConditionType::RenderParity, ("True", "RenderConfirmed")),
        (ConditionType::IndexWarm, ("True", "Warm")),
        (ConditionType::EventsConnected, ("True", "Connected")),
        (ConditionType::Degraded, ("False", "AsExpected")),
        (ConditionType::Ready, ("True", "Serving")),
    ] {
        world.check("healthy", type_, expected, &[]);
    }
    let status = world.settled();
    assert_eq!(status.conditions.len(), ROUTER_TYPES.len());
    assert_eq!((status.replicas, status.workers.as_deref()), (2, Some("1/1")));
    assert_eq!(status.url.as_deref(), Some("http://chat-router.models.svc:8000"));
    let selector =
        "app.kubernetes.io/component=router,app.kubernetes.io/instance=chat,app.kubernetes.io/name=kv-router";
    assert_eq!(status.selector.as_deref(), Some(selector));
    assert!(status.config_hash.is_some_and(|hash| hash.len() == 33 && hash.contains('/')));
}

#[test]
fn before_anything_runs_every_type_is_pending_or_certain() {
    let world = World { observed: around_router(Some(pool(json!({})))), ..World::new() };
    world.check("rollout", ConditionType::Progressing, ("True", "RollingOut"), &["being created"]);
    world.check("nobody there", ConditionType::RouterAvailable, ("Unknown", "Pending"), &[]);
    world.check("ready waits", ConditionType::Ready, ("Unknown", "Pending"), &[]);
    world.check("settings", ConditionType::ConfigApplied, ("False", "RolloutPending"), &["still to come"]);
    world.check("events", ConditionType::EventsConnected, ("Unknown", "NoReplicas"), &["Router chat"]);
}

#[test]
fn wrong_specs_change_nothing_that_runs() {
    let mut world = World::new();
    world.observed.pool = None;
    world.check("reference", ConditionType::ResolvedRefs, ("False", "PoolNotFound"), &["create it"]);
    world.check("accepted", ConditionType::Accepted, ("True", "Accepted"), &[]);
    world.check("ready", ConditionType::Ready, ("False", "PoolNotFound"), &[]);
    world.check("rollout", ConditionType::Progressing, ("Unknown", "Pending"), &[]);
    world.check("routers run on", ConditionType::RouterAvailable, ("True", "Available"), &[]);
}

#[test]
fn half_a_pair_of_workers_degrades() {
    let type_ = ConditionType::Degraded;
    let divided = json!({"roles": divided("NIXL")});
    let check = |why: &str, workers: &[(&str, &str, bool)], expected: (&str, &str), parts: &[&str]| {
        let count = |role: &str| workers.iter().filter(|worker| worker.1 == role && worker.2).count();
        let (prefill, decode) = (count("prefill"), count("decode"));
        let pairs = json!([
            {"protocol": "nixl", "prefill": prefill, "decode": decode, "pairs": prefill * decode}]);
        let worker = |(pod, role, ready): &(&str, &str, bool)| {
            let reason = match (ready, pod.starts_with("odd")) {
                (true, _) => "ok",
                (false, true) => "page_size",
                (false, false) => "pod_not_ready",
            };
            worker(pod, json!({"role": role, "ready": ready, "reason": reason}))
        };
        let workers: Vec<Value> = workers.iter().map(worker).collect();
        let mut world = World::of(json!({}), pool(divided.clone()));
        let told = world.report(&workers, json!({"disaggregation": pairs}));
        let pod = |name| router_pod(name, json!({}), Some(told.clone()));
        world.observed.pods = ["chat-1", "chat-2"].map(pod).to_vec();
        world.check(why, type_, expected, parts);
    };
    let (p, d, m) = (("p", "prefill", true), ("d", "decode", true), ("m", "mixed", true));
    check("both", &[p, d], ("False", "AsExpected"), &[]);
    let nobody =
        ["Pod chat-1 of router chat has no decode worker that is ready; it knows none", "nothing is served"];
    check("no decode", &[p], ("True", "NoDecodeReady"), &nobody);
    let late = ["(d: pod_not_ready)", "mixed workers serve all requests"];
    check("one that is not ready", &[p, ("d", "decode", false), m], ("True", "NoDecodeReady"), &late);
    let pages = ["no decode worker that is ready (odd-1, odd-2: page_size)", "with one page"];
    let odd = [("odd-1", "decode", false), ("odd-2", "decode", false), ("d", "decode", false)];
    check("case K30", &[&[p], &odd[..]].concat(), ("True", "NoDecodeReady"), &pages);
    check("no prefill", &[d, m], ("True", "NoPrefillReady"), &["no prefill worker"]);
    check("mixed alone", &[m], ("True", "NoPrefillReady"), &["mixed workers serve"]);
    check("nobody at all", &[("p", "prefill", false)], ("Unknown", "NoWorkers"), &[]);
    World::new().check("a pool without roles", type_, ("False", "AsExpected"), &[]);
}

#[test]
fn rollouts_are_told_as_the_api_server_sees_them() {
    let type_ = ConditionType::Progressing;
    let with = |change: Value| {
        let mut world = World::new();
        world.observed.deployment = Some(deployment(change));
        world
    };
    let condition = |type_: &str, status: &str, reason: &str| {
        json!({"status": {"updatedReplicas": 1, "conditions": [
            {"type": type_, "status": status, "reason": reason, "message": "exceeded quota: pods."}]}})
    };
    with(json!({"status": {"updatedReplicas": 1}})).check("half", type_, ("True", "RollingOut"), &["1 of 2"]);
    with(json!({"metadata": {"generation": 2}})).check(
        "not looked at yet",
        type_,
        ("True", "RollingOut"),
        &[],
    );
    with(json!({"status": {"replicas": 3}})).check("an old one is left", type_, ("True", "RollingOut"), &[]);
    let stuck = condition("Progressing", "False", "ProgressDeadlineExceeded");
    with(merged(stuck, json!({"spec": {"progressDeadlineSeconds": 180}}))).check(
        "stuck",
        type_,
        ("False", "ProgressDeadlineExceeded"),
        &["moved for 3 minutes."],
    );
    with(condition("ReplicaFailure", "True", "FailedCreate")).check(
        "quota",
        type_,
        ("False", "PodCreationFailed"),
        &["exceeded quota: pods;"],
    );
    let refused = World { apply_failure: Some("Service/chat-router: spec.ports: bad"), ..World::new() };
    refused.check("refused", type_, ("False", "ApplyFailed"), &["Service/chat-router"]);
    let mut paused = World::new();
    paused.router.metadata.annotations = Some([(PAUSED_ANNOTATION.to_owned(), "true".to_owned())].into());
    paused.check("paused", type_, ("Unknown", "Paused"), &["remove it"]);
}

fn waiting(reason: &str, message: &str) -> Value {
    let state = json!({"waiting": {"reason": reason, "message": message}});
    let status = json!({"name": "router", "image": "r/router:x", "imageID": "", "ready": false, "restartCount": 0, "state": state});
    merged(not_ready(), json!({"status": {"containerStatuses": [status]}}))
}

#[test]
fn a_pod_that_does_not_run_says_why() {
    let check = |why: &str, pod: RouterPod, reason: &str, parts: &[&str]| {
        let world = World::new().down(pod);
        world.check(why, ConditionType::RouterAvailable, ("False", reason), parts);
        world.check(why, ConditionType::Ready, ("False", reason), parts);
    };
    let pod = |change: Value| router_pod("chat-1", change, None);
    let warned = |text: &str| {
        let warning = Warning { reason: "FailedMount".to_owned(), message: text.to_owned() };
        RouterPod { warnings: vec![warning], ..pod(waiting("ContainerCreating", "")) }
    };
    check("slow", pod(not_ready()), "NoReplicasReady", &["chat-1"]);
    check(
        "image",
        pod(waiting("ImagePullBackOff", "no such tag")),
        "ImagePullFailed",
        &["r/router:x", "no such tag", "pull secrets"],
    );
    check(
        "config",
        pod(waiting("CreateContainerConfigError", "runAsNonRoot")),
        "ConfigError",
        &["runAsNonRoot"],
    );
    check(
        "secret by variable",
        pod(waiting("CreateContainerConfigError", "secret \"x\" not found")),
        "SecretNotFound",
        &["create the Secret"],
    );
    check(
        "key",
        pod(waiting("CreateContainerConfigError", "couldn't find key k in Secret ns/x")),
        "SecretNotFound",
        &[],
    );
    check(
        "secret by volume",
        warned("MountVolume.SetUp failed for volume \"nats\" : secret \"x\" not found"),
        "SecretNotFound",
        &["secret \"x\""],
    );
    check("key of a volume", warned("references non-existent secret key: k"), "SecretNotFound", &[]);
    check("config map", warned("configmap \"tok\" not found"), "ConfigMapNotFound", &[]);
    check("other mounts", warned("timed out"), "MountFailed", &["timed out"]);
    let unscheduled = |message: &str| {
        let conditions = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]);
        pod(json!({"status": {"phase": "Pending", "conditions": conditions}}))
    };
    check(
        "nodes",
        unscheduled("0/3 nodes are available: Insufficient cpu."),
        "Unschedulable",
        &["Insufficient cpu;"],
    );
    check("claim", unscheduled("persistentvolumeclaim \"secret-tok\" not found"), "ClaimNotFound", &[]);
    let world = World::new().down(warned("secret \"x\" not found"));
    world.check("a reference", ConditionType::ResolvedRefs, ("False", "SecretNotFound"), &["chat-1"]);
    let zero = World::of(json!({"replicas": 0}), pool(json!({})));
    let mut zero = World { observed: Observed { pods: Vec::new(), ..zero.observed.clone() }, ..zero };
    zero.observed.deployment =
        Some(deployment(json!({"spec": {"replicas": 0}, "status": {"availableReplicas": null}})));
    zero.check("none are wanted", ConditionType::RouterAvailable, ("False", "ScaledToZero"), &["raise it"]);
    zero.check("none has settings", ConditionType::ConfigApplied, ("Unknown", "NoReplicas"), &[]);
}

#[test]
fn a_missing_secret_is_sought_where_it_is_named() {
    let tenants = json!({"tenancy": {"saltSecretRef": {"name": "x", "key": "salt"}}});
    let missing = |volume: &str| {
        let text = format!("MountVolume.SetUp failed for volume \"{volume}\" : secret \"x\" not found");
        let warning = Warning { reason: "FailedMount".to_owned(), message: text };
        let pod = router_pod("chat-1", waiting("ContainerCreating", ""), None);
        World::of(tenants.clone(), pool(json!({}))).down(RouterPod { warnings: vec![warning], ..pod })
    };
    let reference = ConditionType::ResolvedRefs;
    let own = ["spec.tenancy.saltSecretRef of the KvRouter"];
    missing("tenancy").check("the router's own", reference, ("False", "SecretNotFound"), &own);
    missing("nats").check("the pool's", reference, ("False", "SecretNotFound"), &["its name in the pool"]);
}

fn ended(code: i32, message: &str) -> RouterPod {
    let ended = json!({"terminated": {"exitCode": code, "reason": "Error", "message": message}});
    let status = json!({
        "name": "router", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}, "lastState": ended,
    });
    router_pod("chat-1", merged(not_ready(), json!({"status": {"containerStatuses": [status]}})), None)
}

#[test]
fn a_crash_tells_the_routers_last_words() {
    let crash = World::new().down(ended(101, "noise\nthread panicked\n"));
    crash.check(
        "crash",
        ConditionType::RouterAvailable,
        ("False", "CrashLooping"),
        &["thread panicked", "`kubectl logs -n models chat-1 --previous`"],
    );
    crash.check("no refusal", ConditionType::ConfigApplied, ("False", "RolloutPending"), &[]);
    let refused = World::new().down(ended(2, "config.yaml:3: blockSize: too large"));
    refused.check("refusal", ConditionType::ConfigApplied, ("False", "RouterRejectedConfig"), &["too large"]);
    let older = World::new().down(ended(2, "VersionSkew: schemaVersion 2"));
    older.check("older", ConditionType::ConfigApplied, ("False", "VersionSkew"), &["operator's release"]);
}

#[test]
fn settings_are_applied_when_every_replica_says_so() {
    let type_ = ConditionType::ConfigApplied;
    let workers = [worker("a", json!({}))];
    let behind = World::new().reporting(&workers, json!({"config": {"live": "0"}}));
    behind.check("one lags", type_, ("False", "RolloutPending"), &["chat-1"]);
    behind.check("that is no loss", ConditionType::Degraded, ("False", "AsExpected"), &[]);
    behind.check("and it serves", ConditionType::Ready, ("True", "Serving"), &[]);
    let refused = |text: &str| {
        let change = json!({"config": {"live": "0"}, "liveSettings": {"refused": text}});
        World::new().reporting(&workers, change)
    };
    refused("weight is negative").check(
        "refused",
        type_,
        ("False", "RouterRejectedConfig"),
        &["weight is negative"],
    );
    refused("weight").check("that is a loss", ConditionType::Degraded, ("True", "RouterRejectedConfig"), &[]);
    refused("weight").check("and it serves", ConditionType::Ready, ("True", "Serving"), &[]);
    refused("VersionSkew: 2").check("older", type_, ("False", "VersionSkew"), &[]);
    let former = World::new().reporting(&workers, json!({"liveSettings": {"refused": "of before"}}));
    former.check("a refusal of what was before", type_, ("True", "Applied"), &[]);
    let mut silent = World::new();
    silent.observed.pods[1].report = None;
    silent.check("a silent one", type_, ("Unknown", "RouterUnreachable"), &["chat-2", "9090"]);
    let mut few = World::new();
    few.observed.pods.truncate(1);
    few.check("one is missing", type_, ("False", "RolloutPending"), &["still to come"]);
}

#[test]
fn tokenizer_and_index_are_told_by_the_reports() {
    let workers = [worker("a", json!({}))];
    let failed = World::new()
        .reporting(&workers, json!({"tokenizer": {"ready": false, "message": "no tokenizer.json"}}));
    failed.check(
        "broken",
        ConditionType::TokenizerReady,
        ("False", "TokenizerFailed"),
        &["no tokenizer.json"],
    );
    failed.check("a loss", ConditionType::Degraded, ("True", "TokenizerFailed"), &[]);
    let none = || pool(json!({"model": {"tokenizer": null}}));
    let without = World::of(json!({}), none());
    without.check(
        "none",
        ConditionType::TokenizerReady,
        ("False", "TokenizerNotConfigured"),
        &["spec.model.tokenizer"],
    );
    let blind = World::of(json!({"policy": "RoundRobin"}), none());
    blind.check("not needed", ConditionType::TokenizerReady, ("True", "NotRequired"), &[]);
    let heard = |reason: &str| World::new().reporting(&[worker_heard("a", reason)], json!({}));
    let index = ConditionType::IndexWarm;
    heard("snapshot_pending").check("fetching", index, ("False", "Syncing"), &["a;"]);
    heard("stores_missing").check("too low", index, ("False", "ViewsIncomplete"), &["a;", "replay socket"]);
    heard("page_size_mismatch").check("pages", index, ("False", "PageSizeMismatch"), &["PageSizeParity"]);
    heard("silence").check("events are the reason", ConditionType::Degraded, ("True", "NoPublishers"), &[]);
    let down =
        World::new().reporting(&[worker("a", json!({"ready": false, "reason": "no_model"}))], json!({}));
    down.check("nobody", index, ("Unknown", "NoWorkers"), &["a: no_model", "pods."]);
    let other = worker("a", json!({"ready": false, "reason": "other_model"}));
    let other = World::new().reporting(&[other], json!({}));
    other.check("another name", index, ("Unknown", "NoWorkers"), &["list Qwen/Qwen3-8B", "spec.model.name"]);
    let off = World::of(json!({}), pool(json!({"kvEvents": {"transport": "None"}})));
    off.check("no events", index, ("True", "Disabled"), &[]);
}

/// Case K15: what one router holds as of a message, every other one holds.
#[test]
fn routers_that_hold_different_views_are_told() {
    let holding = |blocks: Value, seq: u64| {
        let view = json!({"trust": "exact", "epoch": 4, "seq": seq, "blocks": blocks});
        worker("a", json!({"targets": [target(view)]}))
    };
    let pair = |first: Value, second: Value| {
        let mut world = World::new().reporting(&[first], json!({}));
        world.observed.pods[1] = router_pod("chat-2", json!({}), Some(world.report(&[second], json!({}))));
        world
    };
    let (index, warm) = (ConditionType::IndexWarm, ("True", "Warm"));
    pair(holding(json!(10), 7), holding(json!(10), 7)).check("the same", index, warm, &[]);
    pair(holding(json!(10), 7), holding(json!(12), 8)).check("of different times", index, warm, &[]);
    pair(holding(json!(10), 7), holding(Value::Null, 7)).check("it does not say", index, warm, &[]);
    let other = pair(holding(json!(10), 7), holding(json!(12), 7));
    other.check(
        "different",
        index,
        ("False", "ViewsDiffer"),
        &["chat-1, chat-2", "those of a;", "delete these pods"],
    );
    other.check("a loss", ConditionType::Degraded, ("True", "ViewsDiffer"), &[]);
}

/// Cases K10 and G09: what a router reports of a view is told, whatever it is.
#[test]
fn no_way_of_going_blind_leaves_conditions_green() {
    let heard = |reason: &str| World::new().reporting(&[worker_heard("a", reason)], json!({}));
    let (events, index, degraded) =
        (ConditionType::EventsConnected, ConditionType::IndexWarm, ConditionType::Degraded);
    let stalled = heard("stalled");
    let silent = heard("nothing_stored");
    let parts = ["tell of no stored block: a;", "start them with prefix caching and KV events"];
    silent.check("traffic without events", events, ("False", "NothingStored"), &parts);
    silent.check("nothing is known", index, ("False", "NothingStored"), &["a;", "EventsConnected"]);
    silent.check("a loss", degraded, ("True", "NothingStored"), &["a;"]);
    stalled.check("no events any more", events, ("False", "NothingStored"), &["publisher has ended"]);
    stalled.check("known no more", index, ("False", "NothingStored"), &["a;"]);
    let unnumbered = heard("no_sequence");
    unnumbered.check("they arrive", events, ("True", "Connected"), &[]);
    unnumbered.check("no proof", index, ("Unknown", "Unsequenced"), &["of a,", "numbers its events"]);
    unnumbered.check("named", degraded, ("Unknown", "Unsequenced"), &[]);
    let untold = heard("adapters_untold");
    untold.check("they arrive", events, ("True", "Connected"), &[]);
    untold.check("of no use", index, ("False", "AdaptersUntold"), &["to a;", "SGLang 0.5.22"]);
    untold.check("a loss", degraded, ("True", "AdaptersUntold"), &[]);
    let strange = heard("rank_mismatch");
    strange.check("they arrive", events, ("True", "Connected"), &[]);
    strange.check("of another", index, ("False", "RankMismatch"), &["to a;", "dpSize", "kvEvents.port"]);
    strange.check("a loss", degraded, ("True", "RankMismatch"), &[]);
    let later = heard("of_the_future");
    later.check("a newer router", index, ("Unknown", "NotObservable"), &["views of a;", "operator of"]);
    for reason in ["ok", "prefix_caching_off", "render_diverged"] {
        heard(reason).check(reason, index, ("True", "Warm"), &[]);
    }
    let drifting = |reason: &str, cause: &str| {
        let reconciled = json!({"share": 0.1, "credit": 1.0, "drift": "less", "cause": cause});
        let targets = [target(json!({"reason": reason, "reconciled": reconciled}))];
        World::new().reporting(&[worker("a", json!({"targets": targets}))], json!({}))
    };
    let template = drifting("ok", "template");
    template.check("drift", index, ("False", "Drifting"), &["cached: a", "other tokens", "chat template"]);
    template.check("a loss", degraded, ("True", "Drifting"), &[]);
    drifting("ok", "page_size").check("cause", index, ("False", "Drifting"), &["spec.blockSize"]);
    drifting("no_sequence", "lag").check("worse", index, ("False", "Drifting"), &["late events"]);
    drifting("gap", "restart").check("explained", index, ("False", "ViewsIncomplete"), &[]);
    drifting("ok", "of_the_future").check("newer", index, ("False", "Drifting"), &["/health/report"]);
    drifting("ok", "hybrid_attention").check("expected", index, ("True", "Warm"), &[]);
    let both = [worker_heard("a", "nothing_stored"), worker_heard("b", "silence")];
    let both = World::new().reporting(&both, json!({}));
    both.check("the worst first", events, ("False", "SomeEnginesSilent"), &["of b;"]);
    both.check("and here", index, ("False", "Syncing"), &["of b;"]);
}

/// Case C10: what differs is a condition; what cannot be compared is named and no
/// loss.
#[test]
fn other_tokens_are_named_with_their_place() {
    let type_ = ConditionType::RenderParity;
    let told = |all: &[(&str, &str, &str)]| {
        let of = |(name, parity, reason): &(&str, &str, &str)| {
            worker(name, json!({"rendering": rendering(parity, reason)}))
        };
        let workers: Vec<Value> = all.iter().map(of).collect();
        World::new().reporting(&workers, json!({}))
    };
    let same = ("a", "confirmed", "same");
    let other = told(&[same, ("b", "diverged", "differs"), ("c", "unknown", "not_compared")]);
    other.check(
        "diverged",
        type_,
        ("False", "RenderDiverged"),
        &["than b (token 7", "\"tools\"", "chat template."],
    );
    other.check("a loss", ConditionType::Degraded, ("True", "RenderDiverged"), &[]);
    other.check("served", ConditionType::Ready, ("True", "Serving"), &[]);
    let pending = told(&[same, ("b", "unknown", "no_endpoint"), ("c", "unknown", "not_compared")]);
    pending.check("under way", type_, ("Unknown", "RenderPending"), &["of c yet", "wait."]);
    let hidden = told(&[same, ("b", "unknown", "no_endpoint")]);
    hidden.check("no endpoint", type_, ("Unknown", "NotObservable"), &["of b (no_endpoint)", "tokenize."]);
    hidden.check("no loss", ConditionType::Degraded, ("False", "AsExpected"), &[]);
    let older = World::new().reporting(&[worker("a", json!({"rendering": null}))], json!({}));
    older.check("an older router", type_, ("Unknown", "NotObservable"), &["release"]);
    let mut second = told(&[("a", "diverged", "differs")]);
    second.observed.pods.swap(0, 1);
    second.check("of any router", type_, ("False", "RenderDiverged"), &[]);
    let blind = World::of(json!({"policy": "RoundRobin"}), pool(json!({"model": {"tokenizer": null}})));
    blind.check("no tokenizer", type_, ("True", "NotRequired"), &[]);
    let down =
        World::new().reporting(&[worker("a", json!({"ready": false, "reason": "no_model"}))], json!({}));
    down.check("nobody", type_, ("Unknown", "NoWorkers"), &["a: no_model"]);
}

/// Case K46c: what an earlier release published under a type that is no more goes.
#[test]
fn a_type_that_is_no_more_vanishes() {
    let mut world = World::new();
    let mut status = world.settled();
    let stale = Condition { type_: "IndexHealthy".to_owned(), ..status.conditions[0].clone() };
    status.conditions.push(stale);
    world.router.status = Some(status);
    let types: Vec<String> = world.settled().conditions.into_iter().map(|it| it.type_).collect();
    assert_eq!(types, ROUTER_TYPES.iter().map(|type_| type_.as_str()).collect::<Vec<_>>());
}

#[test]
fn a_lost_poll_is_no_alarm() {
    let world = World::new();
    let mut router = world.router.clone();
    router.status = Some(world.settled());
    let mut memory = Memory::new(at(-1000));
    let mut reason = |seconds: i64, lost: bool| {
        let mut observed = Observed { now: at(seconds), ..world.observed.clone() };
        for pod in &mut observed.pods {
            pod.report.as_mut().expect("it reported").at = at(if lost { 0 } else { seconds });
        }
        let desired = validate(&router, &observed, &flags()).map(|valid| build(&valid, &flags()));
        let input = Input {
            router: &router,
            verdict: desired.as_ref(),
            observed: &observed,
            apply_failure: None,
            window: WINDOW,
        };
        let outcome = status(&input, &memory);
        memory = outcome.memory;
        router.status = Some(outcome.status.clone());
        let condition = find(&outcome.status.conditions, ConditionType::EventsConnected).expect("present");
        (Status::of(&condition.status), outcome.recheck_after.is_some())
    };
    assert_eq!(reason(20, true), (Status::True, false), "20 s are fresh");
    assert_eq!(reason(21, true), (Status::True, true), "21 s are not, and the window begins");
    assert_eq!(reason(25, false), (Status::True, false), "heard again");
    assert_eq!(reason(30, true), (Status::True, true), "lost again");
    assert_eq!(reason(60, true), (Status::Unknown, false), "for a whole window");
}
