//! Pools of the Gateway API Inference Extension, which ours may refer to.
//!
//! A pool with `spec.gatewayPoolRef` has its selector and target ports from an
//! InferencePool of `inference.networking.k8s.io/v1` (of no other version) in the
//! same namespace. [`resolve`] puts them into the pool's spec, so that nothing
//! else needs to know where they came from. Of the other pool nothing is ever
//! written, neither its spec nor its `status.parents`, and nothing else of it is
//! read: gateways and endpoint pickers keep it for themselves.
//!
//! The kind may be absent, or come and go: [`Presence`] says what the watch knows,
//! and [`Remembered`] what other pools go by meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::CustomResource;
use kube::runtime::watcher;
use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::Reason;
use kvrouter_crds::config::MAX_TARGET_PORTS;
use kvrouter_crds::pool::{InferencePoolSpec, LabelSelector, TargetPort};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pool::rules::invalid;
use crate::verdict::Complaint;

/// Group of the Gateway API Inference Extension.
pub const GROUP: &str = "inference.networking.k8s.io";
/// Its only version that is read.
pub const VERSION: &str = "v1";
/// What `kubectl` and roles call the kind.
const RESOURCE: &str = "inferencepools.inference.networking.k8s.io";
/// The field that refers to one.
const FIELD: &str = "spec.gatewayPoolRef";

/// What is read of a pool of the Gateway API. Everything may be missing: an object
/// that cannot be read would keep all others from being watched.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "inference.networking.k8s.io",
    version = "v1",
    kind = "InferencePool",
    plural = "inferencepools",
    root = "GatewayPool",
    schema = "disabled",
    derive = "PartialEq",
    namespaced
)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayPoolSpec {
    /// Which pods are its.
    pub selector: GatewaySelector,
    /// Ports of its pods.
    pub target_ports: Vec<GatewayPort>,
}

/// Its selector.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewaySelector {
    /// Labels, all of which a pod must carry.
    pub match_labels: BTreeMap<String, String>,
    /// What else narrows it, which version 1 does not have: without it the pool
    /// would have more pods than it is meant to.
    #[serde(flatten)]
    pub others: BTreeMap<String, Value>,
}

/// One of its ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPort {
    /// The number.
    pub number: Option<i64>,
}

/// What is known of the kind in a scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// Nothing was heard yet.
    #[default]
    Unknown,
    /// All pools were listed, and are followed.
    Listed,
    /// The API server has no such kind.
    NotInstalled,
    /// It could never be listed; the log says why.
    Unreadable,
}

/// What there is for a reference.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The pool.
    Found(Arc<GatewayPool>),
    /// There is no pool of that name in the namespace.
    NotFound,
    /// It is not in the files that `render` was given.
    NotInFiles,
    /// The API server has no such kind.
    NotInstalled,
    /// Pools cannot be read.
    Unreadable,
}

/// Whether the API server answered that it has no such kind.
pub fn is_not_installed(error: &watcher::Error) -> bool {
    status_code(error) == Some(404)
}

/// Whether the API server answered that we may not read the kind.
pub fn is_forbidden(error: &watcher::Error) -> bool {
    status_code(error) == Some(403)
}

fn status_code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

/// A pool, with what it has from a pool of the Gateway API.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The pool.
    pub pool: Arc<InferencePool>,
    /// Why it has no selector and no ports; none where it has them.
    pub unresolved: Option<Complaint>,
}

impl Resolved {
    /// The same by [`resolve`]; a pool that refers to nothing is not copied.
    pub fn of(pool: Arc<InferencePool>, look_up: impl FnOnce(&str, &str) -> Lookup) -> Self {
        if pool.spec.gateway_pool_ref.is_none() {
            return Self { pool, unresolved: None };
        }
        let mut pool = InferencePool::clone(&pool);
        let unresolved = resolve(&mut pool, look_up);
        Self { pool: Arc::new(pool), unresolved }
    }
}

/// What references gave last, by the uid of the pool that has the reference: pods
/// of a pool do not leave it because its reference gives nothing for a while, and
/// other pools must not act as if they had. Never more than there are pools; a new
/// process begins with nothing.
#[derive(Debug, Default)]
pub struct Remembered(Mutex<HashMap<String, Given>>);

#[derive(Clone, Debug)]
struct Given {
    /// Name of the gateway pool: of another one it says nothing.
    by: String,
    selector: LabelSelector,
    target_ports: Vec<TargetPort>,
}

impl Remembered {
    /// Takes in what references give now. `pools` are all that there are: others are
    /// forgotten, and so is what another reference gave.
    pub fn refresh(
        &self,
        pools: impl IntoIterator<Item = Arc<InferencePool>>,
        resolved: impl Fn(Arc<InferencePool>) -> Resolved,
    ) {
        let mut all = self.0.lock();
        let mut before = std::mem::take(&mut *all);
        for pool in pools {
            let Some(by) = pool.spec.gateway_pool_ref.as_ref().map(|reference| reference.name.clone()) else {
                continue;
            };
            let uid = pool.metadata.uid.clone().unwrap_or_default();
            let Resolved { pool, unresolved } = resolved(pool);
            let given = match unresolved {
                None => {
                    let InferencePoolSpec { selector, target_ports, .. } = pool.spec.clone();
                    Some(Given { by, selector, target_ports })
                }
                Some(_) => before.remove(&uid).filter(|given| given.by == by),
            };
            all.extend(given.map(|given| (uid, given)));
        }
    }

    /// The pool as others see it: with what its reference gave last, if it gives nothing now.
    pub fn seen_by_others(&self, resolved: Resolved) -> Arc<InferencePool> {
        let Resolved { mut pool, unresolved } = resolved;
        let InferencePoolSpec { gateway_pool_ref, selector, target_ports, .. } = &pool.spec;
        let has_none = unresolved.is_some() && selector.is_empty() && target_ports.is_empty();
        let (Some(reference), true) = (gateway_pool_ref, has_none) else { return pool };
        let given = self.0.lock().get(pool.metadata.uid.as_deref().unwrap_or_default()).cloned();
        if let Some(given) = given.filter(|given| given.by == reference.name) {
            let spec = &mut Arc::make_mut(&mut pool).spec;
            (spec.selector, spec.target_ports) = (given.selector, given.target_ports);
        }
        pool
    }
}

/// Gives `pool` the selector and the target ports of the pool that it refers to.
/// Says why it has none then; none where it has them, or refers to nothing.
///
/// A pool without them matches no pod, and must not be acted upon.
pub fn resolve(pool: &mut InferencePool, look_up: impl FnOnce(&str, &str) -> Lookup) -> Option<Complaint> {
    let reference = pool.spec.gateway_pool_ref.clone()?;
    if !pool.spec.selector.is_empty() || !pool.spec.target_ports.is_empty() {
        let message = "spec.gatewayPoolRef stands instead of spec.selector and spec.targetPorts; remove it, or both of them.";
        return Some(invalid(FIELD, message));
    }
    let (name, namespace) = (reference.name, pool.metadata.namespace.clone().unwrap_or_default());
    let complain = |reason, message| Some(Complaint::resolved(reason, FIELD, message));
    match look_up(&namespace, &name) {
        Lookup::Found(found) => match usable(&found.spec) {
            Ok((selector, target_ports)) => {
                pool.spec.selector = selector;
                pool.spec.target_ports = target_ports;
                None
            }
            Err(why) => {
                let message = format!(
                    "The gateway pool {name} ({RESOURCE}) cannot be used, and routers that run go on as they are: {why}; \
                     correct it, or name spec.selector and spec.targetPorts instead of spec.gatewayPoolRef."
                );
                complain(Reason::GatewayPoolUnusable, message)
            }
        },
        Lookup::NotFound => {
            let message = format!(
                "There is no gateway pool {name} ({RESOURCE}) in the namespace {namespace}, and routers that run go on as \
                 they are; create it or correct spec.gatewayPoolRef.name."
            );
            complain(Reason::GatewayPoolNotFound, message)
        }
        Lookup::NotInFiles => {
            let message = format!(
                "There is no InferencePool {name} of {GROUP}/{VERSION} in namespace {namespace} in the files; give its file \
                 too, or correct spec.gatewayPoolRef.name."
            );
            complain(Reason::GatewayPoolNotFound, message)
        }
        Lookup::NotInstalled => {
            let message = format!(
                "This cluster has no InferencePool of {GROUP}/{VERSION}, and routers that run go on as they are; install \
                 the Gateway API Inference Extension, or name spec.selector and spec.targetPorts instead of \
                 spec.gatewayPoolRef."
            );
            complain(Reason::KindNotInstalled, message)
        }
        Lookup::Unreadable => {
            let message = format!(
                "The operator cannot read {RESOURCE}, and routers that run go on as they are; its log says why: if it may \
                 not, upgrade the chart, which grants it."
            );
            complain(Reason::GatewayPoolUnreadable, message)
        }
    }
}

/// Selector and ports, where they are such as ours may be.
fn usable(spec: &GatewayPoolSpec) -> Result<(LabelSelector, Vec<TargetPort>), String> {
    let GatewaySelector { match_labels, others } = &spec.selector;
    if let Some(other) = others.keys().next() {
        return Err(format!("its spec.selector has {other}, and only matchLabels is known"));
    }
    if match_labels.is_empty() {
        return Err("its spec.selector.matchLabels is empty".to_owned());
    }
    let count = spec.target_ports.len();
    if !(1..=MAX_TARGET_PORTS).contains(&count) {
        return Err(format!(
            "its spec.targetPorts has {count} entries, and 1 to {MAX_TARGET_PORTS} are possible"
        ));
    }
    let mut seen = BTreeSet::new();
    let mut ports = Vec::new();
    for (at, port) in spec.target_ports.iter().enumerate() {
        let number = port.number.ok_or_else(|| format!("its spec.targetPorts[{at}].number is missing"))?;
        let valid = u16::try_from(number).ok().filter(|number| *number != 0);
        let number = valid.ok_or_else(|| {
            format!("its spec.targetPorts[{at}].number is {number}, and 1 to 65535 are possible")
        })?;
        if !seen.insert(number) {
            return Err(format!("the port {number} is twice in its spec.targetPorts"));
        }
        ports.push(TargetPort { number });
    }
    Ok((LabelSelector { match_labels: match_labels.clone() }, ports))
}

/// How a message calls `field`, which is `spec.selector` or `spec.targetPorts`:
/// by whose it is, where that is not the pool itself.
pub fn written(spec: &InferencePoolSpec, field: &str) -> String {
    match &spec.gateway_pool_ref {
        Some(reference) => format!("{field} of the gateway pool {}", reference.name),
        None => field.to_owned(),
    }
}

/// What a resolved pool has from the one that it refers to, in words; none if it
/// refers to nothing.
pub fn taken_over(spec: &InferencePoolSpec) -> Option<String> {
    let reference = spec.gateway_pool_ref.as_ref()?;
    let ports: Vec<String> = spec.target_ports.iter().map(|port| port.number.to_string()).collect();
    let selector = crate::pool::validate::selector_text(spec);
    Some(format!(
        "The gateway pool {} gives it the labels {selector} and the ports {}.",
        reference.name,
        ports.join(",")
    ))
}

#[cfg(test)]
#[path = "gateway_tests.rs"]
mod tests;
