//! What clients read when something fails: OpenAI error objects with a type, a
//! code and a next step. What the log says is another message.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use kvrouter_core::ids::WorkerId;
use serde_json::{Value, json};

use super::pd::division::Indivisible;

/// Where a limit is set that a message says to raise.
pub const IN_FILE: &str = "in the router's file of start settings; a KvRouter has no field for it yet";

/// Why a request was not served.
#[derive(Debug)]
pub enum ClientError {
    /// The body is no JSON.
    NotJson {
        /// Where and why.
        error: String,
    },
    /// The body is JSON, but no object.
    NotAnObject,
    /// `model` is no string.
    ModelNotText,
    /// Nobody serves the model.
    UnknownModel {
        /// The name asked for.
        name: String,
        /// The names served.
        known: Vec<String>,
    },
    /// Nobody who answers serves the model, but not everybody answers.
    ModelNotKnownYet {
        /// The name asked for.
        name: String,
        /// How many workers do not say what they serve.
        silent: usize,
    },
    /// The body is larger than the limit.
    BodyTooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The body ended early or is badly framed.
    BodyUnreadable,
    /// The client stopped in the middle of the body.
    BodyTimeout {
        /// How long nothing came.
        limit: Duration,
    },
    /// The body came on, but too slowly.
    BodyTooSlow {
        /// The least that has to come, in bytes a second.
        least: u64,
    },
    /// The bodies of other requests take all the room there is.
    BodiesOverloaded,
    /// The path cannot be forwarded.
    BadPath,
    /// The session header is repeated, empty, too long or no text.
    BadSession,
    /// It would have to be divided between two workers and cannot be.
    Indivisible {
        /// Why.
        reason: Indivisible,
    },
    /// The body has more prompts than the limit.
    TooManyPrompts {
        /// How many it has.
        found: usize,
        /// The limit.
        limit: u64,
    },
    /// The tenant's header is repeated, empty or too long.
    BadTenant {
        /// The header.
        header: HeaderName,
    },
    /// The request names no tenant, and must.
    NoTenant {
        /// The header.
        header: HeaderName,
    },
    /// What is cached of the request could not be kept apart from other tenants':
    /// no engine takes a salt there.
    NotApart {
        /// Where it was sent.
        path: String,
    },
    /// The same: engines may take a salt there, but these are not known to.
    NotKnownApart {
        /// Where it was sent.
        path: String,
    },
    /// `cache_salt` is no string.
    SaltNotText,
    /// The request names other requests' blocks, and tenants are kept apart.
    NamesBlocks {
        /// The field that does.
        field: &'static str,
    },
    /// The engine refused, at greater length than is kept of it.
    LongRefusal {
        /// Its status.
        status: StatusCode,
    },
    /// No worker is ready.
    NoWorker,
    /// No pair stands, because pages differ and must not.
    UnequalPages {
        /// A worker that is left out.
        worker: WorkerId,
        /// Its page in tokens.
        page: u32,
    },
    /// As many requests wait for a worker as may.
    WaitingOverloaded,
    /// All workers are over their hard cap.
    Overloaded,
    /// The worker that made the response to go on from is over its hard cap.
    MakerOverloaded,
    /// All attempts failed before a first byte.
    WorkerFailed {
        /// The last one tried.
        worker: WorkerId,
        /// Why: a stable label.
        reason: &'static str,
    },
    /// The worker took too long.
    FirstByteTimeout {
        /// The worker.
        worker: WorkerId,
        /// The limit.
        limit: Duration,
    },
    /// The router lacks what a connection to a worker takes.
    RouterExhausted,
    /// The router stops.
    ShuttingDown,
}

impl ClientError {
    /// What the client gets.
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::NotJson { .. } | Self::NotAnObject | Self::ModelNotText => StatusCode::BAD_REQUEST,
            Self::BodyUnreadable | Self::BadPath | Self::BadSession => StatusCode::BAD_REQUEST,
            Self::Indivisible { .. } => StatusCode::BAD_REQUEST,
            Self::TooManyPrompts { .. } | Self::SaltNotText => StatusCode::BAD_REQUEST,
            Self::NamesBlocks { .. } | Self::NotKnownApart { .. } => StatusCode::BAD_REQUEST,
            Self::LongRefusal { status } => *status,
            Self::BadTenant { .. } | Self::NoTenant { .. } | Self::NotApart { .. } => StatusCode::BAD_REQUEST,
            Self::Overloaded | Self::MakerOverloaded => StatusCode::TOO_MANY_REQUESTS,
            Self::UnknownModel { .. } => StatusCode::NOT_FOUND,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout { .. } | Self::BodyTooSlow { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::NoWorker | Self::ShuttingDown | Self::RouterExhausted => StatusCode::SERVICE_UNAVAILABLE,
            Self::UnequalPages { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::ModelNotKnownYet { .. } | Self::BodiesOverloaded => StatusCode::SERVICE_UNAVAILABLE,
            Self::WaitingOverloaded => StatusCode::SERVICE_UNAVAILABLE,
            Self::WorkerFailed { .. } => StatusCode::BAD_GATEWAY,
            Self::FirstByteTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// Stable label: the error's `code`, and the failure in the receipt.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotJson { .. } => "invalid_json",
            Self::NotAnObject => "not_an_object",
            Self::ModelNotText => "invalid_model",
            Self::UnknownModel { .. } => "model_not_found",
            Self::ModelNotKnownYet { .. } => "model_not_known_yet",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyUnreadable => "body_unreadable",
            Self::BodyTimeout { .. } => "body_timeout",
            Self::BodyTooSlow { .. } => "body_too_slow",
            Self::BodiesOverloaded => "overloaded_bodies",
            Self::BadPath => "bad_path",
            Self::BadSession => "invalid_session_id",
            Self::Indivisible { .. } => "not_divisible",
            Self::TooManyPrompts { .. } => "too_many_prompts",
            Self::BadTenant { .. } => "invalid_tenant",
            Self::NoTenant { .. } => "tenant_missing",
            Self::NotApart { .. } | Self::NotKnownApart { .. } => "not_kept_apart",
            Self::SaltNotText => "invalid_cache_salt",
            Self::NamesBlocks { .. } => "not_kept_apart",
            Self::LongRefusal { .. } => "engine_refused",
            Self::NoWorker => "no_worker",
            Self::UnequalPages { .. } => "unequal_pages",
            Self::WaitingOverloaded => "overloaded_waiting",
            Self::Overloaded => "overloaded",
            Self::MakerOverloaded => "overloaded_maker",
            Self::WorkerFailed { .. } => "worker_failed",
            Self::FirstByteTimeout { .. } => "first_byte_timeout",
            Self::RouterExhausted => "router_exhausted",
            Self::ShuttingDown => "shutting_down",
        }
    }

    // tidy: long, because there is a message for each.
    fn message(&self) -> String {
        match self {
            Self::NotJson { error } => format!("The body is not valid JSON: {error}. Send one JSON object."),
            Self::NotAnObject => "The body is not a JSON object. Send one JSON object.".to_owned(),
            Self::ModelNotText => "The field `model` is not a string. Send the model's name.".to_owned(),
            Self::UnknownModel { name, known } => {
                format!("The model `{name}` is not served here. Use one of: {}.", known.join(", "))
            }
            Self::ModelNotKnownYet { name, silent } => format!(
                "No worker that answers serves the model `{name}`, but {silent} of them do not answer now. Try again, or look at /health/report for what is wrong with them."
            ),
            Self::BodyTooLarge { limit } => {
                format!(
                    "The body is larger than {limit} bytes. Send a smaller one, or raise limits.requestBodyBytes ({IN_FILE})."
                )
            }
            Self::BodyUnreadable => "The body ended early or is badly framed. Send it again.".to_owned(),
            Self::BodyTimeout { limit } => {
                format!("Nothing more of the body came for {} s. Send it again, in one go.", limit.as_secs())
            }
            Self::BodyTooSlow { least } => {
                format!("The body came at less than {least} bytes a second. Send it again, over a faster link.")
            }
            Self::BodiesOverloaded => {
                "The router holds as many request bodies as it may. Try again later, or run more replicas."
                    .to_owned()
            }
            Self::BadPath => {
                "The request target cannot be forwarded. Send a path that begins with `/`.".to_owned()
            }
            Self::BadSession => {
                "The header X-Session-ID must be sent once, with 1 to 1024 visible ASCII bytes.".to_owned()
            }
            Self::TooManyPrompts { found, limit } => format!(
                "The body has {found} prompts, and {limit} are allowed. Send fewer in one request, or raise limits.promptsPerRequest ({IN_FILE})."
            ),
            Self::BadTenant { header } => {
                format!("The header {header} must be sent once, with 1 to 1024 bytes.")
            }
            Self::NoTenant { header } => format!(
                "The request names no tenant. Send the header {header}, or set tenancy.withoutHeader to Share."
            ),
            Self::NotApart { path } => format!(
                "No engine takes a cache salt at {path}, so what it caches of this request could be found by other tenants. Use /v1/chat/completions, /v1/completions or /v1/responses."
            ),
            Self::NotKnownApart { path } => format!(
                "No engine of this pool is known to take a cache salt at {path}, so what it caches of this request could be found by other tenants. Use a path at which they do: docs/tenancy.md says which release of which engine takes one where."
            ),
            Self::SaltNotText => {
                "The field `cache_salt` is not a string. Send one string, or leave it out.".to_owned()
            }
            Self::NamesBlocks { field } => format!(
                "The field `{field}` may hold nothing but `prompt_token_ids` where tenants are kept apart: the rest of it names blocks of other requests. Leave it out."
            ),
            Self::LongRefusal { status } => format!(
                "The engine refused the request with status {} and an answer too long to pass on. Send a smaller request to see what it says.",
                status.as_u16()
            ),
            Self::MakerOverloaded => {
                "The worker that made previous_response_id has as much waiting as it may have, and no other one knows that response. Try again later, or send the whole conversation without previous_response_id, which any worker takes."
                    .to_owned()
            }
            Self::Overloaded => {
                "All workers have as much waiting as they may have. Try again later, or raise overload.maxQueuedTokens."
                    .to_owned()
            }
            Self::Indivisible { reason } => format!(
                "Prefill and decode workers serve this pool, and the request cannot be served: {}. Or add mixed workers to the pool.",
                reason.advice()
            ),
            Self::NoWorker => {
                "No worker is ready. Try again, or look at /health/report for what is missing.".to_owned()
            }
            Self::UnequalPages { worker, page } => format!(
                "No prefill and decode workers with equal pages are ready: worker {worker} has a page of {page} tokens, which is not the pool's. Start the engines of both roles with one page, or set pageSizePolicy to Report."
            ),
            Self::WaitingOverloaded => format!(
                "No worker is ready, and as many requests wait for one as may. Try again later, or raise limits.noWorkerWaitRequests ({IN_FILE})."
            ),
            Self::WorkerFailed { worker, reason } => format!(
                "Worker {worker} failed before its first byte ({reason}), and no other one could take over. Try again."
            ),
            Self::FirstByteTimeout { worker, limit } => format!(
                "Worker {worker} sent nothing for {} s. Try again, or raise limits.firstByteTimeoutSeconds ({IN_FILE}).",
                limit.as_secs()
            ),
            Self::RouterExhausted => {
                "The router has no sockets or memory left for a connection to a worker. Try again; if this stays, raise its limit of open files, or run more replicas."
                    .to_owned()
            }
            Self::ShuttingDown => "This router is stopping. Try again: another one will answer.".to_owned(),
        }
    }

    const fn kind(&self) -> &'static str {
        match self.status().as_u16() {
            429 => "rate_limit_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

/// An OpenAI error object.
pub fn object(message: &str, kind: &str, code: &str) -> Value {
    json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
}

impl IntoResponse for ClientError {
    fn into_response(self) -> Response {
        let body = object(&self.message(), self.kind(), self.code());
        let mut response = (self.status(), axum::Json(body)).into_response();
        if matches!(self.status(), StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_a_router_of_the_operator_cannot_raise_says_so() {
        let errors = [
            ClientError::BodyTooLarge { limit: 1 },
            ClientError::TooManyPrompts { found: 2, limit: 1 },
            ClientError::WaitingOverloaded,
            ClientError::FirstByteTimeout { worker: WorkerId::new("a:1"), limit: Duration::from_secs(1) },
        ];
        for error in errors {
            let message = error.message();
            assert!(message.contains("limits.") && message.contains(IN_FILE), "{message}");
        }
    }

    #[test]
    fn errors_that_pass_say_when_to_come_back() {
        let name = || "m".to_owned();
        let cases: [(ClientError, u16, bool); 8] = [
            (ClientError::RouterExhausted, 503, true),
            (ClientError::ModelNotKnownYet { name: name(), silent: 1 }, 503, true),
            (ClientError::UnknownModel { name: name(), known: Vec::new() }, 404, false),
            (ClientError::BodiesOverloaded, 503, true),
            (ClientError::WaitingOverloaded, 503, true),
            (ClientError::BodyTimeout { limit: Duration::from_secs(30) }, 408, false),
            (ClientError::BodyTooSlow { least: 8192 }, 408, false),
            (ClientError::BadPath, 400, false),
        ];
        for (error, status, again) in cases {
            let why = error.code();
            let answer = error.into_response();
            assert_eq!(answer.status().as_u16(), status, "{why}");
            assert_eq!(answer.headers().contains_key(header::RETRY_AFTER), again, "{why}");
        }
    }
}
