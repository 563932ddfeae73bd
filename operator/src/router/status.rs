//! What is published of a router. Pure.
//!
//! `Ready` says that requests are served: the spec is accepted, what it names is
//! there, and a replica is available. Everything that makes serving worse is
//! `Degraded`. Nothing here waits for the pool's `Ready`.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::SignedDuration;
use kvrouter_crds::conditions::{ConditionType, Finding, ROUTER_TYPES, Reason, names};
use kvrouter_crds::router::KvRouterStatus;
use kvrouter_crds::{InferencePool, KvRouter};

use super::build::{Desired, ROUTER_LABEL, selector};
use super::observe::Observed;
use super::pod::TENANCY_VOLUME;
use super::trouble::{Trouble, trouble};
use super::validate::Invalid;
use super::{applied, hearing, index, pairs, prompts, reports};
use crate::facts::{self, PAUSED_ANNOTATION, is_finished, is_paused, is_terminating};
use crate::hysteresis::{Memory, Outcome, Pace, Pass, Seen};
use crate::verdict;

/// Everything from which a router's status follows.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The router, with its published status.
    pub router: &'a KvRouter,
    /// What `build` made of what `validate` said.
    pub verdict: Result<&'a Desired, &'a Invalid>,
    /// What is seen.
    pub observed: &'a Observed,
    /// What the API server said to the first child that it refused; none if
    /// all were taken. `Kind/name: message`.
    pub apply_failure: Option<&'a str>,
    /// How long an observation must last before a condition flips.
    pub window: SignedDuration,
}

/// The status to publish. With the same input and its own output as the
/// published status it comes to the same, byte for byte.
pub fn status(input: &Input<'_>, memory: &Memory) -> Outcome<KvRouterStatus> {
    let Input { router, observed, .. } = *input;
    let mut memory = memory.clone();
    let published = router.status.clone().unwrap_or_default();
    let pods = living_pods(observed);
    let pass = Pass {
        now: observed.now,
        window: input.window,
        generation: router.metadata.generation,
        published: &published.conditions,
        pods: &pods,
    };
    let living = observed.pods.iter().filter(|pod| !is_terminating(&pod.pod) && !is_finished(&pod.pod));
    let troubles: Vec<Trouble> = living.filter_map(trouble).collect();
    let mut seen = vec![
        accepted(input),
        resolved(input, &troubles),
        progressing(input, &troubles),
        available(input, &troubles),
    ];
    seen.extend(reported(input, &troubles));
    let mut conditions: Vec<Condition> = seen.iter().map(|seen| memory.settle(&pass, seen)).collect();
    for derived in [degraded(input, &conditions), ready(&conditions)] {
        conditions.push(memory.settle(&pass, &derived));
    }
    debug_assert_eq!(conditions.len(), ROUTER_TYPES.len(), "every type is present");
    let deployed = observed.deployment.as_deref().and_then(|deployment| deployment.status.as_ref());
    let is_new = memory.is_new(observed.now, input.window);
    let desired = input.verdict.ok();
    let status = KvRouterStatus {
        observed_generation: router.metadata.generation,
        replicas: deployed.and_then(|status| status.replicas).unwrap_or_default(),
        selector: Some(selector_text(router)),
        workers: workers(observed).or_else(|| published.workers.clone().filter(|_| is_new)),
        url: desired.map(|desired| desired.url.clone()).or(published.url),
        config_hash: desired
            .map(|desired| format!("{}/{}", desired.start_digest, desired.live_digest))
            .or(published.config_hash),
        conditions,
    };
    Outcome { status, recheck_after: memory.recheck_after(observed.now, input.window), memory }
}

/// Routers and the engines that they speak of: those that end are as good as gone.
fn living_pods(observed: &Observed) -> BTreeSet<String> {
    let routers = observed.pods.iter().filter(|pod| !is_terminating(&pod.pod));
    let mut pods: BTreeSet<String> = routers.clone().map(|pod| facts::name(&pod.pod).to_owned()).collect();
    for report in routers.filter_map(|pod| pod.fresh_report(observed.now)) {
        pods.extend(report.workers.iter().map(|worker| reports::subject(worker).to_owned()));
    }
    pods
}

/// Workers that may be picked and all that are known: of the router that knows
/// least of them, so that the column does not flatter.
fn workers(observed: &Observed) -> Option<String> {
    let reports = observed.pods.iter().filter(|pod| !is_terminating(&pod.pod));
    let counts = reports.filter_map(|pod| pod.fresh_report(observed.now)).map(|report| {
        let ready = report.workers.iter().filter(|worker| worker.ready).count();
        (ready, report.workers.len())
    });
    counts.min().map(|(ready, all)| format!("{ready}/{all}"))
}

fn selector_text(router: &KvRouter) -> String {
    let labels = selector(router.metadata.name.as_deref().unwrap_or_default());
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

fn accepted(input: &Input<'_>) -> Seen {
    let type_ = ConditionType::Accepted;
    let complaints = input.verdict.err().map_or(&[][..], |invalid| &invalid.0);
    let accepted = || Finding::holds(Reason::Accepted, "The spec is in order.");
    Seen::certain(type_, verdict::finding(complaints, type_).unwrap_or_else(accepted))
}

/// By the spec, and by what the kubelet misses: Secrets are not read.
fn resolved(input: &Input<'_>, troubles: &[Trouble]) -> Seen {
    let type_ = ConditionType::ResolvedRefs;
    let complaints = input.verdict.err().map_or(&[][..], |invalid| &invalid.0);
    let missing = |trouble: &&Trouble| {
        matches!(trouble.reason, Reason::SecretNotFound | Reason::ConfigMapNotFound | Reason::ClaimNotFound)
    };
    let by_kubelet = || {
        let trouble = troubles.iter().find(missing)?;
        Some(Finding::fails(trouble.reason, sentence(trouble, input.router)))
    };
    let finding = verdict::finding(complaints, type_)
        .or_else(by_kubelet)
        .unwrap_or_else(|| Finding::holds(Reason::ResolvedRefs, "Everything that the spec names is there."));
    Seen::certain(type_, finding)
}

/// Whether the Secret that the kubelet misses is named by the router and not by
/// its pool: by the volume, where it says which, else by the Secret's name.
fn is_of_router(trouble: &Trouble, router: &KvRouter) -> bool {
    let says = |what: &str, name: &str| trouble.message.contains(&format!("{what} \"{name}\""));
    let named = router.spec.tenancy.as_ref().map(|tenancy| &tenancy.salt_secret_ref.name);
    named.is_some_and(|name| match trouble.message.contains("volume \"") {
        true => says("volume", TENANCY_VOLUME),
        false => says("secret", name),
    })
}

fn sentence(trouble: &Trouble, router: &KvRouter) -> String {
    let (pod, namespace) = (&trouble.pod, router.metadata.namespace.as_deref().unwrap_or_default());
    let next: &str = match trouble.reason {
        Reason::SecretNotFound if is_of_router(trouble, router) => {
            "create the Secret with that key, or correct spec.tenancy.saltSecretRef of the KvRouter"
        }
        Reason::SecretNotFound => "create the Secret with that key, or correct its name in the pool",
        Reason::ConfigMapNotFound => "create the ConfigMap, or correct its name in the pool",
        Reason::ClaimNotFound => "create the claim, or correct its name in the pool",
        Reason::ImagePullFailed => "correct the image or its pull secrets",
        Reason::CrashLooping => &format!("look at its log: `kubectl logs -n {namespace} {pod} --previous`"),
        Reason::Unschedulable => "add nodes, or lower spec.resources and spec.scheduling",
        Reason::MountFailed => &format!("see the pod's events: `kubectl describe pod -n {namespace} {pod}`"),
        _ => &format!(
            "correct the field of the KvRouter that it is about, most often spec.image or spec.resources; see \
             `kubectl describe pod -n {namespace} {pod}`"
        ),
    };
    format!("Pod {pod} does not run: {}; {next}.", trouble.message.trim_end_matches(['.', ';', ' ']))
}

fn condition_of<'a>(deployment: &'a Deployment, type_: &str) -> Option<&'a DeploymentCondition> {
    let conditions = deployment.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().find(|condition| condition.type_ == type_)
}

/// The API server's word that pods may not be created: quotas, admission.
fn creation_failure(input: &Input<'_>) -> Option<Finding> {
    let deployment = input.observed.deployment.as_deref()?;
    let failure =
        condition_of(deployment, "ReplicaFailure").filter(|condition| condition.status == "True")?;
    let text = failure.message.as_deref().unwrap_or_default().trim_end_matches(['.', ' ']);
    let message =
        format!("Router pods may not be created: {text}; correct the quota or the policy that refuses them.");
    Some(Finding::fails(Reason::PodCreationFailed, message))
}

fn progressing(input: &Input<'_>, troubles: &[Trouble]) -> Seen {
    let certain = |finding| Seen::certain(ConditionType::Progressing, finding);
    if is_paused(input.router) {
        let message = format!(
            "Nothing is changed while the annotation {PAUSED_ANNOTATION} is true; remove it to go on."
        );
        return certain(Finding::unknown(Reason::Paused, message));
    }
    if input.verdict.is_err() {
        let message = "Nothing is changed before Accepted and ResolvedRefs are in order; see there.";
        return certain(Finding::unknown(Reason::Pending, message));
    }
    if let Some(failure) = input.apply_failure {
        let message = format!(
            "The API server refused {}; correct the field that it names.",
            failure.trim_end_matches(['.', ' '])
        );
        return certain(Finding::fails(Reason::ApplyFailed, message));
    }
    if let Some(finding) = creation_failure(input) {
        return certain(finding);
    }
    let why =
        troubles.first().map_or_else(String::new, |trouble| format!(" {}", sentence(trouble, input.router)));
    let Some(deployment) = input.observed.deployment.as_deref() else {
        return certain(Finding::holds(Reason::RollingOut, "The Deployment is being created; wait."));
    };
    let (updated, available, wanted) = counts(deployment);
    if condition_of(deployment, "Progressing").is_some_and(|condition| {
        condition.status == "False" && condition.reason.as_deref() == Some("ProgressDeadlineExceeded")
    }) {
        let message = format!(
            "{updated} of {wanted} router pods are of the newest revision and {available} available, and nothing has \
             moved for {} minutes.{why} Look at the newest pod: kubectl describe pod -n {} -l {ROUTER_LABEL}={}",
            deployment.spec.as_ref().and_then(|spec| spec.progress_deadline_seconds).unwrap_or(600) / 60,
            input.router.metadata.namespace.as_deref().unwrap_or_default(),
            input.router.metadata.name.as_deref().unwrap_or_default()
        );
        return certain(Finding::fails(Reason::ProgressDeadlineExceeded, message));
    }
    if is_rolled_out(deployment) {
        let message = format!("All {wanted} router pods are of the newest revision.");
        return certain(Finding::fails(Reason::RolloutComplete, message));
    }
    let message = format!(
        "{updated} of {wanted} router pods are of the newest revision, {available} are available.{}",
        if why.is_empty() { " Wait." } else { &why }
    );
    certain(Finding::holds(Reason::RollingOut, message))
}

/// Pods of the newest revision, pods that are available, pods that are wanted.
fn counts(deployment: &Deployment) -> (i32, i32, i32) {
    let status = deployment.status.as_ref();
    let updated = status.and_then(|status| status.updated_replicas).unwrap_or_default();
    let available = status.and_then(|status| status.available_replicas).unwrap_or_default();
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    (updated, available, wanted)
}

fn is_rolled_out(deployment: &Deployment) -> bool {
    let (updated, available, wanted) = counts(deployment);
    let status = deployment.status.as_ref();
    let replicas = status.and_then(|status| status.replicas).unwrap_or_default();
    let seen = status.and_then(|status| status.observed_generation).unwrap_or_default();
    let is_seen = deployment.metadata.generation.unwrap_or_default() <= seen;
    is_seen && updated == wanted && available == wanted && replicas == wanted
}

fn available(input: &Input<'_>, troubles: &[Trouble]) -> Seen {
    let type_ = ConditionType::RouterAvailable;
    let Some(deployment) = input.observed.deployment.as_deref() else {
        let message = "There is no Deployment yet; see Accepted, ResolvedRefs and Progressing.";
        return Seen::certain(type_, Finding::unknown(Reason::Pending, message));
    };
    let (_, available, wanted) = counts(deployment);
    if 0 < available {
        let message = format!("{available} of {wanted} router pods are available.");
        return Seen::afar(type_, Finding::holds(Reason::Available, message));
    }
    if wanted == 0 {
        let message = "spec.replicas is 0, so nothing is served; raise it.";
        return Seen::certain(type_, Finding::fails(Reason::ScaledToZero, message));
    }
    if let Some(finding) = creation_failure(input) {
        return Seen::certain(type_, finding);
    }
    let living = input.observed.pods.iter().filter(|pod| !is_terminating(&pod.pod) && !is_finished(&pod.pod));
    let blamed: BTreeSet<String> = living.map(|pod| facts::name(&pod.pod).to_owned()).collect();
    // Pods that were deleted need no window: the API server says so.
    let pace = if blamed.is_empty() { Pace::AtOnce } else { Pace::AfterWindow };
    let finding = match troubles.first() {
        Some(trouble) => Finding::fails(trouble.reason, sentence(trouble, input.router)),
        None if blamed.is_empty() => {
            Finding::fails(Reason::NoReplicasReady, "There is no router pod yet; wait for the Deployment's.")
        }
        None => {
            let pods = names(blamed.iter().map(String::as_str));
            let message = format!("No router pod is ready: {pods}; wait, or look at their logs.");
            Finding::fails(Reason::NoReplicasReady, message)
        }
    };
    Seen { type_, finding, pace, blamed }
}

/// What routers say of themselves: ConfigApplied, TokenizerReady, RenderParity,
/// IndexWarm and EventsConnected.
fn reported(input: &Input<'_>, troubles: &[Trouble]) -> [Seen; 5] {
    let Input { router, observed, .. } = *input;
    let name = router.metadata.name.as_deref().unwrap_or_default();
    let pending = |type_| {
        let message = "Not looked at before Accepted and ResolvedRefs are in order; see there.";
        Seen::certain(type_, Finding::unknown(Reason::Pending, message))
    };
    let pool: Option<&InferencePool> = observed.pool.as_deref();
    let (Ok(desired), Some(pool)) = (input.verdict, pool) else {
        return [
            pending(ConditionType::ConfigApplied),
            pending(ConditionType::TokenizerReady),
            pending(ConditionType::RenderParity),
            pending(ConditionType::IndexWarm),
            pending(ConditionType::EventsConnected),
        ];
    };
    let (pods, now) = (&observed.pods, observed.now);
    [
        applied::config_applied(desired, name, &router.spec, pods, troubles, now),
        prompts::tokenizer(&pool.spec, &router.spec, name, pods, now),
        prompts::rendering(&pool.spec, name, pods, now),
        index::index(&pool.spec, name, pods, now),
        hearing::events(pool.spec.kv_events.transport, name, pods, now),
    ]
}

/// Half of the pairs missing is worse than all else. The rest is from what is
/// published: it has waited for its window already. Settings that are on their way
/// make nothing worse, nor do tokens that cannot be compared.
fn degraded(input: &Input<'_>, conditions: &[Condition]) -> Seen {
    let type_ = ConditionType::Degraded;
    let Input { router, observed, .. } = *input;
    let name = router.metadata.name.as_deref().unwrap_or_default();
    let wanted = input.verdict.ok().and_then(|_| pairs::pairs(name, &observed.pods, observed.now));
    if let Some(seen) = wanted {
        return seen;
    }
    let is_settled = |condition: &&Condition| {
        let on_its_way = condition.type_ == ConditionType::ConfigApplied.as_str()
            && condition.reason == Reason::RolloutPending.as_str();
        // Tokens that cannot be compared count as before.
        let not_compared =
            condition.type_ == ConditionType::RenderParity.as_str() && condition.status == "Unknown";
        !on_its_way && !not_compared
    };
    let settled: Vec<Condition> = conditions.iter().filter(is_settled).cloned().collect();
    let quality = [
        ConditionType::ConfigApplied,
        ConditionType::TokenizerReady,
        ConditionType::RenderParity,
        ConditionType::EventsConnected,
        ConditionType::IndexWarm,
    ];
    Seen::certain(type_, verdict::degraded(&settled, &quality))
}

fn ready(conditions: &[Condition]) -> Seen {
    let dependencies = [ConditionType::Accepted, ConditionType::ResolvedRefs, ConditionType::RouterAvailable];
    let failure = dependencies.into_iter().find_map(|type_| verdict::first_failure(conditions, type_));
    let serving = || Finding::holds(Reason::Serving, "Requests are served.");
    Seen::certain(ConditionType::Ready, failure.unwrap_or_else(serving))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
