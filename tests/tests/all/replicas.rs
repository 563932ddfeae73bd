//! Several routers of one pool: they share what they have booked over a real nats-server.

use std::time::Duration;

use async_nats::Client;
use engine_sim::{Disaggregation, EngineSim, Wire};
use futures::StreamExt;
use futures::future::join_all;
use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::harness::{
    MODEL, Router, Setup, chat_directly, engine, fault, id, long, text, unique, until, within,
};
use crate::nats::{Bridge, Broker, setup};

/// A broker that lets nobody tell what it has booked.
const LOADS_DENIED: &str = "
authorization {
  users = [{user: pool, password: pool, permissions: {publish: {deny: [\"*.*.*.load\"]}}}]
}
no_auth_user: pool
";
const SUBJECT: &str = "kvrouter.default.demo.load";

fn chat(number: u32) -> Value {
    json!({"model": MODEL, "messages": long(number), "max_tokens": 2})
}

/// So many routers of these engines. There are no events, and no hits: nothing but load
/// tells one engine from another.
async fn routers(count: usize, engines: &[EngineSim], broker: &Broker) -> Vec<Router> {
    let engines: Vec<&EngineSim> = engines.iter().collect();
    let start = || start(setup(&engines, &broker.url()));
    join_all((0..count).map(|_| start())).await
}

/// A router that finds all its workers ready and reaches the broker.
async fn start(setup: Setup) -> Router {
    // Engines would tell of what nobody told.
    let more = "freshness: {fallback: Load}
engineLoad: {mode: Disabled}
limits: {drainDelaySeconds: 0, drainTimeoutSeconds: 1}";
    let workers = setup.workers.len() as f64;
    let router = Router::start_cold(setup.events_only().more(more)).await;
    until("its workers are ready", async || {
        (router.metric("kvrouter_worker_ready", "\"ok\"").await == workers).then_some(())
    })
    .await;
    until("it reaches the broker", async || {
        (router.report().await["events"]["connected"] == true).then_some(())
    })
    .await;
    router
}

/// A request that is under way until its engine is done.
fn under_way(router: &Router, number: u32) -> JoinHandle<()> {
    let (client, url) = (router.client.clone(), router.url("/v1/chat/completions"));
    tokio::spawn(async move {
        // The router may be killed before it answers.
        let _ = client.send(Method::POST, &url, &[], chat(number).to_string().into()).await;
    })
}

/// Requests that `router` knows of at its engines: its own, and those of others.
async fn requests(router: &Router) -> (u64, u64) {
    let url = format!("http://{}/v1/admin/workers", router.at.admin);
    let state = router.client.get(&url).await.unwrap().json().unwrap();
    let sum = |of: &str| {
        let targets = state[of].as_object().unwrap().values();
        targets.map(|load| load["requests"].as_u64().unwrap()).sum()
    };
    (sum("load"), sum("booked_elsewhere"))
}

/// Waits until `router` has so many requests of its own, and knows of so many of others.
async fn knows(router: &Router, own: u64, others: u64) {
    until("all that is booked is known", async || (requests(router).await == (own, others)).then_some(()))
        .await;
}

/// The largest part of a burst that one of six engines got, over the mean. Each of six
/// routers gets two requests, all with one prompt, in less than a second.
async fn burst(broker: &Broker) -> f64 {
    let engines = join_all((0..6).map(|_| engine(|_| {}))).await;
    let routers = routers(6, &engines, broker).await;
    for engine in &engines {
        fault(engine, json!({"stall_ms": 3000})).await;
    }
    let chats = (0..12).map(async |number: usize| {
        // The burst has a length: it is one request after another.
        sleep(Duration::from_millis(80) * number as u32).await;
        let (router, id) = (&routers[number % 6], unique());
        let headers = [("x-request-id", id.as_str())];
        let answer = router.send("/v1/chat/completions", &headers, chat(1).to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        router.receipts(&id).await[0]["chosen"]["target"].as_str().unwrap().to_owned()
    });
    let chosen = join_all(chats).await;
    let count = |engine| chosen.iter().filter(|target| **target == format!("{}#0", id(engine))).count();
    engines.iter().map(count).max().unwrap() as f64 / 2.0
}

/// Case G15: several routers do not herd onto the worker that all of them find best, and they
/// would if they did not hear each other.
#[tokio::test]
async fn routers_that_share_load_do_not_herd() {
    let (open, denied) = (Broker::start().await, Broker::configured(LOADS_DENIED).await);
    let (shared, alone) = (burst(&open).await, burst(&denied).await);
    assert!(shared < 2.0, "max over mean {shared}");
    assert!(alone >= 3.0, "nothing tells them of each other: {alone}");
}

/// A broker that refuses is told of once for each subject, not with every message.
#[tokio::test]
async fn a_missing_permission_is_logged_once() {
    // Snapshots are asked for again and again, as nobody answers.
    let denied = LOADS_DENIED.replace("[\"*.*.*.load\"]", "[\"*.*.*.load\", \"*.*.*.snapshot.>\"]");
    let broker = Broker::configured(&denied).await;
    let engines = [engine(|_| {}).await];
    let _bridge = Bridge::start(&engines[0], &broker.url());
    let router = &routers(1, &engines, &broker).await[0];
    fault(&engines[0], json!({"stall_ms": 300})).await;
    for number in 0..4 {
        assert_eq!(router.post("/v1/chat/completions", chat(number)).await.status, 200);
    }
    let refusals = || router.process.output().matches("broker refuses").count();
    until("the log tells of both", async || (refusals() >= 2).then_some(())).await;
    assert_eq!(refusals(), 2, "{}", router.process.output());
}

/// What one router has booked counts in the other's decisions. It is forgotten when the
/// router is killed, and taken back by one that stops in order.
#[tokio::test]
async fn bookings_of_another_router_count_until_it_is_gone() {
    let broker = Broker::start().await;
    let engines = [engine(|_| {}).await, engine(|_| {}).await];
    let mut pair = routers(3, &engines, &broker).await;
    let watching = pair.pop().unwrap();
    assert_eq!(requests(&watching).await, (0, 0));
    for engine in &engines {
        fault(engine, json!({"stall_ms": 60_000})).await;
    }
    let _one = under_way(&pair[0], 1);
    knows(&pair[1], 0, 1).await;
    let _another = under_way(&pair[1], 1);
    for router in &pair {
        knows(router, 1, 1).await;
    }
    knows(&watching, 0, 2).await;
    let explain = format!("http://{}/v1/admin/explain", watching.at.admin);
    let receipt = watching.client.post(&explain, &chat(1)).await.unwrap().json().unwrap();
    for candidate in receipt["candidates"].as_array().unwrap() {
        let (load, prompt) = (&candidate["load"], &receipt["prompt_tokens"]);
        assert_eq!(load["requests"], 1, "one each, because they heard each other: {receipt}");
        assert_eq!((&load["queued"], &load["context"]), (prompt, prompt), "{receipt}");
    }
    for router in &pair {
        assert_eq!(requests(router).await, (1, 1), "its own words, which come back, do not count");
        assert_eq!(router.metric("kvrouter_replicas_heard", "").await, 1.0);
    }
    assert_eq!(watching.metric("kvrouter_target_requests", "").await, 0.0, "metrics are of its own");
    assert_eq!(watching.metric("kvrouter_replicas_heard", "").await, 2.0);
    assert_eq!(watching.report().await["events"]["replicasHeard"], 2);

    let (mut killed, mut stopped) = (pair.remove(0), pair.remove(0));
    killed.process.kill();
    let gone = Instant::now();
    knows(&watching, 0, 1).await;
    let waited = gone.elapsed();
    assert!(waited > Duration::from_millis(1_500), "its last word is a second old at most: {waited:?}");
    assert_eq!(watching.metric("kvrouter_replicas_heard", "").await, 1.0);

    stopped.process.terminate().unwrap();
    stopped.process.ended(Duration::from_secs(10)).await.unwrap();
    // Sooner than it would be forgotten: its last renewal is a second old at most.
    within(Duration::from_millis(1_500), "it took back what it booked", async || {
        (requests(&watching).await == (0, 0)).then_some(())
    })
    .await;
}

/// Both halves of a divided request are told, each on its target.
#[tokio::test]
async fn both_targets_of_a_divided_request_are_told() {
    let broker = Broker::start().await;
    let of =
        |role| engine(move |config| (config.wire, config.disaggregation) = (Wire::Sglang0523, Some(role)));
    let (prefill, decode) = (of(Disaggregation::Prefill).await, of(Disaggregation::Decode).await);
    let port = prefill.transfer_addr().unwrap().port();
    let setup = || {
        let entry = |engine, more| format!("{{url: \"http://{}\", protocol: SGLang, {more}}}", id(engine));
        let prefill = entry(&prefill, format!("role: Prefill, bootstrapPort: {port}"));
        let workers = vec![prefill, entry(&decode, "role: Decode".to_owned())];
        Setup { workers, ..setup(&[], &broker.url()) }
    };
    let (one, other) = (start(setup()).await, start(setup()).await);
    for engine in [&prefill, &decode] {
        fault(engine, json!({"stall_ms": 60_000})).await;
    }
    let _under_way = under_way(&one, 1);
    knows(&other, 0, 2).await;
    let url = format!("http://{}/v1/admin/workers", other.at.admin);
    let state = other.client.get(&url).await.unwrap().json().unwrap();
    for (engine, waits) in [(&prefill, true), (&decode, false)] {
        let load = &state["booked_elsewhere"][format!("{}#0", id(engine))];
        assert_eq!((&load["requests"], load["queued"] != 0), (&json!(1), waits), "{state}");
    }
}

/// The share of prompt tokens that engines had cached: six sessions begin at an engine each,
/// past all routers, and go on through `count` routers in turn.
async fn hit_rate(count: usize) -> f64 {
    let broker = Broker::start().await;
    let engines = join_all((0..3).map(|_| engine(|_| {}))).await;
    let _bridges: Vec<Bridge> = engines.iter().map(|engine| Bridge::start(engine, &broker.url())).collect();
    let routers = routers(count, &engines, &broker).await;
    let agree = async || {
        for router in &routers {
            for engine in &engines {
                router.agrees_with(engine).await;
            }
        }
    };
    let mut sessions: Vec<Vec<Value>> = Vec::new();
    for session in 0..6 {
        let messages = vec![json!({"role": "user", "content": text(session, 60)})];
        chat_directly(&engines[session as usize % 3], &json!(messages), None).await;
        sessions.push(messages);
    }
    let (mut cached, mut prompts) = (0, 0);
    for turn in 0..4 {
        agree().await;
        for (number, messages) in sessions.iter_mut().enumerate() {
            let question = text(100 * (turn + 1) + number as u32, 8);
            messages.push(json!({"role": "user", "content": question}));
            let router = &routers[(number + turn as usize) % count];
            let chat = router.chat(&json!(messages), 8).await;
            cached += chat.cached;
            prompts += chat.receipt["prompt_tokens"].as_u64().unwrap();
            messages.push(json!({"role": "assistant", "content": chat.text}));
        }
    }
    cached as f64 / prompts as f64
}

/// Case C20: it does not matter which router a session comes to.
#[tokio::test]
async fn three_routers_hit_as_much_as_one() {
    let (one, three) = (hit_rate(1).await, hit_rate(3).await);
    assert!(one > 0.7, "sessions find what they sent before: {one}");
    assert!((one - three).abs() < 0.02, "{one} with one router, {three} with three");
}

/// Without the broker others are forgotten and requests go on; with it they are known again.
#[tokio::test]
async fn routers_forget_each_other_while_the_broker_is_away() {
    let mut broker = Broker::start().await;
    let engines = [engine(|_| {}).await, engine(|_| {}).await];
    let pair = routers(2, &engines, &broker).await;
    fault(&engines[0], json!({"stall_ms": 60_000})).await;
    fault(&engines[1], json!({"stall_ms": 60_000})).await;
    let _under_way = under_way(&pair[0], 1);
    knows(&pair[1], 0, 1).await;
    broker.kill();
    knows(&pair[1], 0, 0).await;
    let _another = under_way(&pair[1], 1);
    knows(&pair[1], 1, 0).await;
    broker.restart().await;
    knows(&pair[0], 1, 1).await;
    knows(&pair[1], 1, 1).await;
}

// A message about one target: 94 01 c4 10, a domain of 16 bytes, cf, a number of 8, 91 99, the
// worker's length and name, its rank, what is booked, and what was sent.
const VERSION: usize = 1;
const DOMAIN: usize = 4;
const REPLICA: usize = 21;
const NAME: usize = 32;

/// The first message of `router`, which is about one request at `engine`.
async fn first_message(spy: &Client, router: &Router, engine: &EngineSim) -> Vec<u8> {
    let mut heard = spy.subscribe(SUBJECT).await.unwrap();
    spy.flush().await.unwrap();
    fault(engine, json!({"stall_ms": 60_000})).await;
    let _under_way = under_way(router, 1);
    let real = heard.next().await.unwrap().payload.to_vec();
    let worker = id(engine);
    assert_eq!(real[REPLICA - 1], 0xcf, "a smaller number is drawn once in four billion starts: {real:?}");
    assert_eq!(&real[NAME..NAME + worker.len()], worker.as_bytes());
    assert_eq!(real[NAME + worker.len()], 0, "{real:?}");
    assert_eq!(real[real.len() - 4..], [1, 1, 0, 0], "one request, one sequence: {real:?}");
    real
}

/// Garbage and words of strangers are counted with their reason and change nothing.
#[tokio::test]
async fn loads_that_are_not_understood_are_counted_and_ignored() {
    let broker = Broker::start().await;
    let engines = [engine(|_| {}).await];
    let mut router = routers(1, &engines, &broker).await.remove(0);
    let spy = async_nats::connect(broker.url()).await.unwrap();
    // Another router says the same; only its number differs.
    let mut another = first_message(&spy, &router, &engines[0]).await;
    another[REPLICA] ^= 1;
    let with = |at: usize, byte: u8| {
        let mut bytes = another.clone();
        bytes[at] = byte;
        bytes
    };
    let other = |at: usize| with(at, another[at] ^ 1);
    let tell = async |payloads: &[Vec<u8>]| {
        for payload in payloads {
            spy.publish(SUBJECT, payload.clone().into()).await.unwrap();
        }
        spy.flush().await.unwrap();
    };
    tell(&[with(VERSION, 1)]).await;
    knows(&router, 1, 1).await;
    tell(&[other(DOMAIN), other(DOMAIN + 15), other(NAME), with(VERSION, 2)]).await;
    tell(&[b"\xc1".to_vec(), Vec::new(), b"{}".to_vec(), vec![0xff; 5000]]).await;
    tell(&[vec![0xdd, 0xff, 0xff, 0xff, 0xff]]).await;
    let cut: Vec<Vec<u8>> = (1..another.len()).map(|end| another[..end].to_vec()).collect();
    tell(&cut).await;
    let counted = async |result: &str| router.metric("kvrouter_load_messages_total", result).await;
    let expected = [
        ("\"other_domain\"", 2.0),
        ("\"unknown_target\"", 1.0),
        ("\"newer_version\"", 1.0),
        ("\"unreadable_field\"", 5.0 + cut.len() as f64),
    ];
    until("all of it is counted", async || {
        for (result, count) in expected {
            if counted(result).await < count {
                return None;
            }
        }
        Some(())
    })
    .await;
    for (result, count) in expected {
        assert_eq!(counted(result).await, count, "{result}");
    }
    // More routers than anybody has.
    tell(&(0..200).map(|number| with(REPLICA + 7, number)).collect::<Vec<_>>()).await;
    until("there are too many", async || (counted("\"too_many_replicas\"").await > 100.0).then_some(()))
        .await;
    assert_eq!(router.metric("kvrouter_replicas_heard", "").await, 64.0);
    assert!(router.process.is_running(), "{}", router.process.output());
}
