//! Bytes to workers and back.
//!
//! A request is read once, prepared on the CPU pool, routed, forwarded byte for
//! byte and answered as the worker answers. Before the first byte of an answer
//! a failed attempt may move to another worker, once; after it there is never a
//! second start. [`body`] reads requests within limits, [`prepared`] is what
//! routing needs of them, [`arrival`] sees that each leaves a receipt; [`answer`]
//! watches the stream; [`errors`] writes what clients read when something fails;
//! [`headers`] knows which headers travel; [`forward`] hands workers the token ids;
//! [`pd`] divides a request between two workers; [`salting`] keeps tenants apart;
//! [`splice`] changes bodies.

pub mod answer;
pub mod arrival;
pub mod body;
pub mod errors;
pub mod forward;
pub mod headers;
pub mod pd;
pub mod prepared;
pub mod salting;
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
use kvrouter_core::ids::Role;
use kvrouter_core::ids::WorkerId;
use kvrouter_core::policy::sessions::{SessionKey, SessionMode};
use kvrouter_core::receipts::ResultRecord;
use kvrouter_crds::config::Protocol;
use serde_json::{Value, json};

use crate::fleet::{Needs, ServedModel, Worker};
use crate::pool::Pool;
use crate::prompt::endpoint::{Endpoint, computes_no_prompt};
use crate::route::{self, Ask, Routed, Unrouted};
use crate::tenancy::{Tenancy, Tenant};
use answer::Watch;
use arrival::Arrival;
use errors::ClientError;
use forward::{Forwardable, Ids};
use pd::division::{Division, Indivisible};
use prepared::{Prepared, prepare};
use salting::Salting;
use splice::edited;
use upstream::{Blame, Upstream, UpstreamError};

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
#[derive(Debug)]
pub struct Inbound {
    method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
    body: body::Held,
    ask: Ask,
    /// Its ids, where workers may get them.
    forwardable: Option<Arc<Forwardable>>,
    /// Its tenant's salt, where it has one.
    salting: Option<Salting>,
    /// What is needed to divide it, where a pool has workers for that.
    division: Option<Result<Division, Indivisible>>,
    /// The client wants server-sent events.
    streamed: bool,
}

/// How an attempt ended before its first byte.
enum Attempt {
    /// The worker answers.
    Answered(Response),
    /// It did not; another one may.
    Failed {
        /// The worker that is not to be tried again.
        worker: WorkerId,
        /// What the client gets if nobody else can serve it.
        error: ClientError,
    },
    /// Nobody could be picked.
    Unrouted(Unrouted),
}

/// Who can serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Two workers that hand it over.
    Pair(Protocol),
    /// A worker that does all of it.
    Mixed,
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
    (http::StatusCode::SERVICE_UNAVAILABLE, app.pool.awaited().to_string()).into_response()
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
    let mut ask = Ask { session, ..prepared.ask };
    let Prepared { forwardable, salting, streamed, mut division, .. } = prepared;
    if division.is_some() && computes_no_prompt(&parts.method, path.path()) && !has_mixed(app) {
        // Any worker can tell; those that prefill are asked.
        (ask.role, division) = (Role::Prefill, None);
    }
    let (method, headers) = (parts.method, parts.headers);
    Ok(Inbound { method, path, headers, body, ask, forwardable, salting, division, streamed })
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
    if app.pool.live.read().settings.sessions.mode == SessionMode::Disabled {
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
    if let Some(error) = kept_apart_by_nobody(app, inbound).or_else(|| pd::refusal(app, inbound)) {
        arrival.refused(&error);
        return error.into_response();
    }
    for attempt in 1..=ATTEMPTS {
        let way = match attempt {
            1 => match wait_for_a_worker(app, inbound).await {
                Ok(way) => way,
                Err(error) => {
                    app.pool.metrics.failures.with_label_values(&[error.code()]).inc();
                    arrival.refused(&error);
                    return error.into_response();
                }
            },
            _ => match app.way(inbound, &excluded) {
                Some(way) => way,
                None => break,
            },
        };
        let tried = match way {
            Way::Pair(protocol) => {
                match pd::try_pair(app, inbound, protocol, arrival, attempt, &excluded).await {
                    Attempt::Unrouted(unrouted) if app.has_mixed_for(inbound, &excluded) => {
                        // Full, or just gone: mixed workers are there to help out.
                        note_unrouted(app, &unrouted);
                        try_mixed(app, inbound, arrival, attempt, &excluded).await
                    }
                    tried => tried,
                }
            }
            Way::Mixed => try_mixed(app, inbound, arrival, attempt, &excluded).await,
        };
        match tried {
            Attempt::Answered(answer) => return answer,
            Attempt::Unrouted(unrouted) => return nobody(app, &unrouted, last),
            Attempt::Failed { worker, error } => {
                excluded.push(worker);
                last = Some(error);
            }
        }
    }
    last.unwrap_or(ClientError::NoWorker).into_response()
}

fn pick(
    app: &App,
    ask: &Ask,
    arrival: &mut Arrival,
    attempt: u32,
    excluded: &[WorkerId],
) -> Result<Routed, Unrouted> {
    let started = app.pool.clock.micros();
    let picked = route::pick(&app.pool, ask, attempt, excluded);
    arrival.picked();
    if picked.is_ok() {
        let elapsed = app.pool.clock.micros() - started;
        app.pool.metrics.decision_seconds.observe(elapsed as f64 / 1e6);
    }
    picked
}

async fn try_mixed(
    app: &App,
    inbound: &Inbound,
    arrival: &mut Arrival,
    attempt: u32,
    excluded: &[WorkerId],
) -> Attempt {
    match pick(app, &inbound.ask, arrival, attempt, excluded) {
        Ok(routed) => try_worker(app, inbound, routed, attempt).await,
        Err(unrouted) => Attempt::Unrouted(unrouted),
    }
}

fn nobody(app: &App, unrouted: &Unrouted, last: Option<ClientError>) -> Response {
    let error = note_unrouted(app, unrouted);
    last.unwrap_or(error).into_response()
}

/// Notes that a pick found nobody, and says it for the client.
fn note_unrouted(app: &App, unrouted: &Unrouted) -> ClientError {
    let (status, reason, error) = match (unrouted.overloaded, unrouted.follows_its_maker) {
        (true, false) => (429, "overloaded", ClientError::Overloaded),
        (true, true) => (429, "overloaded_maker", ClientError::MakerOverloaded),
        (false, _) => (503, "no_target", pd::nobody(&app.pool)),
    };
    let result = ResultRecord { status, failure: Some(reason.into()), ..ResultRecord::default() };
    app.pool.receipts.join(unrouted.receipt, result);
    app.pool.metrics.failures.with_label_values(&[reason]).inc();
    error
}

/// Why no worker can keep `inbound` apart from other tenants; `None` where one can, or
/// one may that is not known yet.
fn kept_apart_by_nobody(app: &App, inbound: &Inbound) -> Option<ClientError> {
    inbound.salting.as_ref()?;
    let workers = app.pool.fleet.workers();
    let needs = Needs { adapter: None, ..inbound.ask.needs() };
    let may = |worker: &Arc<Worker>| !worker.is_ready() || worker.serves(needs);
    let nobody = !workers.is_empty() && !workers.iter().any(may);
    nobody.then(|| ClientError::NotKnownApart { path: inbound.path.path().to_owned() })
}

fn has_mixed(app: &App) -> bool {
    app.pool.fleet.workers().iter().any(|worker| worker.takes(Role::Mixed))
}

/// Waits until somebody can serve `inbound`, but not longer than the limit; the
/// way that nobody stands on where nobody can. An error where as many wait as may.
async fn wait_for_a_worker(app: &App, inbound: &Inbound) -> Result<Way, ClientError> {
    if let Some(way) = app.way(inbound, &[]) {
        return Ok(way);
    }
    if app.pool.config.waiting_places() == 0 {
        return Ok(Way::Mixed);
    }
    let _place = app.pool.waiting.try_acquire().map_err(|_| ClientError::WaitingOverloaded)?;
    let limit = Duration::from_secs(app.pool.config.file.limits.no_worker_wait_seconds);
    let ready = async {
        loop {
            match app.way(inbound, &[]) {
                Some(way) => break way,
                None => tokio::time::sleep(WAIT_STEP).await,
            }
        }
    };
    Ok(tokio::time::timeout(limit, ready).await.unwrap_or(Way::Mixed))
}

fn first_byte_limit(app: &App) -> Duration {
    Duration::from_secs(app.pool.config.file.limits.first_byte_timeout_seconds)
}

/// One attempt: forward, and wait for the first byte of the answer.
async fn try_worker(app: &App, inbound: &Inbound, routed: Routed, attempt: u32) -> Attempt {
    let picked = Arc::clone(&routed.worker);
    let worker = picked.id.clone();
    let mut watch = Watch::new(Arc::clone(&app.pool), routed, inbound.streamed);
    let body = outbound_body(app, inbound, &picked).await;
    let request = body.and_then(|body| outbound(inbound, body, watch.routed(), attempt));
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            watch.give_up(error.code());
            return Attempt::Failed { worker, error };
        }
    };
    let limit = first_byte_limit(app);
    let answer = tokio::time::timeout(limit, first_byte(app, request, &mut watch)).await;
    let (parts, body, first) = match answer {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            watch.broken(&error);
            tracing::warn!(target: "kv_router::proxy", worker = %worker, reason = error.reason(), error = %crate::chain(&error), "attempt failed before the first byte");
            if error.blame() == Blame::Router {
                return Attempt::Answered(ClientError::RouterExhausted.into_response());
            }
            let error = ClientError::WorkerFailed { worker: worker.clone(), reason: error.reason() };
            return Attempt::Failed { worker, error };
        }
        Err(_) => {
            watch.fail("first_byte_timeout");
            // It may still be computing: a second start would double the work.
            return Attempt::Answered(ClientError::FirstByteTimeout { worker, limit }.into_response());
        }
    };
    let refused = matches!(parts.status.as_u16(), 502..=504);
    if attempt < ATTEMPTS && refused && app.way(inbound, std::slice::from_ref(&worker)).is_some() {
        watch.status(parts.status.as_u16());
        watch.fail("worker_refused");
        let error = ClientError::WorkerFailed { worker: worker.clone(), reason: "refused" };
        return Attempt::Failed { worker, error };
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
    inbound.is_kept_apart_by(worker)?;
    let [ids] = ids_for(app, inbound, [worker]).await?;
    let mut edits = inbound.salting.as_ref().map_or_else(Vec::new, Salting::edits);
    edits.extend(ids.map(|ids| ids.edit()));
    Ok(edited(&inbound.body.bytes, edits))
}

/// The token ids that each of `workers` gets, if any. Written once for all of them.
async fn ids_for<const COUNT: usize>(
    app: &App,
    inbound: &Inbound,
    workers: [&Worker; COUNT],
) -> Result<[Option<Ids>; COUNT], ClientError> {
    let Some(forwardable) = &inbound.forwardable else { return Ok([const { None }; COUNT]) };
    let ways = workers.map(|worker| {
        let way = forwardable.way(worker);
        let label = way.as_ref().map_or_else(|why| why.label(), |_| "forwarded");
        app.pool.metrics.tokens.forwarded.with_label_values(&[label]).inc();
        way.ok()
    });
    if ways.iter().all(Option::is_none) {
        return Ok([const { None }; COUNT]);
    }
    let permit = Arc::clone(&app.pool.cpu).acquire_owned().await.map_err(|_| ClientError::ShuttingDown)?;
    let forwardable = Arc::clone(forwardable);
    let write = move || {
        let _permit = permit;
        forwardable.text()
    };
    let text = tokio::task::spawn_blocking(write).await.map_err(|_| ClientError::ShuttingDown)?;
    Ok(ways.map(|way| way.map(|way| Ids { way, text: Arc::clone(&text) })))
}

/// The request as the worker gets it: `body`, the client's end-to-end headers,
/// and the rank where the worker has several.
fn outbound(
    inbound: &Inbound,
    body: Bytes,
    routed: &Routed,
    attempt: u32,
) -> Result<Request<http_body_util::Full<Bytes>>, ClientError> {
    // From parts: as one text, a path of the longest allowed length would not fit.
    let uri = Uri::builder().scheme("http").authority(routed.worker.id.as_str());
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
        if routed.worker.has_ranks() {
            headers::set(all, headers::DATA_PARALLEL_RANK, &routed.target.rank.0.to_string());
        }
    }
    request.body(http_body_util::Full::new(body)).map_err(|_| ClientError::BadPath)
}

impl Inbound {
    /// Whether `worker` heeds the salt of its tenant, where it has one.
    fn is_kept_apart_by(&self, worker: &Worker) -> Result<(), ClientError> {
        match &self.salting {
            // It was picked because it did, and may have become another one.
            Some(_) if !worker.serves(self.ask.needs()) => {
                Err(ClientError::NotKnownApart { path: self.path.path().to_owned() })
            }
            _ => Ok(()),
        }
    }
}

impl App {
    /// An app with room for request bodies of its own.
    pub fn new(pool: Arc<Pool>, upstream: Upstream) -> Self {
        Self { pool, upstream, bodies: body::Budget::default() }
    }

    fn is_draining(&self) -> bool {
        self.pool.draining.load(Ordering::Relaxed)
    }

    /// Who outside `excluded` can serve `inbound` now: a pair, else a mixed worker.
    fn way(&self, inbound: &Inbound, excluded: &[WorkerId]) -> Option<Way> {
        let mixed = || self.has_mixed_for(inbound, excluded).then_some(Way::Mixed);
        pd::pair_for(self, inbound, excluded).map(Way::Pair).or_else(mixed)
    }

    /// Whether a worker outside `excluded` can do all of `inbound` now.
    fn has_mixed_for(&self, inbound: &Inbound, excluded: &[WorkerId]) -> bool {
        let stands = |worker: &Arc<Worker>| inbound.ask.is_for(worker) && !excluded.contains(&worker.id);
        self.pool.fleet.workers().iter().any(stands)
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
