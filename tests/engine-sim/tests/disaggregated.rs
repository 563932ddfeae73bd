//! Two engines that share the work of a request, and every way in which whoever pairs them may get it wrong.
#![allow(clippy::unwrap_used)] // A test states its expectation by failing.

mod support;

use std::time::Duration;

use engine_sim::{Config, Disaggregation, EngineSim, Wire};
use serde_json::{Value, json};
use support::{Answer, get, post, send, until};
use tokio::time::Instant;

/// How long decode waits for prefill where a test wants to see it give up.
const SHORT: Duration = Duration::from_millis(300);

async fn start(wire: Wire, role: Option<Disaggregation>, change: impl FnOnce(&mut Config)) -> EngineSim {
    let mut config = Config { wire, disaggregation: role, time_scale: 0.0, ..Config::default() };
    change(&mut config);
    EngineSim::start(config).await.unwrap()
}

async fn pair(wire: Wire, change: impl Fn(&mut Config)) -> (EngineSim, EngineSim) {
    let prefill = start(wire, Some(Disaggregation::Prefill), &change).await;
    (prefill, start(wire, Some(Disaggregation::Decode), &change).await)
}

fn impatient(config: &mut Config) {
    config.transfer_timeout_ms = u64::try_from(SHORT.as_millis()).unwrap();
}

async fn complete(engine: &EngineSim, body: &Value) -> Answer {
    post(engine, "/v1/completions", body.clone()).await
}

async fn both(prefill: &EngineSim, decode: &EngineSim, body: &Value) -> (Answer, Answer) {
    tokio::join!(complete(prefill, body), complete(decode, body))
}

/// A completion of `tokens` ids with SGLang's fields.
fn invited(prefill: &EngineSim, tokens: u32, room: u64) -> Value {
    let address = prefill.transfer_addr().unwrap();
    json!({"prompt": (0..tokens).collect::<Vec<u32>>(), "max_tokens": 5, "bootstrap_room": room,
           "bootstrap_host": address.ip().to_string(), "bootstrap_port": address.port()})
}

fn for_prefill(tokens: u32) -> Value {
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    json!({"prompt": (0..tokens).collect::<Vec<u32>>(), "max_tokens": 1, "stream": false,
           "kv_transfer_params": params})
}

fn for_decode(tokens: u32, params: &Value) -> Value {
    json!({"prompt": (0..tokens).collect::<Vec<u32>>(), "max_tokens": 5, "kv_transfer_params": params})
}

async fn fault(engine: &EngineSim, fault: Value) {
    assert_eq!(post(engine, "/sim/fault", fault).await.status, 200);
}

async fn handover(engine: &EngineSim) -> Value {
    get(engine, "/sim/state").await.json()["handover"].clone()
}

/// What went wrong at an engine, once, and nothing else.
#[track_caller]
fn only(report: &Value, wrong: &str) {
    assert_eq!(report["wrong"], json!({ wrong: 1 }));
}

fn cached(answer: &Answer) -> Value {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
}

fn text(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"].as_array().unwrap().iter().map(|choice| choice["text"].to_string()).collect()
}

async fn seq(engine: &EngineSim) -> Value {
    get(engine, "/sim/state").await.json()["ranks"][0]["seq"].clone()
}

#[tokio::test]
async fn a_sglang_pair_answers_as_one_engine_and_tells_what_prefill_had_cached() {
    let whole = start(Wire::Sglang0523, None, |_| {}).await;
    let (prefill, decode) = pair(Wire::Sglang0523, |_| {}).await;
    for (room, hit) in [(7, 0), (8, 32)] {
        let body = invited(&prefill, 40, room);
        let (first, second) = both(&prefill, &decode, &body).await;
        assert_eq!(text(&second), text(&complete(&whole, &body).await));
        assert_eq!((cached(&first), cached(&second)), (json!(hit), json!(hit)));
        assert_eq!(
            first.json()["usage"]["completion_tokens"],
            1,
            "prefill says one token, whatever is asked"
        );
        assert_eq!(second.json()["usage"]["completion_tokens"], 5);
    }
    assert_ne!(seq(&prefill).await, 0, "prefill tells what it stores");
    assert_eq!(seq(&decode).await, 0, "decode has no radix cache");
    let report = handover(&prefill).await;
    assert_eq!(report["total"], json!({"offered": 2, "taken": 2}));
    assert_eq!(
        (&report["role"], &report["held"], &report["wrong"]),
        (&json!("prefill"), &json!(0), &json!({}))
    );
    let report = handover(&decode).await;
    assert_eq!((&report["total"], &report["wrong"]), (&json!({"received": 2}), &json!({})));
    let info = get(&prefill, "/server_info").await.json();
    assert_eq!(info["disaggregation_mode"], "prefill");
    assert_eq!(info["disaggregation_bootstrap_port"], prefill.transfer_addr().unwrap().port());
    assert_eq!(get(&decode, "/server_info").await.json()["disable_radix_cache"], true);
}

#[tokio::test]
async fn a_streaming_sglang_pair_streams_from_decode_and_prefill_waits_for_it() {
    let (prefill, decode) = pair(Wire::Sglang0523, |_| {}).await;
    let mut body = invited(&prefill, 20, 1);
    body["stream"] = json!(true);
    let early = tokio::time::timeout(SHORT, complete(&prefill, &body)).await;
    assert!(early.is_err(), "there is no answer before decode has the prompt");
    until_abandoned(&prefill, 1).await;
    body["bootstrap_room"] = json!(2);
    let (first, second) = both(&prefill, &decode, &body).await;
    assert_eq!((first.data().len(), second.data().len()), (2, 6), "tokens and the end");
}

/// A client that left is noticed soon, not at once.
async fn until_abandoned(prefill: &EngineSim, times: u64) {
    until(prefill, |rank| rank["running"] == 0 && rank["waiting"] == 0).await;
    let deadline = Instant::now() + support::DEADLINE;
    while handover(prefill).await["total"]["abandoned"] != times {
        assert!(Instant::now() < deadline, "never abandoned");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn sglang_refuses_what_cannot_be_paired() {
    let check = async |why: &str, role, wrong: &str, status, change: fn(&mut Value)| {
        let prefill = start(Wire::Sglang0523, Some(Disaggregation::Prefill), impatient).await;
        let engine = start(Wire::Sglang0523, Some(role), impatient).await;
        let mut body = invited(&prefill, 20, 1);
        change(&mut body);
        let answer = complete(&engine, &body).await;
        assert_eq!(answer.status, status, "{why}: {}", answer.text);
        only(&handover(&engine).await, wrong);
    };
    use Disaggregation::{Decode, Prefill};
    let without_room = |body: &mut Value| body["bootstrap_room"] = Value::Null;
    check("prefill needs a room", Prefill, "missing_room", 500, without_room).await;
    check("decode needs a room", Decode, "missing_room", 500, without_room).await;
    let large = |body: &mut Value| body["bootstrap_room"] = json!(1_u64 << 63);
    check("a room has 63 bits", Prefill, "bad_rooms", 400, large).await;
    let two = |body: &mut Value| body["n"] = json!(2);
    check("two answers need two rooms", Prefill, "bad_rooms", 400, two).await;
    let three = |body: &mut Value| (body["n"], body["bootstrap_room"]) = (json!(2), json!([1, 2, 3]));
    check("and no third", Decode, "bad_rooms", 400, three).await;
    let nowhere = |body: &mut Value| body["bootstrap_host"] = Value::Null;
    check("decode must know where to go", Decode, "missing_host", 500, nowhere).await;
    let closed = |body: &mut Value| body["bootstrap_port"] = json!(1);
    check("nobody listens there", Decode, "prefill_unreachable", 500, closed).await;
    check("nobody opened the room", Decode, "prefill_silent", 500, |_| {}).await;
    check("nobody came for it", Prefill, "room_not_taken", 500, |_| {}).await;
}

#[tokio::test]
async fn sglang_rooms_are_for_one_request_and_one_prompt() {
    let (prefill, decode) = pair(Wire::Sglang0523, impatient).await;
    let body = invited(&prefill, 20, 1);
    let (first, second) = both(&prefill, &decode, &body).await;
    assert_eq!((first.status, second.status), (200, 200));
    let (first, second) = both(&prefill, &decode, &body).await;
    assert_eq!((first.status, second.status), (500, 500), "the same room again");
    assert_eq!(handover(&prefill).await["wrong"], json!({"room_reused": 1, "room_taken_twice": 1}));
    let (first, second) = (invited(&prefill, 20, 2), invited(&prefill, 21, 2));
    let (first, second) = tokio::join!(complete(&prefill, &first), complete(&decode, &second));
    assert_eq!((first.status, second.status), (200, 500), "another prompt");
    let wrong = handover(&decode).await["wrong"].clone();
    assert_eq!(wrong, json!({"prefill_silent": 1, "prompt_differs": 1}));
    let (first, second) = (invited(&prefill, 20, 3), invited(&prefill, 20, 4));
    let (first, second) = tokio::join!(complete(&prefill, &first), complete(&decode, &second));
    assert_eq!((first.status, second.status), (500, 500), "two rooms for one request");
}

#[tokio::test]
async fn a_prefill_that_fails_keeps_decode_waiting_until_it_gives_up() {
    let (prefill, decode) = pair(Wire::Sglang0523, impatient).await;
    fault(&prefill, json!({"refuse": {"status": 503, "count": 1, "after_ms": 50}})).await;
    let body = invited(&prefill, 20, 1);
    let began = Instant::now();
    let refused = async {
        let answer = complete(&prefill, &body).await;
        (answer, began.elapsed())
    };
    let ((first, refused_after), second) = tokio::join!(refused, complete(&decode, &body));
    assert_eq!((first.status, second.status), (503, 500));
    assert!(refused_after >= Duration::from_millis(50) && began.elapsed() >= SHORT);
    only(&handover(&decode).await, "prefill_silent");
    // A client that gives prefill up does the same to decode.
    let body = invited(&prefill, 20, 2);
    let left = tokio::time::timeout(SHORT / 10, complete(&prefill, &body)).await;
    assert!(left.is_err());
    until_abandoned(&prefill, 1).await;
    assert_eq!(complete(&decode, &body).await.status, 500);
}

#[tokio::test]
async fn the_room_says_the_prefill_rank_unless_both_are_told() {
    let (prefill, decode) = pair(Wire::Sglang0523, |config| {
        impatient(config);
        config.dp_size = 2;
    })
    .await;
    let rank = async |engine: &EngineSim| {
        let requests = get(engine, "/sim/state").await.json()["requests"].clone();
        requests.as_array().unwrap().last().unwrap()["rank"].clone()
    };
    for (room, expected) in [(10, 0), (11, 1)] {
        let (first, second) = both(&prefill, &decode, &invited(&prefill, 20, room)).await;
        assert_eq!((first.status, second.status), (200, 200));
        assert_eq!(rank(&prefill).await, expected);
    }
    let mut for_one = invited(&prefill, 20, 12);
    for_one["routed_dp_rank"] = json!(1);
    let (first, second) = both(&prefill, &decode, &for_one).await;
    assert_eq!((first.status, second.status), (500, 500), "decode looks for it at rank 0");
    for_one["bootstrap_room"] = json!(14);
    for_one["disagg_prefill_dp_rank"] = json!(1);
    let (first, second) = both(&prefill, &decode, &for_one).await;
    assert_eq!((first.status, second.status), (200, 200));
    assert_eq!((rank(&prefill).await, rank(&decode).await), (json!(1), json!(1)));
}

#[tokio::test]
async fn every_answer_of_a_sglang_batch_has_its_room() {
    let (prefill, decode) = pair(Wire::Sglang0523, impatient).await;
    let whole = start(Wire::Sglang0523, None, |_| {}).await;
    let mut body = invited(&prefill, 0, 0);
    (body["prompt"], body["n"]) = (json!([[1, 2], [3, 4, 5]]), json!(2));
    body["bootstrap_room"] = json!([1, 2, 3, 4]);
    let (first, second) = both(&prefill, &decode, &body).await;
    assert_eq!(first.status, 200);
    assert_eq!(text(&second), text(&complete(&whole, &body).await));
    assert_eq!(handover(&decode).await["total"]["received"], 4);
}

#[tokio::test]
async fn a_vllm_pair_answers_as_one_engine_and_both_store() {
    let whole = start(Wire::Vllm033, None, |_| {}).await;
    let (prefill, decode) = pair(Wire::Vllm033, |_| {}).await;
    for hit in [0, 32] {
        let first = complete(&prefill, &for_prefill(40)).await;
        let params = first.json()["kv_transfer_params"].clone();
        let port = prefill.transfer_addr().unwrap().port();
        assert_eq!(
            (&params["do_remote_prefill"], &params["do_remote_decode"]),
            (&json!(true), &json!(false))
        );
        assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 3, "pages of 40 tokens");
        assert_eq!((&params["remote_host"], &params["remote_port"]), (&json!("127.0.0.1"), &json!(port)));
        assert_eq!((&params["remote_num_tokens"], &params["transfer_mode"]), (&json!(40), &json!("pull")));
        assert_eq!(params["remote_prefill_cached_tokens"], hit);
        assert_eq!(handover(&prefill).await["held"], 1);
        let mut body = for_decode(40, &params);
        body["kv_transfer_params"]["prompt_token_ids"] = json!([1, 2, 3]);
        let second = complete(&decode, &body).await;
        assert_eq!(text(&second), text(&complete(&whole, &body).await), "a client's own key is no change");
        // What an earlier request left in decode's own cache counts; what was pulled does not.
        assert_eq!((cached(&first), cached(&second)), (json!(hit), json!(hit)));
    }
    assert_eq!(handover(&prefill).await["total"], json!({"offered": 2, "taken": 2}));
    let report = handover(&decode).await;
    assert_eq!((&report["total"], &report["wrong"]), (&json!({"received": 2}), &json!({})));
    assert_ne!(seq(&prefill).await, 0);
    assert_ne!(seq(&decode).await, 0, "pulled blocks are told");
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    assert_eq!(complete(&decode, &body).await.status, 200, "decode can do it alone");
    assert_eq!(handover(&decode).await["total"]["local"], 1);
}

#[tokio::test]
async fn a_vllm_engine_refuses_the_other_part_of_a_request() {
    use Disaggregation::{Decode, Prefill};
    let check = async |why: &str, role, wrong: Option<&str>, change: fn(&mut Value)| {
        let engine = start(Wire::Vllm033, Some(role), |_| {}).await;
        let mut body = for_prefill(20);
        change(&mut body);
        let answer = complete(&engine, &body).await;
        assert_eq!(answer.status, 400, "{why}: {}", answer.text);
        match wrong {
            Some(wrong) => only(&handover(&engine).await, wrong),
            None => assert_eq!(handover(&engine).await["wrong"], json!({}), "{why}"),
        }
    };
    let plain = |body: &mut Value| body["kv_transfer_params"] = Value::Null;
    check("nobody would come for the blocks", Prefill, Some("not_remote_decode"), plain).await;
    let many = |body: &mut Value| body["max_tokens"] = json!(2);
    check("one token", Prefill, Some("more_than_one_token"), many).await;
    let open_end = |body: &mut Value| body["max_tokens"] = Value::Null;
    check("one token, said so", Prefill, Some("more_than_one_token"), open_end).await;
    let newer_field = |body: &mut Value| body["max_completion_tokens"] = json!(9);
    check("the newer field counts", Prefill, Some("more_than_one_token"), newer_field).await;
    check("no stream", Prefill, Some("more_than_one_token"), |body| body["stream"] = json!(true)).await;
    check("one answer", Prefill, Some("more_than_one_token"), |body| body["n"] = json!(2)).await;
    let options = |body: &mut Value| body["stream_options"] = json!({"include_usage": true});
    check("no options of a stream", Prefill, None, options).await;
    check("no least number of tokens", Prefill, None, |body| body["min_tokens"] = json!(3)).await;
    check("decode decodes", Decode, Some("other_role"), |_| {}).await;
    let for_decode = |body: &mut Value| body["kv_transfer_params"] = json!({"do_remote_prefill": true});
    check("prefill prefills", Prefill, Some("other_role"), for_decode).await;
}

#[tokio::test]
async fn blocks_that_cannot_be_pulled_are_computed_again_and_counted() {
    let check = async |why: &str, wrong: &str, change: fn(&mut Value)| {
        let (prefill, decode) = pair(Wire::Vllm033, |_| {}).await;
        let mut params = complete(&prefill, &for_prefill(40)).await.json()["kv_transfer_params"].clone();
        change(&mut params);
        assert_eq!(complete(&decode, &for_decode(40, &params)).await.status, 200, "{why}");
        let report = handover(&decode).await;
        only(&report, wrong);
        assert_eq!(report["total"], json!({"recomputed": 1}), "{why}");
    };
    check("verbatim", "params_altered", |params| params["remote_num_tokens"] = json!(39)).await;
    let less = |params: &mut Value| drop(params.as_object_mut().unwrap().shift_remove("tp_size"));
    check("all of it", "params_altered", less).await;
    check("of this engine", "params_unknown", |params| params["remote_request_id"] = json!("cmpl-x")).await;
    check("and not of another", "prefill_unreachable", |params| params["remote_port"] = json!(1)).await;

    let (prefill, decode) = pair(Wire::Vllm033, impatient).await;
    let ask = async || complete(&prefill, &for_prefill(40)).await.json()["kv_transfer_params"].clone();
    let params = ask().await;
    for _ in 0..2 {
        complete(&decode, &for_decode(40, &params)).await;
    }
    complete(&decode, &for_decode(41, &ask().await)).await;
    let params = ask().await;
    tokio::time::sleep(SHORT).await;
    assert_eq!(handover(&prefill).await["held"], 0, "a lease ends by itself");
    complete(&decode, &for_decode(40, &params)).await;
    let params = ask().await;
    fault(&prefill, json!({"restart": true})).await;
    complete(&decode, &for_decode(40, &params)).await;
    let mut nothing = params;
    nothing["remote_block_ids"] = Value::Null;
    complete(&decode, &for_decode(40, &nothing)).await;
    let report = handover(&decode).await;
    let expected = json!({"pulled_twice": 1, "prompt_differs": 1, "lease_expired": 1, "params_unknown": 1});
    assert_eq!(report["wrong"], expected);
    assert_eq!(report["total"], json!({"received": 1, "recomputed": 5}));
    assert_eq!(post(&decode, "/sim/reset", json!({})).await.status, 200);
    assert_eq!(handover(&decode).await["total"], json!({}));
}

#[tokio::test]
async fn responses_are_paired_as_chats_are() {
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer");
    let (prefill, decode) = pair(Wire::Vllm033, |config| config.tokenizer = Some(tokenizer.into())).await;
    let body = json!({"input": "hello", "max_output_tokens": 1,
                      "kv_transfer_params": {"do_remote_decode": true}});
    let first = send(&prefill, "POST", "/v1/responses", &[], body.to_string()).await.unwrap();
    let params = first.json()["kv_transfer_params"].clone();
    let body = json!({"input": "hello", "max_output_tokens": 4, "kv_transfer_params": params});
    let second = post(&decode, "/v1/responses", body).await.json();
    assert_eq!(second["usage"]["output_tokens"], 4);
    assert_eq!(handover(&decode).await["total"], json!({"received": 1}));
}
