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

/// Whose failure an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The worker's.
    Worker,
    /// The router's: it lacked what any connection takes, so no other worker will do
    /// better.
    Router,
    /// Nobody's for certain: this machine had no address and port to call this worker
    /// from. Its ports towards the worker are used up, or the worker's name has an
    /// address of a kind that this machine has none of. Another worker may do.
    Unclear,
}

impl UpstreamError {
    /// Stable label for metrics and receipts.
    pub fn reason(&self) -> &'static str {
        match (self, self.blame()) {
            (Self::Send { .. }, Blame::Router) => ROUTER_EXHAUSTED,
            (Self::Send { .. }, Blame::Unclear) => "no_local_address",
            (Self::Send { source }, Blame::Worker) if source.is_connect() => "connect",
            (Self::Send { .. }, Blame::Worker) => "broken_before_head",
            (Self::Body { .. }, _) => "broken_before_first_byte",
            (Self::Unreadable, _) => "unreadable",
        }
    }

    /// Whose failure it is. What breaks once there is a connection is the worker's.
    pub fn blame(&self) -> Blame {
        let Self::Send { source } = self else { return Blame::Worker };
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(source);
        while let Some(error) = cause {
            let number = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
            if let Some(number) = number {
                return blame_of(number);
            }
            cause = error.source();
        }
        Blame::Worker
    }
}

/// By number, because most of them have no kind.
fn blame_of(number: i32) -> Blame {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const EADDRNOTAVAIL: i32 = 99;
    const ENOBUFS: i32 = 105;
    match number {
        ENOMEM | ENFILE | EMFILE | ENOBUFS => Blame::Router,
        EADDRNOTAVAIL => Blame::Unclear,
        _ => Blame::Worker,
    }
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
        for (number, blame) in [
            (12, Blame::Router),
            (23, Blame::Router),
            (24, Blame::Router),
            (105, Blame::Router),
            (99, Blame::Unclear),
            (104, Blame::Worker), // ECONNRESET
            (110, Blame::Worker), // ETIMEDOUT
            (111, Blame::Worker), // ECONNREFUSED
            (113, Blame::Worker), // EHOSTUNREACH
        ] {
            let name = std::io::Error::from_raw_os_error(number);
            assert_eq!(blame_of(number), blame, "{name}");
        }
    }

    #[tokio::test]
    async fn without_an_address_to_call_from_nobody_is_to_blame() {
        let mut connector = HttpConnector::new();
        // Kept for documentation, so that no machine has it.
        connector.set_local_address(Some(std::net::Ipv4Addr::new(192, 0, 2, 1).into()));
        let client = Client::builder(TokioExecutor::new()).build(connector);
        let worker = WorkerId::new("127.0.0.1:9");
        let error = Upstream { client }.get(&worker, "/", 1).await.expect_err("nothing to call from");
        assert_eq!((error.reason(), error.blame()), ("no_local_address", Blame::Unclear));
    }

    #[tokio::test]
    async fn a_refused_connection_is_the_workers() {
        let upstream = Upstream::new(Duration::from_secs(5));
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let worker = WorkerId::new(nobody.expect("a free port").to_string());
        let error = upstream.get(&worker, "/", 1).await.expect_err("nobody listens");
        assert_eq!((error.reason(), error.blame()), ("connect", Blame::Worker));
    }
}
