//! Events over a real nats-server and real bridges: warm starts, restarts, outages and garbage.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use engine_sim::{EngineSim, Wire};
use kvrouter_tests::process::{Process, nats_command, sibling};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{
    MODEL, Router, Setup, bare, chat_directly, engine, entry, fault, id, long, text, unique, until,
};

/// A broker's configuration file, in its folder.
const SETTINGS: &str = "nats.conf";

/// A running nats-server.
pub(crate) struct Broker {
    address: String,
    process: Process,
    folder: TempDir,
}

impl Broker {
    pub(crate) async fn start() -> Self {
        Self::configured("").await
    }

    /// One with more settings than its address, as its configuration file has them.
    pub(crate) async fn configured(settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), settings).unwrap();
        let (address, process) = serve(folder.path(), None).await;
        Self { address, process, folder }
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// The same address again, after it was killed.
    pub(crate) async fn restart(&mut self) {
        let port = self.address.rsplit_once(':').unwrap().1.parse().unwrap();
        (self.address, self.process) = serve(self.folder.path(), Some(port)).await;
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://{}", self.address)
    }
}

async fn serve(folder: &Path, port: Option<u16>) -> (String, Process) {
    let mut command = nats_command(&program(), port);
    command.arg("-c").arg(folder.join(SETTINGS));
    let mut process = Process::start("nats-server", &mut command, &folder.join("nats.log")).unwrap();
    (process.nats_address().await.unwrap(), process)
}

/// The nats-server program.
#[allow(clippy::disallowed_methods)] // The one setting of these tests; `make test` sets it.
fn program() -> PathBuf {
    match std::env::var_os("NATS_SERVER") {
        Some(path) => path.into(),
        None => panic!(
            "NATS_SERVER is not set; `make test` installs a nats-server and sets it, or give the path of yours"
        ),
    }
}

/// A running bridge and the folder that outlives it.
pub(crate) struct Bridge {
    process: Process,
    arguments: Vec<String>,
    folder: TempDir,
}

impl Bridge {
    pub(crate) fn start(engine: &EngineSim, nats_url: &str) -> Self {
        Self::reading(engine, 0..engine.kv_event_endpoints().len(), nats_url)
    }

    /// One that takes these ranks' sockets for those of all.
    pub(crate) fn reading(engine: &EngineSim, ranks: std::ops::Range<usize>, nats_url: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().to_str().unwrap().to_owned();
        let (worker, events) = (id(engine), &engine.kv_event_endpoints()[ranks.start]);
        let (replay, ranks) = (&engine.replay_endpoints()[ranks.start], ranks.len().to_string());
        let arguments = [
            ["bridge", "--worker", &worker, "--kv-events", events, "--kv-replay", replay],
            ["--nats-url", nats_url, "--model", MODEL, "--block-size", "16", "--pool=demo"],
            ["--listen-metrics", "127.0.0.1:0", "--dp-size", &ranks, "--state-dir", &state, "--log-json"],
        ];
        let arguments: Vec<String> = arguments.concat().into_iter().map(str::to_owned).collect();
        Self { process: run(&arguments, folder.path()), arguments, folder }
    }

    /// Kills it and starts it again with the same folder.
    fn restart(&mut self) {
        self.process.kill();
        self.process = run(&self.arguments, self.folder.path());
    }
}

fn run(arguments: &[String], folder: &Path) -> Process {
    let mut command = Command::new(sibling("kv-router").unwrap());
    command.args(arguments);
    Process::start("bridge", &mut command, &folder.join("bridge.log")).unwrap()
}

pub(crate) fn setup(engines: &[&EngineSim], nats_url: &str) -> Setup {
    let workers = engines.iter().map(|engine| bare(&id(engine))).collect();
    Setup { events: format!("{{transport: NATS, nats: {{url: \"{nats_url}\"}}}}"), ..Setup::of(workers) }
}

/// Case G19, over NATS.
#[tokio::test]
async fn turn_two_follows_the_cache_over_nats() {
    let broker = Broker::start().await;
    for wire in [Wire::Vllm033, Wire::Sglang0518] {
        let (a, b) = (engine(|config| config.wire = wire).await, engine(|config| config.wire = wire).await);
        let _bridges = [Bridge::start(&a, &broker.url()), Bridge::start(&b, &broker.url())];
        let router = Router::start(setup(&[&a, &b], &broker.url())).await;
        let mut messages = vec![json!({"role": "system", "content": text(1, 40)})];
        let mut home: Option<String> = None;
        for turn in 2..6 {
            messages.push(json!({"role": "user", "content": text(turn, 10)}));
            let chat = router.chat(&Value::Array(messages.clone()), 24).await;
            assert_eq!(chat.cached, chat.predicted(), "{wire:?} turn {turn}: {}", chat.receipt);
            if let Some(home) = &home {
                assert_eq!(chat.worker(), home, "{wire:?} turn {turn}");
                assert!(chat.cached > 100);
            }
            home = Some(chat.worker().to_owned());
            messages.push(json!({"role": "assistant", "content": chat.text}));
            router.agrees_with(&a).await;
            router.agrees_with(&b).await;
        }
    }
}

/// Case K4, over NATS.
#[tokio::test]
async fn ranks_have_views_of_their_own_over_nats() {
    let broker = Broker::start().await;
    let ranked = engine(|config| config.dp_size = 3).await;
    let _bridge = Bridge::start(&ranked, &broker.url());
    let mut setup = setup(&[&ranked], &broker.url());
    setup.workers = vec![format!("{{url: \"http://{}\", dpSize: 3}}", id(&ranked))];
    let router = Router::start(setup).await;
    chat_directly(&ranked, &long(1), Some(1)).await;
    router.agrees_with(&ranked).await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.target(), format!("{}#1", id(&ranked)));
    assert_eq!(chat.cached, chat.predicted());
}

/// Case C21.
#[tokio::test]
async fn a_router_that_starts_late_gets_what_is_cached() {
    let broker = Broker::start().await;
    let warm = engine(|_| {}).await;
    let cold = engine(|_| {}).await;
    let _bridges = [Bridge::start(&warm, &broker.url()), Bridge::start(&cold, &broker.url())];
    for number in 1..6 {
        chat_directly(&warm, &long(number), None).await;
    }
    let router = Router::start(setup(&[&warm, &cold], &broker.url())).await;
    // Ready means that the views are there: the very first pick knows.
    let chat = router.chat(&long(3), 1).await;
    assert_eq!(chat.worker(), id(&warm));
    assert!(chat.cached > 100);
    assert_eq!(chat.cached, chat.predicted());
    router.agrees_with(&warm).await;
    router.is_well().await;
}

/// Case K10: silence is a broken stream, and no traffic is not.
#[tokio::test]
async fn an_idle_view_is_worth_what_it_was_beyond_its_budget() {
    let budget = "freshness: {budgetSeconds: 3}";
    let broker = Broker::start().await;
    let (replayed, plain, bridged) = (engine(|_| {}).await, engine(|_| {}).await, engine(|_| {}).await);
    let mut bridge = Bridge::start(&bridged, &broker.url());
    let setups =
        [Setup::zmq(&[&replayed]), Setup::of(vec![entry(&plain, false)]), setup(&[&bridged], &broker.url())];
    let engines = [&replayed, &plain, &bridged];
    let mut routers = Vec::new();
    for (setup, engine) in setups.into_iter().zip(engines) {
        let router = Router::start(setup.more(budget)).await;
        router.chat(&long(1), 1).await;
        router.agrees_with(engine).await;
        routers.push(router);
    }
    tokio::time::sleep(Duration::from_secs(8)).await;
    for (router, engine) in routers.iter().zip(engines) {
        let rank = router.view(&id(engine)).await["ranks"][0].clone();
        assert_eq!((&rank["trust"], &rank["credited"]), (&json!("exact"), &json!(true)), "{rank}");
        router.is_well().await;
        let chat = router.chat(&long(1), 1).await;
        assert!(chat.cached > 100 && chat.cached == chat.predicted(), "{}", chat.receipt);
    }
    bridge.process.kill();
    let (router, name) = (&routers[2], id(&bridged));
    until("silence is named", async || router.has_problem("silence", Some(&name)).await.then_some(())).await;
    let spent = async || (router.view(&name).await["ranks"][0]["credited"] == false).then_some(());
    until("and spends the budget", spent).await;
}

/// Case G24: sessions are bound by each router for itself, and events lead their turns to
/// the same worker from whichever router they come through.
#[tokio::test]
async fn sessions_stay_on_their_worker_behind_several_routers() {
    let broker = Broker::start().await;
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(engine(|_| {}).await);
    }
    let engines: Vec<&EngineSim> = engines.iter().collect();
    let _bridges: Vec<Bridge> = engines.iter().map(|engine| Bridge::start(engine, &broker.url())).collect();
    let mut routers = Vec::new();
    for _ in 0..3 {
        let setup = setup(&engines, &broker.url()).more("sessionAffinity: {mode: Both}");
        routers.push(Router::start(setup).await);
    }
    let (routers, turns) = (&routers, 5);
    let session = async |session: u32| {
        let name = format!("session-{session}");
        let mut messages = vec![json!({"role": "system", "content": text(session, 60)})];
        let mut homes = Vec::new();
        for turn in 0..turns {
            messages.push(json!({"role": "user", "content": text(session * 100 + turn, 10)}));
            let (router, request) = (&routers[(session + turn) as usize % routers.len()], unique());
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 8}).to_string();
            let headers = [("x-request-id", &*request), ("x-session-id", &name)];
            let answer = router.send("/v1/chat/completions", &headers, body).await.json().unwrap();
            messages.push(answer["choices"][0]["message"].clone());
            homes.push(router.receipts(&request).await[0]["chosen"]["target"].clone());
            // A user reads before the next question.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        homes.iter().skip(1).filter(|home| **home == homes[0]).count() as u32
    };
    let (sessions, mut stayed) = (60, 0);
    for number in 0..sessions / 20 {
        stayed +=
            futures::future::join_all((0..20).map(|at| session(number * 20 + at))).await.iter().sum::<u32>();
    }
    let later = sessions * (turns - 1);
    assert!(stayed * 100 >= later * 99, "{stayed} of {later} later turns on the worker of the first");
}

/// The broker dies and comes back: requests go on, the report says so, views recover.
#[tokio::test]
async fn a_broker_that_dies_is_named_and_recovered_from() {
    let mut broker = Broker::start().await;
    let only = engine(|_| {}).await;
    let _bridge = Bridge::start(&only, &broker.url());
    let router = Router::start(setup(&[&only], &broker.url())).await;
    router.chat(&long(1), 2).await;
    router.agrees_with(&only).await;
    broker.kill();
    until("the report says so", async || router.has_problem("broker_disconnected", None).await.then_some(()))
        .await;
    // Its events are lost on the way.
    router.chat(&long(2), 2).await;
    router.chat(&long(3), 2).await;
    broker.restart().await;
    router.agrees_with(&only).await;
    router.is_well().await;
    let chat = router.chat(&long(3), 1).await;
    assert!(chat.cached > 100);
    assert_eq!(chat.cached, chat.predicted());
}

/// No broker at all when the router starts: it serves by history and load, and says so. Case C22.
#[tokio::test]
async fn a_router_without_a_broker_serves_by_history() {
    let (a, b) = (engine(|_| {}).await, engine(|_| {}).await);
    let mut broker = Broker::start().await;
    broker.kill();
    // It calls itself ready only after a while, but it serves whoever asks.
    let router = Router::start_cold(setup(&[&a, &b], &broker.url())).await;
    until("both workers are ready", async || {
        (router.metric("kvrouter_worker_ready", "\"ok\"").await == 2.0).then_some(())
    })
    .await;
    assert!(router.has_problem("broker_disconnected", None).await);
    // It says how many views it waits for, and not for ever.
    until("it says what it waits for", async || {
        let answer = router.get("/readyz").await;
        assert_eq!(answer.status, 503, "{}", answer.text());
        (answer.text() == "views_pending 0/2").then_some(())
    })
    .await;
    until("it gives up waiting", async || (router.get("/readyz").await.status == 200).then_some(())).await;
    let report = router.report().await;
    assert_eq!((&report["ready"], &report["readyReason"]), (&json!(true), &json!("views_pending")));
    let first = router.chat(&long(1), 2).await;
    let second = router.chat(&long(1), 2).await;
    assert_eq!(second.worker(), first.worker());
    assert_eq!(second.receipt["outcome"], "approximate");
    // The broker comes, and with it the views.
    broker.restart().await;
    let _bridges = [Bridge::start(&a, &broker.url()), Bridge::start(&b, &broker.url())];
    router.agrees_with(&a).await;
    router.agrees_with(&b).await;
    router.is_well().await;
    let third = router.chat(&long(1), 2).await;
    assert_eq!((third.worker(), &third.receipt["outcome"]), (first.worker(), &json!("hit")));
}

async fn epoch(router: &Router, engine: &EngineSim) -> u64 {
    router.view(&id(engine)).await["ranks"][0]["epoch"].as_u64().unwrap()
}

/// A bridge that restarts beside an engine that did not goes on in the same life.
#[tokio::test]
async fn a_restarted_bridge_keeps_the_engines_life() {
    let broker = Broker::start().await;
    let only = engine(|_| {}).await;
    let mut bridge = Bridge::start(&only, &broker.url());
    let router = Router::start(setup(&[&only], &broker.url())).await;
    router.chat(&long(1), 2).await;
    router.agrees_with(&only).await;
    let before = epoch(&router, &only).await;
    // With a heartbeat the bridge notes how far it is.
    let heartbeats = async || router.metric("kvrouter_event_messages_total", "\"heartbeat\"").await;
    let count = heartbeats().await;
    until("two more heartbeats", async || (heartbeats().await >= count + 2.0).then_some(())).await;
    bridge.restart();
    router.chat(&long(2), 2).await;
    router.agrees_with(&only).await;
    let after = epoch(&router, &only).await;
    assert_eq!(before, after, "{}", bridge.process.output());
    for number in [1, 2] {
        let chat = router.chat(&long(number), 1).await;
        assert!(chat.cached > 100);
        assert_eq!(chat.cached, chat.predicted());
    }
}

/// The engine restarts while its bridge is away: a new life, and no hit of the old one.
#[tokio::test]
async fn an_engine_that_restarts_behind_its_bridge_is_a_new_life() {
    let broker = Broker::start().await;
    let only = engine(|_| {}).await;
    let mut bridge = Bridge::start(&only, &broker.url());
    let router = Router::start(setup(&[&only], &broker.url()).events_only()).await;
    for number in 1..4 {
        router.chat(&long(number), 2).await;
    }
    router.agrees_with(&only).await;
    let before = epoch(&router, &only).await;
    bridge.process.kill();
    fault(&only, json!({"restart": true})).await;
    until("the engine is back", async || (crate::harness::total(&only, "epoch").await == 1).then_some(()))
        .await;
    chat_directly(&only, &long(9), None).await;
    bridge.restart();
    router.agrees_with(&only).await;
    assert!(epoch(&router, &only).await > before, "{}", bridge.process.output());
    let chat = router.chat(&long(1), 1).await;
    assert!(chat.cached < 64, "all but the shared beginning is lost: {}", chat.cached);
    assert_eq!(chat.cached, chat.predicted());
    let chat = router.chat(&long(9), 1).await;
    assert!(chat.cached > 100);
    assert_eq!(chat.cached, chat.predicted());
}

/// A bridge of another model is named, and its view earns nothing.
#[tokio::test]
async fn a_bridge_of_another_domain_is_named_and_earns_nothing() {
    let broker = Broker::start().await;
    let only = engine(|_| {}).await;
    let mut bridge = Bridge::start(&only, &broker.url());
    let model = bridge.arguments.iter().position(|argument| argument == MODEL).unwrap();
    bridge.arguments[model] = "other".to_owned();
    bridge.restart();
    // With the right bridge gone the router hears of one domain only.
    let router =
        Router::start(setup(&[&only], &broker.url()).more("freshness: {fallback: Load}").events_only()).await;
    until("the report names it", async || {
        router.has_problem("domain_mismatch", Some(&id(&only))).await.then_some(())
    })
    .await;
    router.chat(&long(1), 1).await;
    let chat = router.chat(&long(1), 1).await;
    assert!(chat.cached > 100, "the engine has it");
    assert_eq!(chat.predicted(), 0, "and we claim nothing");
}

/// Garbage on every subject is counted with its reason, and nothing ends.
#[tokio::test]
async fn garbage_on_nats_is_counted_and_survived() {
    let broker = Broker::start().await;
    let only = engine(|_| {}).await;
    let mut bridge = Bridge::start(&only, &broker.url());
    let mut router = Router::start(setup(&[&only], &broker.url())).await;
    router.chat(&long(1), 2).await;
    router.agrees_with(&only).await;
    let spy = async_nats::connect(broker.url()).await.unwrap();
    let mut seen = spy.subscribe("kvrouter.default.demo.events.>").await.unwrap();
    spy.flush().await.unwrap();
    let real = futures_next(&mut seen).await;
    let stem = real.subject.rsplit_once('.').unwrap().0.to_owned();
    let mut sent = 0;
    let garbage: [&[u8]; 6] = [b"", b"\xc1", b"\x97", &[0xdd, 0xff, 0xff, 0xff, 0xff], b"{}", &[0xff; 5000]];
    for payload in garbage.iter().copied().chain((0..real.payload.len()).map(|end| &real.payload[..end])) {
        for subject in
            [format!("{stem}.0"), format!("{stem}.7"), "kvrouter.default.demo.events.!.x".to_owned()]
        {
            spy.publish(subject, payload.to_vec().into()).await.unwrap();
            sent += 1;
        }
        let ask = stem.replace(".events.", ".snapshot.") + ".0";
        spy.publish(ask, payload.to_vec().into()).await.unwrap();
    }
    spy.flush().await.unwrap();
    let counted = async |result: &str| router.metric("kvrouter_event_messages_total", result).await;
    until("all of it is counted", async || {
        let known = counted("\"applied\"").await + counted("\"heartbeat\"").await;
        (counted("").await - known >= f64::from(sent)).then_some(())
    })
    .await;
    assert_eq!(counted("\"unknown_source\"").await, f64::from(sent) / 3.0 * 2.0);
    router.chat(&long(2), 2).await;
    router.agrees_with(&only).await;
    let chat = router.chat(&long(1), 1).await;
    assert_eq!(chat.cached, chat.predicted());
    for process in [&mut router.process, &mut bridge.process] {
        assert!(process.is_running(), "{}", process.output());
    }
}

async fn futures_next(subscriber: &mut async_nats::Subscriber) -> async_nats::Message {
    use futures::StreamExt;
    subscriber.next().await.unwrap()
}
