//! The simulator against engines that were recorded: the same requests in the same order must
//! give the same events, byte for byte but for the timestamp.
#![allow(clippy::unwrap_used)] // A test states its expectation by failing.

mod support;

use std::path::PathBuf;

use bytes::Bytes;
use engine_sim::{Config, EngineSim, Wire};
use serde_json::{Value, json};
use support::{post, replay, send};

/// Bytes of a batch before its events: array of three, and the timestamp.
const TIMESTAMP_END: usize = 10;

fn capture(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/engine-events")).join(path)
}

/// Recorded payloads of a directory, in order.
fn recorded(path: &str) -> Vec<Vec<u8>> {
    let file = |at: usize| capture(path).join(format!("batch_{at:03}.payload.bin"));
    (0..).map_while(|at| std::fs::read(file(at)).ok()).collect()
}

/// Tokens of the store in one recorded batch, lengthened with tokens that fill no page.
fn recorded_prompt(manifest: &str, file: &str, length: usize) -> Vec<u32> {
    let manifest: Vec<Value> = serde_json::from_slice(&std::fs::read(capture(manifest)).unwrap()).unwrap();
    let entry = manifest.iter().find(|entry| entry["file"] == file).unwrap();
    let tokens = entry["decoded"][1][0]["token_ids"].as_array().unwrap();
    let mut tokens: Vec<u32> =
        tokens.iter().map(|token| u32::try_from(token.as_u64().unwrap()).unwrap()).collect();
    tokens.resize(length, 7);
    tokens
}

async fn run(engine: &EngineSim, prompt: Vec<u32>, max_tokens: u32, more: Value, headers: &[(&str, &str)]) {
    let mut body = json!({"prompt": prompt, "max_tokens": max_tokens});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = send(engine, "POST", "/v1/completions", headers, body.to_string()).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text);
}

/// The twelve prompts of 130 tokens that fill the recorded engines' small caches.
async fn fill(engine: &EngineSim) {
    for base in (5000..=7200).step_by(200) {
        run(engine, (base..base + 130).collect(), 2, json!({}), &[]).await;
    }
}

#[track_caller]
fn check(replies: &[Vec<Bytes>], expected: &[Vec<u8>], topic: &str) {
    let (end, batches) = replies.split_last().unwrap();
    assert_eq!(end[..], [Bytes::new(), Bytes::new(), Bytes::from_static(&[0xff; 8]), Bytes::new()][..]);
    for (at, (batch, expected)) in batches.iter().zip(expected).enumerate() {
        let seq = Bytes::copy_from_slice(&(at as u64).to_be_bytes());
        assert_eq!(batch[..3], [Bytes::new(), Bytes::copy_from_slice(topic.as_bytes()), seq]);
        assert_eq!(batch[3][TIMESTAMP_END..], expected[TIMESTAMP_END..], "batch {at}");
    }
    assert_eq!(batches.len(), expected.len());
}

#[tokio::test]
async fn vllm_events_are_those_of_the_recorded_engine() {
    let config = Config {
        wire: Wire::Vllm032,
        page_size: 32,
        num_pages: 24,
        topic: "kv@tiny".to_owned(),
        time_scale: 0.0,
        ..Config::default()
    };
    let engine = EngineSim::start(config).await.unwrap();
    let counting: Vec<u32> = (1000..1100).collect();
    let chat = recorded_prompt("vllm-0.32.0-live/manifest.json", "run1/batch_002.multipart.bin", 117);
    run(&engine, counting.clone(), 4, json!({}), &[]).await;
    run(&engine, counting.clone(), 4, json!({}), &[]).await;
    run(&engine, counting.clone(), 2, json!({"cache_salt": "salty"}), &[]).await;
    run(&engine, chat.clone(), 3, json!({}), &[]).await;
    run(&engine, chat.clone(), 3, json!({}), &[]).await;
    let report = json!({"vllm_xargs": {"kv_cache_report_mode": "full"}});
    run(&engine, chat, 3, report, &[("x-session-id", "sess-1")]).await;
    run(&engine, counting.clone(), 3, json!({}), &[]).await;
    run(&engine, counting, 3, json!({}), &[]).await;
    fill(&engine).await;
    let reset = post(&engine, "/reset_prefix_cache", json!({})).await;
    assert_eq!(reset.text, r#"{"success":true}"#);
    assert_eq!(replay(&engine, 0).await.len(), 17, "the clear waits for the next batch");
    run(&engine, (1000..1040).collect(), 2, json!({}), &[]).await;
    check(&replay(&engine, 0).await, &recorded("vllm-0.32.0-live/run1"), "kv@tiny");
}

#[tokio::test]
async fn sglang_events_are_those_of_the_recorded_engine() {
    let config = Config {
        wire: Wire::Sglang0523,
        page_size: 16,
        num_pages: 64,
        topic: "kv".to_owned(),
        time_scale: 0.0,
        ..Config::default()
    };
    let engine = EngineSim::start(config).await.unwrap();
    let counting: Vec<u32> = (1000..1100).collect();
    let chat = recorded_prompt("sglang-0.5.23-live/manifest.json", "sg/batch_003.multipart.bin", 117);
    for max_tokens in [4, 4, 3, 3] {
        run(&engine, counting.clone(), max_tokens, json!({}), &[]).await;
    }
    run(&engine, counting, 3, json!({"cache_salt": "salty"}), &[]).await;
    run(&engine, (1000..1040).collect(), 3, json!({"extra_key": "tenant-a"}), &[]).await;
    run(&engine, chat.clone(), 3, json!({}), &[]).await;
    run(&engine, chat, 3, json!({}), &[]).await;
    fill(&engine).await;
    assert_eq!(post(&engine, "/flush_cache", json!({})).await.status, 200);
    assert_eq!(replay(&engine, 0).await.len(), 18, "the clear is told at once");
    run(&engine, (1000..1040).collect(), 2, json!({}), &[]).await;
    check(&replay(&engine, 0).await, &recorded("sglang-0.5.23-live/sg"), "kv");
}
