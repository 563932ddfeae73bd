//! What is wrong with routers, in rows.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::sample::{around_router, flags, named_pool, pool, router};

#[track_caller]
fn check(why: &str, spec: Value, pool: Option<InferencePool>, expected: Option<(Reason, &str)>) {
    let found =
        validate(&router(spec), &around_router(pool), &flags()).err().map(|invalid| invalid.0[0].clone());
    let reason = found.as_ref().map(|complaint| complaint.reason);
    assert_eq!(reason, expected.map(|(reason, _)| reason), "{why}: {found:?}");
    if let (Some(found), Some((_, part))) = (found, expected) {
        assert!(found.message.contains(part), "{why}: {}", found.message);
    }
}

/// A pool without its gateway pool is as good as none, whatever else is in order.
#[test]
fn a_pool_must_have_its_gateway_pool() {
    let reference = json!({"selector": null, "targetPorts": null, "gatewayPoolRef": {"name": "gw"}});
    let mut pool = pool(reference);
    let unresolved = crate::gateway::resolve(&mut pool, |_, _| crate::gateway::Lookup::NotFound);
    let mut observed = around_router(Some(pool));
    observed.unresolved = unresolved;
    let Invalid(found) = validate(&router(json!({})), &observed, &flags()).expect_err("it is not there");
    let said: Vec<_> = found.iter().map(|it| (it.type_, it.reason, it.field.as_str())).collect();
    assert_eq!(said, [(ConditionType::ResolvedRefs, Reason::GatewayPoolNotFound, "spec.poolRef")]);
    assert!(
        found[0].message.starts_with("The pool qwen has no selector and no ports: There is no"),
        "{found:?}"
    );
}

#[test]
fn a_router_needs_a_pool_that_it_can_serve() {
    let good = || Some(pool(json!({})));
    let role = |name: &str, protocol: Value| json!({"name": name, "selector": {"matchLabels": {"r": name}}, "protocol": protocol});
    check("both in order", json!({}), good(), None);
    check(
        "no pool",
        json!({}),
        None,
        Some((Reason::PoolNotFound, "no InferencePool qwen in the namespace models")),
    );
    check(
        "a wrong pool",
        json!({}),
        Some(pool(json!({"blockSize": 0}))),
        Some((Reason::PoolNotAccepted, "blockSize")),
    );
    let halves = json!({"roles": [role("Prefill", json!("NIXL")), role("Decode", json!("NIXL"))]});
    check("a divided pool", json!({}), Some(pool(halves)), None);
    let half = json!({"roles": [role("Prefill", json!("NIXL"))]});
    let alone = Some((Reason::PoolNotAccepted, "prefill needs decode"));
    check("half of one", json!({}), Some(pool(half)), alone);
    check("mixed is the usual", json!({}), Some(pool(json!({"roles": [role("Mixed", json!(null))]}))), None);
    let demand = |policy: &str, mode: &str| json!({"policy": policy, "decodeInputDemand": {"mode": mode}});
    check("demand of a cost", demand("KvAware", "Enabled"), good(), None);
    check("demand that is off", demand("LeastLoad", "Disabled"), good(), None);
    let needs = Some((Reason::InvalidSpec, "spec.decodeInputDemand needs policy: CachePlusLoad or KvAware"));
    check("demand without a cost", demand("LeastLoad", "Shadow"), good(), needs);
    let tenants =
        |header: &str| json!({"tenancy": {"header": header, "saltSecretRef": {"name": "a", "key": "b"}}});
    check("tenants", tenants("X-Team_2"), good(), None);
    for (header, part) in [("Host", "about one connection"), ("a b", "letters, digits")] {
        check(header, tenants(header), good(), Some((Reason::InvalidSpec, part)));
    }
    let weights = json!({"policy": "KvAware", "loadWeights": {"queue": 1}});
    check("weights for nothing", weights, good(), Some((Reason::InvalidSpec, "needs policy: CachePlusLoad")));
    let shadow = json!({"shadowPolicies": ["CachePlusLoad"]});
    check("a shadow of itself", shadow, good(), Some((Reason::InvalidSpec, "the real policy")));
    let twice = json!({"shadowPolicies": ["LMetric", "LMetric"]});
    check("a shadow twice", twice, good(), Some((Reason::InvalidSpec, "twice")));
    let reserve = json!({"overload": {"coldReserve": 0.1}});
    check("a share of nothing", reserve, good(), Some((Reason::InvalidSpec, "set both or neither")));
    let tiers = json!({"tierCredits": {"host": 0.5, "disk": 0.6}});
    check("a disk above the host", tiers, good(), Some((Reason::InvalidSpec, "spec.tierCredits")));
    let affinity = json!({"scheduling": {"affinity": {"nodeAffinity": "here"}}});
    check("no affinity", affinity, good(), Some((Reason::InvalidSpec, "spec.scheduling.affinity")));
    let spread = json!({"scheduling": {"topologySpreadConstraints": [{"maxSkew": "one"}]}});
    check("no spread", spread, good(), Some((Reason::InvalidSpec, "topologySpreadConstraints")));
}

#[test]
fn all_complaints_are_told() {
    let spec = json!({"policy": "KvAware", "loadWeights": {"queue": 1}, "shadowPolicies": ["KvAware"]});
    let mut observed = around_router(None);
    observed.taken = vec!["Service/chat-router".to_owned()];
    let invalid = validate(&router(spec), &observed, &flags()).expect_err("four complaints");
    let reasons: Vec<Reason> = invalid.0.iter().map(|complaint| complaint.reason).collect();
    assert_eq!(reasons, [Reason::InvalidSpec, Reason::InvalidSpec, Reason::NameTaken, Reason::PoolNotFound]);
}

#[test]
fn only_selectors_that_could_match_are_foreign() {
    let mut observed = around_router(Some(pool(json!({}))));
    let other =
        |name: &str, labels: Value| Arc::new(named_pool(name, json!({"selector": {"matchLabels": labels}})));
    observed.other_pools = vec![
        other("same-app", json!({"tier": "x"})),
        other("another-app", json!({"app": "llama"})),
        other("no-app", json!({"app": null, "gpu": "h100"})),
        other("no-app-again", json!({"app": null, "gpu": "h100"})),
    ];
    let valid = validate(&router(json!({})), &observed, &flags()).expect("in order");
    let foreign: Vec<String> =
        valid.foreign_selectors.iter().map(|selector| format!("{selector:?}")).collect();
    assert_eq!(foreign, [r#"{"app": "qwen", "tier": "x"}"#, r#"{"gpu": "h100"}"#]);
    observed.other_pools.reverse();
    let reversed = validate(&router(json!({})), &observed, &flags()).expect("in order");
    assert_eq!(reversed.foreign_selectors, valid.foreign_selectors, "their order does not matter");
}
