//! Conditions from what pods and routers tell, how often they are written, and
//! how the operator does on a larger fleet.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{World, condition_of, engine, next_ip, pool, report, router, settings, worker};

/// A pool of two engines and a router, and what its one pod says of them.
async fn fleet(world: &World) -> (Vec<Value>, crate::world::FakeRouter) {
    world.create("InferencePool", "qwen", pool("qwen")).await;
    let mut one = router("qwen");
    one["spec"]["replicas"] = json!(1);
    world.create("KvRouter", "chat", one).await;
    let mut engines = Vec::new();
    for name in ["engine-a", "engine-b"] {
        engines.push(world.pod(name, next_ip(), &[("app", "qwen")], engine(&[])).await);
    }
    world.appears("Deployment", "chat-router").await;
    world.roll_out("Deployment", "chat-router").await;
    let found =
        world.becomes("settings", "KvRouter", "chat", |it| it["status"]["configHash"].is_string()).await;
    let (start, live) = settings(&found);
    let workers: Vec<Value> = engines.iter().map(|pod| worker(pod, 16)).collect();
    let said = report(&world.namespace, "qwen", (&start, &live), &workers);
    let fake = world.router_pod("chat", "chat-router-0", said).await;
    (engines, fake)
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_become_conditions_and_traffic_does_not() {
    let world = World::new("reports").await;
    let _operator = world.operator(&[]);
    let (_, fake) = fleet(&world).await;
    for (type_, status, reason) in [
        ("RouterAvailable", "True", "Available"),
        ("ConfigApplied", "True", "Applied"),
        ("EventsConnected", "True", "Connected"),
        ("RenderParity", "True", "NotRequired"),
        ("IndexWarm", "True", "Warm"),
        ("Ready", "True", "Serving"),
    ] {
        world.condition("KvRouter", "chat", type_, status, reason).await;
    }
    world.condition("InferencePool", "qwen", "PageSizeParity", "True", "SamePageSize").await;
    world.condition("InferencePool", "qwen", "Ready", "True", "Serving").await;
    let router = world.get("KvRouter", "chat").await.expect("there");
    assert_eq!(router["status"]["workers"], "2/2");
    world.settles().await;

    // Message numbers move with every event; nothing may be written for them.
    let before = world.get("KvRouter", "chat").await.expect("there")["status"]["conditions"].clone();
    let quiet = world.writes().len();
    for seq in 2..6 {
        fake.says(|report| report["workers"][0]["targets"][0]["seq"] = json!(seq));
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    assert_eq!(world.writes().len(), quiet, "traffic was written");
    assert_eq!(world.get("KvRouter", "chat").await.expect("there")["status"]["conditions"], before);

    // A pod with another page size is named.
    fake.says(|report| {
        report["workers"][1]["reportedPageSize"] = json!(64);
        report["workers"][1]["targets"][0]["eventPageSize"] = json!(64);
    });
    let deadline = Instant::now();
    let found = world
        .becomes("parity", "InferencePool", "qwen", |it| {
            condition_of(it, "PageSizeParity")["status"] == "False"
        })
        .await;
    let message = condition_of(&found, "PageSizeParity")["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("engine-b"), "{message}");
    assert!(deadline.elapsed() < Duration::from_secs(5), "{:?}", deadline.elapsed());
    let events = world.list("Event").await;
    assert!(
        events.iter().any(|it| it["regarding"]["kind"] == "InferencePool" && it["type"] == "Warning"),
        "{events:#?}"
    );

    // The router is gone: a fact, and the pool goes on.
    fake.stop();
    world
        .becomes("unreachable", "KvRouter", "chat", |it| {
            condition_of(it, "ConfigApplied")["reason"] == "RouterUnreachable"
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_is_written_at_most_every_ten_seconds_without_a_flip() {
    let world = World::new("rate").await;
    let _operator = world.operator(&[]);
    fleet(&world).await;
    world.condition("InferencePool", "qwen", "Ready", "True", "Serving").await;
    world.settles().await;
    let before = world.writes().len();
    let began = Instant::now();
    for number in 0..12 {
        let name = format!("more-{number}");
        world.pod(&name, next_ip(), &[("app", "qwen")], engine(&["--block-size", "16"])).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let summary = |it: &Value| it["status"]["endpoints"]["summary"] == "14/14";
    world.becomes("all counted", "InferencePool", "qwen", summary).await;
    let status: Vec<String> = world.writes().split_off(before);
    let pool: Vec<&String> = status.iter().filter(|it| it.contains("kvinferencepools/status")).collect();
    let allowed = 2 + began.elapsed().as_secs() / 10;
    assert!(pool.len() as u64 <= allowed, "{} writes in {:?}: {status:?}", pool.len(), began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_pods_take_less_than_two_seconds() {
    let world = World::new("large").await;
    let operator = world.operator(&[]);
    operator.await_ready().await;
    let pods = (0..500).map(|number| {
        let world = &world;
        async move {
            let name = format!("engine-{number:03}");
            world.pod(&name, next_ip(), &[("app", "qwen")], engine(&["--block-size", "16"])).await;
        }
    });
    futures::stream::StreamExt::collect::<Vec<()>>(futures::stream::StreamExt::buffer_unordered(
        futures::stream::iter(pods),
        16,
    ))
    .await;
    let began = Instant::now();
    world.create("InferencePool", "qwen", pool("qwen")).await;
    let summary = |it: &Value| it["status"]["endpoints"]["summary"] == "500/500";
    world.becomes("all counted", "InferencePool", "qwen", summary).await;
    let took = began.elapsed();
    println!("500 pods: {took:?}, memory {} KiB", operator.memory());
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(operator.memory() < 64 << 10, "{} KiB", operator.memory());
    world.settles().await;
    world.stays_quiet("500 pods").await;
}
