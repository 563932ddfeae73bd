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

use axum::response::Response;
use bytes::Bytes;
use http::header;
use http::response::Parts;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kvrouter_core::receipts::ResultRecord;
use kvrouter_core::units::{Millis, Tokens};

use super::headers;
use super::sse::{Reader, Usage};
use crate::pool::Pool;
use crate::route::Routed;

/// What one attempt holds until it is over.
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

/// The body that the client reads.
struct Answer {
    first: Option<Bytes>,
    inner: Incoming,
    reader: Reader,
    watch: Watch,
    ended: bool,
}

impl Watch {
    /// Begins to watch an attempt.
    pub fn new(pool: Arc<Pool>, routed: Routed, streamed: bool) -> Self {
        let started = pool.clock.micros();
        Self { pool, routed, started, streamed, result: ResultRecord::default(), over: false }
    }

    /// When prefill will be over, where nobody will see it; `None` where the
    /// first byte tells, or nothing is known of the worker's speed.
    pub fn prefill_estimate(&self) -> Option<Duration> {
        let estimate = self.routed.lease.prefill_estimate().filter(|_| !self.streamed)?;
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
            if self.is_good() {
                self.routed.worker.rendering.first_byte(self.routed.expected.prompt, elapsed);
            }
        }
    }

    /// The answer is whole. What comes later changes nothing.
    fn end(&mut self, reader: &mut Reader) {
        if !self.over {
            self.over = true;
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
    mut watch: Watch,
    request_id: &str,
) -> Response {
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let mut reader = Reader::new(kind);
    watch.status(parts.status.as_u16());
    let mut all = http::HeaderMap::with_capacity(parts.headers.len());
    headers::copy_end_to_end(&parts.headers, &mut all);
    if !reader.is_event_stream()
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
    let answer = Answer { first, inner, reader, watch, ended };
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
        }
        bytes
    }

    fn end(&mut self) {
        self.ended = true;
        self.watch.end(&mut self.reader);
    }

    /// The server stops asking once it has as many bytes as were announced, so
    /// the end must be seen together with the last bytes.
    fn end_if_whole(&mut self) {
        if !self.ended && self.inner.is_end_stream() {
            self.end();
        }
    }

    /// The worker broke off. A stream of events ends with one that says so;
    /// anything else breaks off for the client too.
    fn broken(&mut self, error: hyper::Error) -> Result<Frame<Bytes>, hyper::Error> {
        self.ended = true;
        self.watch.fail("mid_stream_failure");
        tracing::warn!(
            target: "kv_router::proxy", worker = %self.watch.routed.worker.id,
            error = %crate::chain(&error), "answer broke off"
        );
        if !self.reader.is_event_stream() {
            return Err(error);
        }
        let message = "The worker broke off in the middle of its answer. Send the request again.";
        let object = super::errors::object(message, "server_error", "mid_stream_failure");
        // The worker may have stopped inside an event; an empty line ends it.
        Ok(Frame::data(Bytes::from(format!("\n\ndata: {object}\n\n"))))
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
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let answer = &mut *self;
        if let Some(first) = answer.first.take() {
            let first = answer.pass(first);
            answer.end_if_whole();
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if answer.ended {
            return Poll::Ready(None);
        }
        match std::task::ready!(Pin::new(&mut answer.inner).poll_frame(context)) {
            Some(Ok(frame)) => {
                let frame = match frame.into_data() {
                    Ok(bytes) => Frame::data(answer.pass(bytes)),
                    Err(trailers) => trailers,
                };
                answer.end_if_whole();
                Poll::Ready(Some(Ok(frame)))
            }
            // It broke after its last event: the client misses nothing.
            Some(Err(_)) if answer.watch.over => {
                answer.ended = true;
                Poll::Ready(None)
            }
            Some(Err(error)) => Poll::Ready(Some(answer.broken(error))),
            None => {
                answer.end();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        match self.inner.size_hint().exact() {
            Some(rest) if !self.reader.is_event_stream() => SizeHint::with_exact(first + rest),
            _ => SizeHint::default(),
        }
    }
}
