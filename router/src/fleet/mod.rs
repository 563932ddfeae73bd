//! Which workers exist, and whether they may be picked.
//!
//! A worker that is not ready gets no new picks; what it has in flight and what
//! the router knows of its cache stay. [`probe`] finds out by asking.

pub mod probe;

use std::sync::Arc;

use kvrouter_core::events::envelope::Status;
use kvrouter_core::ids::{Slot, Target, WorkerId};
use kvrouter_core::index::Index;
use kvrouter_core::policy::leases::Account;
use kvrouter_core::trust::Trust;
use kvrouter_crds::config::{Engine, EventEndpoints, EventTransport, RouterConfig, StaticWorker};
use parking_lot::{Mutex, RwLock};

use crate::feed::zmtp::Endpoint;

/// The workers of one pool.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Sorted by id.
    workers: Vec<Arc<Worker>>,
}

/// One engine process group.
#[derive(Debug)]
pub struct Worker {
    /// Its `host:port`, which is also the authority of its URL.
    pub id: WorkerId,
    /// Its ranks, in order; at least one.
    pub targets: Vec<Arc<TargetState>>,
    /// Where its events are; `None` where they come over NATS or not at all.
    pub events: Option<EventSockets>,
    /// What it was configured as.
    configured_engine: Engine,
    status: RwLock<WorkerStatus>,
}

/// A worker's event sockets; rank r is at port + r.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSockets {
    /// Publisher of rank 0.
    pub publisher: Endpoint,
    /// Replay socket of rank 0.
    pub replay: Option<Endpoint>,
}

/// One rank of a worker: its load and the view of its cache.
#[derive(Debug)]
pub struct TargetState {
    /// Its name.
    pub target: Target,
    /// Its place in the index.
    pub slot: Slot,
    /// What is booked on it.
    pub account: Arc<Account>,
    /// What its view is worth.
    pub trust: Mutex<Trust>,
    facts: Mutex<EventFacts>,
}

/// What events said about a target's cache besides its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventFacts {
    /// Tokens per page; `None` before the first store.
    pub page: Option<u32>,
    /// Groups other than main attention exist.
    pub hybrid: bool,
    /// Tokens come as pairs (EAGLE).
    pub paired: bool,
}

/// What probes found.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// Whether it may be picked.
    pub ready: bool,
    /// Why not.
    pub reason: ReadyReason,
    /// What it is, as far as known.
    pub engine: Engine,
    /// Its version, as it says it.
    pub engine_version: Option<Arc<str>>,
    /// Tokens per page, from its live endpoint.
    pub reported_page: Option<u32>,
    /// What it serves, as it said last.
    pub models: Vec<ServedModel>,
}

/// One entry of a worker's `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServedModel {
    /// The name that requests use.
    pub name: String,
    /// Whether it is a LoRA adapter of the base model.
    pub adapter: bool,
}

/// Why a worker may or may not be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadyReason {
    /// It may.
    Ok,
    /// It was not asked yet.
    NotProbed,
    /// It does not answer.
    Unreachable,
    /// Its health endpoint says no.
    Unhealthy,
    /// It serves no model yet.
    NoModel,
    /// It serves other models than the pool's.
    OtherModel,
}

impl ReadyReason {
    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NotProbed => "not_probed",
            Self::Unreachable => "unreachable",
            Self::Unhealthy => "unhealthy",
            Self::NoModel => "no_model",
            Self::OtherModel => "other_model",
        }
    }
}

impl Fleet {
    /// The workers of a static list, with room in the index for each rank. The
    /// list was checked before.
    pub fn of_static(config: &RouterConfig, index: &Index) -> Self {
        let mut workers: Vec<Arc<Worker>> = config
            .discovery
            .workers
            .iter()
            .filter_map(|worker| {
                let id = crate::config::worker_id(&worker.url).ok()?;
                Some(Arc::new(Worker::new(WorkerId::new(id), worker, config, index)))
            })
            .collect();
        workers.sort_by(|a, b| a.id.cmp(&b.id));
        Self { workers }
    }

    /// All workers, sorted by id.
    pub fn workers(&self) -> &[Arc<Worker>] {
        &self.workers
    }

    /// The worker named `id`.
    pub fn worker(&self, id: &str) -> Option<&Arc<Worker>> {
        self.workers.iter().find(|worker| worker.id.as_str() == id)
    }

    /// Names that requests may use, sorted: the pool's and what workers serve.
    pub fn models(&self, base: &str) -> Vec<ServedModel> {
        let mut models = vec![ServedModel { name: base.to_owned(), adapter: false }];
        for worker in &self.workers {
            models.extend(worker.status().models);
        }
        models.sort();
        models.dedup_by(|a, b| a.name == b.name);
        models
    }

    /// How many workers do not say what they serve: any of them may serve more
    /// than [`Fleet::models`] knows.
    pub fn silent(&self) -> usize {
        self.workers.iter().filter(|worker| worker.status().is_silent()).count()
    }
}

impl WorkerStatus {
    /// Whether it is not known what the worker serves now.
    fn is_silent(&self) -> bool {
        match self.reason {
            ReadyReason::NotProbed | ReadyReason::Unreachable => true,
            // It may have answered before it fell ill.
            ReadyReason::Unhealthy => self.models.is_empty(),
            ReadyReason::Ok | ReadyReason::NoModel | ReadyReason::OtherModel => false,
        }
    }
}

impl Worker {
    fn new(id: WorkerId, worker: &StaticWorker, config: &RouterConfig, index: &Index) -> Self {
        let configured_engine = worker.engine.unwrap_or(config.engine);
        let targets = (0..worker.dp_size)
            .map(|rank| Arc::new(TargetState::new(Target::new(id.clone(), rank), index.add_target())))
            .collect();
        let events = (config.kv_events.transport == EventTransport::ZMQ)
            .then(|| EventSockets::of(&id, worker.kv_events.as_ref(), config))
            .flatten();
        let status = WorkerStatus {
            ready: false,
            reason: ReadyReason::NotProbed,
            engine: configured_engine,
            engine_version: None,
            reported_page: None,
            models: Vec::new(),
        };
        Self { id, targets, events, configured_engine, status: RwLock::new(status) }
    }

    /// What probes found last.
    pub fn status(&self) -> WorkerStatus {
        self.status.read().clone()
    }

    /// Whether it may be picked.
    pub fn is_ready(&self) -> bool {
        self.status.read().ready
    }

    /// Whether it can answer a request for `adapter`: it serves a model of that
    /// name. Every ready worker serves the base model, which is `None`.
    pub fn serves(&self, adapter: Option<&str>) -> bool {
        let Some(adapter) = adapter else { return true };
        self.status.read().models.iter().any(|model| model.name == adapter)
    }

    /// Whether ranks are told apart by a header.
    pub fn has_ranks(&self) -> bool {
        self.targets.len() > 1
    }
}

impl EventSockets {
    fn of(id: &WorkerId, own: Option<&EventEndpoints>, config: &RouterConfig) -> Option<Self> {
        if let Some(own) = own {
            let replay = own.replay_endpoint.as_ref().and_then(|endpoint| endpoint.parse().ok());
            return Some(Self { publisher: own.endpoint.parse().ok()?, replay });
        }
        let (host, _) = id.as_str().rsplit_once(':')?;
        let at = |port: u16| format!("tcp://{host}:{port}").parse().ok();
        Some(Self { publisher: at(config.kv_events.port)?, replay: at(config.kv_events.replay_port) })
    }
}

impl TargetState {
    fn new(target: Target, slot: Slot) -> Self {
        Self { target, slot, account: Arc::default(), trust: Mutex::default(), facts: Mutex::default() }
    }

    /// What events said about the cache besides its content.
    pub fn facts(&self) -> EventFacts {
        *self.facts.lock()
    }

    /// Notes what a message said besides its deltas. `page` 0 says nothing.
    pub fn note(&self, status: Status, page: u32) {
        let mut facts = self.facts.lock();
        facts.page = (page != 0).then_some(page).or(facts.page);
        facts.hybrid = status.hybrid;
        facts.paired = status.paired;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(reason: ReadyReason, models: &[&str]) -> WorkerStatus {
        let model = |name: &&str| ServedModel { name: (*name).to_owned(), adapter: *name != "base" };
        WorkerStatus {
            ready: reason == ReadyReason::Ok,
            reason,
            engine: Engine::Auto,
            engine_version: None,
            reported_page: None,
            models: models.iter().map(model).collect(),
        }
    }

    fn worker(status: WorkerStatus) -> Worker {
        Worker {
            id: WorkerId::new("w:1"),
            targets: Vec::new(),
            events: None,
            configured_engine: Engine::Auto,
            status: RwLock::new(status),
        }
    }

    #[test]
    fn a_worker_serves_its_base_model_and_the_adapters_that_it_named() {
        let worker = worker(status(ReadyReason::Ok, &["base", "lora"]));
        for (adapter, serves) in [(None, true), (Some("lora"), true), (Some("other"), false)] {
            assert_eq!(worker.serves(adapter), serves, "{adapter:?}");
        }
    }

    #[test]
    fn workers_that_do_not_say_what_they_serve_are_silent() {
        let cases: [(ReadyReason, &[&str], bool); 7] = [
            (ReadyReason::NotProbed, &[], true),
            (ReadyReason::Unreachable, &["base"], true),
            (ReadyReason::Unhealthy, &[], true),
            (ReadyReason::Unhealthy, &["base"], false),
            (ReadyReason::NoModel, &[], false),
            (ReadyReason::OtherModel, &["x"], false),
            (ReadyReason::Ok, &["base"], false),
        ];
        for (reason, models, silent) in cases {
            let fleet = Fleet { workers: vec![Arc::new(worker(status(reason, models)))] };
            assert_eq!(fleet.silent() == 1, silent, "{reason:?} {models:?}");
        }
    }
}
