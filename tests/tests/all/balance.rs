//! Nobody is left out: load that has nothing to gain from one worker is spread over all of them,
//! ranks included.

use engine_sim::{Disaggregation, EngineSim, Wire};
use futures::StreamExt;
use futures::future::join_all;
use http::Method;
use serde_json::{Value, json};

use crate::harness::{MODEL, Router, Setup, chat_directly, engine, fault, id, text, total, until, worker};

const CHAT: &str = "/v1/chat/completions";
/// So many requests at once, so many in all: with chance alone a worker of five gets less than half of
/// its share once in ten thousand runs.
const AT_ONCE: usize = 15;
const ALL: u32 = 300;

/// A question that shares no more than the template's beginning with any other.
fn question(number: u32, answer: u32) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text(number, 25)}], "max_tokens": answer})
}

/// Sends [`ALL`] different questions; all of them are answered.
async fn independent_load(router: &Router) {
    let asked = (0..ALL).map(|number| router.post(CHAT, question(1000 + number, 8)));
    let answers: Vec<_> = futures::stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    router.is_idle().await;
}

/// Each got more than half of what is its share of [`ALL`].
#[track_caller]
fn everybody_got_some(counts: &[u64], what: &str) {
    let share = u64::from(ALL) / counts.len() as u64;
    assert!(counts.iter().all(|count| *count * 2 > share), "{what}: {counts:?} of {ALL}");
}

async fn requests(engines: &[EngineSim]) -> Vec<u64> {
    join_all(engines.iter().map(|engine| total(engine, "requests_total"))).await
}

/// Case G17, where workers do all of a request.
#[tokio::test]
async fn independent_prompts_reach_every_worker() {
    for policy in ["CachePlusLoad", "KvAware"] {
        let engines = join_all((0..5).map(|_| engine(|config| config.step_ms = 2.0))).await;
        let all: Vec<&EngineSim> = engines.iter().collect();
        let router = Router::start(Setup::zmq(&all).policy(policy)).await;
        independent_load(&router).await;
        everybody_got_some(&requests(&engines).await, policy);
    }
}

/// Case G17, where they decode only.
#[tokio::test]
async fn independent_prompts_reach_every_decode_worker() {
    let of_role = |role| {
        engine(move |config| {
            (config.wire, config.disaggregation, config.step_ms) = (Wire::Sglang0523, Some(role), 2.0);
        })
    };
    let prefill = of_role(Disaggregation::Prefill).await;
    let decodes = join_all((0..5).map(|_| of_role(Disaggregation::Decode))).await;
    let with = |engine: &EngineSim, more: &str| {
        worker(engine).replacen('{', &format!("{{protocol: SGLang, {more}, "), 1)
    };
    let port = prefill.transfer_addr().unwrap().port();
    let mut workers = vec![with(&prefill, &format!("role: Prefill, bootstrapPort: {port}"))];
    workers.extend(decodes.iter().map(|decode| with(decode, "role: Decode")));
    for demand in ["Disabled", "Enabled"] {
        let before = requests(&decodes).await;
        let setup = Setup::of(workers.clone()).more(&format!("decodeInputDemand: {{mode: {demand}}}"));
        let router = Router::start(setup).await;
        until("all workers are ready", async || {
            (router.metric("kvrouter_worker_ready", "\"ok\"").await == 6.0).then_some(())
        })
        .await;
        independent_load(&router).await;
        let after = requests(&decodes).await;
        let counts: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        everybody_got_some(&counts, demand);
    }
}

/// Case G20: calls of agents are short, so that they are no work to speak of; still each of them
/// occupies a rank.
#[tokio::test]
async fn short_calls_are_spread_over_ranks_by_those_in_flight() {
    const CALLS: u32 = 32;
    let long_ago = json!({"role": "system", "content": text(1, 80)});
    let check = async |why: &str, policy: &'static str, weights: &str, shared: bool, is_even: bool| {
        let ranked = engine(|config| config.dp_size = 4).await;
        let setup = Setup::zmq(&[&ranked]).policy(policy).more(weights);
        let router = Router::start(setup).await;
        if shared {
            chat_directly(&ranked, &json!([long_ago, {"role": "user", "content": "begin"}]), Some(2)).await;
            router.agrees_with(&ranked).await;
        }
        fault(&ranked, json!({"stall_ms": 60_000})).await;
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..CALLS {
            let call = json!({"role": "user", "content": format!("step {number}")});
            let messages = if shared { json!([long_ago, call]) } else { json!([call]) };
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 4}).to_string();
            let (client, url) = (router.client.clone(), router.url(CHAT));
            calls.spawn(async move { client.send(Method::POST, &url, &[], body.into()).await });
        }
        let counts = until("all calls are in flight", async || {
            let mut counts = Vec::new();
            for rank in 0..4 {
                let target = format!("\"{}#{rank}\"", id(&ranked));
                counts.push(router.metric("kvrouter_target_requests", &target).await as u32);
            }
            (counts.iter().sum::<u32>() == CALLS).then_some(counts)
        })
        .await;
        let mean = CALLS / 4;
        let all_near = counts.iter().all(|count| *count * 2 > mean && *count * 2 < mean * 3);
        assert_eq!(all_near, is_even, "{why}: {counts:?}");
        calls.shutdown().await;
        router.is_idle().await;
    };
    check("unrelated", "CachePlusLoad", "", false, true).await;
    check("by blocks", "KvAware", "", false, true).await;
    let none = "loadWeights: {queue: 0, decode: 0, request: 0}";
    check("one prompt, and nothing else counts", "CachePlusLoad", none, true, false).await;
    let requests = "loadWeights: {queue: 0, decode: 0, request: 200}";
    check("one prompt, and requests count", "CachePlusLoad", requests, true, true).await;
}
