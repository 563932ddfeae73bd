//! Requests follow the cache, and the router's predictions are what engines report.

use engine_sim::{EngineSim, Wire};
use serde_json::{Value, json};

use crate::harness::{Router, Setup, chat_directly, engine, id, long, received, text, total, until};
use crate::kubernetes::{address, engine_at};
use crate::nats::{self, Bridge, Broker};

/// Five turns of one conversation; each but the first must be where the first was, and as many
/// tokens cached as predicted.
async fn follows_the_cache(wire: Wire, policy: &'static str) {
    let (a, b) = (engine(|config| config.wire = wire).await, engine(|config| config.wire = wire).await);
    let router = Router::start(Setup::zmq(&[&a, &b]).policy(policy)).await;
    let mut messages = vec![json!({"role": "system", "content": text(1, 40)})];
    let mut home: Option<String> = None;
    for turn in 2..7 {
        messages.push(json!({"role": "user", "content": text(turn, 10)}));
        let chat = router.chat(&Value::Array(messages.clone()), 24).await;
        assert_eq!(chat.cached, chat.predicted(), "{wire:?} turn {turn}: {}", chat.receipt);
        if let Some(home) = &home {
            assert_eq!(chat.worker(), home, "{wire:?} turn {turn}");
            assert!(chat.cached > 100, "{wire:?} turn {turn}: {}", chat.cached);
            assert_eq!(chat.receipt["outcome"], "hit");
        }
        home = Some(chat.worker().to_owned());
        messages.push(json!({"role": "assistant", "content": chat.text}));
        router.agrees_with(&a).await;
        router.agrees_with(&b).await;
    }
}

/// Case G19.
#[tokio::test]
async fn turn_two_follows_the_cache_on_vllm_0_22() {
    follows_the_cache(Wire::Vllm022, "CachePlusLoad").await;
}

/// Case G19.
#[tokio::test]
async fn turn_two_follows_the_cache_on_vllm_0_33() {
    follows_the_cache(Wire::Vllm033, "KvAware").await;
}

/// Case G19.
#[tokio::test]
async fn turn_two_follows_the_cache_on_sglang_0_5_18() {
    follows_the_cache(Wire::Sglang0518, "KvAware").await;
}

/// Case G19.
#[tokio::test]
async fn turn_two_follows_the_cache_on_sglang_0_5_23() {
    follows_the_cache(Wire::Sglang0523, "CachePlusLoad").await;
}

/// A cache view is what the engine holds, evictions included.
#[tokio::test]
async fn a_view_follows_evictions() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let small = engine(|config| (config.wire, config.num_pages) = (wire, 80)).await;
        let router = Router::start(Setup::zmq(&[&small]).events_only()).await;
        for number in 1..6 {
            router.chat(&long(number), 8).await;
            let pages = router.agrees_with(&small).await;
            assert!(pages < 80, "{wire:?}: {pages}");
        }
        let again = router.chat(&long(1), 1).await;
        assert_eq!(again.cached, again.predicted(), "{wire:?}: {}", again.receipt);
        assert!(again.cached < 64, "{wire:?}: all but the shared beginning was evicted");
    }
}

/// Cases E10 and K4.
#[tokio::test]
async fn a_prefix_on_one_rank_is_a_hit_for_that_rank() {
    for wire in [Wire::Vllm033, Wire::Sglang0518] {
        let ranked = engine(|config| (config.wire, config.dp_size) = (wire, 4)).await;
        let router = Router::start(Setup::zmq(&[&ranked])).await;
        chat_directly(&ranked, &long(1), Some(2)).await;
        router.agrees_with(&ranked).await;
        let chat = router.chat(&long(1), 1).await;
        assert_eq!(chat.target(), format!("{}#2", id(&ranked)), "{wire:?}");
        assert!(chat.cached > 100, "{wire:?}: {}", chat.cached);
        assert_eq!(chat.cached, chat.predicted(), "{wire:?}");
        let hits = |rank: usize| chat.receipt["candidates"][rank]["hits"]["device"].as_u64().unwrap();
        assert_eq!((hits(0), hits(1), hits(3)), (0, 0, 0), "{wire:?}");
        let last = received(&ranked).await.last().unwrap().clone();
        assert_eq!(last["rank"], 2);
        let headers = last["headers"].as_array().unwrap();
        assert!(headers.contains(&json!(["x-data-parallel-rank", "2"])), "{headers:?}");
    }
}

/// Cases E10 and K6: ports and headers count from 0 in every pod of a wide deployment, while events
/// name the rank among all.
#[tokio::test]
async fn ranks_of_a_wide_deployment_count_from_zero_in_every_pod() {
    let broker = Broker::start().await;
    let mut pods = Vec::new();
    for first in [0, 2] {
        pods.push(engine(|config| (config.dp_size, config.first_rank) = (2, first)).await);
    }
    let pods: Vec<&EngineSim> = pods.iter().collect();
    let _bridges: Vec<Bridge> = pods.iter().map(|pod| Bridge::start(pod, &broker.url())).collect();
    let ranked = pods.iter().map(|pod| format!("{{url: \"http://{}\", dpSize: 2}}", id(pod))).collect();
    let bridged = Setup { workers: ranked, ..nats::setup(&pods, &broker.url()) };
    let routers = [Router::start(Setup::zmq(&pods)).await, Router::start(bridged).await];
    for (number, pod, rank) in [(1, pods[0], 1), (2, pods[1], 0), (3, pods[1], 1)] {
        chat_directly(pod, &long(number), Some(rank)).await;
        for router in &routers {
            router.agrees_with(pod).await;
            let chat = router.chat(&long(number), 1).await;
            assert_eq!(chat.target(), format!("{}#{rank}", id(pod)));
            assert!(chat.cached > 100 && chat.cached == chat.predicted(), "{}", chat.receipt);
            let last = received(pod).await.last().unwrap().clone();
            assert!(
                last["headers"]
                    .as_array()
                    .unwrap()
                    .contains(&json!(["x-data-parallel-rank", rank.to_string()]))
            );
        }
    }
    for router in &routers {
        router.is_well().await;
    }
}

/// Case E10: a port that leads to another rank. Its blocks would be hits for the wrong one.
#[tokio::test]
async fn events_of_another_rank_are_named_and_credit_nobody() {
    let broker = Broker::start().await;
    let ranked = engine(|config| config.dp_size = 3).await;
    let (events, replay) = (&ranked.kv_event_endpoints()[1], &ranked.replay_endpoints()[1]);
    let address = ranked.http_addr();
    let sockets = format!("{{endpoint: \"{events}\", replayEndpoint: \"{replay}\"}}");
    let direct = Setup::of(vec![format!("{{url: \"http://{address}\", dpSize: 2, kvEvents: {sockets}}}")]);
    let _bridge = Bridge::reading(&ranked, 1..3, &broker.url());
    let mut bridged = nats::setup(&[&ranked], &broker.url());
    bridged.workers = vec![format!("{{url: \"http://{address}\", dpSize: 2}}")];
    for rank in [1, 2] {
        chat_directly(&ranked, &long(rank), Some(rank)).await;
    }
    for setup in [direct, bridged] {
        let router = Router::start(setup.more("freshness: {fallback: Load}").events_only()).await;
        until("both ranks are named", async || {
            let report = router.report().await;
            let problems = report["problems"].as_array().unwrap();
            let named = problems.iter().filter(|problem| problem["reason"] == "rank_mismatch").count();
            (named == 2).then_some(())
        })
        .await;
        let message = router.report().await["problems"][0]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("dpSize"), "{message}");
        for number in [1, 2] {
            let chat = router.chat(&long(number), 1).await;
            assert_eq!(chat.predicted(), 0, "{}", chat.receipt);
            for candidate in chat.receipt["candidates"].as_array().unwrap() {
                assert_eq!(candidate["trust"]["reason"], "rank_mismatch", "{candidate}");
                assert_eq!(candidate["claimed"]["device"], 0, "{candidate}");
            }
        }
    }
}

/// Case K9: engines of one fleet hash in different ways and from different seeds, and one comes back with
/// another algorithm and another seed. Routing looks at tokens.
#[tokio::test]
async fn engines_hash_as_they_like() {
    let ips = [address(), address(), address()];
    let at = async |ip: &String, wire: Wire, seed: Option<&str>| {
        let seed = seed.map(str::to_owned);
        engine_at(ip, move |config| (config.wire, config.hash_seed) = (wire, seed)).await
    };
    let mut engines = vec![
        at(&ips[0], Wire::Vllm033, Some("1")).await,
        at(&ips[1], Wire::Vllm022, None).await,
        at(&ips[2], Wire::Vllm032, Some("0")).await,
    ];
    let router = Router::start(Setup::zmq(&engines.iter().collect::<Vec<_>>()).events_only()).await;
    let follows = async |engines: &[EngineSim], first: u32| {
        for (number, engine) in (first..).zip(engines) {
            chat_directly(engine, &long(number), None).await;
        }
        for (number, engine) in (first..).zip(engines) {
            router.agrees_with(engine).await;
            let chat = router.chat(&long(number), 1).await;
            assert_eq!(chat.worker(), id(engine), "{}", chat.receipt);
            assert!(chat.cached > 100 && chat.cached == chat.predicted(), "{}", chat.receipt);
        }
    };
    follows(&engines, 1).await;
    for (wire, seed) in [(Wire::Vllm033, Some("2")), (Wire::Vllm022, Some("3")), (Wire::Vllm032, None)] {
        engines.remove(0).stop().await;
        engines.insert(0, at(&ips[0], wire, seed).await);
        until("it is ready, and what it held is forgotten", async || {
            let ready = router.metric("kvrouter_worker_ready", "\"ok\"").await == 3.0;
            (ready && router.view(&id(&engines[0])).await["block_count"] == 0).then_some(())
        })
        .await;
        follows(&engines, 10).await;
    }
    router.is_well().await;
}

/// A worker with one rank is not told of ranks, whatever the client says. Case E11.
#[tokio::test]
async fn a_single_rank_gets_no_rank_header() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    let body = json!({"model": crate::harness::MODEL, "messages": long(1), "max_tokens": 1});
    let answer =
        router.send("/v1/chat/completions", &[("x-data-parallel-rank", "0")], body.to_string()).await;
    assert_eq!(answer.status, 200);
    let headers = received(&only).await[0]["headers"].as_array().unwrap().clone();
    assert!(!headers.iter().any(|header| header[0] == "x-data-parallel-rank"), "{headers:?}");
}

/// Case K5.
#[tokio::test]
async fn workers_on_one_host_are_told_apart_by_port() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b])).await;
    chat_directly(&a, &long(1), None).await;
    router.agrees_with(&a).await;
    assert_eq!(router.view(&id(&b)).await["block_count"], 0);
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.worker(), id(&a));
    for candidate in chat.receipt["candidates"].as_array().unwrap() {
        let claims = candidate["claimed"]["device"].as_u64().unwrap();
        assert_eq!(claims > 0, candidate["target"] == format!("{}#0", id(&a)), "{candidate}");
    }
}

/// A dry run says what a request would get, and books nothing.
#[tokio::test]
async fn explain_tells_the_next_pick_and_books_nothing() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let router = Router::start(Setup::zmq(&[&a, &b])).await;
    chat_directly(&b, &long(1), None).await;
    router.agrees_with(&b).await;
    let body = json!({"model": crate::harness::MODEL, "messages": long(1), "max_tokens": 1});
    let url = format!("http://{}/v1/admin/explain", router.at.admin);
    let explained = router.client.post(&url, &body).await.unwrap().json().unwrap();
    assert_eq!(explained["chosen"]["target"], format!("{}#0", id(&b)));
    assert_eq!(router.metric("kvrouter_leases_booked", "").await, 0.0);
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.receipt["chosen"]["target"], explained["chosen"]["target"]);
    assert_eq!(chat.predicted(), explained["predicted_hit_tokens"].as_u64().unwrap());
    assert_eq!(total(&a, "requests_total").await, 0);
}
