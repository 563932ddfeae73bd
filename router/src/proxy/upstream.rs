//! Connections to workers: HTTP/1.1, pooled, with time limits.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kvrouter_core::ids::WorkerId;

/// How long an idle connection is kept. Engines' servers (uvicorn) close theirs
/// after 5 s; one that we used at that moment would fail.
const IDLE: Duration = Duration::from_secs(4);
/// Silence after which the kernel asks whether a worker's machine is still
/// there. A worker that computes for minutes sends nothing, and one whose node
/// died sends nothing either.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Idle connections kept per worker: as many as requests usually run there.
const IDLE_PER_WORKER: usize = 256;

/// The way to workers. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Why a worker did not answer.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection, or it broke before the answer's head.
    #[error("unable to reach the worker")]
    Send {
        /// What was wrong.
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The answer's body broke before its first byte.
    #[error("the worker's answer broke off before its first byte")]
    Body {
        /// What was wrong.
        #[source]
        source: hyper::Error,
    },
    /// The answer cannot be used.
    #[error("the worker's answer is unreadable or too large")]
    Unreadable,
}

/// The label of failures that are the router's own.
pub const ROUTER_EXHAUSTED: &str = "router_exhausted";

impl UpstreamError {
    /// Stable label for metrics and receipts.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Send { .. } if self.is_local() => ROUTER_EXHAUSTED,
            Self::Send { source } if source.is_connect() => "connect",
            Self::Send { .. } => "broken_before_head",
            Self::Body { .. } => "broken_before_first_byte",
            Self::Unreadable => "unreadable",
        }
    }
}

impl UpstreamError {
    /// Whether the router lacked what a connection takes, so that it says nothing of
    /// the worker.
    pub fn is_local(&self) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            if error.downcast_ref::<std::io::Error>().is_some_and(is_exhaustion) {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

/// Files, ports, buffers or memory ran out on this side. By number, because most of
/// them have no kind.
fn is_exhaustion(error: &std::io::Error) -> bool {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const EADDRNOTAVAIL: i32 = 99;
    const ENOBUFS: i32 = 105;
    let numbers = [ENOMEM, ENFILE, EMFILE, EADDRNOTAVAIL, ENOBUFS];
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

impl Upstream {
    /// Connections that are made within `connect_timeout` or not at all.
    pub fn new(connect_timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_keepalive(Some(KEEPALIVE));
        connector.set_keepalive_interval(Some(KEEPALIVE));
        connector.set_connect_timeout(Some(connect_timeout));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_PER_WORKER)
            .build(connector);
        Self { client }
    }

    /// Sends `request`, whose URI is absolute. Dropping the future or the
    /// answer's body closes the connection, which aborts the work at engines.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, UpstreamError> {
        self.client.request(request).await.map_err(|source| UpstreamError::Send { source })
    }

    /// Status and whole body of `GET path` at `worker`, at most `limit` bytes.
    pub async fn get(
        &self,
        worker: &WorkerId,
        path: &str,
        limit: usize,
    ) -> Result<(u16, Bytes), UpstreamError> {
        let request = Request::get(format!("http://{worker}{path}")).body(Full::default());
        self.whole(request, limit).await
    }

    /// The same of `POST path` with a JSON body.
    pub async fn post(
        &self,
        worker: &WorkerId,
        path: &str,
        body: Bytes,
        limit: usize,
    ) -> Result<(u16, Bytes), UpstreamError> {
        let request = Request::post(format!("http://{worker}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body));
        self.whole(request, limit).await
    }

    async fn whole(
        &self,
        request: http::Result<Request<Full<Bytes>>>,
        limit: usize,
    ) -> Result<(u16, Bytes), UpstreamError> {
        let answer = self.send(request.map_err(|_| UpstreamError::Unreadable)?).await?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), limit).collect().await;
        Ok((status, body.map_err(|_| UpstreamError::Unreadable)?.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_router_lacks_is_not_the_workers_fault() {
        for (number, local) in [
            (12, true),
            (23, true),
            (24, true),
            (99, true),
            (105, true),
            (104, false), // ECONNRESET
            (110, false), // ETIMEDOUT
            (111, false), // ECONNREFUSED
            (113, false), // EHOSTUNREACH
        ] {
            let error = std::io::Error::from_raw_os_error(number);
            assert_eq!(is_exhaustion(&error), local, "{error}");
        }
        assert!(!is_exhaustion(&std::io::Error::other("no number")));
    }

    #[tokio::test]
    async fn a_refused_connection_is_the_workers() {
        let upstream = Upstream::new(Duration::from_secs(5));
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let worker = WorkerId::new(nobody.expect("a free port").to_string());
        let error = upstream.get(&worker, "/", 1).await.expect_err("nobody listens");
        assert_eq!((error.reason(), error.is_local()), ("connect", false));
    }
}
