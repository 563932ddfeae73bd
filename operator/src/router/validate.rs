//! Is the spec of a router in order, and is its pool? Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, TopologySpreadConstraint};
use kvrouter_crds::conditions::{ConditionType, Reason};
use kvrouter_crds::config::{DemandMode, NO_TENANT_HEADERS, Policy};
use kvrouter_crds::pool::InferencePoolSpec;
use kvrouter_crds::router::{KvRouterSpec, Scheduling};
use kvrouter_crds::{InferencePool, KvRouter};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::observe::Observed;
use crate::config::ChildFlags;
use crate::pool::rules::{self, contradiction, invalid};
use crate::pool::validate::{Broker, broker};
use crate::verdict::Complaint;

/// A router whose spec makes sense, with the pool that it serves.
#[derive(Clone, Debug)]
pub struct ValidRouter {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid; empty offline.
    pub uid: String,
    /// Its spec.
    pub spec: KvRouterSpec,
    /// Affinities of its pods.
    pub affinity: Option<Affinity>,
    /// Spread of its pods; none for the operator's own.
    pub spread: Option<Vec<TopologySpreadConstraint>>,
    /// The pool's spec.
    pub pool: InferencePoolSpec,
    /// The pool's broker; none without NATS.
    pub broker: Option<Broker>,
    /// Selectors of other pools that could match the same pods, sorted.
    pub foreign_selectors: Vec<BTreeMap<String, String>>,
}

/// Why a router cannot be made: at least one complaint, worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<Complaint>);

/// Judges a router.
pub fn validate(router: &KvRouter, observed: &Observed, flags: &ChildFlags) -> Result<ValidRouter, Invalid> {
    let name = router.metadata.name.clone().unwrap_or_default();
    let namespace = router.metadata.namespace.clone().unwrap_or_default();
    let mut complaints: Vec<Complaint> = rules::wrong_name("KvRouter", &name).into_iter().collect();
    contradictions(&router.spec, &mut complaints);
    let (affinity, spread) = scheduling(router.spec.scheduling.as_ref(), &mut complaints);
    complaints.extend(taken(observed));
    let pool = usable_pool(router, &namespace, observed, flags).map_err(|found| complaints.extend(found));
    let (Ok((pool, broker)), true) = (pool, complaints.is_empty()) else { return Err(Invalid(complaints)) };
    let foreign_selectors = foreign_selectors(&pool.spec, &observed.other_pools);
    Ok(ValidRouter {
        namespace,
        name,
        uid: router.metadata.uid.clone().unwrap_or_default(),
        spec: router.spec.clone(),
        affinity,
        spread,
        pool: pool.spec.clone(),
        broker,
        foreign_selectors,
    })
}

/// What the schema's own rules say, for `render` and for definitions without them.
fn contradictions(spec: &KvRouterSpec, complaints: &mut Vec<Complaint>) {
    if spec.load_weights.is_some() && spec.policy != Policy::CachePlusLoad {
        let message = "spec.loadWeights needs policy: CachePlusLoad; remove them or change the policy.";
        complaints.push(invalid("spec.loadWeights", message));
    }
    let demand = spec.decode_input_demand.mode;
    if demand != DemandMode::Disabled && !matches!(spec.policy, Policy::CachePlusLoad | Policy::KvAware) {
        let message = "spec.decodeInputDemand needs policy: CachePlusLoad or KvAware; set its mode: Disabled or change the policy.";
        complaints.push(invalid("spec.decodeInputDemand", message));
    }
    if 0.0 < spec.overload.cold_reserve && spec.overload.max_queued_tokens.is_none() {
        let message = "spec.overload.coldReserve is a share of overload.maxQueuedTokens, which is not set; set both or neither.";
        complaints.push(invalid("spec.overload", message));
    }
    let tiers = spec.tier_credits;
    if tiers.host < tiers.disk || tiers.device < tiers.host {
        let message = "spec.tierCredits: a slower tier cannot be worth more than a faster one; order them disk, host, device.";
        complaints.push(invalid("spec.tierCredits", message));
    }
    if let Some(tenancy) = &spec.tenancy {
        let (header, field) = (&tenancy.header, "spec.tenancy.header");
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if header.is_empty() || !header.bytes().all(is_plain) {
            let message = "spec.tenancy.header must be letters, digits, - and _; write one such as X-Tenant.";
            complaints.push(invalid(field, message));
        }
        if NO_TENANT_HEADERS.contains(&header.to_ascii_lowercase().as_str()) {
            let message = format!(
                "spec.tenancy.header: {header} is about one connection or written by the router, so it cannot name a tenant; choose another header."
            );
            complaints.push(invalid(field, message));
        }
    }
    for (at, shadow) in spec.shadow_policies.iter().enumerate() {
        if *shadow == spec.policy {
            let message =
                "spec.shadowPolicies names the real policy; shadows are evaluated beside it: remove it.";
            complaints.push(invalid("spec.shadowPolicies", message));
        }
        if spec.shadow_policies[..at].contains(shadow) {
            let message = "spec.shadowPolicies names a policy twice; keep one.";
            complaints.push(invalid("spec.shadowPolicies", message));
        }
    }
}

fn scheduling(
    scheduling: Option<&Scheduling>,
    complaints: &mut Vec<Complaint>,
) -> (Option<Affinity>, Option<Vec<TopologySpreadConstraint>>) {
    let Some(scheduling) = scheduling else { return (None, None) };
    let affinity = scheduling.affinity.as_ref();
    let affinity = affinity.and_then(|value| typed("spec.scheduling.affinity", value, complaints));
    let spread = scheduling.topology_spread_constraints.as_ref().map(|constraints| {
        let field = "spec.scheduling.topologySpreadConstraints";
        constraints.iter().filter_map(|value| typed(field, value, complaints)).collect()
    });
    (affinity, spread)
}

/// A part of a pod that the schema leaves open.
fn typed<T: DeserializeOwned>(field: &str, value: &Value, complaints: &mut Vec<Complaint>) -> Option<T> {
    match serde_json::from_value(value.clone()) {
        Ok(typed) => Some(typed),
        Err(error) => {
            let message = format!("{field} is not as in a pod ({error}); correct it.");
            complaints.push(invalid(field, message));
            None
        }
    }
}

fn taken(observed: &Observed) -> Option<Complaint> {
    let first = observed.taken.first()?;
    let all = observed.taken.join(", ");
    let message = format!(
        "Names that this KvRouter needs belong to other objects: {all}; delete {first} or choose another name for the \
         KvRouter."
    );
    Some(Complaint::accepted(Reason::NameTaken, "metadata.name", message))
}

fn usable_pool<'a>(
    router: &KvRouter,
    namespace: &str,
    observed: &'a Observed,
    flags: &ChildFlags,
) -> Result<(&'a InferencePool, Option<Broker>), Vec<Complaint>> {
    let name = &router.spec.pool_ref.name;
    let Some(pool) = observed.pool.as_deref() else {
        let message = format!(
            "There is no InferencePool {name} in the namespace {namespace}; create it or correct spec.poolRef.name (a \
             pool of another namespace cannot be used)."
        );
        return Err(vec![Complaint::resolved(Reason::PoolNotFound, "spec.poolRef", message)]);
    };
    let mut wrong = rules::complaints(name, &pool.spec);
    wrong.extend(observed.unresolved.clone());
    let broker = broker(&pool.spec, flags).map_err(|complaint| wrong.push(complaint)).unwrap_or_default();
    if wrong.is_empty() {
        return Ok((pool, broker));
    }
    let about = |complaint: Complaint| {
        let (reason, what) = match complaint.type_ {
            ConditionType::ResolvedRefs => (complaint.reason, "has no selector and no ports"),
            _ => (Reason::PoolNotAccepted, "is not accepted"),
        };
        let message = format!("The pool {name} {what}: {}", complaint.message);
        Complaint::resolved(reason, "spec.poolRef", message)
    };
    Err(wrong.into_iter().map(about).collect())
}

/// Selectors that could match pods of this pool. Those that want another value
/// of a label cannot, and would only make all routers read new settings
/// whenever any pool comes or goes.
fn foreign_selectors(
    pool: &InferencePoolSpec,
    others: &[std::sync::Arc<InferencePool>],
) -> Vec<BTreeMap<String, String>> {
    let own = &pool.selector.match_labels;
    let living = others.iter().filter(|other| other.metadata.deletion_timestamp.is_none());
    let selectors = living.map(|other| &other.spec.selector.match_labels);
    let mut foreign: Vec<BTreeMap<String, String>> = selectors
        .filter(|selector| !selector.is_empty() && contradiction(own, selector).is_none())
        .cloned()
        .collect();
    foreign.sort();
    foreign.dedup();
    foreign
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
