//! What happens to the engine workloads that a pool names, and what does not.

use serde_json::{Value, json};

use crate::world::{World, pool};

fn workload(kind: &str, env: Value) -> Value {
    let mut workload = json!({"spec": {
        "replicas": 3, "selector": {"matchLabels": {"app": "qwen"}},
        "template": {"metadata": {"labels": {"app": "qwen"}}, "spec": {"containers": [
            {"name": "logs", "image": "logs"},
            {"name": "engine", "image": "vllm", "ports": [{"containerPort": 8000}], "env": env},
        ]}},
    }});
    if kind == "StatefulSet" {
        workload["spec"]["serviceName"] = "qwen".into();
    }
    workload
}

fn naming(names: &[(&str, &str)]) -> Value {
    let mut pool = pool("qwen");
    pool["spec"]["workloads"] =
        names.iter().map(|(kind, name)| json!({"kind": kind, "name": name})).collect();
    pool
}

fn seed(workload: &Value) -> Value {
    let containers = workload["spec"]["template"]["spec"]["containers"].as_array().expect("containers");
    let engine = containers.iter().find(|it| it["name"] == "engine").expect("an engine");
    let env = engine["env"].as_array().cloned().unwrap_or_default();
    env.into_iter().find(|it| it["name"] == "PYTHONHASHSEED").unwrap_or_default()
}

fn state(pool: &Value, name: &str) -> String {
    let all = pool["status"]["workloads"].as_array().cloned().unwrap_or_default();
    let record = all.into_iter().find(|it| it["name"] == name).unwrap_or_default();
    record["state"].as_str().unwrap_or_default().to_owned()
}

async fn reaches(world: &World, name: &str, wanted: &str) -> Value {
    world.becomes(&format!("{name} {wanted}"), "InferencePool", "qwen", |it| state(it, name) == wanted).await
}

fn patches(writes: &[String]) -> Vec<&String> {
    let engines =
        |it: &&String| it.starts_with("patch deployments/") || it.starts_with("patch statefulsets/");
    writes.iter().filter(engines).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn seeds_are_set_one_workload_at_a_time_and_never_again() {
    let world = World::new("seeds").await;
    world.create("Deployment", "a", workload("Deployment", json!([{"name": "X", "value": "1"}]))).await;
    world.create("StatefulSet", "b", workload("StatefulSet", json!([]))).await;
    for (kind, name) in [("Deployment", "a"), ("StatefulSet", "b")] {
        world.roll_out(kind, name).await;
    }
    let operator = world.operator(&[]);
    world.create("InferencePool", "qwen", naming(&[("Deployment", "a"), ("StatefulSet", "b")])).await;
    let a = world.becomes("a seed", "Deployment", "a", |it| seed(it)["value"] == "0").await;
    assert_eq!(a["spec"]["replicas"], 3, "replicas are nobody's business");
    assert_eq!(
        a["spec"]["template"]["spec"]["containers"][1]["env"].as_array().map(Vec::len),
        Some(2),
        "{a:#}"
    );
    world.settles().await;
    assert_eq!(seed(&world.get("StatefulSet", "b").await.expect("there")), Value::Null, "one at a time");
    world.roll_out("Deployment", "a").await;
    world.becomes("a seed", "StatefulSet", "b", |it| seed(it)["value"] == "0").await;
    reaches(&world, "a", "Patched").await;
    reaches(&world, "b", "RollingOut").await;
    let generation = world.get("StatefulSet", "b").await.expect("there")["metadata"]["generation"].clone();
    world
        .set_status(
            "StatefulSet",
            "b",
            json!({"observedGeneration": generation, "currentRevision": "x", "updateRevision": "x"}),
        )
        .await;
    reaches(&world, "b", "Patched").await;
    let writes = world.settles().await;
    assert_eq!(patches(&writes).len(), 2, "{writes:?}");

    // A restart, another release, edits of what does not concern engines.
    drop(operator);
    let _operator = world.operator(&["--router-image=kv-router:next", "--bridge-image=kv-router:next"]);
    world.edit("InferencePool", "qwen", json!({"spec": {"pageSizePolicy": "RequireParity"}})).await;
    world.becomes("looked at", "InferencePool", "qwen", |it| it["status"]["observedGeneration"] == 2).await;
    assert_eq!(patches(&world.settles().await).len(), 2, "an engine was restarted");

    // Somebody undoes it: said, not repeated.
    let undone =
        json!([{"op": "replace", "path": "/spec/template/spec/containers/1/env", "value": []}]).to_string();
    world.plane.kubectl_ok(&["patch", "deployment", "a", "-n", "seeds", "--type=json", "-p", &undone], None);
    world.roll_out("Deployment", "a").await;
    let pool = reaches(&world, "a", "PatchReverted").await;
    assert_eq!(crate::world::condition_of(&pool, "HashSeedStable")["type"], "HashSeedStable");
    assert_eq!(patches(&world.settles().await).len(), 2, "repeated");
    // Another spec is another wish.
    world.edit("InferencePool", "qwen", json!({"spec": {"hashSeed": {"value": 7}}})).await;
    world.becomes("the other seed", "Deployment", "a", |it| seed(it)["value"] == "7").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_to_change_stays() {
    let world = World::new("hands-off").await;
    let from = json!([{"name": "PYTHONHASHSEED", "valueFrom": {"configMapKeyRef": {"name": "seeds", "key": "seed"}}}]);
    world
        .create(
            "Deployment",
            "user",
            workload("Deployment", json!([{"name": "PYTHONHASHSEED", "value": "42"}])),
        )
        .await;
    world.create("Deployment", "from", workload("Deployment", from.clone())).await;
    let mut owned = workload("Deployment", json!([]));
    owned["metadata"] = json!({"ownerReferences": [{"apiVersion": "serving.example/v1", "kind": "Model", "name": "m",
        "uid": "1", "controller": true}]});
    world.create("Deployment", "owned", owned).await;
    let mut halted = workload("Deployment", json!([]));
    halted["spec"]["paused"] = json!(true);
    world.create("Deployment", "halted", halted).await;
    let mut manual = workload("StatefulSet", json!([]));
    manual["spec"]["updateStrategy"] = json!({"type": "OnDelete"});
    world.create("StatefulSet", "manual", manual).await;
    for name in ["user", "from", "owned", "halted"] {
        world.roll_out("Deployment", name).await;
    }
    world.roll_out("StatefulSet", "manual").await;
    let _operator = world.operator(&[]);
    let all = [
        ("Deployment", "user"),
        ("Deployment", "from"),
        ("Deployment", "owned"),
        ("Deployment", "halted"),
        ("StatefulSet", "manual"),
        ("Deployment", "absent"),
    ];
    world.create("InferencePool", "qwen", naming(&all)).await;
    for (name, wanted) in [
        ("user", "AlreadyRight"),
        ("from", "AlreadyRight"),
        ("owned", "WorkloadControlled"),
        ("halted", "Paused"),
        ("manual", "Paused"),
        ("absent", "WorkloadNotFound"),
    ] {
        reaches(&world, name, wanted).await;
    }
    let writes = world.settles().await;
    assert_eq!(patches(&writes).len(), 0, "{writes:?}");
    assert_eq!(seed(&world.get("Deployment", "user").await.expect("there"))["value"], "42");
    assert_eq!(seed(&world.get("Deployment", "from").await.expect("there")), from[0]);
    // Resumed, it is changed.
    world.edit("Deployment", "halted", json!({"spec": {"paused": false}})).await;
    world.roll_out("Deployment", "halted").await;
    world.becomes("a seed", "Deployment", "halted", |it| seed(it)["value"] == "0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_rollout_stops_the_rest() {
    let world = World::new("failed-rollout").await;
    for name in ["a", "b"] {
        world.create("Deployment", name, workload("Deployment", json!([]))).await;
        world.roll_out("Deployment", name).await;
    }
    let _operator = world.operator(&[]);
    world.create("InferencePool", "qwen", naming(&[("Deployment", "a"), ("Deployment", "b")])).await;
    let a = world.becomes("a seed", "Deployment", "a", |it| seed(it)["value"] == "0").await;
    world
        .set_status("Deployment", "a", json!({"observedGeneration": a["metadata"]["generation"], "updatedReplicas": 1,
            "replicas": 4, "availableReplicas": 3,
            "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]}))
        .await;
    reaches(&world, "a", "PatchFailed").await;
    let writes = world.settles().await;
    assert_eq!(patches(&writes), ["patch deployments/a"], "b must wait");
    let events = world.list("Event").await;
    assert!(events.iter().any(|it| it["reason"] == "PatchFailed"), "{events:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn seed_and_bridge_come_in_one_patch() {
    let world = World::new("bridge").await;
    world.create("Deployment", "a", workload("Deployment", json!([]))).await;
    world.roll_out("Deployment", "a").await;
    let _operator = world.operator(&[]);
    let mut wanted = naming(&[("Deployment", "a")]);
    wanted["spec"]["kvEvents"]["bridge"] = "Inject".into();
    world.create("InferencePool", "qwen", wanted).await;
    let a = world.becomes("a seed", "Deployment", "a", |it| seed(it)["value"] == "0").await;
    let bridge = &a["spec"]["template"]["spec"]["initContainers"][0];
    assert_eq!(bridge["name"], "kvrouter-bridge");
    assert_eq!(bridge["restartPolicy"], "Always");
    assert_eq!(bridge["image"], "kv-router:test");
    world.roll_out("Deployment", "a").await;
    reaches(&world, "a", "Patched").await;
    let writes = world.settles().await;
    assert_eq!(patches(&writes), ["patch deployments/a"]);
    // The bridge is a part of the template that only a new spec may change.
    drop(_operator);
    let _operator = world.operator(&["--bridge-image=kv-router:next"]);
    let pool = reaches(&world, "a", "BridgeOutdated").await;
    let message = pool["status"]["workloads"][0]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("kubectl set image"), "{message}");
    assert_eq!(patches(&world.settles().await).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn patching_can_be_turned_off() {
    let world = World::new("patching-off").await;
    world.create("Deployment", "a", workload("Deployment", json!([]))).await;
    world.roll_out("Deployment", "a").await;
    let _operator = world.operator(&["--workload-patching=false"]);
    world.create("InferencePool", "qwen", naming(&[("Deployment", "a")])).await;
    let pool = reaches(&world, "a", "PatchingDisabled").await;
    let message = pool["status"]["workloads"][0]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("workloadPatching.enabled"), "{message}");
    assert_eq!(patches(&world.settles().await).len(), 0);
}
