//! The only writer of what we own: children of routers, and both statuses.
//!
//! Children are applied on the server's side under one field manager, so that a
//! field which is not wanted any more goes away and fields of others stay. What
//! is already as wanted is not written: a digest of what was applied stands in
//! an annotation, and every field is compared with the live object, so a quiet
//! cluster sees no writes and an edit by hand is undone. An object that has the
//! name of a child and is not ours is left alone, and then nothing is written at
//! all: a router of which half is there serves nobody.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy,
};
use kube::core::Status;
use kube::runtime::reflector::Store;
use kube::{Client, Resource, ResourceExt};
use kvrouter_crds::KvRouter;
use kvrouter_crds::config::digest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::drift::difference;
use crate::ledger::{Applied, Entry, Key, Ledger};
use crate::metrics::Metrics;
use crate::router::build::Desired;
use crate::router::pod::START_ANNOTATION;
use crate::stores::{Stores, controller, get, list};

/// Annotation of every child: digest of what was applied.
const APPLIED: &str = "kvrouter.dev/applied";
/// Least time between two writes of one status, unless a condition flips or the
/// spec has changed: a fleet that starts would otherwise write with every pod.
const STATUS_PAUSE: Duration = Duration::from_secs(10);

/// Why a write did not happen.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Children's names are taken by objects that are not ours.
    #[error("not applied: {} exist and belong to somebody else", names.join(", "))]
    NameTaken {
        /// As `Kind/name`, sorted.
        names: Vec<String>,
    },
    /// The API server did not take a child.
    #[error("failed to {verb} {child}")]
    Child {
        /// `apply`, `delete` or `read`.
        verb: &'static str,
        /// As `Kind/name`.
        child: String,
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not take a status.
    #[error("failed to write the status of {object}")]
    Status {
        /// As `Kind/name`.
        object: String,
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
    /// An object does not become JSON, which is a defect of ours.
    #[error("failed to serialize {object}")]
    Serialize {
        /// As `Kind/name`.
        object: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl ApplyError {
    /// The `result` label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NameTaken { .. } => "name_taken",
            Self::Child { .. } => "child",
            Self::Status { .. } => "status",
            Self::Serialize { .. } => "serialize",
        }
    }

    /// Whether the same call can succeed later without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NameTaken { .. } | Self::Serialize { .. } => false,
            Self::Child { source, .. } | Self::Status { source, .. } => is_transient(source),
        }
    }

    /// Whether there is nothing left to do, because the namespace is going away.
    pub fn is_namespace_ending(&self) -> bool {
        match self {
            Self::Child { source, .. } | Self::Status { source, .. } => is_namespace_ending(source),
            Self::NameTaken { .. } | Self::Serialize { .. } => false,
        }
    }

    /// What a user should read of it; none for what heals by itself.
    pub fn refusal(&self) -> Option<String> {
        match self {
            Self::Child { child, source, .. } if !is_transient(source) => Some(format!("{child}: {source}")),
            Self::Child { .. } | Self::NameTaken { .. } | Self::Status { .. } | Self::Serialize { .. } => {
                None
            }
        }
    }
}

/// Whether `error` may heal by itself: everything but a considered refusal.
pub fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => !matches!(status.code, 400 | 403 | 404 | 405 | 413 | 422),
        _ => true,
    }
}

/// Whether `error` says that the namespace is going away: nothing can be made
/// in it any more, and nothing needs to be.
pub fn is_namespace_ending(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 403 && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The hand that writes.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    metrics: Arc<Metrics>,
}

/// A child as it should be.
struct Child {
    kind: &'static str,
    resource: ApiResource,
    name: String,
    wanted: Value,
    digest: String,
    /// As the store shows it.
    live: Option<Value>,
}

impl Child {
    fn title(&self) -> String {
        format!("{}/{}", self.kind, self.name)
    }

    fn version(&self) -> Option<String> {
        text(self.live.as_ref()?, "/metadata/resourceVersion").map(str::to_owned)
    }

    /// Whether the store shows an object that was made of what is wanted now.
    fn is_known(&self) -> bool {
        let annotations = self.live.as_ref().and_then(|live| live.pointer("/metadata/annotations"));
        annotations.and_then(|all| all.get(APPLIED)).and_then(Value::as_str) == Some(&self.digest)
    }

    /// Why it must be applied; none if there is no need.
    fn need(&self, entry: &Entry) -> Option<String> {
        let before = entry.applied.get(&self.title());
        let Some(live) = &self.live else {
            return Some("it is not there".to_owned());
        };
        // The store has not moved since it was applied: it has not heard yet, or
        // applying changed nothing.
        if before.is_some_and(|old| old.digest == self.digest && old.before == self.version()) {
            return None;
        }
        if !self.is_known() {
            return Some("something else is wanted".to_owned());
        }
        difference(&self.wanted, live).map(|path| format!("{path} was changed"))
    }
}

impl Writer {
    /// A hand that counts what it writes.
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, metrics }
    }

    /// Makes everything of `desired` so, and removes what is not in it.
    pub async fn apply(
        &self,
        router: &KvRouter,
        desired: &Desired,
        stores: &Stores,
        ledger: &Ledger,
    ) -> Result<(), ApplyError> {
        let key = key(router);
        let uid = router.uid().unwrap_or_default();
        let mut children = children(desired, stores, &key.0)?;
        let taken = self.taken(&mut children, &key.0, &uid).await?;
        if !taken.is_empty() {
            return Err(ApplyError::NameTaken { names: taken });
        }
        let entry = ledger.entry(&key, &uid);
        let mut is_quiet = true;
        for child in &children {
            let Some(why) = child.need(&entry) else { continue };
            is_quiet = false;
            tracing::info!(namespace = key.0, child = child.title(), why, "applied");
            self.apply_child(child, &key.0).await?;
            let applied = Applied { before: child.version(), digest: child.digest.clone() };
            ledger.update(&key, &uid, |entry| {
                entry.applied.insert(child.title(), applied);
            });
        }
        // A store that lags shows the rollout of the last template.
        let is_known = children.iter().all(Child::is_known);
        let keep_settings = !is_quiet || !is_known || !is_rolled_out(desired, stores, &key.0);
        self.prune(router, &children, stores, keep_settings).await
    }

    /// The names of `taken` (as `Kind/name`) that are still not ours.
    pub async fn still_taken(&self, router: &KvRouter, taken: &[String]) -> Result<Vec<String>, ApplyError> {
        let (namespace, _) = key(router);
        let uid = router.uid().unwrap_or_default();
        let mut still = Vec::new();
        for title in taken {
            let Some((kind, name)) = title.split_once('/') else { continue };
            let Some(resource) = resource_of(kind) else { continue };
            let found = self.read(&resource, &namespace, name, title).await?;
            if found.is_some_and(|object| owner(&object) != Some(&uid)) {
                still.push(title.clone());
            }
        }
        Ok(still)
    }

    /// Children whose names belong to somebody else. Fills in children that
    /// exist and that the stores do not show yet.
    async fn taken(
        &self,
        children: &mut [Child],
        namespace: &str,
        uid: &str,
    ) -> Result<Vec<String>, ApplyError> {
        let mut taken = Vec::new();
        for child in children.iter_mut() {
            if child.live.is_none() {
                let title = child.title();
                child.live = self.read(&child.resource, namespace, &child.name, &title).await?;
            }
            if child.live.as_ref().is_some_and(|live| owner(live) != Some(uid)) {
                taken.push(child.title());
            }
        }
        taken.sort();
        Ok(taken)
    }

    async fn read(
        &self,
        resource: &ApiResource,
        namespace: &str,
        name: &str,
        title: &str,
    ) -> Result<Option<Value>, ApplyError> {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, resource);
        let found = api.get_opt(name).await.map_err(|source| ApplyError::Child {
            verb: "read",
            child: title.to_owned(),
            source: Box::new(source),
        })?;
        found.map(|object| json_of(&object, title)).transpose()
    }

    async fn apply_child(&self, child: &Child, namespace: &str) -> Result<(), ApplyError> {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &child.resource);
        let failed = |verb| {
            let child = child.title();
            move |source| ApplyError::Child { verb, child, source: Box::new(source) }
        };
        // What a binding binds to cannot change: another one must take its place.
        let rebinds = child.live.as_ref().is_some_and(|live| {
            child.kind == "RoleBinding"
                && live.pointer("/roleRef/name") != child.wanted.pointer("/roleRef/name")
        });
        if rebinds {
            self.metrics.wrote("delete", child.kind);
            api.delete(&child.name, &DeleteParams::default()).await.map_err(failed("delete"))?;
        }
        let mut wanted = child.wanted.clone();
        wanted["metadata"]["annotations"][APPLIED] = child.digest.clone().into();
        self.metrics.wrote("apply", child.kind);
        let params = PatchParams::apply(crate::FIELD_MANAGER).force();
        api.patch(&child.name, &params, &Patch::Apply(&wanted)).await.map_err(failed("apply"))?;
        Ok(())
    }

    /// Deletes what the router owns and does not want any more.
    async fn prune(
        &self,
        router: &KvRouter,
        children: &[Child],
        stores: &Stores,
        keep_settings: bool,
    ) -> Result<(), ApplyError> {
        let namespace = router.namespace().unwrap_or_default();
        self.prune_kind(router, children, &stores.deployments, |_| false).await?;
        self.prune_kind(router, children, &stores.services, |_| false).await?;
        self.prune_kind(router, children, &stores.service_accounts, |_| false).await?;
        self.prune_kind(router, children, &stores.role_bindings, |_| false).await?;
        self.prune_kind(router, children, &stores.budgets, |_| false).await?;
        let pods = stores.router_pods(&namespace, &router.name_any());
        self.prune_kind(router, children, &stores.config_maps, |map: &ConfigMap| {
            keep_settings
                || pods.iter().any(|pod| {
                    let begun_with = pod.annotations().get(START_ANNOTATION);
                    begun_with.is_some_and(|digest| map.name_any().ends_with(digest))
                })
        })
        .await
    }

    async fn prune_kind<K>(
        &self,
        router: &KvRouter,
        children: &[Child],
        store: &Store<K>,
        keep: impl Fn(&K) -> bool,
    ) -> Result<(), ApplyError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let (namespace, _) = key(router);
        let uid = router.uid().unwrap_or_default();
        let kind = K::kind(&());
        let ours = |object: &K| controller(object.meta()).is_some_and(|owner| owner.uid == uid);
        let wanted = |name: &str| children.iter().any(|child| child.kind == kind && child.name == name);
        for object in list(store, &namespace, |it| ours(it) && !wanted(&it.name_any()) && !keep(it)) {
            if object.meta().deletion_timestamp.is_some() {
                continue;
            }
            let name = object.name_any();
            let preconditions = Preconditions { uid: object.uid(), resource_version: None };
            let params = DeleteParams {
                preconditions: Some(preconditions),
                propagation_policy: Some(PropagationPolicy::Background),
                ..DeleteParams::default()
            };
            tracing::info!(namespace, child = format!("{kind}/{name}"), "pruned");
            self.metrics.wrote("delete", &kind);
            let api: Api<K> = Api::namespaced(self.client.clone(), &namespace);
            match api.delete(&name, &params).await {
                Ok(_) => {}
                // Gone, or made anew by somebody: not ours to remove.
                Err(kube::Error::Api(status)) if is_gone(&status) => {}
                Err(source) => {
                    let child = format!("{kind}/{name}");
                    return Err(ApplyError::Child { verb: "delete", child, source: Box::new(source) });
                }
            }
        }
        Ok(())
    }

    /// Publishes `status` if it differs from what is published. Returns the
    /// conditions' change, or how long to wait where it is too early to write.
    pub async fn publish<K, S>(
        &self,
        object: &K,
        status: &S,
        published: Option<&(Value, Option<Instant>)>,
    ) -> Result<Published, ApplyError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        S: Serialize,
    {
        let kind = K::kind(&());
        let name = object.name_any();
        let title = format!("{kind}/{name}");
        let wanted = json_of(status, &title)?;
        let before = published.map_or(&Value::Null, |(status, _)| status);
        if *before == wanted {
            return Ok(Published::Unchanged);
        }
        let waited = published.and_then(|(_, at)| *at).map(|at| at.elapsed());
        if let Some(left) = waited.and_then(|waited| STATUS_PAUSE.checked_sub(waited))
            && !left.is_zero()
            && !is_urgent(before, &wanted)
        {
            return Ok(Published::TooEarly(left));
        }
        let namespace = object.namespace().unwrap_or_default();
        let body = json!({
            "apiVersion": K::api_version(&()), "kind": kind,
            // A status must never land on an object that was made anew under the name.
            "metadata": {"name": name, "uid": object.uid()},
            "status": wanted,
        });
        let api: Api<K> = Api::namespaced(self.client.clone(), &namespace);
        let params = PatchParams::apply(crate::FIELD_MANAGER).force();
        self.metrics.wrote("apply_status", &kind);
        match api.patch_status(&name, &params, &Patch::Apply(&body)).await {
            Ok(_) => Ok(Published::Written(wanted)),
            Err(kube::Error::Api(status)) if is_gone(&status) => Ok(Published::Unchanged),
            Err(source) => Err(ApplyError::Status { object: title, source: Box::new(source) }),
        }
    }
}

/// What became of a status.
#[derive(Clone, Debug, PartialEq)]
pub enum Published {
    /// It is what is published.
    Unchanged,
    /// It was written.
    Written(Value),
    /// It may be written after this time.
    TooEarly(Duration),
}

/// Not there, or another object by now.
fn is_gone(status: &Status) -> bool {
    matches!(status.code, 404 | 409)
}

/// Whether a status must not wait: the spec has changed, a condition flipped, or
/// a workload was patched, which a successor must know.
fn is_urgent(before: &Value, after: &Value) -> bool {
    let statuses = |status: &Value| -> Vec<(String, String)> {
        let conditions = status.get("conditions").and_then(Value::as_array);
        let pair = |condition: &Value| {
            let field =
                |name: &str| condition.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            (field("type"), field("status"))
        };
        conditions.into_iter().flatten().map(pair).collect()
    };
    let applied = |status: &Value| -> Vec<Value> {
        let workloads = status.get("workloads").and_then(Value::as_array);
        workloads.into_iter().flatten().filter_map(|it| it.get("applied").cloned()).collect()
    };
    before.get("observedGeneration") != after.get("observedGeneration")
        || statuses(before) != statuses(after)
        || applied(before) != applied(after)
}

/// Namespace and name of an object.
pub fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// All children, in the order in which they are applied: what pods need before
/// the Deployment that makes them.
fn children(desired: &Desired, stores: &Stores, namespace: &str) -> Result<Vec<Child>, ApplyError> {
    let mut children = vec![
        child(&desired.service_account, &stores.service_accounts, namespace)?,
        child(&desired.role_binding, &stores.role_bindings, namespace)?,
        child(&desired.start_settings, &stores.config_maps, namespace)?,
        child(&desired.live_settings, &stores.config_maps, namespace)?,
        child(&desired.service, &stores.services, namespace)?,
    ];
    if let Some(budget) = &desired.disruption_budget {
        children.push(child(budget, &stores.budgets, namespace)?);
    }
    children.push(child(&desired.deployment, &stores.deployments, namespace)?);
    Ok(children)
}

fn child<K>(wanted: &K, store: &Store<K>, namespace: &str) -> Result<Child, ApplyError>
where
    K: Resource<DynamicType = ()> + Clone + Serialize + 'static,
{
    let name = wanted.name_any();
    let resource = ApiResource::erase::<K>(&());
    let kind = kind_of(&resource.kind);
    let title = format!("{kind}/{name}");
    let live = get(store, namespace, &name).map(|live| json_of(&*live, &title)).transpose()?;
    let wanted = json_of(wanted, &title)?;
    let digest = digest(&wanted.to_string());
    Ok(Child { kind, resource, name, wanted, digest, live })
}

/// A kind's name, and its resource.
type Kind = (&'static str, fn() -> ApiResource);

/// Kinds of children.
const KINDS: &[Kind] = &[
    ("ServiceAccount", || ApiResource::erase::<ServiceAccount>(&())),
    ("RoleBinding", || ApiResource::erase::<RoleBinding>(&())),
    ("ConfigMap", || ApiResource::erase::<ConfigMap>(&())),
    ("Service", || ApiResource::erase::<Service>(&())),
    ("PodDisruptionBudget", || ApiResource::erase::<PodDisruptionBudget>(&())),
    ("Deployment", || ApiResource::erase::<Deployment>(&())),
];

fn kind_of(kind: &str) -> &'static str {
    KINDS.iter().find(|(known, _)| *known == kind).map_or("unknown", |(known, _)| known)
}

fn resource_of(kind: &str) -> Option<ApiResource> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, resource)| resource())
}

fn json_of<T: Serialize>(object: &T, title: &str) -> Result<Value, ApplyError> {
    serde_json::to_value(object).map_err(|source| ApplyError::Serialize { object: title.to_owned(), source })
}

fn text<'a>(object: &'a Value, path: &str) -> Option<&'a str> {
    object.pointer(path)?.as_str()
}

/// Uid of the owner with `controller: true`.
fn owner(object: &Value) -> Option<&str> {
    let owners = object.pointer("/metadata/ownerReferences")?.as_array()?;
    let owner = owners.iter().find(|owner| owner.get("controller") == Some(&Value::Bool(true)))?;
    owner.get("uid")?.as_str()
}

/// Whether all router pods are of the newest template, so that nothing can start
/// with older settings any more.
fn is_rolled_out(desired: &Desired, stores: &Stores, namespace: &str) -> bool {
    let Some(live) = get(&stores.deployments, namespace, &desired.deployment.name_any()) else {
        return false;
    };
    crate::rollout::of_deployment(&live) == crate::pool::observe::Rollout::Complete
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(generation: i64, ready: &str, reason: &str, applied: Option<&str>) -> Value {
        json!({"observedGeneration": generation, "workloads": [{"applied": applied}],
            "conditions": [{"type": "Ready", "status": ready, "reason": reason}]})
    }

    #[test]
    fn only_flips_and_new_specs_are_urgent() {
        let old = status(1, "True", "Serving", None);
        for (why, new, expected) in [
            ("nothing", status(1, "True", "Serving", None), false),
            ("another reason", status(1, "True", "Other", None), false),
            ("a flip", status(1, "False", "Serving", None), true),
            ("a new spec", status(2, "True", "Serving", None), true),
            ("a patched workload", status(1, "True", "Serving", Some("d")), true),
            ("the first", Value::Null, true),
        ] {
            assert_eq!(is_urgent(&old, &new), expected, "{why}");
        }
    }

    #[test]
    fn refusals_are_told_and_troubles_are_retried() {
        let error = |code| {
            let status = Status::failure("no", "Reason").with_code(code).boxed();
            ApplyError::Child {
                verb: "apply",
                child: "Service/a".into(),
                source: Box::new(kube::Error::Api(status)),
            }
        };
        for (code, transient) in
            [(403, false), (422, false), (409, true), (429, true), (500, true), (503, true)]
        {
            let error = error(code);
            assert_eq!(error.is_transient(), transient, "{code}");
            assert_eq!(error.refusal().is_none(), transient, "{code}");
        }
    }

    /// As an API server of Kubernetes 1.37 spells it.
    #[test]
    fn a_namespace_that_ends_is_told_from_a_want_of_rights() {
        let answer = |code: u16, reason: &str| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "services \"a\" is forbidden: unable to create new content in namespace b because it is being terminated",
                "reason": "Forbidden", "code": code, "details": {"name": "a", "kind": "services",
                "causes": [{"reason": reason, "message": "namespace b is being terminated", "field": "metadata.namespace"}]}});
            let status: Status = serde_json::from_value(status).expect("a status");
            let source = Box::new(kube::Error::Api(Box::new(status)));
            ApplyError::Child { verb: "apply", child: "Service/a".into(), source }.is_namespace_ending()
        };
        assert!(answer(403, "NamespaceTerminating"));
        assert!(!answer(403, "FieldValueForbidden"));
        assert!(!answer(409, "NamespaceTerminating"));
    }

    #[test]
    fn a_child_is_applied_for_a_reason() {
        let child = |live: Option<Value>| Child {
            kind: "Service",
            resource: ApiResource::erase::<Service>(&()),
            name: "a".into(),
            wanted: json!({"spec": {"port": 1}}),
            digest: "d".into(),
            live,
        };
        let live = |digest: &str, version: &str, port: u16| {
            let metadata = json!({"resourceVersion": version, "annotations": {APPLIED: digest}});
            Some(json!({"metadata": metadata, "spec": {"port": port}}))
        };
        let ledger = Ledger::default();
        let key = ("ns".to_owned(), "a".to_owned());
        let fresh = ledger.entry(&key, "1");
        let mut after = fresh.clone();
        let applied = Applied { before: Some("7".into()), digest: "d".into() };
        after.applied.insert("Service/a".into(), applied);
        for (why, entry, live, expected) in [
            ("absent", &fresh, None, true),
            ("as wanted", &fresh, live("d", "7", 1), false),
            ("something else is wanted", &fresh, live("old", "7", 1), true),
            ("edited by hand", &fresh, live("d", "7", 2), true),
            ("the store has not heard yet", &after, live("old", "7", 1), false),
            ("edited after we applied", &after, live("d", "8", 2), true),
        ] {
            assert_eq!(child(live).need(entry).is_some(), expected, "{why}");
        }
    }
}
