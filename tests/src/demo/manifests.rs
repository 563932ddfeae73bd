//! The router's settings, from the manifests that a user applies.
//!
//! `kv-router-operator render` makes the ConfigMaps of `config/samples/simulated` as the operator would; what a process
//! on loopback needs otherwise (addresses, the list of engines, the tokenizer's folder) is replaced, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use kvrouter_crds::config::{
    Discovery, DiscoveryBackend, EventEndpoints, EventTransport, KvEvents, LIVE_SETTINGS_KEY, Listen,
    LiveSettings, Nats, Policy, RoleName, RouterConfig, START_SETTINGS_KEY, StaticWorker, Tokenizer,
};
use serde::Deserialize;

use super::fleet::{Events, TOKENIZER};
use crate::process::{EngineAddresses, sibling};

/// Folder of the manifests.
const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/samples/simulated");

/// A router's settings as files.
#[derive(Debug)]
pub struct Files {
    /// What the router is started with.
    pub start: PathBuf,
    /// What may change.
    pub live: PathBuf,
}

/// Both texts of settings, as they stand in the ConfigMaps.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What a router is started with.
    pub start: RouterConfig,
    /// What may change.
    pub live: LiveSettings,
}

/// Renders the samples.
pub fn render() -> anyhow::Result<Settings> {
    let program = sibling("kv-router-operator")?;
    let mut command = Command::new(&program);
    command.arg("render");
    for name in ["pool.yaml", "router.yaml"] {
        command.arg("-f").arg(Path::new(SAMPLES).join(name));
    }
    let done = command.output().with_context(|| format!("failed to start {}", program.display()))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).context("what render printed is no text")?;
    let (mut start, mut live) = (None, None);
    for document in serde_yaml::Deserializer::from_str(&text) {
        let object =
            serde_json::Value::deserialize(document).context("failed to read what render printed")?;
        let data = |key: &str| object.get("data")?.get(key)?.as_str();
        start = start.or(data(START_SETTINGS_KEY).map(serde_yaml::from_str).transpose()?);
        live = live.or(data(LIVE_SETTINGS_KEY).map(serde_yaml::from_str).transpose()?);
    }
    match (start, live) {
        (Some(start), Some(live)) => Ok(Settings { start, live }),
        _ => bail!("render printed no ConfigMap with {START_SETTINGS_KEY} or none with {LIVE_SETTINGS_KEY}"),
    }
}

impl Settings {
    /// Fits them to processes on loopback under `policy`, and writes both files.
    pub fn write(
        mut self,
        policy: Policy,
        events: &Events,
        engines: &[EngineAddresses],
        folder: &Path,
        name: &str,
    ) -> anyhow::Result<Files> {
        let workers = engines.iter().map(|engine| worker(engine, events)).collect();
        let free = "127.0.0.1:0".parse().context("an address")?;
        self.start.listen = Listen { http: free, metrics: free, admin: free };
        self.start.discovery = Discovery { backend: DiscoveryBackend::Static, workers, kubernetes: None };
        self.start.model.tokenizer = Some(Tokenizer { path: TOKENIZER.into() });
        self.start.kv_events = match events {
            Events::Zmq => KvEvents { transport: EventTransport::ZMQ, ..KvEvents::default() },
            Events::Nats(url) => {
                let nats =
                    Nats { url: url.clone(), credentials_file: None, subject_prefix: "kvrouter".to_owned() };
                KvEvents { transport: EventTransport::NATS, nats: Some(nats), ..KvEvents::default() }
            }
        };
        self.live.policy = Some(policy);
        if let Some(shadows) = &mut self.live.shadow_policies {
            shadows.retain(|shadow| *shadow != policy);
        }
        let files = Files {
            start: folder.join(format!("{name}.{START_SETTINGS_KEY}")),
            live: folder.join(format!("{name}.{LIVE_SETTINGS_KEY}")),
        };
        for (path, text) in [
            (&files.start, serde_yaml::to_string(&self.start)?),
            (&files.live, serde_yaml::to_string(&self.live)?),
        ] {
            fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))?;
        }
        Ok(files)
    }
}

fn worker(engine: &EngineAddresses, events: &Events) -> StaticWorker {
    let kv_events = match events {
        Events::Zmq => Some(EventEndpoints {
            endpoint: engine.kv_events.clone(),
            replay_endpoint: Some(engine.replay.clone()),
        }),
        Events::Nats(_) => None,
    };
    StaticWorker {
        url: format!("http://{}", engine.http),
        engine: None,
        dp_size: 1,
        role: RoleName::Mixed,
        protocol: None,
        bootstrap_port: None,
        kv_events,
    }
}
