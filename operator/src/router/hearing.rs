//! Do cache events of all engines reach the routers? Pure.
//!
//! One answer for each router; a pool takes the worst over its routers.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, Status, names};
use kvrouter_crds::config::EventTransport;
use kvrouter_crds::health::{HealthReport, WorkerHealth};

use crate::facts::{self, RouterPod, is_finished, is_ready, is_terminating};
use crate::hysteresis::{Pace, Seen};

/// Worst first: of several findings the first of these is told.
const SEVERITY: &[Reason] = &[
    Reason::NatsUnreachable,
    Reason::NoPublishers,
    Reason::ForeignDomain,
    Reason::SomeEnginesSilent,
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
    let (reports, missing) = match reports(router, pods, now) {
        Ok(found) => found,
        Err(seen) => return Seen { type_: ConditionType::EventsConnected, ..seen },
    };
    let mut findings: Vec<(Finding, BTreeSet<String>)> =
        reports.iter().map(|(pod, report)| of_report(transport, router, pod, report)).collect();
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

/// Reports by the name of their pod, and what is to be said of a pod that is
/// ready and sends none.
type Reports<'a> = (Vec<(&'a str, &'a HealthReport)>, Option<(Finding, BTreeSet<String>)>);

/// Fresh reports of all living pods; where there is none at all, what that means.
///
/// A pod that is not ready yet need not report.
pub fn reports<'a>(router: &str, pods: &'a [RouterPod], now: Timestamp) -> Result<Reports<'a>, Seen> {
    let living: Vec<&RouterPod> =
        pods.iter().filter(|pod| !is_terminating(&pod.pod) && !is_finished(&pod.pod)).collect();
    let any = ConditionType::EventsConnected;
    if living.is_empty() {
        return Err(Seen::certain(any, no_replicas(router)));
    }
    let fresh: Vec<(&str, &HealthReport)> =
        living.iter().filter_map(|pod| Some((facts::name(&pod.pod), pod.fresh_report(now)?))).collect();
    let is_silent =
        |pod: &&&RouterPod| pod.fresh_report(now).is_none() && (is_ready(&pod.pod) || fresh.is_empty());
    let silent: Vec<&RouterPod> = living.iter().filter(is_silent).copied().collect();
    let missing = (!silent.is_empty()).then(|| unreachable(router, &silent));
    match missing {
        Some((finding, blamed)) if fresh.is_empty() => {
            Err(Seen { type_: any, finding, pace: Pace::AfterWindow, blamed })
        }
        missing => Ok((fresh, missing)),
    }
}

fn no_replicas(router: &str) -> Finding {
    let message =
        format!("Router {router} has no pods that could tell; look at its RouterAvailable condition.");
    Finding::unknown(Reason::NoReplicas, message)
}

fn unreachable(router: &str, pods: &[&RouterPod]) -> (Finding, BTreeSet<String>) {
    let names_of: BTreeSet<&str> = pods.iter().map(|pod| facts::name(&pod.pod)).collect();
    let failure = pods.iter().find_map(|pod| pod.poll_failure.as_deref());
    let failure = failure.map_or_else(String::new, |failure| format!(" ({failure})"));
    let message = format!(
        "No health report arrives from pods of router {router}: {}{failure}; see whether they run, and let the operator \
         reach their port 9090.",
        names(names_of.iter().copied())
    );
    let blamed = names_of.into_iter().map(str::to_owned).collect();
    (Finding::unknown(Reason::RouterUnreachable, message), blamed)
}

/// What a router hears of one worker, worst over its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Hearing {
    Foreign,
    Silent(&'static str),
    Heard,
}

fn hearing(worker: &WorkerHealth) -> Hearing {
    let of = |reason: &str| match reason {
        "domain_mismatch" => Hearing::Foreign,
        "nothing_heard" => Hearing::Silent("has heard nothing of"),
        "silence" => Hearing::Silent("hears nothing any more of"),
        "engine_unreachable" => Hearing::Silent("hears that bridges do not reach the event sockets of"),
        // All else is about what was heard; `IndexWarm` tells it.
        _ => Hearing::Heard,
    };
    worker.targets.iter().map(|target| of(&target.reason)).min().unwrap_or(Hearing::Heard)
}

fn of_report(
    transport: EventTransport,
    router: &str,
    pod: &str,
    report: &HealthReport,
) -> (Finding, BTreeSet<String>) {
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
    let message = format!("Router {router} hears every engine.");
    (Finding::holds(Reason::Connected, message), BTreeSet::new())
}

/// The worker as people know it.
pub fn subject(worker: &WorkerHealth) -> &str {
    worker.pod.as_deref().unwrap_or(&worker.worker)
}

/// Why the first worker is not ready.
pub fn why_not_ready(report: &HealthReport) -> String {
    let first = report.workers.iter().find(|worker| !worker.ready);
    first.map_or_else(String::new, |worker| format!(" ({}: {})", subject(worker), worker.reason))
}
