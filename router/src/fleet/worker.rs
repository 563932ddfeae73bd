//! One worker: its ranks, what discovery says of it and what probes found.
//!
//! A [`TargetState`] owns its slot in the index. The slot is handed out again
//! when the last holder of the target lets go of it, so that neither a feed nor
//! a pick under way can take the successor in that slot for the target it knew.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kvrouter_core::events::envelope::Status;
use kvrouter_core::ids::{DpRank, Role, Slot, Target, WorkerId};
use kvrouter_core::index::Index;
use kvrouter_core::policy::leases::Account;
use kvrouter_core::policy::lineup::{Entrant, Standing};
use kvrouter_core::reconcile::{self, Comparison, Drift, Reconciliation, Share};
use kvrouter_core::trust::SharedTrust;
use kvrouter_core::units::{BlockSize, Tick, Tokens};
use kvrouter_crds::config::{DEFAULT_BOOTSTRAP_PORT, Engine, EventEndpoints, KvEvents, Protocol};
use kvrouter_crds::health::ODD_PAGE;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use tokio_util::sync::CancellationToken;

use super::rendering::Rendering;
use crate::feed::zmtp;
use crate::prompt::endpoint::Endpoint;
use crate::tenancy;

/// One worker as discovery found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its `host:port`.
    pub id: WorkerId,
    /// Its pod, in Kubernetes.
    pub pod: Option<PodName>,
    /// What it is picked for and whether it may be.
    pub place: Place,
    /// What it was configured as.
    pub engine: Engine,
    /// Its ranks; at least one.
    pub dp_size: u32,
    /// Where its events are; `None` where they come over NATS or not at all.
    pub events: Option<EventSockets>,
}

/// Names one life of one pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Its name, which a successor may bear too.
    pub name: Arc<str>,
    /// Its UID, which no other pod ever has.
    pub uid: Arc<str>,
}

/// What discovery says of a worker besides its name. May change in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// What it is picked for.
    pub role: Role,
    /// How it hands requests over, where it does a part of them.
    pub handover: Option<Handover>,
    /// Why it may not be picked.
    pub exclusion: Option<Exclusion>,
}

/// How a prefill or decode worker hands requests over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// What it speaks.
    pub protocol: Protocol,
    /// Port of its bootstrap server, where the protocol has one.
    pub bootstrap_port: u16,
}

impl Handover {
    /// As settings have it.
    pub(super) fn of(protocol: Option<Protocol>, bootstrap_port: Option<u16>) -> Option<Self> {
        let bootstrap_port = bootstrap_port.unwrap_or(DEFAULT_BOOTSTRAP_PORT);
        protocol.map(|protocol| Self { protocol, bootstrap_port })
    }

    /// That of the `nth` port of a pod, from 0. The last one's exists: settings are
    /// checked for that.
    pub(super) fn of_port(self, nth: u32) -> Self {
        let offset = u16::try_from(nth).unwrap_or(u16::MAX);
        Self { bootstrap_port: self.bootstrap_port.saturating_add(offset), ..self }
    }
}

/// Why discovery keeps a pod out of routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exclusion {
    /// Its condition Ready is not true.
    PodNotReady,
    /// The pool has roles and it is of none.
    NoRole,
    /// It is of more than one role.
    TwoRoles,
    /// It belongs to another pool too.
    TwoPools,
    /// Another pod has its address.
    SameAddress,
}

/// What a request needs of its worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs<'a> {
    /// The adapter that it names; none for the base model.
    pub adapter: Option<&'a str>,
    /// Where it goes, if its engine must heed the salt of its tenant there.
    pub apart: Option<Endpoint>,
}

/// One engine process group.
#[derive(Debug)]
pub struct Worker {
    /// Its `host:port`, which is also the authority of its URL.
    pub id: WorkerId,
    /// Its pod, in Kubernetes.
    pub pod: Option<PodName>,
    /// Its ranks, in order; at least one.
    pub targets: Vec<Arc<TargetState>>,
    /// Where its events are; `None` where they come over NATS or not at all.
    pub events: Option<EventSockets>,
    /// What it was configured as.
    pub(super) configured_engine: Engine,
    /// What probes found. Written through [`Worker::write_status`].
    status: RwLock<WorkerStatus>,
    place: RwLock<Place>,
    /// Probes in a row that it did not pass.
    pub(super) missed_probes: AtomicU32,
    /// The router had nothing left to ask it with, a moment ago.
    pub(super) is_unasked: AtomicBool,
    /// Times that probes found it ready after they had not.
    pub(super) times_ready: AtomicU32,
    /// The tick after its metrics were last read for its page; 0 before.
    pub(super) metrics_read: AtomicU64,
    /// What is known of its tokens.
    pub rendering: Rendering,
    /// Its page keeps it out of routing.
    odd_page: AtomicBool,
    /// What follows from the three for picks.
    standing: Arc<Standing>,
    /// Held while that is worked out, so that the last to do so knows all.
    standing_changes: Mutex<()>,
    /// Cancelled when it left: its tasks end.
    pub gone: CancellationToken,
}

/// A worker's event sockets; rank r is at port + r.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSockets {
    /// Publisher of rank 0.
    pub publisher: zmtp::Endpoint,
    /// Replay socket of rank 0.
    pub replay: Option<zmtp::Endpoint>,
}

/// One rank of a worker: its load and the view of its cache.
#[derive(Debug)]
pub struct TargetState {
    /// Its name.
    pub target: Target,
    /// Its place in the index, until this value is dropped.
    pub slot: Slot,
    /// What is booked on it.
    pub account: Arc<Account>,
    /// What its view is worth.
    pub trust: Arc<SharedTrust>,
    facts: Mutex<EventFacts>,
    reconciliation: Mutex<Reconciliation>,
    retired: AtomicBool,
    index: Arc<Index>,
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
    /// Whether it can serve.
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
    /// Discovery keeps it out.
    Excluded(Exclusion),
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
    /// Its page is not the others', and parity is required.
    PageSize,
}

impl Exclusion {
    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::PodNotReady => "pod_not_ready",
            Self::NoRole => "no_role",
            Self::TwoRoles => "two_roles",
            Self::TwoPools => "two_pools",
            Self::SameAddress => "same_address",
        }
    }
}

impl ReadyReason {
    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Excluded(exclusion) => exclusion.label(),
            Self::NotProbed => "not_probed",
            Self::Unreachable => "unreachable",
            Self::Unhealthy => "unhealthy",
            Self::NoModel => "no_model",
            Self::OtherModel => "other_model",
            Self::PageSize => ODD_PAGE,
        }
    }
}

impl WorkerStatus {
    /// What is known of a worker that was never asked.
    pub(super) const fn unknown(engine: Engine) -> Self {
        Self {
            ready: false,
            reason: ReadyReason::NotProbed,
            engine,
            engine_version: None,
            reported_page: None,
            models: Vec::new(),
        }
    }

    /// Whether it is not known what the worker serves now.
    pub(super) fn is_silent(&self) -> bool {
        match self.reason {
            ReadyReason::NotProbed | ReadyReason::Unreachable => true,
            // It may have answered before it fell ill.
            ReadyReason::Unhealthy => self.models.is_empty(),
            ReadyReason::Ok
            | ReadyReason::Excluded(_)
            | ReadyReason::NoModel
            | ReadyReason::OtherModel
            | ReadyReason::PageSize => false,
        }
    }
}

impl Worker {
    /// A worker that nothing is known of, with room in `index` for each rank.
    pub fn new(member: &Member, index: &Arc<Index>) -> Self {
        let target = |rank| Arc::new(TargetState::new(Target::new(member.id.clone(), rank), index));
        Self {
            id: member.id.clone(),
            pod: member.pod.clone(),
            targets: (0..member.dp_size).map(target).collect(),
            events: member.events.clone(),
            configured_engine: member.engine,
            status: RwLock::new(WorkerStatus::unknown(member.engine)),
            place: RwLock::new(member.place),
            missed_probes: AtomicU32::new(0),
            is_unasked: AtomicBool::new(false),
            times_ready: AtomicU32::new(0),
            metrics_read: AtomicU64::new(0),
            rendering: Rendering::default(),
            odd_page: AtomicBool::new(false),
            standing: Arc::default(),
            standing_changes: Mutex::default(),
            gone: CancellationToken::new(),
        }
    }

    /// What probes found last.
    pub fn status(&self) -> WorkerStatus {
        self.status.read().clone()
    }

    /// Probes in a row that it did not pass. A ready worker is given up after the
    /// second, but people may know of the first.
    pub fn missed_probes(&self) -> u32 {
        self.missed_probes.load(Ordering::Relaxed)
    }

    /// Times that probes found it ready after they had not.
    pub fn times_ready(&self) -> u32 {
        self.times_ready.load(Ordering::Relaxed)
    }

    /// Whether its metrics were read for its page within `time`.
    pub(super) fn has_read_metrics(&self, now: Tick, time: Duration) -> bool {
        let read = self.metrics_read.load(Ordering::Relaxed);
        read > 0 && u128::from(now.0.saturating_sub(read)) < time.as_millis()
    }

    /// What discovery said last.
    pub fn place(&self) -> Place {
        *self.place.read()
    }

    /// Takes over what discovery says; whether that changes anything.
    pub(super) fn put(&self, place: Place) -> bool {
        let before = std::mem::replace(&mut *self.place.write(), place);
        self.stand();
        before != place
    }

    /// Takes over what a probe found.
    pub(super) fn write_status(&self) -> StatusGuard<'_> {
        StatusGuard { worker: self, status: Some(self.status.write()) }
    }

    /// Works out anew whether it may be picked, and for what.
    fn stand(&self) {
        let _alone = self.standing_changes.lock();
        self.standing.set(self.is_ready().then(|| self.place().role));
    }

    /// The state of its rank `rank`, if it has that many.
    pub fn target(&self, rank: DpRank) -> Option<&TargetState> {
        self.targets.get(rank.0 as usize).map(|state| &**state)
    }

    /// Its targets, as picks see them.
    pub(super) fn entrants(&self) -> impl Iterator<Item = (Target, Entrant)> {
        self.targets.iter().map(|state| {
            let (account, trust) = (Arc::clone(&state.account), Arc::clone(&state.trust));
            let standing = Arc::clone(&self.standing);
            (state.target.clone(), Entrant { slot: state.slot, account, trust, standing })
        })
    }

    /// Whether it could be picked, its page aside.
    pub fn is_able(&self) -> bool {
        self.place().exclusion.is_none() && self.status.read().ready
    }

    /// Whether it may be picked.
    pub fn is_ready(&self) -> bool {
        self.is_able() && !self.odd_page.load(Ordering::Relaxed)
    }

    /// Why it may or may not be picked.
    pub fn reason(&self) -> ReadyReason {
        match self.place().exclusion {
            Some(exclusion) => ReadyReason::Excluded(exclusion),
            None => match self.status.read().reason {
                ReadyReason::Ok if self.odd_page.load(Ordering::Relaxed) => ReadyReason::PageSize,
                reason => reason,
            },
        }
    }

    /// Lets a probe find this.
    #[cfg(test)]
    pub(crate) fn set_reason(&self, reason: ReadyReason) {
        let mut status = self.write_status();
        (status.ready, status.reason) = (reason == ReadyReason::Ok, reason);
    }

    /// Keeps it out of routing because of its page, or lets it in again.
    pub(super) fn set_odd_page(&self, odd: bool) {
        self.odd_page.store(odd, Ordering::Relaxed);
        self.stand();
    }

    /// Tokens per page: what its events say, of the first rank whose events say
    /// it, else what its live endpoint says.
    pub fn page(&self) -> Option<u32> {
        let told = self.targets.iter().find_map(|target| target.facts().page);
        told.or_else(|| self.status.read().reported_page)
    }

    /// Whether it can answer a request with these needs. Every ready worker serves the
    /// base model.
    pub fn serves(&self, needs: Needs<'_>) -> bool {
        let Needs { adapter, apart } = needs;
        if adapter.is_none() && apart.is_none() {
            return true;
        }
        let status = self.status.read();
        let has = |adapter: &str| status.models.iter().any(|model| model.name == adapter);
        let heeds = |endpoint| tenancy::heeds_salt(endpoint, status.engine, status.engine_version.as_deref());
        adapter.is_none_or(has) && apart.is_none_or(heeds)
    }

    /// Whether it may be picked for `role` now.
    pub fn takes(&self, role: Role) -> bool {
        self.standing.takes(role)
    }

    /// Whether it does the part `role` of requests that are handed over by
    /// `protocol`, may be picked now and serves them.
    pub fn does(&self, role: Role, protocol: Protocol, needs: Needs<'_>) -> bool {
        let place = self.place();
        let speaks = place.handover.is_some_and(|handover| handover.protocol == protocol);
        place.role == role && speaks && self.takes(role) && self.serves(needs)
    }

    /// Whether ranks are told apart by a header.
    pub fn has_ranks(&self) -> bool {
        self.targets.len() > 1
    }
}

/// Exclusive access to what probes found: whether the worker may be picked
/// follows when it ends.
pub(super) struct StatusGuard<'a> {
    worker: &'a Worker,
    /// `None` once it has ended.
    status: Option<RwLockWriteGuard<'a, WorkerStatus>>,
}

impl Deref for StatusGuard<'_> {
    type Target = WorkerStatus;

    fn deref(&self) -> &WorkerStatus {
        self.status.as_ref().expect("it has not ended")
    }
}

impl DerefMut for StatusGuard<'_> {
    fn deref_mut(&mut self) -> &mut WorkerStatus {
        self.status.as_mut().expect("it has not ended")
    }
}

impl Drop for StatusGuard<'_> {
    fn drop(&mut self) {
        self.status = None;
        self.worker.stand();
    }
}

impl EventSockets {
    /// A static worker's: its own, else the pool's ports on its host.
    pub(super) fn of(id: &WorkerId, own: Option<&EventEndpoints>, events: &KvEvents) -> Option<Self> {
        if let Some(own) = own {
            let replay = own.replay_endpoint.as_ref().and_then(|endpoint| endpoint.parse().ok());
            return Some(Self { publisher: own.endpoint.parse().ok()?, replay });
        }
        let (host, _) = id.as_str().rsplit_once(':')?;
        Self::at(host, 0, events)
    }

    /// The pool's ports on `host`, counted on by `offset`; `None` beyond 65535.
    pub(super) fn at(host: &str, offset: u32, events: &KvEvents) -> Option<Self> {
        let at = |port: u16| format!("tcp://{host}:{port}").parse::<zmtp::Endpoint>().ok()?.offset(offset);
        Some(Self { publisher: at(events.port)?, replay: at(events.replay_port) })
    }
}

impl TargetState {
    fn new(target: Target, index: &Arc<Index>) -> Self {
        Self {
            target,
            slot: index.add_target(),
            account: Arc::default(),
            trust: Arc::default(),
            facts: Mutex::default(),
            reconciliation: Mutex::default(),
            retired: AtomicBool::new(false),
            index: Arc::clone(index),
        }
    }

    /// What events said about the cache besides its content.
    pub fn facts(&self) -> EventFacts {
        *self.facts.lock()
    }

    /// Notes what a message said besides its deltas. `page` 0 says nothing.
    pub fn note(&self, status: Status, page: u32) {
        let mut facts = self.facts.lock();
        facts.page = (page != 0).then_some(page).or(facts.page);
        let turned = facts.hybrid != status.hybrid;
        facts.hybrid = status.hybrid;
        facts.paired = status.paired;
        drop(facts);
        if turned {
            self.weigh(&self.reconciliation.lock(), status.hybrid);
        }
    }

    fn weigh(&self, reconciliation: &Reconciliation, hybrid: bool) {
        self.trust.set_credit(reconciliation.credit(hybrid));
    }

    /// What the engine means by `cached` tokens in the usage of such an answer.
    pub fn reported(&self, endpoint: Endpoint, cached: Option<Tokens>) -> Option<Tokens> {
        self.reconciliation.lock().reported(endpoint as u8, cached)
    }

    /// Takes in what came of a prediction.
    pub fn compare(&self, now: Tick, comparison: Comparison, size: BlockSize) -> reconcile::Outcome {
        let hybrid = self.facts().hybrid;
        let mut reconciliation = self.reconciliation.lock();
        let drift = reconciliation.drift(now);
        let outcome = reconciliation.compare(now, comparison, size, hybrid);
        self.weigh(&reconciliation, hybrid);
        if reconciliation.drift(now) != drift {
            let (direction, cause) = reconciliation
                .drift(now)
                .map_or(("none", "none"), |it| (it.direction.label(), it.cause.label()));
            tracing::info!(
                target: "kv_router::fleet", target_name = %self.target, direction, cause,
                "predictions compared with what the engine found"
            );
        }
        outcome
    }

    /// Share of its predictions that come true, and how they fail if most do.
    pub fn reconciled(&self, now: Tick) -> (Option<Share>, Option<Drift>) {
        let reconciliation = self.reconciliation.lock();
        (reconciliation.share(), reconciliation.drift(now))
    }

    /// Its engine began a new life.
    pub fn restarted(&self) {
        self.reconciliation.lock().restarted();
    }

    /// Its worker left: nothing new is remembered of it.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
    }

    /// Whether its worker left.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::SeqCst)
    }
}

impl Drop for TargetState {
    fn drop(&mut self) {
        self.index.remove_target(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(exclusion: Option<Exclusion>, status: WorkerStatus) -> Worker {
        let place = Place { role: Role::Mixed, handover: None, exclusion };
        let member = Member {
            id: WorkerId::new("w:1"),
            pod: None,
            place,
            engine: Engine::Auto,
            dp_size: 2,
            events: None,
        };
        let worker = Worker::new(&member, &Arc::default());
        *worker.write_status() = status;
        worker
    }

    fn found(reason: ReadyReason, models: &[&str]) -> WorkerStatus {
        let model = |name: &&str| ServedModel { name: (*name).to_owned(), adapter: *name != "base" };
        let models = models.iter().map(model).collect();
        WorkerStatus {
            ready: reason == ReadyReason::Ok,
            reason,
            models,
            ..WorkerStatus::unknown(Engine::Auto)
        }
    }

    #[test]
    fn a_worker_serves_its_base_model_and_the_adapters_that_it_named() {
        let worker = worker(None, found(ReadyReason::Ok, &["base", "lora"]));
        for (adapter, serves) in [(None, true), (Some("lora"), true), (Some("other"), false)] {
            let needs = Needs { adapter, apart: None };
            assert_eq!(worker.serves(needs), serves, "{adapter:?}");
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
            assert_eq!(found(reason, models).is_silent(), silent, "{reason:?} {models:?}");
        }
    }

    /// Kubernetes, the engine and the page must all agree; the first that does
    /// not is named.
    #[test]
    fn a_worker_is_picked_only_if_nothing_speaks_against_it() {
        let out = Some(Exclusion::PodNotReady);
        for (exclusion, probed, odd, reason) in [
            (None, ReadyReason::Ok, false, "ok"),
            (out, ReadyReason::Ok, false, "pod_not_ready"),
            (out, ReadyReason::Unreachable, true, "pod_not_ready"),
            (None, ReadyReason::Unreachable, true, "unreachable"),
            (None, ReadyReason::Ok, true, "page_size"),
        ] {
            let worker = worker(exclusion, found(probed, &["base"]));
            worker.set_odd_page(odd);
            assert_eq!((worker.is_ready(), worker.reason().label()), (reason == "ok", reason));
        }
    }

    #[test]
    fn the_page_of_events_beats_the_reported_one() {
        let worker = worker(None, found(ReadyReason::Ok, &["base"]));
        assert_eq!(worker.page(), None);
        worker.status.write().reported_page = Some(32);
        assert_eq!(worker.page(), Some(32));
        worker.targets[1].note(Status::default(), 16);
        assert_eq!(worker.page(), Some(16));
    }

    #[test]
    fn a_mixed_request_goes_to_mixed_workers_only() {
        for (own, asked, takes) in [
            (Role::Mixed, Role::Mixed, true),
            (Role::Prefill, Role::Mixed, false),
            (Role::Decode, Role::Mixed, false),
            (Role::Mixed, Role::Decode, true),
            (Role::Decode, Role::Decode, true),
            (Role::Decode, Role::Prefill, false),
        ] {
            let worker = worker(None, found(ReadyReason::Ok, &["base"]));
            worker.put(Place { role: own, handover: None, exclusion: None });
            assert_eq!(worker.takes(asked), takes, "{own:?} for {asked:?}");
        }
    }
}
