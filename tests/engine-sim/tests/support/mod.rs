//! What tests of a running simulator share: an HTTP client and a replay client.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)] // Each test uses a part, and fails by panic.

use std::time::Duration;

use bytes::Bytes;
use engine_sim::EngineSim;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

/// How long anything may take on a busy machine before a test gives up.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// A response that has been read to its end.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Answer {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Data lines of an event stream.
    pub(crate) fn data(&self) -> Vec<&str> {
        self.text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http()
}

/// One request on a connection of its own. An error is a connection that broke.
pub(crate) async fn send(
    engine: &EngineSim,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> Result<Answer, String> {
    let mut request =
        http::Request::builder().method(method).uri(format!("http://{}{path}", engine.http_addr()));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    let response = client().request(request).await.map_err(|error| error.to_string())?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?;
    let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
    Ok(Answer { status, text })
}

pub(crate) async fn post(engine: &EngineSim, path: &str, body: Value) -> Answer {
    send(engine, "POST", path, &[], body.to_string()).await.unwrap()
}

pub(crate) async fn get(engine: &EngineSim, path: &str) -> Answer {
    send(engine, "GET", path, &[], String::new()).await.unwrap()
}

/// Runs a completion of token ids and returns its cached tokens.
pub(crate) async fn complete(engine: &EngineSim, prompt: &[u32], max_tokens: u32) -> u64 {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens});
    let answer = post(engine, "/v1/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// The state of rank 0.
pub(crate) async fn rank(engine: &EngineSim) -> Value {
    get(engine, "/sim/state").await.json()["ranks"][0].clone()
}

/// Every batch from `first` on that rank 0 remembers: all frames of the replies.
pub(crate) async fn replay(engine: &EngineSim, first: u64) -> Vec<Vec<Bytes>> {
    let mut socket = DealerSocket::new();
    socket.connect(&engine.replay_endpoints()[0]).await.unwrap();
    let frames = vec![Bytes::new(), Bytes::copy_from_slice(&first.to_be_bytes())];
    socket.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = socket.recv().await.unwrap().into_vec();
        let end = frames[frames.len() - 2].as_ref() == [0xff; 8];
        batches.push(frames);
        if end {
            return batches;
        }
    }
}

/// Asks for the state of rank 0 until `reached`, and returns it.
pub(crate) async fn until(engine: &EngineSim, reached: impl Fn(&Value) -> bool) -> Value {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        let state = rank(engine).await;
        if reached(&state) {
            return state;
        }
        assert!(tokio::time::Instant::now() < deadline, "never reached: {state}");
        // Each question takes a connection; asking at full speed uses up the ports.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
