//! Flags, variables and files to validated settings.
//!
//! Here are the settings of `serve`, the flags of `bridge`, and the list of commands;
//! offline commands keep their flags beside what they do. Variables are read here alone,
//! and this is the only caller of `serde_yaml`. Flag beats variable beats file.
//! Everything is checked before a port opens, and every complaint names file, line and
//! field. What makes sense stands in `checks`.

mod checks;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use http::HeaderName;
use kvrouter_core::policy::decode_demand::{self, DecodeDemand, DemandMode};
use kvrouter_core::policy::sessions::SessionMode;
use kvrouter_core::policy::shadow::PolicySet;
use kvrouter_core::policy::{
    ImageWeight, LoadWeights, OverlapWeights, Overload, PolicyKind, SessionSettings, Settings, Switch,
    TierCredit,
};
use kvrouter_core::trust::Freshness;
use kvrouter_core::units::{BlockSize, Millis, Tokens};
use kvrouter_crds::config::{
    self as file, DEFAULT_SUBJECT_PREFIX, EventTransport, Fallback, ForwardTokenIds, LiveSettings,
    PageSizePolicy, PrefillGuardRelease, Protocol, RouterConfig,
};
use tokio::sync::Semaphore;

use crate::feed::zmtp::Endpoint;
use crate::tenancy::{MIN_SECRET, Tenancy};
use checks::{Checked, Complaint, check, check_live, check_version, complain};
pub use checks::{is_dns_label, is_subject_prefix, worker_id};

/// KV-cache-aware routing for LLM engines.
#[derive(Debug, Parser)]
#[command(name = "kv-router", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves an OpenAI-compatible endpoint in front of a pool of engines.
    Serve(Box<ServeFlags>),
    /// Runs beside one engine: turns its cache events into deltas on NATS.
    Bridge(Box<BridgeFlags>),
    /// Replays a trace under policies, offline, and compares what comes of it.
    Replay(Box<crate::replay::ReplayFlags>),
    /// Prints what the router makes of one request body: text, ids, block hashes.
    Tokenize(Box<crate::prompt::trace::TokenizeFlags>),
    /// Serves the page that replays a lab trace in the browser, or writes it to a file.
    Lab(Box<crate::lab::LabFlags>),
    /// Compares a grid of settings on two traces, and judges the defaults.
    Study(crate::study::StudyFlags),
    /// Checks files of receipts, or prints them as CSV.
    Receipts(crate::receipts::command::ReceiptsFlags),
}

/// Flags of `serve`. Each one beats its variable, which beats the file.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeFlags {
    /// Start settings.
    #[arg(long, env = "KVROUTER_CONFIG")]
    pub config: PathBuf,
    /// Live settings: read at start and whenever the file changes.
    #[arg(long, env = "KVROUTER_LIVE_CONFIG")]
    pub live_config: Option<PathBuf>,
    /// Which rule chooses.
    #[arg(long, env = "KVROUTER_ROUTER_POLICY")]
    pub router_policy: Option<PolicyFlag>,
    /// Weight of what is not cached.
    #[arg(long, env = "KVROUTER_KV_OVERLAP_WEIGHT")]
    pub kv_overlap_weight: Option<f64>,
    /// The same for prefill picks.
    #[arg(long, env = "KVROUTER_KV_PREFILL_OVERLAP_WEIGHT")]
    pub kv_prefill_overlap_weight: Option<f64>,
    /// The same for decode picks.
    #[arg(long, env = "KVROUTER_KV_DECODE_OVERLAP_WEIGHT")]
    pub kv_decode_overlap_weight: Option<f64>,
    /// How cache events arrive.
    #[arg(long, env = "KVROUTER_KV_EVENT_TRANSPORT")]
    pub kv_event_transport: Option<TransportFlag>,
    /// Where workers are found.
    #[arg(long, env = "KVROUTER_DISCOVERY_BACKEND")]
    pub discovery_backend: Option<DiscoveryFlag>,
    /// Which picks follow their session.
    #[arg(long, env = "KVROUTER_SESSION_AFFINITY")]
    pub session_affinity: Option<SessionFlag>,
    /// Whether decode picks follow the input that targets hold.
    #[arg(long, env = "KVROUTER_DECODE_INPUT_DEMAND")]
    pub decode_input_demand: Option<DemandFlag>,
    /// Tokens that every request held counts for that, beside its input.
    #[arg(long, env = "KVROUTER_DECODE_REQUEST_WEIGHT")]
    pub decode_request_weight: Option<f64>,
    /// How long a prefill worker is charged for a request that another decodes.
    #[arg(long, env = "KVROUTER_PD_PREFILL_GUARD_RELEASE")]
    pub pd_prefill_guard_release: Option<GuardFlag>,
    /// Whether workers get the token ids of their prompts.
    #[arg(long, env = "KVROUTER_FORWARD_TOKEN_IDS")]
    pub forward_token_ids: Option<ForwardFlag>,
    /// Folder with `tokenizer.json`.
    #[arg(long, env = "KVROUTER_ROUTER_TOKENIZER_PATH")]
    pub router_tokenizer_path: Option<PathBuf>,
    /// Address for requests.
    #[arg(long, env = "KVROUTER_LISTEN_HTTP")]
    pub listen_http: Option<SocketAddr>,
    /// Address for `/metrics` and `/health/report`.
    #[arg(long, env = "KVROUTER_LISTEN_METRICS")]
    pub listen_metrics: Option<SocketAddr>,
    /// Address for the admin endpoints.
    #[arg(long, env = "KVROUTER_LISTEN_ADMIN")]
    pub listen_admin: Option<SocketAddr>,
    /// Seconds between two lists of what is watched through the Kubernetes API:
    /// so long a watch that fell silent goes unnoticed.
    #[arg(long, env = "KVROUTER_RELIST_SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub relist_seconds: u64,
    /// Seconds between two comparisons of a worker's tokens with the router's.
    #[arg(long, env = "KVROUTER_RENDER_CHECK_SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub render_check_seconds: u64,
    /// Log lines as JSON.
    #[arg(long, env = "KVROUTER_LOG_JSON")]
    pub log_json: bool,
}

/// Flags of `bridge`.
#[derive(Clone, Debug, Args)]
pub struct BridgeFlags {
    /// A worker's `host:port`, as routers know it. Several are several ports of
    /// one pod: ranks and their sockets count on from each to the next.
    #[arg(long = "worker", env = "KVROUTER_WORKER", value_delimiter = ',', required = true)]
    pub workers: Vec<String>,
    /// The engine's publisher; rank r is at port + r.
    #[arg(long, env = "KVROUTER_KV_EVENTS", default_value = "tcp://127.0.0.1:5557")]
    pub kv_events: Endpoint,
    /// The engine's replay socket; rank r is at port + r. Absent: lost messages
    /// cannot be repaired.
    #[arg(long, env = "KVROUTER_KV_REPLAY")]
    pub kv_replay: Option<Endpoint>,
    /// Data-parallel ranks of each worker.
    #[arg(long, env = "KVROUTER_DP_SIZE", default_value_t = 1)]
    pub dp_size: u32,
    /// The broker.
    #[arg(long, env = "KVROUTER_NATS_URL")]
    pub nats_url: String,
    /// Credentials file for the broker.
    #[arg(long, env = "KVROUTER_NATS_CREDENTIALS")]
    pub nats_credentials: Option<PathBuf>,
    /// First token of every subject.
    #[arg(long, env = "KVROUTER_SUBJECT_PREFIX", default_value = DEFAULT_SUBJECT_PREFIX)]
    pub subject_prefix: String,
    /// Kubernetes namespace of the pool.
    #[arg(long, env = "KVROUTER_NAMESPACE", default_value = "default")]
    pub namespace: String,
    /// Name of the pool.
    #[arg(long, env = "KVROUTER_POOL", default_value = "default")]
    pub pool: String,
    /// The pool's model, as its routers have it.
    #[arg(long, env = "KVROUTER_MODEL")]
    pub model: String,
    /// The model's revision, as the pool's routers have it.
    #[arg(long, env = "KVROUTER_REVISION", default_value = "")]
    pub revision: String,
    /// Tokens per block, as the pool's routers have it.
    #[arg(long, env = "KVROUTER_BLOCK_SIZE", default_value_t = 16)]
    pub block_size: u32,
    /// File with the secret that keys all block hashes.
    #[arg(long, env = "KVROUTER_IDENTITY_SEED_FILE")]
    pub identity_seed_file: Option<PathBuf>,
    /// Folder that outlives the bridge's container but not the pod.
    #[arg(long, env = "KVROUTER_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Seconds for which a view with a gap is kept before it is rebuilt from empty:
    /// the longest `freshness.budgetSeconds` of the pool's routers.
    #[arg(long, env = "KVROUTER_BUDGET_SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(3..=3600))]
    pub budget_seconds: u64,
    /// Address for `/livez` and `/metrics`.
    #[arg(long, env = "KVROUTER_LISTEN_METRICS", default_value = "127.0.0.1:9092")]
    pub listen_metrics: SocketAddr,
    /// Log lines as JSON.
    #[arg(long, env = "KVROUTER_LOG_JSON")]
    pub log_json: bool,
}

/// A policy as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the policies'")]
pub enum PolicyFlag {
    CachePlusLoad,
    KvAware,
    LongestPrefix,
    LeastLoad,
    RoundRobin,
    #[value(name = "lmetric")]
    LMetric,
}

/// An event transport as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the transports'")]
pub enum TransportFlag {
    Nats,
    Zmq,
    None,
}

/// Which picks follow their session, as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the modes'")]
pub enum SessionFlag {
    Disabled,
    Prefill,
    Both,
}

/// Whether workers get token ids, as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the modes'")]
pub enum ForwardFlag {
    Never,
    WhenConfirmed,
}

/// Whether decode picks follow input demand, as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the modes'")]
pub enum DemandFlag {
    Disabled,
    Shadow,
    Enabled,
}

/// How long prefill is charged, as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the moments'")]
pub enum GuardFlag {
    Decode,
    Completion,
}

/// A discovery backend as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the backends'")]
pub enum DiscoveryFlag {
    Static,
    Kubernetes,
}

/// Settings of `serve` that make sense together.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// The file, with flags and variables applied.
    pub file: RouterConfig,
    /// Digest of the file's text as it was read.
    pub digest: String,
    /// Tokens per block.
    pub size: BlockSize,
    /// Settings in force at start.
    pub live: Live,
    /// The same without the live file: what a value that leaves it goes back to.
    pub base: Live,
    /// The policy and weights that flags and variables set: they beat both files.
    pub flags: ServeFlags,
    /// The file that may change them.
    pub live_path: Option<PathBuf>,
    /// Between two lists of what is watched through the Kubernetes API.
    pub relist: Duration,
    /// Between two comparisons of a worker's tokens with the router's.
    pub render_check: Duration,
    /// Secret that keys all block hashes; empty without one.
    pub identity_seed: Vec<u8>,
    /// How tenants are told from each other; `None` where they are not.
    pub tenancy: Option<Tenancy>,
    /// Token that the admin port requires.
    pub admin_token: Option<String>,
}

/// What may change while the router runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Live {
    /// Settings of decisions.
    pub settings: Settings,
    /// How long trust lasts.
    pub freshness: Freshness,
    /// What decides for a target whose view earns no credit.
    pub fallback: Fallback,
    /// What happens to a worker whose page size is not the others'.
    pub page_sizes: PageSizePolicy,
    /// Whether workers get the token ids of their prompts.
    pub forward_token_ids: ForwardTokenIds,
    /// How long a prefill worker is charged for a request that another decodes.
    pub prefill_guard: PrefillGuardRelease,
    /// Selectors of other pools.
    pub foreign_selectors: Arc<[BTreeMap<String, String>]>,
    /// Digest of the live text; `None` while there is none.
    pub digest: Option<Arc<str>>,
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{}: {source}; check that it exists and is readable", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        source: std::io::Error,
    },
    /// The file is not the expected YAML.
    #[error("{}:{line}: {message}", path.display())]
    Yaml {
        /// The file.
        path: PathBuf,
        /// The line, from 1; 0 where unknown.
        line: usize,
        /// Field and complaint.
        message: String,
    },
    /// A value makes no sense.
    #[error("{}:{line}: {field}: {message}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The line of the field, from 1; 0 where it is not in the file.
        line: usize,
        /// The field, as a path.
        field: String,
        /// What is wrong and what to do.
        message: String,
    },
}

impl ServeConfig {
    /// Reads the file, applies flags and variables, and checks the whole.
    pub fn load(flags: &ServeFlags) -> Result<Self, ConfigError> {
        let path = &flags.config;
        let text = read(path)?;
        let mut file: RouterConfig = parse(path, &text)?;
        apply_flags(&mut file, flags);
        check(&file)
            .and_then(|()| check_live_sources(&file, flags))
            .map_err(|complaint| complaint.at(path, &text))?;
        let size = BlockSize::new(file.block_size).ok_or_else(|| {
            Complaint { field: "blockSize".into(), message: "must be at least 1".into() }.at(path, &text)
        })?;
        let base = Live::of(&file);
        let identity_seed = match &file.identity_seed_file {
            Some(path) => read_secret(path)?.into_bytes(),
            None => Vec::new(),
        };
        let admin_token = file.admin_token_file.as_deref().map(read_secret).transpose()?;
        if admin_token.as_deref() == Some("") {
            let message = "names an empty file; put a token in it".to_owned();
            return Err(Complaint { field: "adminTokenFile".into(), message }.at(path, &text));
        }
        let tenancy = file.tenancy.as_ref().map(|tenancy| load_tenancy(tenancy, path, &text)).transpose()?;
        let (live_path, flags) = (flags.live_config.clone(), flags.clone());
        let relist = Duration::from_secs(flags.relist_seconds);
        let render_check = Duration::from_secs(flags.render_check_seconds);
        let (live, digest) = (base.clone(), file::digest(&text));
        let mut config = Self {
            size,
            live,
            base,
            flags,
            live_path,
            relist,
            render_check,
            identity_seed,
            tenancy,
            admin_token,
            file,
            digest,
        };
        if let Some(path) = &config.live_path {
            config.live = config.live_of(&read(path)?, path)?;
        }
        Ok(config)
    }

    /// What is in force with the text of live settings, which came from `path`:
    /// where they say nothing, what was in force at start, and where a flag says
    /// otherwise, the flag.
    pub fn live_of(&self, text: &str, path: &Path) -> Result<Live, ConfigError> {
        let (base, flags) = (&self.base, &self.flags);
        let mut live: LiveSettings = parse(path, text)?;
        if flags.router_policy.is_some() {
            live.policy = None;
            let LiveSettings { load_weights, shadow_policies, decode_input_demand, .. } = &mut live;
            let (shadows, demand) = (shadow_policies.as_mut(), decode_input_demand.as_mut());
            leave_out_other_policies(base.settings.policy, load_weights, shadows, demand);
        }
        if flags.forward_token_ids.is_some() {
            live.forward_token_ids = None;
        }
        if flags.session_affinity.is_some() {
            let mode = file_mode(base.settings.sessions.mode);
            live.session_affinity.iter_mut().for_each(|affinity| affinity.mode = mode);
        }
        if flags.pd_prefill_guard_release.is_some() {
            live.pd_prefill_guard_release = None;
        }
        if let Some(demand) = &mut live.decode_input_demand {
            let base = base.settings.decode_demand;
            demand.mode = flags.decode_input_demand.map_or(demand.mode, |_| file_demand(base.mode));
            demand.request_weight = flags.decode_request_weight.unwrap_or(demand.request_weight);
        }
        if let Some(weights) = &mut live.overlap_weights {
            weights.default = flags.kv_overlap_weight.unwrap_or(weights.default);
            weights.prefill = flags.kv_prefill_overlap_weight.or(weights.prefill);
            weights.decode = flags.kv_decode_overlap_weight.or(weights.decode);
        }
        check_live(&live, &self.file, &base.settings).map_err(|complaint| complaint.at(path, text))?;
        Ok(Live { digest: Some(file::digest(text).into()), ..base.clone().with(&live) })
    }

    /// The protocols that prefill and decode workers may speak; none where all
    /// workers are mixed.
    pub fn protocols(&self) -> BTreeSet<Protocol> {
        let discovery = &self.file.discovery;
        let pods = discovery.kubernetes.iter().flat_map(|found| &found.roles).map(|role| role.protocol);
        pods.chain(discovery.workers.iter().map(|worker| worker.protocol)).flatten().collect()
    }

    /// How many requests may wait for a worker at once.
    pub fn waiting_places(&self) -> usize {
        let places = usize::try_from(self.file.limits.no_worker_wait_requests).unwrap_or(usize::MAX);
        places.min(Semaphore::MAX_PERMITS)
    }

    /// Namespace and name of the ConfigMap with live settings.
    pub fn live_map(&self) -> Option<(&str, &str)> {
        let kubernetes = self.file.discovery.kubernetes.as_ref()?;
        Some((&kubernetes.namespace, kubernetes.live_settings_config_map.as_deref()?))
    }
}

impl Live {
    fn of(file: &RouterConfig) -> Self {
        Self::default().with(&LiveSettings {
            schema_version: file.schema_version,
            policy: Some(file.policy),
            overlap_weights: Some(file.overlap_weights),
            load_weights: file.load_weights,
            freshness: Some(file.freshness),
            in_flight_credit: Some(file.in_flight_credit),
            overload: Some(file.overload),
            image_weight: Some(file.image_weight),
            tier_credits: Some(file.tier_credits),
            session_affinity: Some(file.session_affinity),
            shadow_policies: Some(file.shadow_policies.clone()),
            page_size_policy: Some(file.page_size_policy),
            forward_token_ids: Some(file.forward_token_ids),
            decode_input_demand: Some(file.decode_input_demand),
            pd_prefill_guard_release: Some(file.pd_prefill_guard_release),
            foreign_selectors: Vec::new(),
        })
    }

    fn with(mut self, live: &LiveSettings) -> Self {
        let settings = &mut self.settings;
        if let Some(policy) = live.policy {
            settings.policy = kind_of(policy);
        }
        if let Some(weights) = live.overlap_weights {
            let file::OverlapWeights { default, prefill, decode } = weights;
            settings.overlap = OverlapWeights { default, prefill, decode };
        }
        if let Some(weights) = live.load_weights {
            let file::LoadWeights { queue, decode, request, imbalance } = weights;
            settings.load = LoadWeights { queue, decode, request, imbalance };
        }
        if let Some(credit) = live.in_flight_credit {
            settings.in_flight_credit = switch(credit);
        }
        if let Some(overload) = live.overload {
            let max_queued = overload.max_queued_tokens.map(Tokens);
            settings.overload = Overload { max_queued, cold_reserve: overload.cold_reserve };
        }
        if let Some(weight) = live.image_weight {
            settings.image_weight = ImageWeight(weight);
        }
        if let Some(file::TierCredits { device, host, disk }) = live.tier_credits {
            settings.tiers = TierCredit { device, host, disk };
        }
        if let Some(affinity) = live.session_affinity {
            let time_to_live = Millis::from_secs(affinity.ttl_seconds);
            settings.sessions = SessionSettings { mode: session_mode(affinity.mode), time_to_live };
        }
        if let Some(shadows) = &live.shadow_policies {
            let all = shadows.iter().map(|policy| kind_of(*policy));
            settings.shadows = all.fold(PolicySet::default(), PolicySet::with);
        }
        if let Some(freshness) = live.freshness {
            self.freshness.budget = Millis::from_secs(freshness.budget_seconds);
            self.fallback = freshness.fallback;
        }
        if let Some(file::DecodeInputDemand { mode, request_weight }) = live.decode_input_demand {
            settings.decode_demand = DecodeDemand { mode: demand_mode(mode), request_weight };
        }
        self.prefill_guard = live.pd_prefill_guard_release.unwrap_or(self.prefill_guard);
        self.page_sizes = live.page_size_policy.unwrap_or(self.page_sizes);
        self.forward_token_ids = live.forward_token_ids.unwrap_or(self.forward_token_ids);
        self.foreign_selectors = live.foreign_selectors.clone().into();
        self
    }
}

const fn kind_of(policy: file::Policy) -> PolicyKind {
    match policy {
        file::Policy::CachePlusLoad => PolicyKind::CachePlusLoad,
        file::Policy::KvAware => PolicyKind::KvAware,
        file::Policy::LongestPrefix => PolicyKind::LongestPrefix,
        file::Policy::LeastLoad => PolicyKind::LeastLoad,
        file::Policy::RoundRobin => PolicyKind::RoundRobin,
        file::Policy::LMetric => PolicyKind::LMetric,
    }
}

const fn session_mode(mode: file::SessionMode) -> SessionMode {
    match mode {
        file::SessionMode::Disabled => SessionMode::Disabled,
        file::SessionMode::Prefill => SessionMode::Prefill,
        file::SessionMode::Both => SessionMode::Both,
    }
}

const fn file_mode(mode: SessionMode) -> file::SessionMode {
    match mode {
        SessionMode::Disabled => file::SessionMode::Disabled,
        SessionMode::Prefill => file::SessionMode::Prefill,
        SessionMode::Both => file::SessionMode::Both,
    }
}

const fn demand_mode(mode: file::DemandMode) -> DemandMode {
    match mode {
        file::DemandMode::Disabled => DemandMode::Disabled,
        file::DemandMode::Shadow => DemandMode::Shadow,
        file::DemandMode::Enabled => DemandMode::Enabled,
    }
}

const fn file_demand(mode: DemandMode) -> file::DemandMode {
    match mode {
        DemandMode::Disabled => file::DemandMode::Disabled,
        DemandMode::Shadow => file::DemandMode::Shadow,
        DemandMode::Enabled => file::DemandMode::Enabled,
    }
}

const fn switch(switch: file::Switch) -> Switch {
    match switch {
        file::Switch::Disabled => Switch::Disabled,
        file::Switch::Enabled => Switch::Enabled,
    }
}

/// Leaves out of a file what only counts with another policy than `policy`, which a
/// flag set: the flag beats that, and the rest of the file stays in force.
fn leave_out_other_policies(
    policy: PolicyKind,
    load_weights: &mut Option<file::LoadWeights>,
    shadows: Option<&mut Vec<file::Policy>>,
    demand: Option<&mut file::DecodeInputDemand>,
) {
    if policy != PolicyKind::CachePlusLoad {
        *load_weights = None;
    }
    if let Some(shadows) = shadows {
        shadows.retain(|shadow| kind_of(*shadow) != policy);
    }
    if let Some(demand) = demand.filter(|_| !decode_demand::suits(policy)) {
        demand.mode = file::DemandMode::Disabled;
    }
}

fn apply_flags(file: &mut RouterConfig, flags: &ServeFlags) {
    if let Some(policy) = flags.router_policy {
        file.policy = match policy {
            PolicyFlag::CachePlusLoad => file::Policy::CachePlusLoad,
            PolicyFlag::KvAware => file::Policy::KvAware,
            PolicyFlag::LongestPrefix => file::Policy::LongestPrefix,
            PolicyFlag::LeastLoad => file::Policy::LeastLoad,
            PolicyFlag::RoundRobin => file::Policy::RoundRobin,
            PolicyFlag::LMetric => file::Policy::LMetric,
        };
        let RouterConfig { load_weights, shadow_policies, decode_input_demand, .. } = file;
        let (shadows, demand) = (Some(shadow_policies), Some(decode_input_demand));
        leave_out_other_policies(kind_of(file.policy), load_weights, shadows, demand);
    }
    if let Some(weight) = flags.kv_overlap_weight {
        file.overlap_weights.default = weight;
    }
    file.overlap_weights.prefill = flags.kv_prefill_overlap_weight.or(file.overlap_weights.prefill);
    file.overlap_weights.decode = flags.kv_decode_overlap_weight.or(file.overlap_weights.decode);
    if let Some(transport) = flags.kv_event_transport {
        file.kv_events.transport = match transport {
            TransportFlag::Nats => EventTransport::NATS,
            TransportFlag::Zmq => EventTransport::ZMQ,
            TransportFlag::None => EventTransport::None,
        };
    }
    if let Some(mode) = flags.session_affinity {
        file.session_affinity.mode = match mode {
            SessionFlag::Disabled => file::SessionMode::Disabled,
            SessionFlag::Prefill => file::SessionMode::Prefill,
            SessionFlag::Both => file::SessionMode::Both,
        };
    }
    if let Some(mode) = flags.decode_input_demand {
        file.decode_input_demand.mode = match mode {
            DemandFlag::Disabled => file::DemandMode::Disabled,
            DemandFlag::Shadow => file::DemandMode::Shadow,
            DemandFlag::Enabled => file::DemandMode::Enabled,
        };
    }
    if let Some(weight) = flags.decode_request_weight {
        file.decode_input_demand.request_weight = weight;
    }
    if let Some(moment) = flags.pd_prefill_guard_release {
        file.pd_prefill_guard_release = match moment {
            GuardFlag::Decode => PrefillGuardRelease::Decode,
            GuardFlag::Completion => PrefillGuardRelease::Completion,
        };
    }
    if let Some(mode) = flags.forward_token_ids {
        file.forward_token_ids = match mode {
            ForwardFlag::Never => ForwardTokenIds::Never,
            ForwardFlag::WhenConfirmed => ForwardTokenIds::WhenConfirmed,
        };
    }
    if let Some(backend) = flags.discovery_backend {
        file.discovery.backend = match backend {
            DiscoveryFlag::Static => file::DiscoveryBackend::Static,
            DiscoveryFlag::Kubernetes => file::DiscoveryBackend::Kubernetes,
        };
    }
    if let Some(path) = &flags.router_tokenizer_path {
        file.model.tokenizer = Some(file::Tokenizer { path: path.clone() });
    }
    file.listen.http = flags.listen_http.unwrap_or(file.listen.http);
    file.listen.metrics = flags.listen_metrics.unwrap_or(file.listen.metrics);
    file.listen.admin = flags.listen_admin.unwrap_or(file.listen.admin);
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

/// A secret from a file, without the newline that editors add.
pub fn read_secret(path: &Path) -> Result<String, ConfigError> {
    let text = read(path)?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Tenancy with the secret from its file. The file of settings is `path`, with `text`.
fn load_tenancy(tenancy: &file::Tenancy, path: &Path, text: &str) -> Result<Tenancy, ConfigError> {
    let secret = read_secret(&tenancy.salt_secret_file)?;
    let complaint = |field: &str, message: String| Complaint { field: field.into(), message }.at(path, text);
    if secret.len() < MIN_SECRET {
        let message = format!("names a file with fewer than {MIN_SECRET} bytes; put a longer secret in it");
        return Err(complaint("tenancy.saltSecretFile", message));
    }
    let header = HeaderName::from_bytes(tenancy.header.as_bytes());
    let header = header.map_err(|_| complaint("tenancy.header", checks::NO_HEADER.to_owned()))?;
    Ok(Tenancy::new(header, tenancy.without_header, secret.as_bytes()))
}

/// Live settings come from one place.
fn check_live_sources(file: &RouterConfig, flags: &ServeFlags) -> Checked {
    let map = file.discovery.kubernetes.as_ref().and_then(|found| found.live_settings_config_map.as_ref());
    match (&flags.live_config, map) {
        (Some(_), Some(_)) => complain(
            "discovery.kubernetes.liveSettingsConfigMap",
            "is set, and --live-config is given too; remove one of them",
        ),
        _ => Ok(()),
    }
}

/// The part of a file that is read first: in a newer one other fields may be
/// unknown here.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Versioned {
    schema_version: u32,
}

/// Settings in `text`, which came from `path`: well typed and of our version.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    if let Ok(Versioned { schema_version }) = serde_yaml::from_str(text) {
        check_version(schema_version).map_err(|complaint| complaint.at(path, text))?;
    }
    serde_yaml::from_str(text).map_err(|error| {
        let line = error.location().map_or(0, |location| location.line());
        let message = error.to_string();
        // The position stands in front already.
        let message = message.split(" at line ").next().unwrap_or(&message).to_owned();
        ConfigError::Yaml { path: path.to_owned(), line, message }
    })
}

impl Complaint {
    fn at(self, path: &Path, text: &str) -> ConfigError {
        let line = line_of(text, &self.field);
        ConfigError::Value { path: path.to_owned(), line, field: self.field, message: self.message }
    }
}

/// The line, from 1, where `field` (a path like `a.b[2].c`) stands in block
/// style YAML; its nearest parent's line where it is absent, 0 for none.
fn line_of(text: &str, field: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let (mut at, mut found) = (0, 0);
    for step in field.split('.') {
        let (name, index) = match step.split_once('[') {
            Some((name, index)) => (name, index.trim_end_matches(']').parse::<usize>().ok()),
            None => (step, None),
        };
        let is_key = |line: &&str| {
            let line = line.trim_start_matches([' ', '-', '{', '"', '\'']);
            line.strip_prefix(name).is_some_and(|rest| rest.trim_start_matches(['"', '\'']).starts_with(':'))
                || line.contains(&format!(" {name}:"))
        };
        let Some(offset) = lines.get(at..).and_then(|rest| rest.iter().position(is_key)) else { break };
        at += offset;
        // In flow style the items stand behind the name.
        let in_flow = lines[at].contains('[');
        if let Some(index) = index.filter(|_| !in_flow) {
            let items =
                lines.iter().enumerate().skip(at + 1).filter(|(_, line)| line.trim_start().starts_with('-'));
            at = items.map(|(number, _)| number).nth(index).unwrap_or(at);
        }
        found = at + 1;
    }
    found
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
