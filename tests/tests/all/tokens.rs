//! Whether engines make the router's tokens: compared, named, and used.

use std::process::Command;
use std::time::Duration;

use engine_sim::{EngineSim, Wire};
use kvrouter_tests::client::Client;
use kvrouter_tests::process::sibling;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::harness::{
    MODEL, Router, Setup, TOKENIZER, chat_directly, engine, fault, id, long, received, state, text, unique,
    until,
};

const CHAT: &str = "/v1/chat/completions";
/// A template that no engine here has by itself.
const OTHER_TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";
const WIRES: [Wire; 4] = [Wire::Vllm022, Wire::Vllm033, Wire::Sglang0518, Wire::Sglang0523];

/// A router that compares every second.
fn eager(setup: Setup) -> Setup {
    let flags = vec!["--render-check-seconds".to_owned(), "1".to_owned()];
    Setup { flags, ..setup }
}

/// What the report says of a worker's tokens.
async fn rendering(router: &Router, worker: &str) -> Value {
    let report = router.report().await;
    let workers = report["workers"].as_array().unwrap();
    workers.iter().find(|it| it["worker"] == worker).unwrap()["rendering"].clone()
}

/// Waits until a worker's parity and its reason are these.
async fn is_known(router: &Router, worker: &str, parity: &str, reason: &str) -> Value {
    until(&format!("{worker} is {parity}: {reason}"), async || {
        let found = rendering(router, worker).await;
        (found["parity"] == parity && found["reason"] == reason).then_some(found)
    })
    .await
}

#[tokio::test]
async fn tokens_of_both_families_are_confirmed() {
    for wire in WIRES {
        let same = engine(|config| config.wire = wire).await;
        let router = Router::start(Setup::zmq(&[&same])).await;
        let found = is_known(&router, &id(&same), "confirmed", "same").await;
        assert_eq!(found["compared"], 8, "{wire:?}: {found}");
        let variant = if wire.is_vllm() { "vllm" } else { "sglang" };
        assert_eq!(found["variant"], variant);
        assert!(found["tokenizeMicrosecondsPerToken"].as_f64().is_some(), "{found}");
        let labels = format!("variant=\"{variant}\"");
        assert_eq!(router.metric("kvrouter_worker_parity", &labels).await, 1.0);
        assert_eq!(router.metric("kvrouter_worker_parity", "state=\"confirmed\"").await, 1.0);
        router.is_well().await;
    }
}

/// Case C10: a template that is not the router's shows as a problem, a metric and a trust, never
/// as hits that do not come.
#[tokio::test]
async fn an_engine_with_another_template_is_named_and_earns_nothing() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let (other, plain) =
            (engine(|config| config.wire = wire).await, engine(|config| config.wire = wire).await);
        fault(&other, json!({"chat_template": OTHER_TEMPLATE})).await;
        let setup = Setup::zmq(&[&other, &plain]).events_only().more("freshness: {fallback: Load}");
        let router = Router::start(eager(setup)).await;
        let found = is_known(&router, &id(&other), "diverged", "differs").await;
        assert_eq!((&found["probe"], &found["position"]), (&json!("system"), &json!(0)), "{found}");
        is_known(&router, &id(&plain), "confirmed", "same").await;
        assert!(router.has_problem("render_diverged", Some(&id(&other))).await);
        let report = router.report().await;
        let message = report["problems"][0]["message"].as_str().unwrap();
        assert!(message.contains("\"system\"") && message.ends_with("chat template."), "{message}");
        assert!(router.metric("kvrouter_render_checks_total", "diverged").await >= 1.0);
        assert_eq!(router.metric("kvrouter_worker_parity", "diverged").await, 1.0);

        // A completion has no template: its blocks are there, and still earn nothing.
        for engine in [&other, &plain] {
            chat_directly(engine, &long(1), None).await;
        }
        router.agrees_with(&plain).await;
        let chat = router.chat(&long(1), 1).await;
        assert_eq!(chat.worker(), id(&plain), "{}", chat.receipt);
        for candidate in chat.receipt["candidates"].as_array().unwrap() {
            let is_other = candidate["target"] == format!("{}#0", id(&other));
            let expected = if is_other { ("mismatched", "render_diverged") } else { ("exact", "ok") };
            let trust = &candidate["trust"];
            assert_eq!((&trust["state"], &trust["reason"]), (&json!(expected.0), &json!(expected.1)));
            assert_eq!(candidate["hits"]["device"].as_u64().unwrap() > 0, !is_other, "{candidate}");
        }

        // It cannot be asked any more: what differed still does.
        let checks = async || router.metric("kvrouter_render_checks_total", "unknown").await;
        fault(&other, json!({"tokenize": "missing"})).await;
        until("it was asked again", async || (checks().await >= 1.0).then_some(())).await;
        assert_eq!(rendering(&router, &id(&other)).await["parity"], "diverged");
        fault(&other, json!({"tokenize": "ok"})).await;

        // Mended in place: the next comparison sees it.
        fault(&other, json!({"chat_template": ""})).await;
        is_known(&router, &id(&other), "confirmed", "same").await;
        router.is_well().await;
        fault(&plain, json!({"chat_template": OTHER_TEMPLATE, "restart": true})).await;
        is_known(&router, &id(&plain), "diverged", "differs").await;
    }
}

/// A diverged worker that is picked says so in the pick line.
#[tokio::test]
async fn the_pick_line_tells_why_a_view_earns_nothing() {
    let other = engine(|_| {}).await;
    fault(&other, json!({"chat_template": OTHER_TEMPLATE})).await;
    let router = Router::start(Setup::zmq(&[&other])).await;
    is_known(&router, &id(&other), "diverged", "differs").await;
    router.chat(&long(1), 1).await;
    let output = router.process.output();
    assert!(output.contains("trust=mismatched trust_reason=render_diverged"), "{output}");
}

/// Families print tools and join parts of a text each in their own way.
#[tokio::test]
async fn engines_of_another_family_differ_where_families_do() {
    let vllm = engine(|_| {}).await;
    let sglang = engine(|config| config.wire = Wire::Sglang0523).await;
    let router = Router::start(Setup::zmq(&[&vllm, &sglang]).more("engine: VLLM")).await;
    is_known(&router, &id(&vllm), "confirmed", "same").await;
    // It is told to be vLLM, so its ids are asked for at /tokenize, which it has too.
    let found = is_known(&router, &id(&sglang), "diverged", "differs").await;
    assert_eq!((&found["probe"], &found["compared"]), (&json!("tools"), &json!(3)), "{found}");
}

#[tokio::test]
async fn what_cannot_be_compared_is_unknown_and_delays_nobody() {
    for (tokenize, reason) in [("missing", "no_endpoint"), ("texts", "texts_only"), ("hang", "unanswered")] {
        let only = engine(|config| config.wire = Wire::Sglang0518).await;
        fault(&only, json!({"tokenize": tokenize})).await;
        let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
        let chat = router.chat(&long(1), 1).await;
        assert_eq!(chat.receipt["chosen"]["target"], format!("{}#0", id(&only)), "{tokenize}: it joined");
        router.agrees_with(&only).await;
        let again = router.chat(&long(1), 1).await;
        assert!(again.cached > 100, "{tokenize}");
        assert_eq!(again.cached, again.predicted(), "{tokenize}: hits count as before");
        is_known(&router, &id(&only), "unknown", reason).await;
        router.is_well().await;
    }
}

/// Case B11: what the router hashes of a chat is what it would hash of the ids that the worker
/// makes of it.
#[tokio::test]
async fn blocks_of_a_chat_are_blocks_of_the_workers_ids() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let only = engine(|config| config.wire = wire).await;
        for number in 0..25 {
            let chat = json!({"model": MODEL, "messages": conversation(number)});
            let ids = ids_of(&only, &chat).await;
            let chat = printed(&chat, CHAT, wire);
            let given = printed(&json!({"prompt": ids}), "/v1/completions", wire);
            assert!(chat.len() > 17, "blocks: {chat}");
            assert_eq!(chat, given, "{wire:?} {number}");
        }
    }
}

/// Several turns with a system prompt, letters of many kinds, and parts.
fn conversation(number: u32) -> Value {
    let mut messages = vec![json!({"role": "system", "content": text(number, 10)})];
    for turn in 0..number % 4 {
        messages.push(json!({"role": "user", "content": format!("{} 日本語 👩‍👩‍👧 <|im_end|>", text(turn, 5))}));
        messages.push(json!({"role": "assistant", "content": text(number + turn, 5)}));
    }
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": text(number, 3)}]);
    messages.push(json!({"role": "user", "content": parts}));
    Value::Array(messages)
}

async fn ids_of(engine: &EngineSim, body: &Value) -> Vec<u32> {
    let url = format!("http://{}/tokenize", engine.http_addr());
    let answer = Client::new().post(&url, body).await.unwrap().json().unwrap();
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

/// The block hashes that `kv-router tokenize` prints for a body.
fn printed(body: &Value, endpoint: &str, wire: Wire) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), body.to_string()).unwrap();
    let mut command = Command::new(sibling("kv-router").unwrap());
    let family = if wire.is_vllm() { "vllm" } else { "sglang" };
    command.args(["tokenize", "--model", TOKENIZER, "--endpoint", endpoint, "--engine", family, "--body"]);
    let output = command.arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().skip_while(|line| !line.starts_with("block hashes")).nth(1);
    line.unwrap().to_owned()
}

/// Case B06: with forwarding on and off the engine sees the same prompt, and with it on it makes no
/// tokens of its own.
#[tokio::test]
async fn forwarded_ids_are_the_engines_own() {
    for wire in [Wire::Vllm022, Wire::Vllm033, Wire::Sglang0518, Wire::Sglang0523] {
        let only = engine(|config| config.wire = wire).await;
        let off = Router::start(Setup::zmq(&[&only])).await;
        let on = Router::start(Setup::zmq(&[&only]).more("forwardTokenIds: WhenConfirmed")).await;
        is_known(&on, &id(&only), "confirmed", "same").await;
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let bodies = [
            (CHAT, json!({"model": MODEL, "messages": conversation(3), "max_tokens": 2})),
            (CHAT, json!({"model": MODEL, "messages": long(2), "max_tokens": 2, "tools": [tool]})),
            ("/v1/completions", json!({"model": MODEL, "prompt": text(3, 20), "max_tokens": 2})),
            ("/v1/completions", json!({"model": MODEL, "prompt": ["one", text(4, 20)], "max_tokens": 2})),
        ];
        for (path, body) in &bodies {
            let plain = sent(&off, &only, path, body).await;
            let given = sent(&on, &only, path, body).await;
            assert_eq!(plain["given_ids"], false, "{wire:?} {path}");
            // vLLM takes ids of chats since 0.27.
            let takes = *path != CHAT || wire != Wire::Vllm022;
            assert_eq!(given["given_ids"], takes, "{wire:?} {path} {body}");
            assert_eq!(plain["prompt_sha256"], given["prompt_sha256"], "{wire:?} {path} {body}");
        }
        let forwarded = if wire == Wire::Vllm022 { 2.0 } else { 4.0 };
        let count = async |result: &str| on.metric("kvrouter_forwarded_prompts_total", result).await;
        assert_eq!((count("forwarded").await, count("unsupported").await), (forwarded, 4.0 - forwarded));
        assert_eq!(state(&only).await["given_ids_total"], forwarded as u64);
    }
}

/// What the engine got of a body that went through a router and was answered.
async fn sent(router: &Router, engine: &EngineSim, path: &str, body: &Value) -> Value {
    let answer = router.post(path, body.clone()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    received(engine).await.last().unwrap().clone()
}

#[tokio::test]
async fn forwarding_changes_no_other_byte() {
    let only = engine(|_| {}).await;
    let setup =
        Setup { flags: vec!["--forward-token-ids=when-confirmed".to_owned()], ..Setup::zmq(&[&only]) };
    let router = Router::start(setup).await;
    is_known(&router, &id(&only), "confirmed", "same").await;
    let chat = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let ids = serde_json::to_string(&ids_of(&only, &chat).await).unwrap();
    let messages = long(1).to_string();
    // Spaces, an unknown field and a number that JSON cannot repeat.
    let rest = format!(
        " \"x_unknown\" : 1.50,\"model\":\"{MODEL}\",\n\"max_tokens\":1, \"messages\":{messages} }}\n"
    );
    let body = format!(" {{{rest}");
    let answer = router.send(CHAT, &[], body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let got = received(&only).await.last().unwrap().clone();
    let expected = format!(" {{\"kv_transfer_params\":{{\"prompt_token_ids\":{ids}}},{rest}");
    let digest: String = Sha256::digest(&expected).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((&got["body_sha256"], &got["given_ids"]), (&json!(digest), &json!(true)));
}

#[tokio::test]
async fn a_worker_that_was_not_confirmed_gets_what_the_client_sent() {
    let other = engine(|_| {}).await;
    fault(&other, json!({"chat_template": OTHER_TEMPLATE})).await;
    let router = Router::start(eager(Setup::zmq(&[&other]).more("forwardTokenIds: WhenConfirmed"))).await;
    is_known(&router, &id(&other), "diverged", "differs").await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    assert_eq!(sent(&router, &other, CHAT, &body).await["given_ids"], false);
    assert_eq!(router.metric("kvrouter_forwarded_prompts_total", "unconfirmed").await, 1.0);
    // With media in a message the ids would not be all of the prompt.
    fault(&other, json!({"chat_template": ""})).await;
    is_known(&router, &id(&other), "confirmed", "same").await;
    assert_eq!(sent(&router, &other, CHAT, &body).await["given_ids"], true);
    let picture = json!([{"role": "user", "content": [
        {"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]);
    let body = json!({"model": MODEL, "messages": picture, "max_tokens": 1});
    assert_eq!(sent(&router, &other, CHAT, &body).await["given_ids"], false);
}

/// The user's reason to forward ids, or not to.
#[tokio::test]
async fn the_part_of_the_first_byte_that_is_tokenising_is_reported() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    is_known(&router, &id(&only), "confirmed", "same").await;
    assert_eq!(rendering(&router, &id(&only)).await["tokenizeShareOfFirstByte"], Value::Null);
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1, "stream": true});
    assert_eq!(router.post(CHAT, body).await.status, 200);
    let found = rendering(&router, &id(&only)).await;
    let share = found["tokenizeShareOfFirstByte"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&share), "{found}");
    let metric = router.metric("kvrouter_worker_tokenize_share", "").await;
    assert!((metric - share).abs() <= 0.0005, "{metric} is {share}, rounded");
}

#[tokio::test]
async fn an_engine_that_keeps_no_prefixes_is_healthy_and_never_hits() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let forgetful = engine(|config| (config.wire, config.no_prefix_caching) = (wire, true)).await;
        let router = Router::start(Setup::zmq(&[&forgetful])).await;
        for _ in 0..3 {
            let chat = router.chat(&long(1), 1).await;
            let trust = &chat.receipt["candidates"][0]["trust"];
            assert_eq!(
                (&trust["state"], &trust["reason"], &trust["credited"]),
                (&json!("no_cache"), &json!("prefix_caching_off"), &json!(false)),
                "{wire:?}"
            );
            assert_eq!((chat.cached, chat.predicted()), (0, 0), "{wire:?}");
        }
        router.is_well().await;
    }
}

/// Chats a text twice, plain or streamed; waits in between until the view has it.
async fn twice(router: &Router, engine: &EngineSim, number: u32, streamed: bool) {
    for _ in 0..2 {
        let id = unique();
        let body = json!({"model": MODEL, "messages": long(number), "max_tokens": 1, "stream": streamed,
                          "stream_options": streamed.then(|| json!({"include_usage": true}))});
        let answer = router.send(CHAT, &[("x-request-id", &id)], body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        router.receipts(&id).await;
        router.agrees_with(engine).await;
    }
}

async fn reconciled(router: &Router, engine: &EngineSim) -> Value {
    let report = router.report().await;
    let workers = report["workers"].as_array().unwrap();
    let worker = workers.iter().find(|it| it["worker"] == id(engine)).unwrap();
    worker["targets"][0]["reconciled"].clone()
}

/// What an engine finds is compared with what was predicted, streamed or not.
#[tokio::test]
async fn predictions_that_do_not_come_true_are_a_problem_with_a_cause() {
    for (percent, cause) in [(0, "template"), (50, "lag")] {
        let liar = engine(|_| {}).await;
        let router = Router::start(Setup::zmq(&[&liar]).events_only()).await;
        for number in 0..8 {
            twice(&router, &liar, number, number % 2 == 0).await;
        }
        let good = reconciled(&router, &liar).await;
        assert_eq!((&good["share"], &good["drift"]), (&json!(1.0), &Value::Null), "{good}");
        assert_eq!(router.metric("kvrouter_predictions_total", "agrees").await, 16.0);
        fault(&liar, json!({"hit_percent": percent})).await;
        for number in 8..12 {
            twice(&router, &liar, number, number % 2 == 0).await;
        }
        let bad = reconciled(&router, &liar).await;
        assert_eq!((&bad["drift"], &bad["cause"]), (&json!("less"), &json!(cause)), "{bad}");
        assert_eq!(bad["credit"], 1.0, "credit of a plain view is trust's matter");
        assert!(bad["share"].as_f64().unwrap() < 0.9, "{bad}");
        let reason = format!("drift_{cause}");
        assert!(router.has_problem(&reason, Some(&id(&liar))).await, "{}", router.report().await);
        assert_eq!(
            router.metric("kvrouter_predictions_total", "less").await,
            8.0,
            "the common beginning too"
        );
        assert_eq!(router.metric("kvrouter_prediction_drift", cause).await, 1.0);
    }
}

/// Several kinds of attention: events tell what is held, not what is usable.
#[tokio::test]
async fn hits_in_a_hybrid_view_count_as_far_as_they_came_true() {
    let hybrid = engine(|config| config.hybrid = true).await;
    let router = Router::start(Setup::zmq(&[&hybrid]).events_only()).await;
    twice(&router, &hybrid, 0, false).await;
    assert_eq!(reconciled(&router, &hybrid).await["credit"], 0.5, "nothing is proven");
    let half = router.chat(&long(0), 1).await;
    let (claimed, hits) = blocks(&half.receipt);
    assert_eq!(hits, (claimed - u64::from(claimed * 16 == half.receipt["prompt_tokens"])) / 2);
    for number in 1..8 {
        twice(&router, &hybrid, number, false).await;
    }
    assert_eq!(reconciled(&router, &hybrid).await["credit"], 1.0);
    let whole = router.chat(&long(0), 1).await;
    assert_eq!(whole.cached, whole.predicted(), "{}", whole.receipt);
    fault(&hybrid, json!({"hit_percent": 0})).await;
    for number in 8..24 {
        twice(&router, &hybrid, number, true).await;
    }
    let found = reconciled(&router, &hybrid).await;
    assert!(found["credit"].as_f64().unwrap() < 0.5, "{found}");
    assert_eq!(found["cause"], "hybrid_attention");
    let less = router.chat(&long(0), 1).await;
    let (claimed, hits) = blocks(&less.receipt);
    assert!(hits * 2 < claimed, "{}", less.receipt);
    router.is_well().await;
}

/// Blocks that the view of the only candidate claims, and those that count.
fn blocks(receipt: &Value) -> (u64, u64) {
    let candidate = &receipt["candidates"][0];
    let of = |name: &str| candidate[name]["device"].as_u64().unwrap();
    (of("claimed"), of("hits"))
}

/// Sends a request to `/v1/responses`: status, the answer's id, the worker, what the receipt says.
async fn respond(router: &Router, body: &Value) -> (u16, String, String, String) {
    let id = unique();
    let answer = router.send("/v1/responses", &[("x-request-id", &id)], body.to_string()).await;
    let text = answer.text();
    let made = text.split("\"id\":\"resp_").nth(1).map_or("", |rest| rest.split('"').next().unwrap());
    let receipt = router.receipts(&id).await[0].clone();
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let target = word(&receipt["chosen"]["target"]);
    let worker = target.split_once('#').unwrap().0.to_owned();
    (answer.status, format!("resp_{made}"), worker, word(&receipt["session"]))
}

#[tokio::test]
async fn a_response_is_continued_where_it_was_made() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b]).policy("RoundRobin")).await;
    for streamed in [false, true] {
        let body = |previous: Option<&str>| {
            json!({"model": MODEL, "input": text(1, 20), "stream": streamed, "max_output_tokens": 4,
                   "previous_response_id": previous})
        };
        let (status, first, home, session) = respond(&router, &body(None)).await;
        assert_eq!((status, &*session), (200, "none"));
        let mut previous = first;
        for _ in 0..3 {
            let (status, next, worker, session) = respond(&router, &body(Some(&previous))).await;
            assert_eq!((status, &*worker, &*session), (200, &*home, "response_followed"));
            assert_ne!(next, previous);
            previous = next;
        }
        let (status, _, _, session) = respond(&router, &body(Some("resp_of_nobody"))).await;
        assert_eq!((status, &*session), (404, "response_unknown"), "the engine says so");
        let (home, other) = if home == id(&a) { (&a, &b) } else { (&b, &a) };
        fault(home, json!({"health": "fail"})).await;
        until("it is not picked", async || {
            let report = router.report().await;
            let workers = report["workers"].as_array().unwrap();
            workers.iter().any(|it| it["worker"] == id(home) && it["ready"] == false).then_some(())
        })
        .await;
        let (status, _, worker, session) = respond(&router, &body(Some(&previous))).await;
        assert_eq!((status, worker, &*session), (404, id(other), "response_gone"));
        fault(home, json!({"health": "ok"})).await;
        until("it is picked again", async || {
            let report = router.report().await;
            let workers = report["workers"].as_array().unwrap();
            workers.iter().all(|it| it["ready"] == true).then_some(())
        })
        .await;
    }
    assert_eq!(router.metric("kvrouter_session_picks_total", "response_followed").await, 6.0);
    assert!(router.metric("kvrouter_pool", "responses").await >= 8.0);
}

/// Nobody else knows the conversation: a full worker's client is told to wait, or to send all of it.
#[tokio::test]
async fn a_response_of_a_full_worker_is_not_continued_elsewhere() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let setup = Setup::zmq(&[&a, &b]).policy("RoundRobin").more("overload: {maxQueuedTokens: 600}");
    let router = Router::start(setup).await;
    let body = |previous: Option<&str>| json!({"model": MODEL, "input": text(1, 20), "max_output_tokens": 4, "previous_response_id": previous});
    let (_, first, home, _) = respond(&router, &body(None)).await;
    let home = if home == id(&a) { &a } else { &b };
    fault(home, json!({"stall_ms": 3000})).await;
    let filling = json!({"model": MODEL, "prompt": vec![7; 700], "max_tokens": 1}).to_string();
    let url = router.url("/v1/completions");
    let mut waiting = Vec::new();
    for number in 1..3 {
        // In turn: one of them is at the worker.
        let (client, url, body) = (router.client.clone(), url.clone(), filling.clone());
        waiting
            .push(tokio::spawn(async move { client.send(http::Method::POST, &url, &[], body.into()).await }));
        until("it is sent", async || {
            let picks = router.metric("kvrouter_picks_total", "").await;
            (picks >= f64::from(number) + 1.0).then_some(())
        })
        .await;
    }
    let request_id = unique();
    let answer =
        router.send("/v1/responses", &[("x-request-id", &request_id)], body(Some(&first)).to_string()).await;
    assert_eq!(answer.status, 429, "{}", answer.text());
    let error = answer.json().unwrap()["error"].clone();
    assert_eq!(error["code"], "overloaded_maker");
    assert!(error["message"].as_str().unwrap().contains("without previous_response_id"), "{error}");
    let receipt = router.receipts(&request_id).await[0].clone();
    assert_eq!((&receipt["candidate_count"], &receipt["result"]["failure"]), (&json!(1), &error["code"]));
    // The whole conversation goes to the other one.
    let (status, _, other, _) = respond(&router, &body(None)).await;
    assert_eq!((status, other == id(home)), (200, false));
    for task in waiting {
        task.await.unwrap().unwrap();
    }
}

/// Usage of `/v1/responses` is read too, whole and streamed.
#[tokio::test]
async fn usage_of_responses_is_compared_like_that_of_chats() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
    for streamed in [false, true] {
        let input = text(if streamed { 1 } else { 2 }, 60);
        for _ in 0..2 {
            let body = json!({"model": MODEL, "input": input, "stream": streamed, "max_output_tokens": 1});
            let (status, ..) = respond(&router, &body).await;
            assert_eq!(status, 200);
            router.agrees_with(&only).await;
        }
    }
    assert_eq!(router.metric("kvrouter_predictions_total", "agrees").await, 4.0);
    assert_eq!(router.metric("kvrouter_predictions_total", "less").await, 0.0);
    assert!(router.metric("kvrouter_engine_cached_tokens_total", "").await > 200.0);
}

/// An adapter's requests go to engines that have it, whatever others hold.
#[tokio::test]
async fn only_engines_with_the_adapter_stand_for_choice() {
    let (with, without) =
        (engine(|config| config.lora = vec!["poet".parse().unwrap()]).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&with, &without]).policy("LeastLoad")).await;
    for number in 0..6 {
        let id_of = unique();
        let body = json!({"model": "poet", "messages": long(number), "max_tokens": 1});
        let answer = router.send(CHAT, &[("x-request-id", &id_of)], body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let receipt = router.receipts(&id_of).await[0].clone();
        assert_eq!(receipt["candidate_count"], 1, "{receipt}");
        assert_eq!(receipt["chosen"]["target"], format!("{}#0", id(&with)));
    }
    let body = json!({"model": MODEL, "messages": long(9), "max_tokens": 1});
    tokio::time::timeout(Duration::from_secs(10), async {
        while received(&without).await.is_empty() {
            assert_eq!(router.post(CHAT, body.clone()).await.status, 200);
        }
    })
    .await
    .unwrap();
}
