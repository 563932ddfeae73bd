//! The decode engine's way to its prefill engine: one JSON question over HTTP, one JSON answer.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;

use super::rooms::Offer;
use super::{Pull, Pulled};

/// Longest answer: a few short fields.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Asks prefill engines.
pub(crate) struct Peer {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Why there was no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// Host and port make no address.
    #[error("`{host}:{port}` is no address")]
    Address {
        /// As the request named it.
        host: String,
        /// As the request named it.
        port: u64,
    },
    /// Nobody listens there, or the connection broke.
    #[error("failed to reach {address}")]
    Connect {
        /// Who was asked.
        address: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Whoever answered is no prefill engine.
    #[error("{address} answered {status} and nothing that a prefill engine says")]
    Answer {
        /// Who was asked.
        address: String,
        /// Its status.
        status: u16,
    },
}

impl Peer {
    pub(crate) fn new() -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Takes what is in a room. Waits as long as the prefill engine does.
    pub(crate) async fn take(
        &self,
        host: &str,
        port: u64,
        room: u64,
        rank: Option<u64>,
    ) -> Result<Offer, PeerError> {
        let query = rank.map(|rank| format!("?rank={rank}")).unwrap_or_default();
        self.ask(host, port, "GET", &format!("/room/{room}{query}"), Bytes::new()).await
    }

    /// Pulls blocks.
    pub(crate) async fn pull(&self, host: &str, port: u64, pull: &Pull) -> Result<Pulled, PeerError> {
        let body = serde_json::json!(pull).to_string();
        self.ask(host, port, "POST", "/pull", Bytes::from(body)).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        host: &str,
        port: u64,
        method: &str,
        path: &str,
        body: Bytes,
    ) -> Result<T, PeerError> {
        let bare_ipv6 = host.contains(':') && !host.starts_with('[');
        let address = if bare_ipv6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let request = http::Request::builder()
            .method(method)
            .uri(format!("http://{address}{path}"))
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|_| PeerError::Address { host: host.to_owned(), port })?;
        let connect = |source| PeerError::Connect { address: address.clone(), source };
        let response = self.client.request(request).await.map_err(|error| connect(Box::new(error)))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(connect)?;
        let wrong = || PeerError::Answer { address: address.clone(), status: status.as_u16() };
        if !status.is_success() {
            return Err(wrong());
        }
        serde_json::from_slice(&body.to_bytes()).map_err(|_| wrong())
    }
}
