//! What the tests share: engines, a router as a child process, and how to ask both.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use engine_sim::{Config, EngineSim};
use http::Method;
use kvrouter_tests::client::{Answer, Client};
use kvrouter_tests::process::{Process, RouterAddresses, sibling};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// The model that all engines and routers here serve.
pub(crate) const MODEL: &str = "tiny";
/// Folder of the tokenizer that engines and routers use.
pub(crate) const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tokenizer");
/// How long anything may take on a busy machine before a test gives up.
const DEADLINE: Duration = Duration::from_secs(20);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(10);

/// Asks until there is an answer.
#[track_caller]
pub(crate) fn until<T, Asked: Future<Output = Option<T>>>(
    what: &str,
    ask: impl FnMut() -> Asked,
) -> impl Future<Output = T> {
    within(DEADLINE, what, ask)
}

/// The same, where being in time is the point.
#[track_caller]
pub(crate) fn within<T, Asked: Future<Output = Option<T>>>(
    limit: Duration,
    what: &str,
    mut ask: impl FnMut() -> Asked,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            assert!(Instant::now() < deadline, "{caller}: never happened: {what}");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// An engine as the defaults have it, but for `change`.
pub(crate) async fn engine(change: impl FnOnce(&mut Config)) -> EngineSim {
    let mut config =
        Config { model: MODEL.to_owned(), tokenizer: Some(TOKENIZER.into()), ..Config::default() };
    change(&mut config);
    EngineSim::start(config).await.unwrap()
}

/// What routers know an engine as.
pub(crate) fn id(engine: &EngineSim) -> String {
    engine.http_addr().to_string()
}

/// One entry of `discovery.workers`, with events over ZMQ.
pub(crate) fn worker(engine: &EngineSim) -> String {
    entry(engine, true)
}

/// The same with or without a replay socket.
pub(crate) fn entry(engine: &EngineSim, replay: bool) -> String {
    let ranks = engine.kv_event_endpoints();
    let mut events = format!("endpoint: \"{}\"", ranks[0]);
    if replay {
        events.push_str(&format!(", replayEndpoint: \"{}\"", engine.replay_endpoints()[0]));
    }
    let (url, size) = (engine.http_addr(), ranks.len());
    format!("{{url: \"http://{url}\", dpSize: {size}, kvEvents: {{{events}}}}}")
}

/// An entry without events of its own.
pub(crate) fn bare(address: &str) -> String {
    format!("{{url: \"http://{address}\"}}")
}

/// What a router is started with.
pub(crate) struct Setup {
    pub(crate) workers: Vec<String>,
    pub(crate) policy: &'static str,
    /// The value of `kvEvents`.
    pub(crate) events: String,
    /// More lines of the file.
    pub(crate) more: String,
    /// The value of `discovery`, where it is not the list of workers.
    pub(crate) discovery: Option<String>,
    /// Content of the file that `KUBECONFIG` names.
    pub(crate) kubeconfig: Option<String>,
    /// More flags.
    pub(crate) flags: Vec<String>,
    /// Folder of the tokenizer.
    pub(crate) tokenizer: std::path::PathBuf,
}

impl Setup {
    /// Events over ZMQ, the default policy.
    pub(crate) fn zmq(engines: &[&EngineSim]) -> Self {
        Self::of(engines.iter().map(|engine| worker(engine)).collect())
    }

    pub(crate) fn of(workers: Vec<String>) -> Self {
        Self {
            workers,
            policy: "CachePlusLoad",
            events: "{transport: ZMQ}".to_owned(),
            more: String::new(),
            discovery: None,
            kubeconfig: None,
            flags: Vec::new(),
            tokenizer: TOKENIZER.into(),
        }
    }

    /// No events: workers in turn.
    pub(crate) fn in_turn(addresses: &[&str]) -> Self {
        let workers = addresses.iter().map(|address| bare(address)).collect();
        Self { policy: "RoundRobin", events: "{transport: None}".to_owned(), ..Self::of(workers) }
    }

    pub(crate) fn policy(self, policy: &'static str) -> Self {
        Self { policy, ..self }
    }

    /// Only events make hits: what a view is worth, without the guess about prompts in flight.
    pub(crate) fn events_only(self) -> Self {
        self.more("inFlightCredit: Disabled")
    }

    pub(crate) fn tokenizer(self, folder: &Path) -> Self {
        Self { tokenizer: folder.to_owned(), ..self }
    }

    pub(crate) fn more(self, more: &str) -> Self {
        Self { more: format!("{}{more}\n", self.more), ..self }
    }

    fn file(&self) -> String {
        let workers: String = self.workers.iter().map(|worker| format!("\n    - {worker}")).collect();
        let workers = if workers.is_empty() { " []" } else { &workers };
        let listed = format!("\n  backend: Static\n  workers:{workers}");
        let discovery = self.discovery.as_ref().unwrap_or(&listed);
        let tokenizer = &self.tokenizer;
        format!(
            "schemaVersion: 1
pool: {{name: demo}}
model: {{name: {MODEL}, tokenizer: {{path: {tokenizer:?}}}}}
blockSize: 16
policy: {}
listen: {{http: \"127.0.0.1:0\", metrics: \"127.0.0.1:0\", admin: \"127.0.0.1:0\"}}
discovery: {discovery}
kvEvents: {}
{}",
            self.policy, self.events, self.more
        )
    }
}

/// A running `kv-router serve`. Its log is part of every failure.
pub(crate) struct Router {
    pub(crate) at: RouterAddresses,
    pub(crate) client: Client,
    pub(crate) process: Process,
    folder: TempDir,
}

impl Router {
    /// Starts a router and waits until it is ready.
    pub(crate) async fn start(setup: Setup) -> Self {
        let router = Self::start_cold(setup).await;
        until("the router is ready", async || (router.get("/readyz").await.status == 200).then_some(()))
            .await;
        router
    }

    /// Starts a router and waits until it listens.
    pub(crate) async fn start_cold(setup: Setup) -> Self {
        let (folder, mut process) = spawn_with(&setup.file(), |command, folder| {
            command.args(&setup.flags);
            if let Some(text) = &setup.kubeconfig {
                let path = folder.join("kubeconfig");
                std::fs::write(&path, text).unwrap();
                command.env("KUBECONFIG", path);
            }
        });
        let at = process.router_addresses().await.unwrap();
        Self { at, client: Client::new(), process, folder }
    }

    /// A connection to it, and nothing sent yet.
    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.at.http).await.unwrap()
    }

    /// The file that it was started with.
    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("router.yaml")
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.client.get(&format!("http://{}{path}", self.at.http)).await.unwrap()
    }

    pub(crate) async fn send(&self, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        self.client.send(Method::POST, &self.url(path), headers, body.into()).await.unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(path, &[("content-type", "application/json")], body.to_string()).await
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.at.http)
    }

    /// A whole chat; its answer, which must be good, and the receipt of its only attempt.
    pub(crate) async fn chat(&self, messages: &Value, max_tokens: u32) -> Chat {
        let id = unique();
        let body = json!({"model": MODEL, "messages": messages, "max_tokens": max_tokens});
        let answer = self.send("/v1/chat/completions", &[("x-request-id", &id)], body.to_string()).await;
        assert_eq!(answer.status, 200, "{}\n{}", answer.text(), self.process.output());
        let body = answer.json().unwrap();
        let receipts = self.receipts(&id).await;
        assert_eq!(receipts.len(), 1, "one attempt: {receipts:?}");
        Chat {
            text: body["choices"][0]["message"]["content"].as_str().unwrap().to_owned(),
            cached: body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
            receipt: receipts[0].clone(),
        }
    }

    /// Receipts of one request, the latest first, once all have their result.
    pub(crate) async fn receipts(&self, id: &str) -> Vec<Value> {
        let url = format!("http://{}/v1/admin/receipts?request_id={id}", self.at.admin);
        until("receipts are complete", async || {
            let all = self.client.get(&url).await.unwrap().json().unwrap();
            let all = all["receipts"].as_array().unwrap().clone();
            all.iter().all(|receipt| receipt["result"].is_object()).then_some(all)
        })
        .await
    }

    pub(crate) async fn report(&self) -> Value {
        self.client.get(&format!("http://{}/health/report", self.at.metrics)).await.unwrap().json().unwrap()
    }

    /// Whether the report names this problem, of this worker if one is given.
    pub(crate) async fn has_problem(&self, reason: &str, worker: Option<&str>) -> bool {
        let report = self.report().await;
        let is = |problem: &Value| {
            problem["reason"] == reason && worker.is_none_or(|worker| problem["worker"] == worker)
        };
        report["problems"].as_array().unwrap().iter().any(is)
    }

    /// Waits until the report is without problems.
    pub(crate) async fn is_well(&self) {
        let well = async || self.report().await["problems"].as_array().unwrap().is_empty().then_some(());
        until("the report has no problems", well).await;
    }

    /// Sum of all samples of a metric whose labels contain `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &str) -> f64 {
        let text = self.client.get(&format!("http://{}/metrics", self.at.metrics)).await.unwrap().text();
        let sample = |line: &str| {
            let rest = line.strip_prefix(name)?;
            let (found, value) = rest.rsplit_once(' ')?;
            let is_sample = found.is_empty() || found.starts_with('{');
            (is_sample && found.contains(labels)).then(|| value.parse::<f64>().unwrap())
        };
        text.lines().filter_map(sample).sum()
    }

    /// Nothing is booked that was not released.
    pub(crate) async fn is_idle(&self) {
        until("all bookings are released", async || {
            let booked = self.metric("kvrouter_leases_booked", "").await;
            let released = self.metric("kvrouter_leases_released", "").await;
            let left = self.metric("kvrouter_target_requests", "").await
                + self.metric("kvrouter_target_active_blocks", "").await
                + self.metric("kvrouter_target_queued_tokens", "").await;
            (booked == released && left == 0.0).then_some(())
        })
        .await;
    }

    pub(crate) async fn view(&self, worker: &str) -> Value {
        let url = format!("http://{}/v1/admin/cache-view/{worker}", self.at.admin);
        self.client.get(&url).await.unwrap().json().unwrap()
    }

    /// Waits until the view holds as many blocks as the engine has pages, of the same size.
    pub(crate) async fn agrees_with(&self, engine: &EngineSim) -> u64 {
        let worker = id(engine);
        until("view and engine agree", async || {
            let pages: u64 =
                ranks(engine).await.iter().map(|rank| rank["cached_pages"].as_u64().unwrap()).sum();
            let view = self.view(&worker).await;
            let settled = view["ranks"].as_array().unwrap().iter().all(|rank| rank["credited"] == true);
            (view["block_count"] == pages && settled).then_some(pages)
        })
        .await
    }
}

/// What came of a chat.
pub(crate) struct Chat {
    pub(crate) text: String,
    /// Cached tokens as the engine reports them.
    pub(crate) cached: u64,
    pub(crate) receipt: Value,
}

impl Chat {
    pub(crate) fn worker(&self) -> &str {
        self.target().split_once('#').unwrap().0
    }

    /// Worker and rank, `host:port#rank`.
    pub(crate) fn target(&self) -> &str {
        self.receipt["chosen"]["target"].as_str().unwrap()
    }

    pub(crate) fn predicted(&self) -> u64 {
        self.receipt["predicted_hit_tokens"].as_u64().unwrap()
    }
}

/// `kv-router serve` with this file, and the folder that holds it.
pub(crate) fn spawn(file: &str) -> (TempDir, Process) {
    spawn_with(file, |_, _| {})
}

fn spawn_with(file: &str, change: impl FnOnce(&mut Command, &Path)) -> (TempDir, Process) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("router.yaml");
    std::fs::write(&path, file).unwrap();
    let mut command = Command::new(sibling("kv-router").unwrap());
    command.args(["serve", "--config"]).arg(&path);
    change(&mut command, folder.path());
    let process = Process::start("kv-router", &mut command, &folder.path().join("router.log")).unwrap();
    (folder, process)
}

/// A request id that no other test has.
pub(crate) fn unique() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// All that `/sim/state` says.
pub(crate) async fn state(engine: &EngineSim) -> Value {
    Client::new().get(&format!("http://{}/sim/state", engine.http_addr())).await.unwrap().json().unwrap()
}

pub(crate) async fn ranks(engine: &EngineSim) -> Vec<Value> {
    state(engine).await["ranks"].as_array().unwrap().clone()
}

/// Sum of one count over the ranks of an engine.
pub(crate) async fn total(engine: &EngineSim, count: &str) -> u64 {
    ranks(engine).await.iter().map(|rank| rank[count].as_u64().unwrap()).sum()
}

/// The inference requests that an engine remembers.
pub(crate) async fn received(engine: &EngineSim) -> Vec<Value> {
    state(engine).await["requests"].as_array().unwrap().clone()
}

pub(crate) async fn fault(engine: &EngineSim, fault: Value) {
    let url = format!("http://{}/sim/fault", engine.http_addr());
    let answer = Client::new().post(&url, &fault).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// A chat that goes to an engine past any router, to rank `rank` where one is given.
pub(crate) async fn chat_directly(engine: &EngineSim, messages: &Value, rank: Option<u32>) {
    let url = format!("http://{}/v1/chat/completions", engine.http_addr());
    let body = json!({"model": MODEL, "messages": messages, "max_tokens": 2});
    let rank = rank.map(|rank| rank.to_string());
    let headers: Vec<(&str, &str)> =
        rank.iter().map(|rank| ("x-data-parallel-rank", rank.as_str())).collect();
    let answer = Client::new().send(Method::POST, &url, &headers, body.to_string().into()).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// The head of a POST with a body of so many bytes.
pub(crate) fn head(path: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
}

/// The most memory that a process has had.
pub(crate) fn peak_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// SHA-256 as the simulated engine prints it.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One user message of some hundred tokens; equal numbers give equal text.
pub(crate) fn long(number: u32) -> Value {
    json!([{"role": "user", "content": text(number, 60)}])
}

/// So many words; texts of two numbers differ from their first word on.
pub(crate) fn text(number: u32, words: u32) -> String {
    let words = (0..words).map(|at| format!("{} of {}", number * 1000 + at, at * 7));
    words.collect::<Vec<_>>().join(" ")
}

/// What a receipt lists of several prompts is what it says of all of them.
pub(crate) fn prompts_add_up(receipt: &Value) {
    let all = receipt["prompts"].as_array().unwrap();
    let sum = |path: &str| all.iter().map(|one| one.pointer(path).unwrap().as_u64().unwrap()).sum::<u64>();
    assert!(all.len() > 1, "{receipt}");
    assert_eq!(receipt["prompt_tokens"], sum("/tokens"), "{receipt}");
    assert!(receipt["prompt_blocks"].as_u64().unwrap() <= sum("/blocks"), "{receipt}");
    let candidates = receipt["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|one| one["target"] == receipt["chosen"]["target"]);
    for tier in ["device", "host", "disk"] {
        let claimed = chosen.map_or(0, |one| one["claimed"][tier].as_u64().unwrap());
        assert_eq!(sum(&format!("/claimed/{tier}")), claimed, "{receipt}");
    }
}
