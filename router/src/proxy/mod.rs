//! Bytes to workers and back.
//!
//! A request is read once, prepared on the CPU pool, routed, forwarded byte for
//! byte and answered as the worker answers. Before the first byte of an answer
//! a failed attempt may move to another worker, once; after it there is never a
//! second start. [`answer`] watches the stream; [`errors`] writes what clients
//! read when something fails; [`headers`] knows which headers travel.

pub mod answer;
pub mod errors;
pub mod headers;
pub mod sse;
pub mod upstream;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Uri};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kvrouter_core::ids::Role;
use kvrouter_core::ids::WorkerId;
use kvrouter_core::policy::sessions::SessionKey;
use kvrouter_core::receipts::ResultRecord;
use serde_json::{Value, json};

use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::prompt::{Prompt, Refusal};
use crate::route::{self, Ask, Routed, Unrouted};
use answer::Watch;
use errors::ClientError;
use upstream::{Upstream, UpstreamError};

/// Attempts per request: one, and one more on another worker.
const ATTEMPTS: u32 = 2;
/// How often a request that waits for a ready worker looks again.
const WAIT_STEP: Duration = Duration::from_millis(50);
/// Longest session id.
const MAX_SESSION_ID: usize = 1024;
/// Longest request id that is taken over from a client.
const MAX_REQUEST_ID: usize = 256;

/// What handlers share.
#[derive(Clone, Debug)]
pub struct App {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The way to workers.
    pub upstream: Upstream,
}

/// The part of a request that attempts share.
struct Inbound {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    ask: Ask,
    /// The client wants server-sent events.
    streamed: bool,
}

/// How an attempt ended before its first byte.
enum Attempt {
    /// The worker answers.
    Answered(Response),
    /// It did not; another one may.
    Failed(ClientError),
}

/// Serves requests and probes.
pub fn router(app: App) -> axum::Router {
    axum::Router::new()
        .route("/livez", axum::routing::get(|| async { "ok" }))
        .route("/readyz", axum::routing::get(readyz))
        .route("/v1/models", axum::routing::get(models))
        .fallback(serve)
        .with_state(app)
}

async fn readyz(State(app): State<App>) -> Response {
    if app.pool.is_ready() {
        return "ok".into_response();
    }
    let draining = app.pool.draining.load(std::sync::atomic::Ordering::Relaxed);
    let reason = if draining { "draining" } else { "waiting for the first views" };
    (http::StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
}

/// What probes found, not what workers say now: one odd worker cannot break it.
async fn models(State(app): State<App>) -> Response {
    let base = &app.pool.config.file.model.name;
    let entry = |model: crate::fleet::ServedModel| {
        let parent = model.adapter.then_some(base);
        json!({"id": model.name, "object": "model", "created": 0, "owned_by": "kvrouter", "parent": parent})
    };
    let data: Vec<Value> = app.pool.fleet.models(base).into_iter().map(entry).collect();
    axum::Json(json!({"object": "list", "data": data})).into_response()
}

async fn serve(State(app): State<App>, request: Request<Body>) -> Response {
    let endpoint = match *request.method() {
        Method::POST => Endpoint::of(request.uri().path()),
        _ => Endpoint::Other,
    };
    let answer = match inbound(&app, endpoint, request).await {
        Ok(inbound) => attempts(&app, &inbound).await,
        Err(error) => error.into_response(),
    };
    let class = match answer.status().as_u16() {
        200..300 => "2xx",
        300..400 => "3xx",
        400..500 => "4xx",
        _ => "5xx",
    };
    app.pool.metrics.requests.with_label_values(&[endpoint.label(), class]).inc();
    answer
}

/// Reads and prepares a request.
async fn inbound(app: &App, endpoint: Endpoint, request: Request<Body>) -> Result<Inbound, ClientError> {
    let (parts, body) = request.into_parts();
    let request_id = request_id(app, &parts.headers);
    let session = session(app, &parts.headers)?;
    let limit = usize::try_from(app.pool.config.file.limits.request_body_bytes).unwrap_or(usize::MAX);
    let body = match Limited::new(body, limit).collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(ClientError::BodyTooLarge { limit }),
        Err(_) => return Err(ClientError::BodyUnreadable),
    };
    let started = app.pool.clock.micros();
    let (mut ask, streamed) = prepare(app, endpoint, request_id, body.clone()).await?;
    ask.session = session;
    let elapsed = app.pool.clock.micros() - started;
    app.pool.metrics.prompt_seconds.observe(elapsed as f64 / 1e6);
    Ok(Inbound { method: parts.method, uri: parts.uri, headers: parts.headers, body, ask, streamed })
}

fn request_id(app: &App, headers: &HeaderMap) -> Arc<str> {
    let given = headers.get(headers::REQUEST_ID).and_then(|value| value.to_str().ok());
    match given.filter(|id| (1..=MAX_REQUEST_ID).contains(&id.len())) {
        Some(id) => id.into(),
        None => format!("kvr-{:016x}", app.pool.clock.unique()).into(),
    }
}

/// [`prepare_blocking`] on a thread of the CPU pool, of which as many work as
/// there are cores.
async fn prepare(
    app: &App,
    endpoint: Endpoint,
    request_id: Arc<str>,
    body: Bytes,
) -> Result<(Ask, bool), ClientError> {
    let pool = Arc::clone(&app.pool);
    let permit = Arc::clone(&pool.cpu).acquire_owned().await.map_err(|_| ClientError::ShuttingDown)?;
    let work = move || {
        let _permit = permit;
        prepare_blocking(&pool, endpoint, request_id, &body)
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| ClientError::ShuttingDown)?
}

/// The session that the request names, where sessions are followed.
fn session(app: &App, headers: &HeaderMap) -> Result<Option<SessionKey>, ClientError> {
    if !app.pool.live.read().settings.sessions.mode.binds(Role::Mixed) {
        return Ok(None);
    }
    let mut given = headers.get_all(headers::SESSION_ID).iter();
    let Some(value) = given.next() else { return Ok(None) };
    let id = value.to_str().ok().filter(|id| (1..=MAX_SESSION_ID).contains(&id.len()));
    match (id, given.next()) {
        (Some(id), None) => Ok(Some(SessionKey { id: id.into(), role: Role::Mixed })),
        _ => Err(ClientError::BadSession),
    }
}

/// Parses, renders, tokenises and hashes, on this thread.
pub fn prepare_blocking(
    pool: &Pool,
    endpoint: Endpoint,
    request_id: Arc<str>,
    body: &[u8],
) -> Result<(Ask, bool), ClientError> {
    if !endpoint.names_a_model() {
        let parsed: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        let streamed = parsed.get("stream").and_then(Value::as_bool).unwrap_or(false);
        let count = crate::prompt::endpoint::estimate(&parsed);
        let prompt = Prompt {
            tokens: Arc::from([]),
            count,
            namespace: Default::default(),
            refused: Some(Refusal::NoPrompt),
            images: Vec::new(),
        };
        return Ok((Ask::new(pool, request_id, &prompt), streamed));
    }
    let parsed: Value =
        serde_json::from_slice(body).map_err(|error| ClientError::NotJson { error: error.to_string() })?;
    if !parsed.is_object() {
        return Err(ClientError::NotAnObject);
    }
    let adapter = adapter(pool, &parsed)?;
    let engine = pool.engine();
    let prompt = pool.prompter.prepare(endpoint, &parsed, engine, adapter);
    match prompt.refused {
        None => pool.metrics.tokenisations.inc(),
        Some(refusal) => pool.metrics.refusals.with_label_values(&[refusal.label()]).inc(),
    }
    let streamed = parsed.get("stream").and_then(Value::as_bool).unwrap_or(false);
    Ok((Ask::new(pool, request_id, &prompt), streamed))
}

/// The adapter that the request's model names; `None` for the base model. A
/// model that nobody serves is the client's mistake.
fn adapter(pool: &Pool, body: &Value) -> Result<Option<Arc<str>>, ClientError> {
    let base = &pool.config.file.model.name;
    let name = match body.get("model") {
        // Engines of one model take a request that names none.
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) => name,
        Some(_) => return Err(ClientError::ModelNotText),
    };
    if name == base {
        return Ok(None);
    }
    let models = pool.fleet.models(base);
    match models.iter().find(|model| model.name == *name) {
        Some(model) => Ok(model.adapter.then(|| name.as_str().into())),
        None => Err(ClientError::UnknownModel {
            name: name.clone(),
            known: models.into_iter().map(|model| model.name).collect(),
        }),
    }
}

/// Tries workers until one answers or the attempts are used up.
async fn attempts(app: &App, inbound: &Inbound) -> Response {
    let mut excluded: Vec<WorkerId> = Vec::new();
    let mut last: Option<ClientError> = None;
    for attempt in 1..=ATTEMPTS {
        if attempt == 1 {
            wait_for_a_worker(app).await;
        } else if !app
            .pool
            .fleet
            .workers()
            .iter()
            .any(|worker| worker.is_ready() && !excluded.contains(&worker.id))
        {
            break;
        }
        let started = app.pool.clock.micros();
        let routed = match route::pick(&app.pool, &inbound.ask, attempt, &excluded) {
            Ok(routed) => routed,
            Err(unrouted) => return nobody(app, &unrouted, last),
        };
        let elapsed = app.pool.clock.micros() - started;
        app.pool.metrics.decision_seconds.observe(elapsed as f64 / 1e6);
        excluded.push(routed.worker.id.clone());
        match try_worker(app, inbound, routed, attempt).await {
            Attempt::Answered(answer) => return answer,
            Attempt::Failed(error) => last = Some(error),
        }
    }
    last.unwrap_or(ClientError::NoWorker).into_response()
}

fn nobody(app: &App, unrouted: &Unrouted, last: Option<ClientError>) -> Response {
    let (status, reason, error) = match unrouted.overloaded {
        true => (429, "overloaded", ClientError::Overloaded),
        false => (503, "no_target", ClientError::NoWorker),
    };
    let result = ResultRecord { status, failure: Some(reason), ..ResultRecord::default() };
    app.pool.receipts.lock().join(unrouted.receipt, result);
    app.pool.metrics.failures.with_label_values(&[reason]).inc();
    last.unwrap_or(error).into_response()
}

/// Waits until a worker is ready, but not longer than the limit.
async fn wait_for_a_worker(app: &App) {
    let limit = Duration::from_secs(app.pool.config.file.limits.no_worker_wait_seconds);
    let ready = async {
        while !app.pool.fleet.workers().iter().any(|worker| worker.is_ready()) {
            tokio::time::sleep(WAIT_STEP).await;
        }
    };
    let _ = tokio::time::timeout(limit, ready).await;
}

/// One attempt: forward, and wait for the first byte of the answer.
async fn try_worker(app: &App, inbound: &Inbound, routed: Routed, attempt: u32) -> Attempt {
    let request = match outbound(inbound, &routed, attempt) {
        Ok(request) => request,
        Err(error) => return Attempt::Failed(error),
    };
    let worker = routed.worker.id.clone();
    let mut watch = Watch::new(Arc::clone(&app.pool), routed, inbound.streamed);
    let limit = Duration::from_secs(app.pool.config.file.limits.first_byte_timeout_seconds);
    let answer = tokio::time::timeout(limit, first_byte(app, request, &mut watch)).await;
    let (parts, body, first) = match answer {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            watch.fail(error.reason());
            tracing::warn!(target: "kv_router::proxy", worker = %worker, error = %crate::chain(&error), "attempt failed before the first byte");
            return Attempt::Failed(ClientError::WorkerFailed { worker, reason: error.reason() });
        }
        Err(_) => {
            watch.fail("first_byte_timeout");
            // It may still be computing: a second start would double the work.
            return Attempt::Answered(ClientError::FirstByteTimeout { worker, limit }.into_response());
        }
    };
    if attempt < ATTEMPTS && matches!(parts.status.as_u16(), 502..=504) && app.another_is_ready(&worker) {
        watch.status(parts.status.as_u16());
        watch.fail("worker_refused");
        return Attempt::Failed(ClientError::WorkerFailed { worker, reason: "refused" });
    }
    Attempt::Answered(answer::respond(parts, body, first, watch, &inbound.ask.request_id))
}

type FirstByte = (http::response::Parts, hyper::body::Incoming, Option<Bytes>);

/// Sends `request` and waits for the answer's head and first bytes. Where the
/// answer is not streamed nobody sees prefill end, so that is estimated.
async fn first_byte(
    app: &App,
    request: Request<http_body_util::Full<Bytes>>,
    watch: &mut Watch,
) -> Result<FirstByte, UpstreamError> {
    let estimate = watch.prefill_estimate();
    let answer = async {
        let (parts, mut body) = app.upstream.send(request).await?.into_parts();
        let first = loop {
            match body.frame().await {
                None => break None,
                Some(Err(source)) => return Err(UpstreamError::Body { source }),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => break Some(data),
                    _ => {}
                },
            }
        };
        Ok((parts, body, first))
    };
    tokio::pin!(answer);
    if let Some(estimate) = estimate {
        tokio::select! {
            biased;
            answer = &mut answer => return answer,
            () = tokio::time::sleep(estimate) => watch.prefill_is_over(),
        }
    }
    answer.await
}

/// The request as the worker gets it: the client's bytes, its end-to-end
/// headers, and the rank where the worker has several.
fn outbound(
    inbound: &Inbound,
    routed: &Routed,
    attempt: u32,
) -> Result<Request<http_body_util::Full<Bytes>>, ClientError> {
    let path = inbound.uri.path_and_query().map_or("/", |path| path.as_str());
    let uri = format!("http://{}{path}", routed.worker.id);
    let id = match attempt {
        1 => inbound.ask.request_id.to_string(),
        // Engines refuse an id that they have seen.
        later => format!("{}-{later}", inbound.ask.request_id),
    };
    let mut request = Request::builder().method(inbound.method.clone()).uri(uri);
    if let Some(all) = request.headers_mut() {
        headers::copy_end_to_end(&inbound.headers, all);
        headers::set(all, headers::REQUEST_ID, &id);
        all.remove(headers::DATA_PARALLEL_RANK);
        if routed.worker.has_ranks() {
            headers::set(all, headers::DATA_PARALLEL_RANK, &routed.target.rank.0.to_string());
        }
    }
    request.body(http_body_util::Full::new(inbound.body.clone())).map_err(|_| ClientError::BadPath)
}

impl App {
    fn another_is_ready(&self, worker: &WorkerId) -> bool {
        self.pool.fleet.workers().iter().any(|other| other.is_ready() && other.id != *worker)
    }
}
