//! `/livez`, `/readyz` and `/metrics`.
//!
//! Ready means that everything is in place to take over, not that this process
//! leads: a standby that were not ready would hold up every rollout.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Whether everything is in place, for `/readyz`.
pub struct Readiness {
    metrics: Arc<Metrics>,
    /// Why not, as a label and as a sentence.
    missing: Mutex<Option<(&'static str, String)>>,
}

impl Readiness {
    /// Of a process that has just begun.
    pub fn starting(metrics: Arc<Metrics>) -> Arc<Self> {
        let readiness = Arc::new(Self { metrics, missing: Mutex::new(None) });
        readiness.lacks("starting", "starting".to_owned());
        readiness
    }

    /// Something is missing. Says whether that is news.
    pub fn lacks(&self, reason: &'static str, message: String) -> bool {
        self.metrics.set_not_ready(Some(reason));
        let news = Some((reason, message));
        let mut missing = self.missing.lock();
        let is_news = *missing != news;
        *missing = news;
        is_news
    }

    /// Everything is in place.
    pub fn complete(&self) {
        self.metrics.set_not_ready(None);
        *self.missing.lock() = None;
    }
}

/// Serves until `stop`.
pub async fn serve(
    listener: TcpListener,
    readiness: Arc<Readiness>,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = axum::Router::new()
        .route("/livez", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(readiness);
    axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await }).await
}

async fn ready(State(readiness): State<Arc<Readiness>>) -> Response {
    match readiness.missing.lock().as_ref() {
        None => "ok".into_response(),
        Some((_, message)) => (StatusCode::SERVICE_UNAVAILABLE, message.clone()).into_response(),
    }
}

async fn metrics(State(readiness): State<Arc<Readiness>>) -> Response {
    match readiness.metrics.render() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            tracing::error!(error = %crate::chain(&error), "metrics were not rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
