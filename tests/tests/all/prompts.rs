//! What the router makes of prompts: read once, with the engine's own tokens, in
//! bounded time and memory, whatever clients send.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use http::Method;
use kvrouter_tests::client::{Answer, Client};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::harness::{MODEL, Router, Setup, TOKENIZER, engine, long, prompts_add_up, text, unique, until};
use crate::raw_worker::{RawWorker, Received};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// What takes milliseconds must be over by then on a busy machine, built without
/// optimisation.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A worker that takes everything.
async fn sink() -> RawWorker {
    RawWorker::start(|_| vec![ok()]).await
}

fn ok() -> Vec<u8> {
    let body = json!({"choices": [], "usage": {"prompt_tokens": 1}}).to_string();
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").into()
}

fn completion(prompt: impl Into<Value>) -> Value {
    json!({"model": MODEL, "prompt": prompt.into(), "max_tokens": 1})
}

/// The answer to a request, which must be quick, and its receipt.
async fn answered(router: &Router, path: &str, body: impl Into<bytes::Bytes>) -> (Answer, Value) {
    let id = unique();
    let headers = [("x-request-id", id.as_str())];
    let answer = timeout(AT_ONCE, router.send(path, &headers, body)).await.expect("an answer at once");
    let receipts = router.receipts(&id).await;
    (answer, receipts[0].clone())
}

/// One tokenisation for each prompt and none for what has no text, however often
/// a worker is picked for it: the first attempt of every other request fails.
#[tokio::test]
async fn a_prompt_is_tokenised_once_on_every_endpoint() {
    for family in ["VLLM", "SGLang"] {
        let failing = Arc::new(AtomicBool::new(false));
        let fails = Arc::clone(&failing);
        // Without a byte of an answer another worker is tried; the router's own comparison of
        // tokens, at a moment of its own, must not use the failure up.
        let script = move |received: Received| {
            let is_comparison = received.head.contains("/tokenize ");
            let broken = !is_comparison && fails.swap(false, Ordering::Relaxed);
            if broken { Vec::new() } else { vec![ok()] }
        };
        let worker = RawWorker::start(script.clone()).await;
        let other = RawWorker::start(script).await;
        let workers = [worker.address.to_string(), other.address.to_string()];
        let setup = Setup::in_turn(&workers.each_ref().map(String::as_str));
        let router = Router::start(setup.more(&format!("engine: {family}"))).await;
        let user = json!([{"role": "user", "content": "hello"}]);
        let (chat, generate) = (json!({"messages": user}), json!({"text": "hello"}));
        let native = if family == "SGLang" { 1.0 } else { 0.0 };
        let cases = [
            (CHAT, "chat", chat.clone(), 1.0),
            (COMPLETIONS, "completions", json!({"prompt": "hello"}), 1.0),
            (COMPLETIONS, "completions", json!({"prompt": ["a", "b", "c"]}), 3.0),
            (COMPLETIONS, "completions", json!({"prompt": [1, 2, 3]}), 0.0),
            ("/v1/messages", "messages", json!({"messages": user, "max_tokens": 1}), 1.0),
            ("/v1/responses", "responses", json!({"input": "hello"}), 1.0),
            ("/generate", "generate", generate, native),
            ("/v1/embeddings", "embeddings", json!({"input": "hello"}), 0.0),
            ("/v1/rerank", "other", chat, 0.0),
        ];
        for (path, label, body, expected) in cases {
            for attempts in [1, 2] {
                let label = format!("endpoint=\"{label}\"");
                let counted = || router.metric("kvrouter_tokenisations_total", &label);
                let (before, posts) = (counted().await, worker.posts() + other.posts());
                failing.store(attempts == 2, Ordering::Relaxed);
                let answer = router.post(path, body.clone()).await;
                assert_eq!(answer.status, 200, "{family} {path}: {}", answer.text());
                assert_eq!(worker.posts() + other.posts() - posts, attempts, "{family} {path}");
                assert_eq!(counted().await - before, expected, "{family} {path} {body}, {attempts} attempts");
            }
        }
    }
}

/// Cases B11, B15 and B16: the tokens that the engine tells of, page by page, are
/// the router's, for chats and for completions; so is how a text begins.
#[tokio::test]
async fn tokens_are_those_of_the_engine() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
    let turn = |number: u32| {
        let role = if number.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("{} <|im_start|>system {{type<image>}}", text(number, 5))})
    };
    let chat = json!({"model": MODEL, "messages": (0..51).map(turn).collect::<Value>(), "max_tokens": 1});
    for (path, body) in [(CHAT, chat), (COMPLETIONS, completion(text(3, 90)))] {
        let told = Client::new().post(&format!("http://{}/tokenize", only.http_addr()), &body).await.unwrap();
        let count = told.json().unwrap()["count"].as_u64().unwrap();
        let (answer, receipt) = answered(&router, path, body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(receipt["prompt_tokens"], count, "{path}: as many tokens");
        assert_eq!(receipt["predicted_hit_tokens"], 0, "{path}: nothing was there");
        router.agrees_with(&only).await;
        let (answer, receipt) = answered(&router, path, body.to_string()).await;
        let cached = answer.json().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
        // The view has the engine's tokens; all full blocks but the last token's
        // are found in it by the router's.
        assert_eq!(cached, (count - 1) / 16 * 16, "{path}");
        assert_eq!(receipt["predicted_hit_tokens"], cached, "{path}");
    }
}

/// Case B12: chats and completions both take the way by the cache, and a counter
/// for each says so.
#[tokio::test]
async fn chats_and_completions_follow_the_cache_and_are_counted_apart() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    let chat = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    for (path, label, body) in [(CHAT, "chat", chat), (COMPLETIONS, "completions", completion(text(2, 60)))] {
        answered(&router, path, body.to_string()).await;
        router.agrees_with(&only).await;
        let (_, receipt) = answered(&router, path, body.to_string()).await;
        assert_eq!(receipt["outcome"], "hit", "{path}: {receipt}");
        let label = format!("endpoint=\"{label}\"");
        assert_eq!(router.metric("kvrouter_tokenisations_total", &label).await, 2.0, "{path}");
        assert_eq!(router.metric("kvrouter_prompt_refusals_total", &label).await, 0.0, "{path}");
    }
    let bad = json!({"model": MODEL, "messages": [{"role": "user", "content": 5}]});
    router.post(CHAT, bad).await;
    assert_eq!(router.metric("kvrouter_prompt_refusals_total", "endpoint=\"chat\"").await, 1.0);
    assert_eq!(router.metric("kvrouter_prompt_refusals_total", "endpoint=\"completions\"").await, 0.0);
}

/// Case B03: hits of several prompts are added up, and what they have in common is
/// active once.
#[tokio::test]
async fn several_prompts_hit_one_by_one() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
    let prompt = |first: u32| -> Vec<u32> { (0..64).map(|at| first + at).collect() };
    let known = completion(prompt(100));
    answered(&router, COMPLETIONS, known.to_string()).await;
    router.agrees_with(&only).await;
    // Eight prompts: two are known up to their last token's block, and equal.
    let lists: Vec<Vec<u32>> = [100, 200, 300, 100, 400, 500, 600, 700].map(prompt).to_vec();
    let (answer, receipt) = answered(&router, COMPLETIONS, completion(lists).to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(receipt["prompt_tokens"], 8 * 64);
    assert_eq!(receipt["prompt_blocks"], 7 * 4, "equal blocks count once");
    assert_eq!(receipt["predicted_hit_tokens"], 2 * 48, "{receipt}");
    router.is_idle().await;
}

/// Case B03: a receipt lists the prompts of its request one by one, that of a dry run
/// too; what it lists adds up to what it says of all of them.
#[tokio::test]
async fn a_receipt_lists_prompts_one_by_one() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
    let prompt = |first: u32, length: u32| -> Vec<u32> { (first..first + length).collect() };
    let (_, receipt) = answered(&router, COMPLETIONS, completion(prompt(100, 64)).to_string()).await;
    assert_eq!(receipt["prompts"], json!([]), "a single prompt is not listed");
    router.agrees_with(&only).await;
    // Half of what is known, all of it and more, less than a block, all of it twice.
    let half = [prompt(100, 32), prompt(900, 20)].concat();
    let short = prompt(100, 15);
    let more = prompt(100, 81);
    let [new, known, other, long] = [(200, 40), (100, 64), (300, 16), (400, 150)].map(|(a, b)| prompt(a, b));
    let lists = [&new, &known, &half, &short, &more, &other, &known, &long];
    let body = completion(json!(lists)).to_string();
    let url = format!("http://{}/v1/admin/explain?path={COMPLETIONS}", router.at.admin);
    let explained = router.client.send(Method::POST, &url, &[], body.clone().into()).await.unwrap();
    let (answer, receipt) = answered(&router, COMPLETIONS, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let listed = |tokens: u64, blocks: u64, device: u64| json!({"tokens": tokens, "blocks": blocks, "claimed": {"device": device, "host": 0, "disk": 0}});
    let expected = [
        listed(40, 2, 0),
        listed(64, 4, 4),
        listed(52, 3, 2),
        listed(15, 0, 0),
        listed(81, 5, 4),
        listed(16, 1, 0),
        listed(64, 4, 4),
        listed(150, 9, 0),
    ];
    assert_eq!(receipt["prompts"], json!(expected), "{receipt}");
    assert_eq!(explained.json().unwrap()["prompts"], json!(expected));
    prompts_add_up(&receipt);
    // 28 blocks, of which two prompts have four that the first of them has, and one two.
    assert_eq!((&receipt["prompt_tokens"], &receipt["prompt_blocks"]), (&json!(482), &json!(28 - 4 - 4 - 2)));
    // A claim counts up to the block of the prompt's last token: 3, 2, 4 and 3 blocks.
    assert_eq!(receipt["predicted_hit_tokens"], 12 * 16, "{receipt}");
    router.is_idle().await;
}

/// Both attempts of a request list its prompts, and so does the receipt of one that
/// found nobody, who claims nothing.
#[tokio::test]
async fn prompts_are_listed_whatever_becomes_of_a_request() {
    let body = completion(json!([[1, 2, 3], vec![4; 33]])).to_string();
    let (dying, other) = (RawWorker::start(|_| Vec::new()).await, RawWorker::start(|_| Vec::new()).await);
    let addresses = [dying.address.to_string(), other.address.to_string()];
    let setups = [Setup::in_turn(&addresses.each_ref().map(String::as_str)), Setup::of(Vec::new())];
    let mut attempts = Vec::new();
    for setup in setups {
        let router = Router::start(setup.more("limits: {noWorkerWaitSeconds: 1}")).await;
        let id = unique();
        router.send(COMPLETIONS, &[("x-request-id", id.as_str())], body.clone()).await;
        attempts.extend(router.receipts(&id).await);
    }
    let chosen: Vec<bool> = attempts.iter().map(|receipt| receipt["chosen"].is_object()).collect();
    assert_eq!(chosen, [true, true, false], "both workers, then nobody");
    for receipt in attempts {
        let nothing = json!({"device": 0, "host": 0, "disk": 0});
        let expected = json!([{"tokens": 3, "blocks": 0, "claimed": nothing}, {"tokens": 33, "blocks": 2, "claimed": nothing}]);
        assert_eq!(receipt["prompts"], expected, "{receipt}");
        prompts_add_up(&receipt);
    }
}

/// A hundred thousand prompts in one request: refused at once, with the limit's name; where the limit is higher, they
/// are served.
#[tokio::test]
async fn very_many_prompts_are_refused_at_once() {
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address]).more("engine: SGLang")).await;
    let lists = json!(vec![[1]; 100_000]);
    let texts = json!(vec!["a"; 1025]);
    for (path, body) in [
        (COMPLETIONS, completion(lists.clone())),
        (COMPLETIONS, completion(texts.clone())),
        ("/generate", json!({"input_ids": lists})),
        ("/generate", json!({"text": texts})),
    ] {
        let (answer, receipt) = answered(&router, path, body.to_string()).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        let error = answer.json().unwrap()["error"].clone();
        assert_eq!(
            (&error["code"], &receipt["result"]["failure"]),
            (&json!("too_many_prompts"), &error["code"])
        );
        assert!(error["message"].as_str().unwrap().contains("limits.promptsPerRequest"), "{error}");
    }
    assert_eq!(worker.posts(), 0);
    for most in [completion(json!(vec![[1]; 1024])), completion(json!(vec![1; 5000]))] {
        assert_eq!(answered(&router, COMPLETIONS, most.to_string()).await.0.status, 200);
    }
    let setup = Setup::in_turn(&[&address]).more("limits: {promptsPerRequest: 100000}");
    let router = Router::start(setup).await;
    let (answer, receipt) = answered(&router, COMPLETIONS, completion(lists).to_string()).await;
    assert_eq!((answer.status, &receipt["prompt_tokens"]), (200, &json!(100_000)), "{}", answer.text());
    assert_eq!(receipt["prompts"].as_array().unwrap().len(), 100_000);
    prompts_add_up(&receipt);
}

/// Case B05: where a body has ids and text, ids are the prompt.
#[tokio::test]
async fn ids_win_over_text() {
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address]).more("engine: SGLang")).await;
    let ids: Vec<u32> = (10..60).collect();
    let messages = json!([{"role": "user", "content": "hello"}]);
    let bodies = [
        ("/generate", json!({"text": "hello", "input_ids": ids})),
        (CHAT, json!({"messages": messages, "input_ids": ids})),
    ];
    for (path, body) in bodies {
        let (_, receipt) = answered(&router, path, body.to_string()).await;
        assert_eq!(
            (&receipt["prompt_tokens"], &receipt["exact_tokens"]),
            (&json!(50), &json!(true)),
            "{path}"
        );
    }
    assert_eq!(router.metric("kvrouter_tokenisations_total", "").await, 0.0);
}

/// Case B07: large prompts leave a thread of the pool to small ones, and none of
/// them holds the threads that serve connections.
#[tokio::test]
async fn small_requests_pass_large_ones() {
    // More than a queue that small ones stand in, too, would let pass.
    let threads = std::thread::available_parallelism().map_or(1, usize::from).max(2);
    let large = 12 * u32::try_from(threads).unwrap();
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address])).await;
    let done = Arc::new(AtomicUsize::new(0));
    let mut waiting = Vec::new();
    for number in 0..large {
        // Prompts of a megabyte that have no beginning in common.
        let body = completion(text(number + 1, 100_000)).to_string();
        assert!(body.len() > 1 << 20, "{}", body.len());
        let (client, url, done) = (router.client.clone(), router.url(COMPLETIONS), Arc::clone(&done));
        waiting.push(tokio::spawn(async move {
            let answer = client.send(Method::POST, &url, &[], body.into()).await.unwrap();
            done.fetch_add(1, Ordering::Relaxed);
            assert_eq!(answer.status, 200, "{}", answer.text());
        }));
    }
    // The first one is through, so all of them are there or on their way.
    let first = async || (done.load(Ordering::Relaxed) > 0).then_some(());
    until("a large prompt is tokenised", first).await;
    assert_eq!(router.get("/readyz").await.status, 200);
    let small = router.post(COMPLETIONS, completion("hello")).await;
    assert_eq!(small.status, 200, "{}", small.text());
    let passed = large as usize - done.load(Ordering::Relaxed);
    for one in waiting {
        one.await.unwrap();
    }
    assert!(passed > 3 * threads, "a small request waited for all but {passed} of {large} large ones");
}

/// Case B09: a prompt of 1.2 million tokens is routed.
#[tokio::test]
async fn a_prompt_of_a_million_tokens_is_routed() {
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address])).await;
    let ids: Vec<u32> = (0..1_200_000).collect();
    let (answer, receipt) = answered(&router, COMPLETIONS, completion(ids).to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!((&receipt["prompt_tokens"], &receipt["prompt_blocks"]), (&json!(1_200_000), &json!(75_000)));
}

/// Bodies that are broken, odd or huge: an answer at once, and the next request is
/// served as before.
#[tokio::test]
async fn bad_bodies_harm_nobody() {
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address])).await;
    let user = |content: &str| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": {content}}}]}}");
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let many: Vec<Value> = (0..100_000).map(|_| json!({"role": "user", "content": "a"})).collect();
    let mut broken = user("\"x\"").into_bytes();
    let last = broken.len() - 5;
    broken[last] = 0xff;
    //    why                       body                    status  why it has no blocks
    let cases: [(&str, Vec<u8>, u16, Option<&str>); 6] = [
        ("invalid UTF-8", broken, 400, None),
        ("an unpaired surrogate", user("\"\\ud800\"").into(), 200, Some("malformed")),
        ("a number out of range", user("1e999").into(), 200, Some("malformed")),
        ("nested too deep", deep.into(), 200, Some("malformed")),
        ("a list of nothing", b"{\"messages\": [null, 1]}".to_vec(), 200, Some("malformed")),
        ("100,000 messages", json!({"messages": many}).to_string().into(), 200, None),
    ];
    for (why, body, status, refusal) in cases {
        let refused = |reason: &str| format!("reason=\"{reason}\"");
        let count = async || match refusal {
            Some(reason) => router.metric("kvrouter_prompt_refusals_total", &refused(reason)).await,
            None => router.metric("kvrouter_prompt_refusals_total", "").await,
        };
        let before = count().await;
        let (answer, receipt) = answered(&router, CHAT, body).await;
        assert_eq!(answer.status, status, "{why}: {}", answer.text());
        if status == 400 {
            let error = answer.json().unwrap()["error"].clone();
            assert_eq!(error["code"], "invalid_json", "{why}: {error}");
            assert!(error["message"].as_str().unwrap().contains("Send one JSON object"), "{why}: {error}");
        }
        let more = if refusal.is_some() { 1.0 } else { 0.0 };
        assert_eq!(count().await - before, more, "{why}");
        assert_eq!(receipt["exact_tokens"] == true, status == 200 && refusal.is_none(), "{why}: {receipt}");
        let (good, receipt) = answered(&router, CHAT, user("\"hello\"")).await;
        assert_eq!((good.status, &receipt["exact_tokens"]), (200, &json!(true)), "after {why}");
    }
}

/// A gigabyte is refused by the limit's name, before it is there, and is not kept.
#[tokio::test]
async fn a_gigabyte_is_refused_early() {
    const LIMIT: usize = 1_000_000;
    const MOST: usize = 1 << 30;
    let worker = sink().await;
    let address = worker.address.to_string();
    let setup = Setup::in_turn(&[&address]).more(&format!("limits: {{requestBodyBytes: {LIMIT}}}"));
    let router = Router::start(setup).await;
    let before = peak_kib(router.process.id());
    let framings = [
        ("expected", format!("content-length: {MOST}\r\nexpect: 100-continue\r\n")),
        ("announced", format!("content-length: {MOST}\r\n")),
        ("in chunks", "transfer-encoding: chunked\r\n".to_owned()),
    ];
    for (why, framing) in framings {
        let stream = TcpStream::connect(&router.at.http).await.unwrap();
        let (mut from, mut to) = stream.into_split();
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{framing}\r\n");
        to.write_all(head.as_bytes()).await.unwrap();
        let waits = why == "expected";
        let sending = tokio::spawn(async move {
            let piece = vec![b'x'; 1 << 20];
            let mut sent = 0;
            // The router closes the connection some time.
            while !waits && sent < MOST {
                let framed = [b"100000\r\n", &piece[..], b"\r\n"].concat();
                if to.write_all(if why == "in chunks" { &framed } else { &piece }).await.is_err() {
                    break;
                }
                sent += piece.len();
            }
            (sent, to)
        });
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        let began = Instant::now();
        while !answer.ends_with(b"}") {
            let read = timeout(AT_ONCE, from.read(&mut piece)).await.expect("an answer at once").unwrap();
            assert!(read > 0, "{why}: no whole answer: {}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&piece[..read]);
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 413 "), "{why}: {answer}");
        assert!(answer.contains(&format!("larger than {LIMIT} bytes")), "{why}: {answer}");
        assert!(answer.contains("limits.requestBodyBytes"), "{why}: {answer}");
        if waits {
            // Whoever asks first need not send anything.
            assert!(began.elapsed() < Duration::from_secs(4), "{why}: {:?}", began.elapsed());
        }
        drop(from);
        let (sent, _) = sending.await.unwrap();
        assert!(sent < MOST / 4, "{why}: it took {sent} bytes");
        assert_eq!(router.post(CHAT, json!({"messages": long(1)})).await.status, 200, "after {why}");
    }
    let grown = peak_kib(router.process.id()) - before;
    assert!(grown < 64 << 10, "{grown} KiB more");
}

/// A picture of 20 MB is put together once and hashed where it is: the peak grows by
/// little more than its size.
#[tokio::test]
async fn a_large_picture_is_not_copied_twice() {
    const BYTES: usize = 20_000_000;
    let worker = sink().await;
    let address = worker.address.to_string();
    let url = |bytes: usize| format!("data:image/png;base64,{}", "iVBORw0K".repeat(bytes / 8));
    let chat = |bytes| {
        let parts =
            json!([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url(bytes)}}]);
        json!({"messages": [{"role": "user", "content": parts}]}).to_string()
    };
    let list =
        |bytes| json!({"messages": [{"role": "user", "content": "see"}], "images": [url(bytes)]}).to_string();
    let response = |bytes| {
        let parts =
            json!([{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url(bytes)}]);
        json!({"input": [{"role": "user", "content": parts}]}).to_string()
    };
    let shapes: [(&str, &dyn Fn(usize) -> String); 3] =
        [(CHAT, &chat), (CHAT, &list), ("/v1/responses", &response)];
    for (at, (path, body)) in shapes.into_iter().enumerate() {
        let router = Router::start(Setup::in_turn(&[&address])).await;
        answered(&router, path, body(1000)).await;
        let before = peak_kib(router.process.id());
        let (answer, receipt) = answered(&router, path, body(BYTES)).await;
        assert_eq!(answer.status, 200, "{at}: {}", answer.text());
        assert_eq!(receipt["images"], 1, "{at}: {receipt}");
        let grown = (peak_kib(router.process.id()) - before) * 1024;
        assert!(grown < BYTES as u64 * 3 / 2, "{at}: {grown} bytes more for {BYTES}");
    }
}

/// The most memory that a process has held.
fn peak_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A template that loops for ever or calls itself is stopped: that request goes by
/// load, and others are rendered.
#[tokio::test]
async fn a_template_that_does_not_end_is_stopped() {
    const TEMPLATE: &str = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}\
        {% set what = messages[0].content %}\
        {% if what == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}\
        {% elif what == 'recurse' %}{{ again(0) }}\
        {% elif what == 'grow' %}{% set all = namespace(text='x') %}{% for a in range(99) %}{% set all.text = all.text + all.text %}{% endfor %}\
        {% else %}{{ what }}{% endif %}";
    let model = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{TOKENIZER}/tokenizer.json"), model.path().join("tokenizer.json")).unwrap();
    std::fs::write(model.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let worker = sink().await;
    let address = worker.address.to_string();
    let router = Router::start(Setup::in_turn(&[&address]).tokenizer(model.path())).await;
    let before = peak_kib(router.process.id());
    for what in ["loop", "recurse", "grow"] {
        let user = |content: &str| json!({"messages": [{"role": "user", "content": content}]}).to_string();
        let (answer, receipt) = answered(&router, CHAT, user(what)).await;
        assert_eq!((answer.status, &receipt["exact_tokens"]), (200, &json!(false)), "{what}: {receipt}");
        let (_, receipt) = answered(&router, CHAT, user("hello")).await;
        assert_eq!(receipt["exact_tokens"], true, "after {what}");
    }
    assert_eq!(router.metric("kvrouter_prompt_refusals_total", "reason=\"unrenderable\"").await, 3.0);
    assert!(peak_kib(router.process.id()) - before < 256 << 10, "it did not grow without a limit");
}

/// A tokenizer that is cut off is found at the start.
#[tokio::test]
async fn a_tokenizer_that_is_cut_off_is_named() {
    let model = tempfile::tempdir().unwrap();
    let whole = std::fs::read(format!("{TOKENIZER}/tokenizer.json")).unwrap();
    std::fs::write(model.path().join("tokenizer.json"), &whole[..whole.len() / 2]).unwrap();
    let worker = sink().await;
    let setup = Setup::in_turn(&[&worker.address.to_string()]).tokenizer(model.path());
    let router = Router::start(setup).await;
    // It serves by load, and says what is wrong and where.
    assert!(router.has_problem("no_tokenizer", None).await, "{}", router.report().await);
    assert!(router.report().await.to_string().contains("tokenizer.json"), "{}", router.report().await);
    let (answer, receipt) = answered(&router, COMPLETIONS, completion("hello").to_string()).await;
    assert_eq!((answer.status, &receipt["exact_tokens"]), (200, &json!(false)));
}
