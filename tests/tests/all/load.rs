//! What engines have in hand beyond what routers sent them: requests that reach an engine by
//! another way count, and a router's own are never taken for such.

use std::collections::BTreeSet;
use std::time::Duration;

use engine_sim::{Config, EngineSim, Wire};
use http::Method;
use kvrouter_tests::client::Client;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::harness::{
    MODEL, Router, Setup, bare, engine, fault, id, long, ranks, text, unique, until, within,
};
use crate::nats::{Broker, setup};

/// What an engine said last counts for three intervals of 2.2 s at most.
const EXPIRY: Duration = Duration::from_secs(7);

/// A step takes long enough for a long answer to last as long as a test.
fn slow(wire: Wire) -> impl FnOnce(&mut Config) {
    move |config| {
        config.wire = wire;
        config.step_ms = 10.0;
    }
}

/// A request past all routers, for so many answers that go on until it is dropped.
fn directly(engine: &EngineSim, number: u32, answers: u32) -> JoinHandle<()> {
    under_way(format!("http://{}/v1/chat/completions", engine.http_addr()), number, json!({"n": answers}))
}

fn under_way(url: String, number: u32, more: Value) -> JoinHandle<()> {
    let mut body = json!({"model": MODEL, "max_tokens": 10_000, "stream": true});
    if url.ends_with("/v1/completions") {
        body["prompt"] = json!(text(number, 60));
    } else {
        body["messages"] = long(number);
    }
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    tokio::spawn(async move {
        let answer = Client::new().send(Method::POST, &url, &[], body.to_string().into()).await.unwrap();
        panic!("it ended: {} {}", answer.status, answer.text());
    })
}

/// Nothing but load tells one engine from another.
async fn router(engines: &[&EngineSim]) -> Router {
    let workers = engines.iter().map(|engine| bare(&id(engine))).collect();
    let events = "{transport: None}".to_owned();
    let setup = Setup { events, ..Setup::of(workers) }.more("freshness: {fallback: Load}");
    Router::start(setup).await
}

async fn strangers(router: &Router, engine: &EngineSim) -> f64 {
    router.metric("kvrouter_target_strangers", &id(engine)).await
}

async fn reads(router: &Router, result: &str) -> f64 {
    router.metric("kvrouter_engine_load_reads_total", &format!("\"{result}\"")).await
}

/// Waits until every engine was asked so many times more.
async fn asked(router: &Router, engines: usize, times: usize) {
    let enough = reads(router, "ok").await + (engines * times) as f64;
    until("engines told their load", async || (reads(router, "ok").await >= enough).then_some(())).await;
}

/// The receipt of a prompt like no other from its first block on, so that ties fall anywhere.
async fn cold(router: &Router, number: u32) -> Value {
    let id = unique();
    let body = json!({"model": MODEL, "prompt": text(number, 60), "max_tokens": 1});
    let answer = router.send("/v1/completions", &[("x-request-id", &id)], body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    router.receipts(&id).await[0].clone()
}

/// The targets of cold prompts, one after the other.
async fn chosen(router: &Router, first: u32) -> BTreeSet<String> {
    let mut chosen = BTreeSet::new();
    for number in first..first + 10 {
        chosen.insert(cold(router, number).await["chosen"]["target"].as_str().unwrap().to_owned());
    }
    chosen
}

fn target(engine: &EngineSim) -> String {
    format!("{}#0", id(engine))
}

async fn strangers_repel(wire: Wire) {
    let (busy, idle) = (engine(slow(wire)).await, engine(slow(wire)).await);
    let router = router(&[&busy, &idle]).await;
    let both = BTreeSet::from([target(&busy), target(&idle)]);
    assert_eq!(chosen(&router, 100).await, both, "nothing tells them apart");
    let others = [directly(&busy, 1, 1), directly(&busy, 2, 3)];
    until("both are seen", async || (strangers(&router, &busy).await == 4.0).then_some(())).await;
    assert_eq!(chosen(&router, 200).await, BTreeSet::from([target(&idle)]));
    let receipt = cold(&router, 300).await;
    let of_busy = |candidate: &&Value| candidate["target"] == target(&busy);
    let candidate = receipt["candidates"].as_array().unwrap().iter().find(of_busy).unwrap();
    assert_eq!(candidate["load"]["requests"], 4, "receipts say why: {receipt}");
    assert_eq!(strangers(&router, &idle).await, 0.0);
    others.iter().for_each(JoinHandle::abort);
    within(EXPIRY, "they are gone", async || (strangers(&router, &busy).await == 0.0).then_some(())).await;
    assert_eq!(chosen(&router, 400).await, both, "the balance is back");
    router.is_idle().await;
}

#[tokio::test]
async fn strangers_at_vllm_repel_until_they_are_gone() {
    strangers_repel(Wire::Vllm033).await;
}

#[tokio::test]
async fn strangers_at_sglang_repel_until_they_are_gone() {
    strangers_repel(Wire::Sglang0523).await;
}

/// An engine that stops telling is busy with strangers for three intervals, and no longer; and
/// it is not to blame.
#[tokio::test]
async fn the_word_of_an_engine_that_falls_silent_expires() {
    let (busy, idle) = (engine(slow(Wire::Vllm033)).await, engine(slow(Wire::Vllm033)).await);
    let router = router(&[&busy, &idle]).await;
    let _other = directly(&busy, 1, 2);
    until("they are seen", async || (strangers(&router, &busy).await == 2.0).then_some(())).await;
    fault(&busy, json!({"hide_load": true})).await;
    within(EXPIRY, "its word is old", async || (strangers(&router, &busy).await == 0.0).then_some(())).await;
    assert_eq!(chosen(&router, 200).await.len(), 2, "and it is picked");
    assert_eq!(reads(&router, "not_offered").await, 1.0, "it is asked once");
    let said = router.process.output().matches("does not tell its load").count();
    assert_eq!(said, 1, "{}", router.process.output());
    router.is_well().await;
}

/// Several answers, several prompts, and requests that end, fail and are given up meanwhile.
#[tokio::test]
async fn a_routers_own_requests_are_no_strangers() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let engines = [engine(slow(wire)).await, engine(slow(wire)).await];
        let router = router(&[&engines[0], &engines[1]]).await;
        asked(&router, 2, 1).await;
        let completions = router.url("/v1/completions");
        let mut going: Vec<JoinHandle<()>> = (0..3)
            .map(|number| under_way(router.url("/v1/chat/completions"), number, json!({"n": 4})))
            .collect();
        let prompts: Vec<String> = (0..8).map(|number| text(50 + number, 20)).collect();
        going.push(under_way(completions.clone(), 9, json!({"prompt": prompts})));
        going.push(under_way(completions.clone(), 9, json!({"prompt": prompts[..2], "n": 2})));
        until("all run", async || {
            let mut running = 0;
            for engine in &engines {
                running += ranks(engine).await[0]["running"].as_u64().unwrap();
            }
            (running == 3 * 4 + 8 + 4).then_some(())
        })
        .await;
        let enough = reads(&router, "ok").await + 8.0;
        let mut number = 1_000;
        while reads(&router, "ok").await < enough {
            // Some end, and some are given up.
            let body = json!({"model": MODEL, "messages": long(number), "max_tokens": 3, "n": 2});
            assert_eq!(router.post("/v1/chat/completions", body).await.status, 200);
            let given_up = under_way(completions.clone(), number, json!({"n": 3}));
            sleep(Duration::from_millis(30)).await;
            given_up.abort();
            for engine in &engines {
                assert_eq!(strangers(&router, engine).await, 0.0, "{wire:?} after {number}");
            }
            number += 1;
        }
        going.iter().for_each(JoinHandle::abort);
        router.is_idle().await;
    }
}

/// Routers tell each other what they sent, so that one's requests are no strangers to another.
#[tokio::test]
async fn requests_of_another_router_are_no_strangers() {
    let broker = Broker::start().await;
    let engine = engine(slow(Wire::Vllm033)).await;
    let start = async || Router::start_cold(setup(&[&engine], &broker.url())).await;
    let (one, other) = (start().await, start().await);
    asked(&one, 1, 1).await;
    asked(&other, 1, 1).await;
    let _going = [1, 2].map(|number| under_way(one.url("/v1/chat/completions"), number, json!({"n": 4})));
    for _ in 0..3 {
        // Each of them comes and goes, some between two looks of its router.
        for number in 10..30 {
            one.chat(&long(number), 1).await;
            assert_eq!((strangers(&one, &engine).await, strangers(&other, &engine).await), (0.0, 0.0));
        }
        asked(&other, 1, 1).await;
    }
    let _direct = directly(&engine, 3, 2);
    until("both routers see who sent nothing through them", async || {
        let seen = [strangers(&one, &engine).await, strangers(&other, &engine).await];
        (seen == [2.0, 2.0]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn engines_are_not_asked_where_settings_say_so() {
    let engine = engine(slow(Wire::Vllm033)).await;
    let setup = Setup::in_turn(&[&id(&engine)]).more("engineLoad: {mode: Disabled}");
    let router = Router::start(setup).await;
    let _other = directly(&engine, 1, 2);
    sleep(Duration::from_secs(5)).await;
    let page = router.client.get(&format!("http://{}/metrics", router.at.metrics)).await.unwrap().text();
    assert!(!page.contains("kvrouter_engine_load_reads_total{"), "{page}");
    assert!(!page.contains("kvrouter_target_strangers{"), "{page}");
}
