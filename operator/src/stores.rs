//! What the API server has told us: one store per kind, kept by `watch`.
//!
//! Objects are thinned out before they are kept: nothing reads managed fields,
//! probes or volumes of other people's pods, and on a large cluster they would
//! be most of the operator's memory. What we own is kept whole, to see whether
//! somebody changed it.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Event, Pod, PodSpec, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use kvrouter_crds::{GROUP, InferencePool, KvRouter};
use tokio::sync::watch;

use crate::facts::matches;
use crate::gateway::{GatewayPool, Lookup, Presence, Remembered, Resolved};

/// Label of everything that we own, and its value.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "kvrouter-operator");
/// Label of router pods: the KvRouter's name.
pub const ROUTER_LABEL: &str = "kvrouter.dev/router";
/// Label of router pods: the pool's name.
pub const POOL_LABEL: &str = "kvrouter.dev/pool";
/// Prefix of annotations that we read ourselves.
const OUR_ANNOTATIONS: &str = "kvrouter.dev/";

/// Everything that is watched in one scope (a namespace, or all of them).
#[derive(Clone)]
pub struct Stores {
    /// Pools as they are written: selectors and ports are those of [`Stores::pool`].
    pub pools: Store<InferencePool>,
    /// Routers.
    pub routers: Store<KvRouter>,
    /// All pods.
    pub pods: Store<Pod>,
    /// All Deployments.
    pub deployments: Store<Deployment>,
    /// All StatefulSets.
    pub stateful_sets: Store<StatefulSet>,
    /// Services that we own.
    pub services: Store<Service>,
    /// ConfigMaps that we own.
    pub config_maps: Store<ConfigMap>,
    /// ServiceAccounts that we own.
    pub service_accounts: Store<ServiceAccount>,
    /// RoleBindings that we own.
    pub role_bindings: Store<RoleBinding>,
    /// PodDisruptionBudgets that we own.
    pub budgets: Store<PodDisruptionBudget>,
    /// Events that say that a volume of a pod cannot be mounted. Empty where we
    /// have no right to read events.
    pub mount_failures: Store<Event>,
    /// Pools of the Gateway API. Empty where the cluster does not have them.
    pub gateway_pools: Store<GatewayPool>,
    /// Whether it has them.
    pub gateway: watch::Receiver<Presence>,
    /// What it gave last to pools whose references give nothing now.
    pub remembered: Arc<Remembered>,
}

/// The object of that name, if it is in the store.
pub fn get<K>(store: &Store<K>, namespace: &str, name: &str) -> Option<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.get(&ObjectRef::new(name).within(namespace))
}

/// All objects of `namespace` that satisfy `wanted`, by name.
pub fn list<K>(store: &Store<K>, namespace: &str, wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let mut found =
        store.state_filter(|object| object.meta().namespace.as_deref() == Some(namespace) && wanted(object));
    found.sort_by(|a, b| a.meta().name.cmp(&b.meta().name));
    found
}

impl Stores {
    /// What there is for a reference to a pool of the Gateway API.
    pub fn gateway_pool(&self, namespace: &str, name: &str) -> Lookup {
        match *self.gateway.borrow() {
            Presence::Listed => {
                get(&self.gateway_pools, namespace, name).map_or(Lookup::NotFound, Lookup::Found)
            }
            Presence::NotInstalled => Lookup::NotInstalled,
            Presence::Unknown | Presence::Unreadable => Lookup::Unreadable,
        }
    }

    fn resolved(&self, pool: Arc<InferencePool>) -> Resolved {
        Resolved::of(pool, |namespace, name| self.gateway_pool(namespace, name))
    }

    /// The pool of that name, with its selector and ports, wherever they are written.
    pub fn pool(&self, namespace: &str, name: &str) -> Option<Resolved> {
        get(&self.pools, namespace, name).map(|pool| self.resolved(pool))
    }

    /// Remembers what references give now, for the time when they do not: to be
    /// called whenever a pool of either kind has come, changed or gone.
    pub fn remember(&self) {
        self.remembered.refresh(self.pools.state(), |pool| self.resolved(pool));
    }

    fn seen_by_others(&self, pool: Arc<InferencePool>) -> Arc<InferencePool> {
        self.remembered.seen_by_others(self.resolved(pool))
    }

    /// All pools of the namespace but the one of that name, as it sees them, by name.
    /// One without a selector matches nothing.
    pub fn other_pools(&self, namespace: &str, name: &str) -> Vec<Arc<InferencePool>> {
        let pools = list(&self.pools, namespace, |pool| pool.metadata.name.as_deref() != Some(name));
        pools.into_iter().map(|pool| self.seen_by_others(pool)).collect()
    }

    /// Pools of the namespace whose selector `labels` satisfy.
    pub fn pools_of(&self, namespace: &str, labels: &BTreeMap<String, String>) -> Vec<Arc<InferencePool>> {
        let pools = list(&self.pools, namespace, |_| true).into_iter();
        let pools = pools.map(|pool| self.seen_by_others(pool));
        pools.filter(|pool| matches(&pool.spec.selector.match_labels, Some(labels))).collect()
    }

    /// Routers of the pool of that name.
    pub fn routers_of(&self, namespace: &str, pool: &str) -> Vec<Arc<KvRouter>> {
        list(&self.routers, namespace, |router| router.spec.pool_ref.name == pool)
    }

    /// Pods of the router of that name.
    pub fn router_pods(&self, namespace: &str, router: &str) -> Vec<Arc<Pod>> {
        list(&self.pods, namespace, |pod| {
            pod.labels().get(ROUTER_LABEL).is_some_and(|label| label == router)
                && pod.labels().get(MANAGED_BY.0).is_some_and(|label| label == MANAGED_BY.1)
        })
    }
}

/// The owner with `controller: true`.
pub fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// Name of the KvRouter that controls the object.
pub fn owning_router(meta: &ObjectMeta) -> Option<&str> {
    let owner = controller(meta)?;
    let group = owner.api_version.split('/').next().unwrap_or_default();
    (owner.kind == "KvRouter" && group == GROUP).then_some(owner.name.as_str())
}

fn is_managed(meta: &ObjectMeta) -> bool {
    meta.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY.0)).is_some_and(|by| by == MANAGED_BY.1)
}

/// Drops what nobody reads of any object.
pub fn thin<K: Resource>(object: &mut K) {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    if let Some(annotations) = meta.annotations.as_mut() {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
}

/// Drops what nobody reads of a pod.
pub fn thin_pod(pod: &mut Pod) {
    thin(pod);
    // The version changes with every heartbeat and is of no use here.
    pod.metadata.resource_version = None;
    keep_our_annotations(&mut pod.metadata);
    if let Some(spec) = pod.spec.as_mut() {
        thin_pod_spec(spec);
    }
    if let Some(status) = pod.status.as_mut() {
        let statuses = status.container_statuses.iter_mut().chain(&mut status.init_container_statuses);
        for container in statuses.flatten() {
            container.allocated_resources = None;
            container.allocated_resources_status = None;
            container.resources = None;
            container.volume_mounts = None;
            container.user = None;
        }
        status.pod_ips = None;
        status.host_ips = None;
        status.resource_claim_statuses = None;
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_probe_time = None;
        }
    }
}

/// Drops what nobody reads of a Deployment that is not ours.
pub fn thin_deployment(deployment: &mut Deployment) {
    thin(deployment);
    if is_managed(&deployment.metadata) {
        return;
    }
    keep_our_annotations(&mut deployment.metadata);
    if let Some(spec) = deployment.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()) {
        thin_pod_spec(spec);
    }
}

/// Drops what nobody reads of a StatefulSet.
pub fn thin_stateful_set(set: &mut StatefulSet) {
    thin(set);
    keep_our_annotations(&mut set.metadata);
    let Some(spec) = set.spec.as_mut() else { return };
    spec.volume_claim_templates = None;
    if let Some(spec) = spec.template.spec.as_mut() {
        thin_pod_spec(spec);
    }
}

fn keep_our_annotations(meta: &mut ObjectMeta) {
    if let Some(annotations) = meta.annotations.as_mut() {
        annotations.retain(|name, _| name.starts_with(OUR_ANNOTATIONS));
        if annotations.is_empty() {
            meta.annotations = None;
        }
    }
}

fn thin_pod_spec(spec: &mut PodSpec) {
    let kept = PodSpec {
        containers: std::mem::take(&mut spec.containers),
        init_containers: spec.init_containers.take(),
        node_name: spec.node_name.take(),
        // Which mounts a failure may be about: Secrets, ConfigMaps and claims.
        volumes: spec.volumes.take(),
        ..PodSpec::default()
    };
    *spec = kept;
    spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()).for_each(thin_container);
}

/// Keeps what tells an engine's settings and a bridge's version.
fn thin_container(container: &mut Container) {
    *container = Container {
        name: std::mem::take(&mut container.name),
        image: container.image.take(),
        command: container.command.take(),
        args: container.args.take(),
        env: container.env.take(),
        env_from: container.env_from.take(),
        ports: container.ports.take(),
        restart_policy: container.restart_policy.take(),
        ..Container::default()
    };
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_thinned_pod_keeps_what_conditions_are_made_of() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "resourceVersion": "7", "labels": {"app": "qwen"},
                "annotations": {"kvrouter.dev/start-settings": "d", "other": "x"},
                "managedFields": [{"manager": "kubelet"}]},
            "spec": {"nodeName": "n", "containers": [{"name": "engine", "args": ["--block-size", "64"],
                "env": [{"name": "PYTHONHASHSEED", "value": "0"}], "livenessProbe": {}}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [
                {"name": "engine", "image": "", "imageID": "", "ready": false, "restartCount": 1,
                 "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
        }))
        .expect("a pod");
        thin_pod(&mut pod);
        let kept = serde_json::to_value(&pod).expect("serializes");
        assert_eq!(kept["metadata"]["annotations"], json!({"kvrouter.dev/start-settings": "d"}));
        assert_eq!(kept["metadata"]["labels"]["app"], "qwen");
        assert!(kept["metadata"].get("managedFields").is_none());
        assert!(kept["spec"]["containers"][0].get("livenessProbe").is_none());
        assert_eq!(kept["spec"]["containers"][0]["args"][1], "64");
        assert_eq!(kept["spec"]["containers"][0]["env"][0]["value"], "0");
        assert_eq!(kept["status"]["containerStatuses"][0]["state"]["waiting"]["reason"], "CrashLoopBackOff");
        assert_eq!(kept["status"]["podIP"], "10.0.0.1");
    }

    #[test]
    fn only_a_controlling_kvrouter_of_our_group_owns() {
        let meta = |kind: &str, api_version: &str, controller: Option<bool>| ObjectMeta {
            owner_references: Some(vec![OwnerReference {
                api_version: api_version.into(),
                kind: kind.into(),
                name: "chat".into(),
                controller,
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        };
        assert_eq!(owning_router(&meta("KvRouter", "kvrouter.dev/v1alpha1", Some(true))), Some("chat"));
        assert_eq!(owning_router(&meta("KvRouter", "kvrouter.dev/v1beta1", Some(true))), Some("chat"));
        assert_eq!(owning_router(&meta("KvRouter", "other.dev/v1", Some(true))), None);
        assert_eq!(owning_router(&meta("KvRouter", "kvrouter.dev/v1alpha1", None)), None);
        assert_eq!(owning_router(&meta("Deployment", "apps/v1", Some(true))), None);
    }
}
