//! What becomes of references to pools of the Gateway API, in rows.

use serde_json::json;

use super::*;
use crate::pool::validate::{no_pods, validate};
use crate::sample::{around_pool, flags, pool};

/// A pool that refers to `gw`, with the changes in its spec.
fn referring(change: Value) -> InferencePool {
    let reference = json!({"selector": null, "targetPorts": null, "gatewayPoolRef": {"name": "gw"}});
    pool(crate::sample::merged(reference, change))
}

fn found(spec: Value) -> Lookup {
    let object = json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "gw", "namespace": "models"}, "spec": spec,
        "status": {"parents": [{"parentRef": {"name": "inference-gateway"}}]},
    });
    Lookup::Found(Arc::new(serde_json::from_value(object).expect("a gateway pool")))
}

fn spec(labels: Value, ports: Value) -> Value {
    json!({"selector": {"matchLabels": labels}, "targetPorts": ports,
           "endpointPickerRef": {"name": "picker", "port": {"number": 9002}}, "appProtocol": "http"})
}

#[test]
fn a_pool_has_selector_and_ports_of_the_one_that_it_refers_to() {
    let mut pool = referring(json!({}));
    let given = spec(json!({"app": "vllm", "tier": "a"}), json!([{"number": 8000}, {"number": 8001}]));
    let asked = |namespace: &str, name: &str| {
        assert_eq!((namespace, name), ("models", "gw"));
        found(given)
    };
    assert_eq!(resolve(&mut pool, asked), None);
    let labels = [("app", "vllm"), ("tier", "a")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(pool.spec.selector.match_labels, BTreeMap::from(labels));
    let ports: Vec<u16> = pool.spec.target_ports.iter().map(|port| port.number).collect();
    assert_eq!(ports, [8000, 8001]);
    let words = "The gateway pool gw gives it the labels app=vllm,tier=a and the ports 8000,8001.";
    assert_eq!(taken_over(&pool.spec).as_deref(), Some(words));
}

#[test]
fn a_pool_of_its_own_is_left_alone() {
    let mut own = pool(json!({}));
    assert_eq!(resolve(&mut own, |_, _| panic!("nobody asks")), None);
    assert_eq!(own, pool(json!({})));
    assert_eq!(taken_over(&own.spec), None);
    assert_eq!(written(&own.spec, "spec.selector"), "spec.selector");
}

/// What is said of a reference, by reason and a part of the message; the pool is
/// then not acted upon, and nothing else is wrong with it.
#[track_caller]
fn check(why: &str, lookup: Lookup, reason: Reason, part: &str) {
    let mut pool = referring(json!({}));
    let complaint = resolve(&mut pool, |_, _| lookup).expect(why);
    assert_eq!((complaint.reason, complaint.field.as_str()), (reason, "spec.gatewayPoolRef"), "{why}");
    assert!(complaint.message.contains(part), "{why}: {}", complaint.message);
    assert!(pool.spec.selector.is_empty() && pool.spec.target_ports.is_empty(), "{why}: half of it");
    let mut observed = around_pool(Vec::new());
    observed.unresolved = Some(complaint.clone());
    let verdict = validate(&pool, &observed, &flags()).expect_err(why);
    assert_eq!(verdict.0, [complaint], "{why}");
    assert_eq!(no_pods(&pool).reason, Reason::Pending, "{why}");
}

#[test]
fn what_is_missing_is_named() {
    let unusable = |labels: Value, ports: Value| found(spec(labels, ports));
    let (labels, ports) = (|| json!({"app": "vllm"}), || json!([{"number": 8000}]));
    check(
        "no such kind",
        Lookup::NotInstalled,
        Reason::KindNotInstalled,
        "install the Gateway API Inference",
    );
    check("no such pool", Lookup::NotFound, Reason::GatewayPoolNotFound, "no gateway pool gw");
    check("not in the files", Lookup::NotInFiles, Reason::GatewayPoolNotFound, "in the files; give its file");
    check("no right", Lookup::Unreadable, Reason::GatewayPoolUnreadable, "upgrade the chart");
    let check = |why: &str, lookup, part: &str| check(why, lookup, Reason::GatewayPoolUnusable, part);
    check("nothing at all", found(json!({})), "its spec.selector.matchLabels is empty;");
    check("no labels", unusable(json!({}), ports()), "its spec.selector.matchLabels is empty;");
    check("no ports", unusable(labels(), json!([])), "its spec.targetPorts has 0 entries");
    let nine: Vec<Value> = (1..=9).map(|number| json!({"number": number})).collect();
    check("many ports", unusable(labels(), json!(nine)), "has 9 entries, and 1 to 8 are possible");
    check("no number", unusable(labels(), json!([{}])), "its spec.targetPorts[0].number is missing");
    let second = json!([{"number": 1}, {"number": 65536}]);
    check("no port", unusable(labels(), second), "its spec.targetPorts[1].number is 65536");
    check("port 0", unusable(labels(), json!([{"number": 0}])), "number is 0");
    check("below", unusable(labels(), json!([{"number": -1}])), "number is -1");
    check("twice", unusable(labels(), json!([{"number": 1}, {"number": 1}])), "the port 1 is twice");
    let narrowed =
        json!({"selector": {"matchLabels": labels(), "matchExpressions": []}, "targetPorts": ports()});
    check(
        "a wider selector than meant",
        found(narrowed),
        "has matchExpressions, and only matchLabels is known",
    );
}

#[test]
fn a_reference_stands_instead_of_selector_and_ports() {
    for own in [json!({"selector": {"matchLabels": {"app": "a"}}}), json!({"targetPorts": [{"number": 1}]})] {
        let mut pool = referring(own.clone());
        let before = pool.clone();
        let complaint = resolve(&mut pool, |_, _| panic!("nobody asks")).expect("a contradiction");
        assert_eq!(complaint.reason, Reason::InvalidSpec, "{own}");
        assert!(complaint.message.ends_with("remove it, or both of them."), "{own}: {}", complaint.message);
        assert_eq!(pool, before, "{own}");
    }
}

/// What is then wrong with the whole is said by the names that people know.
#[test]
fn messages_name_the_gateway_pool() {
    let check = |change: Value, expected: &str| {
        let mut pool = referring(change);
        let given = spec(json!({"app": "vllm"}), json!([{"number": 5557}]));
        assert_eq!(resolve(&mut pool, |_, _| found(given)), None);
        let verdict = validate(&pool, &around_pool(Vec::new()), &flags()).expect_err(expected);
        assert!(verdict.0[0].message.contains(expected), "{:?}", verdict.0);
    };
    check(json!({}), "5557 is a target port and a port of spec.kvEvents");
    let roles = json!({"kvEvents": {"port": 1}, "roles": [{"name": "Mixed", "selector": {"matchLabels": {"app": "b"}}}]});
    check(
        roles,
        "The role mixed and spec.selector of the gateway pool gw want different values of the label app",
    );
}

#[test]
fn only_a_kind_that_is_not_there_is_not_installed() {
    let answer = |code: u16| {
        let status = kube::core::Status::failure("", "").with_code(code);
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    };
    let both = |error: &watcher::Error| (is_not_installed(error), is_forbidden(error));
    assert_eq!(both(&answer(404)), (true, false));
    assert_eq!(both(&answer(403)), (false, true));
    assert_eq!(both(&answer(503)), (false, false));
    assert_eq!(both(&watcher::Error::NoResourceVersion), (false, false));
}
