//! Who may write, what is waited for, and what happens when the API server goes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, NAMESPACED};
use crate::world::{Operator, SOON, World, pool, router};

/// A control plane of its own: these tests stop it, or begin without definitions.
fn own(name: &str) -> &'static ControlPlane {
    Box::leak(Box::new(ControlPlane::start(name)))
}

async fn is_leader(operator: &Operator) -> bool {
    operator.metric("kvrouter_operator_leader").await == Some(1.0)
}

async fn await_leader<'a>(operators: &'a [&'a Operator]) -> &'a Operator {
    let began = Instant::now();
    loop {
        for operator in operators {
            if is_leader(operator).await {
                return operator;
            }
        }
        assert!(began.elapsed() < SOON, "nobody leads");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_writes_and_the_other_takes_over() {
    let world = World::new("failover").await;
    let flags = ["--leader-elect=true", "--lease-namespace=kvrouter-system"];
    let (one, two) = (world.operator(&flags), world.operator(&flags));
    one.await_ready().await;
    two.await_ready().await;
    let leads_first = std::ptr::eq(await_leader(&[&one, &two]).await, &one);
    let (mut leader, standby) = if leads_first { (one, two) } else { (two, one) };
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    world.appears("Deployment", "chat-router").await;
    world.settles().await;
    assert!(!is_leader(&standby).await);
    let standby_writes = standby.page("/metrics").await.map(|(_, text)| text.contains("api_writes_total{"));
    assert_eq!(standby_writes, Some(false), "the standby wrote");

    // Stopped in order, it hands over at once.
    let began = Instant::now();
    leader.signal("-TERM");
    await_leader(&[&standby]).await;
    let took = began.elapsed();
    println!("hand-over after {took:?}");
    assert!(took < Duration::from_secs(6), "{took:?}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(leader.has_ended().is_some_and(|status| status.success()), "{}", leader.logs());
    world.stays_quiet("a new leader").await;

    // Killed, it is followed when its lease has run out.
    let third = world.operator(&flags);
    third.await_ready().await;
    let began = Instant::now();
    standby.signal("-KILL");
    await_leader(&[&third]).await;
    let took = began.elapsed();
    println!("failover after {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    world.edit("KvRouter", "chat", json!({"spec": {"image": "kv-router:next"}})).await;
    let image = |it: &Value| it["spec"]["template"]["spec"]["containers"][0]["image"] == "kv-router:next";
    world.becomes("the image", "Deployment", "chat-router", image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_does_not_write_when_it_wakes() {
    let plane = own("frozen");
    plane.install();
    let world = World::on(plane, "frozen").await;
    let flags = ["--leader-elect=true", "--lease-namespace=kvrouter-system"];
    let mut leader = world.operator(&flags);
    await_leader(&[&leader]).await;
    let standby = world.operator(&flags);
    standby.await_ready().await;
    leader.signal("-STOP");
    await_leader(&[&standby]).await;
    leader.signal("-CONT");
    let began = Instant::now();
    while leader.has_ended().is_none() {
        assert!(began.elapsed() < SOON, "two leaders: {}", leader.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(leader.logs().contains("lease lost"), "{}", leader.logs());
    assert!(is_leader(&standby).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn definitions_are_waited_for() {
    let plane = own("definitions");
    let mut operator = Operator::start(plane, &["--leader-elect=false", "--poll-seconds=1"]);
    let began = Instant::now();
    let (status, body) = loop {
        match operator.page("/readyz").await {
            Some((status, body)) if body.contains("definition") => break (status, body),
            _ => assert!(began.elapsed() < SOON, "{}", operator.logs()),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(status, 503);
    assert!(
        body.contains("kvinferencepools.kvrouter.dev is missing") && body.contains("kubectl apply"),
        "{body}"
    );
    assert_eq!(operator.page("/livez").await.map(|(status, _)| status), Some(200));
    assert_eq!(
        operator.metric(r#"kvrouter_operator_not_ready{reason="definitions_missing"}"#).await,
        Some(1.0)
    );

    // Of an older release.
    plane.install();
    for name in ["kvinferencepools", "kvrouters"] {
        let crd = format!("crd/{name}.kvrouter.dev");
        plane.kubectl_ok(&["annotate", &crd, "--overwrite", "kvrouter.dev/crd-revision=0"], None);
    }
    let mut other = Operator::start(plane, &["--leader-elect=false"]);
    let began = Instant::now();
    while other.page("/readyz").await.is_none_or(|(_, body)| !body.contains("is of revision 0")) {
        assert!(began.elapsed() < SOON, "{}", other.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    plane.install();
    operator.await_ready().await;
    other.await_ready().await;
    assert!(operator.has_ended().is_none() && other.has_ended().is_none(), "a crash loop");
    drop(other);

    // All namespaces, and an API server that goes away for a while.
    let world = World::on(plane, "everywhere").await;
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    world.appears("Deployment", "chat-router").await;
    world.settles().await;
    println!("idle, all namespaces: {} KiB", operator.memory());
    assert!(operator.memory() < 64 << 10, "{} KiB", operator.memory());
    plane.order("stop");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(operator.page("/livez").await.map(|(status, _)| status), Some(200));
    plane.order("start");
    plane.await_ready();
    world.edit("KvRouter", "chat", json!({"spec": {"image": "kv-router:next"}})).await;
    let image = |it: &Value| it["spec"]["template"]["spec"]["containers"][0]["image"] == "kv-router:next";
    world.becomes("the image", "Deployment", "chat-router", image).await;
    assert!(operator.has_ended().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_in_its_namespaces_are_enough() {
    let world = World::new("namespaced").await;
    let outside = World::new("outside").await;
    // A RoleBinding grants the rules of a ClusterRole inside one namespace only.
    let role =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kvrouter-operator"});
    let subjects = json!([{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": NAMESPACED}]);
    world.create("RoleBinding", "kvrouter-operator", json!({"roleRef": role, "subjects": subjects})).await;
    let operator = Operator::start_as(
        "namespaced",
        world.plane,
        &["--watch-namespaces=namespaced", "--leader-elect=false", "--hysteresis-seconds=0"],
    );
    operator.await_ready().await;
    for world in [&world, &outside] {
        world.create("InferencePool", "qwen", pool("qwen")).await;
        world.create("KvRouter", "chat", router("qwen")).await;
    }
    world.appears("Deployment", "chat-router").await;
    world.condition("KvRouter", "chat", "Accepted", "True", "Accepted").await;
    assert_eq!(outside.list("Deployment").await, [Value::Null; 0], "another namespace");
    let errors = operator.page("/metrics").await.map(|(_, text)| text.contains("watch_errors_total"));
    assert_eq!(errors, Some(false), "a watch lacks a right: {}", operator.logs());
}
