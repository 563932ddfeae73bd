//! `/v1/responses`: a chat whose answer has an id, from which a later request may go on.
//!
//! The conversation stays in this process, as in the engines: another worker does not know it.
//! Answers have the fields that clients and routers read; the authority for their names is
//! vllm/entrypoints/openai/responses/protocol.py (0.32).

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::answer::Answering;
use super::body::Kind;
use super::infer::{Running, accept, parse};
use super::{Engine, Refusal, hex, json_response, unix_time};
use crate::rank::Progress;

/// Conversations that are kept.
const MAX_KEPT: usize = 1024;
/// Fields that mean the same as in a chat.
const PASSED_ON: [&str; 8] = [
    "tools",
    "cache_salt",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
];

pub(super) async fn respond(State(engine): State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    let serial = engine.receive("/v1/responses", &headers, &body);
    if let Some(response) = engine.faulty_answer().await {
        return response;
    }
    match begin(&engine, serial, &headers, &body).await {
        Ok(begun) if begun.streamed => stream(begun),
        Ok(begun) => begun.whole().await,
        Err(refusal) => engine.refuse(&refusal),
    }
}

/// A response under way.
struct Begun {
    engine: Arc<Engine>,
    id: String,
    model: Value,
    messages: Vec<Value>,
    streamed: bool,
    running: Running,
    progress: tokio::sync::mpsc::Receiver<Progress>,
    answering: Answering,
}

async fn begin(
    engine: &Arc<Engine>,
    serial: u64,
    headers: &HeaderMap,
    body: &Bytes,
) -> Result<Begun, Refusal> {
    let body = parse(body)?;
    let messages = conversation(engine, &body)?;
    let mut chat = json!({"model": body["model"], "messages": messages, "stream": body["stream"]});
    if !body["max_output_tokens"].is_null() {
        chat["max_tokens"] = body["max_output_tokens"].clone();
    }
    for field in PASSED_ON {
        if !body[field].is_null() {
            chat[field] = body[field].clone();
        }
    }
    let (running, progress, output) =
        accept(engine, Kind::Chat, serial, headers, Bytes::from(chat.to_string())).await?;
    // Engines that serve one model do not give the same ids.
    let now = crate::clock::since_epoch().as_nanos();
    let digest = Sha256::digest([&now.to_le_bytes()[..], &serial.to_le_bytes()].concat());
    let id = format!("resp_{}", hex(&digest[..16]));
    Ok(Begun {
        engine: Arc::clone(engine),
        id,
        model: body["model"].clone(),
        messages,
        streamed: body["stream"] == true,
        running,
        progress,
        answering: Answering::new(output),
    })
}

/// The conversation so far: that of the response that the body goes on from, then its own.
fn conversation(engine: &Engine, body: &Value) -> Result<Vec<Value>, Refusal> {
    let mut messages = Vec::new();
    if let Some(instructions) = body["instructions"].as_str() {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    if let Some(previous) = body["previous_response_id"].as_str() {
        let kept = engine.responses.lock();
        let Some((_, earlier)) = kept.iter().find(|(id, _)| id == previous) else {
            let message = format!("Response with id '{previous}' not found.");
            return Err(Refusal { status: StatusCode::NOT_FOUND, message });
        };
        messages.extend(earlier.iter().cloned());
    }
    match &body["input"] {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) => messages.extend(items.iter().map(message_of)),
        _ => return Err(Refusal::bad_request("input must be a string or a list")),
    }
    Ok(messages)
}

fn message_of(item: &Value) -> Value {
    let mut content = item["content"].clone();
    for part in content.as_array_mut().into_iter().flatten() {
        part["type"] = json!("text");
    }
    json!({"role": item["role"], "content": content})
}

impl Begun {
    fn object(&self, status: &str, output: Value, usage: Value) -> Value {
        let mut object = json!({"id": self.id, "object": "response", "created_at": unix_time(),
                                "model": self.model, "status": status, "output": output, "usage": usage});
        if self.engine.config.wire.is_vllm() {
            object["kv_transfer_params"] = self.answering.kv_transfer_params().clone();
        }
        object
    }

    /// The finished response, which is kept from now on.
    fn finished(&self) -> Value {
        let text = self.answering.text();
        let mut messages: Vec<Value> =
            self.messages.iter().filter(|message| message["role"] != "system").cloned().collect();
        messages.push(json!({"role": "assistant", "content": text}));
        let mut kept = self.engine.responses.lock();
        if kept.len() == MAX_KEPT {
            kept.pop_front();
        }
        kept.push_back((self.id.clone(), messages));
        drop(kept);
        let content = json!([{"type": "output_text", "text": text, "annotations": []}]);
        let message = json!({"id": format!("msg_{}", &self.id[5..]), "type": "message", "role": "assistant",
                             "status": "completed", "content": content});
        let (prompt, cached, generated) = self.answering.counts();
        let usage = json!({"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached},
                           "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": 0},
                           "total_tokens": prompt + generated});
        self.object("completed", json!([message]), usage)
    }

    async fn whole(mut self) -> Response {
        while !self.answering.is_finished() {
            match self.progress.recv().await {
                Some(token) => self.answering.advance(token),
                // The process died; its connections are about to be cut.
                None => std::future::pending().await,
            }
        }
        json_response(StatusCode::OK, &self.finished())
    }
}

/// One event of a stream.
fn event(kind: &str, number: &mut u64, mut data: Value) -> Bytes {
    data["type"] = json!(kind);
    data["sequence_number"] = json!(*number);
    *number += 1;
    Bytes::from(format!("event: {kind}\ndata: {data}\n\n"))
}

fn stream(mut begun: Begun) -> Response {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
    tokio::spawn(async move {
        let mut number = 0;
        let begins = begun.object("in_progress", json!([]), Value::Null);
        let opening = ["response.created", "response.in_progress"];
        for kind in opening {
            let _ = sender.send(event(kind, &mut number, json!({"response": begins})));
        }
        while !begun.answering.is_finished() {
            let token = tokio::select! {
                token = begun.progress.recv() => token,
                () = sender.closed() => return,
            };
            let Some(token) = token else { return };
            let delta = begun.answering.next_piece(&token);
            begun.answering.advance(token);
            let _ = sender.send(event("response.output_text.delta", &mut number, json!({"delta": delta})));
        }
        let done = json!({"response": begun.finished()});
        let _ = sender.send(event("response.completed", &mut number, done));
        drop(begun.running);
    });
    let body = futures::stream::poll_fn(move |context| receiver.poll_recv(context))
        .map(Ok::<_, std::convert::Infallible>);
    ([("content-type", "text/event-stream; charset=utf-8")], Body::from_stream(body)).into_response()
}
