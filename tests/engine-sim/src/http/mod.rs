//! The engine's HTTP side: routes, what handlers share, and connections that can be cut.
//!
//! Bodies and error shapes follow the transcripts recorded from vLLM 0.32 and SGLang 0.5.23.

mod admin;
mod answer;
mod body;
mod connection;
mod disaggregated;
mod infer;
mod info;
mod responses;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::config::Config;
use crate::handover::Handover;
use crate::prompt::{PromptError, Prompter};
use crate::rank::Rank;
pub(crate) use connection::{Connections, CuttableListener};

/// Largest request body: a prompt of 128k tokens as JSON numbers is about 1 MiB.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Requests that `/sim/state` remembers.
const MAX_RECENT: usize = 16;

/// Ports of the event sockets, as discovery endpoints report them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventPorts {
    pub(crate) events: Vec<SocketAddr>,
    pub(crate) replay: Vec<SocketAddr>,
}

/// What all handlers share.
pub(crate) struct Engine {
    pub(crate) config: Arc<Config>,
    pub(crate) prompter: Arc<Prompter>,
    pub(crate) ranks: Vec<Arc<Rank>>,
    pub(crate) ports: EventPorts,
    pub(crate) connections: Connections,
    pub(crate) handover: Arc<Handover>,
    faults: Mutex<admin::Faults>,
    recent: Mutex<VecDeque<Received>>,
    serial: AtomicU64,
    /// Requests whose prompts came as token ids.
    given_ids: AtomicU64,
    /// Conversations that `/v1/responses` can go on from, the oldest first.
    responses: Mutex<VecDeque<(String, Vec<Value>)>>,
}

/// A request as it arrived.
struct Received {
    serial: u64,
    path: String,
    body_sha256: String,
    body_bytes: usize,
    headers: Vec<(String, String)>,
    /// Where it went; none when it got nowhere.
    rank: Option<usize>,
    /// Digest over the ids of its prompts, each in four bytes, little end first.
    prompt_sha256: Option<String>,
    prompt_tokens: usize,
    /// Whether its prompts came as token ids.
    given_ids: bool,
}

/// What a client is told when its request fails; the shape is the engine's.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    message: String,
}

impl Engine {
    pub(crate) fn new(
        config: Arc<Config>,
        prompter: Prompter,
        ranks: Vec<Arc<Rank>>,
        ports: EventPorts,
        connections: Connections,
        handover: Arc<Handover>,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            prompter: Arc::new(prompter),
            ranks,
            ports,
            connections,
            handover,
            faults: Mutex::new(admin::Faults::default()),
            recent: Mutex::new(VecDeque::new()),
            serial: AtomicU64::new(0),
            given_ids: AtomicU64::new(0),
            responses: Mutex::new(VecDeque::new()),
        })
    }

    /// Remembers a request and numbers it.
    fn receive(&self, path: &str, headers: &HeaderMap, body: &[u8]) -> u64 {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let text = |value: &axum::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let received = Received {
            serial,
            path: path.to_owned(),
            body_sha256: hex(&Sha256::digest(body)),
            body_bytes: body.len(),
            headers: headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
            rank: None,
            prompt_sha256: None,
            prompt_tokens: 0,
            given_ids: false,
        };
        let mut recent = self.recent.lock();
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(received);
        serial
    }

    /// Remembers where a request went and what its prompts are.
    fn assign(&self, serial: u64, rank: usize, prompts: &[Vec<u32>], given_ids: bool) {
        self.given_ids.fetch_add(u64::from(given_ids), Ordering::Relaxed);
        if let Some(received) = self.recent.lock().iter_mut().find(|received| received.serial == serial) {
            let mut hasher = Sha256::new();
            prompts.iter().flatten().for_each(|token| hasher.update(token.to_le_bytes()));
            received.prompt_sha256 = Some(hex(&hasher.finalize()));
            received.prompt_tokens = prompts.iter().map(Vec::len).sum();
            (received.rank, received.given_ids) = (Some(rank), given_ids);
        }
    }

    /// An error in the engine's own shape.
    fn refuse(&self, refusal: &Refusal) -> Response {
        let code = refusal.status.as_u16();
        let kind = match refusal.status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        let message = &refusal.message;
        let body = if self.config.wire.is_vllm() {
            json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
        } else {
            json!({"object": "error", "message": message, "type": kind, "param": null, "code": code})
        };
        json_response(refusal.status, &body)
    }
}

impl Refusal {
    fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }
}

impl From<PromptError> for Refusal {
    fn from(error: PromptError) -> Self {
        Self::bad_request(error.to_string())
    }
}

/// All routes of the engine that `engine` imitates.
pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let common = Router::new()
        .route("/v1/chat/completions", post(infer::chat))
        .route("/v1/completions", post(infer::completions))
        .route("/v1/embeddings", post(infer::embeddings))
        .route("/v1/responses", post(responses::respond))
        .route("/tokenize", post(infer::tokenize))
        .route("/detokenize", post(infer::detokenize))
        .route("/v1/models", get(info::models))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/sim/fault", post(admin::fault))
        .route("/sim/state", get(admin::state))
        .route("/sim/reset", post(admin::reset));
    let own = if engine.config.wire.is_vllm() {
        Router::new()
            .route("/version", get(info::version))
            .route("/ping", get(info::health))
            .route("/reset_prefix_cache", post(info::reset_prefix_cache))
    } else {
        Router::new()
            .route("/v1/tokenize", post(infer::tokenize))
            .route("/v1/detokenize", post(infer::detokenize))
            .route("/health_generate", get(info::health))
            .route("/server_info", get(info::server_info))
            .route("/get_server_info", get(info::server_info))
            .route("/v1/loads", get(info::loads))
            .route("/flush_cache", get(info::flush_cache).post(info::flush_cache))
    };
    let own = if info::has_event_sources(engine.config.wire) {
        own.route("/kv_event_sources", get(info::kv_event_sources))
    } else {
        own
    };
    common.merge(own).layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).with_state(engine)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [("content-type", "application/json")], body.to_string()).into_response()
}

/// Seconds since 1970, as `created` fields have them.
fn unix_time() -> u64 {
    crate::clock::since_epoch().as_secs()
}
