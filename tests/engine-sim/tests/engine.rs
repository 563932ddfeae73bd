//! A running simulator as its clients see it: endpoints, errors, streams, ranks, events.
#![allow(clippy::unwrap_used, clippy::panic)] // A test states its expectation by failing.

mod support;

use engine_sim::{Config, EngineSim, EventPort, Lora, Wire};
use serde_json::{Value, json};
use support::{complete, get, post, rank, replay, send};
use zeromq::{Socket as _, SocketRecv as _, SubSocket};

async fn start(wire: Wire, change: impl FnOnce(&mut Config)) -> EngineSim {
    let mut config = Config { wire, model: "tiny".to_owned(), time_scale: 0.0, ..Config::default() };
    change(&mut config);
    EngineSim::start(config).await.unwrap()
}

const WIRES: [Wire; 4] = [Wire::Vllm022, Wire::Vllm033, Wire::Sglang0518, Wire::Sglang0523];

#[tokio::test]
async fn errors_have_the_engines_shape() {
    let vllm = start(Wire::Vllm033, |_| {}).await;
    let sglang = start(Wire::Sglang0523, |_| {}).await;
    //   why                   body                                                status, then message
    let rows = [
        (
            "an unknown model",
            json!({"model": "x", "prompt": [1]}),
            (404, 200),
            "The model `x` does not exist.",
        ),
        ("no prompt", json!({"prompt": []}), (400, 400), "the prompt must not be empty"),
        ("text without a tokenizer", json!({"prompt": "a"}), (400, 400), "this engine has no tokenizer"),
        ("too long", json!({"prompt": [1], "max_tokens": 131_072}), (400, 400), "maximum context length"),
        ("a token that is none", json!({"prompt": [1, "a"]}), (400, 400), "prompt must be"),
        ("no answer at all", json!({"prompt": [1], "n": 0}), (400, 400), "n must be"),
    ];
    for (why, body, (vllm_status, sglang_status), message) in rows {
        let answer = post(&vllm, "/v1/completions", body.clone()).await;
        assert_eq!(answer.status, vllm_status, "{why}");
        let error = &answer.json()["error"];
        assert!(error["message"].as_str().unwrap().contains(message), "{why}: {error}");
        assert_eq!(error["code"], vllm_status, "{why}");
        let answer = post(&sglang, "/v1/completions", body).await;
        assert_eq!(answer.status, sglang_status, "{why}");
        if sglang_status != 200 {
            assert_eq!(answer.json()["object"], "error", "{why}");
            assert!(answer.json()["message"].as_str().unwrap().contains(message), "{why}");
        }
    }
}

#[tokio::test]
async fn a_rank_is_chosen_by_header_and_has_a_cache_of_its_own() {
    for wire in WIRES {
        let engine = start(wire, |config| config.dp_size = 2).await;
        let run = async |rank: &str| {
            let body = json!({"prompt": (0..65).collect::<Vec<u32>>(), "max_tokens": 1}).to_string();
            let headers = [("X-data-parallel-rank", rank)];
            let answer = send(&engine, "POST", "/v1/completions", &headers, body).await.unwrap();
            (answer.status, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone())
        };
        assert_eq!(run("1").await, (200, json!(0)));
        assert_eq!(run("0").await, (200, json!(0)), "{wire:?}: the other rank has nothing");
        assert_eq!(run("1").await, (200, json!(64)));
        assert_eq!(run("2").await.0, 400, "{wire:?}: out of range");
        assert_eq!(run("x").await.0, if wire.is_vllm() { 200 } else { 400 });
        let ports: Vec<u16> = engine
            .kv_event_endpoints()
            .iter()
            .map(|endpoint| endpoint.rsplit(':').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(ports[0] + 1, ports[1]);
    }
}

#[tokio::test]
async fn streams_end_as_the_recorded_ones_do() {
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
        "stream": true, "stream_options": {"include_usage": true},
        "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}, "input_ids": [1, 2, 3]});
    for (wire, chunks, stop) in [(Wire::Vllm033, 4, "stop_reason"), (Wire::Sglang0523, 5, "matched_stop")] {
        let engine = start(wire, |_| {}).await;
        let answer = post(&engine, "/v1/chat/completions", body.clone()).await;
        let data = answer.data();
        assert_eq!(data.len(), chunks + 2, "role, tokens, end, usage, done: {data:?}");
        assert_eq!(data[chunks + 1], "[DONE]");
        let parsed: Vec<Value> =
            data[..=chunks].iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
        assert_eq!(parsed[0]["choices"][0]["delta"]["role"], "assistant");
        let last = &parsed[chunks - 1]["choices"][0];
        assert_eq!((&last["finish_reason"], last.get(stop)), (&json!("length"), Some(&Value::Null)));
        assert_eq!(parsed[chunks]["choices"], json!([]));
        assert_eq!(parsed[chunks]["usage"]["prompt_tokens"], 3);
        assert_eq!(parsed[chunks]["usage"]["completion_tokens"], 3);
        let streamed: String =
            parsed.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        let mut whole = body.clone();
        whole["stream"] = json!(false);
        whole["stream_options"] = Value::Null;
        let answer = post(&engine, "/v1/chat/completions", whole).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], streamed.as_str());
    }
}

#[tokio::test]
async fn every_prompt_gets_all_its_answers() {
    for wire in WIRES {
        let engine = start(wire, |_| {}).await;
        let body = json!({"prompt": [[1, 2], [3, 4, 5]], "n": 2, "max_tokens": 4, "return_token_ids": true});
        let answer = post(&engine, "/v1/completions", body).await.json();
        let choices = answer["choices"].as_array().unwrap();
        let indices: Vec<u64> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [0, 1, 2, 3]);
        assert_ne!(choices[0]["text"], choices[1]["text"]);
        assert_eq!(answer["usage"]["prompt_tokens"], 5, "{wire:?}: a prompt counts once");
        assert_eq!(answer["usage"]["completion_tokens"], 16);
        if wire.is_vllm() {
            assert_eq!(choices[2]["prompt_token_ids"], json!([3, 4, 5]));
            assert_eq!(choices[2]["token_ids"].as_array().unwrap().len(), 4);
        }
    }
}

#[tokio::test]
async fn the_next_turn_hits_prompt_and_answer() {
    for wire in WIRES {
        let engine = start(wire, |_| {}).await;
        let prompt: Vec<u32> = (0..40).collect();
        let body = json!({"prompt": prompt, "max_tokens": 30, "return_token_ids": true});
        post(&engine, "/v1/completions", body).await;
        // Without a tokenizer the words of an answer are ` t<id>`.
        let body = json!({"prompt": prompt, "max_tokens": 30});
        let text = post(&engine, "/v1/completions", body).await.json()["choices"][0]["text"].clone();
        let ids = text.as_str().unwrap().split(" t").skip(1).map(|id| id.parse::<u32>().unwrap());
        let next: Vec<u32> = prompt.into_iter().chain(ids).chain([1, 2, 3]).collect();
        // 40 + 30 tokens, of which the last was never computed: 69, four pages of 16.
        assert_eq!(complete(&engine, &next, 1).await, 64, "{wire:?}");
    }
}

#[tokio::test]
async fn an_engine_says_what_it_is() {
    let vllm = start(Wire::Vllm033, |config| {
        config.lora = vec![Lora { name: "ad".to_owned(), path: "/ad".to_owned() }];
    })
    .await;
    let models = get(&vllm, "/v1/models").await.json();
    assert_eq!(models["data"][1]["parent"], "tiny");
    let metrics = get(&vllm, "/metrics").await.text;
    for name in ["num_requests_running", "kv_cache_usage_perc", "prefix_cache_hits_total"] {
        assert!(
            metrics.contains(&format!("\nvllm:{name}{{engine=\"0\",model_name=\"tiny\"}} 0.0\n")),
            "{name}"
        );
    }
    assert!(metrics.contains("vllm:cache_config_info{block_size=\"16\","));
    let port = |endpoint: &str| endpoint.rsplit(':').next().unwrap().to_owned();
    let sources = get(&vllm, "/kv_event_sources").await.json();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{}", port(&vllm.kv_event_endpoints()[0])));
    assert_eq!(get(&start(Wire::Vllm022, |_| {}).await, "/kv_event_sources").await.status, 404);

    let sglang = start(Wire::Sglang0523, |config| config.dp_size = 2).await;
    for path in ["/server_info", "/get_server_info"] {
        let info = get(&sglang, path).await.json();
        assert_eq!((&info["page_size"], &info["dp_size"]), (&json!(16), &json!(2)));
        let base = info["kv_events"]["endpoint_port_base"].to_string();
        assert_eq!(base, port(&sglang.kv_event_endpoints()[0]));
    }
    let metrics = get(&sglang, "/metrics").await.text;
    assert!(metrics.contains("\nsglang:page_size{dp_rank=\"1\","), "{metrics}");
    let silent = start(Wire::Sglang0523, |config| config.kv_events_port = EventPort::Off).await;
    assert!(silent.kv_event_endpoints().is_empty() && silent.replay_endpoints().is_empty());
    assert_eq!(get(&silent, "/server_info").await.json()["kv_events"], Value::Null);
    assert_eq!(complete(&silent, &[1; 40], 1).await, 0);
}

#[tokio::test]
async fn a_subscriber_gets_what_a_replay_returns() {
    for wire in WIRES {
        let engine = start(wire, |config| config.topic = "kv@here".to_owned()).await;
        let mut subscriber = SubSocket::new();
        subscriber.connect(&engine.kv_event_endpoints()[0]).await.unwrap();
        subscriber.subscribe("kv@").await.unwrap();
        // The subscription takes effect some time after the call: ask until it does.
        let mut prompt = 0;
        let first = loop {
            complete(&engine, &[prompt; 20], 1).await;
            prompt += 1;
            let wait = std::time::Duration::from_millis(20);
            if let Ok(message) = tokio::time::timeout(wait, subscriber.recv()).await {
                break message.unwrap().into_vec();
            }
        };
        let [topic, seq, payload] = &first[..] else { panic!("{first:?}") };
        assert_eq!(topic.as_ref(), b"kv@here");
        let seq = u64::from_be_bytes(seq.as_ref().try_into().unwrap());
        let replies = replay(&engine, seq).await;
        let expected = if wire.replay_has_topic() { 4 } else { 3 };
        assert_eq!(replies[0].len(), expected, "{wire:?}");
        assert_eq!(replies[0].last(), Some(payload), "{wire:?}");
        assert_eq!(replies.last().unwrap().len(), expected);
    }
}

#[tokio::test]
async fn what_arrived_is_remembered_byte_for_byte() {
    let engine = start(Wire::Vllm033, |_| {}).await;
    let body = "{ \"prompt\":[1,2] ,\"unknown\": 1}".to_owned();
    send(&engine, "POST", "/v1/completions", &[("x-probe", "here")], body).await.unwrap();
    let request = get(&engine, "/sim/state").await.json()["requests"][0].clone();
    // As sha256sum prints it.
    let expected = "cc41b4111646fbb85a74d8bc5a31e8cedf8dad5ad44fc5b6ba3568ab95ca0be8";
    assert_eq!(request["body_sha256"], expected);
    assert!(request["headers"].as_array().unwrap().contains(&json!(["x-probe", "here"])));
    assert_eq!(request["rank"], 0);
    assert_eq!(rank(&engine).await["requests_total"], 1);
    assert_eq!(post(&engine, "/sim/reset", json!({})).await.status, 200);
    assert_eq!(rank(&engine).await["requests_total"], 0);
    assert_eq!(get(&engine, "/sim/state").await.json()["requests"], json!([]));
}

/// Directory of the small tokenizer.
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer");

#[tokio::test]
async fn a_chats_own_ids_are_used_where_the_release_takes_them() {
    for wire in WIRES {
        let engine = start(wire, |config| config.tokenizer = Some(TOKENIZER.into())).await;
        let messages = json!([{"role": "user", "content": "hello"}]);
        let mut body = json!({"messages": messages, "max_tokens": 1});
        let ids = post(&engine, "/tokenize", json!({"messages": messages})).await.json()["tokens"].clone();
        assert_eq!(post(&engine, "/v1/chat/completions", body.clone()).await.status, 200);
        if wire.is_vllm() {
            body["kv_transfer_params"] = json!({"prompt_token_ids": ids});
        } else {
            body["input_ids"] = ids;
        }
        assert_eq!(post(&engine, "/v1/chat/completions", body).await.status, 200);
        let state = get(&engine, "/sim/state").await.json();
        let [plain, given] = [0, 1].map(|at| state["requests"][at].clone());
        assert_eq!(plain["prompt_sha256"], given["prompt_sha256"], "{wire:?}");
        let takes = wire != Wire::Vllm022;
        assert_eq!((&plain["given_ids"], &given["given_ids"]), (&json!(false), &json!(takes)), "{wire:?}");
        assert_eq!(state["given_ids_total"], u64::from(takes));
    }
}

#[tokio::test]
async fn a_response_is_continued_by_the_engine_that_made_it() {
    let engine = start(Wire::Vllm033, |config| config.tokenizer = Some(TOKENIZER.into())).await;
    let ask = async |previous: Option<&str>, stream: bool| {
        let body = json!({"input": "hello", "max_output_tokens": 2, "previous_response_id": previous, "stream": stream});
        post(&engine, "/v1/responses", body).await
    };
    let first = ask(None, false).await.json();
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("completed")));
    let id = first["id"].as_str().unwrap();
    let second = ask(Some(id), false).await.json();
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    assert!(tokens(&second) > tokens(&first) + 4, "question, answer and question");
    let streamed = ask(Some(id), true).await.text;
    let kinds: Vec<&str> = streamed.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let deltas = ["response.output_text.delta"; 2];
    let expected =
        [&["response.created", "response.in_progress"][..], &deltas, &["response.completed"]].concat();
    assert_eq!(kinds, expected);
    assert_eq!(ask(Some("resp_unknown"), false).await.status, 404);
}
