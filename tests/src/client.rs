//! A plain HTTP/1.1 client: whole answers, and streamed chats with the times of their tokens.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pooled;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;
use tokio::time::Instant;

use crate::sse::Events;

/// Servers close idle connections after 5 s (uvicorn); one used at that moment would fail.
const IDLE: Duration = Duration::from_secs(4);

/// Sends requests; clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    pooled: Pooled<HttpConnector, Full<Bytes>>,
}

/// An answer that was read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: http::HeaderMap,
    /// Its body.
    pub body: Bytes,
}

/// What one streamed chat took and gave.
#[derive(Clone, Debug)]
pub struct Chat {
    /// The answer's text.
    pub text: String,
    /// From sending to the first token.
    pub first_token: Duration,
    /// From sending to the end.
    pub total: Duration,
    /// Prompt tokens as the engine counted them.
    pub prompt_tokens: u64,
    /// Prompt tokens that the engine found in its cache, as it reports them.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
}

impl Client {
    /// A client with connections of its own.
    pub fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pooled = Pooled::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Self { pooled }
    }

    /// Sends a request; the answer's body is still to be read.
    ///
    /// Dropping the body before its end closes the connection.
    pub async fn open(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).with_context(|| format!("bad request for {url}"))?;
        self.pooled.request(request).await.with_context(|| format!("failed to reach {url}"))
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        let (head, body) = self.open(method, url, headers, body).await?.into_parts();
        let body = body.collect().await.with_context(|| format!("the answer of {url} broke off"))?;
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body: body.to_bytes() })
    }

    /// The whole answer to `GET url`.
    pub async fn get(&self, url: &str) -> anyhow::Result<Answer> {
        self.send(Method::GET, url, &[], Bytes::new()).await
    }

    /// The whole answer to a posted JSON body.
    pub async fn post(&self, url: &str, body: &Value) -> anyhow::Result<Answer> {
        let headers = [("content-type", "application/json")];
        self.send(Method::POST, url, &headers, Bytes::from(body.to_string())).await
    }

    /// Runs a streamed chat completion to its end. `body` must ask for a stream with usage. Fails
    /// on any status but 200, on an error in the stream, and on a stream without usage.
    pub async fn chat(&self, url: &str, request_id: &str, body: &Value) -> anyhow::Result<Chat> {
        let began = Instant::now();
        let headers = [("content-type", "application/json"), ("x-request-id", request_id)];
        let answer = self.open(Method::POST, url, &headers, Bytes::from(body.to_string())).await?;
        let status = answer.status();
        let mut body = answer.into_body();
        if status != 200 {
            let text = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            bail!("status {status}: {}", String::from_utf8_lossy(&text));
        }
        let mut chat = Chat::default();
        let mut first_token = None;
        let mut events = Events::default();
        let mut done = false;
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame.context("the stream broke off")?.into_data() else { continue };
            for event in events.push(&bytes) {
                done |= event == "[DONE]";
                if event != "[DONE]" && chat.take(&event)? {
                    first_token.get_or_insert_with(|| began.elapsed());
                }
            }
        }
        ensure!(done, "the stream ended without [DONE]");
        ensure!(chat.prompt_tokens > 0, "the stream had no usage");
        chat.first_token = first_token.context("the stream had no text")?;
        chat.total = began.elapsed();
        Ok(chat)
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for Chat {
    fn default() -> Self {
        Self {
            text: String::new(),
            first_token: Duration::ZERO,
            total: Duration::ZERO,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
        }
    }
}

impl Chat {
    /// Takes in one event; whether it brought text.
    fn take(&mut self, event: &str) -> anyhow::Result<bool> {
        let event: Value = serde_json::from_str(event).with_context(|| format!("not JSON: {event}"))?;
        if let Some(error) = event.get("error") {
            bail!("the stream ended with an error: {error}");
        }
        let count = |path: &str| event.pointer(path).and_then(Value::as_u64).unwrap_or(0);
        if event["usage"].is_object() {
            self.prompt_tokens = count("/usage/prompt_tokens");
            self.cached_tokens = count("/usage/prompt_tokens_details/cached_tokens");
            self.completion_tokens = count("/usage/completion_tokens");
        }
        let text = event.pointer("/choices/0/delta/content").and_then(Value::as_str).unwrap_or("");
        self.text.push_str(text);
        Ok(!text.is_empty())
    }
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("not JSON: {}", self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}
