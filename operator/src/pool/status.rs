//! What is published of a pool. Pure.
//!
//! Serving and quality are separate: `Ready` says whether requests are served,
//! `Degraded` whether that is worse than the spec asks for. Nothing here waits
//! for a KvRouter's `Ready`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::SignedDuration;
use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::{
    ConditionType, Finding, POOL_TYPES, Reason, Status, WorkloadState, find, names,
};
use kvrouter_crds::config::EventTransport;
use kvrouter_crds::pool::{Bridge, InferencePoolStatus, WorkloadStatus};

use super::members::{Member, endpoints, members};
use super::observe::Observed;
use super::pages::page_sizes;
use super::pairs::{self, Missing};
use super::seed::{seed, stuck};
use super::validate::{Invalid, ValidPool, get_pods, no_pods, selector_text};
use crate::facts::{self, is_terminating};
use crate::gateway::taken_over;
use crate::hysteresis::{Memory, Outcome, Pace, Pass, Seen};
use crate::router::hearing;
use crate::verdict::{self, Complaint};

/// Everything from which a pool's status follows.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The pool, with its published status.
    pub pool: &'a InferencePool,
    /// What `validate` said.
    pub verdict: &'a Result<ValidPool, Invalid>,
    /// What is seen.
    pub observed: &'a Observed,
    /// Where the named workloads stand, as `workload` says.
    pub workloads: &'a [WorkloadStatus],
    /// How long an observation must last before a condition flips.
    pub window: SignedDuration,
}

/// The status to publish. With the same input and its own output as the
/// published status it comes to the same, byte for byte.
pub fn status(input: &Input<'_>, memory: &Memory) -> Outcome<InferencePoolStatus> {
    let Input { pool, observed, .. } = *input;
    let mut memory = memory.clone();
    let published = pool.status.clone().unwrap_or_default();
    let members = members(&pool.spec, observed);
    let pods = living_pods(observed);
    let pass = Pass {
        now: observed.now,
        window: input.window,
        generation: pool.metadata.generation,
        published: &published.conditions,
        pods: &pods,
    };
    let (parity, rows) = page_sizes(pool, &members);
    let seen = [
        accepted(input),
        resolved(input),
        parity.clone(),
        seed(pool, &members, input.workloads),
        events(input, &members),
    ];
    let mut conditions: Vec<Condition> = seen.iter().map(|seen| memory.settle(&pass, seen)).collect();
    let missing = input.verdict.as_ref().ok().and_then(|_| pairs::missing(pool, &members));
    let derived =
        [degraded(missing.as_ref(), &conditions), ready(input, &members, missing.as_ref(), &conditions)];
    for derived in derived {
        conditions.push(memory.settle(&pass, &derived));
    }
    // Rows change together with the condition that speaks of them.
    let told = find(&conditions, ConditionType::PageSizeParity).map(|condition| condition.reason.as_str());
    let is_told = told == Some(parity.finding.reason.as_str());
    debug_assert_eq!(conditions.len(), POOL_TYPES.len(), "every type is present");
    let status = InferencePoolStatus {
        observed_generation: pool.metadata.generation,
        endpoints: Some(endpoints(&pool.spec, &members)),
        page_sizes: if is_told { rows } else { published.page_sizes },
        workloads: input.workloads.to_vec(),
        conditions,
    };
    Outcome { status, recheck_after: memory.recheck_after(observed.now, input.window), memory }
}

/// Engines and routers: those that end are as good as gone.
fn living_pods(observed: &Observed) -> BTreeSet<String> {
    let routers = observed.routers.iter().flat_map(|router| &router.pods).map(|router| &router.pod);
    let all = observed.pods.iter().chain(routers);
    all.filter(|pod| !is_terminating(pod))
        .map(|pod: &std::sync::Arc<Pod>| facts::name(pod).to_owned())
        .collect()
}

fn complaints(verdict: &Result<ValidPool, Invalid>) -> &[Complaint] {
    match verdict {
        Ok(valid) => &valid.complaints,
        Err(Invalid(complaints)) => complaints,
    }
}

fn accepted(input: &Input<'_>) -> Seen {
    let type_ = ConditionType::Accepted;
    let finding = verdict::finding(complaints(input.verdict), type_);
    let accepted = || Finding::holds(Reason::Accepted, "The spec is in order.");
    Seen::certain(type_, finding.unwrap_or_else(accepted))
}

fn resolved(input: &Input<'_>) -> Seen {
    let type_ = ConditionType::ResolvedRefs;
    let finding = verdict::finding(complaints(input.verdict), type_).unwrap_or_else(|| match input.verdict {
        Ok(valid) => {
            let mut message = vec!["Everything that the spec names is there.".to_owned()];
            message.extend(taken_over(&valid.spec));
            Finding::holds(Reason::ResolvedRefs, message.join(" "))
        }
        Err(_) => {
            Finding::unknown(Reason::Pending, "Not looked at before the spec is accepted; see Accepted.")
        }
    });
    Seen::certain(type_, finding)
}

fn events(input: &Input<'_>, members: &[Member<'_>]) -> Seen {
    let Input { pool, observed, workloads, .. } = *input;
    let spec = &pool.spec;
    let type_ = ConditionType::EventsConnected;
    let transport = spec.kv_events.transport;
    if transport == EventTransport::None {
        return hearing::events(transport, "", &[], observed.now);
    }
    if members.is_empty() {
        return Seen::certain(type_, no_pods(pool));
    }
    let of_router = |router: &super::observe::RouterSeen| {
        hearing::events(transport, &router.name, &router.pods, observed.now)
    };
    let worst = observed.routers.iter().map(of_router).min_by_key(|seen| hearing::severity(&seen.finding));
    let Some(mut worst) = worst else {
        let name = pool.metadata.name.as_deref().unwrap_or_default();
        let message = format!("No KvRouter serves this pool; create one with spec.poolRef.name: {name}.");
        return Seen::certain(type_, Finding::unknown(Reason::NoRouters, message));
    };
    if worst.finding.reason == Reason::Connected {
        worst.finding.message = "Every router hears every engine.".to_owned();
    }
    if spec.kv_events.bridge == Bridge::Inject {
        explain(&mut worst.finding, workloads);
    }
    worst
}

/// Where bridges are ours to inject, what stands in their way is the reason.
fn explain(finding: &mut Finding, workloads: &[WorkloadStatus]) {
    let outdated = |workload: &&WorkloadStatus| workload.state == WorkloadState::BridgeOutdated.as_str();
    let is_silent = matches!(finding.reason, Reason::NoPublishers | Reason::SomeEnginesSilent);
    match (stuck(workloads), workloads.iter().find(outdated)) {
        (Some((reason, workload)), _) if is_silent => {
            *finding = Finding::fails(reason, format!("{} {}", workload.message, finding.message));
        }
        (_, Some(workload)) if finding.reason == Reason::Connected => {
            *finding = Finding::holds(Reason::BridgeOutdated, workload.message.clone());
        }
        _ => {}
    }
}

/// Half of the pairs missing is worse than all else, where requests are served in
/// spite of it. The rest is from what is published: it has waited for its window
/// already.
fn degraded(missing: Option<&Missing>, conditions: &[Condition]) -> Seen {
    if let Some(Missing { finding, blamed, is_served: true }) = missing {
        let finding = Finding { status: Status::True, ..finding.clone() };
        let (type_, blamed) = (ConditionType::Degraded, blamed.clone());
        return Seen { type_, finding, pace: Pace::AfterWindow, blamed };
    }
    let finding =
        verdict::degraded(conditions, &[ConditionType::PageSizeParity, ConditionType::EventsConnected]);
    Seen::certain(ConditionType::Degraded, finding)
}

fn ready(
    input: &Input<'_>,
    members: &[Member<'_>],
    missing: Option<&Missing>,
    conditions: &[Condition],
) -> Seen {
    let type_ = ConditionType::Ready;
    for dependency in [ConditionType::Accepted, ConditionType::ResolvedRefs] {
        if let Some(finding) = verdict::first_failure(conditions, dependency) {
            return Seen::certain(type_, finding);
        }
    }
    if members.is_empty() {
        return Seen::certain(type_, no_pods(input.pool));
    }
    let (up, down): (Vec<_>, Vec<_>) = members.iter().partition(|member| member.ready);
    let blamed: BTreeSet<String> = down.iter().map(|member| member.name().to_owned()).collect();
    if up.is_empty() {
        let message = format!(
            "No pod of the pool is ready: {}; look at: {}",
            names(blamed.iter().map(String::as_str)),
            get_pods(input.pool, &selector_text(&input.pool.spec))
        );
        let finding = Finding::fails(Reason::NoPodsReady, message);
        return Seen { type_, finding, pace: Pace::AfterWindow, blamed };
    }
    if let Some(Missing { finding, blamed, is_served: false }) = missing {
        let (finding, blamed) = (finding.clone(), blamed.clone());
        return Seen { type_, finding, pace: Pace::AfterWindow, blamed };
    }
    Seen::afar(type_, Finding::holds(Reason::Serving, "The spec is in order and engines are ready."))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
