//! Workers that refuse, die or hang: another one takes over once, or the client hears why.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::harness::{MODEL, Router, Setup, engine, fault, id, long, received, total, unique};
use crate::raw_worker::{Idle, RawWorker};

const CHAT: &str = "/v1/chat/completions";

fn chat() -> Value {
    json!({"model": MODEL, "messages": long(1), "max_tokens": 2})
}

/// Sends as many chats as there are workers, so that each is picked, and returns statuses and the
/// receipts of all.
async fn one_each(router: &Router, count: usize) -> Vec<(u16, Vec<Value>)> {
    let mut all = Vec::new();
    for _ in 0..count {
        let request = unique();
        let answer =
            router.send("/v1/chat/completions", &[("x-request-id", &request)], chat().to_string()).await;
        all.push((answer.status, router.receipts(&request).await));
    }
    all
}

/// Every request was answered, and those that needed a second attempt needed it for this reason.
fn the_other_took_over(all: &[(u16, Vec<Value>)], reason: &str) {
    assert!(all.iter().all(|(status, _)| *status == 200), "{all:?}");
    let retried: Vec<_> = all.iter().filter(|(_, receipts)| receipts.len() > 1).collect();
    assert!(!retried.is_empty(), "each worker was picked once: {all:?}");
    for (_, receipts) in retried {
        assert_eq!(receipts.len(), 2, "once: {receipts:?}");
        assert_eq!(receipts[1]["result"]["failure"], reason, "{receipts:?}");
        assert_eq!(receipts[0]["attempt"], 2);
        assert_ne!(receipts[0]["chosen"]["target"], receipts[1]["chosen"]["target"]);
    }
}

/// Case A29.
#[tokio::test]
async fn another_worker_takes_over_when_one_refuses_connections() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    a.stop().await;
    // It is still thought ready: probes find out within two seconds.
    the_other_took_over(&one_each(&router, 2).await, "connect");
    assert_eq!(total(&b, "requests_total").await, 2);
    router.is_idle().await;
}

/// Case A29.
#[tokio::test]
async fn another_worker_takes_over_when_one_answers_503() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    fault(&a, json!({"refuse": {"status": 503, "count": 1}})).await;
    the_other_took_over(&one_each(&router, 2).await, "worker_refused");
    router.is_idle().await;
}

/// Case A29: before the first byte.
#[tokio::test]
async fn another_worker_takes_over_when_one_dies_before_its_first_byte() {
    let dying = RawWorker::start(|_| Vec::new()).await;
    let b = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&dying.address.to_string(), &id(&b)])).await;
    the_other_took_over(&one_each(&router, 2).await, "broken_before_head");
    assert_eq!(total(&b, "requests_total").await, 2);
    router.is_idle().await;
}

/// Case A29: the head came, but no byte of the body.
#[tokio::test]
async fn another_worker_takes_over_when_one_dies_after_its_head() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    fault(&a, json!({"die_after_chunks": 0})).await;
    let mut body = chat();
    body["stream"] = json!(true);
    for _ in 0..2 {
        let answer = router.post("/v1/chat/completions", body.clone()).await;
        assert!(answer.status == 200 && answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
        assert!(!answer.text().contains("\"error\":"), "{}", answer.text());
    }
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "broken_before_first_byte").await, 1.0);
    router.is_idle().await;
}

/// Case A29: two attempts and no more.
#[tokio::test]
async fn a_request_is_tried_on_two_workers_at_most() {
    let all = [RawWorker::start(|_| Vec::new()).await, RawWorker::start(|_| Vec::new()).await];
    let third = RawWorker::start(|_| Vec::new()).await;
    let addresses: Vec<String> =
        all.iter().chain([&third]).map(|worker| worker.address.to_string()).collect();
    let router =
        Router::start(Setup::in_turn(&addresses.iter().map(String::as_str).collect::<Vec<_>>())).await;
    let answer = router.post("/v1/chat/completions", chat()).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
    let error = answer.json().unwrap()["error"].clone();
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("worker_failed")));
    assert_eq!(all[0].posts() + all[1].posts() + third.posts(), 2);
    router.is_idle().await;
}

/// A second attempt has an id of its own: engines refuse one that they have seen.
#[tokio::test]
async fn a_second_attempt_has_its_own_request_id() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    for engine in [&a, &b] {
        fault(engine, json!({"refuse": {"status": 503, "count": 1}})).await;
    }
    let answer = router.send("/v1/chat/completions", &[("x-request-id", "mine")], chat().to_string()).await;
    assert_eq!(answer.status, 503, "the last worker's answer passes");
    let mut ids = Vec::new();
    for engine in [&a, &b] {
        let headers = received(engine).await[0]["headers"].as_array().unwrap().clone();
        let found = headers.iter().find(|header| header[0] == "x-request-id").unwrap();
        ids.push(found[1].as_str().unwrap().to_owned());
    }
    ids.sort();
    assert_eq!(ids, ["mine", "mine-2"]);
}

/// Case A30.
#[tokio::test]
async fn a_mistake_of_the_client_passes_untouched_and_is_not_retried() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    let too_long = json!({"model": MODEL, "messages": long(1), "max_tokens": 10_000_000});
    let url = format!("http://{}/v1/chat/completions", id(&a));
    let direct = router.client.post(&url, &too_long).await.unwrap();
    for _ in 0..20 {
        let answer = router.post("/v1/chat/completions", too_long.clone()).await;
        assert_eq!((answer.status, answer.text()), (400, direct.text()));
    }
    for status in [401, 404, 422, 429] {
        fault(&a, json!({"refuse": {"status": status, "count": 1}})).await;
        fault(&b, json!({"refuse": {"status": status, "count": 1}})).await;
        for _ in 0..2 {
            assert_eq!(router.post("/v1/chat/completions", chat()).await.status, status);
        }
    }
    assert_eq!(router.metric("kvrouter_leases_booked", "").await, 28.0, "one attempt each");
    assert_eq!(router.metric("kvrouter_worker_ready", "").await, 2.0);
    router.is_idle().await;
}

/// Case A27: connections that workers close while nobody uses them.
#[tokio::test]
async fn connections_that_were_closed_meanwhile_are_not_used() {
    const IDLE: Duration = Duration::from_millis(50);
    let worker = RawWorker::keeping(Idle::Closed(IDLE), "{}").await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    for round in 0..10 {
        let all = futures::future::join_all((0..4).map(|_| router.post(CHAT, chat()))).await;
        let statuses: Vec<u16> = all.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, [200; 4], "round {round}");
        tokio::time::sleep(IDLE * 2).await;
    }
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "").await, 0.0);
}

/// Cases A27 and E08: engines close connections that were idle for 5 s. A request that meets that moment would be
/// lost, so the router gives connections up before: none is used again after 4.5 s. Alone, and in a pair.
#[tokio::test]
async fn connections_are_given_up_before_engines_close_them() {
    let strict =
        async || RawWorker::keeping(Idle::Stranded(Duration::from_millis(4500)), "{\"text\":\"a\"}").await;
    let (alone, prefill, decode) = (strict().await, strict().await, strict().await);
    let single = Router::start(Setup::in_turn(&[&alone.address.to_string()])).await;
    let entry = |worker: &RawWorker, role: &str| {
        format!("{{url: \"http://{}\", role: {role}, protocol: SGLang}}", worker.address)
    };
    let workers = vec![entry(&prefill, "Prefill"), entry(&decode, "Decode")];
    let pair = Router::start(Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) }).await;
    let all = async || {
        let asked = (0..8).map(|_| async {
            tokio::join!(single.post(CHAT, chat()), pair.post("/generate", json!({"text": "a"})))
        });
        for (of_single, of_pair) in futures::future::join_all(asked).await {
            assert_eq!(
                (of_single.status, of_pair.status),
                (200, 200),
                "{} {}",
                of_single.text(),
                of_pair.text()
            );
        }
    };
    all().await;
    // Longer than the router keeps them, and before the probes of the router could be the last to use one.
    tokio::time::sleep(Duration::from_secs(5)).await;
    all().await;
    for router in [&single, &pair] {
        assert_eq!(router.metric("kvrouter_attempt_failures_total", "").await, 0.0);
    }
}

/// Case A26.
#[tokio::test]
async fn a_hung_worker_holds_up_nobody_else() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    const LIMIT: Duration = Duration::from_secs(2);
    let limits = format!("limits: {{firstByteTimeoutSeconds: {}}}", LIMIT.as_secs());
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)]).more(&limits)).await;
    fault(&a, json!({"hang": 1})).await;
    let timed = async || {
        let began = Instant::now();
        let answer = router.post("/v1/chat/completions", chat()).await;
        (answer.status, began.elapsed())
    };
    let all = futures::future::join_all((0..12).map(|_| timed())).await;
    let (hung, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(status, _)| *status == 504);
    assert_eq!(hung.len(), 1, "{hung:?} {others:?}");
    assert!(others.iter().all(|(status, time)| *status == 200 && *time < LIMIT), "{others:?}");
    router.is_idle().await;
}

/// Case A26: what the client of the hung one reads.
#[tokio::test]
async fn a_worker_that_never_answers_is_a_504_and_not_tried_again() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let limits = "limits: {firstByteTimeoutSeconds: 1}";
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)]).more(limits)).await;
    fault(&a, json!({"hang": 1})).await;
    fault(&b, json!({"hang": 1})).await;
    let answer = router.post("/v1/chat/completions", chat()).await;
    assert_eq!(answer.status, 504, "{}", answer.text());
    assert_eq!(answer.json().unwrap()["error"]["code"], "first_byte_timeout");
    assert_eq!(received(&a).await.len() + received(&b).await.len(), 1);
    router.is_idle().await;
}

/// Case E09: a router that has no sockets left says so. Its workers stay, and so do sessions.
#[tokio::test]
async fn a_router_without_sockets_blames_no_worker() {
    use futures::StreamExt;
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let setup = Setup::in_turn(&[&id(&a), &id(&b)]).more("sessionAffinity: {mode: Both}");
    let router = Router::start(setup).await;
    let send = async || {
        let request = unique();
        let headers = [("x-request-id", &*request), ("x-session-id", "one")];
        (request.clone(), router.send("/v1/chat/completions", &headers, chat().to_string()).await)
    };
    let worker = async |request: &str| router.receipts(request).await[0]["chosen"]["target"].clone();
    let home = worker(&send().await.0).await;
    let bound = if home == format!("{}#0", id(&a)) { &a } else { &b };
    // Clients that are connected already, and a worker whose connections are all in use.
    futures::future::join_all((0..8).map(|_| router.get("/livez"))).await;
    fault(bound, json!({"stall_ms": 5000})).await;
    let (before, all) = (files(&router), "1024");
    limit_files(&router, &before.to_string());
    let mut sending: futures::stream::FuturesUnordered<_> = (0..8).map(|_| send()).collect();
    let mut refused = None;
    while refused.is_none() {
        let (request, answer) = sending.next().await.expect("one finds no socket");
        refused = (answer.status != 200).then_some((request, answer));
    }
    // Long enough for three probes.
    tokio::time::sleep(Duration::from_secs(3)).await;
    limit_files(&router, all);
    let (request, answer) = refused.unwrap();
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(answer.json().unwrap()["error"]["code"], "router_exhausted");
    assert_eq!(answer.headers["retry-after"], "1");
    let receipts = router.receipts(&request).await;
    assert_eq!((receipts.len(), &receipts[0]["result"]["failure"]), (1, &json!("router_exhausted")));
    while let Some((_, answer)) = sending.next().await {
        assert!([200, 503].contains(&answer.status), "{}", answer.text());
    }
    assert!(router.metric("kvrouter_attempt_failures_total", "\"router_exhausted\"").await > 0.0);
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "\"connect\"").await, 0.0);
    let log = router.process.output();
    assert!(log.contains("unable to probe workers"), "{log}");
    assert!(!log.contains("unreachable"), "no worker was given up: {log}");
    for _ in 0..3 {
        let (request, answer) = send().await;
        assert_eq!((answer.status, worker(&request).await), (200, home.clone()), "the session stayed");
    }
    router.is_well().await;
    router.is_idle().await;
}

/// The lowest number that no open file of the router has.
fn files(router: &Router) -> usize {
    let folder = format!("/proc/{}/fd", router.process.id());
    (0..).find(|number| !std::path::Path::new(&folder).join(number.to_string()).exists()).unwrap()
}

/// Lets the router open files below that number only.
fn limit_files(router: &Router, number: &str) {
    let (pid, limit) = (router.process.id().to_string(), format!("--nofile={number}:"));
    let done = std::process::Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap();
    assert!(done.success(), "prlimit of util-linux is needed");
}
