//! `kv-router lab`: serves the page with one frozen trace, or writes it to a file.
//!
//! Hands the page the trace and our ledger of it, and replays the trace again
//! under settings that the page asks for, so that it can compare. Replaying is
//! the core's; nothing is read or written but what the flags name.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use clap::Args;
use http::{StatusCode, header};
use kvrouter_core::policy::{Overload, Settings};
use kvrouter_core::replay::contender::Contender;
use kvrouter_core::replay::lab::{self, LabModel};
use kvrouter_core::replay::lab_trace;
use kvrouter_core::replay::trace::TraceError;
use kvrouter_core::units::Tokens;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::page::{self, Guard, Kind};

/// The hand-made trace that the page opens with.
const HAND_MADE: &str = include_str!("../../tests/fixtures/traces/lab.json");
/// Largest trace that the page sends: what it opens, escaped as JSON.
const MAX_BODY: usize = 40 << 20;
/// Most policies in one question: each shipped one under a few settings.
const MAX_POLICIES: usize = 32;

/// Flags of `lab`.
#[derive(Clone, Debug, Args)]
pub struct LabFlags {
    /// A lab trace; the hand-made one when absent.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Where the page is served.
    #[arg(long, default_value = "127.0.0.1:9095")]
    pub listen: SocketAddr,
    /// Writes the page with its trace into one file instead, which works from disk.
    #[arg(long)]
    pub export: Option<PathBuf>,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The trace cannot be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The trace is bad.
    #[error("{name}: {problem}")]
    Trace {
        /// The file.
        name: String,
        /// Line, field and what is wrong.
        problem: Box<TraceError>,
    },
    /// The program was built without Node.
    #[error(
        "this kv-router was built without its page; run `make web` in a clone of the repository and build again"
    )]
    NotBuilt,
    /// The file cannot be written.
    #[error("failed to write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The address is taken, or is not ours.
    #[error("failed to listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl LabError {
    /// What the program exits with: 2 where an input is at fault, 1 otherwise.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } | Self::Trace { .. } => 2,
            Self::NotBuilt | Self::Write { .. } | Self::Listen { .. } => 1,
        }
    }
}

/// What the page starts with.
#[derive(Debug, Serialize)]
struct Start {
    name: String,
    trace: String,
    /// Our ledger of it, as `kv-router replay --json` writes it.
    ledger: String,
}

impl Start {
    fn read(flags: &LabFlags) -> Result<Self, LabError> {
        let (name, trace) = match &flags.trace {
            None => ("lab.json".to_owned(), HAND_MADE.to_owned()),
            Some(path) => {
                let read = |source| LabError::Read { path: path.clone(), source };
                let name = path.file_name().map_or_else(|| "trace".into(), |name| name.to_string_lossy());
                (name.into_owned(), std::fs::read_to_string(path).map_err(read)?)
            }
        };
        let bad = |problem| LabError::Trace { name: name.clone(), problem: Box::new(problem) };
        let policies: Vec<Settings> = Contender::shipped().iter().filter_map(settings).collect();
        let ledger = ledger(&trace, LabModel::default(), Overload::default(), &policies).map_err(bad)?;
        Ok(Self { name, trace, ledger })
    }

    fn to_json(&self) -> String {
        json!(self).to_string()
    }
}

const fn settings(contender: &Contender) -> Option<Settings> {
    match contender {
        Contender::Shipped(settings) => Some(*settings),
        Contender::Peer(_) => None,
    }
}

fn ledger(
    trace: &str,
    model: LabModel,
    overload: Overload,
    policies: &[Settings],
) -> Result<String, TraceError> {
    let trace = lab_trace::parse(trace)?;
    let policies: Vec<Settings> = policies.iter().map(|one| Settings { overload, ..*one }).collect();
    Ok(lab::to_json(&trace, model, overload, &lab::run(&trace, model, &policies)))
}

/// Writes the file that `flags` name.
pub fn export(flags: &LabFlags, path: &PathBuf) -> Result<(), LabError> {
    let page = page::export(&Start::read(flags)?.to_json()).ok_or(LabError::NotBuilt)?;
    std::fs::write(path, page).map_err(|source| LabError::Write { path: path.clone(), source })
}

/// Serves the page until `stop`, once `announce` was told where.
pub async fn serve(
    flags: &LabFlags,
    stop: CancellationToken,
    announce: impl FnOnce(SocketAddr),
) -> Result<(), LabError> {
    let start = Start::read(flags)?;
    let listen = |source| LabError::Listen { address: flags.listen, source };
    let listener = TcpListener::bind(flags.listen).await.map_err(listen)?;
    announce(listener.local_addr().map_err(listen)?);
    crate::listen::serve(listener, router(&start), stop).await;
    Ok(())
}

fn router(start: &Start) -> axum::Router {
    let start: Arc<str> = start.to_json().into();
    axum::Router::new()
        .route("/", get(|| async { page::document(Kind::Lab, "") }))
        .route("/page.js", get(page::script))
        .route("/page.css", get(page::style))
        .route("/licences.txt", get(page::licences))
        .route("/lab.json", get(given))
        .route("/replay", post(replay).layer(DefaultBodyLimit::max(MAX_BODY)))
        .layer(axum::middleware::from_fn(|request, next| Guard::Open.check(request, next)))
        .with_state(start)
}

async fn given(State(start): State<Arc<str>>) -> Response {
    json_text(start.to_string())
}

fn json_text(text: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, text).into_response()
}

/// What the page asks to be replayed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    trace: String,
    /// Spelt as `kv-router replay --policies` takes them.
    policies: Vec<String>,
    budget_ms: u64,
    max_queued_tokens: Option<u64>,
    cold_reserve: f64,
}

impl Question {
    fn answer(&self) -> Result<String, String> {
        if self.policies.len() > MAX_POLICIES || !(0.0..=1.0).contains(&self.cold_reserve) {
            return Err(format!("at most {MAX_POLICIES} policies and a cold reserve of 0 to 1"));
        }
        let parse = |text: &String| Contender::parse(text).map_err(|error| error.to_string());
        let contenders: Vec<Contender> = self.policies.iter().map(parse).collect::<Result<_, _>>()?;
        let policies: Vec<Settings> = contenders.iter().filter_map(settings).collect();
        let overload =
            Overload { max_queued: self.max_queued_tokens.map(Tokens), cold_reserve: self.cold_reserve };
        let model = LabModel { budget_ticks: self.budget_ms, ..LabModel::default() };
        ledger(&self.trace, model, overload, &policies).map_err(|error| error.to_string())
    }
}

async fn replay(Json(question): Json<Question>) -> Response {
    match tokio::task::spawn_blocking(move || question.answer()).await {
        Ok(Ok(text)) => json_text(text),
        Ok(Err(problem)) => (StatusCode::BAD_REQUEST, Json(json!({"error": problem}))).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(change: fn(&mut Question)) -> Result<String, String> {
        let mut question = Question {
            trace: HAND_MADE.to_owned(),
            policies: vec!["kv-aware:overlap=2".to_owned()],
            budget_ms: 5_000,
            max_queued_tokens: Some(100),
            cold_reserve: 0.25,
        };
        change(&mut question);
        question.answer()
    }

    #[test]
    fn the_page_gets_a_ledger_for_its_settings_or_a_reason() {
        let ledger = question(|_| ()).expect("good");
        for part in ["\"policy\":\"kv-aware:overlap=2\"", "\"budget_ticks\":5000", "\"max_queued\":100"] {
            assert!(ledger.contains(part), "{part}");
        }
        for (change, problem) in [
            (
                (|one| one.cold_reserve = 1.5) as fn(&mut Question),
                "at most 32 policies and a cold reserve of 0 to 1",
            ),
            (|one| one.policies[0] = "fastest".to_owned(), "no policy is called \"fastest\""),
            (|one| one.trace.truncate(40), "line 3: object: is not JSON: EOF while parsing an object"),
        ] {
            assert_eq!(question(change).expect_err("bad"), problem);
        }
    }
}
