//! Requests that one worker prefills and another one decodes, through the running router: both contracts,
//! what happens when either leg fails, and who is picked for which part.
//!
//! tidy: large, because all of it sets up and watches pairs by the same few functions.

use std::time::Duration;

use engine_sim::{Config, Disaggregation, EngineSim, Wire};
use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::harness::{
    MODEL, Router, Setup, engine, fault, id, long, prompts_add_up, received, state, text, total, unique,
    until, worker,
};
use crate::raw_worker::{RawWorker, STREAM_HEAD, chunk};

const PREFILL: Option<Disaggregation> = Some(Disaggregation::Prefill);
const DECODE: Option<Disaggregation> = Some(Disaggregation::Decode);

/// A protocol as settings spell it, and the engines that speak it.
#[derive(Clone, Copy)]
struct Speaks {
    protocol: &'static str,
    wire: Wire,
}

const SGLANG: Speaks = Speaks { protocol: "SGLang", wire: Wire::Sglang0523 };
const NIXL: Speaks = Speaks { protocol: "NIXL", wire: Wire::Vllm032 };

impl Speaks {
    async fn engine(self, role: Option<Disaggregation>, change: impl FnOnce(&mut Config)) -> EngineSim {
        engine(|config| {
            (config.wire, config.disaggregation) = (self.wire, role);
            change(config);
        })
        .await
    }

    /// A prefill and a decode engine.
    async fn pair(self) -> (EngineSim, EngineSim) {
        (self.engine(PREFILL, |_| {}).await, self.engine(DECODE, |_| {}).await)
    }

    /// An entry of `discovery.workers`.
    fn worker(self, engine: &EngineSim, role: &str) -> String {
        let ranks = engine.kv_event_endpoints();
        let bootstrap = match (self.protocol, role) {
            ("SGLang", "Prefill") => {
                format!(", bootstrapPort: {}", engine.transfer_addr().unwrap().port())
            }
            _ => String::new(),
        };
        format!(
            "{{url: \"http://{}\", dpSize: {}, role: {role}, protocol: {}{bootstrap}, kvEvents: {{endpoint: \"{}\"}}}}",
            engine.http_addr(),
            ranks.len(),
            self.protocol,
            ranks[0]
        )
    }

    fn setup(self, prefills: &[&EngineSim], decodes: &[&EngineSim]) -> Setup {
        let prefills = prefills.iter().map(|engine| self.worker(engine, "Prefill"));
        Setup::of(prefills.chain(decodes.iter().map(|engine| self.worker(engine, "Decode"))).collect())
    }

    async fn router(self, prefill: &EngineSim, decode: &EngineSim) -> Router {
        ready(Router::start(self.setup(&[prefill], &[decode])).await).await
    }
}

/// The router once probes have found all its workers ready.
async fn ready(router: Router) -> Router {
    until("all workers are ready", async || {
        let report = router.report().await;
        report["workers"].as_array().unwrap().iter().all(|one| one["ready"] == true).then_some(())
    })
    .await;
    router
}

/// What was handed over, and what somebody has mixed up.
async fn handover(engine: &EngineSim) -> (Value, Value) {
    let report = state(engine).await["handover"].clone();
    (report["total"].clone(), report["wrong"].clone())
}

/// So many prompts were handed over by the contract, and nothing else happened.
async fn handed_over(prefill: &EngineSim, decode: &EngineSim, count: u64) {
    let (offered, wrong) = handover(prefill).await;
    assert_eq!((&offered["offered"], &wrong), (&json!(count), &json!({})), "{offered}");
    let (received, wrong) = handover(decode).await;
    assert_eq!((&received, &wrong), (&json!({"received": count}), &json!({})));
}

fn chat(stream: bool) -> Value {
    json!({"model": MODEL, "messages": long(1), "max_tokens": 3, "stream": stream,
           "stream_options": stream.then(|| json!({"include_usage": true}))})
}

/// An answer, and the receipts of its legs by role.
async fn ask(router: &Router, path: &str, body: &Value) -> (kvrouter_tests::client::Answer, Vec<Value>) {
    let request = unique();
    let answer = router.send(path, &[("x-request-id", &request)], body.to_string()).await;
    (answer, router.receipts(&request).await)
}

fn of_role<'a>(receipts: &'a [Value], role: &str) -> Vec<&'a Value> {
    receipts.iter().filter(|receipt| receipt["role"] == role).collect()
}

/// The text of an answer, in one piece or streamed.
fn said(answer: &kvrouter_tests::client::Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let of = |body: &Value| {
        let choice = &body["choices"][0];
        let texts =
            [&choice["message"]["content"], &choice["delta"]["content"], &choice["text"], &body["text"]];
        texts.into_iter().find_map(Value::as_str).unwrap_or_default().to_owned()
    };
    match answer.json() {
        Ok(body) => of(&body),
        Err(_) => {
            let whole = answer.text();
            let events = whole.lines().filter_map(|line| line.strip_prefix("data: "));
            events.filter_map(|event| serde_json::from_str(event).ok()).map(|body| of(&body)).collect()
        }
    }
}

/// What the same engine says when it does all of the request.
async fn alone(wire: Wire, path: &str, body: &Value) -> String {
    let whole = engine(|config| config.wire = wire).await;
    let url = format!("http://{}{path}", whole.http_addr());
    said(&kvrouter_tests::client::Client::new().post(&url, body).await.unwrap())
}

#[tokio::test]
async fn sglang_pairs_serve_each_endpoint_streamed_and_not() {
    let (prefill, decode) = SGLANG.pair().await;
    let router = SGLANG.router(&prefill, &decode).await;
    let completion =
        |stream: bool| json!({"model": MODEL, "prompt": text(2, 60), "max_tokens": 3, "stream": stream});
    let mut count = 0;
    for stream in [false, true] {
        for (path, body) in [("/v1/chat/completions", chat(stream)), ("/v1/completions", completion(stream))]
        {
            let (answer, receipts) = ask(&router, path, &body).await;
            assert_eq!(said(&answer), alone(SGLANG.wire, path, &body).await, "{path}");
            count += 1;
            let legs = [&of_role(&receipts, "Prefill")[..], &of_role(&receipts, "Decode")[..]];
            assert_eq!((receipts.len(), legs.map(<[_]>::len)), (2, [1, 1]), "{path}");
            for (leg, engine) in legs.iter().zip([&prefill, &decode]) {
                assert_eq!(leg[0]["chosen"]["target"], format!("{}#0", id(engine)));
                assert_eq!(leg[0]["result"]["status"], 200);
                assert_eq!(leg[0]["result"]["failure"], Value::Null, "{path}");
            }
        }
    }
    handed_over(&prefill, &decode, count).await;
    // One tokenisation for both picks.
    assert_eq!(router.metric("kvrouter_tokenisations_total", "").await, count as f64);
    router.is_idle().await;
}

/// A tenant's salt goes to both workers of a pair: it finds its own prompt at prefill again, and nobody else's.
#[tokio::test]
async fn tenants_are_kept_apart_on_pairs() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "a secret for tests").unwrap();
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let setup = speaks.setup(&[&prefill], &[&decode]).events_only();
        let setup = setup.more(&format!("tenancy: {{saltSecretFile: {:?}}}", secret.path()));
        let router = ready(Router::start(setup).await).await;
        let mut found = Vec::new();
        for tenant in ["a", "b", "a"] {
            let request = unique();
            let headers = [("x-request-id", request.as_str()), ("X-Tenant", tenant)];
            let answer = router.send("/v1/chat/completions", &headers, chat(false).to_string()).await;
            assert_eq!(answer.status, 200, "{}: {}", speaks.protocol, answer.text());
            router.agrees_with(&prefill).await;
            let receipts = router.receipts(&request).await;
            let leg = of_role(&receipts, "Prefill")[0].clone();
            found.push((leg["namespace"].clone(), leg["predicted_hit_tokens"].as_u64().unwrap()));
        }
        assert_eq!((found[0].1, found[1].1), (0, 0), "{}: nobody else's", speaks.protocol);
        assert!(found[2].1 > 200, "{}: its own: {}", speaks.protocol, found[2].1);
        assert_eq!(found[2].0, found[0].0);
        assert_ne!(found[1].0, found[0].0);
        handed_over(&prefill, &decode, 3).await;
    }
}

/// SGLang's own endpoint, which the simulated engine lacks: both workers get the same bytes with a room, and
/// the client decode's answer.
#[tokio::test]
async fn sglang_pairs_serve_generate() {
    let bodies = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let worker = async |answer: &'static str| {
        let bodies = std::sync::Arc::clone(&bodies);
        RawWorker::start(move |received| {
            bodies.lock().unwrap().push(String::from_utf8(received.body).unwrap());
            let length = answer.len();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            );
            vec![head.into_bytes(), answer.as_bytes().to_vec()]
        })
        .await
    };
    let (prefill, decode) = (worker("{\"text\":\"p\"}").await, worker("{\"text\":\"d\"}").await);
    let entry = |worker: &RawWorker, role: &str| {
        format!("{{url: \"http://{}\", role: {role}, protocol: SGLang}}", worker.address)
    };
    let workers = vec![entry(&prefill, "Prefill"), entry(&decode, "Decode")];
    let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) };
    let router = ready(Router::start(setup).await).await;
    bodies.lock().unwrap().clear(); // Probes have asked for tokens.
    let sent = r#"{"text": "a b",  "sampling_params": {"max_new_tokens": 3}}"#;
    let answer = router.send("/generate", &[], sent).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "{\"text\":\"d\"}"));
    router.is_idle().await;
    let bodies: Vec<String> =
        bodies.lock().unwrap().iter().filter(|body| body.contains("max_new_tokens")).cloned().collect();
    assert_eq!((bodies.len(), &bodies[0]), (2, &bodies[1]));
    assert!(bodies[0].ends_with(&sent[1..]), "the rest is the client's: {}", bodies[0]);
    let body: Value = serde_json::from_str(&bodies[0]).unwrap();
    assert_eq!((&body["bootstrap_host"], &body["bootstrap_port"]), (&json!("127.0.0.1"), &json!(8998)));
    assert!(body["bootstrap_room"].as_u64().unwrap() < 1 << 63);
}

#[tokio::test]
async fn nixl_pairs_serve_each_endpoint_streamed_and_not() {
    let (prefill, decode) = NIXL.pair().await;
    let router = NIXL.router(&prefill, &decode).await;
    let completion =
        |stream: bool| json!({"model": MODEL, "prompt": text(2, 60), "max_tokens": 3, "stream": stream});
    for (path, body) in [
        ("/v1/chat/completions", chat(false)),
        ("/v1/completions", completion(false)),
        ("/v1/chat/completions", chat(true)),
        ("/v1/completions", completion(true)),
    ] {
        let (answer, receipts) = ask(&router, path, &body).await;
        assert_eq!(said(&answer), alone(NIXL.wire, path, &body).await, "{path}");
        assert_eq!(receipts.len(), 2, "{path}");
        assert!(receipts.iter().all(|leg| leg["result"]["failure"].is_null()), "{receipts:?}");
    }
    handed_over(&prefill, &decode, 4).await;
    // Both legs of an attempt have one id.
    let id_of = |request: &Value| {
        let mut headers = request["headers"].as_array().unwrap().iter();
        headers.find(|header| header[0] == "x-request-id").unwrap()[1].clone()
    };
    let ids = |requests: Vec<Value>| -> Vec<Value> { requests.iter().map(id_of).collect() };
    assert_eq!(ids(received(&prefill).await), ids(received(&decode).await));
    router.is_idle().await;
}

/// What prefill had cached is what clients and receipts hear; decode had nothing.
#[tokio::test]
async fn usage_tells_what_prefill_had_cached() {
    for speaks in [NIXL, SGLANG] {
        let (prefill, decode) = speaks.pair().await;
        let router = speaks.router(&prefill, &decode).await;
        let (_, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
        let prompt = of_role(&receipts, "Prefill")[0]["result"]["engine_prompt_tokens"].as_f64().unwrap();
        for stream in [false, true] {
            let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(stream)).await;
            let body = answer.text();
            let events = body.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
            let usages = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
            let mut cached =
                usages.filter_map(|body| body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64());
            let cached = cached.next_back().unwrap();
            assert!(cached > 0, "{}: {body}", speaks.protocol);
            let of_prefill = of_role(&receipts, "Prefill")[0];
            assert_eq!(of_prefill["result"]["engine_cached_tokens"], cached, "{}", speaks.protocol);
            assert_eq!(of_prefill["predicted_hit_tokens"], cached, "what was predicted came true");
        }
        let counted = router.metric("kvrouter_engine_prompt_tokens_total", "").await;
        assert_eq!(counted, 3.0 * prompt, "each prompt once, not once for each leg");
        assert!(router.metric("kvrouter_predictions_total", "").await > 0.0);
        assert_eq!(
            router.metric("kvrouter_predictions_total", "").await,
            router.metric("kvrouter_predictions_total", "\"agrees\"").await
        );
    }
}

/// Case E01: prefill fails after 50 ms, and nobody waits for the decode worker.
#[tokio::test]
async fn a_prefill_that_fails_ends_decode_at_once() {
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let router = speaks.router(&prefill, &decode).await;
        fault(&prefill, json!({"refuse": {"status": 500, "count": 1, "after_ms": 50}})).await;
        let began = Instant::now();
        let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(true)).await;
        let took = began.elapsed();
        assert_eq!(answer.status, 500, "{}", speaks.protocol);
        assert!(answer.text().contains("refused by the simulator"), "{}", answer.text());
        assert!(took < Duration::from_millis(200), "{}: {took:?}", speaks.protocol);
        assert_eq!(of_role(&receipts, "Prefill")[0]["result"]["status"], 500);
        assert_eq!(of_role(&receipts, "Decode")[0]["result"]["failure"], "prefill_failed");
        router.is_idle().await;
        let running = async || {
            let running = total(&decode, "running").await + total(&decode, "waiting").await;
            (running == 0).then_some(())
        };
        until("decode has nothing left to do", running).await;
    }
}

/// Case E03: a refusal is the client's, in the engine's words, and speaks against nobody.
#[tokio::test]
async fn a_prefill_refusal_reaches_the_client() {
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let router = speaks.router(&prefill, &decode).await;
        fault(&prefill, json!({"refuse": {"status": 422, "count": 1}})).await;
        let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
        assert_eq!(answer.status, 422);
        assert!(answer.text().contains("refused by the simulator"), "{}", answer.text());
        assert_eq!(receipts.len(), 2, "it is not tried again");
        assert!(answer.headers.contains_key("x-request-id"));
        assert_eq!(answer.headers["content-type"], "application/json", "{}", speaks.protocol);
        let (next, _) = ask(&router, "/v1/chat/completions", &chat(false)).await;
        assert_eq!(next.status, 200, "the pair serves on: {}", next.text());
        router.is_idle().await;
    }
}

/// Case E07: what cannot be divided is refused at once where only pairs stand, and goes to mixed workers
/// where there are some.
#[tokio::test]
async fn what_a_pair_cannot_serve_is_refused_or_goes_to_mixed_workers() {
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let whole = speaks.engine(None, |_| {}).await;
        let pairs = speaks.setup(&[&prefill], &[&decode]);
        let mut both = speaks.setup(&[&prefill], &[&decode]);
        both.workers.push(worker(&whole));
        let mut four = chat(false);
        four["n"] = json!(4);
        let only = ready(Router::start(pairs).await).await;
        let (answer, receipts) = ask(&only, "/v1/chat/completions", &four).await;
        assert_eq!((answer.status, &answer.json().unwrap()["error"]["code"]), (400, &json!("not_divisible")));
        assert!(answer.text().contains("`n` 1"), "{}", answer.text());
        assert_eq!(receipts.len(), 1);
        let messages = json!({"model": MODEL, "messages": long(1), "max_tokens": 3});
        let (answer, _) = ask(&only, "/v1/messages", &messages).await;
        assert_eq!((answer.status, total(&decode, "requests_total").await), (400, 0));
        let mixed = ready(Router::start(both).await).await;
        let (answer, receipts) = ask(&mixed, "/v1/chat/completions", &four).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!((receipts.len(), &receipts[0]["role"]), (1, &json!("Mixed")));
        let (_, receipts) = ask(&mixed, "/v1/chat/completions", &chat(false)).await;
        assert_eq!(receipts.len(), 2, "a pair goes before mixed workers");
        assert_eq!(received(&whole).await.len(), 1);
    }
}

/// What computes no prompt is no pair's, and any worker's.
#[tokio::test]
async fn requests_without_a_prompt_are_served_where_only_pairs_stand() {
    let (prefill, decode) = NIXL.pair().await;
    let router = NIXL.router(&prefill, &decode).await;
    let answer = router.send("/tokenize", &[], json!({"model": MODEL, "prompt": "a b c"}).to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.json().unwrap()["count"].as_u64().unwrap() > 0);
    assert_eq!(router.get("/version").await.status, 200);
    let embeddings =
        router.send("/v1/embeddings", &[], json!({"model": MODEL, "input": "a"}).to_string()).await;
    assert_eq!(embeddings.status, 400, "that one has a prompt");
    router.is_idle().await;
}

/// Mixed workers help out where prefill workers have as much waiting as they may have.
#[tokio::test]
async fn mixed_workers_take_what_full_pairs_cannot() {
    let (prefill, decode) = NIXL.pair().await;
    let whole = NIXL.engine(None, |_| {}).await;
    let mut setup = NIXL.setup(&[&prefill], &[&decode]).more("overload: {maxQueuedTokens: 600}");
    setup.workers.push(worker(&whole));
    let router = ready(Router::start(setup).await).await;
    fault(&prefill, json!({"stall_ms": 3000})).await;
    let (client, url, body) =
        (router.client.clone(), router.url("/v1/chat/completions"), chat(false).to_string());
    let first = tokio::spawn(async move { client.send(Method::POST, &url, &[], body.into()).await });
    until("the first one waits", async || {
        (router.metric("kvrouter_target_requests", "").await >= 2.0).then_some(())
    })
    .await;
    let body = json!({"model": MODEL, "messages": long(2), "max_tokens": 3});
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (full, mixed) = (of_role(&receipts, "Prefill"), of_role(&receipts, "Mixed"));
    assert_eq!((receipts.len(), &full[0]["result"]["failure"]), (2, &json!("overloaded")));
    assert_eq!(mixed[0]["chosen"]["target"], format!("{}#0", id(&whole)));
    assert_eq!(first.await.unwrap().unwrap().status, 200);
    router.is_idle().await;
}

/// A refusal is the client's, however long it is: it is no failure of the worker and is not tried again.
#[tokio::test]
async fn a_very_long_refusal_of_prefill_is_passed_on_as_one() {
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&asked);
    let refusing = RawWorker::start(move |received| {
        let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
        if received.head.starts_with("POST /v1/chat/completions") {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        vec![head.as_bytes().to_vec(), vec![b'x'; 2 << 20]]
    })
    .await;
    let decode = NIXL.engine(DECODE, |_| {}).await;
    let entry =
        |address: &str, role: &str| format!("{{url: \"http://{address}\", role: {role}, protocol: NIXL}}");
    let workers = vec![
        entry(&refusing.address.to_string(), "Prefill"),
        entry(&decode.http_addr().to_string(), "Decode"),
    ];
    let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) };
    let router = ready(Router::start(setup).await).await;
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
    assert_eq!((answer.status, &answer.json().unwrap()["error"]["code"]), (400, &json!("engine_refused")));
    assert_eq!((receipts.len(), asked.load(std::sync::atomic::Ordering::Relaxed)), (2, 1), "one attempt");
    router.is_idle().await;
}

/// One room per prompt.
#[tokio::test]
async fn a_list_of_prompts_meets_in_as_many_rooms() {
    let (prefill, decode) = SGLANG.pair().await;
    let router = SGLANG.router(&prefill, &decode).await;
    let body = json!({"model": MODEL, "prompt": [text(1, 40), text(2, 40), text(3, 40)], "max_tokens": 2});
    let (answer, receipts) = ask(&router, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json().unwrap()["choices"].as_array().unwrap().len(), 3);
    assert_eq!(receipts.len(), 2, "one of either part");
    for receipt in &receipts {
        assert_eq!(receipt["prompts"].as_array().unwrap().len(), 3, "{receipt}");
        prompts_add_up(receipt);
    }
    handed_over(&prefill, &decode, 3).await;
    router.is_idle().await;
}

/// The room leads to the rank that was picked.
#[tokio::test]
async fn rooms_lead_to_the_rank_that_was_picked() {
    let ranks = |config: &mut Config| config.dp_size = 4;
    let (prefill, decode) = (SGLANG.engine(PREFILL, ranks).await, SGLANG.engine(DECODE, ranks).await);
    let router = ready(Router::start(SGLANG.setup(&[&prefill], &[&decode]).policy("RoundRobin")).await).await;
    for number in 0..8 {
        let body = json!({"model": MODEL, "messages": long(number), "max_tokens": 2});
        let (answer, _) = ask(&router, "/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    handed_over(&prefill, &decode, 8).await;
    router.is_idle().await;
}

/// A client that goes away ends both legs, whatever they are at.
#[tokio::test]
async fn a_client_that_goes_away_ends_both_legs() {
    for speaks in [SGLANG, NIXL] {
        for hanging in ["prefill", "decode"] {
            let (prefill, decode) = speaks.pair().await;
            let router = speaks.router(&prefill, &decode).await;
            fault(if hanging == "prefill" { &prefill } else { &decode }, json!({"hang": 1})).await;
            let request = unique();
            let headers = [("x-request-id", request.as_str())];
            let url = router.url("/v1/chat/completions");
            let sent = router.client.send(Method::POST, &url, &headers, chat(true).to_string().into());
            let gone = tokio::time::timeout(Duration::from_millis(300), sent).await;
            assert!(gone.is_err(), "nobody answers");
            router.is_idle().await;
            for leg in router.receipts(&request).await {
                let done = leg["role"] == "Prefill" && hanging == "decode" && speaks.protocol == "NIXL";
                let failure = if done { Value::Null } else { json!("client_gone") };
                assert_eq!(leg["result"]["failure"], failure, "{} {hanging}: {leg}", speaks.protocol);
            }
        }
    }
}

/// Another pair takes over, once, before the first byte.
#[tokio::test]
async fn another_pair_takes_over_once() {
    for speaks in [SGLANG, NIXL] {
        for failing in ["prefill", "decode"] {
            let (prefill, decode) = speaks.pair().await;
            let (other_prefill, other_decode) = speaks.pair().await;
            let setup = speaks.setup(&[&prefill, &other_prefill], &[&decode, &other_decode]);
            let router = ready(Router::start(setup.policy("RoundRobin")).await).await;
            for engine in
                if failing == "prefill" { [&prefill, &other_prefill] } else { [&decode, &other_decode] }
            {
                fault(engine, json!({"refuse": {"status": 503, "count": 1}})).await;
            }
            let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
            // Both refuse once, so the second attempt is refused too and nothing is tried a third time.
            assert_eq!((answer.status, receipts.len()), (503, 4), "{} {failing}", speaks.protocol);
            let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
            assert_eq!((answer.status, receipts.len()), (200, 2), "{}", answer.text());
            let refusing = if failing == "prefill" { &prefill } else { &decode };
            fault(refusing, json!({"refuse": {"status": 503, "count": 1}})).await;
            let mut attempts = Vec::new();
            for _ in 0..2 {
                let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
                attempts.push(receipts.len());
            }
            attempts.sort_unstable();
            assert_eq!(attempts, [2, 4], "{} {failing}: one of them needed another pair", speaks.protocol);
            router.is_idle().await;
        }
    }
}

/// After the first byte there is one last event, and no second start.
#[tokio::test]
async fn a_stream_that_breaks_says_so_once() {
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let router = speaks.router(&prefill, &decode).await;
        // So many that the first ones are under way when it breaks, on a busy machine too.
        fault(&decode, json!({"die_after_chunks": 300})).await;
        let mut body = chat(true);
        body["max_tokens"] = json!(600);
        let (answer, receipts) = ask(&router, "/v1/chat/completions", &body).await;
        assert_eq!((answer.status, receipts.len()), (200, 2));
        assert_eq!(answer.text().matches("mid_stream_failure").count(), 1, "{}", answer.text());
        assert_eq!(of_role(&receipts, "Decode")[0]["result"]["failure"], "mid_stream_failure");
        router.is_idle().await;
    }
}

/// Prefill that fails once decode answers: the same, and it is prefill's failure.
#[tokio::test]
async fn a_prefill_that_fails_late_ends_the_stream() {
    let prefill = SGLANG.engine(PREFILL, |_| {}).await;
    let decode = RawWorker::start(|received| match received.head.starts_with("POST /v1/chat") {
        true => vec![STREAM_HEAD.into(), chunk(b"data: {}\n\n"), Vec::new()],
        false => Vec::new(),
    })
    .await;
    let decode = format!("{{url: \"http://{}\", role: Decode, protocol: SGLang}}", decode.address);
    let workers = vec![SGLANG.worker(&prefill, "Prefill"), decode];
    let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) };
    let router = ready(Router::start(setup).await).await;
    fault(&prefill, json!({"refuse": {"status": 500, "count": 1, "after_ms": 500}})).await;
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(true)).await;
    let text = answer.text();
    assert!(answer.status == 200 && text.starts_with("data: {}\n\n"), "{}: {text}", answer.status);
    assert_eq!(text.matches("mid_stream_failure").count(), 1, "{text}");
    assert_eq!(of_role(&receipts, "Prefill")[0]["result"]["status"], 500);
    assert_eq!(of_role(&receipts, "Decode")[0]["result"]["failure"], "prefill_failed");
    router.is_idle().await;
}

/// What ends a prefill leg that runs is in its receipt and in the metric, by one word each.
#[tokio::test]
async fn a_prefill_leg_that_is_ended_says_why() {
    let refusing =
        || vec![b"HTTP/1.1 422 Unprocessable\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno".to_vec()];
    for (reason, status, answer) in [("decode_refused", 422, refusing()), ("decode_failed", 502, Vec::new())]
    {
        let prefill = SGLANG.engine(PREFILL, |_| {}).await;
        let decode = RawWorker::start(move |_| answer.clone()).await;
        let entry = format!("{{url: \"http://{}\", role: Decode, protocol: SGLang}}", decode.address);
        let workers = vec![SGLANG.worker(&prefill, "Prefill"), entry];
        let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) };
        let router = ready(Router::start(setup).await).await;
        fault(&prefill, json!({"hang": 1})).await;
        let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
        assert_eq!((answer.status, receipts.len()), (status, 2), "{reason}: {}", answer.text());
        let of_prefill = of_role(&receipts, "Prefill")[0];
        assert_eq!(of_prefill["result"]["failure"], reason, "{of_prefill}");
        let labelled = format!("reason=\"{reason}\"");
        assert_eq!(router.metric("kvrouter_attempt_failures_total", &labelled).await, 1.0);
        router.is_idle().await;
    }
}

/// Neither leg is waited for longer than any worker is.
#[tokio::test]
async fn a_leg_that_does_not_answer_is_given_up_in_time() {
    for (speaks, hanging) in [(SGLANG, "Prefill"), (SGLANG, "Decode"), (NIXL, "Prefill"), (NIXL, "Decode")] {
        let (prefill, decode) = speaks.pair().await;
        let setup = speaks.setup(&[&prefill], &[&decode]).more("limits: {firstByteTimeoutSeconds: 1}");
        let router = ready(Router::start(setup).await).await;
        fault(if hanging == "Prefill" { &prefill } else { &decode }, json!({"hang": 1})).await;
        let body = chat(true);
        let asked = ask(&router, "/v1/chat/completions", &body);
        let (answer, receipts) = tokio::time::timeout(Duration::from_secs(30), asked).await.unwrap();
        assert_eq!(answer.status, 504, "{} {hanging}: {}", speaks.protocol, answer.text());
        assert!(answer.text().contains("first_byte_timeout"), "{}", answer.text());
        if speaks.protocol == "NIXL" {
            let of_hanging = of_role(&receipts, hanging)[0];
            assert_eq!(of_hanging["result"]["failure"], "first_byte_timeout", "{hanging}");
        }
        router.is_idle().await;
    }
}

/// A worker that may not hear a salt gets no tenant's prompt, be it for a part of the work.
#[tokio::test]
async fn a_pair_that_may_not_hear_a_salt_gets_no_prompt() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "a secret for tests").unwrap();
    let silent = async || RawWorker::start(|_| Vec::new()).await;
    let workers = [(silent().await, "Prefill"), (silent().await, "Decode")];
    let entries = workers.iter().map(|(worker, role)| {
        format!("{{url: \"http://{}\", role: {role}, protocol: NIXL}}", worker.address)
    });
    let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(entries.collect()) };
    let setup = setup.more(&format!("tenancy: {{saltSecretFile: {:?}}}", secret.path()));
    let router = ready(Router::start(setup).await).await;
    let answer = router.send("/v1/chat/completions", &[("X-Tenant", "a")], chat(false).to_string()).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("not_kept_apart"), "{}", answer.text());
    router.is_idle().await;
}

/// Without a pair there is a bounded wait, and then a 503 that says when to come back.
#[tokio::test]
async fn without_a_pair_requests_wait_and_are_refused() {
    let prefill = NIXL.engine(PREFILL, |_| {}).await;
    let setup = NIXL.setup(&[&prefill], &[]).more("limits: {noWorkerWaitSeconds: 1}");
    let router = ready(Router::start(setup).await).await;
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
    assert_eq!((answer.status, receipts.len()), (503, 1), "{}", answer.text());
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(total(&prefill, "requests_total").await, 0);
    let report = router.report().await;
    let pairs = json!([{"protocol": "nixl", "prefill": 1, "decode": 0, "pairs": 0}]);
    assert_eq!(report["disaggregation"], pairs);
    assert!(router.has_problem("no_pair", None).await, "{report}");
}

/// Case K30: with RequireParity, prefill and decode workers whose pages differ are no pair. The one whose page
/// is not the pool's is left out, and requests are refused with that reason.
#[tokio::test]
async fn unequal_pages_are_no_pair_where_parity_is_required() {
    let prefill = SGLANG.engine(PREFILL, |config| config.page_size = 16).await;
    let decode = SGLANG.engine(DECODE, |config| config.page_size = 1).await;
    let more = "limits: {noWorkerWaitSeconds: 1}\npageSizePolicy: RequireParity";
    let router = Router::start(SGLANG.setup(&[&prefill], &[&decode]).more(more)).await;
    let [kept, odd] = [&prefill, &decode].map(|engine| engine.http_addr().to_string());
    until("the odd one is left out", async || {
        let report = router.report().await;
        let reason = |id: &str| {
            let mut workers = report["workers"].as_array().unwrap().iter();
            workers.find(|worker| worker["worker"] == id).map(|worker| worker["reason"].clone())
        };
        (reason(&kept)? == "ok" && reason(&odd)? == "page_size").then_some(())
    })
    .await;
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
    assert_eq!((answer.status, receipts.len()), (503, 1), "{}", answer.text());
    let error = answer.json().unwrap()["error"].clone();
    assert_eq!(error["code"], "unequal_pages", "{error}");
    assert!(error["message"].as_str().unwrap().contains(&format!("{odd} has a page of 1 tokens")), "{error}");
    let problems = router.report().await["problems"].to_string();
    assert!(problems.contains("none of 1 decode workers is ready (1 for their pages"), "{problems}");
    assert_eq!(total(&prefill, "requests_total").await + total(&decode, "requests_total").await, 0);
}

/// Prefill that never answers what decode needs is an error that names it.
#[tokio::test]
async fn a_prefill_answer_without_parameters_is_an_error() {
    refused_for("{\"choices\":[]}".to_owned(), "no_kv_transfer_params").await;
    let endless = format!("{{\"kv_transfer_params\":{{\"a\":1}},\"x\":\"{}\"}}", "x".repeat(9 << 20));
    refused_for(endless, "unreadable").await;
}

/// What prefill answers is refused for this reason, and decode hears nothing.
async fn refused_for(answer: String, reason: &str) {
    let odd = RawWorker::start(move |_| {
        let body = answer.as_str();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        vec![head.into_bytes(), body.as_bytes().to_vec()]
    })
    .await;
    let decode = NIXL.engine(DECODE, |_| {}).await;
    let prefill = format!("{{url: \"http://{}\", role: Prefill, protocol: NIXL}}", odd.address);
    let workers = vec![prefill, NIXL.worker(&decode, "Decode")];
    let setup = Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) };
    let router = ready(Router::start(setup).await).await;
    let (answer, receipts) = ask(&router, "/v1/chat/completions", &chat(false)).await;
    assert_eq!(answer.status, 502);
    assert!(answer.text().contains(reason), "{}", answer.text());
    assert_eq!(of_role(&receipts, "Prefill")[0]["result"]["failure"], reason);
    assert_eq!(of_role(&receipts, "Decode")[0]["result"]["failure"], "prefill_failed");
    assert_eq!((odd.posts(), total(&decode, "requests_total").await), (1, 0));
    router.is_idle().await;
}

/// With `Completion`, prefill is free again when its part is done, while decode goes on.
#[tokio::test]
async fn the_guard_says_how_long_prefill_is_charged() {
    for (guard, charged) in [("Decode", 1.0), ("Completion", 0.0)] {
        for speaks in [SGLANG, NIXL] {
            let (prefill, decode) = speaks.pair().await;
            let setup = speaks.setup(&[&prefill], &[&decode]);
            let router =
                ready(Router::start(setup.more(&format!("pdPrefillGuardRelease: {guard}"))).await).await;
            let mut body = chat(true);
            body["max_tokens"] = json!(2000);
            let url = router.url("/v1/chat/completions");
            let mut answer =
                router.client.open(Method::POST, &url, &[], body.to_string().into()).await.unwrap();
            http_body_util::BodyExt::frame(answer.body_mut()).await.unwrap().unwrap();
            let on = async |engine: &EngineSim| {
                router.metric("kvrouter_target_requests", &format!("\"{}#0\"", id(engine))).await
            };
            let settled = async || (on(&prefill).await == charged).then_some(());
            until("prefill is charged as the guard has it", settled).await;
            assert_eq!(on(&decode).await, 1.0, "{guard} {}", speaks.protocol);
            drop(answer);
            router.is_idle().await;
        }
    }
}

/// Sends a long answer's request and waits until it is on its way.
async fn hold(
    router: &Router,
    headers: &[(&str, &str)],
    body: &Value,
) -> http::Response<hyper::body::Incoming> {
    let url = router.url("/v1/chat/completions");
    let sent = router.client.open(Method::POST, &url, headers, body.to_string().into());
    let mut answer = sent.await.unwrap();
    http_body_util::BodyExt::frame(answer.body_mut()).await.unwrap().unwrap();
    answer
}

/// A stream that does not end by itself, of a prompt of so many words.
fn endless(number: u32, words: u32) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text(number, words)}],
           "max_tokens": 4000, "stream": true})
}

/// Where the decode pick of a short request went, with its receipt.
async fn decoded_at(router: &Router, headers: &[(&str, &str)], body: &Value) -> (String, Value) {
    let request = unique();
    let headers = [&[("x-request-id", request.as_str())], headers].concat();
    let answer = router.send("/v1/chat/completions", &headers, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let receipts = router.receipts(&request).await;
    let receipt = of_role(&receipts, "Decode")[0].clone();
    (receipt["chosen"]["target"].as_str().unwrap().to_owned(), receipt)
}

/// One decode worker holds a long prompt and the other one two short ones: load by requests prefers the
/// first, held input the second. In shadow that is said, and not done.
#[tokio::test]
async fn demand_picks_the_decode_worker_that_plain_load_would_not() {
    for mode in ["Disabled", "Shadow", "Enabled"] {
        let prefill = NIXL.engine(PREFILL, |_| {}).await;
        let (a, b) = (NIXL.engine(DECODE, |_| {}).await, NIXL.engine(DECODE, |_| {}).await);
        // Requests alone make load, so the policy sees no input.
        let more = format!(
            "loadWeights: {{queue: 0, decode: 0, request: 1000}}\noverlapWeights: {{default: 0}}\ndecodeInputDemand: {{mode: {mode}}}"
        );
        let router = ready(Router::start(NIXL.setup(&[&prefill], &[&a, &b]).more(&more)).await).await;
        let long = hold(&router, &[("x-request-id", "long")], &endless(1, 300)).await;
        let short = hold(&router, &[("x-request-id", "short")], &endless(2, 5)).await;
        let place = async |id: &str| {
            let url = format!("http://{}/v1/admin/receipts?request_id={id}", router.at.admin);
            let all = router.client.get(&url).await.unwrap().json().unwrap()["receipts"].clone();
            let all = all.as_array().unwrap().clone();
            of_role(&all, "Decode")[0]["chosen"]["target"].as_str().unwrap().to_owned()
        };
        let (of_long, of_short) = (place("long").await, place("short").await);
        assert_ne!(of_long, of_short, "{mode}: requests repel each other");
        let held = async |name: &str, target: &str| router.metric(name, &format!("\"{target}\"")).await;
        let tokens = held("kvrouter_decode_demand_tokens", &of_long).await;
        let requests = held("kvrouter_decode_demand_requests", &of_short).await;
        assert_eq!((tokens > 300.0, requests), (mode != "Disabled", f64::from(mode != "Disabled")), "{mode}");
        // A second short one: by load the two are equal, so whatever it is, the third sees the imbalance.
        let second = hold(&router, &[("x-request-id", "second")], &endless(3, 5)).await;
        let of_second = place("second").await;
        let (third, receipt) = decoded_at(&router, &[], &chat(false)).await;
        match mode {
            "Enabled" => {
                assert_eq!((&of_second, &third), (&of_short, &of_short), "held input decides");
                let judged = &receipt["demand"]["judgement"];
                assert_eq!((&judged["suggested"], &judged["original"]), (&json!(of_short), &json!(of_long)));
                let held = receipt["candidates"].as_array().unwrap().iter().map(|one| {
                    assert!(one["demand"]["tokens"].as_u64().unwrap() > 0, "{one}");
                    one["demand"]["requests"].as_u64().unwrap()
                });
                assert_eq!(held.sum::<u64>(), 3);
            }
            "Shadow" => {
                let fewer = if of_second == of_long { &of_short } else { &of_long };
                assert_eq!(&third, fewer, "the policy decides");
                assert_eq!(receipt["demand"]["judgement"]["suggested"], json!(of_short));
            }
            _ => assert!(receipt.get("demand").is_none() && receipt["candidates"][0].get("demand").is_none()),
        }
        let judged = router.metric("kvrouter_decode_demand_decisions_total", "").await;
        assert_eq!(judged, if mode == "Disabled" { 0.0 } else { 4.0 }, "{mode}");
        drop((long, short, second));
        router.is_idle().await;
        assert_eq!(router.metric("kvrouter_decode_demand_tokens", "").await, 0.0);
    }
}

/// Case E07: every answer that is wanted counts the prompt once; and the dry run shows what is held.
#[tokio::test]
async fn demand_counts_every_choice() {
    let (prefill, decode) = NIXL.pair().await;
    let setup = NIXL.setup(&[&prefill], &[&decode]).more("decodeInputDemand: {mode: Enabled}");
    let router = ready(Router::start(setup).await).await;
    let url = format!("http://{}/v1/admin/explain?role=decode", router.at.admin);
    let projected = async |n: Value| {
        let mut body = chat(false);
        body["n"] = n;
        let receipt = router.client.post(&url, &body).await.unwrap().json().unwrap();
        let prompt = receipt["prompt_tokens"].as_u64().unwrap();
        receipt["demand"]["judgement"]["projected"].as_u64().unwrap() / prompt
    };
    for (n, times) in [(json!(null), 1), (json!(1), 1), (json!(4), 4), (json!("four"), 1), (json!(0), 1)] {
        assert_eq!(projected(n.clone()).await, times, "{n}");
    }
}

/// With `Both` a session keeps its prefill and its decode worker, and what it holds still counts.
#[tokio::test]
async fn a_session_keeps_both_of_its_workers() {
    for (mode, keeps) in [("Both", [true, true]), ("Prefill", [true, false])] {
        let (prefill, decode) = NIXL.pair().await;
        let (other_prefill, other_decode) = NIXL.pair().await;
        let setup = NIXL.setup(&[&prefill, &other_prefill], &[&decode, &other_decode]);
        let more = format!("sessionAffinity: {{mode: {mode}}}");
        let router = ready(Router::start(setup.policy("RoundRobin").more(&more)).await).await;
        let mut places = [std::collections::BTreeSet::new(), std::collections::BTreeSet::new()];
        for number in 0..3 {
            let request = unique();
            let headers = [("x-request-id", request.as_str()), ("x-session-id", "s")];
            let body = json!({"model": MODEL, "messages": long(number), "max_tokens": 2});
            let answer = router.send("/v1/chat/completions", &headers, body.to_string()).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let receipts = router.receipts(&request).await;
            for (places, role) in places.iter_mut().zip(["Prefill", "Decode"]) {
                places.insert(of_role(&receipts, role)[0]["chosen"]["target"].to_string());
            }
        }
        assert_eq!(places.map(|places| places.len() == 1), keeps, "{mode}");
        let bad = router.send("/v1/chat/completions", &[("x-session-id", "")], chat(false).to_string()).await;
        assert_eq!(bad.status, 400, "{mode}");
        router.is_idle().await;
    }
    let (prefill, decode) = NIXL.pair().await;
    let setup = NIXL.setup(&[&prefill], &[&decode]);
    let more = "sessionAffinity: {mode: Both}\ndecodeInputDemand: {mode: Enabled}";
    let router = ready(Router::start(setup.more(more)).await).await;
    let session = [("x-session-id", "s")];
    let first = hold(&router, &session, &endless(1, 20)).await;
    let second = hold(&router, &session, &endless(2, 20)).await;
    assert_eq!(router.metric("kvrouter_decode_demand_requests", "").await, 2.0, "bound, and booked");
    drop((first, second));
    router.is_idle().await;
}

/// Where ids are forwarded, both workers get them, beside what the protocol writes.
#[tokio::test]
async fn forwarded_ids_reach_both_workers() {
    for speaks in [SGLANG, NIXL] {
        let (prefill, decode) = speaks.pair().await;
        let setup = speaks.setup(&[&prefill], &[&decode]).more("forwardTokenIds: WhenConfirmed");
        let router = ready(Router::start(setup).await).await;
        let confirmed = async || {
            let report = router.report().await;
            let mut workers = report["workers"].as_array().unwrap().iter();
            workers.all(|one| one["rendering"]["parity"] == "confirmed").then_some(())
        };
        until("both make the router's tokens", confirmed).await;
        let completion = json!({"model": MODEL, "prompt": text(2, 60), "max_tokens": 3});
        for (path, body) in [("/v1/chat/completions", chat(false)), ("/v1/completions", completion)] {
            let (answer, _) = ask(&router, path, &body).await;
            assert_eq!(said(&answer), alone(speaks.wire, path, &body).await, "{path}");
        }
        for engine in [&prefill, &decode] {
            assert_eq!(state(engine).await["given_ids_total"], 2, "{}", speaks.protocol);
        }
        handed_over(&prefill, &decode, 2).await;
    }
}
