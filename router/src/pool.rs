//! The state of one pool, shared by all tasks of a router.
//!
//! Locks are held for microseconds and never across an await. Where two are
//! needed the order is: a target's trust, then its account; the index locks for
//! itself and is called with neither held. The fleet's list is swapped whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouter_core::blocks::{BlockHash, Domain, Identity, IdentitySeed, NamespaceId};
use kvrouter_core::events::Delta;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::ids::Epoch;
use kvrouter_core::index::Index;
use kvrouter_core::policy::history::History;
use kvrouter_core::policy::leases::Ledger;
use kvrouter_core::receipts::elsewhere::Beginnings;
use kvrouter_core::replicas::Heard;
use kvrouter_core::scratch::Scratches;
use kvrouter_crds::config::{DiscoveryBackend, Engine, EventTransport};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, watch};

use crate::clock::Clock;
use crate::config::{Live, ServeConfig};
use crate::fleet::{self, Fleet, TargetState, Worker};
use crate::metrics::Metrics;
use crate::prompt::Prompter;
use crate::prompt::unrendered::Unrendered;
use crate::receipts::Receipts;
use crate::responses::Responses;

/// Everything that requests, feeds and admin endpoints share.
#[derive(Debug)]
pub struct Pool {
    /// The settings it was started with.
    pub config: ServeConfig,
    /// The settings that may change.
    pub live: RwLock<Live>,
    /// Why the latest live settings were refused.
    pub live_refused: RwLock<Option<String>>,
    /// Counts the changes of the live settings.
    pub live_changed: watch::Sender<u64>,
    /// Whether the live settings were looked at once.
    pub live_known: AtomicBool,
    /// Roots and namespaces.
    pub identity: Identity,
    /// What the hashes are about.
    pub domain: Domain,
    /// Who holds which block.
    pub index: Arc<Index>,
    /// Where prefixes were sent.
    pub history: Mutex<History>,
    /// Select and book.
    pub ledger: Ledger,
    /// Which other routers of the pool were heard of.
    pub heard: Mutex<Heard>,
    /// Memory that picks use again.
    pub scratches: Scratches,
    /// The workers.
    pub fleet: Fleet,
    /// The latest receipts, and the way to their files.
    pub receipts: Receipts,
    /// How prompts of all namespaces begin; for receipts alone.
    pub beginnings: Mutex<Beginnings>,
    /// Which worker made which response.
    pub responses: Mutex<Responses>,
    /// Renders and tokenises.
    pub prompter: Arc<Prompter>,
    /// Why there is no tokenizer.
    pub tokenizer_failure: Option<String>,
    /// One permit per core, but two at least: prompts are prepared by so many
    /// threads at most.
    pub cpu: Arc<Semaphore>,
    /// One permit less. Large bodies need one of these first, so that there is
    /// always a thread that small ones need not wait for.
    pub cpu_for_large: Arc<Semaphore>,
    /// One permit for each request that may wait for a worker at once.
    pub waiting: Semaphore,
    /// What was lately not rendered.
    pub unrendered: Mutex<Unrendered>,
    /// The only clock.
    pub clock: Clock,
    /// Counters.
    pub metrics: Metrics,
    /// Whether the broker is connected; true without one.
    pub broker_connected: AtomicBool,
    /// Latched once the first views are there.
    pub ready: AtomicBool,
    /// What readiness waits for, or what it did not get before its time was
    /// over.
    pub awaited: Mutex<Awaited>,
    /// Set by SIGTERM.
    pub draining: AtomicBool,
}

/// What readiness waits for. As text: the label, and how many views are there of
/// how many, as in `views_pending 6/7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// A stable label; `ok` where nothing is amiss.
    pub label: &'static str,
    /// Views that are there and views that are waited for, where views are.
    pub views: Option<(usize, usize)>,
}

impl Awaited {
    /// Anything but views.
    pub const fn of(label: &'static str) -> Self {
        Self { label, views: None }
    }
}

impl std::fmt::Display for Awaited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.views {
            Some((there, all)) => write!(f, "{} {there}/{all}", self.label),
            None => f.write_str(self.label),
        }
    }
}

/// What a feed learned about one target.
#[derive(Debug)]
pub enum Change {
    /// The engine lives anew, or its view is being rebuilt: forget what it held.
    Reset,
    /// The whole of what it holds, as of message `seq`.
    Replaced {
        /// The engine's life.
        epoch: Epoch,
        /// Number of the last message in it.
        seq: u64,
        /// The set, as stores.
        deltas: Vec<Delta>,
        /// How sound it is.
        status: Status,
        /// Tokens per page; 0 while unknown.
        page: u32,
    },
    /// One message that continues the stream; a heartbeat has no deltas.
    Continued {
        /// The engine's life.
        epoch: Epoch,
        /// Number of the message.
        seq: u64,
        /// What changed.
        deltas: Vec<Delta>,
        /// How sound the view is.
        status: Status,
        /// Tokens per page; 0 while unknown.
        page: u32,
    },
    /// Messages are missing; a snapshot is on its way.
    Gap,
    /// The other side speaks of another domain.
    ForeignDomain,
}

impl Pool {
    /// A pool as `config` describes it, its static workers included.
    pub fn new(config: ServeConfig) -> Result<Self, prometheus::Error> {
        let identity = Identity::new(IdentitySeed::new(&config.identity_seed));
        let domain =
            Domain::new(&config.file.model.name, &config.file.model.revision, config.size, &identity);
        let clock = Clock::start();
        let (prompter, tokenizer_failure) = load_prompter(&config, clock.unique());
        let index = Arc::new(Index::default());
        let fleet = Fleet::default();
        if config.file.discovery.backend == DiscoveryBackend::Static {
            fleet.update(&fleet::of_static(&config.file), &index);
        }
        let has_live_map = config.live_map().is_some();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).max(2);
        let capacity = usize::try_from(config.file.limits.receipts).unwrap_or(usize::MAX);
        let places = config.waiting_places();
        Ok(Self {
            live: RwLock::new(config.live.clone()),
            live_refused: RwLock::default(),
            live_changed: watch::Sender::new(0),
            live_known: AtomicBool::new(!has_live_map),
            identity,
            domain,
            index,
            history: Mutex::default(),
            ledger: Ledger::default(),
            heard: Mutex::default(),
            scratches: Scratches::default(),
            fleet,
            receipts: Receipts::new(capacity),
            beginnings: Mutex::default(),
            responses: Mutex::default(),
            prompter: Arc::new(prompter),
            tokenizer_failure,
            cpu: Arc::new(Semaphore::new(threads)),
            cpu_for_large: Arc::new(Semaphore::new(threads - 1)),
            waiting: Semaphore::new(places),
            unrendered: Mutex::default(),
            clock,
            metrics: Metrics::new()?,
            broker_connected: AtomicBool::new(true),
            ready: AtomicBool::new(false),
            awaited: Mutex::new(Awaited::of("starting")),
            draining: AtomicBool::new(false),
            config,
        })
    }

    /// Whether `/readyz` succeeds: latched once the first views are there, and
    /// cleared only by SIGTERM.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) && !self.draining.load(Ordering::Relaxed)
    }

    /// Why `/readyz` fails, or why it does not although views are missing.
    pub fn awaited(&self) -> Awaited {
        match self.draining.load(Ordering::Relaxed) {
            true => Awaited::of("draining"),
            false => *self.awaited.lock(),
        }
    }

    /// How many other routers told of their load lately; `None` where routers cannot.
    /// Those without load are silent.
    pub fn replicas_heard(&self) -> Option<u64> {
        let shares = self.config.file.kv_events.transport == EventTransport::NATS;
        shares.then(|| self.heard.lock().count(self.clock.now()) as u64)
    }

    /// The engine family whose rendering prompts follow: the configured one,
    /// else what the first worker that told says it is.
    pub fn engine(&self) -> Engine {
        let told = || {
            self.fleet
                .workers()
                .iter()
                .map(|worker| worker.status().engine)
                .find(|engine| *engine != Engine::Auto)
        };
        match self.config.file.engine {
            Engine::Auto => told().unwrap_or(Engine::Auto),
            configured => configured,
        }
    }

    /// Hears of changes of the live settings from now on.
    pub fn live_changes(&self) -> watch::Receiver<u64> {
        self.live_changed.subscribe()
    }

    /// Remembers that `blocks` were sent to `target`, unless it has left: its
    /// place in the history may be a successor's one day.
    pub fn remember(&self, target: &TargetState, namespace: NamespaceId, blocks: &[BlockHash]) {
        let now = self.clock.now();
        let mut history = self.history.lock();
        // Under the lock: `forget` retires before it takes it.
        if !target.is_retired() {
            history.record(now, target.slot, namespace, blocks);
        }
    }

    /// Compares the workers' pages, as the settings in force have it.
    pub fn review_pages(&self) {
        let policy = self.live.read().page_sizes;
        self.fleet.review_pages(self.config.size.tokens(), policy);
    }

    /// Forgets a worker that left. What is in flight there goes on.
    pub fn forget(&self, worker: &Worker) {
        for target in &worker.targets {
            target.retire();
            self.index.retire_target(target.slot);
            self.history.lock().remove_target(target.slot);
        }
        self.ledger.forget_worker(&worker.id);
    }

    /// A view that was built message by message is now current.
    pub fn mark_synced(&self, target: &TargetState, epoch: Epoch, seq: u64, status: Status) {
        target.trust.lock().synced(self.clock.now(), epoch, seq, status);
    }

    /// Applies what a feed learned. Trust goes before blocks do, and comes after
    /// they came: a decision reads blocks first and trust second, so between the
    /// two it credits too little rather than too much.
    pub fn apply(&self, target: &TargetState, change: Change) {
        let now = self.clock.now();
        match change {
            Change::Reset => {
                target.trust.lock().reset();
                self.index.apply(target.slot, &Delta::Cleared);
                target.account.engine_restarted();
                target.restarted();
                self.history.lock().remove_target(target.slot);
            }
            Change::Replaced { epoch, seq, deltas, status, page } => {
                self.index.replace(target.slot, &deltas);
                let mut trust = target.trust.lock();
                trust.set_domain_mismatch(false);
                trust.synced(now, epoch, seq, status);
                if tell_of_blocks(&deltas) {
                    trust.stores_seen();
                }
                target.note(status, page);
            }
            Change::Continued { epoch, seq, deltas, status, page } => {
                deltas.iter().for_each(|delta| self.index.apply(target.slot, delta));
                if !deltas.is_empty() {
                    target.account.events_arrived();
                }
                let mut trust = target.trust.lock();
                trust.heard(now, epoch, seq, status);
                if tell_of_blocks(&deltas) {
                    trust.stores_seen();
                }
                drop(trust);
                target.note(status, page);
            }
            Change::Gap => target.trust.lock().gap(),
            Change::ForeignDomain => {
                target.trust.lock().set_domain_mismatch(true);
                self.index.apply(target.slot, &Delta::Cleared);
            }
        }
    }
}

/// Whether any of `deltas` says that blocks are held.
fn tell_of_blocks(deltas: &[Delta]) -> bool {
    deltas.iter().any(|delta| matches!(delta, Delta::Stored { .. }))
}

/// A tokenizer that cannot be loaded does not stop the router: it routes by
/// load, and says so.
fn load_prompter(config: &ServeConfig, seed: u64) -> (Prompter, Option<String>) {
    let Some(tokenizer) = &config.file.model.tokenizer else {
        return (Prompter::without_tokenizer(), Some("no tokenizer is configured".to_owned()));
    };
    let room = usize::try_from(config.file.limits.prompt_cache_bytes).unwrap_or(usize::MAX);
    match Prompter::load(&tokenizer.path, room, seed) {
        Ok(prompter) => {
            if let Some(reason) = prompter.uncached() {
                tracing::warn!(target: "kv_router", reason = %reason, "prefixes of prompts are not kept: every prompt is tokenised from its beginning");
            }
            (prompter, None)
        }
        Err(error) => {
            let message = crate::chain(&error);
            tracing::error!(target: "kv_router", path = %tokenizer.path.display(), error = %message, "no tokenizer: requests are routed by load");
            (Prompter::without_tokenizer(), Some(message))
        }
    }
}
