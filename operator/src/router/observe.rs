//! What is seen around one KvRouter. Reads stores only.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kvrouter_crds::{InferencePool, KvRouter};

use crate::facts::{RouterPod, Warning, uid};
use crate::poller::Reports;
use crate::stores::{Stores, get, list};
use crate::verdict::Complaint;

/// Everything that the pure stages of a router may know besides its spec.
#[derive(Clone, Debug)]
pub struct Observed {
    /// When.
    pub now: Timestamp,
    /// The pool that it names; none where there is no such object.
    pub pool: Option<Arc<InferencePool>>,
    /// Why that pool's `gatewayPoolRef` gives it no selector and no ports; none
    /// where it does, or where it has none.
    pub unresolved: Option<Complaint>,
    /// All other pools of the namespace, by name.
    pub other_pools: Vec<Arc<InferencePool>>,
    /// Its Deployment.
    pub deployment: Option<Arc<Deployment>>,
    /// Its pods, by name; also those that are ending.
    pub pods: Vec<RouterPod>,
    /// Children's names that are taken by objects which this router does not
    /// control, as `Kind/name`, sorted.
    pub taken: Vec<String>,
}

/// What the stores show around `router`. `taken` is what was found out when its
/// children were last applied.
pub fn observe(
    router: &KvRouter,
    stores: &Stores,
    reports: &Reports,
    taken: Vec<String>,
    now: Timestamp,
) -> Observed {
    let (namespace, name) = (router.namespace().unwrap_or_default(), router.name_any());
    let pool_name = &router.spec.pool_ref.name;
    let found = stores.pool(&namespace, pool_name);
    Observed {
        now,
        unresolved: found.as_ref().and_then(|found| found.unresolved.clone()),
        pool: found.map(|found| found.pool),
        other_pools: stores.other_pools(&namespace, pool_name),
        deployment: get(&stores.deployments, &namespace, &format!("{name}-router")),
        pods: pods(&namespace, &name, stores, reports),
        taken,
    }
}

/// The pods of a router and what is heard from them.
pub fn pods(namespace: &str, router: &str, stores: &Stores, reports: &Reports) -> Vec<RouterPod> {
    let pods = stores.router_pods(namespace, router);
    pods.into_iter()
        .map(|pod| {
            let heard = reports.heard(&pod);
            let warnings = warnings(&pod, namespace, stores);
            RouterPod { report: heard.report, poll_failure: heard.failure, warnings, pod }
        })
        .collect()
}

/// Events about `pod`, newest first.
fn warnings(pod: &Pod, namespace: &str, stores: &Stores) -> Vec<Warning> {
    let mut events = list(&stores.mount_failures, namespace, |event| {
        event.involved_object.uid.as_deref() == Some(uid(pod))
    });
    let at = |event: &Event| {
        let last = event.last_timestamp.as_ref().map(|time| time.0);
        last.or_else(|| event.event_time.as_ref().map(|time| time.0))
    };
    events.sort_by_key(|event| std::cmp::Reverse(at(event)));
    let warning = |event: &Event| Warning {
        reason: event.reason.clone().unwrap_or_default(),
        message: event.message.clone().unwrap_or_default(),
    };
    events.iter().map(|event| warning(event)).collect()
}
