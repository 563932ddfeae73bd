//! `kv-router bridge`: beside the engines of one pod, their events to deltas on
//! NATS.
//!
//! The bridge never endangers its engines: it has no readiness, its liveness
//! depends on neither the broker nor the engines, and its memory is bounded.
//! While the broker is away nothing is queued; what routers miss they notice by
//! the numbers and fetch as a snapshot, from the same task that reads the
//! engine, so a snapshot and its number always belong together.

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_nats::connection::State as Connected;
use futures::StreamExt;
use kvrouter_core::blocks::{Domain, Identity, IdentitySeed};
use kvrouter_core::events::envelope::{Envelope, SnapshotPage, Status, paginate};
use kvrouter_core::ids::{Epoch, WorkerId};
use kvrouter_core::units::BlockSize;
use kvrouter_crds::config::{MAX_DP_SIZE, MAX_TARGET_PORTS};
use prometheus::{Encoder, IntCounterVec, Opts, Registry, TextEncoder};
use tokio::net::TcpListener;

use super::engine::{Remembered, Sink, Stream, Told, View};
use super::nats;
use super::subjects::{Subjects, name_of};
use super::zmtp::Endpoint;
use crate::clock::Clock;
use crate::config::{BridgeFlags, ConfigError, is_dns_label, is_subject_prefix, read_secret};

/// Settings of a bridge that make sense together.
#[derive(Clone, Debug)]
pub struct Settings {
    flags: BridgeFlags,
    size: BlockSize,
    streams: Vec<Source>,
    identity: Identity,
    domain: Domain,
}

/// Where one rank's events are, and what they are called.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// What stands for the worker in subjects.
    name: String,
    /// The rank, within its worker.
    rank: u32,
    /// The rank among all of the bridge: names what is remembered of it.
    number: u32,
    publisher: Endpoint,
    replay: Option<Endpoint>,
}

/// Why a bridge's settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A flag makes no sense.
    #[error("{flag}: {message}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong and what to do.
        message: &'static str,
    },
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
}

impl Settings {
    /// Checks flags and reads the files that they name.
    pub fn of(flags: &BridgeFlags) -> Result<Self, SettingsError> {
        let wrong = |flag, message| Err(SettingsError::Flag { flag, message });
        let Some(size) = BlockSize::new(flags.block_size) else {
            return wrong("--block-size", "must be at least 1");
        };
        if !(1..=MAX_DP_SIZE).contains(&flags.dp_size) {
            return wrong("--dp-size", "must be 1 to 1024");
        }
        if !(1..=MAX_TARGET_PORTS).contains(&flags.workers.len()) {
            return wrong("--worker", "must be given once to eight times");
        }
        if flags.nats_url.parse::<async_nats::ServerAddr>().is_err() {
            return wrong("--nats-url", "is no NATS address; write nats://host:port");
        }
        let Some(workers) = flags.workers.iter().map(|worker| worker_id(worker)).collect::<Option<Vec<_>>>()
        else {
            return wrong("--worker", "must be host:port, as the routers know the worker");
        };
        if workers.iter().enumerate().any(|(at, worker)| workers[..at].contains(worker)) {
            return wrong("--worker", "names a worker a second time; name each once");
        }
        let Some(streams) = sources(flags, &workers) else {
            return wrong(
                "--dp-size",
                "puts the ports of the last rank beyond 65535; lower it, --kv-events or --kv-replay",
            );
        };
        let seed = flags.identity_seed_file.as_deref().map(read_secret).transpose()?.unwrap_or_default();
        let identity = Identity::new(IdentitySeed::new(seed.as_bytes()));
        for (flag, label) in [("--namespace", &flags.namespace), ("--pool", &flags.pool)] {
            if !is_dns_label(label) {
                return wrong(flag, "must be a DNS label: lower-case letters, digits and `-`, at most 63");
            }
        }
        if !is_subject_prefix(&flags.subject_prefix) {
            return wrong("--subject-prefix", "must be letters, digits, `-` and `_`");
        }
        Ok(Self {
            size,
            streams,
            domain: Domain::new(&flags.model, &flags.revision, size, &identity),
            identity,
            flags: flags.clone(),
        })
    }
}

/// A worker as routers spell it: in lower case, and IPv6 in brackets, which the
/// address of a pod does not have. `None` for what is no `host:port`.
fn worker_id(text: &str) -> Option<WorkerId> {
    let (host, port) = text.rsplit_once(':')?;
    port.parse::<NonZeroU16>().ok()?;
    let host = host.to_ascii_lowercase();
    let bare = host.contains(':') && !host.starts_with('[');
    (!host.is_empty())
        .then(|| WorkerId::new(if bare { format!("[{host}]:{port}") } else { format!("{host}:{port}") }))
}

/// Every rank of every worker; `None` if one has a port beyond the last.
fn sources(flags: &BridgeFlags, workers: &[WorkerId]) -> Option<Vec<Source>> {
    let ranks = workers.iter().flat_map(|worker| (0..flags.dp_size).map(move |rank| (name_of(worker), rank)));
    let source = |(number, (name, rank)): (u32, (String, u32))| {
        let replay = match &flags.kv_replay {
            Some(replay) => Some(replay.offset(number)?),
            None => None,
        };
        Some(Source { name, rank, number, publisher: flags.kv_events.offset(number)?, replay })
    };
    (0u32..).zip(ranks).map(source).collect()
}

/// What the ranks of one bridge share.
struct Shared {
    client: async_nats::Client,
    subjects: Subjects,
    settings: Settings,
    clock: Clock,
    messages: IntCounterVec,
    registry: Registry,
}

/// One rank's stream on its way to NATS.
struct Publish {
    shared: Arc<Shared>,
    source: Source,
    requests: async_nats::Subscriber,
    /// Where the snapshot that is wanted goes.
    wanted: Option<async_nats::Subject>,
    state: Option<PathBuf>,
    remembered: Option<Remembered>,
}

/// Runs until SIGTERM or SIGINT.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let flags = &settings.flags;
    let listener = TcpListener::bind(flags.listen_metrics).await.with_context(|| {
        format!(
            "failed to listen on {} (end what has this port, or give another one with --listen-metrics)",
            flags.listen_metrics
        )
    })?;
    let client = nats::connect(&flags.nats_url, flags.nats_credentials.as_deref(), |_| {}).await?;
    let registry = Registry::new();
    let options = Opts::new("kvrouter_bridge_messages_total", "Messages by what became of them.");
    let messages = IntCounterVec::new(options, &["result"])?;
    registry.register(Box::new(messages.clone()))?;
    tracing::info!(
        target: "kv_router::bridge", workers = %flags.workers.join(","), ranks = flags.dp_size,
        events = %flags.kv_events, nats = %flags.nats_url, metrics = %listener.local_addr()?, "bridging"
    );
    let subjects = Subjects::new(&flags.subject_prefix, &flags.namespace, &flags.pool);
    let shared = Arc::new(Shared { client, subjects, settings, clock: Clock::start(), messages, registry });
    for source in shared.settings.streams.clone() {
        let publish = Publish::new(Arc::clone(&shared), source).await?;
        tokio::spawn(publish.run());
    }
    let router = axum::Router::new()
        .route("/livez", axum::routing::get(|| async { "ok" }))
        .route("/metrics", axum::routing::get(move || metrics(shared.registry.clone())));
    tokio::select! {
        served = async { axum::serve(listener, router).await } => served.context("listener failed"),
        stopped = crate::serve::wait_for_signal() => stopped,
    }
}

async fn metrics(registry: Registry) -> ([(http::HeaderName, &'static str); 1], Vec<u8>) {
    let mut text = Vec::new();
    // An encoder that fails leaves out what it could not write.
    let _ = TextEncoder::new().encode(&registry.gather(), &mut text);
    ([(http::header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

impl Publish {
    async fn new(shared: Arc<Shared>, source: Source) -> anyhow::Result<Self> {
        let subject = shared.subjects.snapshot(&source.name, source.rank);
        let requests = shared.client.subscribe(subject).await.context("failed to offer snapshots")?;
        let folder = shared.settings.flags.state_dir.as_deref();
        let state = folder.map(|folder| folder.join(format!("rank-{}.json", source.number)));
        let remembered = state.as_deref().and_then(recall);
        Ok(Self { shared, source, requests, wanted: None, state, remembered })
    }

    async fn run(mut self) {
        let Source { publisher, replay, rank, .. } = self.source.clone();
        let rank = (rank, self.shared.settings.flags.dp_size);
        let (identity, size) = (self.shared.settings.identity.clone(), self.shared.settings.size);
        Stream::new((publisher, replay), rank, identity, size, self.remembered).run(&mut self).await;
    }

    /// Publishes, or counts why not. Never waits for a broker that is away.
    async fn publish(
        &self,
        epoch: Epoch,
        seq: u64,
        deltas: Option<Vec<kvrouter_core::events::Delta>>,
        status: Status,
        page: u32,
    ) {
        let settings = &self.shared.settings;
        let envelope = Envelope {
            domain: settings.domain,
            epoch,
            seq,
            page,
            block: settings.size.tokens(),
            deltas,
            status,
        };
        let payload = envelope.encode();
        let client = &self.shared.client;
        let result = if client.connection_state() != Connected::Connected {
            "broker_away"
        } else if payload.len() > client.max_payload() {
            // Routers will miss the number and fetch a snapshot, in pages.
            "too_large"
        } else {
            let subject = self.shared.subjects.events(&self.source.name, self.source.rank);
            match client.publish(subject, payload.into()).await {
                Ok(()) => "published",
                Err(_) => "refused",
            }
        };
        self.shared.messages.with_label_values(&[result]).inc();
    }

    fn remember(&mut self, remembered: Remembered) {
        let Some(path) = self.state.as_deref().filter(|_| self.remembered != Some(remembered)) else {
            return;
        };
        match store(path, remembered) {
            Ok(()) => self.remembered = Some(remembered),
            Err(error) => {
                self.shared.messages.with_label_values(&["state_not_kept"]).inc();
                tracing::warn!(target: "kv_router::bridge", path = %path.display(), %error, "unable to keep the epoch; a restart of the bridge will begin another");
            }
        }
    }
}

impl Sink for Publish {
    async fn tell(&mut self, told: Told, status: Status, page: u32) {
        match told {
            Told::NewEpoch { epoch } => self.publish(epoch, 0, None, status, page).await,
            Told::Changed { epoch, seq, deltas } => {
                self.publish(epoch, seq, Some(deltas), status, page).await
            }
            Told::Current { epoch, seq, last } => {
                self.publish(epoch, seq, None, status, page).await;
                // A view that is not sound must not be taken for a sound one by
                // the bridge that comes after this one.
                let last = last.filter(|_| !status.unsound && !status.incomplete && !status.disconnected);
                self.remember(Remembered { epoch: epoch.0, last });
            }
            Told::Counted(label) => self.shared.messages.with_label_values(&[label]).inc(),
        }
    }

    fn unix_ms(&self) -> u64 {
        self.shared.clock.unix_ms()
    }

    fn credit_lasts(&self) -> Duration {
        Duration::from_secs(self.shared.settings.flags.budget_seconds)
    }

    async fn snapshot_wanted(&mut self) {
        loop {
            match self.requests.next().await {
                Some(request) if request.reply.is_some() => {
                    self.wanted = request.reply;
                    return;
                }
                Some(_) => {}
                // The client was closed: the process is about to end.
                None => std::future::pending().await,
            }
        }
    }

    async fn snapshot(&mut self, view: View<'_>) {
        let Some(reply) = self.wanted.take() else { return };
        let deltas = tokio::task::block_in_place(|| view.digester.snapshot());
        let parts = paginate(deltas, self.shared.client.max_payload() / 2);
        let pages = parts.len() as u32;
        let settings = &self.shared.settings;
        for (index, deltas) in (0u32..).zip(parts) {
            let envelope = Envelope {
                domain: settings.domain,
                epoch: view.epoch,
                seq: view.seq,
                page: view.digester.quality().page.unwrap_or(0),
                block: settings.size.tokens(),
                deltas: Some(deltas),
                status: view.status,
            };
            let payload = SnapshotPage { envelope, index, pages }.encode();
            let sent = self.shared.client.publish(reply.clone(), payload.into()).await;
            let result = if sent.is_ok() { "snapshot_page" } else { "refused" };
            self.shared.messages.with_label_values(&[result]).inc();
        }
    }
}

/// What an earlier bridge of this pod left; nothing if there is nothing, or
/// nothing readable: then another epoch begins.
fn recall(path: &Path) -> Option<Remembered> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Written beside and renamed, so that a crash leaves the old or the new one.
fn store(path: &Path, remembered: Remembered) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    std::fs::write(&beside, serde_json::to_vec(&remembered)?)?;
    std::fs::rename(beside, path)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::config::{Cli, Command};

    fn settings(more: &str) -> Result<Settings, SettingsError> {
        let usual = "kv-router bridge --nats-url nats://a --model m";
        let arguments = usual.split(' ').chain(more.split(' '));
        let Command::Bridge(flags) = Cli::try_parse_from(arguments).expect("flags").command else {
            panic!("another command")
        };
        Settings::of(&flags)
    }

    /// `worker rank number publisher replay`, one for each rank.
    #[track_caller]
    fn check(why: &str, flags: &str, expected: &[&str]) {
        let row = |source: &Source| {
            let target = crate::feed::subjects::target_of(&source.name, source.rank).expect("a worker");
            let replay = source.replay.as_ref().map_or_else(|| "-".to_owned(), Endpoint::to_string);
            format!("{target} {} {} {replay}", source.number, source.publisher)
        };
        let found: Vec<String> = settings(flags).expect(why).streams.iter().map(row).collect();
        assert_eq!(found, expected, "{why}");
    }

    #[test]
    fn every_rank_of_every_worker_has_its_sockets() {
        check("one", "--worker 10.0.0.1:8000", &["10.0.0.1:8000#0 0 tcp://127.0.0.1:5557 -"]);
        check(
            "two ranks of two ports",
            "--worker A:8000 --worker a:8001 --dp-size 2 --kv-replay tcp://127.0.0.1:5657",
            &[
                "a:8000#0 0 tcp://127.0.0.1:5557 tcp://127.0.0.1:5657",
                "a:8000#1 1 tcp://127.0.0.1:5558 tcp://127.0.0.1:5658",
                "a:8001#0 2 tcp://127.0.0.1:5559 tcp://127.0.0.1:5659",
                "a:8001#1 3 tcp://127.0.0.1:5560 tcp://127.0.0.1:5660",
            ],
        );
        check(
            "a pod's IPv6 address",
            "--worker FD00::1:8000",
            &["[fd00::1]:8000#0 0 tcp://127.0.0.1:5557 -"],
        );
        check("in brackets", "--worker [fd00::1]:8000", &["[fd00::1]:8000#0 0 tcp://127.0.0.1:5557 -"]);
    }

    #[test]
    fn flags_that_make_no_sense_are_named() {
        for (flags, expected) in [
            ("--worker a", "--worker: must be host:port"),
            ("--worker :80", "--worker: must be host:port"),
            ("--worker a:1 --worker A:1", "--worker: names a worker a second time"),
            ("--worker a:1,a:2,a:3,a:4,a:5,a:6,a:7,a:8,a:9", "--worker: must be given once to eight times"),
            ("--worker a:1 --dp-size 1025", "--dp-size: must be 1 to 1024"),
            ("--worker a:1 --dp-size 0", "--dp-size: must be 1 to 1024"),
            (
                "--worker a:1 --dp-size 2 --kv-events tcp://a:65535",
                "--dp-size: puts the ports of the last rank",
            ),
            (
                "--worker a:1 --dp-size 2 --kv-replay tcp://a:65535",
                "--dp-size: puts the ports of the last rank",
            ),
        ] {
            let error = settings(flags).expect_err(flags).to_string();
            assert!(error.starts_with(expected), "{flags}: {error}");
        }
    }
}
