//! What a router consists of. Pure, and cannot fail.
//!
//! Nothing observed enters it: the same two specs give the same objects, byte
//! for byte. Names and labels are in the operator's documentation; changing one
//! orphans what earlier releases made.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount, ServicePort, ServiceSpec};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kvrouter_crds::config::{LIVE_SETTINGS_KEY, START_SETTINGS_KEY, digest};

use super::config::{live_settings, live_settings_name, start_settings};
use super::pod;
use super::validate::ValidRouter;
use crate::config::ChildFlags;
use crate::yaml;

/// Value of `app.kubernetes.io/managed-by`.
pub const MANAGED_BY: &str = "kvrouter-operator";
/// Value of `app.kubernetes.io/name`.
pub const APP: &str = "kv-router";
/// Value of `app.kubernetes.io/component`.
pub const COMPONENT: &str = "router";
/// Label of router pods: the KvRouter's name.
pub const ROUTER_LABEL: &str = "kvrouter.dev/router";
/// Label of router pods: the pool's name.
pub const POOL_LABEL: &str = "kvrouter.dev/pool";

/// Least time for a router to become ready: it waits up to 60 s for its views;
/// starting and pulling come on top.
const PROGRESS_DEADLINE_SECONDS: i32 = 180;
/// ReplicaSets that are kept for `kubectl rollout undo`.
const REVISIONS: i32 = 3;

/// A rollout that makes no progress for this long is stuck. A new router may have to
/// wait for the room of one that drains.
fn progress_deadline_seconds(router: &ValidRouter) -> i32 {
    let drained = i32::try_from(pod::grace_seconds(router)).unwrap_or(i32::MAX);
    drained.saturating_add(40).max(PROGRESS_DEADLINE_SECONDS)
}

/// All children of a router, each with its owner reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// What routers run as.
    pub service_account: ServiceAccount,
    /// What they may read.
    pub role_binding: RoleBinding,
    /// Start settings; immutable, named by their digest.
    pub start_settings: ConfigMap,
    /// Live settings.
    pub live_settings: ConfigMap,
    /// The routers.
    pub deployment: Deployment,
    /// The Service in front of them.
    pub service: Service,
    /// Present with more than one replica.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// Digest of the start settings, as routers report it.
    pub start_digest: String,
    /// Digest of the live settings, as routers report it.
    pub live_digest: String,
    /// Where clients reach the routers, inside the cluster.
    pub url: String,
}

/// Everything that the router consists of.
pub fn build(router: &ValidRouter, flags: &ChildFlags) -> Desired {
    let start = yaml::text(&start_settings(router));
    let live = yaml::text(&live_settings(router));
    let (start_digest, live_digest) = (digest(&start), digest(&live));
    let child = child_name(&router.name);
    let start_name = start_settings_name(&router.name, &start_digest);
    let mut start_settings = config_map(router, start_name.clone(), START_SETTINGS_KEY, start);
    start_settings.immutable = Some(true);
    Desired {
        service_account: ServiceAccount {
            metadata: metadata(router, child.clone()),
            // The pods ask for the token themselves.
            automount_service_account_token: Some(false),
            ..Default::default()
        },
        role_binding: role_binding(router, flags),
        live_settings: config_map(router, live_settings_name(&router.name), LIVE_SETTINGS_KEY, live),
        deployment: deployment(router, flags, &start_name, &start_digest),
        service: service(router),
        disruption_budget: (1 < router.spec.replicas).then(|| disruption_budget(router)),
        start_settings,
        start_digest,
        live_digest,
        url: format!("http://{child}.{}.svc:{}", router.namespace, router.spec.service.port),
    }
}

/// Name of the Deployment, the Service, the ServiceAccount, the RoleBinding and
/// the PodDisruptionBudget.
pub fn child_name(router: &str) -> String {
    format!("{router}-router")
}

/// Name of the ConfigMap with start settings of that digest.
pub fn start_settings_name(router: &str, digest: &str) -> String {
    format!("{router}-router-config-{digest}")
}

/// Labels by which the Deployment and the Service know their pods.
pub fn selector(router: &str) -> BTreeMap<String, String> {
    let labels = [
        ("app.kubernetes.io/name", APP),
        ("app.kubernetes.io/instance", router),
        ("app.kubernetes.io/component", COMPONENT),
    ];
    labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Labels of every child.
fn labels(router: &str) -> BTreeMap<String, String> {
    let mut labels = selector(router);
    let more = [
        ("app.kubernetes.io/part-of", "kvrouter"),
        ("app.kubernetes.io/managed-by", MANAGED_BY),
        ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
    ];
    labels.extend(more.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())));
    labels
}

/// Labels of router pods: those of children without the version, which would
/// replace pods for nothing, and the names of router and pool.
pub fn pod_labels(router: &ValidRouter) -> BTreeMap<String, String> {
    let mut labels = labels(&router.name);
    labels.remove("app.kubernetes.io/version");
    labels.insert(ROUTER_LABEL.to_owned(), router.name.clone());
    labels.insert(POOL_LABEL.to_owned(), router.spec.pool_ref.name.clone());
    labels
}

fn metadata(router: &ValidRouter, name: String) -> ObjectMeta {
    let owner = OwnerReference {
        api_version: format!("{}/{}", kvrouter_crds::GROUP, kvrouter_crds::VERSION),
        kind: "KvRouter".to_owned(),
        name: router.name.clone(),
        uid: router.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    ObjectMeta {
        name: Some(name),
        namespace: Some(router.namespace.clone()),
        labels: Some(labels(&router.name)),
        // Offline there is no uid, and a reference without one is refused.
        owner_references: (!router.uid.is_empty()).then(|| vec![owner]),
        ..Default::default()
    }
}

fn config_map(router: &ValidRouter, name: String, key: &str, text: String) -> ConfigMap {
    let data = BTreeMap::from([(key.to_owned(), text)]);
    ConfigMap { metadata: metadata(router, name), data: Some(data), ..Default::default() }
}

fn role_binding(router: &ValidRouter, flags: &ChildFlags) -> RoleBinding {
    let child = child_name(&router.name);
    RoleBinding {
        metadata: metadata(router, child.clone()),
        role_ref: RoleRef {
            api_group: "rbac.authorization.k8s.io".to_owned(),
            kind: "ClusterRole".to_owned(),
            name: flags.router_cluster_role.clone(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: child,
            namespace: Some(router.namespace.clone()),
            ..Default::default()
        }]),
    }
}

fn deployment(
    router: &ValidRouter,
    flags: &ChildFlags,
    start_settings_name: &str,
    start_digest: &str,
) -> Deployment {
    let rolling = RollingUpdateDeployment {
        max_surge: Some(IntOrString::Int(1)),
        max_unavailable: Some(IntOrString::Int(0)),
    };
    let strategy =
        DeploymentStrategy { type_: Some("RollingUpdate".to_owned()), rolling_update: Some(rolling) };
    let spec = DeploymentSpec {
        replicas: Some(router.spec.replicas),
        selector: label_selector(router),
        strategy: Some(strategy),
        progress_deadline_seconds: Some(progress_deadline_seconds(router)),
        revision_history_limit: Some(REVISIONS),
        template: pod::template(router, flags, start_settings_name, start_digest),
        ..Default::default()
    };
    Deployment { metadata: metadata(router, child_name(&router.name)), spec: Some(spec), status: None }
}

fn service(router: &ValidRouter) -> Service {
    let mut metadata = metadata(router, child_name(&router.name));
    let annotations = &router.spec.service.annotations;
    metadata.annotations = (!annotations.is_empty()).then(|| annotations.clone());
    let port = ServicePort {
        name: Some("http".to_owned()),
        port: i32::from(router.spec.service.port),
        target_port: Some(IntOrString::String("http".to_owned())),
        protocol: Some("TCP".to_owned()),
        app_protocol: Some("http".to_owned()),
        ..Default::default()
    };
    let spec = ServiceSpec {
        type_: Some(router.spec.service.type_.as_str().to_owned()),
        selector: Some(selector(&router.name)),
        ports: Some(vec![port]),
        ..Default::default()
    };
    Service { metadata, spec: Some(spec), status: None }
}

fn disruption_budget(router: &ValidRouter) -> PodDisruptionBudget {
    let spec = PodDisruptionBudgetSpec {
        max_unavailable: Some(IntOrString::Int(1)),
        selector: Some(label_selector(router)),
        // A router that is not ready protects nobody, and must not block a drain.
        unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
        ..Default::default()
    };
    PodDisruptionBudget {
        metadata: metadata(router, child_name(&router.name)),
        spec: Some(spec),
        status: None,
    }
}

/// As the Deployment, the budget and the spread need it.
pub fn label_selector(router: &ValidRouter) -> LabelSelector {
    LabelSelector { match_labels: Some(selector(&router.name)), match_expressions: None }
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
