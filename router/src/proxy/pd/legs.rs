//! Runs the two requests of a pair: both at once, or one after the other.
//!
//! A leg that fails ends the other one, at once. Before decode's first byte a
//! failure may lead to another pair; after it a stream ends with one event that
//! says so. Whoever drops the answer ends both.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::Request;
use http::response::Parts;
use http_body_util::{BodyExt, Full};
use kvrouter_core::ids::WorkerId;
use kvrouter_crds::config::PrefillGuardRelease;
use tokio::sync::oneshot;

use super::{Continued, Run};
use crate::proxy::answer::{self, Companion, Watch};
use crate::proxy::errors::ClientError;
use crate::proxy::sse::Reader;
use crate::proxy::upstream::{ROUTER_EXHAUSTED, UpstreamError};
use crate::proxy::{App, Attempt, FirstByte, first_byte, headers};

/// Largest prefill answer that is read for what decode needs: block ids of a
/// million tokens take half a megabyte for each group.
const MAX_ANSWER: usize = 8 << 20;
/// Largest refusal that is passed on to the client.
const MAX_REFUSAL: usize = 1 << 20;

/// How a prefill leg ended.
enum End {
    /// Its part is done. The watch is with it as long as somebody needs it.
    Done { held: Option<Box<Watch>>, body: Bytes, cached: Option<u64> },
    /// The engine refused: its own words.
    Refused { status: u16, answer: Response, watch: Box<Watch> },
    /// It did not answer, or broke off.
    Failed { reason: &'static str },
    /// It took too long.
    TimedOut,
}

/// What of a prefill answer is kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Nothing,
    Answer,
}

/// A prefill leg that runs beside decode, in a task of its own.
#[derive(Debug)]
pub struct Beside {
    worker: WorkerId,
    end: oneshot::Receiver<End>,
    /// Dropped or sent to: the leg ends.
    stop: Option<oneshot::Sender<Stop>>,
}

/// What becomes of a leg that nobody waits for any more.
#[derive(Debug)]
enum Stop {
    /// It ends, for this reason.
    Because(&'static str),
    /// It goes on to its end.
    Never,
}

impl std::fmt::Debug for End {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Done { .. } => "Done",
            Self::Refused { .. } => "Refused",
            Self::Failed { .. } => "Failed",
            Self::TimedOut => "TimedOut",
        })
    }
}

/// An attempt that ends here.
pub(super) fn refused(error: ClientError) -> Attempt {
    Attempt::Answered(error.into_response())
}

/// Both legs at once.
pub(super) async fn together(run: &Run<'_>, prefill: (Watch, Bytes), decode: (Watch, Bytes)) -> Attempt {
    let ((mut prefill, first), (mut watch, second)) = (prefill, decode);
    let requests = (run.outbound(&mut prefill, first), run.outbound(&mut watch, second));
    let (first, request) = match requests {
        (Ok(first), Ok(second)) => (first, second),
        (Err(error), _) | (_, Err(error)) => return refused(error),
    };
    let mut beside = Beside::start(run, first, prefill);
    let worker = watch.routed().worker.id.clone();
    let mut held = None;
    let first = {
        let answer = tokio::time::timeout(run.limit, first_byte(run.app, request, &mut watch));
        tokio::pin!(answer);
        loop {
            tokio::select! {
                biased;
                end = beside.ended(), if beside.is_running() => match end {
                    End::Done { held: watch, .. } => held = watch,
                    bad => break Err(bad),
                },
                answer = &mut answer => break Ok(answer),
            }
        }
    };
    let answer = match first {
        Ok(answer) => answer,
        Err(bad) => {
            watch.give_up("prefill_failed");
            drop(watch);
            return ended_badly(run, beside.worker, bad);
        }
    };
    let companion = match held {
        Some(watch) => Companion::Held(watch),
        None if beside.is_running() => Companion::Running(beside),
        None => Companion::None,
    };
    decoded(run, worker, watch, answer, companion, None)
}

/// Prefill, then decode with the body that `go_on` makes of prefill's answer.
pub(super) async fn in_turn(
    run: &Run<'_>,
    prefill: (Watch, Bytes),
    mut decode: Watch,
    go_on: impl FnOnce(&Bytes) -> Result<Continued, &'static str>,
) -> Attempt {
    let (mut watch, body) = prefill;
    let prefill = watch.routed().worker.id.clone();
    let request = match run.outbound(&mut watch, body) {
        Ok(request) => request,
        Err(error) => {
            decode.give_up("prefill_failed");
            return refused(error);
        }
    };
    let nobody_stops_it = std::future::pending();
    let done = leg(run.app, request, watch, run.limit, run.guard, Keep::Answer, nobody_stops_it).await;
    let (held, body, cached) = match done {
        End::Done { held, body, cached } => (held, body, cached),
        bad => {
            decode.give_up("prefill_failed");
            drop(decode);
            return ended_badly(run, prefill, bad);
        }
    };
    let continued = match go_on(&body) {
        Ok(continued) => continued,
        Err(reason) => {
            decode.give_up("prefill_failed");
            if let Some(mut held) = held {
                held.fail(reason);
            }
            return failed(prefill, reason);
        }
    };
    let held = held.filter(|_| run.guard == PrefillGuardRelease::Decode);
    let worker = decode.routed().worker.id.clone();
    let request = match run.outbound(&mut decode, continued.decode) {
        Ok(request) => request,
        Err(error) => return refused(error),
    };
    let answer = tokio::time::timeout(run.limit, first_byte(run.app, request, &mut decode)).await;
    let companion = held.map_or(Companion::None, Companion::Held);
    decoded(run, worker, decode, answer, companion, cached.or(continued.cached))
}

type First = Result<Result<FirstByte, UpstreamError>, tokio::time::error::Elapsed>;

/// What comes of decode's first byte, or of its absence.
fn decoded(
    run: &Run<'_>,
    worker: WorkerId,
    mut watch: Watch,
    answer: First,
    mut companion: Companion,
    cached: Option<u64>,
) -> Attempt {
    let (parts, body, first) = match answer {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            watch.broken(&error);
            companion.stop("decode_failed");
            tracing::warn!(target: "kv_router::proxy", worker = %worker, error = %crate::chain(&error), "decode failed before the first byte");
            return failed(worker, error.reason());
        }
        Err(_) => {
            watch.fail("first_byte_timeout");
            companion.stop("decode_failed");
            return refused(ClientError::FirstByteTimeout { worker, limit: run.limit });
        }
    };
    let status = parts.status.as_u16();
    if status >= 400 {
        companion.stop("decode_refused");
    }
    if matches!(status, 502..=504) && run.may_retry(&worker) {
        watch.status(status);
        watch.fail("worker_refused");
        return failed(worker, "refused");
    }
    let id = &run.inbound.ask.request_id;
    Attempt::Answered(answer::respond_beside(parts, body, first, watch, id, companion, cached))
}

/// What comes of a prefill leg that did not do its part.
fn ended_badly(run: &Run<'_>, worker: WorkerId, end: End) -> Attempt {
    match end {
        End::Refused { status: 502..=504, mut watch, .. } if run.may_retry(&worker) => {
            watch.fail("worker_refused");
            failed(worker, "refused")
        }
        End::Refused { mut answer, .. } => {
            headers::set(answer.headers_mut(), headers::REQUEST_ID, &run.inbound.ask.request_id);
            Attempt::Answered(answer)
        }
        End::TimedOut => refused(ClientError::FirstByteTimeout { worker, limit: run.limit }),
        End::Failed { reason } => failed(worker, reason),
        // Nothing bad about it; nobody asks.
        End::Done { .. } => failed(worker, "prefill_done"),
    }
}

/// Another pair may do better, unless it is the router that failed.
fn failed(worker: WorkerId, reason: &'static str) -> Attempt {
    if reason == ROUTER_EXHAUSTED {
        return refused(ClientError::RouterExhausted);
    }
    Attempt::Failed { error: ClientError::WorkerFailed { worker: worker.clone(), reason }, worker }
}

/// Runs a prefill leg to its end.
async fn leg(
    app: &App,
    request: Request<Full<Bytes>>,
    mut watch: Watch,
    limit: std::time::Duration,
    guard: PrefillGuardRelease,
    keep: Keep,
    stop: impl Future<Output = &'static str>,
) -> End {
    let exchanged = tokio::select! {
        biased;
        exchanged = tokio::time::timeout(limit, exchange(app, request, &mut watch, keep)) => exchanged,
        reason = stop => {
            watch.give_up(reason);
            return End::Failed { reason };
        }
    };
    let (parts, body, cached) = match exchanged {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            watch.broken(&error);
            tracing::warn!(target: "kv_router::proxy", worker = %watch.routed().worker.id, error = %crate::chain(&error), "prefill failed");
            return End::Failed { reason: error.reason() };
        }
        Err(_) => {
            watch.fail("first_byte_timeout");
            return End::TimedOut;
        }
    };
    if !parts.status.is_success() {
        let (status, watch) = (parts.status.as_u16(), Box::new(watch));
        return End::Refused { status, answer: passed_on(parts, body), watch };
    }
    let is_held = guard == PrefillGuardRelease::Decode || keep == Keep::Answer;
    let body = body.unwrap_or_default();
    End::Done { held: is_held.then(|| Box::new(watch)), body, cached }
}

/// The engine's own refusal, or that there was one if it was too long to keep.
fn passed_on(parts: Parts, body: Option<Bytes>) -> Response {
    let Some(body) = body else {
        return ClientError::LongRefusal { status: parts.status }.into_response();
    };
    let mut response = Response::new(axum::body::Body::from(body));
    *response.status_mut() = parts.status;
    headers::copy_end_to_end(&parts.headers, response.headers_mut());
    response
}

/// The head, what is kept of the body, and the cached tokens that usage tells of.
async fn exchange(
    app: &App,
    request: Request<Full<Bytes>>,
    watch: &mut Watch,
    keep: Keep,
) -> Result<(Parts, Option<Bytes>, Option<u64>), UpstreamError> {
    let (parts, mut body) = app.upstream.send(request).await?.into_parts();
    watch.status(parts.status.as_u16());
    let kind = parts.headers.get(http::header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let mut reader = Reader::new(kind);
    let room = match parts.status.is_success() {
        true if keep == Keep::Nothing => 0,
        true => MAX_ANSWER,
        false => MAX_REFUSAL,
    };
    let mut kept = Some(Vec::new());
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|source| UpstreamError::Body { source })?;
        let Ok(data) = frame.into_data() else { continue };
        reader.read(&data);
        match &mut kept {
            Some(kept) if kept.len() + data.len() <= room => kept.extend_from_slice(&data),
            _ if room == MAX_ANSWER => return Err(UpstreamError::Unreadable),
            _ => kept = None,
        }
    }
    let usage = watch.prefilled(&mut reader);
    Ok((parts, kept.map(Bytes::from), usage.cached))
}

impl Beside {
    fn start(run: &Run<'_>, request: Request<Full<Bytes>>, watch: Watch) -> Self {
        let worker = watch.routed().worker.id.clone();
        let (app, limit, guard) = (run.app.clone(), run.limit, run.guard);
        let (done, end) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            match stopped.await {
                Ok(Stop::Because(reason)) => reason,
                Ok(Stop::Never) => std::future::pending().await,
                // Whoever waited was dropped.
                Err(_) => "client_gone",
            }
        };
        tokio::spawn(async move {
            let end = leg(&app, request, watch, limit, guard, Keep::Nothing, stopped).await;
            // Nobody may be there any more, and what is held is released with it.
            let _ = done.send(end);
        });
        Self { worker, end, stop: Some(stop) }
    }

    fn is_running(&self) -> bool {
        self.stop.is_some()
    }

    /// Waits for its end, once.
    async fn ended(&mut self) -> End {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        let end = std::task::ready!(Pin::new(&mut self.end).poll(context));
        self.stop = None;
        // A task that is gone without a word has failed.
        Poll::Ready(end.unwrap_or(End::Failed { reason: "prefill_lost" }))
    }

    /// Whether it has ended, and what is still held of it; `Err` if badly.
    pub fn poll_done(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Box<Watch>>, &'static str>> {
        if !self.is_running() {
            return Poll::Pending;
        }
        Poll::Ready(match std::task::ready!(self.poll(context)) {
            End::Done { held, .. } => Ok(held),
            End::Refused { .. } => Err("prefill_refused"),
            End::Failed { reason } => Err(reason),
            End::TimedOut => Err("first_byte_timeout"),
        })
    }

    /// Ends it, for this reason.
    pub fn stop(&mut self, reason: &'static str) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(Stop::Because(reason));
        }
    }

    /// Lets it go on by itself: decode has all it needs.
    pub fn let_go(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(Stop::Never);
        }
    }
}
