//! Health reports of a router's pods: who sends one, and what silence means. Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::health::{HealthReport, WorkerHealth};
use kvrouter_crds::pool::InferencePoolSpec;

use crate::facts::{self, RouterPod, is_finished, is_ready, is_terminating};
use crate::hysteresis::{Pace, Seen};

/// What a condition should say, and the names of the pods to blame.
pub type Told = (Finding, BTreeSet<String>);

/// What living pods of a router report.
#[derive(Debug)]
pub struct Reports<'a> {
    /// Fresh reports, by the name of their pod; at least one.
    pub fresh: Vec<(&'a str, &'a HealthReport)>,
    /// What is to be said of pods that are ready and send none.
    pub missing: Option<Told>,
}

/// What is to be said where no pod reports at all.
#[derive(Debug)]
pub struct Silence {
    told: Told,
    pace: Pace,
}

impl Silence {
    /// The same as a finding about `type_`.
    pub fn about(self, type_: ConditionType) -> Seen {
        let (finding, blamed) = self.told;
        Seen { type_, finding, pace: self.pace, blamed }
    }
}

/// Fresh reports of all living pods. A pod that is not ready yet need not report.
pub fn reports<'a>(router: &str, pods: &'a [RouterPod], now: Timestamp) -> Result<Reports<'a>, Silence> {
    let living: Vec<&RouterPod> =
        pods.iter().filter(|pod| !is_terminating(&pod.pod) && !is_finished(&pod.pod)).collect();
    if living.is_empty() {
        return Err(Silence { told: (no_replicas(router), BTreeSet::new()), pace: Pace::AtOnce });
    }
    let fresh: Vec<(&str, &HealthReport)> =
        living.iter().filter_map(|pod| Some((facts::name(&pod.pod), pod.fresh_report(now)?))).collect();
    let is_silent =
        |pod: &&&RouterPod| pod.fresh_report(now).is_none() && (is_ready(&pod.pod) || fresh.is_empty());
    let silent: Vec<&RouterPod> = living.iter().filter(is_silent).copied().collect();
    let missing = (!silent.is_empty()).then(|| unreachable(router, &silent));
    match missing {
        Some(told) if fresh.is_empty() => Err(Silence { told, pace: Pace::AfterWindow }),
        missing => Ok(Reports { fresh, missing }),
    }
}

/// The first failure that a report tells, else what is to be said of missing
/// reports; none when every router reports and all is well.
pub fn over_reports(
    type_: ConditionType,
    router: &str,
    pods: &[RouterPod],
    now: Timestamp,
    failure: impl Fn(&str, &HealthReport) -> Option<Told>,
) -> Option<Seen> {
    let Reports { fresh, missing } = match reports(router, pods, now) {
        Ok(found) => found,
        Err(silence) => return Some(silence.about(type_)),
    };
    let failed = fresh.iter().find_map(|(pod, report)| failure(pod, report));
    let (finding, blamed) = failed.or(missing)?;
    Some(Seen { type_, finding, pace: Pace::AfterWindow, blamed })
}

/// What is to be said where there is no pod.
pub fn no_replicas(router: &str) -> Finding {
    let message =
        format!("Router {router} has no pods that could tell; look at its RouterAvailable condition.");
    Finding::unknown(Reason::NoReplicas, message)
}

fn unreachable(router: &str, pods: &[&RouterPod]) -> Told {
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

/// What is to be said of a report in which no worker is ready.
pub fn no_workers(pool: &InferencePoolSpec, router: &str, report: &HealthReport) -> Told {
    let next = match report.workers.iter().find(|worker| !worker.ready) {
        Some(first) if first.reason == "other_model" => format!(
            "its /v1/models does not list {}: correct spec.model.name of the pool, or the name that the engines serve",
            pool.model.name
        ),
        _ => "look at the pool's pods".to_owned(),
    };
    let message = format!("Router {router} has no worker that is ready{}; {next}.", why_not_ready(report));
    (Finding::unknown(Reason::NoWorkers, message), BTreeSet::new())
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
