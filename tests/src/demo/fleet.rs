//! The programs of one run: four engine-sims, one router, and with NATS one bridge per engine.
//!
//! All listen on free ports of loopback, log to files, and end when the fleet is dropped.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use kvrouter_crds::config::RouterConfig;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::drive::{body, chats};
use super::manifests::{self, Settings};
use super::results::Policy;
use crate::client::Client;
use crate::process::{EngineAddresses, Process, RouterAddresses, nats_command, sibling};

/// Engines of a fleet.
pub const ENGINES: usize = 4;
/// The model's name, as the manifests say it.
pub const MODEL: &str = "sim-model";
/// Tokens per page of an engine, and per block of the router.
pub const PAGE_TOKENS: u32 = 16;
/// Pages of an engine's cache: the fleet holds all conversations that go on at a time with room to
/// spare, a single engine does not.
pub const PAGES: u32 = 1_000;
/// Prefill speed of an engine: a model of 7 to 8 billion parameters on a mid-sized GPU.
pub const PREFILL_TOKENS_PER_SECOND: u64 = 8_000;
/// Fixed time of an engine's step, and what each decoding request adds to it.
const STEP_MS: &str = "6";
const DECODE_REQUEST_MS: &str = "0.1";
/// Most prefill tokens in one step, vLLM's own default.
const CHUNK_TOKENS: &str = "2048";
/// How long the router may take to see all engines' caches.
const READY: Duration = Duration::from_secs(60);
/// Folder of the tokenizer that engines and router use.
pub const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tokenizer");

/// How cache events travel.
#[derive(Clone, Debug)]
pub enum Events {
    /// From the engines straight to the router.
    Zmq,
    /// Through bridges and the server at this URL.
    Nats(String),
}

/// A running nats-server.
#[derive(Debug)]
pub struct Nats {
    /// `nats://host:port`.
    pub url: String,
    _process: Process,
}

/// Running engines, all alike.
#[derive(Debug)]
pub struct Engines {
    /// Where each listens.
    pub addresses: Vec<EngineAddresses>,
    _processes: Vec<Process>,
}

/// A running kv-router.
#[derive(Debug)]
pub struct Router {
    /// Where it listens.
    pub addresses: RouterAddresses,
    /// The program.
    pub process: Process,
}

/// Engines, bridges and a router.
#[derive(Debug)]
pub struct Fleet {
    // The router first: it goes before what it talks to.
    router: Router,
    _bridges: Vec<Process>,
    engines: Engines,
}

impl Nats {
    /// Starts `program` on a free port.
    pub async fn start(program: &Path, logs: &Path) -> anyhow::Result<Self> {
        let mut command = nats_command(program, None);
        let mut process = Process::start("nats-server", &mut command, &logs.join("nats-server.log"))?;
        let address = process.nats_address().await?;
        Ok(Self { url: format!("nats://{address}"), _process: process })
    }
}

impl Engines {
    /// Starts [`ENGINES`] of them, with `flags` over the demo's; logs are named `LABEL-engine-N.log`.
    pub async fn start(label: &str, flags: &[&str], logs: &Path) -> anyhow::Result<Self> {
        let program = sibling("engine-sim")?;
        let start = |number: usize| {
            let log = logs.join(format!("{label}-engine-{number}.log"));
            start_engine(&program, number, flags, &log)
        };
        let mut processes = (1..=ENGINES).map(start).collect::<anyhow::Result<Vec<Process>>>()?;
        let mut addresses = Vec::new();
        for process in &mut processes {
            addresses.push(process.engine_addresses().await?);
        }
        Ok(Self { addresses, _processes: processes })
    }

    /// Requests that each received, in their order.
    pub async fn requests(&self, client: &Client) -> anyhow::Result<Vec<u64>> {
        let mut counts = Vec::new();
        for engine in &self.addresses {
            let state = client.get(&format!("http://{}/sim/state", engine.http)).await?.json()?;
            let count = state.pointer("/ranks/0/requests_total").and_then(Value::as_u64);
            counts.push(count.context("an engine's state has no count of requests")?);
        }
        Ok(counts)
    }
}

impl Router {
    /// Starts one in front of `engines` and waits until it is ready.
    pub async fn start(
        settings: &Settings,
        policy: Policy,
        events: &Events,
        engines: &Engines,
        logs: &Path,
    ) -> anyhow::Result<Self> {
        let (label, policy) = (policy.label(), policy.in_files());
        let files = settings.clone().write(policy, events, &engines.addresses, logs, label)?;
        let mut command = Command::new(sibling("kv-router")?);
        command.args(["serve", "--config"]).arg(&files.start).arg("--live-config").arg(&files.live);
        let log = logs.join(format!("{label}-router.log"));
        let mut process = Process::start("kv-router", &mut command, &log)?;
        let router = Self { addresses: process.router_addresses().await?, process };
        router.wait_until_ready().await?;
        Ok(router)
    }

    async fn wait_until_ready(&self) -> anyhow::Result<()> {
        let client = Client::new();
        let url = format!("http://{}/readyz", self.addresses.http);
        let deadline = Instant::now() + READY;
        loop {
            let answer = client.get(&url).await?;
            if answer.status == 200 {
                return Ok(());
            }
            if Instant::now() > deadline {
                let report = client.get(&format!("http://{}/health/report", self.addresses.metrics)).await?;
                bail!("the router does not get ready ({}); it says: {}", answer.text(), report.text());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Fleet {
    /// Starts everything and waits until the router is ready.
    pub async fn start(policy: Policy, events: &Events, logs: &Path) -> anyhow::Result<Self> {
        let (settings, label) = (manifests::render()?, policy.label());
        let engines = Engines::start(label, &[], logs).await?;
        let program = sibling("kv-router")?;
        let mut bridges = Vec::new();
        if let Events::Nats(url) = events {
            for (number, engine) in (1..).zip(&engines.addresses) {
                let log = logs.join(format!("{label}-bridge-{number}.log"));
                bridges.push(start_bridge(&program, number, engine, url, &settings.start, &log)?);
            }
        }
        let router = Router::start(&settings, policy, events, &engines, logs).await?;
        Ok(Self { router, _bridges: bridges, engines })
    }

    /// Where the router takes chats.
    pub fn url(&self) -> String {
        chats(&self.router.addresses.http)
    }

    /// The engines.
    pub const fn engines(&self) -> &Engines {
        &self.engines
    }

    /// One line for people: who listens where.
    pub fn addresses(&self) -> String {
        let engines: Vec<&str> = self.engines.addresses.iter().map(|engine| engine.http.as_str()).collect();
        format!("router {}, engines {}", self.router.addresses.http, short(&engines))
    }

    /// The router's log.
    pub fn router_log(&self) -> &Path {
        &self.router.process.log
    }

    /// Requests for a shell, each with a word on what it shows.
    pub fn things_to_try(&self) -> String {
        let RouterAddresses { http, metrics, admin } = &self.router.addresses;
        let worker = self.engines.addresses.first().map_or("", |engine| engine.http.as_str());
        let messages = [json!({"role": "user", "content": "What is a prefix cache?"})];
        let body = body(&messages, 24);
        format!(
            "\nThe router at http://{http} goes on until Ctrl-C. Things to try in another shell:\n
  # a chat; send it twice, and the second answer's usage has cached_tokens
  curl -N http://{http}/v1/chat/completions -H 'Content-Type: application/json' -H 'X-Request-Id: mine-1' -d '{body}'\n
  # why it went where it went: every candidate, its hits, its load, its cost
  curl -s 'http://{admin}/v1/admin/receipts?request_id=mine-1'\n
  # where it would go now, without sending it
  curl -s http://{admin}/v1/admin/explain -d '{body}'\n
  # what the router believes one engine holds, and what that engine says
  curl -s http://{admin}/v1/admin/cache-view/{worker}
  curl -s http://{worker}/sim/state\n
  # what is wrong, if anything, and what is counted
  curl -s http://{metrics}/health/report
  curl -s http://{metrics}/metrics\n
  # make an engine restart in place, then look at the cache view and the report again
  curl -s http://{worker}/sim/fault -d '{{\"restart\": true}}'\n"
        )
    }
}

fn start_engine(program: &Path, number: usize, flags: &[&str], log: &Path) -> anyhow::Result<Process> {
    let mut command = Command::new(program);
    command
        .args(["--wire", "vllm-0.33", "--model", MODEL, "--tokenizer", TOKENIZER])
        .args(["--page-size", &PAGE_TOKENS.to_string(), "--num-pages", &PAGES.to_string()])
        .args(["--prefill-tokens-per-second", &PREFILL_TOKENS_PER_SECOND.to_string()])
        .args(["--step-ms", STEP_MS, "--decode-request-ms", DECODE_REQUEST_MS])
        .args(["--chunk-tokens", CHUNK_TOKENS])
        .args(flags);
    Process::start(&format!("engine-sim {number}"), &mut command, log)
}

fn start_bridge(
    program: &Path,
    number: usize,
    engine: &EngineAddresses,
    nats_url: &str,
    config: &RouterConfig,
    log: &Path,
) -> anyhow::Result<Process> {
    let mut command = Command::new(program);
    command
        .args(["bridge", "--worker", &engine.http])
        .args(["--kv-events", &engine.kv_events, "--kv-replay", &engine.replay])
        .args(["--nats-url", nats_url, "--model", MODEL])
        .args(["--namespace", &config.pool.namespace, "--pool", &config.pool.name])
        .args(["--block-size", &PAGE_TOKENS.to_string(), "--dp-size", "1"])
        .args(["--listen-metrics", "127.0.0.1:0"]);
    Process::start(&format!("bridge {number}"), &mut command, log)
}

/// Addresses of one host as `host:port :port …`.
fn short(addresses: &[&str]) -> String {
    let mut host = None;
    let short = addresses.iter().map(|address| match address.rsplit_once(':') {
        Some((same, port)) if host == Some(same) => format!(":{port}"),
        Some((new, _)) => {
            host = Some(new);
            (*address).to_owned()
        }
        None => (*address).to_owned(),
    });
    short.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_said_once() {
        assert_eq!(short(&["127.0.0.1:1", "127.0.0.1:22", "::1:3"]), "127.0.0.1:1 :22 ::1:3");
    }
}
