//! What a pool's spec must fulfil by itself.
//!
//! The API server checks most of it by the schema's own rules; here it is said
//! again for `render`, which has no API server, and for definitions that were
//! installed without their rules. Pure.

use std::collections::BTreeMap;

use kvrouter_crds::conditions::Reason;
use kvrouter_crds::config::{
    DEFAULT_BOOTSTRAP_PORT, Engine, EventTransport, MAX_BLOCK_SIZE, MAX_DP_SIZE, Protocol, RoleName,
};
use kvrouter_crds::pool::{Bridge, InferencePoolSpec, NatsSpec, RoleSpec, SecretKeyRef, TokenizerSource};

use crate::config::is_broker;
use crate::gateway::written;
use crate::verdict::Complaint;

/// Longest name of either kind: names of children are derived from it.
pub const LONGEST_NAME: usize = 50;

/// Everything that is wrong, worst first; empty when all is well.
pub fn complaints(name: &str, spec: &InferencePoolSpec) -> Vec<Complaint> {
    let mut found = Vec::new();
    found.extend(wrong_name("InferencePool", name));
    model(spec, &mut found);
    selectors(spec, &mut found);
    handovers(spec, &mut found);
    ports(spec, &mut found);
    workloads(spec, &mut found);
    events(spec, &mut found);
    found
}

/// What is wrong with a name from which names of children are derived.
pub fn wrong_name(kind: &str, name: &str) -> Option<Complaint> {
    (!is_dns_label(name) || LONGEST_NAME < name.len()).then(|| {
        invalid(
            "metadata.name",
            format!(
                "metadata.name `{name}` of the {kind} must be lower-case letters, digits and `-`, at most {LONGEST_NAME}: \
                 names of children are derived from it; choose another."
            ),
        )
    })
}

/// Whether it is a DNS label, whatever its length.
fn is_dns_label(name: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !name.is_empty() && name.bytes().all(inside) && !name.starts_with('-') && !name.ends_with('-')
}

/// A complaint about the spec itself.
pub fn invalid(field: &str, message: impl Into<String>) -> Complaint {
    Complaint::accepted(Reason::InvalidSpec, field, message)
}

fn model(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    if spec.model.name.is_empty() {
        found.push(invalid("spec.model.name", "spec.model.name is empty; write the name that requests use."));
    }
    if !(1..=MAX_BLOCK_SIZE).contains(&spec.block_size) {
        let message = format!(
            "spec.blockSize is {}; 1 to {MAX_BLOCK_SIZE} are possible, 16 is usual.",
            spec.block_size
        );
        found.push(invalid("spec.blockSize", message));
    }
    let Some(tokenizer) = &spec.model.tokenizer else { return };
    let TokenizerSource { image, persistent_volume_claim, config_map, path } = tokenizer;
    let sources = [image.is_some(), persistent_volume_claim.is_some(), config_map.is_some(), path.is_some()];
    let field = "spec.model.tokenizer";
    if sources.iter().filter(|present| **present).count() != 1 {
        let message = "spec.model.tokenizer must name exactly one of image, persistentVolumeClaim, configMap and path; keep one.";
        found.push(invalid(field, message));
    }
    let folders = [
        ("spec.model.tokenizer.image.path", image.as_ref().map(|image| &image.path)),
        (
            "spec.model.tokenizer.persistentVolumeClaim.path",
            persistent_volume_claim.as_ref().map(|claim| &claim.path),
        ),
    ];
    for (field, folder) in folders {
        if folder.is_some_and(|folder| folder.starts_with('/') || folder.split('/').any(|part| part == ".."))
        {
            let message = format!(
                "{field} must be a folder inside the volume, without a leading / and without ..; correct it."
            );
            found.push(invalid(field, message));
        }
    }
    if path.as_ref().is_some_and(|path| !path.starts_with('/')) {
        let message = "spec.model.tokenizer.path must be absolute: it is a folder of the router's image; begin it with /.";
        found.push(invalid("spec.model.tokenizer.path", message));
    }
}

fn selectors(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    let pool = &spec.selector.match_labels;
    // Of one that refers to a gateway pool it is said why there is none.
    if pool.is_empty() && spec.gateway_pool_ref.is_none() {
        let message =
            "spec.selector.matchLabels is empty; name at least one label that only this pool's pods carry.";
        found.push(invalid("spec.selector.matchLabels", message));
    }
    for (at, role) in spec.roles.iter().enumerate() {
        let label = role.name.label();
        let field = format!("spec.roles[{at}]");
        let earlier = &spec.roles[..at];
        if earlier.iter().any(|other| other.name == role.name) {
            found.push(invalid(&field, format!("The role {label} is named twice in spec.roles; keep one.")));
        }
        let own = &role.selector.match_labels;
        if own.is_empty() {
            let message =
                format!("The selector of the role {label} is empty; name a label that only its pods carry.");
            found.push(invalid(&field, message));
        }
        if let Some(key) = contradiction(pool, own) {
            let message = format!(
                "The role {label} and {} want different values of the label {key}, so it matches no pod; correct one.",
                written(spec, "spec.selector")
            );
            found.push(invalid(&field, message));
        }
        if let Some(other) = earlier.iter().find(|other| other.selector == role.selector) {
            let message = format!(
                "The roles {} and {label} have the same selector, so every pod is in both and gets no requests; make them exclude each other.",
                other.name.label()
            );
            found.push(invalid(&field, message));
        }
    }
}

/// What prefill and decode need to serve requests together.
fn handovers(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    let named = |name: RoleName| spec.roles.iter().find(|role| role.name == name);
    let halves = [named(RoleName::Prefill), named(RoleName::Decode)];
    if let [Some(half), None] | [None, Some(half)] = halves {
        let other = if half.name == RoleName::Prefill { RoleName::Decode } else { RoleName::Prefill };
        let (half, other) = (half.name.label(), other.label());
        let message = format!(
            "The role {half} needs {other}: the two serve requests together; add the role {other} to spec.roles or remove {half}."
        );
        found.push(invalid("spec.roles", message));
    }
    if let [Some(prefill), Some(decode)] = halves
        && let (Some(one), Some(other)) = (prefill.protocol, decode.protocol)
        && one != other
    {
        let message = format!(
            "The roles prefill and decode hand requests over to each other, and their protocols are {one:?} and {other:?}; give both the same."
        );
        found.push(invalid("spec.roles", message));
    }
    for (at, role) in spec.roles.iter().enumerate() {
        handover(spec, role, &format!("spec.roles[{at}]"), found);
    }
}

fn handover(spec: &InferencePoolSpec, role: &RoleSpec, field: &str, found: &mut Vec<Complaint>) {
    let label = role.name.label();
    match (role.name, role.protocol) {
        (RoleName::Mixed, Some(_)) => {
            let message = "The role mixed hands nothing over; remove its protocol or change its name.";
            found.push(invalid(field, message));
        }
        (RoleName::Prefill | RoleName::Decode, None) => {
            let message =
                format!("The role {label} has no protocol; add SGLang or NIXL, whichever its engines speak.");
            found.push(invalid(field, message));
        }
        (RoleName::Mixed, None) | (RoleName::Prefill | RoleName::Decode, Some(_)) => {}
    }
    let is_of_other_engine = match (role.protocol, spec.engine) {
        (None, _) | (_, Engine::Auto) => false,
        (Some(Protocol::SGLang), engine) => engine != Engine::SGLang,
        (Some(Protocol::NIXL), engine) => engine == Engine::SGLang,
    };
    if is_of_other_engine {
        let message = format!(
            "The role {label} has another engine's protocol than spec.engine {:?}: SGLang is for SGLang, NIXL for the others; correct one, or use engine: Auto.",
            spec.engine
        );
        found.push(invalid(field, message));
    }
    if (role.name, role.protocol) == (RoleName::Prefill, Some(Protocol::SGLang)) {
        bootstrap(spec, role.bootstrap_port.unwrap_or(DEFAULT_BOOTSTRAP_PORT), field, found);
    }
    let Some(port) = role.bootstrap_port else { return };
    if (role.name, role.protocol) != (RoleName::Prefill, Some(Protocol::SGLang)) {
        let message = format!(
            "The bootstrapPort of the role {label} is of no use: it is of Prefill with protocol: SGLang alone; remove it."
        );
        found.push(invalid(field, message));
    }
    let ports = u64::from(port)..u64::from(port) + spec.target_ports.len() as u64;
    if port == 0 || 1 << 16 < ports.end {
        let message = format!(
            "The bootstrapPort of the role {label} must be 1 to 65535 for each of spec.targetPorts, of which every one has its own, counted on; correct it."
        );
        found.push(invalid(field, message));
    }
}

/// Whether the bootstrap servers' ports, from `first` on, are those of something else.
fn bootstrap(spec: &InferencePoolSpec, first: u16, field: &str, found: &mut Vec<Complaint>) {
    let events = &spec.kv_events;
    let ranks = spec.target_ports.len() as u64 * u64::from(spec.dp_size);
    let mut taken: Vec<_> =
        spec.target_ports.iter().map(|port| (u64::from(port.number), 1, "spec.targetPorts")).collect();
    if events.transport != EventTransport::None {
        let of_events = [events.port, events.replay_port].map(|port| (port.into(), ranks, "spec.kvEvents"));
        taken.extend(of_events);
    }
    let own = u64::from(first)..u64::from(first) + spec.target_ports.len() as u64;
    let clash = taken.into_iter().find(|(other, count, _)| *other < own.end && own.start < other + count);
    if let Some((_, _, other)) = clash {
        let message = format!(
            "Prefill's bootstrap servers have the ports from {first} on, one for each of spec.targetPorts, and {other} has one of these; give the role another bootstrapPort."
        );
        found.push(invalid(field, message));
    }
}

/// A label of which the two want different values.
pub fn contradiction<'a>(
    one: &'a BTreeMap<String, String>,
    other: &BTreeMap<String, String>,
) -> Option<&'a str> {
    let differs = |(key, value): &(&String, &String)| other.get(*key).is_some_and(|theirs| theirs != *value);
    one.iter().find(differs).map(|(key, _)| key.as_str())
}

fn ports(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    let field = "spec.targetPorts";
    if spec.target_ports.is_empty() && spec.gateway_pool_ref.is_none() {
        found.push(invalid(field, "spec.targetPorts is empty; name the port that the engines serve on."));
    }
    let events = &spec.kv_events;
    let has_events = events.transport != EventTransport::None;
    let ranks = spec.target_ports.len() as u64 * u64::from(spec.dp_size);
    let of_ranks = |first: u16| u64::from(first)..u64::from(first) + ranks;
    let (publishers, replays) = (of_ranks(events.port), of_ranks(events.replay_port));
    for (at, port) in spec.target_ports.iter().map(|port| port.number).enumerate() {
        if port == 0 {
            found.push(invalid(field, "0 is no port; correct spec.targetPorts."));
        }
        if spec.target_ports[..at].iter().any(|other| other.number == port) {
            found.push(invalid(field, format!("The port {port} is twice in spec.targetPorts; keep one.")));
        }
        if has_events && (publishers.contains(&u64::from(port)) || replays.contains(&u64::from(port))) {
            let message = format!(
                "{port} is a target port and a port of spec.kvEvents, of which every rank has its own; engines serve requests and events on different ports: correct one."
            );
            found.push(invalid("spec.kvEvents", message));
        }
    }
    if events.port == events.replay_port {
        let message =
            "spec.kvEvents.port and replayPort must differ: one publishes, the other answers; correct one.";
        found.push(invalid("spec.kvEvents", message));
    } else if has_events && publishers.start < replays.end && replays.start < publishers.end {
        let message = format!(
            "spec.kvEvents.port {} and replayPort {} are too close: {ranks} ranks (targetPorts times dpSize) have one of both each; move one.",
            events.port, events.replay_port
        );
        found.push(invalid("spec.kvEvents", message));
    }
    if has_events && 1 << 16 < publishers.end.max(replays.end) {
        let message = format!(
            "{ranks} ranks (targetPorts times dpSize) have a port and a replayPort of spec.kvEvents each, and the last is beyond 65535; lower them."
        );
        found.push(invalid("spec.kvEvents", message));
    }
    if !(1..=MAX_DP_SIZE).contains(&spec.dp_size) {
        found.push(invalid(
            "spec.dpSize",
            format!("spec.dpSize is {}; 1 to {MAX_DP_SIZE} are possible.", spec.dp_size),
        ));
    }
}

fn workloads(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    for (at, workload) in spec.workloads.iter().enumerate() {
        let same = |other: &&kvrouter_crds::pool::WorkloadRef| {
            other.kind == workload.kind && other.name == workload.name
        };
        if spec.workloads[..at].iter().any(|other| same(&other)) {
            let title = super::validate::title(workload);
            found.push(invalid("spec.workloads", format!("{title} is twice in spec.workloads; keep one.")));
        }
    }
}

fn events(spec: &InferencePoolSpec, found: &mut Vec<Complaint>) {
    let events = &spec.kv_events;
    if events.bridge == Bridge::Inject && events.transport != EventTransport::NATS {
        let message = "spec.kvEvents.bridge: Inject needs transport: NATS; with ZMQ routers connect to the engines themselves: choose bridge: External.";
        found.push(invalid("spec.kvEvents.bridge", message));
    }
    if events.bridge == Bridge::Inject && spec.workloads.is_empty() {
        let message = "spec.kvEvents.bridge: Inject needs spec.workloads; name the Deployments or StatefulSets that may get the bridge, or choose bridge: External.";
        found.push(invalid("spec.kvEvents.bridge", message));
    }
    let Some(nats) = &events.nats else { return };
    if events.transport != EventTransport::NATS {
        let message = "spec.kvEvents.nats needs transport: NATS; remove it or change the transport.";
        found.push(invalid("spec.kvEvents.nats", message));
    }
    broker(nats, found);
}

fn broker(nats: &NatsSpec, found: &mut Vec<Complaint>) {
    if !is_broker(&nats.url) {
        let message = format!(
            "spec.kvEvents.nats.url `{}` must be nats://host:port or tls://host:port, with no password in it; correct it.",
            nats.url
        );
        found.push(invalid("spec.kvEvents.nats.url", message));
    }
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if nats.subject_prefix.is_empty() || !nats.subject_prefix.bytes().all(is_token) {
        let message = "spec.kvEvents.nats.subjectPrefix must be letters, digits, `-` and `_`; correct it.";
        found.push(invalid("spec.kvEvents.nats.subjectPrefix", message));
    }
    if let Some(SecretKeyRef { name, key }) = &nats.credentials_secret_ref
        && (name.is_empty() || key.is_empty() || key.contains('/'))
    {
        let message =
            "spec.kvEvents.nats.credentialsSecretRef must name a Secret and one of its keys; correct it.";
        found.push(invalid("spec.kvEvents.nats.credentialsSecretRef", message));
    }
}
