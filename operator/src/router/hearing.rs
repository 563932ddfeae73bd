//! Do cache events of all engines reach the routers? Pure.
//!
//! One answer for each router; a pool takes the worst over its routers.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, Status, names};
use kvrouter_crds::config::EventTransport;
use kvrouter_crds::health::{HealthReport, ViewReason, WorkerHealth};

use super::reports::{Reports, Told, no_replicas, reports, subject, why_not_ready};
use crate::facts::RouterPod;
use crate::hysteresis::{Pace, Seen};

/// Worst first: of several findings the first of these is told.
const SEVERITY: &[Reason] = &[
    Reason::NatsUnreachable,
    Reason::NoPublishers,
    Reason::ForeignDomain,
    Reason::SomeEnginesSilent,
    Reason::NothingStored,
    Reason::RouterUnreachable,
    Reason::NoReplicas,
    Reason::NoWorkers,
    Reason::Connected,
];

/// What `EventsConnected` should say of one router.
pub fn events(transport: EventTransport, router: &str, pods: &[RouterPod], now: Timestamp) -> Seen {
    if transport == EventTransport::None {
        let message = "The pool wants no cache events (spec.kvEvents.transport: None): routing history and load decide.";
        return Seen::certain(ConditionType::EventsConnected, Finding::holds(Reason::Disabled, message));
    }
    let Reports { fresh, missing } = match reports(router, pods, now) {
        Ok(found) => found,
        Err(silence) => return silence.about(ConditionType::EventsConnected),
    };
    let mut findings: Vec<Told> =
        fresh.iter().map(|(pod, report)| of_report(transport, router, pod, report)).collect();
    findings.extend(missing);
    // The first of equals: pods are in the order of their names.
    let worst = findings.into_iter().min_by_key(|(finding, _)| severity(finding));
    let (finding, blamed) = worst.unwrap_or_else(|| (no_replicas(router), BTreeSet::new()));
    Seen { type_: ConditionType::EventsConnected, finding, pace: Pace::AfterWindow, blamed }
}

/// The place of a finding in the order of badness; the worst is 0.
pub fn severity(finding: &Finding) -> usize {
    let place = SEVERITY.iter().position(|reason| *reason == finding.reason);
    let of_status = if finding.status == Status::True { SEVERITY.len() } else { 0 };
    place.unwrap_or(of_status)
}

/// What a router hears of one worker, worst over its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Hearing {
    Foreign,
    Silent(&'static str),
    Storeless,
    Heard,
}

fn hearing(worker: &WorkerHealth) -> Hearing {
    let of = |reason: ViewReason| match reason {
        ViewReason::DomainMismatch => Hearing::Foreign,
        ViewReason::NothingHeard => Hearing::Silent("has heard nothing of"),
        ViewReason::Silence => Hearing::Silent("hears nothing any more of"),
        ViewReason::EngineUnreachable => {
            Hearing::Silent("hears that bridges do not reach the event sockets of")
        }
        ViewReason::NothingStored | ViewReason::Stalled => Hearing::Storeless,
        // About what was heard: `IndexWarm` and `RenderParity` tell it.
        ViewReason::Ok
        | ViewReason::SnapshotPending
        | ViewReason::StoresMissing
        | ViewReason::Gap
        | ViewReason::PageSizeMismatch
        | ViewReason::ReportedPageSizeMismatch
        | ViewReason::NoSequence
        | ViewReason::RenderDiverged
        | ViewReason::PrefixCachingOff
        | ViewReason::AdaptersUntold
        | ViewReason::RankMismatch
        | ViewReason::Unrecognised => Hearing::Heard,
    };
    worker.targets.iter().map(|target| of(target.reason)).min().unwrap_or(Hearing::Heard)
}

fn of_report(transport: EventTransport, router: &str, pod: &str, report: &HealthReport) -> Told {
    if !report.events.connected {
        let message = format!(
            "Pod {pod} of router {router} has no connection to NATS, so hits are forgotten as views grow old; check the \
             broker, its credentials and the network to it."
        );
        return (Finding::fails(Reason::NatsUnreachable, message), BTreeSet::from([pod.to_owned()]));
    }
    let ready: Vec<&WorkerHealth> = report.workers.iter().filter(|worker| worker.ready).collect();
    if ready.is_empty() {
        let message = format!(
            "Router {router} has no worker that is ready, so nothing can be heard; look at the pool's pods{}.",
            why_not_ready(report)
        );
        return (Finding::unknown(Reason::NoWorkers, message), BTreeSet::new());
    }
    let mut by_hearing: BTreeMap<Hearing, BTreeSet<&str>> = BTreeMap::new();
    for worker in &ready {
        by_hearing.entry(hearing(worker)).or_default().insert(subject(worker));
    }
    let total = by_hearing.values().map(BTreeSet::len).sum::<usize>();
    let silent = by_hearing.iter().find(|(hearing, _)| matches!(hearing, Hearing::Silent(_)));
    let all_silent: BTreeSet<&str> = by_hearing
        .iter()
        .filter(|(hearing, _)| matches!(hearing, Hearing::Silent(_)))
        .flat_map(|(_, workers)| workers.iter().copied())
        .collect();
    let next = match transport {
        EventTransport::ZMQ => "start the engines with KV events on the ports of spec.kvEvents",
        _ => "start the engines with KV events, and see whether their bridges run",
    };
    let told = |reason, workers: &BTreeSet<&str>, message: String| {
        (Finding::fails(reason, message), workers.iter().map(|worker| (*worker).to_owned()).collect())
    };
    if let (Some((Hearing::Silent(how), _)), true) = (silent, all_silent.len() == total) {
        let message = format!(
            "Pod {pod} of router {router} {how} any engine: {}; {next}.",
            names(all_silent.iter().copied())
        );
        return told(Reason::NoPublishers, &all_silent, message);
    }
    if let Some(foreign) = by_hearing.get(&Hearing::Foreign) {
        let message = format!(
            "Bridges speak of another model, revision, block size or identity seed than router {router} does: {}; give \
             both the same settings.",
            names(foreign.iter().copied())
        );
        return told(Reason::ForeignDomain, foreign, message);
    }
    if let Some((Hearing::Silent(how), _)) = silent {
        let message =
            format!("Pod {pod} of router {router} {how} {}; {next}.", names(all_silent.iter().copied()));
        return told(Reason::SomeEnginesSilent, &all_silent, message);
    }
    if let Some(storeless) = by_hearing.get(&Hearing::Storeless) {
        let message = format!(
            "Pod {pod} of router {router} sees these engines finish prompts and tell of no stored block: {}; start them \
             with prefix caching and KV events, restart one whose publisher has ended, or set spec.kvEvents.transport of the pool to None if they are \
             meant to keep no prefixes.",
            names(storeless.iter().copied())
        );
        return told(Reason::NothingStored, storeless, message);
    }
    let message = format!("Router {router} hears every engine.");
    (Finding::holds(Reason::Connected, message), BTreeSet::new())
}
