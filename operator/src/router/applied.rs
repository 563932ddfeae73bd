//! Does every replica have the settings that the spec asks for? Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::health::HealthReport;
use kvrouter_crds::router::KvRouterSpec;

use super::build::Desired;
use super::reports::{Reports, reports};
use super::trouble::Trouble;
use crate::facts::{self, RouterPod, is_finished, is_terminating};
use crate::hysteresis::{Pace, Seen};

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
        Ok(Reports { missing: Some((finding, blamed)), .. }) => {
            Seen { type_, finding, pace: Pace::AfterWindow, blamed }
        }
        Err(silence) => silence.about(type_),
        Ok(Reports { missing: None, .. }) => Seen::certain(
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
