//! Does every replica have the settings that the spec asks for, and what do
//! routers say of tokenizer, tokens, index, and pairs of workers? Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, Status, names};
use kvrouter_crds::config::{EventTransport, Policy, RoleName};
use kvrouter_crds::health::{HealthReport, RenderingHealth, WorkerHealth};
use kvrouter_crds::pool::InferencePoolSpec;
use kvrouter_crds::router::KvRouterSpec;

use super::build::Desired;
use super::hearing::{reports, subject, why_not_ready};
use super::trouble::Trouble;
use crate::facts::{self, RouterPod, is_finished, is_terminating};
use crate::hysteresis::{Pace, Seen};
use crate::pool::pairs::reason_without;

/// In the refusal of settings that are newer than the router.
const VERSION_SKEW: &str = "VersionSkew";

/// What `ConfigApplied` should say. A refusal that a router reports is certain,
/// and so are digests; only silence waits.
pub fn config_applied(
    desired: &Desired,
    router: &str,
    spec: &KvRouterSpec,
    pods: &[RouterPod],
    troubles: &[Trouble],
    now: Timestamp,
) -> Seen {
    let type_ = ConditionType::ConfigApplied;
    if let Some(finding) = refused(desired, router, pods, troubles, now) {
        return Seen::certain(type_, finding);
    }
    let living: Vec<&RouterPod> =
        pods.iter().filter(|pod| !is_terminating(&pod.pod) && !is_finished(&pod.pod)).collect();
    if spec.replicas == 0 && living.is_empty() {
        let message = "spec.replicas is 0, so there is nobody to have settings; raise it.";
        return Seen::certain(type_, Finding::unknown(Reason::NoReplicas, message));
    }
    let has_all = |report: &HealthReport| {
        report.config.start == desired.start_digest
            && report.config.live.as_ref() == Some(&desired.live_digest)
    };
    let is_behind = |pod: &&&RouterPod| match pod.fresh_report(now) {
        Some(report) => !has_all(report),
        None => !facts::is_ready(&pod.pod),
    };
    let behind: BTreeSet<&str> = living.iter().filter(is_behind).map(|pod| facts::name(&pod.pod)).collect();
    let wanted = usize::try_from(spec.replicas).unwrap_or_default();
    if !behind.is_empty() || living.len() < wanted {
        let who = if behind.is_empty() { "pods that are still to come".to_owned() } else { names(behind) };
        let message = format!("The settings have not reached every router yet: {who}; wait for the rollout.");
        return Seen::certain(type_, Finding::fails(Reason::RolloutPending, message));
    }
    match reports(router, pods, now) {
        Ok((_, Some((finding, blamed)))) => Seen { type_, finding, pace: Pace::AfterWindow, blamed },
        Err(seen) => Seen { type_, ..seen },
        Ok((_, None)) => Seen::certain(
            type_,
            Finding::holds(Reason::Applied, "Every router has the settings of this spec."),
        ),
    }
}

/// A router that refused what the spec asks for: live ones by its report, start
/// ones by how it ended.
fn refused(
    desired: &Desired,
    router: &str,
    pods: &[RouterPod],
    troubles: &[Trouble],
    now: Timestamp,
) -> Option<Finding> {
    let live = |pod: &RouterPod| {
        let report = pod.fresh_report(now)?;
        let outdated = report.config.live.as_ref() != Some(&desired.live_digest);
        let refusal = report.live_settings.refused.clone().filter(|_| outdated)?;
        Some((facts::name(&pod.pod).to_owned(), refusal))
    };
    let of_live = pods.iter().filter(|pod| !is_terminating(&pod.pod)).find_map(live);
    let of_start =
        || troubles.iter().find_map(|trouble| Some((trouble.pod.clone(), trouble.refusal.clone()?)));
    let (pod, refusal) = of_live.or_else(of_start)?;
    if refusal.contains(VERSION_SKEW) {
        let message = format!(
            "Pod {pod} of router {router} is older than its settings ({refusal}); use an image of the operator's release."
        );
        return Some(Finding::fails(Reason::VersionSkew, message));
    }
    let message = format!(
        "Pod {pod} of router {router} refused its settings ({refusal}); correct the spec of the KvRouter or its pool."
    );
    Some(Finding::fails(Reason::RouterRejectedConfig, message))
}

/// What `TokenizerReady` should say.
pub fn tokenizer(
    pool: &InferencePoolSpec,
    spec: &KvRouterSpec,
    router: &str,
    pods: &[RouterPod],
    now: Timestamp,
) -> Seen {
    let type_ = ConditionType::TokenizerReady;
    if pool.model.tokenizer.is_none() {
        let looks_up = |policy: &Policy| !matches!(policy, Policy::RoundRobin | Policy::LeastLoad);
        let finding = if looks_up(&spec.policy) {
            let message = "The pool names no tokenizer, so prompts are routed by load; set spec.model.tokenizer of the pool.";
            Finding::fails(Reason::TokenizerNotConfigured, message)
        } else {
            Finding::holds(Reason::NotRequired, "The policy looks at no prompt.")
        };
        return Seen::certain(type_, finding);
    }
    let failure = |report: &HealthReport| {
        (!report.tokenizer.ready).then(|| report.tokenizer.message.clone().unwrap_or_default())
    };
    over_reports(type_, router, pods, now, |pod, report| {
        failure(report).map(|failure| {
            let message = format!(
                "Pod {pod} of router {router} cannot load the tokenizer, so prompts are routed by load ({failure}); \
                 correct spec.model.tokenizer of the pool."
            );
            (Finding::fails(Reason::TokenizerFailed, message), BTreeSet::from([pod.to_owned()]))
        })
    })
    .unwrap_or_else(|| Seen::afar(type_, Finding::holds(Reason::Loaded, "Every router has loaded the tokenizer.")))
}

/// What `RenderParity` should say.
pub fn rendering(pool: &InferencePoolSpec, router: &str, pods: &[RouterPod], now: Timestamp) -> Seen {
    let type_ = ConditionType::RenderParity;
    if pool.model.tokenizer.is_none() {
        let message = "The pool names no tokenizer, so there is nothing to compare.";
        return Seen::certain(type_, Finding::holds(Reason::NotRequired, message));
    }
    // What one router has found counts more than what another one does not know yet.
    let all = reports(router, pods, now).map(|(all, _)| all).unwrap_or_default();
    let found = all.iter().find_map(|(pod, report)| diverged(router, pod, report));
    if let Some((finding, blamed)) = found {
        return Seen { type_, finding, pace: Pace::AfterWindow, blamed };
    }
    let failure = |pod: &str, report: &HealthReport| not_compared(pool, router, pod, report);
    over_reports(type_, router, pods, now, failure).unwrap_or_else(|| {
        let message = "Every engine makes the tokens that every router makes.";
        Seen::afar(type_, Finding::holds(Reason::RenderConfirmed, message))
    })
}

/// Ready workers and what a router knows of their tokens, where it is `parity`.
fn rendering_as<'a>(
    report: &'a HealthReport,
    parity: &'a str,
) -> impl Iterator<Item = (&'a str, &'a RenderingHealth)> {
    let told = |worker: &'a WorkerHealth| Some((subject(worker), worker.rendering.as_ref()?));
    let ready = report.workers.iter().filter(|worker| worker.ready);
    ready.filter_map(told).filter(move |(_, rendering)| rendering.parity == parity)
}

/// Workers that make other tokens than the router.
fn diverged(router: &str, pod: &str, report: &HealthReport) -> Option<(Finding, BTreeSet<String>)> {
    let (_, first) = rendering_as(report, "diverged").next()?;
    let place = first.probe.as_ref().zip(first.position);
    let place = place.map_or_else(String::new, |(probe, position)| {
        format!(" (token {position} of the request \"{probe}\" is the first)")
    });
    let message = format!(
        "Pod {pod} of router {router} makes other tokens than {}{place}, so what they hold earns no credit; give \
         engines and spec.model.tokenizer of the pool the same tokenizer and chat template.",
        names(rendering_as(report, "diverged").map(|(worker, _)| worker))
    );
    let blamed = rendering_as(report, "diverged").map(|(worker, _)| worker.to_owned()).collect();
    Some((Finding::fails(Reason::RenderDiverged, message), blamed))
}

/// Workers of which the router does not know whether they make its tokens.
fn not_compared(
    pool: &InferencePoolSpec,
    router: &str,
    pod: &str,
    report: &HealthReport,
) -> Option<(Finding, BTreeSet<String>)> {
    let mut ready = report.workers.iter().filter(|worker| worker.ready).peekable();
    if ready.peek().is_none() {
        return Some(no_workers(pool, router, report));
    }
    if ready.any(|worker| worker.rendering.is_none()) {
        let message = format!(
            "Pod {pod} of router {router} is of a release that does not compare tokens; use an image of the operator's \
             release."
        );
        return Some((Finding::unknown(Reason::NotObservable, message), BTreeSet::new()));
    }
    let (_, first) = rendering_as(report, "unknown").next()?;
    let is_pending = |rendering: &RenderingHealth| rendering.reason == "not_compared";
    let some_pending = rendering_as(report, "unknown").any(|(_, rendering)| is_pending(rendering));
    let meant = |rendering: &RenderingHealth| is_pending(rendering) == some_pending;
    let workers: BTreeSet<&str> =
        rendering_as(report, "unknown").filter(|(_, it)| meant(it)).map(|(worker, _)| worker).collect();
    let blamed = workers.iter().map(|worker| (*worker).to_owned()).collect();
    let listed = names(workers.iter().copied());
    let finding = if some_pending {
        let message = format!(
            "Pod {pod} of router {router} has not compared its tokens with those of {listed} yet; wait."
        );
        Finding::unknown(Reason::RenderPending, message)
    } else {
        let next = match first.reason.as_str() {
            "nothing_to_compare" => "its TokenizerReady says what it lacks",
            "engine_unknown" => "let it reach their /v1/models, which tells vLLM from SGLang",
            "texts_only" | "refused" => {
                "this release of the engine refuses such requests; compare by hand: kv-router tokenize"
            }
            _ => "let it reach their tokenize endpoint, or compare by hand: kv-router tokenize",
        };
        let message = format!(
            "Pod {pod} of router {router} cannot compare its tokens with those of {listed} ({}); {next}.",
            first.reason
        );
        Finding::unknown(Reason::NotObservable, message)
    };
    Some((finding, blamed))
}

fn no_workers(pool: &InferencePoolSpec, router: &str, report: &HealthReport) -> (Finding, BTreeSet<String>) {
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

/// What `IndexWarm` should say.
pub fn index(pool: &InferencePoolSpec, router: &str, pods: &[RouterPod], now: Timestamp) -> Seen {
    let type_ = ConditionType::IndexWarm;
    if pool.kv_events.transport == EventTransport::None {
        let message = "The pool wants no cache events, so there is no index.";
        return Seen::certain(type_, Finding::holds(Reason::Disabled, message));
    }
    over_reports(type_, router, pods, now, |pod, report| cold(pool, router, pod, report)).unwrap_or_else(
        || Seen::afar(type_, Finding::holds(Reason::Warm, "Every router knows what every engine holds.")),
    )
}

/// What `Degraded` should say because prefill or decode workers have nobody to
/// serve requests with; none where they have, and where no worker is ready, which
/// the other conditions tell.
pub fn pairs(pool: &InferencePoolSpec, router: &str, pods: &[RouterPod], now: Timestamp) -> Option<Seen> {
    let named = |role: &RoleName| pool.roles.iter().any(|named| named.name == *role);
    let halves: Vec<RoleName> = [RoleName::Prefill, RoleName::Decode].into_iter().filter(named).collect();
    let (all, _) = reports(router, pods, now).ok()?;
    let ready = |report: &HealthReport, role: RoleName| {
        report.workers.iter().any(|worker| worker.ready && worker.role == role.label())
    };
    let (pod, report, role) = all.into_iter().find_map(|(pod, report)| {
        let half = halves.iter().copied().find(|role| !ready(report, *role))?;
        report.workers.iter().any(|worker| worker.ready).then_some((pod, report, half))
    })?;
    let of_role = || report.workers.iter().filter(|worker| worker.role == role.label());
    let why = of_role().next().map_or_else(
        || "; it knows none".to_owned(),
        |worker| format!(" ({}: {})", subject(worker), worker.reason),
    );
    let effect =
        if ready(report, RoleName::Mixed) { "mixed workers serve all requests" } else { "nothing is served" };
    let message = format!(
        "Pod {pod} of router {router} has no {} worker that is ready{why}, and prefill and decode serve requests \
         together, so {effect}; look at the pool's pods of that role.",
        role.label()
    );
    let finding = Finding { status: Status::True, ..Finding::fails(reason_without(role)?, message) };
    let blamed = of_role().map(|worker| subject(worker).to_owned()).collect();
    Some(Seen { type_: ConditionType::Degraded, finding, pace: Pace::AfterWindow, blamed })
}

/// Labels of a view's reason, and what they come to; worst first.
const COLD: &[(&[&str], Reason, &str)] = &[
    (
        &["nothing_heard", "snapshot_pending", "silence", "engine_unreachable", "domain_mismatch"],
        Reason::Syncing,
        "has no view of; wait, and see EventsConnected",
    ),
    (
        &["page_size_mismatch", "reported_page_size_mismatch"],
        Reason::PageSizeMismatch,
        "gives no credit, because the page does not divide the block, to; see PageSizeParity of the pool",
    ),
    (
        &["stores_missing", "gap"],
        Reason::ViewsIncomplete,
        "counts hits too low, because events were missed, of; give the engines a replay socket, or wait until their caches turn over",
    ),
];

fn cold(
    pool: &InferencePoolSpec,
    router: &str,
    pod: &str,
    report: &HealthReport,
) -> Option<(Finding, BTreeSet<String>)> {
    let ready: Vec<&WorkerHealth> = report.workers.iter().filter(|worker| worker.ready).collect();
    if ready.is_empty() {
        return Some(no_workers(pool, router, report));
    }
    COLD.iter().find_map(|(labels, reason, text)| {
        let is_so = |worker: &&&WorkerHealth| {
            worker.targets.iter().any(|target| labels.contains(&target.reason.as_str()))
        };
        let workers: BTreeSet<&str> = ready.iter().filter(is_so).map(|worker| subject(worker)).collect();
        let (what, next) = text.split_once("; ")?;
        let message =
            format!("Pod {pod} of router {router} {what} {}; {next}.", names(workers.iter().copied()));
        let blamed = workers.iter().map(|worker| (*worker).to_owned()).collect();
        (!workers.is_empty()).then(|| (Finding::fails(*reason, message), blamed))
    })
}

/// The first failure that a report tells, else what is to be said of missing
/// reports; none when every router reports and all is well.
fn over_reports(
    type_: ConditionType,
    router: &str,
    pods: &[RouterPod],
    now: Timestamp,
    failure: impl Fn(&str, &HealthReport) -> Option<(Finding, BTreeSet<String>)>,
) -> Option<Seen> {
    let (reports, missing) = match reports(router, pods, now) {
        Ok(found) => found,
        Err(seen) => return Some(Seen { type_, ..seen }),
    };
    let failed = reports.iter().find_map(|(pod, report)| failure(pod, report));
    let (finding, blamed) = failed.or(missing)?;
    Some(Seen { type_, finding, pace: Pace::AfterWindow, blamed })
}
