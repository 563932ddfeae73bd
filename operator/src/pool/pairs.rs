//! Can a pool's prefill and decode pods serve requests together? Pure.
//!
//! Neither half serves a request alone. Where one has no pod that is ready,
//! mixed pods serve all requests; where there are none either, nobody does.

use std::collections::BTreeSet;

use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::{Finding, Reason, names};
use kvrouter_crds::config::RoleName;

use super::members::Member;
use super::validate::{get_pods, selector_text};

/// Half of a pool's pairs is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which one, and what to do; false.
    pub finding: Finding,
    /// Whether mixed pods serve meanwhile.
    pub is_served: bool,
    /// The pods of the role, none of which is ready.
    pub blamed: BTreeSet<String>,
}

/// What is said of a pool without a worker of a role; none for a role that works
/// alone.
pub fn reason_without(role: RoleName) -> Option<Reason> {
    match role {
        RoleName::Mixed => None,
        RoleName::Prefill => Some(Reason::NoPrefillReady),
        RoleName::Decode => Some(Reason::NoDecodeReady),
    }
}

/// The half that is missing; none if both are ready, or if the pool has no such
/// roles. Of both it is prefill, which comes first.
pub fn missing(pool: &InferencePool, members: &[Member<'_>]) -> Option<Missing> {
    let spec = &pool.spec;
    let ready = |role| members.iter().any(|member| member.role == Some(role) && member.ready);
    let halves = spec.roles.iter().filter(|role| role.name != RoleName::Mixed && !ready(role.name));
    let half = halves.min_by_key(|role| role.name)?;
    let role = half.name.label();
    let is_served = ready(RoleName::Mixed);
    let of_role = members.iter().filter(|member| member.role == Some(half.name));
    let blamed: BTreeSet<String> = of_role.map(|member| member.name().to_owned()).collect();
    let who = match blamed.is_empty() {
        true => format!("No pod has the role {role}"),
        false => format!("No pod of the role {role} is ready: {}", names(blamed.iter().map(String::as_str))),
    };
    let effect = if is_served { "mixed pods serve all requests" } else { "nothing is served" };
    let labels = half.selector.match_labels.iter().map(|(key, value)| format!("{key}={value}"));
    let selector = std::iter::once(selector_text(spec)).chain(labels).collect::<Vec<_>>().join(",");
    let look = get_pods(pool, &selector);
    let message = format!("{who}; prefill and decode serve requests together, so {effect}; look at: {look}");
    Some(Missing { finding: Finding::fails(reason_without(half.name)?, message), is_served, blamed })
}
