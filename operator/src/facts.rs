//! What both kinds see of the cluster, as plain data from stores.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Resource;
use kvrouter_crds::health::HealthReport;

/// A health report that is older than this says nothing any more: three polls
/// and a time-out.
pub const REPORT_MAX_AGE: SignedDuration = SignedDuration::from_secs(20);

/// Annotation of both kinds that stops every write but the status.
pub const PAUSED_ANNOTATION: &str = "kvrouter.dev/paused";

/// One pod of a KvRouter's Deployment and what is heard from it.
#[derive(Clone, Debug)]
pub struct RouterPod {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The last report that was read from this very pod (by uid); none before
    /// the first.
    pub report: Option<Reported>,
    /// Why the last poll failed; none if it succeeded or there was none.
    pub poll_failure: Option<String>,
    /// Warnings that the kubelet or the scheduler gave of it, newest first:
    /// `FailedMount`, `FailedScheduling`... Empty where events cannot be read.
    pub warnings: Vec<Warning>,
}

/// A report and when it was read.
#[derive(Clone, Debug)]
pub struct Reported {
    /// What the router said.
    pub report: Arc<HealthReport>,
    /// When.
    pub at: Timestamp,
}

/// An event of type Warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Its reason: `FailedMount`, `FailedScheduling`, ...
    pub reason: String,
    /// Its text.
    pub message: String,
}

impl RouterPod {
    /// The report, where it is fresh enough to believe.
    pub fn fresh_report(&self, now: Timestamp) -> Option<&HealthReport> {
        let reported = self.report.as_ref()?;
        (now.duration_since(reported.at) <= REPORT_MAX_AGE).then_some(&*reported.report)
    }
}

/// The pod's name; empty for an object that no API server made.
pub fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// The pod's uid; empty for an object that no API server made.
pub fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// Whether it was told to stop.
pub fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Whether it has ended for good.
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether its Ready condition holds.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Whether people want nothing of the object to be written but its status.
pub fn is_paused<K: Resource>(object: &K) -> bool {
    object.meta().annotations.iter().flatten().any(|(key, value)| key == PAUSED_ANNOTATION && value == "true")
}

/// Whether `labels` carry everything that `selector` asks for. An empty
/// selector matches nothing.
pub fn matches(selector: &BTreeMap<String, String>, labels: Option<&BTreeMap<String, String>>) -> bool {
    let carries = |(key, value)| labels.is_some_and(|labels| labels.get(key) == Some(value));
    !selector.is_empty() && selector.iter().all(carries)
}
