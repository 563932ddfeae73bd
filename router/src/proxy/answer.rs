//! A worker's answer on its way to the client.
//!
//! [`Watch`] owns what a pick booked and the receipt to complete; it is released
//! exactly once, when the answer ends, breaks or is dropped by a client that
//! went away. Bytes pass unchanged. A stream of events that breaks gets one
//! last event that says so; nothing is ever started a second time.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::response::Response;
use bytes::Bytes;
use http::header;
use http::response::Parts;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kvrouter_core::ids::Role;
use kvrouter_core::receipts::ResultRecord;
use kvrouter_core::units::{Millis, Tokens};

use super::App;
use super::headers;
use super::pd::legs::Beside;
use super::pd::usage::Rewriter;
use super::sse::{Reader, Usage};
use super::upstream::{Blame, UpstreamError};
use crate::pool::Pool;
use crate::route::Routed;

/// What one leg of an attempt, mostly the only one, holds until it is over.
#[derive(Debug)]
pub struct Watch {
    pool: Arc<Pool>,
    routed: Routed,
    /// Microseconds on the pool's clock when the attempt began.
    started: u64,
    streamed: bool,
    result: ResultRecord,
    over: bool,
}

/// What becomes of the prefill leg, where another worker decodes.
#[derive(Debug)]
pub enum Companion {
    /// There is none, or it is over.
    None,
    /// It runs.
    Running(Beside),
    /// It is done, and charged until decode ends.
    Held(Box<Watch>),
}

/// The body that the client reads.
struct Answer {
    first: Option<Bytes>,
    inner: Incoming,
    reader: Reader,
    watch: Watch,
    companion: Companion,
    /// Puts prefill's cached tokens into the usage.
    rewriter: Option<Rewriter>,
    ended: bool,
}

impl Companion {
    /// Decode is over, for this reason: prefill need not go on.
    pub fn stop(&mut self, reason: &'static str) {
        if let Self::Running(beside) = self {
            beside.stop(reason);
        }
        *self = Self::None;
    }

    /// Decode has all it needs.
    fn let_go(&mut self) {
        if let Self::Running(beside) = self {
            beside.let_go();
        }
        *self = Self::None;
    }
}

impl Watch {
    /// Begins to watch an attempt.
    pub fn new(pool: Arc<Pool>, routed: Routed, streamed: bool) -> Self {
        let started = pool.clock.micros();
        Self { pool, routed, started, streamed, result: ResultRecord::default(), over: false }
    }

    /// Begins to watch a prefill leg.
    pub fn of_prefill(app: &App, routed: Routed) -> Self {
        Self::new(Arc::clone(&app.pool), routed, false)
    }

    /// What was picked.
    pub const fn routed(&self) -> &Routed {
        &self.routed
    }

    /// When prefill will be over, where nobody will see it; `None` where the
    /// first byte tells, or nothing is known of the worker's speed.
    pub fn prefill_estimate(&self) -> Option<Duration> {
        let unseen = self.routed.role == Role::Mixed && !self.streamed;
        let estimate = self.routed.lease.prefill_estimate().filter(|_| unseen)?;
        Some(Duration::from_millis(estimate.0))
    }

    /// Prefill is over by estimate.
    pub fn prefill_is_over(&mut self) {
        self.routed.lease.first_byte(self.pool.clock.now(), None);
    }

    /// Notes the answer's status.
    pub fn status(&mut self, status: u16) {
        self.result.status = status;
    }

    /// The worker failed; `reason` is a stable label.
    pub fn fail(&mut self, reason: &'static str) {
        self.routed.lease.fail();
        self.note_failure(reason);
    }

    /// Nothing came of reaching the worker. It is held against the worker only where
    /// the failure is surely its own.
    pub fn broken(&mut self, error: &UpstreamError) {
        match error.blame() {
            Blame::Router | Blame::Unclear => self.give_up(error.reason()),
            Blame::Worker => self.fail(error.reason()),
        }
    }

    /// It ends for a reason that is not its worker's.
    pub fn give_up(&mut self, reason: &'static str) {
        self.note_failure(reason);
    }

    /// A prefill leg has answered in full; the usage that it reports.
    pub fn prefilled(&mut self, reader: &mut Reader) -> Usage {
        let elapsed = Millis((self.pool.clock.micros() - self.started) / 1000);
        if self.is_good() {
            self.routed.lease.first_byte(self.pool.clock.now(), Some(elapsed));
            self.result.first_byte_ms = Some(elapsed.0);
        }
        self.end(reader);
        reader.usage()
    }

    fn note_failure(&mut self, reason: &'static str) {
        self.result.failure = Some(reason.into());
        self.pool.metrics.failures.with_label_values(&[reason]).inc();
    }

    fn first_byte(&mut self) {
        let elapsed = self.pool.clock.micros() - self.started;
        let millis = Millis(elapsed / 1000);
        // An answer in one piece comes after its last token: no prefill speed.
        self.routed.lease.first_byte(self.pool.clock.now(), self.streamed.then_some(millis));
        self.result.first_byte_ms = Some(millis.0);
        if self.streamed {
            self.pool.metrics.first_byte_seconds.observe(elapsed as f64 / 1e6);
            if self.is_good() && self.routed.role == Role::Mixed {
                self.routed.worker.rendering.first_byte(self.routed.expected.prompt, elapsed);
            }
        }
    }

    /// The answer is whole. What comes later changes nothing.
    fn end(&mut self, reader: &mut Reader) {
        if !self.over {
            self.over = true;
            self.routed.lease.answered();
            let usage = self.take_usage(reader);
            if self.is_good() {
                self.routed.prompt_finished(&self.pool, usage);
                self.remember_response(reader);
            }
        }
    }

    fn is_good(&self) -> bool {
        (200..300).contains(&self.result.status)
    }

    /// Notes who made the response, once its id is known.
    fn remember_response(&self, reader: &mut Reader) {
        if let Some(id) = reader.take_response_id() {
            self.pool.responses.lock().made(self.pool.clock.now(), &id, &self.routed.worker);
        }
    }

    /// Counts the usage that was seen; once per attempt.
    fn take_usage(&mut self, reader: &mut Reader) -> Usage {
        let usage = reader.usage();
        self.result.engine_prompt_tokens = usage.prompt;
        self.result.engine_cached_tokens = usage.cached;
        self.result.completion_tokens = usage.completion;
        if self.routed.role == Role::Decode {
            // Prefill has told of the same prompt.
            return usage;
        }
        let metrics = &self.pool.metrics;
        metrics.engine_prompt_tokens.inc_by(usage.prompt.unwrap_or(0));
        metrics.engine_cached_tokens.inc_by(usage.cached.unwrap_or(0));
        usage
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.over && self.result.failure.is_none() {
            // Nothing that the worker did: its session stays bound.
            self.note_failure("client_gone");
        }
        self.routed.lease.end(self.pool.clock.now());
        self.pool.receipts.join(self.routed.receipt, std::mem::take(&mut self.result));
    }
}

/// Turns a worker's answer into the client's: same status, end-to-end headers,
/// same bytes.
pub fn respond(
    parts: Parts,
    inner: Incoming,
    first: Option<Bytes>,
    watch: Watch,
    request_id: &str,
) -> Response {
    respond_beside(parts, inner, first, watch, request_id, Companion::None, None)
}

/// The same for an answer whose prompt a companion prefilled, and had `cached`
/// tokens of it, where the usage is to say so.
pub fn respond_beside(
    parts: Parts,
    inner: Incoming,
    first: Option<Bytes>,
    mut watch: Watch,
    request_id: &str,
    companion: Companion,
    cached: Option<u64>,
) -> Response {
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let mut reader = Reader::new(kind);
    watch.status(parts.status.as_u16());
    let mut all = http::HeaderMap::with_capacity(parts.headers.len());
    headers::copy_end_to_end(&parts.headers, &mut all);
    let rewriter = cached.filter(|_| parts.status.is_success()).and_then(|cached| reader.rewriter(cached));
    if !reader.is_event_stream()
        && rewriter.is_none()
        && let Some(length) = parts.headers.get(header::CONTENT_LENGTH)
    {
        // The bytes are the same, so their number is too; a stream of events
        // may get one more.
        all.insert(header::CONTENT_LENGTH, length.clone());
    }
    headers::set(&mut all, headers::REQUEST_ID, request_id);
    let ended = first.is_none();
    if ended {
        // Nobody asks for a body that has no bytes (`HEAD`, 204, 304, an empty
        // one), so its end is seen here or never.
        watch.end(&mut reader);
    }
    let answer = Answer { first, inner, reader, watch, companion, rewriter, ended };
    let mut response = Response::new(axum::body::Body::new(answer));
    *response.status_mut() = parts.status;
    *response.headers_mut() = all;
    response
}

impl Answer {
    fn pass(&mut self, bytes: Bytes) -> Bytes {
        if self.watch.result.first_byte_ms.is_none() {
            self.watch.first_byte();
        }
        let events = self.reader.read(&bytes);
        if events > 0 {
            self.watch.routed.lease.generated(Tokens(events));
            if self.watch.is_good() {
                self.watch.remember_response(&mut self.reader);
            }
        }
        if self.reader.is_done() {
            // Clients hang up at this event; they have their whole answer.
            self.watch.end(&mut self.reader);
            self.companion.let_go();
        }
        match &mut self.rewriter {
            Some(rewriter) => rewriter.pass(bytes),
            None => bytes,
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.watch.end(&mut self.reader);
        self.companion.let_go();
    }

    /// What was held back for changes, behind `bytes`.
    fn with_rest(&mut self, bytes: Bytes) -> Bytes {
        let rest = self.rewriter.take().map(|mut rewriter| rewriter.finish()).unwrap_or_default();
        if rest.is_empty() { bytes } else { [bytes, rest].concat().into() }
    }

    /// What comes of the prefill leg while decode answers.
    fn watch_companion(&mut self, context: &mut Context<'_>) -> Result<(), &'static str> {
        let Companion::Running(beside) = &mut self.companion else { return Ok(()) };
        let Poll::Ready(done) = beside.poll_done(context) else { return Ok(()) };
        self.companion = done?.map_or(Companion::None, Companion::Held);
        Ok(())
    }

    /// The server stops asking once it has as many bytes as were announced, so
    /// the end must be seen together with the last bytes.
    fn end_if_whole(&mut self, bytes: Bytes) -> Bytes {
        if !self.ended && self.inner.is_end_stream() {
            self.end();
            return self.with_rest(bytes);
        }
        bytes
    }

    /// The worker broke off. A stream of events ends with one that says so;
    /// anything else breaks off for the client too.
    fn broken(&mut self, error: BoxError) -> Result<Frame<Bytes>, BoxError> {
        self.ended = true;
        tracing::warn!(
            target: "kv_router::proxy", worker = %self.watch.routed.worker.id,
            error = %crate::chain(&*error), "answer broke off"
        );
        if !self.reader.is_event_stream() {
            return Err(error);
        }
        let message = "The worker broke off in the middle of its answer. Send the request again.";
        let object = super::errors::object(message, "server_error", "mid_stream_failure");
        // The worker may have stopped inside an event; an empty line ends it.
        let end = Bytes::from(format!("\n\ndata: {object}\n\n"));
        let held = self.with_rest(Bytes::new());
        Ok(Frame::data([held, end].concat().into()))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.watch.over {
            // It broke off or nobody reads on; what was counted still counts.
            self.watch.take_usage(&mut self.reader);
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let answer = &mut *self;
        if let Some(first) = answer.first.take() {
            let first = answer.pass(first);
            let first = answer.end_if_whole(first);
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if answer.ended {
            return Poll::Ready(None);
        }
        if let Err(reason) = answer.watch_companion(context) {
            answer.companion = Companion::None;
            answer.watch.give_up("prefill_failed");
            return Poll::Ready(Some(answer.broken(format!("prefill failed: {reason}").into())));
        }
        match std::task::ready!(Pin::new(&mut answer.inner).poll_frame(context)) {
            Some(Ok(frame)) => {
                let frame = match frame.into_data() {
                    Ok(bytes) => {
                        let bytes = answer.pass(bytes);
                        Frame::data(answer.end_if_whole(bytes))
                    }
                    Err(trailers) => trailers,
                };
                Poll::Ready(Some(Ok(frame)))
            }
            // It broke after its last event: the client misses nothing.
            Some(Err(_)) if answer.watch.over => {
                answer.ended = true;
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                answer.watch.fail("mid_stream_failure");
                answer.companion.stop("decode_failed");
                Poll::Ready(Some(answer.broken(error.into())))
            }
            None => {
                answer.end();
                let rest = answer.with_rest(Bytes::new());
                Poll::Ready((!rest.is_empty()).then(|| Ok(Frame::data(rest))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        match self.inner.size_hint().exact() {
            Some(rest) if !self.reader.is_event_stream() && self.rewriter.is_none() => {
                SizeHint::with_exact(first + rest)
            }
            _ => SizeHint::default(),
        }
    }
}
