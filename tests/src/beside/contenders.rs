//! The routers that are compared, and how each is started.
//!
//! Each has its own defaults; what is set is where workers are, and for those that read KV events
//! where these come from.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;
use tokio::time::Instant;

use crate::client::Client;
use crate::demo::drive::{body, chats};
use crate::demo::fleet::{Engines, Events, MODEL, PAGE_TOKENS, Router};
use crate::demo::manifests;
use crate::demo::results::Policy;
use crate::process::Process;

/// How long a router may take until it answers.
const READY: Duration = Duration::from_secs(60);

/// A router with a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// kv-router with its default policy, told by KV events.
    KvRouter,
    /// SGLang's router: remembers by text what it sent where.
    SglangRouter,
    /// What calls itself SGLang Model Gateway, as that one does: the same way.
    Smg,
    /// vLLM's router, the same way.
    VllmCacheAware,
    /// vLLM's router, told by KV events.
    VllmKvAware,
}

/// A running router.
#[derive(Debug)]
pub struct Running {
    /// Where it takes chats.
    pub url: String,
    /// The program.
    pub process: Process,
}

impl Contender {
    /// All; ours first.
    pub const ALL: [Self; 5] =
        [Self::KvRouter, Self::SglangRouter, Self::Smg, Self::VllmCacheAware, Self::VllmKvAware];

    /// Those that conversations are led through: one of each way to know what is cached.
    pub const DISTINCT: [Self; 3] = [Self::KvRouter, Self::Smg, Self::VllmKvAware];

    /// Its name in tables and logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::KvRouter => "kv-router",
            Self::SglangRouter => "sglang-router",
            Self::Smg => "smg",
            Self::VllmCacheAware => "vllm-router-cache-aware",
            Self::VllmKvAware => "vllm-router-kv-aware",
        }
    }

    /// Starts it in front of `engines` and waits until it answers.
    pub async fn start(self, programs: &Path, engines: &Engines, logs: &Path) -> anyhow::Result<Running> {
        let running = match self {
            Self::KvRouter => {
                let settings = manifests::render()?;
                let policy = Policy::CachePlusLoad;
                let router = Router::start(&settings, policy, &Events::Zmq, engines, logs).await?;
                Running { url: chats(&router.addresses.http), process: router.process }
            }
            Self::SglangRouter => self.start_peer(programs, "sglang-router", "cache_aware", engines, logs)?,
            Self::Smg => self.start_peer(programs, "smg", "cache_aware", engines, logs)?,
            Self::VllmCacheAware => self.start_peer(programs, "vllm-router", "cache_aware", engines, logs)?,
            Self::VllmKvAware => self.start_peer(programs, "vllm-router", "kv_aware", engines, logs)?,
        };
        running.wait_until_it_answers().await?;
        Ok(running)
    }

    fn start_peer(
        self,
        programs: &Path,
        program: &str,
        policy: &str,
        engines: &Engines,
        logs: &Path,
    ) -> anyhow::Result<Running> {
        let mut command = Command::new(programs.join(program));
        if program != "vllm-router" {
            command.arg("launch");
        }
        let (port, metrics) = (free_port()?, free_port()?);
        command
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.to_string()])
            .args(["--policy", policy, "--worker-urls"])
            .args(engines.addresses.iter().map(|engine| format!("http://{}", engine.http)));
        if policy == "kv_aware" {
            command.args(["--kv-event-block-size", &PAGE_TOKENS.to_string(), "--kv-event-model", MODEL]);
            for engine in &engines.addresses {
                let of = |socket: &str| format!("http://{}={socket}", engine.http);
                command.args(["--kv-event-source", &of(&engine.kv_events)]);
                command.args(["--kv-event-replay-source", &of(&engine.replay)]);
            }
        }
        let log = logs.join(format!("{}-router.log", self.label()));
        let process = Process::start(self.label(), &mut command, &log)?;
        Ok(Running { url: chats(&format!("127.0.0.1:{port}")), process })
    }
}

impl Running {
    async fn wait_until_it_answers(&self) -> anyhow::Result<()> {
        let (client, deadline) = (Client::new(), Instant::now() + READY);
        let body = body(&[json!({"role": "user", "content": "Are you there?"})], 1);
        loop {
            match client.chat(&self.url, "first", &body).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    bail!(
                        "{} does not answer: {error:#}; see {}",
                        self.process.name,
                        self.process.log.display()
                    )
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Processor time that the program has used so far.
    pub fn processor_time(&self) -> anyhow::Result<Duration> {
        let path = format!("/proc/{}/stat", self.process.id());
        let text = std::fs::read_to_string(&path).with_context(|| format!("failed to read {path}"))?;
        // The second field is the program's name, in brackets; the 14th and 15th are ticks of 10 ms.
        let (_, fields) = text.rsplit_once(") ").with_context(|| format!("{path}: no name"))?;
        let mut ticks = fields.split(' ').skip(11).map(|field| field.parse::<u64>().ok());
        match (ticks.next().flatten(), ticks.next().flatten()) {
            (Some(user), Some(system)) => Ok(Duration::from_millis((user + system) * 10)),
            _ => bail!("{path}: no times"),
        }
    }
}

/// A port of loopback that nobody listens on now.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("failed to find a free port")?;
    Ok(listener.local_addr().context("a port")?.port())
}
