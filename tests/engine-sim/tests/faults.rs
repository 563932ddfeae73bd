//! Faults on demand, one by one: each is asked for and then seen from outside.
#![allow(clippy::unwrap_used)] // A test states its expectation by failing.

mod support;

use std::time::Duration;

use bytes::Bytes;
use engine_sim::{Config, EngineSim, Wire};
use serde_json::{Value, json};
use support::{DEADLINE, complete, get, post, rank, replay, send, until};

/// Long enough for a client to give up, short enough not to be noticed.
const PATIENCE: Duration = Duration::from_millis(100);

async fn start(wire: Wire, change: impl FnOnce(&mut Config)) -> EngineSim {
    let mut config = Config { wire, time_scale: 0.0, ..Config::default() };
    change(&mut config);
    EngineSim::start(config).await.unwrap()
}

async fn fault(engine: &EngineSim, fault: Value) {
    let answer = post(engine, "/sim/fault", fault).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

/// Payloads that a replay returns, without the end marker.
async fn payloads(engine: &EngineSim) -> Vec<Bytes> {
    let mut replies = replay(engine, 0).await;
    replies.pop();
    replies.into_iter().map(|frames| frames.last().unwrap().clone()).collect()
}

fn contains(payload: &[u8], needle: &[u8]) -> bool {
    payload.windows(needle.len()).any(|window| window == needle)
}

/// A request that runs until it is stopped: slow steps, many tokens.
fn endless(stream: bool) -> String {
    json!({"prompt": [1, 2, 3], "max_tokens": 5000, "stream": stream}).to_string()
}

#[tokio::test]
async fn an_unknown_fault_is_refused() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    for wrong in [
        json!({"explode": true}),
        json!({"rank": 1, "stall_ms": 1}),
        json!({"refuse": {"status": 200, "count": 1}}),
    ] {
        assert_eq!(post(&engine, "/sim/fault", wrong).await.status, 400);
    }
}

#[tokio::test]
async fn lost_batches_use_up_their_number_and_a_replay_repairs_them() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    fault(&engine, json!({"drop_events": 1})).await;
    complete(&engine, &[1; 20], 1).await;
    complete(&engine, &[2; 20], 1).await;
    assert_eq!(rank(&engine).await["seq"], 2);
    assert_eq!(payloads(&engine).await.len(), 2);
}

#[tokio::test]
async fn a_restart_forgets_all_and_cuts_what_runs() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let engine = start(wire, |config| (config.step_ms, config.time_scale) = (5.0, 1.0)).await;
        complete(&engine, &[1; 33], 1).await;
        assert_eq!(rank(&engine).await["cached_pages"], 2);
        for stream in [false, true] {
            let running = send(&engine, "POST", "/v1/completions", &[], endless(stream));
            let (answer, ()) = tokio::join!(tokio::time::timeout(DEADLINE, running), async {
                until(&engine, |state| state["running"] != 0).await;
                fault(&engine, json!({"restart": true})).await;
            });
            let answer = answer.expect("the connection is cut");
            assert!(answer.is_err(), "{wire:?} stream {stream}: a dead process does not answer");
        }
        let state = rank(&engine).await;
        assert_eq!(
            (&state["cached_pages"], &state["seq"], &state["epoch"]),
            (&json!(0), &json!(0), &json!(2))
        );
        assert!(payloads(&engine).await.is_empty(), "{wire:?}: no clear is told");
        assert_eq!(complete(&engine, &[1; 33], 1).await, 0);
        let payloads = payloads(&engine).await;
        assert!(payloads.len() == 1 && contains(&payloads[0], b"BlockStored"), "{wire:?}");
    }
}

#[tokio::test]
async fn a_stalled_scheduler_waits() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    fault(&engine, json!({"stall_ms": 150})).await;
    let began = tokio::time::Instant::now();
    complete(&engine, &[1; 20], 1).await;
    assert!(began.elapsed() >= Duration::from_millis(140), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_stream_dies_after_its_chunks() {
    let engine = start(Wire::Sglang0523, |_| {}).await;
    fault(&engine, json!({"die_after_chunks": 2})).await;
    let body = json!({"prompt": [1], "max_tokens": 5, "stream": true}).to_string();
    assert!(send(&engine, "POST", "/v1/completions", &[], body.clone()).await.is_err());
    let answer = send(&engine, "POST", "/v1/completions", &[], body).await.unwrap();
    assert_eq!(answer.data().last(), Some(&"[DONE]"), "only the next stream dies");
}

#[tokio::test]
async fn requests_are_refused_or_hang_as_often_as_asked() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    fault(&engine, json!({"refuse": {"status": 503, "count": 2}, "hang": 1})).await;
    let body = json!({"prompt": [1], "max_tokens": 1});
    let hanging = post(&engine, "/v1/completions", body.clone());
    assert!(tokio::time::timeout(PATIENCE, hanging).await.is_err());
    for status in [503, 503, 200] {
        assert_eq!(post(&engine, "/v1/completions", body.clone()).await.status, status);
    }
}

#[tokio::test]
async fn garbage_takes_a_number_of_its_own() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    fault(&engine, json!({"garbage_events": 3})).await;
    complete(&engine, &[1; 20], 1).await;
    let payloads = payloads(&engine).await;
    let good: Vec<bool> = payloads.iter().map(|payload| contains(payload, b"BlockStored")).collect();
    assert_eq!(good, [false, false, false, true]);
}

#[tokio::test]
async fn a_lie_about_the_page_size_shows_in_events_alone() {
    let engine = start(Wire::Sglang0523, |_| {}).await;
    let size = |size: u8| [b"\xaablock_size".as_slice(), &[size]].concat();
    fault(&engine, json!({"page_size_lie": 64})).await;
    complete(&engine, &[1; 40], 1).await;
    fault(&engine, json!({"page_size_lie": 0})).await;
    complete(&engine, &[2; 40], 1).await;
    let payloads = payloads(&engine).await;
    assert!(contains(&payloads[0], &size(64)) && contains(&payloads[1], &size(16)));
    assert_eq!(complete(&engine, &[1; 40], 1).await, 32);
}

#[tokio::test]
async fn health_is_what_it_is_told_to_be() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let engine = start(wire, |_| {}).await;
        for (health, status) in [("fail", 503), ("ok", 200)] {
            fault(&engine, json!({"health": health})).await;
            assert_eq!(get(&engine, "/health").await.status, status);
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_aborts_its_request() {
    for stream in [false, true] {
        let engine = start(Wire::Vllm033, |config| (config.step_ms, config.time_scale) = (5.0, 1.0)).await;
        let running = send(&engine, "POST", "/v1/completions", &[], endless(stream));
        assert!(tokio::time::timeout(PATIENCE, running).await.is_err());
        let state = until(&engine, |state| state["running"] == 0).await;
        assert_eq!(state["aborted_total"], 1, "stream {stream}");
        assert_eq!(state["pinned_pages"], 0, "stream {stream}");
    }
}

#[tokio::test]
async fn a_reset_is_told_and_waits_for_no_one() {
    let engine = start(Wire::Sglang0518, |_| {}).await;
    complete(&engine, &[1; 33], 1).await;
    assert_eq!(post(&engine, "/sim/reset", json!({})).await.status, 200);
    let payloads = payloads(&engine).await;
    assert!(contains(payloads.last().unwrap(), b"AllBlocksCleared"));
    let stopped = start(Wire::Sglang0518, |_| {}).await;
    fault(&stopped, json!({"stall_ms": 60_000})).await;
    let waiting = post(&stopped, "/v1/completions", json!({"prompt": [1], "max_tokens": 1}));
    let (_, ()) = tokio::join!(tokio::time::timeout(PATIENCE, waiting), async {
        until(&stopped, |state| state["waiting"] != 0).await;
        assert_eq!(post(&stopped, "/sim/reset", json!({})).await.status, 409);
    });
}

#[tokio::test]
async fn a_stopped_engine_leaves_its_ports() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    let address = engine.http_addr();
    engine.stop().await;
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn tokenize_fails_on_demand_and_templates_change() {
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer");
    let engine = start(Wire::Sglang0523, |config| config.tokenizer = Some(tokenizer.into())).await;
    let chat = json!({"messages": [{"role": "user", "content": "hello"}]});
    let ask = async |body: &Value| post(&engine, "/v1/tokenize", body.clone()).await;
    let own = ask(&chat).await.json()["tokens"].clone();
    fault(&engine, json!({"chat_template": "{{ messages[0].content }}"})).await;
    assert_ne!(ask(&chat).await.json()["tokens"], own);
    fault(&engine, json!({"chat_template": ""})).await;
    assert_eq!(ask(&chat).await.json()["tokens"], own);
    assert_eq!(post(&engine, "/sim/fault", json!({"chat_template": "{% if"})).await.status, 400);
    fault(&engine, json!({"tokenize": "texts"})).await;
    let statuses = (ask(&chat).await.status, ask(&json!({"prompt": "hello"})).await.status);
    assert_eq!(statuses, (400, 200));
    fault(&engine, json!({"tokenize": "missing"})).await;
    assert_eq!(ask(&chat).await.status, 404);
    fault(&engine, json!({"tokenize": "hang"})).await;
    assert!(tokio::time::timeout(PATIENCE, ask(&chat)).await.is_err());
}

#[tokio::test]
async fn usage_reports_part_of_a_hit_on_demand() {
    let engine = start(Wire::Vllm033, |config| config.page_size = 4).await;
    let tokens: Vec<u32> = (0..33).collect();
    let cached = async || complete(&engine, &tokens, 1).await;
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 32);
    fault(&engine, json!({"hit_percent": 60})).await;
    assert_eq!(cached().await, 16, "whole pages");
    fault(&engine, json!({"hit_percent": 100})).await;
    assert_eq!(cached().await, 32);
}
