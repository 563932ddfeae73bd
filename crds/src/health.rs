//! The router's health report: JSON at `/health/report`.
//!
//! No prompts and no hashes. Of what moves with traffic alone there are message numbers,
//! views' sizes and the replicas that were heard, which readers do not wake up for. Every
//! problem carries a stable reason and a sentence that ends with the next step.

use serde::{Deserialize, Serialize};

/// Version of the report's fields. Readers ignore fields they do not know.
pub const SCHEMA_VERSION: u32 = 1;

/// [`WorkerHealth::reason`] of a worker that is left out because its page is not
/// the pool's.
pub const ODD_PAGE: &str = "page_size";

/// What one router knows of itself and of its workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthReport {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of the router.
    pub router_version: String,
    /// The pool it serves, as `namespace/name`.
    pub pool: String,
    /// Which settings are in force.
    pub config: ConfigHealth,
    /// Whether `/readyz` succeeds.
    pub ready: bool,
    /// Why it does not, or why it does although not every worker had a view
    /// when it began to; `ok` otherwise.
    pub ready_reason: String,
    /// Whether it was told to stop.
    pub draining: bool,
    /// The policy in force, in lower case.
    pub policy: String,
    /// Tokens per block.
    pub block_size: u32,
    /// The way of the events.
    pub events: EventsHealth,
    /// The tokenizer.
    pub tokenizer: TokenizerHealth,
    /// Whether the last live settings were taken.
    pub live_settings: LiveSettingsHealth,
    /// Who can share requests, one entry for each protocol of the pool's roles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disaggregation: Vec<PairsHealth>,
    /// All workers, sorted.
    pub workers: Vec<WorkerHealth>,
    /// What is wrong now, worst first. Empty when all is well.
    pub problems: Vec<Problem>,
}

/// Which settings are in force, by their digests (`crds::config::digest`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigHealth {
    /// The start settings.
    pub start: String,
    /// The live settings; null while there are none.
    pub live: Option<String>,
}

/// The way of the events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventsHealth {
    /// `nats`, `zmq` or `none`.
    pub transport: String,
    /// Whether the broker is connected; always true without one.
    pub connected: bool,
    /// Other routers of the pool that told of their load in the last seconds, those
    /// without load not among them; absent without a broker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas_heard: Option<u64>,
}

/// Workers that can share requests by one protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PairsHealth {
    /// `sglang` or `nixl`.
    pub protocol: String,
    /// Prefill workers that may be picked.
    pub prefill: u64,
    /// Decode workers that may be picked.
    pub decode: u64,
    /// Pairs that can be made of them.
    pub pairs: u64,
}

/// The tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenizerHealth {
    /// Whether prompts can be tokenised.
    pub ready: bool,
    /// Why not.
    pub message: Option<String>,
}

/// Whether the last live settings were taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LiveSettingsHealth {
    /// Whether a live settings file is watched.
    pub watched: bool,
    /// Why the latest content was refused; the last good one stays in force.
    pub refused: Option<String>,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerHealth {
    /// Its `host:port`.
    pub worker: String,
    /// Its pod, in Kubernetes.
    pub pod: Option<String>,
    /// Its role, in lower case.
    pub role: String,
    /// Its engine, in lower case; `auto` while unknown.
    pub engine: String,
    /// The engine's version as it says it; null while unknown.
    pub engine_version: Option<String>,
    /// Whether it may be picked.
    pub ready: bool,
    /// Why not; `ok` when it may.
    pub reason: String,
    /// Tokens per page, from its live endpoint; null while unknown.
    pub reported_page_size: Option<u32>,
    /// Whether it makes the router's tokens; null of routers that do not compare.
    #[serde(default)]
    pub rendering: Option<RenderingHealth>,
    /// Its ranks.
    pub targets: Vec<TargetHealth>,
}

/// Whether a worker makes the tokens of a request that the router makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RenderingHealth {
    /// `confirmed`, `diverged` or `unknown`.
    pub parity: String,
    /// Why.
    pub reason: String,
    /// Whose rendering the router followed, in lower case.
    pub variant: String,
    /// Requests that were compared.
    pub compared: u32,
    /// The request whose tokens differ; null while none do.
    pub probe: Option<String>,
    /// Its first token that differs, from 0.
    pub position: Option<u64>,
    /// What the worker takes to tokenise, per token; null while unknown.
    pub tokenize_microseconds_per_token: Option<f64>,
    /// The part of the time to the first byte that this is, 0 to 1; null while
    /// unknown. Forwarded token ids save it.
    pub tokenize_share_of_first_byte: Option<f64>,
}

/// Why a view is in its state; docs/metrics.md has a row for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewReason {
    /// Nothing is wrong.
    Ok,
    /// No event and no heartbeat has ever arrived.
    NothingHeard,
    /// A snapshot or replay is on its way.
    SnapshotPending,
    /// Stores were lost, unreadable or without a known parent.
    StoresMissing,
    /// A gap or a lost removal that nothing has repaired.
    Gap,
    /// The bridge cannot reach the engine's event sockets.
    EngineUnreachable,
    /// No proof of continuity has arrived for too long.
    Silence,
    /// The other side speaks of another model, revision, block size or seed.
    DomainMismatch,
    /// The page that events name does not divide the block.
    PageSizeMismatch,
    /// The page that the engine's endpoint names does not divide the block.
    ReportedPageSizeMismatch,
    /// The engine numbers no events.
    NoSequence,
    /// The worker makes other tokens than the router.
    RenderDiverged,
    /// The engine reports that prefix caching is off.
    PrefixCachingOff,
    /// The engine finished many prompts and never stored a block.
    NothingStored,
    /// It finished many new prompts and told of nothing meanwhile.
    Stalled,
    /// The engine serves adapters, and its events do not tell whose blocks are whose.
    AdaptersUntold,
    /// Its events name another data-parallel rank than the one they are read for.
    RankMismatch,
    /// One that a router of a later release knows and this reader does not.
    #[serde(other)]
    Unrecognised,
}

/// The likeliest reason why predictions of a view do not come true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriftCause {
    /// Requests are tokenised differently.
    Template,
    /// Requests with a cache salt alone are affected.
    Salt,
    /// The engine skips prefixes in larger units than its pages.
    PageSize,
    /// The engine began anew, or its view was rebuilt.
    Restart,
    /// Events come late, or the cache turns over quickly.
    Lag,
    /// The engine keeps other groups than main attention: expected.
    HybridAttention,
    /// One that a router of a later release knows and this reader does not.
    #[serde(other)]
    Unrecognised,
}

/// What came of the predictions of a view, as far as the engine reports cached
/// tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconciledHealth {
    /// Mean share of predicted hits that came true, 0 to 1; null before enough
    /// are known.
    pub share: Option<f64>,
    /// What hits in the view are worth, 0 to 1: all, unless it is hybrid.
    pub credit: f64,
    /// `less` or `more` than predicted; null while most predictions come true.
    pub drift: Option<String>,
    /// The likeliest reason of the drift.
    pub cause: Option<DriftCause>,
}

/// One rank of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetHealth {
    /// The rank.
    pub rank: u32,
    /// State of its view.
    pub trust: String,
    /// Why it is in that state.
    pub reason: ViewReason,
    /// Whether its hits count.
    pub credited: bool,
    /// Tokens per page, from its events; null before the first.
    pub event_page_size: Option<u32>,
    /// Whether groups other than main attention exist.
    pub hybrid: bool,
    /// What came of its predictions; null of routers that do not compare.
    #[serde(default)]
    pub reconciled: Option<ReconciledHealth>,
    /// The engine's life that the view is of.
    pub epoch: u64,
    /// Number of the last message in the view.
    pub seq: u64,
    /// Distinct blocks in the view as of that message; null where another one came
    /// meanwhile, and of routers that do not say.
    #[serde(default)]
    pub blocks: Option<u64>,
}

/// What is wrong, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// Stable label.
    pub reason: String,
    /// The worker to blame, if it is one.
    pub worker: Option<String>,
    /// A sentence that ends with the next step.
    pub message: String,
}
