//! Children of a router: made, kept, changed and removed.

use serde_json::{Value, json};

use crate::world::{World, name_of, pool, router, settings};

/// Every child of the router `chat` but the ConfigMap named by its digest.
const CHILDREN: &[(&str, &str)] = &[
    ("ServiceAccount", "chat-router"),
    ("RoleBinding", "chat-router"),
    ("ConfigMap", "chat-router-live"),
    ("Service", "chat-router"),
    ("PodDisruptionBudget", "chat-router"),
    ("Deployment", "chat-router"),
];

/// A pool and a router, reconciled and at rest.
async fn settled(world: &World) {
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    world.appears("Deployment", "chat-router").await;
    world.settles().await;
}

async fn start_settings(world: &World) -> String {
    let router = world.get("KvRouter", "chat").await.expect("there");
    format!("chat-router-config-{}", settings(&router).0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_gets_its_children_and_a_second_pass_writes_nothing() {
    let world = World::new("children").await;
    let operator = world.operator(&[]);
    settled(&world).await;
    let owner = world.get("KvRouter", "chat").await.expect("there");
    let start = start_settings(&world).await;
    for (kind, name) in CHILDREN.iter().copied().chain([("ConfigMap", start.as_str())]) {
        let child = world.get(kind, name).await.unwrap_or_else(|| panic!("{kind} {name}"));
        let owners = child["metadata"]["ownerReferences"].as_array().expect("an owner");
        assert_eq!(owners.len(), 1, "{kind} {name}");
        for (field, expected) in [
            ("uid", &owner["metadata"]["uid"]),
            ("kind", &json!("KvRouter")),
            ("controller", &json!(true)),
            ("blockOwnerDeletion", &json!(true)),
        ] {
            assert_eq!(&owners[0][field], expected, "{kind} {name}: {field}");
        }
        assert_eq!(
            child["metadata"]["labels"]["app.kubernetes.io/managed-by"], "kvrouter-operator",
            "{kind}"
        );
        let managers: Vec<&Value> =
            child["metadata"]["managedFields"].as_array().expect("managers").iter().collect();
        assert!(managers.iter().all(|it| it["manager"] == "kvrouter-operator" && it["operation"] == "Apply"));
    }
    // Somebody touches both objects: a second pass over everything.
    let before = world.writes();
    for (kind, name) in [("InferencePool", "qwen"), ("KvRouter", "chat")] {
        world.edit(kind, name, json!({"metadata": {"annotations": {"touched": "yes"}}})).await;
    }
    world.stays_quiet("a second pass").await;
    assert_eq!(world.writes(), before);
    assert!(
        operator.metric(r#"kvrouter_operator_reconciles_total{kind="KvRouter",result="ok"}"#).await
            >= Some(2.0)
    );
    // A new operator has nothing to write either.
    drop(operator);
    let operator = world.operator(&[]);
    operator.await_ready().await;
    world.stays_quiet("a restart").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_by_hand_is_undone() {
    let world = World::new("drift").await;
    let _operator = world.operator(&[]);
    settled(&world).await;
    world.edit("Deployment", "chat-router", json!({"spec": {"replicas": 7}})).await;
    world.becomes("replicas", "Deployment", "chat-router", |it| it["spec"]["replicas"] == 2).await;
    world
        .edit("Service", "chat-router", json!({"spec": {"selector": {"app.kubernetes.io/instance": "x"}}}))
        .await;
    let selected = |it: &Value| it["spec"]["selector"]["app.kubernetes.io/instance"] == "chat";
    world.becomes("the selector", "Service", "chat-router", selected).await;
    world.edit("ConfigMap", "chat-router-live", json!({"data": {"live.yaml": "nonsense"}})).await;
    let mended = |it: &Value| it["data"]["live.yaml"] != "nonsense";
    world.becomes("the settings", "ConfigMap", "chat-router-live", mended).await;
    for (kind, name) in CHILDREN {
        let uid = world.get(kind, name).await.expect("there")["metadata"]["uid"].clone();
        world.delete(kind, name).await;
        world.becomes("made anew", kind, name, |it| it["metadata"]["uid"] != uid).await;
    }
    // What others add stays, and is no reason to write.
    world.settles().await;
    world
        .edit("Service", "chat-router", json!({"metadata": {"annotations": {"cloud.example/lb": "a"}}}))
        .await;
    world.stays_quiet("others' annotations").await;
    let service = world.get("Service", "chat-router").await.expect("there");
    assert_eq!(service["metadata"]["annotations"]["cloud.example/lb"], "a");
    // So does a variable, also when the operator changes the template.
    let by_hand = ["set", "env", "-n", &world.namespace, "deployment/chat-router", "RUST_LOG=debug"];
    world.plane.kubectl_ok(&by_hand, None);
    world.stays_quiet("others' variables").await;
    world.edit("KvRouter", "chat", json!({"spec": {"image": "example/kv-router:2"}})).await;
    let container = |it: &Value| it["spec"]["template"]["spec"]["containers"][0].clone();
    let changed = |it: &Value| container(it)["image"] == "example/kv-router:2";
    world.becomes("the image", "Deployment", "chat-router", changed).await;
    let deployment = world.get("Deployment", "chat-router").await.expect("there");
    let variables = container(&deployment)["env"].clone();
    let names: Vec<&str> =
        variables.as_array().expect("a list").iter().filter_map(|it| it["name"].as_str()).collect();
    assert!(names.contains(&"RUST_LOG") && names.contains(&"KVROUTER_LOG_JSON"), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_change_live_and_images_roll() {
    let world = World::new("edits").await;
    let _operator = world.operator(&[]);
    settled(&world).await;
    let start = start_settings(&world).await;
    let template = |it: &Value| it["spec"]["template"].clone();
    let before = template(&world.get("Deployment", "chat-router").await.expect("there"));
    let writes = world.writes().len();
    world.edit("KvRouter", "chat", json!({"spec": {"overlapWeights": {"default": 2.5}}})).await;
    let live = |it: &Value| it["data"]["live.yaml"].as_str().is_some_and(|text| text.contains("2.5"));
    world.becomes("the weight", "ConfigMap", "chat-router-live", live).await;
    let changed: Vec<String> =
        world.settles().await.split_off(writes).into_iter().filter(|it| !it.contains("/status/")).collect();
    assert_eq!(changed, ["patch configmaps/chat-router-live"], "a weight changes nothing else");
    assert_eq!(start_settings(&world).await, start, "start settings");

    world.edit("KvRouter", "chat", json!({"spec": {"image": "kv-router:next"}})).await;
    let image = |it: &Value| it["spec"]["template"]["spec"]["containers"][0]["image"] == "kv-router:next";
    let after = world.becomes("the image", "Deployment", "chat-router", image).await;
    assert_ne!(template(&after), before);
    assert_eq!(start_settings(&world).await, start, "an image is no setting");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_wanted_any_more_goes() {
    let world = World::new("prune").await;
    let _operator = world.operator(&[]);
    settled(&world).await;
    let old = start_settings(&world).await;
    world.edit("KvRouter", "chat", json!({"spec": {"replicas": 1}})).await;
    world
        .until("no budget for one replica", async || {
            world.get("PodDisruptionBudget", "chat-router").await.map_or(Ok(()), Err)
        })
        .await;
    world.roll_out("Deployment", "chat-router").await;
    // Other start settings: the old ones stay as long as a pod may need them.
    let deployment = world.get("Deployment", "chat-router").await.expect("there");
    let template = &deployment["spec"]["template"];
    let metadata =
        json!({"labels": template["metadata"]["labels"], "annotations": template["metadata"]["annotations"]});
    world.create("Pod", "old", json!({"metadata": metadata, "spec": template["spec"]})).await;
    world.edit("InferencePool", "qwen", json!({"spec": {"blockSize": 32}})).await;
    let new = world
        .until("new settings", async || {
            let new = start_settings(&world).await;
            let made = world.get("ConfigMap", &new).await.is_some();
            if new != old && made { Ok(new) } else { Err(json!(new)) }
        })
        .await;
    world.settles().await;
    assert!(world.get("ConfigMap", &old).await.is_some(), "the Deployment has not rolled yet");
    world.roll_out("Deployment", "chat-router").await;
    world.settles().await;
    assert!(world.get("ConfigMap", &old).await.is_some(), "a pod still runs with them");
    world.plane.kubectl_ok(&["delete", "pod", "old", "-n", "prune", "--force", "--grace-period=0"], None);
    world.until("pruned", async || world.get("ConfigMap", &old).await.map_or(Ok(()), Err)).await;
    assert!(world.get("ConfigMap", &new).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_router_gets_its_status_only() {
    let world = World::new("paused").await;
    let _operator = world.operator(&[]);
    world.create("InferencePool", "qwen", pool("qwen")).await;
    let mut paused = router("qwen");
    paused["metadata"] = json!({"annotations": {"kvrouter.dev/paused": "true"}});
    world.create("KvRouter", "chat", paused).await;
    world.condition("KvRouter", "chat", "Progressing", "Unknown", "Paused").await;
    let writes = world.settles().await;
    assert!(writes.iter().all(|it| it.contains("/status/") || it.contains("events/")), "{writes:?}");
    world.edit("KvRouter", "chat", json!({"metadata": {"annotations": {"kvrouter.dev/paused": null}}})).await;
    world.appears("Deployment", "chat-router").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_somebody_else_is_left_alone() {
    let world = World::new("taken").await;
    world.create("Service", "chat-router", json!({"spec": {"ports": [{"port": 1}]}})).await;
    let before = world.get("Service", "chat-router").await.expect("there");
    let _operator = world.operator(&[]);
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    let message = world.condition("KvRouter", "chat", "Accepted", "False", "NameTaken").await;
    assert!(message.contains("Service/chat-router"), "{message}");
    world.settles().await;
    assert_eq!(world.get("Service", "chat-router").await, Some(before));
    for (kind, name) in CHILDREN.iter().filter(|(kind, _)| *kind != "Service") {
        assert_eq!(world.get(kind, name).await, None, "half of a router: {kind} {name}");
    }
    world.delete("Service", "chat-router").await;
    // People touch the router, or wait half a minute.
    world.edit("KvRouter", "chat", json!({"metadata": {"annotations": {"touched": "yes"}}})).await;
    world.appears("Deployment", "chat-router").await;
    world.condition("KvRouter", "chat", "Accepted", "True", "Accepted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_without_its_pool_says_so_and_keeps_running() {
    let world = World::new("no-pool").await;
    let _operator = world.operator(&[]);
    world.create("KvRouter", "chat", router("qwen")).await;
    let message = world.condition("KvRouter", "chat", "ResolvedRefs", "False", "PoolNotFound").await;
    assert!(message.contains("qwen"), "{message}");
    assert!(world.get("Deployment", "chat-router").await.is_none());
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.condition("KvRouter", "chat", "ResolvedRefs", "True", "ResolvedRefs").await;
    let uid = world.appears("Deployment", "chat-router").await["metadata"]["uid"].clone();
    world.settles().await;
    world.delete("InferencePool", "qwen").await;
    world.condition("KvRouter", "chat", "ResolvedRefs", "False", "PoolNotFound").await;
    world.settles().await;
    let kept = world.get("Deployment", "chat-router").await.expect("routers go on without their pool");
    assert_eq!(kept["metadata"]["uid"], uid);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_condition_is_there_at_once() {
    let world = World::new("conditions").await;
    let _operator = world.operator(&[]);
    world.create("InferencePool", "qwen", pool("qwen")).await;
    world.create("KvRouter", "chat", router("qwen")).await;
    let types = |object: &Value| -> Vec<String> {
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().map(|it| it["type"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let pool = world.becomes("a status", "InferencePool", "qwen", |it| !types(it).is_empty()).await;
    let expected = [
        "Accepted",
        "ResolvedRefs",
        "PageSizeParity",
        "HashSeedStable",
        "EventsConnected",
        "Degraded",
        "Ready",
    ];
    assert_eq!(types(&pool), expected);
    let router = world.becomes("a status", "KvRouter", "chat", |it| !types(it).is_empty()).await;
    let expected = [
        "Accepted",
        "ResolvedRefs",
        "Progressing",
        "RouterAvailable",
        "ConfigApplied",
        "TokenizerReady",
        "RenderParity",
        "IndexWarm",
        "EventsConnected",
        "Degraded",
        "Ready",
    ];
    assert_eq!(types(&router), expected);
    for object in [&pool, &router] {
        for condition in object["status"]["conditions"].as_array().expect("conditions") {
            assert_eq!(condition["observedGeneration"], 1, "{condition}");
        }
    }
    world.plane.kubectl_ok(
        &["wait", "-n", "conditions", "kvrouter/chat", "--for=condition=Accepted", "--timeout=5s"],
        None,
    );
    assert_eq!(name_of(&router), "chat");
}

/// Nothing removes the contents of a namespace here, so it stays as it is
/// between its deletion and its end.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_going_away_is_left_alone() {
    let world = World::new("ending").await;
    let operator = world.operator(&[]);
    settled(&world).await;
    world.plane.kubectl_ok(&["delete", "namespace", "ending", "--wait=false"], None);
    let before = world.writes().len();
    world.delete("Service", "chat-router").await;
    let tried = |wanted: &'static str| {
        let world = &world;
        async move {
            let is_tried = async || {
                let writes = world.writes().split_off(before);
                if writes.iter().any(|it| it.starts_with(wanted)) { Ok(()) } else { Err(json!(writes)) }
            };
            world.until(wanted, is_tried).await;
        }
    };
    tried("patch services/chat-router").await;
    assert!(world.get("Service", "chat-router").await.is_none(), "nothing can be made there any more");
    // A status can still be written, the event about it cannot.
    world.delete("InferencePool", "qwen").await;
    world.condition("KvRouter", "chat", "ResolvedRefs", "False", "PoolNotFound").await;
    tried("create events/").await;
    world.settles().await;
    world.stays_quiet("nothing is tried again").await;
    let logs = operator.logs();
    // The tests' own certificate is not checked.
    let is_trouble = |line: &&str| {
        (line.contains("WARN") || line.contains("ERROR")) && !line.contains("Server cert bypassed")
    };
    assert_eq!(logs.lines().find(is_trouble), None, "{logs}");
}
