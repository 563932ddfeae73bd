//! What clients send and what workers get; what clients read when it cannot be served.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::HeaderValue;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::harness::{
    MODEL, Router, Setup, engine, head, id, long, peak_kib, received, sha256, unique, until,
};
use crate::kubernetes::address;
use crate::raw_worker::{RawWorker, Received, chunk};

const CHAT: &str = "/v1/chat/completions";

/// A whole answer.
fn ok(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").into()
}

/// Case A22.
#[tokio::test]
async fn a_body_that_is_no_object_is_the_clients_mistake() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&id(&only)])).await;
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    let whole = json!({"model": MODEL, "messages": long(1)}).to_string();
    let bodies: [(&str, &[u8]); 11] = [
        ("empty", b""),
        ("a list", b"[]"),
        ("a number", b"7"),
        ("null", b"null"),
        ("open", b"{"),
        ("truncated", &whole.as_bytes()[..whole.len() / 2]),
        ("truncated UTF-8", b"{\"model\": \"\xc3"),
        ("trailing garbage", b"{} x"),
        ("deep", deep.as_bytes()),
        ("no number", b"{\"a\":NaN}"),
        ("no end", b"{\"a\":-Infinity}"),
    ];
    for (why, body) in bodies {
        let answer = router.send(CHAT, &[], body.to_vec()).await;
        assert_eq!(answer.status, 400, "{why}: {}", answer.text());
        let error = answer.json().unwrap()["error"].clone();
        assert_eq!(error["type"], "invalid_request_error", "{why}");
        assert!(error["message"].as_str().unwrap().ends_with('.'), "{why}: {error}");
    }
    assert!(received(&only).await.is_empty(), "none was forwarded");
    assert_eq!(router.metric("kvrouter_leases_booked", "").await, 0.0);
}

/// Case D11.
#[tokio::test]
async fn an_unknown_model_is_a_404_that_lists_the_known_ones() {
    let only = engine(|config| config.lora = vec!["poet".parse().unwrap()]).await;
    let router = Router::start(Setup::in_turn(&[&id(&only)])).await;
    let answer = router.post(CHAT, json!({"model": "other", "messages": long(1)})).await;
    assert_eq!(answer.status, 404);
    let error = answer.json().unwrap()["error"].clone();
    assert_eq!(error["code"], "model_not_found");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("other") && message.contains(MODEL) && message.contains("poet"), "{message}");
    let answer = router.post(CHAT, json!({"model": "poet", "messages": long(1), "max_tokens": 1})).await;
    assert_eq!(answer.status, 200, "an adapter is a model: {}", answer.text());
    assert_eq!(router.post(CHAT, json!({"model": 5, "messages": long(1)})).await.status, 400);
}

/// Case D07.
#[tokio::test]
async fn an_empty_fleet_is_a_503_after_a_bounded_wait() {
    let router = Router::start(Setup::of(Vec::new()).more("limits: {noWorkerWaitSeconds: 1}")).await;
    let began = Instant::now();
    let answer = router.post(CHAT, json!({"model": MODEL, "messages": long(1)})).await;
    let waited = began.elapsed();
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(waited >= Duration::from_millis(900) && waited < Duration::from_secs(5), "{waited:?}");
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.json().unwrap()["error"]["code"], "no_worker");
    assert!(router.has_problem("no_workers", None).await);
    assert_eq!(router.get("/livez").await.status, 200);
}

/// Case D07: so many may wait, and one more is told at once when to come back.
#[tokio::test]
async fn requests_that_wait_for_a_worker_have_a_limit() {
    let limits = "limits: {noWorkerWaitSeconds: 20, noWorkerWaitRequests: 2}";
    let late = engine(|_| {}).await;
    crate::harness::fault(&late, json!({"health": "fail"})).await;
    let router = Router::start_cold(Setup::zmq(&[&late]).more(limits)).await;
    until("the worker is seen as unhealthy", async || {
        router.has_problem("unhealthy", Some(&id(&late))).await.then_some(())
    })
    .await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let (client, url, body) = (router.client.clone(), router.url(CHAT), body.clone());
            tokio::spawn(async move { client.post(&url, &body).await.unwrap() })
        })
        .collect();
    let count = async |expected: f64| {
        let waiting =
            async || (router.metric("kvrouter_pool", "requests_waiting").await == expected).then_some(());
        until("as many wait", waiting).await;
    };
    count(2.0).await;
    let request = unique();
    let began = Instant::now();
    let refused = router.send(CHAT, &[("x-request-id", &request)], body.to_string()).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((refused.status, &refused.headers["retry-after"]), (503, &HeaderValue::from_static("1")));
    assert_eq!(refused.json().unwrap()["error"]["code"], "overloaded_waiting");
    assert!(refused.text().contains("limits.noWorkerWaitRequests"), "{}", refused.text());
    assert_eq!(router.receipts(&request).await[0]["result"]["failure"], "overloaded_waiting");
    assert_eq!(router.metric("kvrouter_attempt_failures_total", "overloaded_waiting").await, 1.0);
    crate::harness::fault(&late, json!({"health": "ok"})).await;
    for answer in waiting {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    count(0.0).await;
    let answer = router.post(CHAT, body).await;
    assert_eq!(answer.status, 200, "the places are free again: {}", answer.text());
}

/// Case D07: the wait ends as soon as somebody is ready.
#[tokio::test]
async fn a_request_waits_for_the_first_worker() {
    let late = engine(|_| {}).await;
    crate::harness::fault(&late, json!({"health": "fail"})).await;
    let router = Router::start_cold(Setup::zmq(&[&late]).more("limits: {noWorkerWaitSeconds: 15}")).await;
    until("the worker is seen as unhealthy", async || {
        router.has_problem("unhealthy", Some(&id(&late))).await.then_some(())
    })
    .await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let recover = crate::harness::fault(&late, json!({"health": "ok"}));
    let (answer, ()) = tokio::join!(router.post(CHAT, body), recover);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// Case A15.
#[tokio::test]
async fn a_body_is_forwarded_byte_for_byte() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    let bodies = [
        format!(
            "{{ \"model\":\"{MODEL}\",\n\t\"messages\": [{{\"content\":\"\\u00e9 \u{e9}\",\"role\":\"user\"}}], \"max_tokens\": 1,\"zeta\":1,\"alpha\":[1.0,1e5,-0.0],\"big\":123456789012345678901234567890,\"huge\":1.5e300,\"return_token_ids\":true,\"nested\":{{\"b\":{{\"a\":null}},\"a\":[]}}}}"
        ),
        format!(
            "{{\"model\":\"{MODEL}\",\"max_tokens\":3,\"max_tokens\":1,\"messages\":[{{\"role\":\"user\",\"content\":\"twice\"}}]}}   \n"
        ),
    ];
    for body in bodies {
        let answer = router.send(CHAT, &[], body.clone()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let last = received(&only).await.last().unwrap().clone();
        assert_eq!(last["body_sha256"], sha256(body.as_bytes()));
        assert_eq!(last["body_bytes"], body.len());
    }
}

/// Case A15: what the router itself cannot read as a whole arrives as it came, too.
#[tokio::test]
async fn numbers_out_of_range_and_unknown_fields_pass_byte_for_byte() {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&bodies);
    let worker = RawWorker::start(move |received| {
        if received.head.starts_with(&format!("POST {CHAT} ")) {
            kept.lock().unwrap().push(received.body);
        }
        vec![ok("{}")]
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let unknown: String = (0..20)
        .map(|at| {
            format!(
                ",\n \"x_{at}\" : {{\"b\":[{{\"a\\u00{at:02}\":null}} , 1.0,1E5],\"a\":{{}}, \"b\":{}}}",
                u64::MAX - at
            )
        })
        .collect();
    for number in ["1e400", "-1e400", "1e-400", "123456789012345678901234567890", "-0.0"] {
        let body =
            format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}}],\"x\":{number}{unknown}}}\n");
        let answer = router.send(CHAT, &[], body.clone()).await;
        assert_eq!(answer.status, 200, "{number}: {}", answer.text());
        let arrived = bodies.lock().unwrap().pop().unwrap();
        assert_eq!(String::from_utf8_lossy(&arrived), body, "{number}");
    }
}

/// Case A25: bodies up to the limit, in chunks of any size.
#[tokio::test]
async fn chunked_bodies_arrive_whole() {
    let arrived = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&arrived);
    let worker = RawWorker::start(move |received| {
        if received.head.starts_with(&format!("POST {CHAT} ")) {
            kept.lock().unwrap().push((received.body.len(), sha256(&received.body)));
        }
        vec![ok("{}")]
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    for (seed, length) in [(1, 1 << 20), (2, (9 << 20) + 13), (3, 64 << 20)] {
        // An xorshift: the same sizes in every run.
        let mut state: u64 = 0x9e37_79b9_7f4a_7c15_u64.rotate_left(seed);
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let (start, end) = ("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"x\":\"", "\"}");
        let letters: String = (0..4096).map(|_| char::from(b'a' + (random() % 26) as u8)).collect();
        let rest = length - start.len() - end.len();
        let body = format!("{start}{}{}{end}", letters.repeat(rest / 4096), &letters[..rest % 4096]);
        assert_eq!(body.len(), length);
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        let mut client = router.connect().await;
        client.write_all(head.as_bytes()).await.unwrap();
        let mut left = body.as_bytes();
        while !left.is_empty() {
            // From one byte on, and more than any buffer.
            let most = 1 << (random() % 21);
            let (piece, more) = left.split_at((random() as usize % most + 1).min(left.len()));
            client.write_all(&chunk(piece)).await.unwrap();
            left = more;
        }
        client.write_all(b"0\r\nx-trailer: 1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "seed {seed}: {answer}");
        let found = arrived.lock().unwrap().pop();
        assert_eq!(found, Some((length, sha256(body.as_bytes()))), "seed {seed}");
    }
}

/// Case A24: uploads that hardly move hold what they have sent, not what they announced, and nobody else up.
#[tokio::test]
async fn slow_uploads_hinder_nobody() {
    const UPLOADS: usize = 200;
    const ANNOUNCED: usize = 10_000_000;
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&id(&only)])).await;
    let chat = json!({"messages": long(1), "max_tokens": 1});
    assert_eq!(router.post(CHAT, chat.clone()).await.status, 200);
    let before = peak_kib(router.process.id());
    let mut uploads = Vec::new();
    for _ in 0..UPLOADS {
        let mut client = router.connect().await;
        client.write_all(head(CHAT, ANNOUNCED).as_bytes()).await.unwrap();
        uploads.push(client);
    }
    for round in 0..4 {
        for client in &mut uploads {
            client.write_all(&[b' '; 1024]).await.unwrap();
        }
        let answer = timeout(Duration::from_secs(5), router.post(CHAT, chat.clone())).await;
        assert_eq!(answer.expect("an answer at once").status, 200, "round {round}");
    }
    let grown = peak_kib(router.process.id()) - before;
    assert!(grown < 64 << 10, "{grown} KiB for {UPLOADS} uploads of a few KiB");
    assert_eq!(received(&only).await.len(), 5, "no upload is through");
    drop(uploads);
    assert_eq!(router.post(CHAT, chat).await.status, 200);
    router.is_idle().await;
}

/// Case D10: a worker behind a mesh gets HTTP/1.1 with its own name, whatever the client called the router.
#[tokio::test]
async fn workers_are_asked_by_their_own_name() {
    let worker = RawWorker::start(|received| {
        let line = received.head.lines().next().unwrap().to_owned();
        vec![ok(&json!({"line": line, "host": received.header("host")}).to_string())]
    })
    .await;
    // The name in the URL, not the address that it leads to.
    let name = format!("localhost:{}", worker.address.port());
    let setup = Setup::in_turn(&[&name]).more("limits: {noWorkerWaitSeconds: 20}");
    let router = Router::start(setup).await;
    for host in ["router.example", "router.example:80", &name] {
        let seen = router.send(CHAT, &[("host", host)], json!({"messages": []}).to_string()).await;
        let expected = json!({"line": format!("POST {CHAT} HTTP/1.1"), "host": name});
        assert_eq!(seen.json().unwrap(), expected, "{host}");
    }
}

/// Case D10: a worker at port 80 is named without its port, with or without one in its URL; and an offer of
/// another protocol is not taken up.
#[tokio::test]
async fn a_worker_at_port_80_is_asked_in_plain_http_1() {
    let ip = address();
    let script = |received: Received| {
        let line = received.head.lines().next().unwrap().to_owned();
        let body =
            json!({"line": line, "host": received.header("host"), "upgrade": received.header("upgrade")});
        let answer = String::from_utf8(ok(&body.to_string())).unwrap();
        vec![answer.replacen("\r\n", "\r\nupgrade: h2c\r\n", 1).into_bytes()]
    };
    let _worker = match RawWorker::at(&format!("{ip}:80"), script).await {
        Ok(worker) => worker,
        // Linux keeps the port for root unless net.ipv4.ip_unprivileged_port_start says otherwise.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return,
        Err(error) => panic!("{error}"),
    };
    for url in [ip.clone(), format!("{ip}:80")] {
        let router = Router::start(Setup::in_turn(&[&url])).await;
        assert_eq!(router.report().await["workers"][0]["worker"], format!("{ip}:80"));
        let host = ("host", "router.example:8080");
        for _ in 0..2 {
            let seen =
                router.send(CHAT, &[host, ("upgrade", "h2c")], json!({"messages": []}).to_string()).await;
            assert_eq!((seen.status, seen.headers.get("upgrade")), (200, None));
            let expected = json!({"line": format!("POST {CHAT} HTTP/1.1"), "host": ip, "upgrade": null});
            assert_eq!(seen.json().unwrap(), expected);
        }
    }
}

/// Case D11: engines that serve a model under several names list them all, and each is that model.
#[tokio::test]
async fn another_name_of_the_model_is_the_model() {
    let models = json!({"data": [{"id": MODEL, "root": "/m"}, {"id": "alias", "root": "/m"}]}).to_string();
    let worker = RawWorker::with_models(models, |_| vec![ok("{}")]).await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let mut namespaces = Vec::new();
    for name in [MODEL, "alias"] {
        let request = unique();
        let body = json!({"model": name, "messages": long(1)}).to_string();
        let answer = router.send(CHAT, &[("x-request-id", &request)], body).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
        namespaces.push(router.receipts(&request).await[0]["namespace"].clone());
    }
    assert_eq!(namespaces[0], namespaces[1], "one cache");
    for unknown in ["Alias", " alias", "alias "] {
        let answer = router.post(CHAT, json!({"model": unknown, "messages": long(1)})).await;
        let message = answer.json().unwrap()["error"]["message"].to_string();
        assert_eq!(answer.status, 404, "{unknown:?}: names are compared letter by letter");
        assert!(message.contains("alias, ") || message.contains(", alias"), "{message}");
    }
}

/// Case A25: a large body, whole.
#[tokio::test]
async fn a_large_body_arrives_whole() {
    let only = engine(|_| {}).await;
    let router =
        Router::start(Setup::in_turn(&[&id(&only)]).more("limits: {requestBodyBytes: 4000000}")).await;
    let padding = "x".repeat(3_000_000);
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "user": padding});
    assert_eq!(router.post(CHAT, body.clone()).await.status, 200);
    assert_eq!(received(&only).await[0]["body_bytes"], body.to_string().len());
    let larger = json!({"model": MODEL, "messages": [], "user": "x".repeat(4_000_001)});
    let answer = router.post(CHAT, larger).await;
    assert_eq!((answer.status, &answer.json().unwrap()["error"]["code"]), (413, &json!("body_too_large")));
}

/// Case A14.
#[tokio::test]
async fn hop_by_hop_headers_stay_behind_both_ways() {
    let worker = RawWorker::start(|received| {
        let seen: Vec<String> = received.head.lines().map(str::to_ascii_lowercase).collect();
        let body = json!({"seen": seen, "length": received.body.len()}).to_string();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close, x-worker-hop\r\nkeep-alive: timeout=5\r\nx-worker-hop: 1\r\nx-worker-own: 2\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: {}\r\n\r\n", body.len());
        vec![head.into(), body.into()]
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let headers = [
        ("connection", "close, x-client-hop"),
        ("x-client-hop", "1"),
        ("te", "trailers"),
        ("expect", "100-continue"),
        ("keep-alive", "timeout=9"),
        ("proxy-authorization", "secret"),
        ("authorization", "Bearer mine"),
        ("traceparent", "00-1-2-01"),
        ("accept", "a"),
        ("accept", "b"),
    ];
    let answer = router.send(CHAT, &headers, json!({"messages": []}).to_string()).await;
    let seen = answer.json().unwrap()["seen"].to_string();
    for gone in ["x-client-hop", "te: ", "expect", "keep-alive", "proxy-authorization"] {
        assert!(!seen.contains(gone), "{gone} in {seen}");
    }
    for kept in ["authorization: bearer mine", "traceparent: 00-1-2-01", "accept: a", "accept: b"] {
        assert!(seen.contains(kept), "{kept} not in {seen}");
    }
    let back = &answer.headers;
    assert!(!back.contains_key("x-worker-hop") && !back.contains_key("keep-alive"), "{back:?}");
    assert_eq!(back["x-worker-own"], "2");
    assert_eq!(back.get_all("set-cookie").iter().count(), 2);
}

/// Case A14: framing that two parsers may read differently is refused.
#[tokio::test]
async fn two_lengths_of_one_body_are_refused() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&id(&only)])).await;
    let heads = [
        "content-length: 2\r\ncontent-length: 3\r\n",
        "content-length: -1\r\n",
        "transfer-encoding: banana\r\n",
    ];
    for head in heads {
        let mut stream = TcpStream::connect(&router.at.http).await.unwrap();
        let request = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}\r\n{{}}x");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 400 "), "{head:?}: {answer}");
    }
    assert!(received(&only).await.is_empty());
}

/// Case A22: a body that ends early.
#[tokio::test]
async fn a_body_that_ends_early_reaches_no_worker() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&id(&only)])).await;
    let mut stream = TcpStream::connect(&router.at.http).await.unwrap();
    let request = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{\"model\":");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    // The connection may be closed with or without an answer; what counts is the worker.
    let _ = stream.read_to_end(&mut answer).await;
    assert_eq!(router.post(CHAT, json!({"messages": long(1), "max_tokens": 1})).await.status, 200);
    assert_eq!(received(&only).await.len(), 1);
    router.is_idle().await;
}

/// Case A11.
#[tokio::test]
async fn a_worker_that_announces_too_much_does_not_pass_for_whole() {
    let worker = RawWorker::start(|received| {
        let length: usize = received.header("x-length").unwrap().parse().unwrap();
        let body = json!({"error": {"message": "too long", "type": "invalid_request_error"}}).to_string();
        let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
        vec![head.into(), body.into()]
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let exact = json!({"error": {"message": "too long", "type": "invalid_request_error"}}).to_string().len();
    let body = json!({"messages": []}).to_string();
    let answer = router.send(CHAT, &[("x-length", &exact.to_string())], body.clone()).await;
    assert_eq!((answer.status, answer.body.len()), (400, exact));
    assert_eq!(answer.json().unwrap()["error"]["message"], "too long");
    // More announced than sent: the client must see that it is not whole.
    let headers = [("x-length", "4000")];
    let url = router.url(CHAT);
    let cut = router.client.send(http::Method::POST, &url, &headers, body.into()).await;
    assert!(cut.is_err(), "{cut:?}");
    assert_eq!(worker.posts(), 2);
    router.is_idle().await;
}

/// Case A12: what a worker compressed passes as it is.
#[tokio::test]
async fn an_encoded_body_keeps_its_header_and_its_bytes() {
    const SQUEEZED: &[u8] = b"\x1f\x8b\x08\x00not really gzip\xff";
    let worker = RawWorker::start(|_| {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", SQUEEZED.len());
        vec![head.into(), SQUEEZED.to_vec()]
    })
    .await;
    let router = Router::start(Setup::in_turn(&[&worker.address.to_string()])).await;
    let answer = router.send(CHAT, &[("accept-encoding", "gzip")], json!({"messages": []}).to_string()).await;
    assert_eq!(answer.headers["content-encoding"], "gzip");
    assert_eq!(&*answer.body, SQUEEZED);
}

/// Case D08.
#[tokio::test]
async fn a_worker_without_a_model_gets_nothing() {
    let loading =
        RawWorker::with_models("{\"object\":\"list\",\"data\":[]}".to_owned(), |_| Vec::new()).await;
    let ready = engine(|_| {}).await;
    let router = Router::start(Setup::in_turn(&[&loading.address.to_string(), &id(&ready)])).await;
    for _ in 0..4 {
        let answer = router.post(CHAT, json!({"messages": long(1), "max_tokens": 1})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(loading.posts(), 0);
    assert!(router.has_problem("no_model", Some(&loading.address.to_string())).await);
}

/// Case D12.
#[tokio::test]
async fn an_odd_list_of_models_hides_no_other() {
    let odd = [
        "not json".to_owned(),
        "{\"data\": 7}".to_owned(),
        format!(
            "{{\"data\":[5,{{\"id\":null}},{{\"id\":\"{MODEL}\"}},{{\"id\":\"extra\",\"parent\":\"{MODEL}\"}}]}}"
        ),
    ];
    let mut workers = Vec::new();
    for models in odd {
        workers.push(RawWorker::with_models(models, |_| Vec::new()).await);
    }
    let plain = engine(|_| {}).await;
    let mut addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    addresses.push(id(&plain));
    let router =
        Router::start(Setup::in_turn(&addresses.iter().map(String::as_str).collect::<Vec<_>>())).await;
    let answer = router.get("/v1/models").await;
    assert_eq!(answer.status, 200);
    let data = answer.json().unwrap()["data"].clone();
    let names: Vec<&Value> = data.as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, [&json!("extra"), &json!(MODEL)]);
}

/// A path that we do not know goes to a worker by load, and its answer comes back.
#[tokio::test]
async fn an_unknown_path_is_forwarded() {
    let only = engine(|_| {}).await;
    let router = Router::start(Setup::zmq(&[&only])).await;
    let answer = router.post("/tokenize", json!({"model": MODEL, "prompt": "hello"})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.json().unwrap()["count"].as_u64().unwrap() > 0);
    let answer = router.post("/v1/embeddings", json!({"model": MODEL, "input": "hello"})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(router.get("/version").await.status, 200);
    assert_eq!(router.get("/no/such/path").await.status, 404);
    router.is_idle().await;
}
