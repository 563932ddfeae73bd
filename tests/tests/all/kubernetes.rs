//! Workers as pods: they join, leave and change, and the API server has its moods.
//!
//! Pods are engines on loopback addresses of their own, all at the same ports. Changes must show
//! through the watch alone: lists are an hour apart, except where they are what is tested.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use engine_sim::{Config, EngineSim, EventPort, Wire};
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::api_server::ApiServer;
use crate::harness::{MODEL, Router, Setup, engine, long, received, unique, until};
use crate::nats::{Bridge, Broker};

/// How soon a router must follow what the API server tells.
const AT_ONCE: Duration = Duration::from_secs(1);

/// An address of loopback that nobody else has.
pub(crate) fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(2);
    let (own, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    assert!(next < 250, "one more byte is needed");
    format!("127.{}.{}.{next}", 64 + own % 128, own / 128 % 256)
}

/// An engine at the ports that pods of these tests have.
pub(crate) async fn engine_at(ip: &str, change: impl FnOnce(&mut Config)) -> EngineSim {
    engine(|config| {
        config.listen = format!("{ip}:8000").parse().unwrap();
        config.kv_events_port = EventPort::Base(5557);
        config.replay_port = EventPort::Base(5657);
        change(config);
    })
    .await
}

/// A pod that is ready.
pub(crate) fn pod(name: &str, ip: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "ai", "uid": format!("uid-of-{name}"),
                     "labels": {"app": "qwen"}, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": []},
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn map(text: &str) -> Value {
    json!({"metadata": {"name": "live", "namespace": "ai"}, "data": {"live.yaml": text}})
}

pub(crate) fn setup(api: &ApiServer, more: &str) -> Setup {
    let discovery = format!(
        "\n  backend: Kubernetes\n  kubernetes: {{namespace: ai, selector: {{app: qwen}}, targetPorts: [8000]{more}}}"
    );
    Setup {
        discovery: Some(discovery),
        kubeconfig: Some(api.kubeconfig()),
        flags: ["--relist-seconds", "3600"].map(str::to_owned).to_vec(),
        ..Setup::of(Vec::new())
    }
}

/// Workers of the report: `ip reason`, of all or of those that are picked.
async fn workers(router: &Router) -> Vec<String> {
    let report = router.report().await;
    let word = |worker: &Value| {
        let (id, reason) = (worker["worker"].as_str().unwrap(), worker["reason"].as_str().unwrap());
        format!("{} {reason}", id.strip_suffix(":8000").unwrap())
    };
    report["workers"].as_array().unwrap().iter().map(word).collect()
}

/// Waits until the workers are these; how long that took.
async fn become_workers(router: &Router, expected: &[&str]) -> Duration {
    let mut expected: Vec<String> = expected.iter().map(|one| (*one).to_owned()).collect();
    expected.sort();
    let started = Instant::now();
    until(&format!("the workers are {expected:?}"), async || {
        let mut found = workers(router).await;
        found.sort();
        (found == expected).then_some(())
    })
    .await;
    started.elapsed()
}

async fn message(router: &Router, reason: &str) -> String {
    until(&format!("problem {reason}"), async || {
        let report = router.report().await;
        let all = report["problems"].as_array().unwrap().clone();
        let found = all.into_iter().find(|problem| problem["reason"] == reason)?;
        found["message"].as_str().map(str::to_owned)
    })
    .await
}

/// Requests go nowhere else than to `ip`.
async fn goes_to(router: &Router, ip: &str) {
    for number in 0..4 {
        let chat = router.chat(&long(100 + number), 2).await;
        assert_eq!(chat.worker(), format!("{ip}:8000"));
    }
}

fn names(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// A pod that leaves gets nothing new at once, and what it has begun it ends.
#[tokio::test]
async fn pods_join_and_leave() {
    let api = ApiServer::start().await;
    let (a, b) = (address(), address());
    let first = engine_at(&a, |config| config.step_ms = 20.0).await;
    let _second = engine_at(&b, |config| config.wire = Wire::Sglang0523).await;
    api.put("pods", pod("a", &a));
    let router = Router::start(setup(&api, "")).await;
    become_workers(&router, &[&format!("{a} ok")]).await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 100, "stream": true});
    let url = router.url("/v1/chat/completions");
    let answer = router.client.open(Method::POST, &url, &[], body.to_string().into()).await.unwrap();
    let mut stream = answer.into_body();
    let mut text = stream.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();

    api.put("pods", pod("b", &b));
    become_workers(&router, &[&format!("{a} ok"), &format!("{b} ok")]).await;
    let report = router.report().await;
    let versions: Vec<&Value> =
        report["workers"].as_array().unwrap().iter().map(|worker| &worker["engineVersion"]).collect();
    assert_eq!(versions, ["0.33.0", "0.5.23"], "of vLLM's /version and SGLang's /server_info");
    assert_eq!(report["workers"][0]["pod"], "a");

    api.delete("pods", "a");
    let took = become_workers(&router, &[&format!("{b} ok")]).await;
    assert!(took < AT_ONCE, "it left after {took:?}");
    goes_to(&router, &b).await;
    // A successor at the same address begins with nothing booked.
    let mut successor = pod("a", &a);
    successor["metadata"]["uid"] = json!("another");
    api.put("pods", successor);
    become_workers(&router, &[&format!("{a} ok"), &format!("{b} ok")]).await;
    assert_eq!(router.metric("kvrouter_target_requests", &a).await, 0.0);
    while let Some(frame) = stream.frame().await {
        text.extend_from_slice(&frame.unwrap().into_data().unwrap());
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was not cut: {text}");
    assert_eq!(received(&first).await.len(), 1);
    router.is_idle().await;
    assert_eq!(router.metric("kvrouter_leases_released", &a).await, 0.0, "the release was its predecessor's");
    assert_eq!(router.metric("kvrouter_fleet_changes_total", "joined").await, 3.0);
    assert_eq!(router.metric("kvrouter_fleet_changes_total", "left").await, 1.0);
}

/// Ready says no: nothing new, and nothing is forgotten; a new life is another worker.
#[tokio::test]
async fn a_readiness_blip_keeps_the_view() {
    let api = ApiServer::start().await;
    let (a, b) = (address(), address());
    let (first, _second) = (engine_at(&a, |_| {}).await, engine_at(&b, |_| {}).await);
    api.put("pods", pod("a", &a));
    let router = Router::start(setup(&api, "").events_only()).await;
    become_workers(&router, &[&format!("{a} ok")]).await;
    router.chat(&long(1), 2).await;
    let held = router.agrees_with(&first).await;
    api.put("pods", pod("b", &b));
    become_workers(&router, &[&format!("{a} ok"), &format!("{b} ok")]).await;

    let ready = |status: &'static str| {
        api.edit("pods", "a", |pod| pod["status"]["conditions"][0]["status"] = json!(status));
    };
    ready("False");
    let took = become_workers(&router, &[&format!("{a} pod_not_ready"), &format!("{b} ok")]).await;
    assert!(took < AT_ONCE, "it was kept out after {took:?}");
    assert!(message(&router, "pod_not_ready").await.contains("readiness probe"));
    let chat = router.chat(&long(1), 2).await;
    assert_eq!(chat.worker(), format!("{b}:8000"), "although the other has it cached and answers");
    assert_eq!(router.view(&format!("{a}:8000")).await["block_count"], held, "nothing is forgotten");
    ready("True");
    become_workers(&router, &[&format!("{a} ok"), &format!("{b} ok")]).await;
    assert_eq!(router.view(&format!("{a}:8000")).await["block_count"], held);
    assert_eq!(router.metric("kvrouter_fleet_changes_total", "left").await, 0.0);

    api.edit("pods", "a", |pod| pod["metadata"]["uid"] = json!("another"));
    until("another life is another worker", async || {
        (router.metric("kvrouter_fleet_changes_total", "left").await == 1.0).then_some(())
    })
    .await;
    // An evicted pod is told as changed, without its address.
    api.edit("pods", "a", |pod| pod["status"]["podIP"] = Value::Null);
    let took = become_workers(&router, &[&format!("{b} ok")]).await;
    assert!(took < AT_ONCE, "it left after {took:?}");
    api.edit("pods", "b", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let took = become_workers(&router, &[]).await;
    assert!(took < AT_ONCE, "it left after {took:?}");
    assert!(message(&router, "no_workers").await.contains("kubectl get pods -n ai -l app=qwen"));
}

/// Case G23: the pod that owns a prefix, and a session, dies under load and is deleted. Until then another
/// one takes over what fails there; from then on nothing goes there.
#[tokio::test]
async fn a_dead_pod_keeps_neither_its_prefix_nor_its_session() {
    let (api, ips) = (ApiServer::start().await, [address(), address(), address()]);
    let mut engines = Vec::new();
    for (name, ip) in ["a", "b", "c"].into_iter().zip(&ips) {
        engines.push(engine_at(ip, |_| {}).await);
        api.put("pods", pod(name, ip));
    }
    let router = Router::start(setup(&api, "").more("sessionAffinity: {mode: Both}")).await;
    let ok = |ip: &String| format!("{ip} ok");
    let all: Vec<String> = ips.iter().map(ok).collect();
    become_workers(&router, &names(&all)).await;
    let ask = async |session: &str| {
        let request = unique();
        let headers = [("x-request-id", &*request), ("x-session-id", session)];
        let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 2}).to_string();
        let answer =
            router.send("/v1/chat/completions", &headers[..1 + usize::from(!session.is_empty())], body).await;
        (answer.status, router.receipts(&request).await)
    };
    let target = |receipts: &[Value]| receipts[0]["chosen"]["target"].as_str().unwrap().to_owned();
    let (status, first) = ask("s").await;
    assert_eq!((status, &first[0]["session"]), (200, &json!("new")));
    let owner = target(&first);
    let at = ips.iter().position(|ip| owner == format!("{ip}:8000#0")).unwrap();
    router.agrees_with(&engines[at]).await;
    for session in ["s", ""] {
        let (_, receipts) = ask(session).await;
        assert_eq!((target(&receipts), &receipts[0]["outcome"]), (owner.clone(), &json!("hit")));
    }

    let gone = AtomicBool::new(false);
    let load = async |session: &str| {
        let mut later = Vec::new();
        while later.len() < 20 {
            let was_gone = gone.load(Ordering::Relaxed);
            let (status, receipts) = ask(session).await;
            if was_gone {
                later.push((status, receipts));
            }
        }
        later
    };
    let fall = async {
        engines.remove(at).stop().await;
        // It fails for a while before its pod is seen to be gone.
        tokio::time::sleep(Duration::from_millis(500)).await;
        api.delete("pods", ["a", "b", "c"][at]);
        let left: Vec<String> = ips.iter().filter(|ip| **ip != ips[at]).map(ok).collect();
        become_workers(&router, &names(&left)).await;
        gone.store(true, Ordering::Relaxed);
    };
    let (mine, other, unbound, ()) = tokio::join!(load("t"), load("u"), load(""), fall);
    for (status, receipts) in [mine, other, unbound].concat() {
        assert_eq!((status, receipts.len()), (200, 1), "{receipts:?}");
        for candidate in receipts[0]["candidates"].as_array().unwrap() {
            assert_ne!(candidate["target"], owner, "it is not even considered");
        }
    }
    let (status, rebound) = ask("s").await;
    assert_eq!((status, &rebound[0]["session"]), (200, &json!("new")), "what bound it has left: {rebound:?}");
    let (status, again) = ask("s").await;
    assert_eq!((status, &again[0]["session"], target(&again)), (200, &json!("followed"), target(&rebound)));
    assert_eq!(again[0]["outcome"], "hit", "and the prefix is there: {again:?}");
    router.is_idle().await;
}

/// Another life of a pod is followed anew over NATS: its bridge's next number continues nothing.
#[tokio::test]
async fn a_successor_is_followed_anew_over_nats() {
    let (api, broker) = (ApiServer::start().await, Broker::start().await);
    let a = address();
    let engine = engine_at(&a, |_| {}).await;
    let _bridge = Bridge::start(&engine, &broker.url());
    api.put("pods", pod("a", &a));
    let events = format!("{{transport: NATS, nats: {{url: \"{}\"}}}}", broker.url());
    let router = Router::start(Setup { events, ..setup(&api, "") }).await;
    become_workers(&router, &[&format!("{a} ok")]).await;
    router.chat(&long(1), 2).await;
    let held = router.agrees_with(&engine).await;
    api.edit("pods", "a", |pod| pod["metadata"]["uid"] = json!("another"));
    until("another life is another worker", async || {
        (router.metric("kvrouter_fleet_changes_total", "left").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(router.agrees_with(&engine).await, held);
    assert_eq!(router.metric("kvrouter_view_resyncs_total", "joined").await, 2.0);
    api.delete("pods", "a");
    become_workers(&router, &[]).await;
    until("the slot is free", async || {
        (router.metric("kvrouter_pool", "index_slots").await == 0.0).then_some(())
    })
    .await;
    assert_eq!(router.metric("kvrouter_pool", "index_blocks").await, 0.0);
}

/// Case K17: a pod comes and goes faster than anybody can follow, under one address. What counts is how it ends.
#[tokio::test]
async fn a_pod_that_comes_and_goes_in_a_hurry_is_what_it_was_last() {
    let (api, ips) = (ApiServer::start().await, [address(), address()]);
    let mut engines = Vec::new();
    for ip in &ips {
        engines.push(engine_at(ip, |_| {}).await);
    }
    api.put("pods", pod("stays", &ips[0]));
    let router = Router::start(setup(&api, "")).await;
    let sizes = async || {
        let mut sizes = Vec::new();
        for table in ["workers", "index_slots", "tasks"] {
            sizes.push(router.metric("kvrouter_pool", &format!("\"{table}\"")).await);
        }
        sizes
    };
    become_workers(&router, &[&format!("{} ok", ips[0])]).await;
    let before = sizes().await;
    for (last, expected) in [("gone", 1.0), ("there", 2.0), ("gone", 1.0)] {
        for life in 0..150 {
            let mut hasty = pod("hasty", &ips[1]);
            hasty["metadata"]["uid"] = json!(format!("{last}-{life}"));
            api.put("pods", hasty);
            // Sometimes the router sees each step, sometimes several at once.
            if life % 3 == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            api.delete("pods", "hasty");
        }
        if last == "there" {
            api.put("pods", pod("hasty", &ips[1]));
        }
        // The second look is for what comes late.
        for _ in 0..2 {
            until(last, async || {
                let [workers, slots, _] = sizes().await[..] else { return None };
                (workers == expected && slots == expected).then_some(())
            })
            .await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let found = sizes().await;
        assert_eq!(found[..2], [expected, expected], "{last}: it stays so");
        if last == "there" {
            api.delete("pods", "hasty");
        }
    }
    until("nothing runs for it any more", async || (sizes().await[2] <= before[2] + 4.0).then_some(())).await;
    goes_to(&router, &ips[0]).await;
}

/// A watch that is open and says nothing is put right by the next list.
#[tokio::test]
async fn a_silent_watch_is_put_right() {
    let api = ApiServer::start().await;
    let (a, b) = (address(), address());
    let (_first, _second) = (engine_at(&a, |_| {}).await, engine_at(&b, |_| {}).await);
    api.put("pods", pod("a", &a));
    let mut setup = setup(&api, ", liveSettingsConfigMap: live");
    setup.flags = ["--relist-seconds", "1"].map(str::to_owned).to_vec();
    api.put("configmaps", map("schemaVersion: 1"));
    let router = Router::start(setup).await;
    become_workers(&router, &[&format!("{a} ok")]).await;
    api.fall_silent();
    api.delete("pods", "a");
    api.put("pods", pod("b", &b));
    api.put("configmaps", map("{schemaVersion: 1, policy: LeastLoad}"));
    become_workers(&router, &[&format!("{b} ok")]).await;
    until("live settings follow", async || (router.report().await["policy"] == "least-load").then_some(()))
        .await;
    assert!(api.lists("pods") > 1);
    router.is_well().await;
}

/// Without the API server the workers known last stay; then everything is caught up with.
#[tokio::test]
async fn routing_outlives_the_api_server() {
    let mut api = ApiServer::start().await;
    let (a, b) = (address(), address());
    let (_first, _second) = (engine_at(&a, |_| {}).await, engine_at(&b, |_| {}).await);
    api.put("pods", pod("a", &a));
    api.put("configmaps", map("schemaVersion: 1"));
    let router = Router::start(setup(&api, ", liveSettingsConfigMap: live")).await;
    become_workers(&router, &[&format!("{a} ok")]).await;
    api.go_away().await;
    let message = message(&router, "api_unreachable").await;
    assert!(message.contains("the workers and live settings known last stay in use"), "{message}");
    goes_to(&router, &a).await;
    let report = router.report().await;
    let unreachable = report["problems"].as_array().unwrap().iter();
    let unreachable = unreachable.filter(|problem| problem["reason"] == "api_unreachable").count();
    assert_eq!((unreachable, &report["ready"]), (1, &json!(true)), "one problem, however much is followed");
    api.delete("pods", "a");
    api.put("pods", pod("b", &b));
    api.come_back().await;
    become_workers(&router, &[&format!("{b} ok")]).await;
    router.is_well().await;
    goes_to(&router, &b).await;
    assert!(router.metric("kvrouter_discovery_errors_total", "api_unreachable").await > 0.0);
}

/// Missing rights are named with the command that grants them.
#[tokio::test]
async fn missing_rights_are_named() {
    let api = ApiServer::start().await;
    let a = address();
    let _first = engine_at(&a, |_| {}).await;
    api.put("pods", pod("a", &a));
    api.forbid(Some(("list", "pods")));
    let router = Router::start_cold(setup(&api, "")).await;
    let message = message(&router, "api_forbidden").await;
    let command = "kubectl create rolebinding kv-router --clusterrole=kvrouter-router --serviceaccount=ai:kv-router -n ai";
    assert!(message.contains("may not list pods") && message.contains(command), "{message}");
    let report = router.report().await;
    assert_eq!((&report["ready"], &report["readyReason"]), (&json!(false), &json!("workers_pending")));
    assert_eq!(router.get("/readyz").await.text(), "workers_pending");
    api.forbid(None);
    become_workers(&router, &[&format!("{a} ok")]).await;
    router.is_well().await;
    until("it is ready", async || (router.report().await["readyReason"] == "ok").then_some(())).await;
}

/// Lists that succeed do not hide that watches are refused, and are not repeated like mad for it.
#[tokio::test]
async fn a_refused_watch_is_named_and_stays_named() {
    let api = ApiServer::start().await;
    let a = address();
    let _first = engine_at(&a, |_| {}).await;
    api.put("pods", pod("a", &a));
    api.forbid(Some(("watch", "pods")));
    let router = Router::start(setup(&api, "")).await;
    assert!(message(&router, "api_forbidden").await.contains("may not watch pods"));
    become_workers(&router, &[&format!("{a} ok")]).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(router.has_problem("api_forbidden", None).await, "whatever lists say");
    }
    let lists = api.lists("pods");
    assert!(lists <= 8, "{lists} lists in some seconds");
    api.forbid(None);
    router.is_well().await;
}

/// A pod is of one role and one pool, and requests go to mixed ones.
#[tokio::test]
async fn pods_of_no_role_or_another_pool_are_kept_out() {
    let api = ApiServer::start().await;
    let ips = [address(), address(), address(), address()];
    let mut engines = Vec::new();
    let labels = [
        json!({"app": "qwen", "part": "all"}),
        json!({"app": "qwen", "part": "prefill"}),
        json!({"app": "qwen", "part": "all", "half": "decode"}),
        json!({"app": "qwen"}),
    ];
    for (ip, labels) in ips.iter().zip(labels) {
        engines.push(engine_at(ip, |_| {}).await);
        let mut pod = pod(ip, ip);
        pod["metadata"]["labels"] = labels;
        api.put("pods", pod);
    }
    api.put("configmaps", map("schemaVersion: 1"));
    let roles = ", liveSettingsConfigMap: live, roles: [{name: Mixed, selector: {part: all}}, {name: Prefill, selector: {part: prefill}, protocol: NIXL}, {name: Decode, selector: {half: decode}, protocol: NIXL}]";
    let router = Router::start(setup(&api, roles).policy("RoundRobin")).await;
    let [mixed, prefill, two, none] = &ips;
    let out = [format!("{two} two_roles"), format!("{none} no_role")];
    become_workers(&router, &[&format!("{mixed} ok"), &format!("{prefill} ok"), &out[0], &out[1]]).await;
    let roles: Vec<Value> =
        router.report().await["workers"].as_array().unwrap().iter().map(|one| one["role"].clone()).collect();
    assert_eq!(roles, ["mixed", "prefill", "unknown", "unknown"]);
    assert!(message(&router, "no_role").await.contains("mixed, prefill, decode"));
    assert!(message(&router, "two_roles").await.contains("more than one"));
    goes_to(&router, mixed).await;

    // Another pool takes the labels of the only mixed pod.
    api.put("configmaps", map("{schemaVersion: 1, foreignSelectors: [{part: all}]}"));
    let shared = format!("{mixed} two_pools");
    let took =
        become_workers(&router, &[&shared, &format!("{prefill} ok"), &format!("{two} two_pools"), &out[1]])
            .await;
    assert!(took < AT_ONCE, "it was kept out after {took:?}");
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 2});
    let url = router.url("/v1/chat/completions");
    let waits = router.client.send(Method::POST, &url, &[], body.to_string().into());
    let (answer, ()) = tokio::join!(waits, async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        api.put("configmaps", map("schemaVersion: 1"));
    });
    assert_eq!(answer.unwrap().status, 200, "it waited for a worker instead of going to one for prefill");
    assert_eq!(received(&engines[1]).await.len(), 0);
}

/// Live settings of a ConfigMap: taken at once, refused by name, kept when they are gone.
#[tokio::test]
async fn live_settings_follow_their_config_map() {
    let api = ApiServer::start().await;
    let a = address();
    let _first = engine_at(&a, |_| {}).await;
    api.put("pods", pod("a", &a));
    let text = "{schemaVersion: 1, policy: LeastLoad}";
    api.put("configmaps", map(text));
    let router = Router::start(setup(&api, ", liveSettingsConfigMap: live")).await;
    let follows = async |policy: &str, refused: Option<&str>| {
        let started = Instant::now();
        until(&format!("policy {policy}, refused {refused:?}"), async || {
            let report = router.report().await;
            let found = report["liveSettings"]["refused"].as_str();
            let same = match (found, refused) {
                (Some(found), Some(part)) => found.contains(part),
                (found, part) => found == part,
            };
            (report["policy"] == policy && same).then_some(())
        })
        .await;
        assert!(started.elapsed() < AT_ONCE, "after {:?}", started.elapsed());
    };
    follows("least-load", None).await;
    let report = router.report().await;
    assert_eq!(report["config"]["live"], digest(text));
    assert_eq!(report["liveSettings"]["watched"], true);
    let start = std::fs::read_to_string(router.file()).unwrap();
    assert_eq!(report["config"]["start"], digest(&start));

    api.put("configmaps", map("{schemaVersion: 1, policy: KvAware}"));
    follows("kv-aware", None).await;
    api.put("configmaps", map("schemaVersion: 1\npolicy: Best\n"));
    follows("kv-aware", Some("configmap/ai/live/live.yaml:2: policy: unknown variant `Best`")).await;
    assert!(message(&router, "live_settings_refused").await.contains("the ConfigMap live in namespace ai"));
    assert_eq!(
        router.report().await["config"]["live"],
        digest("{schemaVersion: 1, policy: KvAware}"),
        "the digest is that of what is in force"
    );
    api.put("configmaps", map("{schemaVersion: 2, policy: KvAware, fieldOfTheFuture: 1}"));
    follows("kv-aware", Some("VersionSkew")).await;
    api.put("configmaps", json!({"metadata": {"name": "live", "namespace": "ai"}, "data": {"x": "y"}}));
    follows("kv-aware", Some("the ConfigMap has no such key")).await;
    api.delete("configmaps", "live");
    follows("kv-aware", Some("there is no such ConfigMap")).await;
    api.put("configmaps", map("schemaVersion: 1"));
    follows("cache-plus-load", None).await;
    router.is_well().await;
}

/// A page that is not the others' is named, and with RequireParity kept out, but never everybody.
#[tokio::test]
async fn odd_pages_are_kept_out_where_parity_is_required() {
    let api = ApiServer::start().await;
    let ips = [address(), address(), address()];
    let mut engines = Vec::new();
    for (ip, page) in ips.iter().zip([16, 8, 16]) {
        engines.push(engine_at(ip, |config| config.page_size = page).await);
        api.put("pods", pod(ip, ip));
    }
    api.put("configmaps", map("{schemaVersion: 1, pageSizePolicy: RequireParity}"));
    let router = Router::start(setup(&api, ", liveSettingsConfigMap: live").policy("RoundRobin")).await;
    let [a, b, c] = &ips;
    let all = [format!("{a} ok"), format!("{b} ok"), format!("{c} ok")];
    let odd = format!("{b} page_size");
    become_workers(&router, &[&all[0], &odd, &all[2]]).await;
    let named = message(&router, "page_size").await;
    assert!(named.contains(&format!("{b}:8000")) && named.contains("page of 8"), "{named}");
    for number in 0..4 {
        assert_ne!(router.chat(&long(number), 2).await.worker(), format!("{b}:8000"));
    }
    api.put("configmaps", map("schemaVersion: 1"));
    become_workers(&router, &[&all[0], &all[1], &all[2]]).await;
    let named = message(&router, "page_size_differs").await;
    assert!(named.contains(&format!("{b}:8000")), "{named}");
    api.put("configmaps", map("{schemaVersion: 1, pageSizePolicy: RequireParity}"));
    become_workers(&router, &[&all[0], &odd, &all[2]]).await;
    // Only the odd one is left, so it is the pool's page now.
    api.delete("pods", a);
    api.delete("pods", c);
    become_workers(&router, &[&all[1]]).await;
    goes_to(&router, b).await;
    router.is_well().await;
}

/// Nobody's page divides the block: everybody stays, and the report says so.
#[tokio::test]
async fn parity_never_keeps_everybody_out() {
    let api = ApiServer::start().await;
    let a = address();
    let _first = engine_at(&a, |config| config.page_size = 32).await;
    api.put("pods", pod("a", &a));
    let setup = setup(&api, "").more("pageSizePolicy: RequireParity");
    let router = Router::start(setup).await;
    let named = message(&router, "page_size_everywhere").await;
    assert!(named.contains("all mixed workers"), "{named}");
    become_workers(&router, &[&format!("{a} ok")]).await;
    goes_to(&router, &a).await;
}

/// A router without workers is ready: it says so itself.
#[tokio::test]
async fn a_pool_without_pods_is_ready() {
    let api = ApiServer::start().await;
    let mut waiting = pod("a", &address());
    waiting["status"]["conditions"] = json!([]);
    api.put("pods", waiting);
    let router = Router::start(setup(&api, "")).await;
    let named = message(&router, "no_workers").await;
    assert!(named.contains("1 of its pods are not ready yet"), "{named}");
    assert_eq!(workers(&router).await, Vec::<String>::new());
}

fn digest(text: &str) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(text.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
