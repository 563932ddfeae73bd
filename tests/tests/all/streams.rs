//! Streams pass as they are, however they are cut, and end once however they end.

use std::cell::Cell;
use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use kvrouter_tests::sse::Events;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::{Instant, timeout};

use crate::harness::{MODEL, Router, Setup, engine, fault, head, id, long, total, unique, until, within};
use crate::raw_worker::{RawWorker, STREAM_HEAD, chunk};

const CHAT: &str = "/v1/chat/completions";
/// How long work may go on for a client that left.
const SOON: Duration = Duration::from_secs(1);

/// Two events, a comment, both line ends, a two-byte character, and usage at the end.
const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"h\u{e9}\"}}]}\r\n\r\n: ping\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

fn streaming() -> Value {
    json!({"model": MODEL, "messages": long(1), "max_tokens": 400, "stream": true,
           "stream_options": {"include_usage": true}})
}

/// Cases A01 and A02.
#[tokio::test]
async fn every_cut_of_a_stream_arrives_as_it_was() {
    let cutter = RawWorker::start(|received| {
        let cut: usize = received.header("x-cut").unwrap().parse().unwrap();
        let (head, tail) = STREAM.as_bytes().split_at(cut);
        let mut pieces = vec![STREAM_HEAD.into()];
        let parts = [head, tail].into_iter().filter(|part| !part.is_empty());
        pieces.extend(parts.map(chunk));
        pieces.push(chunk(b""));
        pieces
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&cutter.address.to_string()])).await;
    let body = streaming().to_string();
    for cut in 0..=STREAM.len() {
        let cut_at = cut.to_string();
        let answer = router.send("/v1/chat/completions", &[("x-cut", &cut_at)], body.clone()).await;
        assert_eq!(answer.text(), STREAM, "cut at {cut}");
    }
    let count = (STREAM.len() + 1) as f64;
    assert_eq!(cutter.posts() as f64, count);
    assert_eq!(router.metric("kvrouter_engine_prompt_tokens_total", "").await, 9.0 * count);
    assert_eq!(router.metric("kvrouter_engine_cached_tokens_total", "").await, 4.0 * count);
    router.is_idle().await;
}

/// Case A29: after the first byte.
#[tokio::test]
async fn a_worker_that_dies_in_a_stream_ends_it_with_one_error_and_no_second_start() {
    // Slow enough that each chunk is sent before the next one exists.
    let (a, b) = (engine(|config| config.step_ms = 25.0).await, engine(|config| config.step_ms = 25.0).await);
    let router = Router::start(Setup::in_turn(&[&id(&a), &id(&b)])).await;
    fault(&a, json!({"die_after_chunks": 3})).await;
    fault(&b, json!({"die_after_chunks": 3})).await;
    let request = unique();
    let answer =
        router.send("/v1/chat/completions", &[("x-request-id", &request)], streaming().to_string()).await;
    assert_eq!(answer.status, 200);
    let mut events = Events::default();
    let events: Vec<Value> =
        events.push(&answer.body).iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events.len(), 4, "three chunks and the error: {events:?}");
    let error = &events[3]["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("mid_stream_failure")));
    let roles = events.iter().filter(|event| event.pointer("/choices/0/delta/role").is_some()).count();
    assert_eq!(roles, 1, "{events:?}");
    assert_eq!(total(&a, "requests_total").await + total(&b, "requests_total").await, 1);
    let receipts = router.receipts(&request).await;
    assert_eq!(receipts.len(), 1);
    assert_eq!(receipts[0]["result"]["failure"], "mid_stream_failure");
    router.is_idle().await;
}

/// Cases A08 and G21.
#[tokio::test]
async fn a_client_that_leaves_a_stream_ends_the_work() {
    let slow = engine(|config| config.step_ms = 20.0).await;
    let router = Router::start(Setup::zmq(&[&slow])).await;
    let (url, body) = (router.url("/v1/chat/completions"), streaming().to_string());
    for _ in 0..5 {
        let answer = router.client.open(Method::POST, &url, &[], body.clone().into()).await.unwrap();
        let mut stream = answer.into_body();
        stream.frame().await.unwrap().unwrap();
        drop(stream);
    }
    gone(&slow, 5).await;
    router.is_idle().await;
    assert_eq!(router.metric("kvrouter_leases_booked", "").await, 5.0);
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "client_gone").await, 5.0);
}

/// Case A04: nothing was answered yet, and nothing will be streamed.
#[tokio::test]
async fn a_client_that_leaves_before_the_answer_ends_the_work() {
    let slow = engine(|config| config.step_ms = 20.0).await;
    let router = Router::start(Setup::zmq(&[&slow])).await;
    let (url, body) = (router.url("/v1/chat/completions"), json!({"messages": long(1), "max_tokens": 400}));
    let sent = router.client.open(Method::POST, &url, &[], body.to_string().into());
    let begun = until("the engine works", async || (total(&slow, "running").await == 1).then_some(()));
    tokio::select! {
        answer = sent => panic!("answered: {answer:?}"),
        () = begun => {}
    }
    gone(&slow, 1).await;
    router.is_idle().await;
}

async fn gone(engine: &engine_sim::EngineSim, aborted: u64) {
    within(SOON, "the engine has nothing to do", async || {
        let working = total(engine, "running").await + total(engine, "waiting").await;
        (working == 0 && total(engine, "aborted_total").await == aborted).then_some(())
    })
    .await;
}

/// Cases A04 and K40: a client that closes its side of the connection looks like one that left, until something is
/// written to it. Its work ends, and it is not left to wait for an answer.
#[tokio::test]
async fn a_client_that_closes_its_side_counts_as_one_that_left() {
    let slow = engine(|config| config.step_ms = 20.0).await;
    let router = Router::start(Setup::zmq(&[&slow])).await;
    let body = json!({"messages": long(1), "max_tokens": 400}).to_string();
    let mut client = router.connect().await;
    client.write_all(format!("{}{body}", head(CHAT, body.len())).as_bytes()).await.unwrap();
    until("the engine works", async || (total(&slow, "running").await == 1).then_some(())).await;
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    timeout(SOON, client.read_to_end(&mut answer)).await.expect("the other side closes too").unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), "");
    gone(&slow, 1).await;
    router.is_idle().await;
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "client_gone").await, 1.0);
}

/// Case A06: clients that leave while the head is being sent to them, and in the middle of the first piece.
#[tokio::test]
async fn an_answer_that_breaks_off_at_its_beginning_is_released_once() {
    // More than the sockets between take, with a client that does not read.
    const MUCH: usize = 8 << 20;
    let worker = RawWorker::start(|received| {
        let first = match received.header("x-large") {
            Some("head") => {
                let large = format!("x-large: {}\r\n", "x".repeat(60_000)).repeat(5);
                vec![STREAM_HEAD.replacen("\r\n", &format!("\r\n{large}"), 1).into(), chunk(b"data: {}\n\n")]
            }
            _ => vec![STREAM_HEAD.into(), chunk(&vec![b'x'; MUCH])],
        };
        [first, vec![Vec::new()]].concat()
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let body = streaming().to_string();
    for (count, large) in ["head", "piece"].into_iter().enumerate() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut client = socket.connect(router.at.http.parse().unwrap()).await.unwrap();
        let head = head(CHAT, body.len()).replacen("\r\n", &format!("\r\nx-large: {large}\r\n"), 1);
        client.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        let mut begun = [0; 12];
        client.read_exact(&mut begun).await.unwrap();
        assert_eq!(&begun, b"HTTP/1.1 200");
        assert_eq!(worker.answering(), 1, "{large}: it goes on");
        drop(client);
        within(SOON, "the worker's connection is closed", async || (worker.answering() == 0).then_some(()))
            .await;
        router.is_idle().await;
        let booked = router.metric("kvrouter_leases_booked", "").await;
        assert_eq!((booked, worker.posts()), (count as f64 + 1.0, count + 1), "{large}: once");
        assert_eq!(router.metric("kvrouter_attempt_failures_total", "client_gone").await, booked, "{large}");
    }
}

/// Cases A08 and A09: thirty clients leave large answers together; the workers' connections are closed at once,
/// and probes are answered meanwhile.
#[tokio::test]
async fn many_large_answers_that_are_left_end_at_once_and_hold_up_no_probe() {
    const CLIENTS: usize = 30;
    /// 5 MiB, in pieces of 64 KiB. More would come, so that no answer is over when its client leaves.
    const PIECES: usize = 80;
    let worker = RawWorker::start(|_| {
        let event = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n", "x".repeat(64 << 10));
        let pieces = std::iter::repeat_n(chunk(event.as_bytes()), PIECES);
        [STREAM_HEAD.into()].into_iter().chain(pieces).chain([Vec::new()]).collect()
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let (url, body) = (router.url(CHAT), streaming().to_string());
    let mut streams = Vec::new();
    for _ in 0..CLIENTS {
        let answer = router.client.open(Method::POST, &url, &[], body.clone().into()).await.unwrap();
        let mut stream = answer.into_body();
        stream.frame().await.unwrap().unwrap();
        streams.push(stream);
    }
    assert_eq!(worker.answering(), CLIENTS, "none is through");
    drop(streams);
    let slowest = Cell::new(Duration::ZERO);
    within(SOON, "all connections to the worker are closed", async || {
        let began = Instant::now();
        assert_eq!(router.get("/readyz").await.status, 200);
        slowest.set(slowest.get().max(began.elapsed()));
        (worker.answering() == 0).then_some(())
    })
    .await;
    // The kubelet gives a probe a second.
    assert!(slowest.get() < SOON / 2, "{slowest:?}");
    router.is_idle().await;
}

/// A break inside an event still leaves the error readable. Case A29.
#[tokio::test]
async fn a_break_inside_an_event_leaves_the_error_readable() {
    let broken = RawWorker::start(|_| vec![STREAM_HEAD.into(), chunk(b"data: {\"choices\":[")]).await;
    let router = Router::start(Setup::in_turn(&[&broken.address.to_string()])).await;
    let answer = router.post("/v1/chat/completions", streaming()).await;
    let events = Events::default().push(&answer.body);
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "mid_stream_failure");
    assert_eq!(broken.posts(), 1);
    router.is_idle().await;
}

/// A long answer is not cut by the router's own limits.
#[tokio::test]
async fn a_stream_may_outlast_the_first_byte_limit() {
    let slow = engine(|config| config.step_ms = 30.0).await;
    let limits = "limits: {firstByteTimeoutSeconds: 1}";
    let router = Router::start(Setup::zmq(&[&slow]).more(limits)).await;
    let mut body = streaming();
    body["max_tokens"] = json!(50);
    let chat = router.client.chat(&router.url("/v1/chat/completions"), &unique(), &body).await.unwrap();
    assert!(chat.total > Duration::from_millis(1200), "{:?}", chat.total);
    assert_eq!(chat.completion_tokens, 50);
}

/// Case A07: workers whose connections end in an error, wherever in their answer: what was booked is released
/// once, and no count falls below zero.
#[tokio::test]
async fn a_connection_that_breaks_while_it_is_closed_releases_what_was_booked() {
    const EVENT: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}".to_vec();
    let [head, event, done, end] =
        [STREAM_HEAD.as_bytes().to_vec(), chunk(EVENT), chunk(b"data: [DONE]\n\n"), chunk(b"")];
    let open = Vec::new();
    for (why, pieces, leaves) in [
        ("before the head", vec![], false),
        ("behind the head", vec![head.clone()], false),
        ("in the middle", vec![head.clone(), event.clone()], false),
        ("behind the last event", vec![head.clone(), event.clone(), done.clone()], false),
        ("behind the end", vec![head.clone(), event.clone(), [done, end].concat()], false),
        ("behind a whole body", vec![whole], false),
        ("when the client has left", vec![head, event, open], true),
    ] {
        let pieces_of = pieces.clone();
        let worker = RawWorker::resetting(move |_| pieces_of.clone()).await;
        let alone = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
        let entry =
            |role: &str| format!("{{url: \"http://{}\", role: {role}, protocol: SGLang}}", worker.address);
        let other = RawWorker::resetting(move |_| pieces.clone()).await;
        let decode = entry("Decode").replace(&worker.address.to_string(), &other.address.to_string());
        let workers = vec![entry("Prefill"), decode];
        let pair =
            Router::start(Setup { events: "{transport: None}".to_owned(), ..Setup::of(workers) }).await;
        for router in [&alone, &pair] {
            until("all workers are ready", async || {
                let report = router.report().await;
                report["workers"].as_array().unwrap().iter().all(|one| one["ready"] == true).then_some(())
            })
            .await;
            let asked = futures::future::join_all((0..8).map(|_| async {
                let url = router.url("/v1/chat/completions");
                let Ok(answer) =
                    router.client.open(Method::POST, &url, &[], streaming().to_string().into()).await
                else {
                    return;
                };
                let mut body = answer.into_body();
                while let Some(Ok(_)) = body.frame().await {
                    if leaves {
                        break;
                    }
                }
            }));
            tokio::pin!(asked);
            let mut looks = 0;
            while futures::FutureExt::now_or_never(&mut asked).is_none() {
                nothing_is_negative(router, why).await;
                looks += 1;
                assert!(looks < 2000, "{why}: clients wait for ever");
            }
            router.is_idle().await;
            nothing_is_negative(router, why).await;
            assert!(router.metric("kvrouter_leases_booked", "").await >= 8.0, "{why}");
        }
    }
}

async fn nothing_is_negative(router: &Router, why: &str) {
    let text = router.client.get(&format!("http://{}/metrics", router.at.metrics)).await.unwrap().text();
    let negative: Vec<&str> = text.lines().filter(|line| line.contains(" -")).collect();
    let negative: Vec<&&str> = negative.iter().filter(|line| !line.starts_with('#')).collect();
    assert!(text.contains("kvrouter_target_requests") && negative.is_empty(), "{why}: {negative:?}");
}
