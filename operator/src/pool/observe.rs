//! What is seen around one InferencePool. Reads stores only.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kvrouter_crds::InferencePool;
use kvrouter_crds::pool::{WorkloadKind, WorkloadRef};

use crate::facts::{RouterPod, matches};
use crate::poller::Reports;
use crate::rollout;
use crate::stores::{Stores, controller, get, list};
use crate::verdict::Complaint;

/// Everything that the pure stages of a pool may know besides its spec.
#[derive(Clone, Debug)]
pub struct Observed {
    /// When.
    pub now: Timestamp,
    /// Why the pool's `gatewayPoolRef` gives it no selector and no ports; none
    /// where it does, or where it has none.
    pub unresolved: Option<Complaint>,
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

/// What the stores show around `pool`, which is resolved unless `unresolved` says why not.
pub fn observe(
    pool: &InferencePool,
    unresolved: Option<Complaint>,
    stores: &Stores,
    reports: &Reports,
    now: Timestamp,
) -> Observed {
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    let selector = &pool.spec.selector.match_labels;
    let routers = stores.routers_of(&namespace, &name);
    Observed {
        now,
        unresolved,
        pods: list(&stores.pods, &namespace, |pod| matches(selector, pod.metadata.labels.as_ref())),
        workloads: pool.spec.workloads.iter().map(|it| workload(it, &namespace, stores)).collect(),
        other_pools: stores.other_pools(&namespace, &name),
        routers: routers
            .iter()
            .map(|router| RouterSeen {
                name: router.name_any(),
                pods: crate::router::observe::pods(&namespace, &router.name_any(), stores, reports),
            })
            .collect(),
    }
}

fn workload(reference: &WorkloadRef, namespace: &str, stores: &Stores) -> WorkloadSeen {
    let found = match reference.kind {
        WorkloadKind::Deployment => {
            get(&stores.deployments, namespace, &reference.name).map(|found| of_deployment(&found))
        }
        WorkloadKind::StatefulSet => {
            get(&stores.stateful_sets, namespace, &reference.name).map(|found| of_stateful_set(&found))
        }
    };
    WorkloadSeen { reference: reference.clone(), found }
}

fn of_deployment(found: &Deployment) -> WorkloadFacts {
    let spec = found.spec.clone().unwrap_or_default();
    WorkloadFacts {
        uid: found.uid().unwrap_or_default(),
        resource_version: found.resource_version().unwrap_or_default(),
        controller: controller(&found.metadata).map(|owner| format!("{}/{}", owner.kind, owner.name)),
        selector: spec.selector.match_labels.unwrap_or_default(),
        template: spec.template,
        paused: spec.paused == Some(true),
        rollout: rollout::of_deployment(found),
    }
}

fn of_stateful_set(found: &StatefulSet) -> WorkloadFacts {
    let spec = found.spec.clone().unwrap_or_default();
    WorkloadFacts {
        uid: found.uid().unwrap_or_default(),
        resource_version: found.resource_version().unwrap_or_default(),
        controller: controller(&found.metadata).map(|owner| format!("{}/{}", owner.kind, owner.name)),
        selector: spec.selector.match_labels.unwrap_or_default(),
        template: spec.template,
        paused: rollout::is_on_delete(found),
        rollout: rollout::of_stateful_set(found),
    }
}
