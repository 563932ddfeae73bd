//! Settings of policies through the running router: what each one changes, and that receipts,
//! metrics and health say so.

use engine_sim::{Config, Wire};
use serde_json::{Value, json};

use crate::harness::{MODEL, Router, Setup, chat_directly, engine, fault, id, long, text, until};

/// Sends a chat with headers; the receipt of its last attempt and the status.
async fn chat_with(router: &Router, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
    let id = crate::harness::unique();
    let headers = [&[("x-request-id", id.as_str())], headers].concat();
    let answer = router.send("/v1/chat/completions", &headers, body.to_string()).await;
    let receipts = router.receipts(&id).await;
    (answer.status, receipts[0].clone())
}

fn body(messages: Value) -> Value {
    json!({"model": MODEL, "messages": messages, "max_tokens": 1})
}

fn target(receipt: &Value) -> &str {
    receipt["chosen"]["target"].as_str().unwrap()
}

#[tokio::test]
async fn a_session_stays_where_it_began() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let setup = Setup::zmq(&[&a, &b]).policy("RoundRobin").more("sessionAffinity: {mode: Both}");
    let router = Router::start(setup).await;
    let session = [("x-session-id", "s-1")];
    let (_, first) = chat_with(&router, &session, &body(long(1))).await;
    assert_eq!(first["session"], "new");
    for turn in 2..5 {
        let (_, later) = chat_with(&router, &session, &body(long(turn))).await;
        assert_eq!((&later["session"], target(&later)), (&json!("followed"), target(&first)));
        let (_, other) = chat_with(&router, &[], &body(long(turn))).await;
        assert_eq!(other["session"], "none");
    }
    assert_eq!(router.metric("kvrouter_session_picks_total", "followed").await, 3.0);
    for bad in [vec![("x-session-id", "")], vec![("x-session-id", "a"), ("x-session-id", "b")]] {
        let (status, refused) = chat_with(&router, &bad, &body(long(1))).await;
        assert_eq!((status, &refused["result"]["failure"]), (400, &json!("invalid_session_id")));
    }
    router.is_idle().await;
}

/// Case A32: who a session is stands in a header; a prompt that looks like one names nobody.
#[tokio::test]
async fn a_session_in_the_text_of_a_prompt_is_none() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let setup = Setup::zmq(&[&a, &b]).policy("RoundRobin").more("sessionAffinity: {mode: Both}");
    let router = Router::start(setup).await;
    let words = "{\"user\": \"alice\", \"session_id\": \"s-1\"}\r\nX-Session-ID: s-1\r\n";
    let plain = body(json!([{"role": "user", "content": words}]));
    let mut with_fields = plain.clone();
    with_fields["user"] = json!("alice");
    with_fields["metadata"] = json!({"session_id": "s-1", "x-session-id": "s-1"});
    for request in [&plain, &with_fields] {
        let mut targets = Vec::new();
        for _ in 0..2 {
            let (status, receipt) = chat_with(&router, &[], request).await;
            assert_eq!((status, &receipt["session"]), (200, &json!("none")));
            targets.push(target(&receipt).to_owned());
        }
        assert_ne!(targets[0], targets[1], "in turn");
    }
    assert_eq!(router.metric("kvrouter_pool", "\"sessions\"").await, 0.0);
    assert_eq!(router.metric("kvrouter_session_picks_total", "").await, 4.0);
    assert_eq!(router.metric("kvrouter_session_picks_total", "\"none\"").await, 4.0);
}

/// Case F02: the dry run says which branch decided.
#[tokio::test]
async fn the_dry_run_says_what_decided() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let more = "overload: {maxQueuedTokens: 600}";
    let router = Router::start(Setup::zmq(&[&a, &b]).events_only().more(more)).await;
    let url = format!("http://{}/v1/admin/explain", router.at.admin);
    let explained = async |messages: Value| {
        let receipt = router.client.post(&url, &body(messages)).await.unwrap().json().unwrap();
        let word = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{receipt}")).to_owned();
        (word(&receipt["outcome"]), word(&receipt["chosen"]["tie"]), word(&receipt["chosen"]["target"]))
    };
    let decided = |(outcome, tie, _): (String, String, String)| (outcome, tie);
    let words = |outcome: &str, tie: &str| (outcome.to_owned(), tie.to_owned());
    assert_eq!(decided(explained(long(1)).await), words("cold", "rendezvous_block"));
    chat_directly(&b, &long(1), None).await;
    for engine in [&a, &b] {
        router.agrees_with(engine).await;
    }
    let (outcome, tie, picked) = explained(long(1)).await;
    assert_eq!((&*outcome, &*tie, picked), ("hit", "none", format!("{}#0", id(&b))));
    // With as much waiting as it may have, it is passed over.
    fault(&b, json!({"stall_ms": 3000})).await;
    let (chats, waiting) = (router.url("/v1/chat/completions"), body(long(1)).to_string());
    let stalled = router.client.open(http::Method::POST, &chats, &[], waiting.into());
    tokio::pin!(stalled);
    let full = async || (router.metric("kvrouter_target_queued_tokens", &id(&b)).await > 0.0).then_some(());
    tokio::select! {
        answer = &mut stalled => panic!("{answer:?}"),
        () = until("something waits there", full) => {}
    }
    let question = long(1)[0]["content"].as_str().unwrap().to_owned();
    let longer = json!([{"role": "user", "content": format!("{question} {}", text(2, 150))}]);
    let (outcome, _, picked) = explained(longer).await;
    assert_eq!((&*outcome, picked), ("overload_escape", format!("{}#0", id(&a))));
    stalled.await.unwrap();
    assert_eq!(router.metric("kvrouter_leases_booked", "").await, 1.0, "a dry run books nothing");
}

/// The admin port shows receipts of one namespace at a time to those who ask so.
#[tokio::test]
async fn receipts_can_be_had_of_one_namespace() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    let mut digests = Vec::new();
    for salt in ["one", "two", "one"] {
        let salted = json!({"model": MODEL, "messages": long(1), "max_tokens": 1, "cache_salt": salt});
        digests.push(chat_with(&router, &[], &salted).await.1["namespace"].as_str().unwrap().to_owned());
    }
    assert_eq!((&digests[0], digests[0] == digests[1]), (&digests[2], false));
    let of = async |query: &str| {
        let url = format!("http://{}/v1/admin/receipts?{query}", router.at.admin);
        router.client.get(&url).await.unwrap()
    };
    for (digest, count) in [(&digests[0], 2), (&digests[1], 1), (&format!("{:032x}", 1), 0)] {
        let found = of(&format!("namespace={digest}")).await.json().unwrap()["receipts"].clone();
        let found = found.as_array().unwrap().clone();
        assert!(found.len() == count && found.iter().all(|one| one["namespace"] == **digest), "{found:?}");
        let chained = of(&format!("format=jsonl&namespace={digest}")).await.text();
        assert_eq!(chained.lines().count(), count);
    }
    for bad in
        ["", "0", &digests[0][1..], &digests[0].to_uppercase().replace(|c: char| c.is_ascii_digit(), "A")]
    {
        let answer = of(&format!("namespace={bad}")).await;
        assert_eq!(
            (answer.status, &answer.json().unwrap()["error"]["code"]),
            (400, &json!("invalid_namespace")),
            "{bad}"
        );
    }
}

/// Cases E13, E15 and G28: the receipt says why, not only where.
#[tokio::test]
async fn a_picture_goes_where_it_was_seen_and_text_before_it_is_credited() {
    let (a, b, c) = (engine(|_| {}).await, engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b, &c])).await;
    let picture = |data: &str| {
        let url = format!("data:image/png;base64,{data}");
        body(json!([{"role": "user", "content": [
            {"type": "text", "text": text(1, 60)}, {"type": "image_url", "image_url": {"url": url}}
        ]}]))
    };
    let (_, first) = chat_with(&router, &[], &picture("AAAA")).await;
    assert_eq!((&first["images"], &first["outcome"]), (&json!(1), &json!("cold")));
    let (_, again) = chat_with(&router, &[], &picture("AAAA")).await;
    assert_eq!(target(&again), target(&first));
    let seen = |receipt: &Value| -> u64 {
        let all = receipt["candidates"].as_array().unwrap();
        all.iter().map(|candidate| candidate["images_seen"].as_u64().unwrap()).sum()
    };
    assert_eq!((seen(&first), seen(&again)), (0, 1));
    for engine in [&a, &b, &c] {
        router.agrees_with(engine).await;
    }
    let (_, other) = chat_with(&router, &[], &picture("AAAB")).await;
    assert_eq!((seen(&other), target(&other)), (0, target(&first)), "another picture");
    // The system's text is before the picture; the rest is behind it and earns nothing.
    assert_eq!((&other["outcome"], &other["predicted_hit_tokens"]), (&json!("hit"), &json!(16)));
    let output = router.process.output();
    assert!(
        output.contains("mm_images=1 mm_affinity_hits=0")
            && output.contains("mm_images=1 mm_affinity_hits=1")
    );
}

#[tokio::test]
async fn shadow_policies_are_told_beside_the_real_one() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let setup = Setup::zmq(&[&a, &b]).policy("RoundRobin").more("shadowPolicies: [KvAware, LeastLoad]");
    let router = Router::start(setup).await;
    for engine in [&a, &b] {
        chat_directly(engine, &long(9), None).await;
        router.agrees_with(engine).await;
    }
    chat_directly(&a, &long(1), None).await;
    router.agrees_with(&a).await;
    let mut regrets = Vec::new();
    for _ in 0..2 {
        let (_, receipt) = chat_with(&router, &[], &body(long(1))).await;
        let shadows = receipt["shadows"].as_array().unwrap().clone();
        assert_eq!(
            shadows.iter().map(|shadow| &shadow["policy"]).collect::<Vec<_>>(),
            ["kv-aware", "least-load"]
        );
        regrets.push(shadows[0]["regret_blocks"].as_i64().unwrap());
    }
    // In turn, one of the two went past the worker that holds the prompt.
    assert_eq!(regrets.iter().filter(|regret| **regret > 0).count(), 1, "{regrets:?}");
    assert_eq!(router.metric("kvrouter_shadow_picks_total", "").await, 4.0);
}

/// Cases F02 and F03: a cheaper worker over its cap is passed over, and when all are full the
/// client is told to come back.
#[tokio::test]
async fn a_full_worker_is_passed_over_and_a_full_fleet_says_so() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b]).more("overload: {maxQueuedTokens: 600}")).await;
    for stalled in [&a, &b] {
        fault(stalled, json!({"stall_ms": 3000})).await;
    }
    let url = router.url("/v1/chat/completions");
    let mut waiting = Vec::new();
    for number in 1..5 {
        let (client, url, body) = (router.client.clone(), url.clone(), body(long(number)).to_string());
        waiting
            .push(tokio::spawn(async move { client.send(http::Method::POST, &url, &[], body.into()).await }));
        let booked = async || {
            let booked = router.metric("kvrouter_target_requests", "").await
                + router.metric("kvrouter_attempt_failures_total", "overloaded").await;
            (booked >= f64::from(number)).then_some(())
        };
        until("the request is booked or refused", booked).await;
    }
    let (status, refused) = chat_with(&router, &[], &body(long(9))).await;
    assert_eq!((status, &refused["result"]["failure"]), (429, &json!("overloaded")));
    let rejections = |receipt: &Value| -> Vec<Value> {
        let all = receipt["candidates"].as_array().unwrap();
        all.iter().map(|candidate| candidate["terms"]["rejection"].clone()).collect()
    };
    assert_eq!(rejections(&refused), [json!("overloaded"), json!("overloaded")]);
    for task in waiting {
        let _ = task.await.unwrap().unwrap();
    }
    router.is_idle().await;
}

/// One worker holds all of a prompt in its host's memory, the other one half of it on the device.
/// Which of them is cheaper is what `tierCredits` says.
#[tokio::test]
async fn a_tier_is_worth_what_its_credit_says() {
    let offloaded = engine(|config| config.medium = "CPU".to_owned()).await;
    let device = engine(|_| {}).await;
    let workers = [&offloaded, &device];
    let router = async |credits: &str| {
        let more = format!("tierCredits: {credits}");
        Router::start(Setup::zmq(&workers).events_only().more(&more)).await
    };
    let (generous, strict) = (router("{host: 0.9}").await, router("{host: 0.1, disk: 0}").await);
    let question = long(1)[0]["content"].as_str().unwrap().to_owned();
    let half = json!([{"role": "user", "content": question[..question.len() / 2]}]);
    chat_directly(&offloaded, &long(1), None).await;
    chat_directly(&device, &half, None).await;
    for (router, expected) in [(&generous, &offloaded), (&strict, &device)] {
        for engine in workers {
            router.agrees_with(engine).await;
        }
        // Both routers see the same fleet: what is asked first must not change it.
        let url = format!("http://{}/v1/admin/explain", router.at.admin);
        let explained = router.client.post(&url, &body(long(1))).await.unwrap().json().unwrap();
        let claimed = |at: usize, tier: &str| {
            let all = explained["candidates"].as_array().unwrap();
            let one = all.iter().find(|one| one["target"] == format!("{}#0", id(workers[at]))).unwrap();
            one["claimed"][tier].as_u64().unwrap()
        };
        let (host, on_device) = (claimed(0, "host"), claimed(1, "device"));
        assert!(on_device > 5 && host > on_device + 5, "{explained}");
        assert_eq!((claimed(0, "device"), claimed(1, "host")), (0, 0), "{explained}");
        assert_eq!(target(&explained), format!("{}#0", id(expected)), "{explained}");
    }
    for (router, expected) in [(&generous, &offloaded), (&strict, &device)] {
        let (_, receipt) = chat_with(router, &[], &body(long(1))).await;
        assert_eq!(target(&receipt), format!("{}#0", id(expected)), "{receipt}");
    }
}

/// Case B17 and K21b: a salt is a cache of its own, for engine and router alike.
#[tokio::test]
async fn salts_are_kept_apart_as_the_engine_keeps_them() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
    let salted =
        |salt: &str| json!({"model": MODEL, "messages": long(1), "max_tokens": 1, "cache_salt": salt});
    chat_with(&router, &[], &salted("one")).await;
    router.agrees_with(&only).await;
    for (salt, hit) in [("two", false), ("one", true)] {
        let (_, receipt) = chat_with(&router, &[], &salted(salt)).await;
        router.agrees_with(&only).await;
        let cached = receipt["result"]["engine_cached_tokens"].as_u64().unwrap_or(0);
        assert_eq!(cached, receipt["predicted_hit_tokens"].as_u64().unwrap(), "{salt}");
        assert_eq!(cached > 0, hit, "{salt}");
    }
}

/// Case B17: what one adapter left behind is no hit for another model of the same engine.
#[tokio::test]
async fn adapters_are_kept_apart_as_the_engine_keeps_them() {
    for wire in [Wire::Vllm022, Wire::Vllm033, Wire::Sglang0523] {
        let adapted = |config: &mut Config| {
            (config.wire, config.lora) = (wire, vec!["poet".parse().unwrap(), "clerk".parse().unwrap()]);
        };
        let only = engine(adapted).await;
        let router = Router::start(Setup::zmq(&[&only]).events_only()).await;
        let cases = [("poet", false), (MODEL, false), ("clerk", false), ("poet", true), (MODEL, true)];
        for (model, hit) in cases {
            let body = json!({"model": model, "messages": long(1), "max_tokens": 1});
            let (status, receipt) = chat_with(&router, &[], &body).await;
            assert_eq!(status, 200, "{wire:?} {model}");
            let cached = receipt["result"]["engine_cached_tokens"].as_u64().unwrap_or(0);
            assert_eq!(cached, receipt["predicted_hit_tokens"].as_u64().unwrap(), "{wire:?} {model}");
            assert_eq!(cached > 100, hit, "{wire:?} {model}");
            router.agrees_with(&only).await;
        }
    }
}

/// Case B17: SGLang's events name adapters since 0.5.22. Before, an adapter's blocks would pass for the base model's.
#[tokio::test]
async fn an_engine_that_does_not_tell_its_adapters_blocks_apart_earns_no_credit() {
    let lora = vec!["poet".parse().unwrap()];
    let adapted = |config: &mut Config| (config.wire, config.lora) = (Wire::Sglang0518, lora);
    let old = engine(adapted).await;
    let router = Router::start(Setup::zmq(&[&old]).events_only().more("freshness: {fallback: Load}")).await;
    for model in ["poet", MODEL] {
        let body = json!({"model": model, "messages": long(1), "max_tokens": 1});
        let (_, receipt) = chat_with(&router, &[], &body).await;
        assert_eq!(receipt["candidates"][0]["trust"]["reason"], "adapters_untold", "{receipt}");
        assert_eq!(receipt["predicted_hit_tokens"], receipt["result"]["engine_cached_tokens"], "{receipt}");
    }
    assert!(router.has_problem("adapters_untold", Some(&id(&old))).await);
}

/// Case K21b: what is held for another tenant is attractive, is rejected before scoring, and the receipt says
/// so; the client does not learn of it.
#[tokio::test]
async fn a_longer_prefix_of_another_namespace_is_rejected_and_the_receipt_says_so() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b]).events_only()).await;
    let salted =
        |salt: &str| json!({"model": MODEL, "messages": long(1), "max_tokens": 1, "cache_salt": salt});
    let (_, first) = chat_with(&router, &[], &salted("one")).await;
    for engine in [&a, &b] {
        router.agrees_with(engine).await;
    }
    let at = |receipt: &Value, holder: &str, field: &str| {
        let all = receipt["candidates"].as_array().unwrap();
        all.iter().find(|one| one["target"] == holder).unwrap().pointer(field).unwrap().clone()
    };
    let holder = target(&first).to_owned();
    assert_eq!(at(&first, &holder, "/rejected_other_namespace"), 0, "nobody else was here");
    let id = crate::harness::unique();
    let answer =
        router.send("/v1/chat/completions", &[("x-request-id", &id)], salted("two").to_string()).await;
    let second = router.receipts(&id).await[0].clone();
    let rejected = at(&second, &holder, "/rejected_other_namespace").as_u64().unwrap();
    assert!(rejected > 10, "{second}");
    assert_eq!(at(&second, &holder, "/claimed/device"), 0, "{second}");
    assert_eq!((&second["outcome"], &second["predicted_hit_tokens"]), (&json!("cold"), &json!(0)));
    assert_ne!(first["namespace"], second["namespace"]);
    assert_eq!(answer.json().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(!answer.text().contains("namespace"), "{}", answer.text());
    for engine in [&a, &b] {
        router.agrees_with(engine).await;
    }
    let (_, own) = chat_with(&router, &[], &salted("one")).await;
    assert_eq!((target(&own), &own["outcome"]), (holder.as_str(), &json!("hit")));
    assert_eq!(at(&own, &holder, "/rejected_other_namespace"), 0, "its own prefix is no shorter: {own}");
}

/// What the router wrote is a chain that holds, and every decision in it can be made again.
#[tokio::test]
async fn receipts_in_files_are_whole_and_repeat() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let folder = tempfile::tempdir().unwrap();
    let files = format!("receiptFiles: {{directory: {:?}}}", folder.path());
    let more = "shadowPolicies: [LMetric, LeastLoad]\nsessionAffinity: {mode: Both}";
    let mut last = None;
    for (life, policy) in ["CachePlusLoad", "RoundRobin", "KvAware"].into_iter().enumerate() {
        let setup = Setup::zmq(&[&a, &b]).policy(policy).more(&files).more(more);
        let mut router = Router::start(setup).await;
        for turn in 0..6 {
            let session = format!("s-{}", turn % 2);
            let headers = [("x-session-id", session.as_str())];
            chat_with(&router, if turn < 4 { &headers } else { &[] }, &body(long(turn % 3))).await;
        }
        let (status, _) = chat_with(&router, &[], &json!({"model": "unknown", "messages": long(1)})).await;
        assert_eq!(status, 404);
        assert_eq!(router.metric("kvrouter_receipt_lines", "lost").await, 0.0);
        let url = format!("http://{}/v1/admin/receipts?limit=100&format=jsonl", router.at.admin);
        last = Some(router.client.get(&url).await.unwrap().text());
        router.process.terminate().unwrap();
        let ended = router.process.ended(std::time::Duration::from_secs(30)).await.unwrap();
        assert!(ended.success(), "life {life}: {}", router.process.output());
    }
    let path = folder.path().join("receipts-0000000000000000.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 3 * 7, "every arrival, over three lives");
    let from_memory = folder.path().join("memory.jsonl");
    std::fs::write(&from_memory, last.unwrap()).unwrap();
    for (path, arrivals) in [(&path, 21), (&from_memory, 7)] {
        let program = kvrouter_tests::process::sibling("kv-router").unwrap();
        let output =
            std::process::Command::new(program).args(["replay", "--trace"]).arg(path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let table = String::from_utf8(output.stdout).unwrap();
        let expected = format!("{arrivals} receipts, 0 lost in gaps; all decisions made again");
        assert!(table.starts_with(&expected), "{table}");
    }
}
