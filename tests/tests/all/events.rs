//! Every way of losing cache knowledge is noticed, repaired or named, and never a false hit.

use engine_sim::{EngineSim, Wire};
use serde_json::json;

use crate::harness::{Router, Setup, chat_directly, engine, entry, fault, id, long, total, until};

/// Cases C01, K20: the loss is seen by its number, and repaired.
#[tokio::test]
async fn a_lost_message_is_replayed() {
    for wire in [Wire::Vllm022, Wire::Vllm033, Wire::Sglang0518, Wire::Sglang0523] {
        let lossy = engine(|config| config.wire = wire).await;
        let router = Router::start(Setup::zmq(&[&lossy])).await;
        chat_directly(&lossy, &long(1), None).await;
        router.agrees_with(&lossy).await;
        fault(&lossy, json!({"drop_events": 1})).await;
        chat_directly(&lossy, &long(2), None).await;
        // The next message shows that one is missing.
        chat_directly(&lossy, &long(3), None).await;
        router.agrees_with(&lossy).await;
        for number in 1..=3 {
            let chat = router.chat(&long(number), 1).await;
            assert!(chat.cached > 100, "{wire:?}");
            assert_eq!(chat.cached, chat.predicted(), "{wire:?}");
        }
    }
}

/// Cases C03, C04 and K1.
#[tokio::test]
async fn an_engine_that_restarts_in_place_starts_from_nothing() {
    for wire in [Wire::Vllm033, Wire::Sglang0518] {
        let mortal = engine(|config| config.wire = wire).await;
        let router = Router::start(Setup::zmq(&[&mortal]).events_only()).await;
        for number in 1..4 {
            router.chat(&long(number), 20).await;
        }
        let before = epoch(&router, &mortal).await;
        fault(&mortal, json!({"restart": true})).await;
        // The view is emptied, then its new life is published.
        until("a new life begins", async || (epoch(&router, &mortal).await > before).then_some(())).await;
        comes_back(&router, &mortal).await;
        let chat = router.chat(&long(1), 1).await;
        assert_eq!((chat.cached, chat.predicted()), (0, 0), "{wire:?}");
        router.agrees_with(&mortal).await;
        let chat = router.chat(&long(1), 1).await;
        assert!(chat.cached > 100, "{wire:?}");
        assert_eq!(chat.cached, chat.predicted(), "{wire:?}");
    }
}

/// Cases C03 and C04 without a replay socket: only the number of a message can tell.
#[tokio::test]
async fn a_number_that_starts_again_empties_the_view() {
    let mortal = engine(|config| config.wire = Wire::Vllm022).await;
    let setup = Setup::of(vec![entry(&mortal, false)]).events_only().more("freshness: {fallback: Load}");
    let router = Router::start(setup).await;
    for number in 1..6 {
        router.chat(&long(number), 20).await;
    }
    let before = epoch(&router, &mortal).await;
    fault(&mortal, json!({"restart": true})).await;
    listens_again(&router).await;
    chat_directly(&mortal, &long(20), None).await;
    until("a new life begins", async || (epoch(&router, &mortal).await > before).then_some(())).await;
    for number in 1..6 {
        let chat = router.chat(&long(number), 1).await;
        assert!(chat.predicted() <= chat.cached, "claims nothing of the old life: {}", chat.receipt);
    }
}

/// Waits until the router has subscribed a second time: what is sent before is lost.
async fn listens_again(router: &Router) {
    let times = || router.process.output().matches("following events").count();
    until("the router listens again", async || (times() > 1).then_some(())).await;
}

async fn epoch(router: &Router, engine: &EngineSim) -> u64 {
    router.view(&id(engine)).await["ranks"][0]["epoch"].as_u64().unwrap()
}

/// Waits until the view has forgotten the life before.
async fn comes_back(router: &Router, engine: &EngineSim) {
    until("the view is empty", async || (router.view(&id(engine)).await["block_count"] == 0).then_some(()))
        .await;
}

/// Case C15: an engine that turns its cache over many times takes no more of the router than
/// its cache is large.
#[tokio::test]
async fn the_index_is_as_large_as_the_caches() {
    let pages = 300;
    let small = engine(|config| config.num_pages = pages).await;
    let router = Router::start(Setup::zmq(&[&small])).await;
    let held = async |table: &str| router.metric("kvrouter_pool", table).await;
    let mut most = 0.0;
    for number in 0..400 {
        chat_directly(&small, &long(number), None).await;
        // Its tables have grown by then.
        if number == 200 {
            router.agrees_with(&small).await;
            most = held("index_bytes").await;
        }
    }
    assert!(total(&small, "prompt_tokens_total").await > 5 * 16 * u64::from(pages), "it turned over");
    router.agrees_with(&small).await;
    assert!(held("index_blocks").await <= f64::from(pages));
    let bytes = held("index_bytes").await;
    assert!(bytes > 0.0 && bytes <= most * 1.15, "{bytes} after {most}");
}

/// Case K26.
#[tokio::test]
async fn pages_that_do_not_divide_the_block_are_named_and_earn_nothing() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let (odd, plain) = (
            engine(|config| (config.wire, config.page_size) = (wire, 24)).await,
            engine(|config| config.wire = wire).await,
        );
        let router =
            Router::start(Setup::zmq(&[&odd, &plain]).more("freshness: {fallback: Load}").events_only())
                .await;
        chat_directly(&odd, &long(1), None).await;
        until("the report names it", async || {
            let named = router.has_problem("page_size_mismatch", Some(&id(&odd))).await;
            (named || router.has_problem("reported_page_size_mismatch", Some(&id(&odd))).await).then_some(())
        })
        .await;
        let report = router.report().await;
        let message = report["problems"][0]["message"].as_str().unwrap();
        assert!(message.contains("24") && message.contains("16"), "{message}");
        let chat = router.chat(&long(1), 1).await;
        assert_eq!(chat.predicted(), 0, "{}", chat.receipt);
        for candidate in chat.receipt["candidates"].as_array().unwrap() {
            let is_odd = candidate["target"] == format!("{}#0", id(&odd));
            assert_eq!(candidate["trust"]["credited"], !is_odd, "{candidate}");
            assert_eq!(candidate["trust"]["state"] == "mismatched", is_odd, "{candidate}");
        }
    }
}

/// A store whose page size does not fit its own tokens cannot be placed: the report says that the
/// view lacks something, and nothing is claimed for it.
#[tokio::test]
async fn a_store_that_contradicts_itself_is_named_and_earns_nothing() {
    let liar = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&liar]).events_only()).await;
    fault(&liar, json!({"page_size_lie": 24})).await;
    chat_directly(&liar, &long(1), None).await;
    until("the report names the worker", async || {
        let report = router.report().await;
        let problems = report["problems"].as_array().unwrap();
        problems.iter().any(|problem| problem["worker"] == id(&liar)).then_some(())
    })
    .await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.predicted(), 0, "{}", chat.receipt);
}

/// Pages smaller than a block are grouped.
#[tokio::test]
async fn small_pages_make_up_blocks() {
    for (wire, page) in [(Wire::Vllm033, 8), (Wire::Sglang0518, 1), (Wire::Sglang0523, 4)] {
        let fine = engine(|config| (config.wire, config.page_size) = (wire, page)).await;
        let router = Router::start(Setup::zmq(&[&fine])).await;
        let first = router.chat(&long(1), 4).await;
        assert_eq!(first.cached, 0);
        until("the view has blocks", async || {
            let blocks = router.view(&id(&fine)).await["block_count"].as_u64().unwrap();
            (blocks > 8).then_some(())
        })
        .await;
        let second = router.chat(&long(1), 4).await;
        assert!(second.predicted() > 100, "{wire:?} {page}: {}", second.receipt);
        // What is left is less than a block.
        assert!(
            second.cached - second.predicted() < 16,
            "{wire:?}: {} {}",
            second.cached,
            second.predicted()
        );
    }
}

/// Garbage is counted with its reason, and what comes after it counts as ever.
#[tokio::test]
async fn garbage_on_zmq_is_counted_and_survived() {
    for wire in [Wire::Vllm033, Wire::Sglang0518] {
        let noisy = engine(|config| config.wire = wire).await;
        let router = Router::start(Setup::zmq(&[&noisy])).await;
        router.chat(&long(1), 2).await;
        router.agrees_with(&noisy).await;
        let counted = async || router.metric("kvrouter_event_messages_total", "").await;
        let good = router.metric("kvrouter_event_messages_total", "result=\"applied\"").await;
        let before = counted().await - good;
        fault(&noisy, json!({"garbage_events": 3})).await;
        router.chat(&long(2), 2).await;
        until("the garbage is counted", async || {
            let good = router.metric("kvrouter_event_messages_total", "result=\"applied\"").await;
            (counted().await - good >= before + 3.0).then_some(())
        })
        .await;
        assert_eq!(router.metric("kvrouter_event_messages_total", "result=\"\"").await, 0.0, "a reason each");
        let chat = router.chat(&long(1), 1).await;
        assert_eq!(chat.cached, chat.predicted(), "no false hit: {}", chat.receipt);
    }
}

/// What a prompt in flight will leave behind dies with the engine's life. Case K1.
#[tokio::test]
async fn credit_for_prompts_in_flight_ends_with_the_engines_life() {
    let mortal = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&mortal])).await;
    router.chat(&long(1), 2).await;
    router.agrees_with(&mortal).await;
    fault(&mortal, json!({"restart": true})).await;
    comes_back(&router, &mortal).await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!((chat.cached, chat.predicted()), (0, 0), "{}", chat.receipt);
}

/// What events confirmed and then took away is gone, however young the prompt is.
#[tokio::test]
async fn credit_for_prompts_in_flight_ends_when_events_take_over() {
    let small = engine(|config| config.num_pages = 80).await;
    let router = Router::start(Setup::zmq(&[&small])).await;
    for number in 1..6 {
        router.chat(&long(number), 8).await;
        router.agrees_with(&small).await;
    }
    let again = router.chat(&long(1), 1).await;
    assert_eq!(again.cached, again.predicted(), "{}", again.receipt);
}

/// A mismatched view earns nothing at once, and prompts in flight are no way around that. Case K26.
#[tokio::test]
async fn credit_for_prompts_in_flight_is_not_for_mismatched_views() {
    let odd = engine(|config| config.page_size = 24).await;
    let router = Router::start(Setup::zmq(&[&odd]).more("freshness: {fallback: Load}")).await;
    router.chat(&long(1), 1).await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.predicted(), 0, "{}", chat.receipt);
}

/// Case C03: nothing proves that an engine without a replay socket is still the one it was before a
/// reconnection.
#[tokio::test]
async fn a_reconnection_without_replay_puts_the_view_in_doubt() {
    let mortal = engine(|_| {}).await;
    let router = Router::start(Setup::of(vec![entry(&mortal, false)]).events_only()).await;
    router.chat(&long(1), 20).await;
    router.agrees_with(&mortal).await;
    fault(&mortal, json!({"restart": true})).await;
    listens_again(&router).await;
    until("the view is in doubt", async || {
        let view = router.view(&id(&mortal)).await;
        (view["block_count"] == 0 || view["ranks"][0]["trust"] == "unsound").then_some(())
    })
    .await;
}

/// Case C01: a loss that nothing replays is named, spends the budget, and is then rebuilt.
#[tokio::test]
async fn a_loss_that_cannot_be_replayed_ends_credit_and_is_rebuilt() {
    let lossy = engine(|_| {}).await;
    let setup = Setup::of(vec![entry(&lossy, false)])
        .events_only()
        .more("freshness: {budgetSeconds: 3, fallback: Load}");
    let router = Router::start(setup).await;
    chat_directly(&lossy, &long(1), None).await;
    router.agrees_with(&lossy).await;
    let before = epoch(&router, &lossy).await;
    fault(&lossy, json!({"drop_events": 1})).await;
    chat_directly(&lossy, &long(2), None).await;
    chat_directly(&lossy, &long(3), None).await;
    let rank = async || router.view(&id(&lossy)).await["ranks"][0].clone();
    until("it is named", async || (rank().await["reason"] == "gap").then_some(())).await;
    assert!(router.has_problem("gap", Some(&id(&lossy))).await);
    assert_eq!(rank().await["trust"], "unsound");
    let chat = router.chat(&long(1), 1).await;
    assert!(chat.predicted() > 100, "within the budget it counts: {}", chat.receipt);
    until("the budget is spent", async || (rank().await["credited"] == false).then_some(())).await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.predicted(), 0, "{}", chat.receipt);
    assert_eq!(epoch(&router, &lossy).await, before, "the view is still there");
    until("it is rebuilt", async || (epoch(&router, &lossy).await > before).then_some(())).await;
    until("the new view earns credit", async || {
        let rank = rank().await;
        (rank["credited"] == true && rank["trust"] == "incomplete").then_some(())
    })
    .await;
    let chat = router.chat(&long(2), 1).await;
    assert!(chat.cached > 100 && chat.predicted() == 0, "what was lost is not claimed: {}", chat.receipt);
    // It begins unlike the others, so nothing of it hangs below what was lost.
    let other = json!([{"role": "system", "content": crate::harness::text(9, 60)}]);
    until("new prompts are claimed again", async || {
        let chat = router.chat(&other, 1).await;
        (chat.predicted() > 100 && chat.predicted() == chat.cached).then_some(())
    })
    .await;
}

/// An engine whose publisher hangs is named, and loses its credit, until it tells again.
#[tokio::test]
async fn an_engine_that_stops_telling_of_stores_is_named() {
    let mute = engine(|_| {}).await;
    let setup = Setup::zmq(&[&mute]).events_only().more("freshness: {budgetSeconds: 3, fallback: Load}");
    let router = Router::start(setup).await;
    router.chat(&long(1), 1).await;
    router.agrees_with(&mute).await;
    fault(&mute, json!({"hold_events": true})).await;
    let rank = async || router.view(&id(&mute)).await["ranks"][0].clone();
    let number = std::cell::Cell::new(1);
    until("it is named", async || {
        number.set(number.get() + 1);
        router.chat(&long(number.get()), 1).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        (rank().await["reason"] == "stalled").then_some(())
    })
    .await;
    let number = number.get();
    assert!(number > 16, "{number}");
    assert!(router.has_problem("stalled", Some(&id(&mute))).await);
    until("its credit ends", async || (rank().await["credited"] == false).then_some(())).await;
    fault(&mute, json!({"hold_events": false})).await;
    router.agrees_with(&mute).await;
    router.is_well().await;
    let chat = router.chat(&long(number), 1).await;
    assert!(chat.cached > 100 && chat.predicted() == chat.cached, "{}", chat.receipt);
}

/// Case G09: an engine whose event port nobody listens on.
#[tokio::test]
async fn an_engine_without_events_is_named_within_ten_seconds() {
    let only = engine(|_| {}).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let entry = format!("{{url: \"http://{}\", kvEvents: {{endpoint: \"tcp://{closed}\"}}}}", id(&only));
    let started = tokio::time::Instant::now();
    let router = Router::start_cold(Setup::of(vec![entry])).await;
    until("the report names it", async || {
        let unheard = router.has_problem("nothing_heard", Some(&id(&only))).await;
        (unheard || router.has_problem("engine_unreachable", Some(&id(&only))).await).then_some(())
    })
    .await;
    let unheard = router.metric("kvrouter_view_trust", "nothing_heard").await
        + router.metric("kvrouter_view_trust", "engine_unreachable").await;
    assert_eq!(unheard, 1.0);
    assert!(router.metric("kvrouter_event_messages_total", "\"connect\"").await > 0.0);
    assert!(started.elapsed() < std::time::Duration::from_secs(10));
    // Requests are served meanwhile, by history and load.
    router.chat(&long(1), 1).await;
}

/// Case G05: one lost message costs a replay from the last one known, not of the whole history.
#[tokio::test]
async fn a_lost_message_is_asked_for_from_the_last_one_known() {
    let lossy = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&lossy])).await;
    for number in 1..=40 {
        chat_directly(&lossy, &long(number), None).await;
    }
    router.agrees_with(&lossy).await;
    let (history, before) = (total(&lossy, "seq").await, total(&lossy, "replayed_total").await);
    fault(&lossy, json!({"drop_events": 1})).await;
    chat_directly(&lossy, &long(41), None).await;
    chat_directly(&lossy, &long(42), None).await;
    router.agrees_with(&lossy).await;
    let replayed = total(&lossy, "replayed_total").await - before;
    // The last one known, what is new, and some looks while nothing comes.
    assert!(history >= 40 && (3..12).contains(&replayed), "{replayed} of {history} were replayed");
}

/// Case K34b: a router that starts beside an engine whose replay buffer no longer reaches the
/// beginning. What hangs below lost blocks is counted and named, and never a false hit.
#[tokio::test]
async fn a_router_that_starts_beside_a_buffer_that_rolled_over_claims_too_little() {
    let warm = engine(|config| config.replay_batches = 3).await;
    for number in 1..=6 {
        chat_directly(&warm, &long(number), None).await;
    }
    assert!(total(&warm, "seq").await > 3, "the buffer has rolled over");
    let router = Router::start(Setup::zmq(&[&warm]).events_only().more("freshness: {fallback: Load}")).await;
    until("the report names it", async || {
        router.has_problem("stores_missing", Some(&id(&warm))).await.then_some(())
    })
    .await;
    let first = router.chat(&long(1), 1).await;
    assert!(first.cached > 100 && first.predicted() == 0, "{}", first.receipt);
    let last = router.chat(&long(6), 1).await;
    assert!(last.predicted() <= last.cached, "{}", last.receipt);
    // Another turn goes on from blocks that the router never heard of.
    let mut turns = long(1);
    turns.as_array_mut().unwrap().push(json!({"role": "assistant", "content": "yes"}));
    turns.as_array_mut().unwrap().push(json!({"role": "user", "content": crate::harness::text(77, 60)}));
    router.chat(&turns, 1).await;
    until("orphans are counted", async || {
        (router.metric("kvrouter_event_messages_total", "\"orphan\"").await > 0.0).then_some(())
    })
    .await;
    let chat = router.chat(&turns, 1).await;
    assert!(chat.cached > 200 && chat.predicted() == 0, "not chained from the root: {}", chat.receipt);
}
