//! What is seen around one InferencePool. Reads stores only.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::InferencePool;
use kvrouter_crds::pool::WorkloadRef;

use crate::facts::RouterPod;

/// Everything that the pure stages of a pool may know besides its spec.
#[derive(Clone, Debug)]
pub struct Observed {
    /// When.
    pub now: Timestamp,
    /// Pods that carry all labels of the pool's selector, by name; also those
    /// that are ending.
    pub pods: Vec<Arc<Pod>>,
    /// The named workloads, in the order of the spec.
    pub workloads: Vec<WorkloadSeen>,
    /// All other pools of the namespace, by name.
    pub other_pools: Vec<Arc<InferencePool>>,
    /// KvRouters of this pool, by name.
    pub routers: Vec<RouterSeen>,
}

/// A workload that the pool names.
#[derive(Clone, Debug)]
pub struct WorkloadSeen {
    /// As the spec names it.
    pub reference: WorkloadRef,
    /// The workload; none where there is no such object.
    pub found: Option<WorkloadFacts>,
}

/// What matters of a Deployment or StatefulSet.
#[derive(Clone, Debug, Default)]
pub struct WorkloadFacts {
    /// Its uid.
    pub uid: String,
    /// `metadata.resourceVersion`: every patch is guarded by it.
    pub resource_version: String,
    /// The owner with `controller: true`, as `Kind/name`; none where people own it.
    pub controller: Option<String>,
    /// `spec.selector.matchLabels`.
    pub selector: BTreeMap<String, String>,
    /// `spec.template`.
    pub template: PodTemplateSpec,
    /// `spec.paused`, or a StatefulSet with `updateStrategy: OnDelete`.
    pub paused: bool,
    /// How its rollout stands.
    pub rollout: Rollout,
}

/// How a rollout stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rollout {
    /// All pods are of the newest template and ready.
    #[default]
    Complete,
    /// Not yet.
    InProgress,
    /// Its own progress deadline has passed.
    DeadlineExceeded,
}

/// A KvRouter of the pool.
#[derive(Clone, Debug)]
pub struct RouterSeen {
    /// Its name.
    pub name: String,
    /// Its pods, by name.
    pub pods: Vec<RouterPod>,
}
