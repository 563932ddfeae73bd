//! Pools that refer to one of the Gateway API Inference Extension: with it,
//! without it, and while it comes and goes.
//!
//! The definition is not the extension's own but one of the same group, kind and
//! version, with as much of it as the operator reads or must not touch.

use std::time::Duration;

use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, NAMESPACED};
use crate::world::{Operator, World, engine, merged, next_ip, pool, router, settings};

/// Looser than the extension's: it takes selectors and ports that are of no use.
const DEFINITION: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: inferencepools.inference.networking.k8s.io
  annotations: {api-approved.kubernetes.io: 'unapproved, of a test'}
spec:
  group: inference.networking.k8s.io
  scope: Namespaced
  names: {kind: InferencePool, plural: inferencepools, singular: inferencepool, shortNames: [infpool]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            properties:
              selector:
                type: object
                properties:
                  matchLabels: {type: object, additionalProperties: {type: string}}
              targetPorts:
                type: array
                items: {type: object, properties: {number: {type: integer, format: int32}}}
              endpointPickerRef: {type: object, x-kubernetes-preserve-unknown-fields: true}
          status:
            type: object
            properties:
              parents: {type: array, items: {type: object, x-kubernetes-preserve-unknown-fields: true}}
";

fn install(plane: &ControlPlane) {
    plane.kubectl_ok(&["apply", "-f", "-"], Some(DEFINITION));
    let name = "crd/inferencepools.inference.networking.k8s.io";
    plane.kubectl_ok(&["wait", "--for=condition=Established", name], None);
}

/// A pool of ours that refers to `gw`.
fn referring() -> Value {
    merged(
        pool("qwen"),
        json!({"spec": {"selector": null, "targetPorts": null, "gatewayPoolRef": {"name": "gw"}}}),
    )
}

/// A pool of the gateway, of these labels and ports.
fn gateway_pool(labels: Value, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|number| json!({"number": number})).collect();
    let picker = json!({"name": "picker", "port": {"number": 9002}});
    json!({"spec": {"selector": {"matchLabels": labels}, "targetPorts": ports, "endpointPickerRef": picker}})
}

/// What a gateway writes into its status.
fn parents(reason: &str) -> Value {
    let condition = json!({"type": "Accepted", "status": "True", "reason": reason, "message": "",
                           "lastTransitionTime": "2026-01-01T00:00:00Z"});
    json!({"parents": [{"parentRef": {"name": "gateway"}, "controllerName": "example.com/gateway",
                        "conditions": [condition]}]})
}

/// Waits until both kinds say so of their references; returns what the pool says.
async fn both_say(world: &World, status: &str, reason: &str) -> String {
    world.condition("KvRouter", "chat", "ResolvedRefs", status, reason).await;
    world.condition("InferencePool", "qwen", "ResolvedRefs", status, reason).await
}

/// Start settings of the router, as they are asked for now.
async fn start_settings(world: &World) -> String {
    let chat = world.get("KvRouter", "chat").await.expect("there");
    let name = format!("chat-router-config-{}", settings(&chat).0);
    let found = world.get("ConfigMap", &name).await.unwrap_or_default();
    found["data"]["config.yaml"].as_str().unwrap_or_default().to_owned()
}

/// Waits until routers are asked to serve these ports of pods of that app.
async fn routers_serve(world: &World, app: &str, ports: &[u16]) {
    let what = format!("settings with {app} and {ports:?}");
    let ports: String = ports.iter().map(|port| format!("    - {port}\n")).collect();
    let wanted = [format!("selector:\n      app: {app}\n"), format!("targetPorts:\n{ports}")];
    world
        .until(&what, async || {
            let text = start_settings(world).await;
            if wanted.iter().all(|part| text.contains(part)) { Ok(()) } else { Err(Value::from(text)) }
        })
        .await;
}

/// Everything of a router that must not change, by version.
async fn children(world: &World) -> Vec<(String, Value)> {
    let mut versions = Vec::new();
    for kind in ["Deployment", "ConfigMap", "Service", "RoleBinding"] {
        for child in world.list(kind).await {
            let of_kind = format!("{kind} {}", child["metadata"]["name"]);
            versions.push((of_kind, child["metadata"]["resourceVersion"].clone()));
        }
    }
    assert!(versions.len() >= 5, "{versions:?}");
    versions
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_pool_is_followed_wherever_it_goes() {
    let plane: &ControlPlane = Box::leak(Box::new(ControlPlane::start("gateway")));
    plane.install();
    let world = World::on(plane, "gateway").await;
    let mut operator = world.operator(&[]);
    operator.await_ready().await;
    without_the_kind(&world, &operator).await;
    install(plane);
    let said = both_say(&world, "False", "GatewayPoolNotFound").await;
    assert!(said.contains("no gateway pool gw"), "{said}");
    resolves(&world).await;
    edits_are_followed(&world).await;
    kubectl_tells_them_apart(&world);
    what_is_gone_stops_nothing(&world).await;
    what_is_of_no_use_is_named(&world).await;
    the_kind_may_go_and_come(&world).await;
    assert!(operator.has_ended().is_none(), "{}", operator.logs());
    let foreign: Vec<String> =
        world.writes().into_iter().filter(|write| write.contains(" inferencepools")).collect();
    assert_eq!(foreign, [""; 0], "the operator wrote what is not its own");
}

/// It is said, in a condition; neither the log nor the metrics speak of failures.
async fn without_the_kind(world: &World, operator: &Operator) {
    world.create("InferencePool", "qwen", referring()).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    let said = both_say(world, "False", "KindNotInstalled").await;
    assert!(said.contains("install the Gateway API Inference Extension"), "{said}");
    world.condition("InferencePool", "qwen", "Accepted", "True", "Accepted").await;
    world.condition("InferencePool", "qwen", "PageSizeParity", "Unknown", "Pending").await;
    assert_eq!(world.list("Deployment").await, [Value::Null; 0], "of nothing");
    // Longer than the pause between two looks.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let log = operator.logs();
    assert_eq!(log.lines().filter(|line| line.contains("GatewayPool")).count(), 1, "{log}");
    let errors = operator.page("/metrics").await.map(|(_, text)| text.contains("watch_errors_total{"));
    assert_eq!(errors, Some(false), "{log}");
}

async fn resolves(world: &World) {
    world.pod("qwen-0", next_ip(), &[("app", "vllm")], engine(&[])).await;
    world.create("GatewayPool", "gw", gateway_pool(json!({"app": "vllm"}), &[8000])).await;
    world.set_status("GatewayPool", "gw", parents("Accepted")).await;
    both_say(world, "True", "ResolvedRefs").await;
    world
        .becomes("its pod", "InferencePool", "qwen", |it| it["status"]["endpoints"]["summary"] == "1/1")
        .await;
    let said = world.condition("InferencePool", "qwen", "ResolvedRefs", "True", "ResolvedRefs").await;
    assert!(said.contains("The gateway pool gw gives it the labels app=vllm and the ports 8000."), "{said}");
    world.appears("Deployment", "chat-router").await;
    routers_serve(world, "vllm", &[8000]).await;
    // A pod of it belongs to two pools now, if another one wants it.
    world.create("InferencePool", "other", pool("vllm")).await;
    world.condition("InferencePool", "qwen", "Accepted", "False", "PoolConflict").await;
    world.condition("InferencePool", "other", "Accepted", "False", "PoolConflict").await;
    // It does so, too, while the reference gives nothing.
    world.delete("GatewayPool", "gw").await;
    both_say(world, "False", "GatewayPoolNotFound").await;
    world.settles().await;
    world.condition("InferencePool", "other", "Accepted", "False", "PoolConflict").await;
    world.create("GatewayPool", "gw", gateway_pool(json!({"app": "vllm"}), &[8000])).await;
    world.set_status("GatewayPool", "gw", parents("Accepted")).await;
    world.delete("InferencePool", "other").await;
    world.condition("InferencePool", "qwen", "Accepted", "True", "Accepted").await;
}

/// Edits of the spec roll routers, those of the status are nothing to us.
async fn edits_are_followed(world: &World) {
    world.settles().await;
    world.set_status("GatewayPool", "gw", parents("Reconciled")).await;
    let annotated = json!({"metadata": {"annotations": {"example.com/a": "b"}}});
    world.edit("GatewayPool", "gw", annotated).await;
    world.stays_quiet("a status and an annotation of the gateway pool").await;
    let ports = json!({"spec": {"targetPorts": [{"number": 8000}, {"number": 8001}]}});
    world.edit("GatewayPool", "gw", ports).await;
    routers_serve(world, "vllm", &[8000, 8001]).await;
    let said = world.condition("InferencePool", "qwen", "ResolvedRefs", "False", "PortNotDeclared").await;
    assert!(said.contains("correct spec.targetPorts of the gateway pool gw or declare the port"), "{said}");
    world.edit("GatewayPool", "gw", json!({"spec": {"selector": {"matchLabels": {"app": "sglang"}}}})).await;
    routers_serve(world, "sglang", &[8000, 8001]).await;
    world.condition("InferencePool", "qwen", "Ready", "Unknown", "NoPods").await;
    // A pod of the new labels is the pool's.
    let both = json!({"ports": [{"containerPort": 8000}, {"containerPort": 8001}]});
    world.pod("sglang-0", next_ip(), &[("app", "sglang")], merged(engine(&[]), both)).await;
    world
        .becomes("its pod", "InferencePool", "qwen", |it| it["status"]["endpoints"]["summary"] == "1/1")
        .await;
    let found = world.get("GatewayPool", "gw").await.expect("there");
    assert_eq!(found["status"], parents("Reconciled"), "whose status is the gateway's");
    assert!(found["metadata"].get("ownerReferences").is_none(), "{found:#}");
    assert!(!found["metadata"]["managedFields"].to_string().contains("kvrouter"), "{found:#}");
}

fn kubectl_tells_them_apart(world: &World) {
    let listed = |kind: &str| {
        let arguments = ["get", kind, "-n", &world.namespace, "-o", "name"];
        world.plane.kubectl_ok(&arguments, None).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for kind in ["inferencepools", "infpool"] {
        assert_eq!(listed(kind), ["inferencepool.inference.networking.k8s.io/gw"], "{kind}");
    }
    for kind in ["kvpool", "kvinferencepools"] {
        assert_eq!(listed(kind), ["inferencepool.kvrouter.dev/qwen"], "{kind}");
    }
}

/// Without it nothing is changed, and with it again nothing needs to be.
async fn what_is_gone_stops_nothing(world: &World) {
    world.settles().await;
    let before = children(world).await;
    let hash = world.get("KvRouter", "chat").await.expect("there")["status"]["configHash"].clone();
    world.delete("GatewayPool", "gw").await;
    let said = both_say(world, "False", "GatewayPoolNotFound").await;
    assert!(said.contains("routers that run go on as they are; create it"), "{said}");
    world.settles().await;
    assert_eq!(children(world).await, before, "routers were changed");
    assert_eq!(world.get("KvRouter", "chat").await.expect("there")["status"]["configHash"], hash);
    world.create("GatewayPool", "gw", gateway_pool(json!({"app": "sglang"}), &[8000, 8001])).await;
    both_say(world, "True", "ResolvedRefs").await;
    world.settles().await;
    assert_eq!(children(world).await, before, "it says what it said");
}

async fn what_is_of_no_use_is_named(world: &World) {
    let before = children(world).await;
    world.edit("GatewayPool", "gw", json!({"spec": {"selector": {"matchLabels": null}}})).await;
    let said = both_say(world, "False", "GatewayPoolUnusable").await;
    assert!(said.contains("its spec.selector.matchLabels is empty"), "{said}");
    world.edit("GatewayPool", "gw", gateway_pool(json!({"app": "sglang"}), &[8000, 8001])).await;
    both_say(world, "True", "ResolvedRefs").await;
    world.settles().await;
    assert_eq!(children(world).await, before, "routers were changed");
}

async fn the_kind_may_go_and_come(world: &World) {
    let before = children(world).await;
    let name = "inferencepools.inference.networking.k8s.io";
    world.plane.kubectl_ok(&["delete", "crd", name], None);
    both_say(world, "False", "KindNotInstalled").await;
    world.settles().await;
    assert_eq!(children(world).await, before, "routers were changed");
    install(world.plane);
    both_say(world, "False", "GatewayPoolNotFound").await;
    world.create("GatewayPool", "gw", gateway_pool(json!({"app": "sglang"}), &[8000])).await;
    both_say(world, "True", "ResolvedRefs").await;
    routers_serve(world, "sglang", &[8000]).await;
}

/// A role of an older chart: what does not need the right works, and what needs it
/// says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_holds_up_nothing_else() {
    let world = World::new("unreadable").await;
    let role = world.plane.kubectl_ok(&["get", "clusterrole", "kvrouter-operator", "-o", "json"], None);
    let mut role: Value = serde_json::from_str(&role).expect("JSON");
    role["metadata"] = json!({"name": "without-gateway"});
    let rules = role["rules"].as_array_mut().expect("rules");
    let all = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["inferencepools"]));
    assert_eq!(rules.len() + 1, all, "one rule is about them");
    world.plane.kubectl_ok(&["apply", "-f", "-"], Some(&role.to_string()));
    let role =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "without-gateway"});
    let subjects = json!([{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": NAMESPACED}]);
    world.create("RoleBinding", "kvrouter-operator", json!({"roleRef": role, "subjects": subjects})).await;
    let flags = ["--watch-namespaces=unreadable", "--leader-elect=false", "--hysteresis-seconds=0"];
    let operator = Operator::start_as("namespaced", world.plane, &flags);
    operator.await_ready().await;
    world.create("InferencePool", "qwen", referring()).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    let said = both_say(&world, "False", "GatewayPoolUnreadable").await;
    assert!(said.contains("upgrade the chart"), "{said}");
    world.create("InferencePool", "own", pool("own")).await;
    world.create("KvRouter", "own", router("own")).await;
    world.appears("Deployment", "own-router").await;
    let log = operator.logs();
    assert_eq!(log.lines().filter(|line| line.contains("forbidden")).count(), 1, "told once: {log}");
    let page = operator.page("/metrics").await.map(|(_, text)| text).unwrap_or_default();
    assert!(page.contains("kvrouter_operator_watch_errors_total{kind=\"GatewayPool\"} 1\n"), "{page}");
}
