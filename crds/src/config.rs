//! The router's configuration file, as YAML spells it.
//!
//! Fields are camelCase, enum values are spelt as in the custom resources.
//! Unknown fields are errors: nothing is accepted and ignored. The values here
//! are only well typed; `kv-router` checks that they make sense together.
//!
//! tidy: large, because it is one list: every setting of the file, and nothing else.

mod disaggregation;
mod tenancy;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use disaggregation::{
    DEFAULT_BOOTSTRAP_PORT, DecodeInputDemand, DemandMode, PrefillGuardRelease, Protocol,
};
pub use tenancy::{DEFAULT_TENANT_HEADER, NO_TENANT_HEADERS, Tenancy, WithoutHeader};

/// Version of the file's fields. A router refuses a newer one.
pub const SCHEMA_VERSION: u32 = 1;

/// What a picture costs unless settings say otherwise: one of about 768 tokens,
/// in blocks of 16.
pub const DEFAULT_IMAGE_WEIGHT: f64 = 48.0;

/// Largest weight: costs stay finite and exact in a double.
pub const MAX_WEIGHT: f64 = 1_000_000.0;
/// Most tokens of a block. Pages of hybrid models have thousands.
pub const MAX_BLOCK_SIZE: u32 = 65_536;
/// Most data-parallel ranks of a worker: the widest expert parallelism in use is 320.
pub const MAX_DP_SIZE: u32 = 1024;
/// Most ports of a pod that engines serve on, each of them a worker.
pub const MAX_TARGET_PORTS: usize = 8;
/// First token of subjects unless settings say otherwise.
pub const DEFAULT_SUBJECT_PREFIX: &str = "kvrouter";

/// Key of the start settings in their ConfigMap, and name of the file.
pub const START_SETTINGS_KEY: &str = "config.yaml";
/// Key of the live settings in their ConfigMap, and name of the file.
pub const LIVE_SETTINGS_KEY: &str = "live.yaml";

/// The digest by which a router and the operator name one text of settings:
/// 16 hexadecimal digits of its SHA-256.
pub fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Start settings: what cannot change while the router runs, and the first
/// values of what can.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RouterConfig {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Which pool this router serves.
    #[serde(default)]
    pub pool: PoolName,
    /// What the pool serves.
    pub model: Model,
    /// Tokens per block. Every engine's page must divide it.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
    /// What the engines are; `Auto` asks each one.
    #[serde(default)]
    pub engine: Engine,
    /// Where the router listens.
    #[serde(default)]
    pub listen: Listen,
    /// Where workers are found.
    pub discovery: Discovery,
    /// How cache events arrive.
    #[serde(default)]
    pub kv_events: KvEvents,
    /// File with the secret that keys all block hashes; both routers and
    /// bridges of a pool need the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_seed_file: Option<PathBuf>,
    /// Whose prompts are kept apart; absent: nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenancy: Option<Tenancy>,
    /// File with the bearer token that the admin port requires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_token_file: Option<PathBuf>,
    /// Limits and time-outs of the proxy.
    #[serde(default)]
    pub limits: Limits,
    /// Where receipts are written; absent: they stay in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt_files: Option<ReceiptFiles>,
    /// Which rule chooses.
    #[serde(default)]
    pub policy: Policy,
    /// Weight of what is not cached, per role.
    #[serde(default)]
    pub overlap_weights: OverlapWeights,
    /// Weights of load; only with `policy: CachePlusLoad`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_weights: Option<LoadWeights>,
    /// How long trust lasts and what comes after it.
    #[serde(default)]
    pub freshness: Freshness,
    /// Whether blocks of prompts in flight count as hits to come.
    #[serde(default)]
    pub in_flight_credit: Switch,
    /// What a target may be given at most.
    #[serde(default)]
    pub overload: Overload,
    /// What a picture costs that the target has not seen, in blocks of prefill.
    #[serde(default = "default_image_weight")]
    pub image_weight: f64,
    /// What a held block is worth, by the tier that it is in.
    #[serde(default)]
    pub tier_credits: TierCredits,
    /// Which picks follow their session.
    #[serde(default)]
    pub session_affinity: SessionAffinity,
    /// Policies that are evaluated beside the real one.
    #[serde(default)]
    pub shadow_policies: Vec<Policy>,
    /// What happens to a worker whose page size is not the others'.
    #[serde(default)]
    pub page_size_policy: PageSizePolicy,
    /// Whether engines are asked what they have in hand.
    // Left out where it says nothing, so that routers of earlier releases read the file.
    #[serde(default, skip_serializing_if = "EngineLoad::is_default")]
    pub engine_load: EngineLoad,
    /// Whether workers get the token ids of their prompts.
    // Left out where it is `Never`, for the same reason.
    #[serde(default, skip_serializing_if = "ForwardTokenIds::is_never")]
    pub forward_token_ids: ForwardTokenIds,
    /// Whether decode picks follow the input that targets hold.
    // This and the next are left out where they say nothing, for the same reason.
    #[serde(default, skip_serializing_if = "DecodeInputDemand::is_default")]
    pub decode_input_demand: DecodeInputDemand,
    /// How long a prefill worker is charged for a request that another decodes.
    #[serde(default, skip_serializing_if = "PrefillGuardRelease::is_decode")]
    pub pd_prefill_guard_release: PrefillGuardRelease,
}

/// Live settings: a file that may change while the router runs. What is absent
/// keeps the value of the start settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LiveSettings {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Which rule chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Weight of what is not cached, per role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap_weights: Option<OverlapWeights>,
    /// Weights of load; only with `policy: CachePlusLoad`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_weights: Option<LoadWeights>,
    /// How long trust lasts and what comes after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freshness: Option<Freshness>,
    /// Whether blocks of prompts in flight count as hits to come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight_credit: Option<Switch>,
    /// What a target may be given at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<Overload>,
    /// What a picture costs that the target has not seen, in blocks of prefill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_weight: Option<f64>,
    /// What a held block is worth, by the tier that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_credits: Option<TierCredits>,
    /// Which picks follow their session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_affinity: Option<SessionAffinity>,
    /// Policies that are evaluated beside the real one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_policies: Option<Vec<Policy>>,
    /// What happens to a worker whose page size is not the others'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size_policy: Option<PageSizePolicy>,
    /// Whether workers get the token ids of their prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_token_ids: Option<ForwardTokenIds>,
    /// Whether decode picks follow the input that targets hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_input_demand: Option<DecodeInputDemand>,
    /// How long a prefill worker is charged for a request that another decodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pd_prefill_guard_release: Option<PrefillGuardRelease>,
    /// Selectors of other pools: a pod that carries all labels of one of them
    /// belongs to two pools and is not picked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub foreign_selectors: Vec<BTreeMap<String, String>>,
}

/// What happens to a worker whose page size differs from the others' or does
/// not divide the block size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PageSizePolicy {
    /// It is named; it is picked by load, without credit for what it holds.
    #[default]
    Report,
    /// It is named and not picked.
    RequireParity,
}

/// Whether workers get the token ids of their prompts, so that they need not
/// tokenise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ForwardTokenIds {
    /// They get what the client sent.
    #[default]
    Never,
    /// Those that were seen to make the same tokens, and whose release takes ids.
    WhenConfirmed,
}

impl ForwardTokenIds {
    /// Whether nobody gets them.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    pub fn is_never(&self) -> bool {
        *self == Self::Never
    }
}

/// What a target may be given at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Overload {
    /// Most uncached tokens that may wait on one target; absent for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_queued_tokens: Option<u64>,
    /// Share of that which only requests without hits on the target may use.
    #[schemars(range(min = 0.0, max = 0.99))]
    pub cold_reserve: f64,
}

/// What a held block is worth, by the tier that it is in: 1 for one that need
/// not be computed at all, 0 for one that helps nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TierCredits {
    /// In the accelerator's memory.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub device: f64,
    /// In the host's memory.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub host: f64,
    /// In anything slower.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub disk: f64,
}

impl Default for TierCredits {
    fn default() -> Self {
        Self { device: 1.0, host: 0.75, disk: 0.25 }
    }
}

/// Which picks follow their session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SessionAffinity {
    /// Which ones.
    pub mode: SessionMode,
    /// How long an idle session stays bound.
    #[schemars(range(min = 1, max = 604_800))]
    pub ttl_seconds: u64,
}

impl Default for SessionAffinity {
    fn default() -> Self {
        Self { mode: SessionMode::Disabled, ttl_seconds: 3600 }
    }
}

/// Which picks follow their session, named by the header `X-Session-ID`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SessionMode {
    /// None.
    #[default]
    Disabled,
    /// Prefill picks.
    Prefill,
    /// Prefill, decode and mixed picks.
    Both,
}

/// Whether something is in force. Words that YAML would turn into booleans are
/// not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Switch {
    /// It is not.
    Disabled,
    /// It is.
    #[default]
    Enabled,
}

/// Names of a pool. Both are DNS labels: they become parts of NATS subjects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolName {
    /// Kubernetes namespace, `default` outside Kubernetes.
    #[serde(default = "default_name")]
    pub namespace: String,
    /// Name of the pool.
    #[serde(default = "default_name")]
    pub name: String,
}

/// The model that a pool serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// The name that requests use.
    pub name: String,
    /// Revision, where two of them are served under one name.
    #[serde(default)]
    pub revision: String,
    /// Where the tokenizer is. Absent: requests are routed by load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<Tokenizer>,
}

/// Where a tokenizer is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tokenizer {
    /// Folder with `tokenizer.json`, `tokenizer_config.json` and, where the
    /// template is not in it, `chat_template.jinja`.
    pub path: PathBuf,
}

/// An engine family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Engine {
    /// Ask each worker.
    #[default]
    Auto,
    /// vLLM.
    VLLM,
    /// SGLang.
    SGLang,
    /// ATOM.
    ATOM,
}

impl Engine {
    /// Lower-case name, for logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::VLLM => "vllm",
            Self::SGLang => "sglang",
            Self::ATOM => "atom",
        }
    }
}

/// Addresses to listen on. Port 0 takes a free one and logs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Listen {
    /// Requests and probes.
    pub http: SocketAddr,
    /// `/metrics` and `/health/report`.
    pub metrics: SocketAddr,
    /// Admin endpoints; on loopback unless told otherwise.
    pub admin: SocketAddr,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            http: SocketAddr::from(([0, 0, 0, 0], 8000)),
            metrics: SocketAddr::from(([0, 0, 0, 0], 9090)),
            admin: SocketAddr::from(([127, 0, 0, 1], 9091)),
        }
    }
}

/// Where workers are found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Discovery {
    /// Which kind of discovery.
    pub backend: DiscoveryBackend,
    /// The workers, with `backend: Static`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<StaticWorker>,
    /// Which pods are workers, with `backend: Kubernetes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<KubernetesDiscovery>,
}

/// Which pods are workers: those that carry all labels of `selector`, are ready
/// and are of exactly one role. Every target port of a pod is a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KubernetesDiscovery {
    /// Namespace of the pods and of the live settings.
    pub namespace: String,
    /// Labels, all of which a pod must carry. Never empty.
    pub selector: BTreeMap<String, String>,
    /// Ports that engines serve on.
    pub target_ports: Vec<u16>,
    /// Data-parallel ranks behind each of them. Rank r of the n-th port, both
    /// from 0, has its events at the pool's ports + n * `dp_size` + r.
    // Left out where it is 1, so that routers of earlier releases read the file.
    #[serde(default = "default_dp_size", skip_serializing_if = "is_default_dp_size")]
    pub dp_size: u32,
    /// Roles of the pool. Empty: every pod is mixed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<RoleSelector>,
    /// Name of the ConfigMap with the live settings under the key
    /// [`LIVE_SETTINGS_KEY`]; absent: none are watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_settings_config_map: Option<String>,
}

/// The labels that make a pod one of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RoleSelector {
    /// The role.
    pub name: RoleName,
    /// Labels beside the pool's, all of which a pod must carry.
    pub selector: BTreeMap<String, String>,
    /// How its workers hand requests over; of prefill and decode roles, which
    /// serve nothing without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Port of its bootstrap server, of a prefill role that speaks SGLang; absent:
    /// [`DEFAULT_BOOTSTRAP_PORT`]. That of the n-th target port is n higher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
}

/// What a worker does of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum RoleName {
    /// All of it.
    #[default]
    Mixed,
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
}

impl RoleName {
    /// Whether it is all of a request.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    pub fn is_mixed(&self) -> bool {
        *self == Self::Mixed
    }

    /// Lower-case name, for logs, labels and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A kind of discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiscoveryBackend {
    /// The list in this file.
    Static,
    /// Pods, watched through the API server.
    Kubernetes,
}

/// One worker of a static list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StaticWorker {
    /// Base URL: `http://host:port`.
    pub url: String,
    /// What the engine is; absent: the pool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Data-parallel ranks behind the URL.
    #[serde(default = "default_dp_size")]
    pub dp_size: u32,
    /// What it does of a request.
    #[serde(default, skip_serializing_if = "RoleName::is_mixed")]
    pub role: RoleName,
    /// How it hands requests over: required of prefill and decode workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Port of its bootstrap server, of a prefill worker that speaks SGLang;
    /// absent: [`DEFAULT_BOOTSTRAP_PORT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Where its events are; absent: the URL's host and the pool's ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<EventEndpoints>,
}

/// A worker's event sockets. Rank r uses port + r of both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EventEndpoints {
    /// Publisher: `tcp://host:port`.
    pub endpoint: String,
    /// Replay socket: `tcp://host:port`. Absent: gaps cannot be repaired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_endpoint: Option<String>,
}

/// How cache events arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KvEvents {
    /// By which way.
    pub transport: EventTransport,
    /// The engines' publisher port, for workers without their own.
    pub port: u16,
    /// The engines' replay port, for workers without their own.
    pub replay_port: u16,
    /// The broker, with `transport: NATS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats: Option<Nats>,
}

impl Default for KvEvents {
    fn default() -> Self {
        Self { transport: EventTransport::default(), port: 5557, replay_port: 5657, nats: None }
    }
}

/// A way for events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EventTransport {
    /// From bridges, over NATS.
    #[default]
    NATS,
    /// Straight from the engines.
    ZMQ,
    /// Not at all: routing history and load decide.
    None,
}

impl EventTransport {
    /// Lower-case name, for logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NATS => "nats",
            Self::ZMQ => "zmq",
            Self::None => "none",
        }
    }
}

/// The NATS broker of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Nats {
    /// `nats://host:port` or `tls://host:port`.
    pub url: String,
    /// Credentials file (`.creds`). Absent: no authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_file: Option<PathBuf>,
    /// First token of every subject: names the cluster.
    #[serde(default = "default_subject_prefix")]
    pub subject_prefix: String,
}

/// Whether engines are asked what they have in hand, so that requests which reach them by
/// another way than this pool's routers count in decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineLoad {
    /// Whether they are.
    pub mode: Switch,
    /// From one question to the next.
    pub interval_seconds: u64,
}

/// Shortest and longest interval of [`EngineLoad`], in seconds. An engine may go on for four
/// seconds with a request that was given up, which two and a half intervals cover, and what
/// it said counts for three.
pub const ENGINE_LOAD_SECONDS: RangeInclusive<u64> = 2..=60;

impl Default for EngineLoad {
    fn default() -> Self {
        Self { mode: Switch::Enabled, interval_seconds: *ENGINE_LOAD_SECONDS.start() }
    }
}

impl EngineLoad {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Limits and time-outs of the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request body.
    pub request_body_bytes: u64,
    /// How long a connection to a worker may take.
    pub connect_timeout_seconds: u64,
    /// How long a worker may take to its first byte.
    pub first_byte_timeout_seconds: u64,
    /// How long a request waits while no worker is ready.
    pub no_worker_wait_seconds: u64,
    /// Most requests that wait for that at once.
    // Left out where it is the default, so that routers of earlier releases read the file.
    #[serde(skip_serializing_if = "is_default_waiting")]
    pub no_worker_wait_requests: u64,
    /// How long requests are still taken after SIGTERM, so that everybody can
    /// notice that the router is not ready any more.
    pub drain_delay_seconds: u64,
    /// How long open answers may go on after that.
    pub drain_timeout_seconds: u64,
    /// Receipts kept in memory.
    pub receipts: u64,
    /// Memory for token ids and block hashes of prompts seen before; 0: none.
    pub prompt_cache_bytes: u64,
    /// Most prompts in one request.
    // Left out where it is the default, so that routers of earlier releases read the file.
    #[serde(skip_serializing_if = "is_default_prompts")]
    pub prompts_per_request: u64,
}

/// Most prompts in one request unless settings say otherwise. Each is looked up by
/// itself.
const DEFAULT_PROMPTS: u64 = 1024;

/// Most requests that wait for a worker unless settings say otherwise: some seconds of
/// a busy router's, whose bodies have room beside each other.
const DEFAULT_WAITING: u64 = 1024;

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
const fn is_default_waiting(requests: &u64) -> bool {
    *requests == DEFAULT_WAITING
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
const fn is_default_prompts(prompts: &u64) -> bool {
    *prompts == DEFAULT_PROMPTS
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_body_bytes: 64 << 20,
            connect_timeout_seconds: 3,
            first_byte_timeout_seconds: 600,
            no_worker_wait_seconds: 5,
            no_worker_wait_requests: DEFAULT_WAITING,
            drain_delay_seconds: 5,
            drain_timeout_seconds: 120,
            receipts: 4096,
            prompt_cache_bytes: 256 << 20,
            prompts_per_request: DEFAULT_PROMPTS,
        }
    }
}

/// Where receipts are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReceiptFiles {
    /// The folder; made where it is absent. Each router needs its own.
    pub directory: PathBuf,
    /// Largest file; a longer one is closed and the next one begun.
    #[serde(default = "default_receipt_file_bytes")]
    pub max_bytes: u64,
    /// Files kept, the one being written included; the oldest goes.
    #[serde(default = "default_receipt_files")]
    pub max_files: u64,
}

const fn default_receipt_file_bytes() -> u64 {
    64 << 20
}

const fn default_receipt_files() -> u64 {
    16
}

/// Which rule chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Policy {
    /// Uncached work, queued work and decode load, in tokens.
    #[default]
    CachePlusLoad,
    /// The published formula, in blocks.
    KvAware,
    /// Most leading blocks held, whatever the load.
    LongestPrefix,
    /// Fewest active blocks.
    LeastLoad,
    /// In turn.
    RoundRobin,
    /// Tokens to prefill times requests in the batch.
    LMetric,
}

/// Weight of what is not cached, per role.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OverlapWeights {
    /// For roles without one of their own.
    #[serde(default = "default_weight")]
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub default: f64,
    /// For prefill picks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub prefill: Option<f64>,
    /// For decode picks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub decode: Option<f64>,
}

impl Default for OverlapWeights {
    fn default() -> Self {
        Self { default: default_weight(), prefill: None, decode: None }
    }
}

/// Weights of `CachePlusLoad`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LoadWeights {
    /// Per uncached token that already waits on the target.
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub queue: f64,
    /// Per token in the contexts of the target's requests in flight.
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub decode: f64,
    /// Per request in flight, in tokens.
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub request: f64,
    /// Per token of load above the fleet's mean.
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub imbalance: f64,
}

impl Default for LoadWeights {
    fn default() -> Self {
        Self { queue: 0.5, decode: 0.02, request: 0.0, imbalance: 0.0 }
    }
}

/// How long trust lasts and what comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Freshness {
    /// Credit ends this long after the last proof of a view.
    #[schemars(range(min = 3, max = 3600))]
    pub budget_seconds: u64,
    /// What decides for a target whose view earns no credit.
    pub fallback: Fallback,
}

impl Default for Freshness {
    fn default() -> Self {
        Self { budget_seconds: 10, fallback: Fallback::History }
    }
}

/// What decides for a target whose view earns no credit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Fallback {
    /// Where its prefixes were sent before.
    #[default]
    History,
    /// Load alone.
    Load,
}

const fn default_block_size() -> u32 {
    16
}

const fn default_dp_size() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
const fn is_default_dp_size(dp_size: &u32) -> bool {
    *dp_size == default_dp_size()
}

const fn default_image_weight() -> f64 {
    DEFAULT_IMAGE_WEIGHT
}

const fn default_weight() -> f64 {
    1.0
}

fn default_name() -> String {
    "default".to_owned()
}

fn default_subject_prefix() -> String {
    DEFAULT_SUBJECT_PREFIX.to_owned()
}

impl Default for PoolName {
    fn default() -> Self {
        Self { namespace: default_name(), name: default_name() }
    }
}
