//! Do routers know what engines hold? Pure.
//!
//! What a router says of its views is a closed list of words, and each of them
//! has its place here: a new one does not compile until somebody has decided
//! what it means to users.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::config::EventTransport;
use kvrouter_crds::health::{DriftCause, HealthReport, TargetHealth, ViewReason, WorkerHealth};
use kvrouter_crds::pool::InferencePoolSpec;

use super::reports::{Told, no_workers, over_reports, reports, subject};
use crate::facts::RouterPod;
use crate::hysteresis::{Pace, Seen};

/// What `IndexWarm` should say.
pub fn index(pool: &InferencePoolSpec, router: &str, pods: &[RouterPod], now: Timestamp) -> Seen {
    let type_ = ConditionType::IndexWarm;
    if pool.kv_events.transport == EventTransport::None {
        let message = "The pool wants no cache events, so there is no index.";
        return Seen::certain(type_, Finding::holds(Reason::Disabled, message));
    }
    over_reports(type_, router, pods, now, |pod, report| cold(pool, router, pod, report))
        .or_else(|| different_views(type_, router, pods, now))
        .unwrap_or_else(|| {
            Seen::afar(type_, Finding::holds(Reason::Warm, "Every router knows what every engine holds."))
        })
}

/// Routers that know all of an engine as of the same message know as many blocks.
fn different_views(type_: ConditionType, router: &str, pods: &[RouterPod], now: Timestamp) -> Option<Seen> {
    let mut known = BTreeMap::new();
    let (mut differing, mut workers) = (BTreeSet::new(), BTreeSet::new());
    for (pod, report) in reports(router, pods, now).ok()?.fresh {
        for worker in &report.workers {
            for target in worker.targets.iter().filter(|target| target.trust == "exact") {
                let Some(blocks) = target.blocks else { continue };
                let view = (worker.worker.as_str(), target.rank, target.epoch, target.seq);
                let (other, others) = *known.entry(view).or_insert((pod, blocks));
                if others != blocks {
                    differing.extend([other, pod]);
                    workers.insert(subject(worker));
                }
            }
        }
    }
    if workers.is_empty() {
        return None;
    }
    let message = format!(
        "Pods of router {router} ({}) hold different views of the same caches, those of {}; delete these pods one after \
         the other, and report it: this is a defect of kvrouter.",
        names(differing.iter().copied()),
        names(workers.iter().copied())
    );
    let blamed = differing.into_iter().map(str::to_owned).collect();
    let finding = Finding::fails(Reason::ViewsDiffer, message);
    Some(Seen { type_, finding, pace: Pace::AfterWindow, blamed })
}

/// What is wrong with a view, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Flaw {
    NoView,
    OddPage,
    AdaptersUntold,
    RankMismatch,
    NothingStored,
    Drifting(DriftCause),
    Incomplete,
    Unsequenced,
    Unrecognised,
}

const fn flaw_of(reason: ViewReason) -> Option<Flaw> {
    match reason {
        // An engine that is told to keep nothing is well; `RenderParity` tells of other tokens.
        ViewReason::Ok | ViewReason::PrefixCachingOff | ViewReason::RenderDiverged => None,
        ViewReason::NothingHeard
        | ViewReason::SnapshotPending
        | ViewReason::Silence
        | ViewReason::EngineUnreachable
        | ViewReason::DomainMismatch => Some(Flaw::NoView),
        ViewReason::PageSizeMismatch | ViewReason::ReportedPageSizeMismatch => Some(Flaw::OddPage),
        ViewReason::AdaptersUntold => Some(Flaw::AdaptersUntold),
        ViewReason::RankMismatch => Some(Flaw::RankMismatch),
        ViewReason::NothingStored | ViewReason::Stalled => Some(Flaw::NothingStored),
        ViewReason::StoresMissing | ViewReason::Gap => Some(Flaw::Incomplete),
        ViewReason::NoSequence => Some(Flaw::Unsequenced),
        ViewReason::Unrecognised => Some(Flaw::Unrecognised),
    }
}

/// A view that is known to be wrong explains its predictions by itself.
fn flaw(target: &TargetHealth) -> Option<Flaw> {
    match flaw_of(target.reason) {
        known @ (None | Some(Flaw::Unsequenced)) => drift(target).map(Flaw::Drifting).or(known),
        known => known,
    }
}

/// Why predictions do not come true. Those of a hybrid view are expected not to,
/// and its credit is scaled.
fn drift(target: &TargetHealth) -> Option<DriftCause> {
    target.reconciled.as_ref()?.cause.filter(|cause| *cause != DriftCause::HybridAttention)
}

fn cold(pool: &InferencePoolSpec, router: &str, pod: &str, report: &HealthReport) -> Option<Told> {
    let ready: Vec<&WorkerHealth> = report.workers.iter().filter(|worker| worker.ready).collect();
    if ready.is_empty() {
        return Some(no_workers(pool, router, report));
    }
    let mut flawed: BTreeMap<Flaw, BTreeSet<&str>> = BTreeMap::new();
    for worker in ready {
        for flaw in worker.targets.iter().filter_map(flaw) {
            flawed.entry(flaw).or_default().insert(subject(worker));
        }
    }
    let (flaw, workers) = flawed.first_key_value()?;
    let blamed = workers.iter().map(|worker| (*worker).to_owned()).collect();
    Some((finding(*flaw, &format!("Pod {pod} of router {router}"), &names(workers.iter().copied())), blamed))
}

/// What is told of `workers` by `who`.
fn finding(flaw: Flaw, who: &str, workers: &str) -> Finding {
    match flaw {
        Flaw::NoView => {
            let message = format!("{who} has no view of {workers}; wait, and see EventsConnected.");
            Finding::fails(Reason::Syncing, message)
        }
        Flaw::OddPage => {
            let message = format!(
                "{who} gives no credit, because the page does not divide the block, to {workers}; see PageSizeParity of \
                 the pool."
            );
            Finding::fails(Reason::PageSizeMismatch, message)
        }
        Flaw::AdaptersUntold => {
            let message = format!(
                "{who} gives no credit, because their events do not tell which blocks are the adapters', to {workers}; use \
                 SGLang 0.5.22 or later, or serve adapters from other engines."
            );
            Finding::fails(Reason::AdaptersUntold, message)
        }
        Flaw::RankMismatch => {
            let message = format!(
                "{who} gives no credit, because their events name another data-parallel rank, to {workers}; see that dpSize \
                 is the number of ranks behind each target port, and that the engines' event ports begin at kvEvents.port \
                 in every pod."
            );
            Finding::fails(Reason::RankMismatch, message)
        }
        Flaw::NothingStored => {
            let message = format!("{who} is told of no stored block by {workers}; see EventsConnected.");
            Finding::fails(Reason::NothingStored, message)
        }
        Flaw::Drifting(cause) => {
            let (cause, next) = of_drift(cause);
            let message = format!(
                "What {who} predicts is not what these engines find cached: {workers} (likeliest cause: {cause}); {next}."
            );
            Finding::fails(Reason::Drifting, message)
        }
        Flaw::Incomplete => {
            let message = format!(
                "{who} counts hits too low, because events were missed, of {workers}; give the engines a replay socket, \
                 or wait until their caches turn over."
            );
            Finding::fails(Reason::ViewsIncomplete, message)
        }
        Flaw::Unsequenced => {
            let message = format!(
                "{who} could not see a loss of events, because they have no numbers, of {workers}, and counts hits only \
                 while events are fresh; use an engine release that numbers its events."
            );
            Finding::unknown(Reason::Unsequenced, message)
        }
        Flaw::Unrecognised => {
            let message = format!(
                "{who} says what this operator does not know of its views of {workers}; use an operator of the router's \
                 release."
            );
            Finding::unknown(Reason::NotObservable, message)
        }
    }
}

/// The cause in words, and what to do about it.
const fn of_drift(cause: DriftCause) -> (&'static str, &'static str) {
    match cause {
        DriftCause::Template => (
            "other tokens",
            "compare their chat template, tokenizer and default template arguments with spec.model.tokenizer of the pool",
        ),
        DriftCause::Salt => {
            ("the cache salt", "see whether a proxy between routers and engines changes or drops cache_salt")
        }
        DriftCause::PageSize => (
            "the page",
            "set spec.blockSize of the pool to the unit in which they skip prefixes, a multiple of their page",
        ),
        DriftCause::Restart => {
            ("a restart", "wait for their next hits; if it stays, look for restarts in their logs")
        }
        DriftCause::Lag => {
            ("late events", "look at the load of their API servers and at the size of their caches")
        }
        DriftCause::HybridAttention => ("hybrid attention", "nothing is to be done: their credit is scaled"),
        DriftCause::Unrecognised => {
            ("one that this operator does not know", "see the problems in the router's /health/report")
        }
    }
}
