//! Bytes to workers and back.
//!
//! A request is read once, prepared on the CPU pool, routed, forwarded byte for
//! byte and answered as the worker answers. Before the first byte of an answer
//! a failed attempt may move to another worker, once; after it there is never a
//! second start. [`body`] reads requests within limits, [`prepared`] is what
//! routing needs of them, [`arrival`] sees that each leaves a receipt; [`answer`]
//! watches the stream; [`errors`] writes what clients read when something fails;
//! [`headers`] knows which headers travel; [`forward`] hands workers the token ids,
//! and [`splice`](mod@splice) puts them, and tenants' salts, into the body.

pub mod answer;
pub mod arrival;
pub mod body;
pub mod errors;
pub mod forward;
pub mod headers;
pub mod prepared;
pub mod splice;
pub mod sse;
pub mod upstream;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use kvrouter_core::ids::{Role, Target, WorkerId};
use kvrouter_core::policy::sessions::SessionKey;
use kvrouter_core::receipts::ResultRecord;
use serde_json::{Value, json};

use crate::fleet::{ServedModel, Worker};
use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::route::{self, Ask, Routed, Unrouted};
use crate::tenancy::{Tenancy, Tenant, takes_salt};
use answer::Watch;
use arrival::Arrival;
use errors::ClientError;
use forward::Forwardable;
use prepared::{Prepared, prepare};
use splice::{Salting, splice};
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
    /// Room for request bodies.
    bodies: body::Budget,
}

/// The part of a request that attempts share.
struct Inbound {
    method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
    body: body::Held,
    ask: Ask,
    /// Its ids, where workers may get them.
    forwardable: Option<Arc<Forwardable>>,
    /// Its tenant's salt, where it has one.
    salting: Option<Salting>,
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
    (http::StatusCode::SERVICE_UNAVAILABLE, app.pool.ready_reason()).into_response()
}

/// What probes found, not what workers say now: one odd worker cannot break it.
async fn models(State(app): State<App>) -> Response {
    let base = &app.pool.config.file.model.name;
    let entry = |model: ServedModel| {
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
    let mut arrival = Arrival::new(&app.pool, request_id(&app, request.headers()));
    let read = inbound(&app, endpoint, request, &arrival.request_id).await;
    let mut answer = match read {
        Ok(inbound) => attempts(&app, &inbound, &mut arrival).await,
        Err(error) => {
            arrival.refused(&error);
            error.into_response()
        }
    };
    headers::set(answer.headers_mut(), headers::REQUEST_ID, &arrival.request_id);
    if app.is_draining() {
        // Clients that keep connections go elsewhere with their next request,
        // instead of meeting a connection that is just being closed.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
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
async fn inbound(
    app: &App,
    endpoint: Endpoint,
    request: Request<Body>,
    request_id: &Arc<str>,
) -> Result<Inbound, ClientError> {
    let (parts, body) = request.into_parts();
    let path = forwardable(&parts)?;
    let session = session(app, &parts.headers)?;
    let tenant = tenant(&app.pool, &parts.method, path.path(), &parts.headers)?;
    let limit = usize::try_from(app.pool.config.file.limits.request_body_bytes).unwrap_or(usize::MAX);
    if parts.headers.contains_key(header::EXPECT) && body.size_hint().lower() > limit as u64 {
        // The client has sent nothing yet, and need not.
        return Err(ClientError::BodyTooLarge { limit });
    }
    let body = body::read(&app.bodies, body, limit).await?;
    let started = app.pool.clock.micros();
    let prepared = prepare(&app.pool, endpoint, Arc::clone(request_id), body.bytes.clone(), tenant).await?;
    let elapsed = app.pool.clock.micros() - started;
    app.pool.metrics.prompt_seconds.observe(elapsed as f64 / 1e6);
    let ask = Ask { session, ..prepared.ask };
    let Prepared { forwardable, salting, streamed, .. } = prepared;
    let (method, headers) = (parts.method, parts.headers);
    Ok(Inbound { method, path, headers, body, ask, forwardable, salting, streamed })
}

/// The path and query to forward to. `CONNECT` and `OPTIONS *` name none.
fn forwardable(parts: &Parts) -> Result<PathAndQuery, ClientError> {
    let path = parts.uri.path_and_query().filter(|path| path.as_str().starts_with('/'));
    path.filter(|_| parts.method != Method::CONNECT).cloned().ok_or(ClientError::BadPath)
}

fn request_id(app: &App, headers: &HeaderMap) -> Arc<str> {
    let given = headers.get(headers::REQUEST_ID).and_then(|value| value.to_str().ok());
    match given.filter(|id| (1..=MAX_REQUEST_ID).contains(&id.len())) {
        Some(id) => id.into(),
        None => format!("kvr-{:016x}", app.pool.clock.unique()).into(),
    }
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

/// Who sent a request, where tenants are kept apart.
pub fn tenant(
    pool: &Pool,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<Option<Tenant>, ClientError> {
    let of = |tenancy: &Tenancy| tenancy.tenant(method, path, headers);
    pool.config.tenancy.as_ref().map_or(Ok(None), of)
}

/// Tries workers until one answers or the attempts are used up.
async fn attempts(app: &App, inbound: &Inbound, arrival: &mut Arrival) -> Response {
    let mut excluded: Vec<WorkerId> = Vec::new();
    let mut last: Option<ClientError> = None;
    for attempt in 1..=ATTEMPTS {
        if attempt == 1 {
            wait_for_a_worker(app, &inbound.ask).await;
        } else if !app.can_serve(&inbound.ask, &excluded) {
            break;
        }
        let started = app.pool.clock.micros();
        let picked = route::pick(&app.pool, &inbound.ask, attempt, &excluded);
        arrival.picked();
        let routed = match picked {
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
    let (status, reason, error) = match (unrouted.overloaded, unrouted.follows_its_maker) {
        (true, false) => (429, "overloaded", ClientError::Overloaded),
        (true, true) => (429, "overloaded_maker", ClientError::MakerOverloaded),
        (false, _) => (503, "no_target", ClientError::NoWorker),
    };
    let result = ResultRecord { status, failure: Some(reason.into()), ..ResultRecord::default() };
    app.pool.receipts.join(unrouted.receipt, result);
    app.pool.metrics.failures.with_label_values(&[reason]).inc();
    last.unwrap_or(error).into_response()
}

/// Waits until a worker can serve `ask`, but not longer than the limit.
async fn wait_for_a_worker(app: &App, ask: &Ask) {
    let limit = Duration::from_secs(app.pool.config.file.limits.no_worker_wait_seconds);
    let ready = async {
        while !app.can_serve(ask, &[]) {
            tokio::time::sleep(WAIT_STEP).await;
        }
    };
    let _ = tokio::time::timeout(limit, ready).await;
}

/// One attempt: forward, and wait for the first byte of the answer.
async fn try_worker(app: &App, inbound: &Inbound, routed: Routed, attempt: u32) -> Attempt {
    let (picked, target) = (Arc::clone(&routed.worker), routed.target.clone());
    let worker = picked.id.clone();
    let mut watch = Watch::new(Arc::clone(&app.pool), routed, inbound.streamed);
    let body = outbound_body(app, inbound, &picked).await;
    let request = match body.and_then(|body| outbound(inbound, body, &picked, &target, attempt)) {
        Ok(request) => request,
        Err(error) => {
            watch.fail(error.code());
            return Attempt::Failed(error);
        }
    };
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
    let refused = matches!(parts.status.as_u16(), 502..=504);
    if attempt < ATTEMPTS && refused && app.can_serve(&inbound.ask, std::slice::from_ref(&worker)) {
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

/// The client's bytes, with its tenant's salt, and with the token ids where the
/// worker may have them.
async fn outbound_body(app: &App, inbound: &Inbound, worker: &Worker) -> Result<Bytes, ClientError> {
    let mut edits = match &inbound.salting {
        Some(salting) if !takes_salt(salting.endpoint, worker) => {
            return Err(ClientError::NotApart { path: inbound.path.path().to_owned() });
        }
        Some(salting) => salting.edits.clone(),
        None => Vec::new(),
    };
    if let Some(forwardable) = &inbound.forwardable {
        let way = forwardable.way(worker);
        let label = way.as_ref().map_or_else(|why| why.label(), |_| "forwarded");
        app.pool.metrics.tokens.forwarded.with_label_values(&[label]).inc();
        if let Ok(way) = way {
            let permit = Arc::clone(&app.pool.cpu).acquire_owned().await;
            let permit = permit.map_err(|_| ClientError::ShuttingDown)?;
            let forwardable = Arc::clone(forwardable);
            let write = move || {
                let _permit = permit;
                forwardable.edit(way)
            };
            edits.push(tokio::task::spawn_blocking(write).await.map_err(|_| ClientError::ShuttingDown)?);
        }
    }
    Ok(splice(&inbound.body.bytes, edits))
}

/// The request as the worker gets it: `body`, the client's end-to-end headers,
/// and the rank where the worker has several.
fn outbound(
    inbound: &Inbound,
    body: Bytes,
    worker: &Worker,
    target: &Target,
    attempt: u32,
) -> Result<Request<http_body_util::Full<Bytes>>, ClientError> {
    // From parts: as one text, a path of the longest allowed length would not fit.
    let uri = Uri::builder().scheme("http").authority(worker.id.as_str());
    let uri = uri.path_and_query(inbound.path.clone()).build().map_err(|_| ClientError::BadPath)?;
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
        if worker.has_ranks() {
            headers::set(all, headers::DATA_PARALLEL_RANK, &target.rank.0.to_string());
        }
    }
    request.body(http_body_util::Full::new(body)).map_err(|_| ClientError::BadPath)
}

impl App {
    /// An app with room for request bodies of its own.
    pub fn new(pool: Arc<Pool>, upstream: Upstream) -> Self {
        Self { pool, upstream, bodies: body::Budget::default() }
    }

    fn is_draining(&self) -> bool {
        self.pool.draining.load(Ordering::Relaxed)
    }

    /// Whether a ready worker outside `excluded` serves what `ask` needs.
    fn can_serve(&self, ask: &Ask, excluded: &[WorkerId]) -> bool {
        self.pool.fleet.workers().iter().any(|worker| ask.is_for(worker) && !excluded.contains(&worker.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_are_forwarded() {
        for (method, target, path) in [
            (Method::GET, "/a?b=1", Some("/a?b=1")),
            (Method::GET, "http://elsewhere/a?b", Some("/a?b")),
            (Method::GET, "http://elsewhere", Some("/")),
            (Method::OPTIONS, "*", None),
            (Method::CONNECT, "host:80", None),
            (Method::CONNECT, "http://host/a", None),
        ] {
            let request = Request::builder().method(method).uri(target).body(()).expect("a request");
            let found = forwardable(&request.into_parts().0).ok();
            assert_eq!(found.as_ref().map(PathAndQuery::as_str), path, "{target}");
        }
    }
}
