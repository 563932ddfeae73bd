//! Child processes: found beside our own program, logging to a file, killed when dropped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::time::Instant;

/// How often a log or a child is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// How long a program may take to say where it listens; a loaded machine is slow.
const START: Duration = Duration::from_secs(30);

/// A running program.
#[derive(Debug)]
pub struct Process {
    /// What messages call it.
    pub name: String,
    /// What it writes, both streams.
    pub log: PathBuf,
    child: Child,
}

/// Where a router listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterAddresses {
    /// Requests and probes, `host:port`.
    pub http: String,
    /// `/metrics` and `/health/report`.
    pub metrics: String,
    /// Admin endpoints.
    pub admin: String,
}

/// Where an engine-sim listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddresses {
    /// HTTP, `host:port`.
    pub http: String,
    /// Event publisher of rank 0, `tcp://host:port`.
    pub kv_events: String,
    /// Replay socket of rank 0.
    pub replay: String,
}

/// The program `name` of this workspace, which Cargo builds beside our own or, for tests, one
/// folder above it.
pub fn sibling(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find our own program")?;
    let near = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    match near.clone().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => {
            let folder = own.parent().unwrap_or(Path::new("."));
            bail!("no `{name}` beside {}; run `cargo build --workspace --bins` first", folder.display())
        }
    }
}

impl Process {
    /// Starts `command` with both of its streams in the file `log`.
    pub fn start(name: &str, command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let output = File::create(log).with_context(|| format!("failed to create {}", log.display()))?;
        let errors = output.try_clone().context("failed to share a log")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("failed to start {name}"))?;
        Ok(Self { name: name.to_owned(), log: log.to_owned(), child })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// All that it has written so far.
    pub fn output(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Waits for a whole line in which `find` finds something.
    pub async fn line<T>(&mut self, find: impl Fn(&str) -> Option<T>) -> anyhow::Result<T> {
        let deadline = Instant::now() + START;
        loop {
            // Asked before the log is read: what an ended program wrote is then all there.
            let ended = self.child.try_wait().context("failed to look at a child")?;
            let output = self.output();
            let whole = output.rfind('\n').map_or("", |end| &output[..end]);
            if let Some(found) = whole.lines().find_map(&find) {
                return Ok(found);
            }
            if let Some(status) = ended {
                bail!("{} ended ({status}); its log {}:\n{}", self.name, self.log.display(), tail(&output));
            }
            if Instant::now() > deadline {
                bail!("{} does not come up; its log {}:\n{}", self.name, self.log.display(), tail(&output));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Where this router listens, once it does.
    pub async fn router_addresses(&mut self) -> anyhow::Result<RouterAddresses> {
        self.line(|line| {
            let (_, fields) = line.split_once(" serving ")?;
            let field = |name: &str| {
                let value = fields.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
                value.map(str::to_owned)
            };
            Some(RouterAddresses { http: field("http")?, metrics: field("metrics")?, admin: field("admin")? })
        })
        .await
    }

    /// Where this engine-sim listens, once it does.
    pub async fn engine_addresses(&mut self) -> anyhow::Result<EngineAddresses> {
        self.line(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            let text = |path: &str| line.pointer(path).and_then(Value::as_str).map(str::to_owned);
            Some(EngineAddresses {
                http: text("/http")?,
                kv_events: text("/kv_events/0")?,
                replay: text("/replay/0")?,
            })
        })
        .await
    }

    /// The address of this nats-server, `host:port`, once it listens.
    pub async fn nats_address(&mut self) -> anyhow::Result<String> {
        let listening = "Listening for client connections on ";
        self.line(|line| line.split_once(listening).map(|(_, address)| address.trim().to_owned())).await
    }

    /// Asks it to stop, as a supervisor would.
    pub fn terminate(&self) -> anyhow::Result<()> {
        let sent = Command::new("sh").arg("-c").arg(format!("kill -TERM {}", self.id())).status();
        match sent.context("failed to run kill")?.success() {
            true => Ok(()),
            false => bail!("failed to send SIGTERM to {}", self.name),
        }
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until it has ended.
    pub async fn ended(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().context("failed to look at a child")? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} did not end within {} s:\n{}", self.name, limit.as_secs(), tail(&self.output()));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        // It may have ended already; then there is nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A nats-server on a free port of loopback, or on `port`.
pub fn nats_command(program: &Path, port: Option<u16>) -> Command {
    let mut command = Command::new(program);
    // -1 lets the server take a free port.
    let port = port.map_or("-1".to_owned(), |port| port.to_string());
    command.args(["-a", "127.0.0.1", "-p", &port]);
    command
}

fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
