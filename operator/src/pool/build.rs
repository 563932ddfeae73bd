//! What the named workloads should have. Pure, and cannot fail.
//!
//! Only what is missing is asked for. A value that the user set is never
//! overwritten; what we set is known by annotations of the pod template, so
//! that it can follow the spec. A bridge that is there is replaced only when
//! the spec has changed, never because the operator has.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, ObjectFieldSelector, Volume,
};
use kvrouter_crds::config::digest;
use kvrouter_crds::pool::{Bridge as BridgeMode, HashSeedPolicy, SecretKeyRef, WorkloadKind, WorkloadRef};
use serde_json::{Value, json};

use super::validate::{Broker, Target, ValidPool};
use crate::config::ChildFlags;
use crate::parts::{
    Access, CREDENTIALS_FOLDER, IDENTITY_FOLDER, Mounts, probe, quantity, resources, security_context,
    variable,
};

/// Name of the injected container.
pub const BRIDGE: &str = "kvrouter-bridge";
/// The variable that fixes Python's string hashes.
pub const SEED_VARIABLE: &str = "PYTHONHASHSEED";
/// Annotation of a pod template: the seed that we set in it.
pub const SEED_ANNOTATION: &str = "kvrouter.dev/hash-seed";
/// Annotation of a pod template: digest of the settings of the bridge that we put into it.
pub const BRIDGE_ANNOTATION: &str = "kvrouter.dev/bridge-settings";

/// Variable of the bridge's container with the pod's address.
const POD_IP: &str = "KVROUTER_POD_IP";
/// Where the bridge keeps what it remembers between two lives of its container.
const STATE_FOLDER: &str = "/var/lib/kvrouter-bridge";
/// Port of the bridge's `/livez` and `/metrics`, and its name, by which
/// Prometheus finds it.
const METRICS: (&str, i32) = ("bridge-metrics", 9092);
/// Memory that a bridge asks for, and the most that it may take, in MiB for
/// every rank: it holds the rank's block hashes.
const MEMORY_PER_RANK: (usize, usize) = (64, 512);

/// What one workload should have and lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct WantedPatch {
    /// The workload.
    pub reference: WorkloadRef,
    /// Its uid.
    pub uid: String,
    /// Its version: a patch of any other one must fail.
    pub resource_version: String,
    /// Name of the engine's container.
    pub container: String,
    /// PYTHONHASHSEED, where the engine's container lacks it or has an older one of ours.
    pub seed: Option<String>,
    /// The bridge, where it lacks or is of older settings.
    pub bridge: Option<Bridge>,
    /// Digest of all that the spec asks for of this workload, whether it is
    /// there or not. Another digest is another spec: what was reverted may be
    /// tried again. An operator's release does not enter it. None where the spec
    /// asks for nothing.
    pub digest: Option<String>,
    /// A bridge of ours is there, with the right settings and another image:
    /// said, not changed.
    pub outdated_bridge: Option<OutdatedBridge>,
}

/// The bridge, what it mounts and the digest of its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Bridge {
    /// The native sidecar.
    pub container: Container,
    /// Volumes that it mounts.
    pub volumes: Vec<Volume>,
    /// Value of [`BRIDGE_ANNOTATION`].
    pub settings: String,
}

/// A bridge of another release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutdatedBridge {
    /// Image that it runs.
    pub image: String,
    /// A sentence with the command that updates it.
    pub message: String,
}

impl WantedPatch {
    /// Whether nothing is missing.
    pub fn is_empty(&self) -> bool {
        self.seed.is_none() && self.bridge.is_none()
    }

    /// The body of a strategic merge patch of the workload; the API server
    /// refuses it for any other version of the object.
    pub fn strategic_merge(&self) -> Value {
        let mut annotations = BTreeMap::new();
        let mut pod = json!({});
        if let Some(seed) = &self.seed {
            annotations.insert(SEED_ANNOTATION, seed.clone());
            let variable = json!({"name": SEED_VARIABLE, "value": seed});
            pod["containers"] = json!([{"name": self.container, "env": [variable]}]);
        }
        if let Some(bridge) = &self.bridge {
            annotations.insert(BRIDGE_ANNOTATION, bridge.settings.clone());
            pod["initContainers"] = json!([bridge.container]);
            pod["volumes"] = json!(bridge.volumes);
        }
        json!({
            "metadata": {"resourceVersion": self.resource_version, "uid": self.uid},
            "spec": {"template": {"metadata": {"annotations": annotations}, "spec": pod}},
        })
    }
}

/// What every target of the pool should have, in the order of the spec.
pub fn build(pool: &ValidPool, flags: &ChildFlags) -> Vec<WantedPatch> {
    pool.targets.iter().map(|target| patch(pool, target, flags)).collect()
}

fn patch(pool: &ValidPool, target: &Target, flags: &ChildFlags) -> WantedPatch {
    let seed = wanted_seed(pool);
    let bridge = wanted_bridge(pool, target, flags);
    let settings = bridge.as_ref().map_or("", |bridge| &bridge.settings);
    let asked = format!("seed={}\nbridge={settings}\n", seed.as_deref().unwrap_or_default());
    let asks = seed.is_some() || bridge.is_some();
    WantedPatch {
        reference: target.reference.clone(),
        uid: target.facts.uid.clone(),
        resource_version: target.facts.resource_version.clone(),
        container: target.container.clone(),
        seed: seed.filter(|seed| lacks_seed(target, seed)),
        outdated_bridge: bridge.as_ref().and_then(|bridge| outdated(pool, target, bridge)),
        bridge: bridge.filter(|bridge| lacks_bridge(target, &bridge.settings)),
        digest: asks.then(|| digest(&asked)),
    }
}

fn wanted_seed(pool: &ValidPool) -> Option<String> {
    let seed = pool.spec.hash_seed;
    (seed.policy == HashSeedPolicy::Enforce).then(|| seed.value.to_string())
}

/// Whether the variable is absent, or is an older one of ours. A value of the
/// user's stays, wherever it comes from, and so does one that a command sets.
fn lacks_seed(target: &Target, seed: &str) -> bool {
    let container = containers(target).find(|container| container.name == target.container);
    let Some(container) = container else { return false };
    match container.env.iter().flatten().find(|variable| variable.name == SEED_VARIABLE) {
        Some(variable) => {
            let ours = annotation(target, SEED_ANNOTATION);
            let current = variable.value.as_deref();
            ours.is_some() && ours == current && current != Some(seed)
        }
        None => !words(container).any(|word| word.contains("PYTHONHASHSEED=")),
    }
}

fn words(container: &Container) -> impl Iterator<Item = &String> {
    container.command.iter().flatten().chain(container.args.iter().flatten())
}

/// Whether there is no bridge, or one of ours with older settings. One that
/// carries no annotation is the user's.
fn lacks_bridge(target: &Target, settings: &str) -> bool {
    let ours = annotation(target, BRIDGE_ANNOTATION);
    match present_bridge(target) {
        Some(_) => ours.is_some_and(|ours| ours != settings),
        None => true,
    }
}

fn outdated(pool: &ValidPool, target: &Target, bridge: &Bridge) -> Option<OutdatedBridge> {
    let ours = annotation(target, BRIDGE_ANNOTATION) == Some(&*bridge.settings);
    let image = present_bridge(target)?.image.clone()?;
    let wanted = bridge.container.image.as_deref()?;
    if !ours || image == wanted {
        return None;
    }
    let kind = match target.reference.kind {
        WorkloadKind::Deployment => "deployment",
        WorkloadKind::StatefulSet => "statefulset",
    };
    let (name, namespace) = (&target.reference.name, &pool.namespace);
    let message = format!(
        "The bridge of {kind} {name} runs {image}, this operator's is {wanted}; when the engines may restart, run: \
         kubectl set image -n {namespace} {kind}/{name} {BRIDGE}={wanted}"
    );
    Some(OutdatedBridge { image, message })
}

fn present_bridge(target: &Target) -> Option<&Container> {
    let spec = target.facts.template.spec.as_ref()?;
    let beside = spec.init_containers.iter().flatten();
    beside.chain(&spec.containers).find(|container| container.name == BRIDGE)
}

fn containers(target: &Target) -> impl Iterator<Item = &Container> {
    target.facts.template.spec.iter().flat_map(|spec| &spec.containers)
}

fn annotation<'a>(target: &'a Target, key: &str) -> Option<&'a str> {
    target.facts.template.metadata.as_ref()?.annotations.as_ref()?.get(key).map(String::as_str)
}

fn wanted_bridge(pool: &ValidPool, target: &Target, flags: &ChildFlags) -> Option<Bridge> {
    if pool.spec.kv_events.bridge != BridgeMode::Inject {
        return None;
    }
    let broker = pool.broker.as_ref()?;
    let Mounts { volumes, mounts } = mounts(pool, broker);
    let ranks = pool.spec.target_ports.len() * pool.spec.dp_size as usize;
    let memory = |mebibytes: usize| format!("{}Mi", mebibytes * ranks);
    // On the host's network a port is the whole node's, and other engines run there.
    let on_host = target.facts.template.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let mut env = vec![pod_ip(), variable("KVROUTER_LOG_JSON", "true")];
    if !on_host {
        // No argument: these are replaced as a whole, also by an operator that was rolled
        // back, and the probe would stay.
        env.push(variable("KVROUTER_LISTEN_METRICS", &format!("0.0.0.0:{}", METRICS.1)));
    }
    let port = ContainerPort {
        name: Some(METRICS.0.to_owned()),
        container_port: METRICS.1,
        protocol: Some("TCP".to_owned()),
        ..Default::default()
    };
    let container = Container {
        name: BRIDGE.to_owned(),
        image: Some(flags.bridge_image().to_owned()),
        restart_policy: Some("Always".to_owned()),
        args: Some(arguments(pool, broker)),
        env: Some(env),
        ports: (!on_host).then(|| vec![port]),
        // It depends on neither the broker nor the engine, and restarts the bridge alone.
        liveness_probe: (!on_host).then(|| probe("/livez", METRICS.0, 10, 5, 6)),
        resources: Some(resources("50m", &memory(MEMORY_PER_RANK.0), &memory(MEMORY_PER_RANK.1))),
        security_context: Some(security_context()),
        volume_mounts: Some(mounts),
        ..Default::default()
    };
    Some(Bridge { container, volumes, settings: settings_digest(pool, broker) })
}

fn mounts(pool: &ValidPool, broker: &Broker) -> Mounts {
    let state = EmptyDirVolumeSource { size_limit: Some(quantity("64Mi")), ..Default::default() };
    let state =
        Volume { name: "kvrouter-bridge-state".to_owned(), empty_dir: Some(state), ..Default::default() };
    let mut mounts = Mounts::default();
    mounts.add(state, STATE_FOLDER, Access::Write);
    mounts.add_secret("kvrouter-nats", broker.credentials.as_ref(), CREDENTIALS_FOLDER);
    let identity = pool.spec.identity_seed_secret_ref.as_ref();
    mounts.add_secret("kvrouter-identity", identity, IDENTITY_FOLDER);
    mounts
}

/// What the spec says of the bridge, in a form of its own: the arguments may be
/// spelt otherwise by a later release, which must not change a template.
fn settings_digest(pool: &ValidPool, broker: &Broker) -> String {
    let secret = |secret: Option<&SecretKeyRef>| {
        secret.map_or_else(String::new, |secret| format!("{}/{}", secret.name, secret.key))
    };
    let spec = &pool.spec;
    let ports: Vec<String> = spec.target_ports.iter().map(|port| port.number.to_string()).collect();
    let mut facts = vec![
        ("pool", format!("{}/{}", pool.namespace, pool.name)),
        ("port", ports.join(",")),
        ("events", spec.kv_events.port.to_string()),
        ("replay", spec.kv_events.replay_port.to_string()),
        ("url", broker.url.clone()),
        ("prefix", broker.subject_prefix.clone()),
        ("credentials", secret(broker.credentials.as_ref())),
        ("identity", secret(spec.identity_seed_secret_ref.as_ref())),
        ("model", spec.model.name.clone()),
        ("revision", spec.model.revision.clone()),
        ("block", spec.block_size.to_string()),
    ];
    // What is as it was before there was a choice does not enter: a digest that a
    // release changes would restart engines.
    if spec.dp_size != 1 {
        facts.push(("ranks", spec.dp_size.to_string()));
    }
    let lines: Vec<String> = facts.into_iter().map(|(key, value)| format!("{key}={value:?}")).collect();
    digest(&lines.join("\n"))
}

fn arguments(pool: &ValidPool, broker: &Broker) -> Vec<String> {
    let spec = &pool.spec;
    let mut arguments = vec!["bridge".to_owned()];
    let mut flag = |name: &str, value: String| arguments.push(format!("--{name}={value}"));
    for port in &spec.target_ports {
        flag("worker", format!("$({POD_IP}):{}", port.number));
    }
    if spec.dp_size != 1 {
        flag("dp-size", spec.dp_size.to_string());
    }
    flag("kv-events", format!("tcp://127.0.0.1:{}", spec.kv_events.port));
    flag("kv-replay", format!("tcp://127.0.0.1:{}", spec.kv_events.replay_port));
    flag("nats-url", broker.url.clone());
    if let Some(secret) = &broker.credentials {
        flag("nats-credentials", format!("{CREDENTIALS_FOLDER}/{}", secret.key));
    }
    flag("subject-prefix", broker.subject_prefix.clone());
    flag("namespace", pool.namespace.clone());
    flag("pool", pool.name.clone());
    // The kubelet replaces $(VAR): $$ stays a dollar sign.
    flag("model", spec.model.name.replace('$', "$$"));
    flag("revision", spec.model.revision.replace('$', "$$"));
    flag("block-size", spec.block_size.to_string());
    if let Some(secret) = &spec.identity_seed_secret_ref {
        flag("identity-seed-file", format!("{IDENTITY_FOLDER}/{}", secret.key));
    }
    flag("state-dir", STATE_FOLDER.to_owned());
    arguments
}

fn pod_ip() -> EnvVar {
    let field = ObjectFieldSelector { field_path: "status.podIP".to_owned(), ..Default::default() };
    let source = EnvVarSource { field_ref: Some(field), ..Default::default() };
    EnvVar { name: POD_IP.to_owned(), value_from: Some(source), ..Default::default() }
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
