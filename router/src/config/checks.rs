//! What makes no sense in settings that are well typed.
//!
//! Pure. The first complaint wins; `config` adds file and line to it.

use std::collections::{BTreeMap, HashSet};

use kvrouter_core::policy::decode_demand;
use kvrouter_core::policy::{PolicyKind, Settings};
use kvrouter_crds::config::{
    self as file, DiscoveryBackend, ENGINE_LOAD_SECONDS, EventTransport, LiveSettings, MAX_BLOCK_SIZE,
    MAX_DP_SIZE, MAX_TARGET_PORTS, MAX_WEIGHT, Protocol, RoleName, RouterConfig,
};

use super::kind_of;
use crate::feed::zmtp::Endpoint;

/// One complaint about a value, before its file and line are known.
#[derive(Debug)]
pub(super) struct Complaint {
    pub(super) field: String,
    pub(super) message: String,
}

pub(super) type Checked = Result<(), Complaint>;

pub(super) fn complain(field: impl Into<String>, message: impl Into<String>) -> Checked {
    Err(Complaint { field: field.into(), message: message.into() })
}

/// Checks start settings.
pub(super) fn check(file: &RouterConfig) -> Checked {
    check_version(file.schema_version)?;
    for (field, label) in [("pool.namespace", &file.pool.namespace), ("pool.name", &file.pool.name)] {
        if !is_dns_label(label) {
            return complain(field, "must be a DNS label: lower-case letters, digits and `-`, at most 63");
        }
    }
    if file.model.name.is_empty() {
        return complain("model.name", "must not be empty; give the name that requests use");
    }
    if file.block_size > MAX_BLOCK_SIZE {
        return complain("blockSize", format!("must be 1 to {MAX_BLOCK_SIZE}"));
    }
    check_listen(&file.listen)?;
    check_discovery(file)?;
    check_events(&file.kv_events)?;
    check_policy(kind_of(file.policy), &file.overlap_weights, file.load_weights.as_ref())?;
    check_freshness(&file.freshness)?;
    check_overload(&file.overload)?;
    check_image_weight(file.image_weight)?;
    check_tiers(&file.tier_credits)?;
    check_sessions(&file.session_affinity)?;
    check_engine_load(file.engine_load)?;
    check_shadows(&file.shadow_policies, kind_of(file.policy))?;
    check_demand(&file.decode_input_demand, kind_of(file.policy))?;
    check_receipt_files(file.receipt_files.as_ref())?;
    check_tenancy(file.tenancy.as_ref())?;
    let limits = [
        ("limits.requestBodyBytes", file.limits.request_body_bytes),
        ("limits.connectTimeoutSeconds", file.limits.connect_timeout_seconds),
        ("limits.firstByteTimeoutSeconds", file.limits.first_byte_timeout_seconds),
        ("limits.receipts", file.limits.receipts),
        ("limits.promptsPerRequest", file.limits.prompts_per_request),
    ];
    match limits.iter().find(|(_, limit)| *limit == 0) {
        Some((field, _)) => complain(*field, "must be at least 1"),
        None => Ok(()),
    }
}

/// What is no name of a header.
pub(super) const NO_HEADER: &str = "is no name of a header; write one such as X-Tenant";

fn check_tenancy(tenancy: Option<&file::Tenancy>) -> Checked {
    let Some(tenancy) = tenancy else { return Ok(()) };
    if http::HeaderName::from_bytes(tenancy.header.as_bytes()).is_err() {
        return complain("tenancy.header", NO_HEADER);
    }
    if file::NO_TENANT_HEADERS.contains(&tenancy.header.to_ascii_lowercase().as_str()) {
        let message = "is about one connection or written by the router, so it cannot name a tenant; choose another header";
        return complain("tenancy.header", message);
    }
    Ok(())
}

fn check_engine_load(load: file::EngineLoad) -> Checked {
    let (least, most) = (ENGINE_LOAD_SECONDS.start(), ENGINE_LOAD_SECONDS.end());
    match ENGINE_LOAD_SECONDS.contains(&load.interval_seconds) {
        true => Ok(()),
        false => complain("engineLoad.intervalSeconds", format!("must be {least} to {most}")),
    }
}

fn check_receipt_files(files: Option<&file::ReceiptFiles>) -> Checked {
    let Some(files) = files else { return Ok(()) };
    if files.directory.as_os_str().is_empty() {
        return complain("receiptFiles.directory", "must not be empty; name a folder of this router's own");
    }
    if files.max_bytes < MIN_RECEIPT_FILE_BYTES {
        return complain("receiptFiles.maxBytes", format!("must be at least {MIN_RECEIPT_FILE_BYTES}"));
    }
    if !(2..=MAX_RECEIPT_FILES).contains(&files.max_files) {
        return complain("receiptFiles.maxFiles", format!("must be 2 to {MAX_RECEIPT_FILES}"));
    }
    Ok(())
}

/// A smaller file holds a handful of receipts and is not worth its name.
const MIN_RECEIPT_FILE_BYTES: u64 = 64 << 10;
/// The folder is listed whenever a file is begun.
const MAX_RECEIPT_FILES: u64 = 10_000;

/// Checks the version of either file.
pub(super) fn check_version(version: u32) -> Checked {
    match version {
        file::SCHEMA_VERSION => Ok(()),
        newer if newer > file::SCHEMA_VERSION => complain(
            "schemaVersion",
            format!(
                "is {newer}, and this router understands {}: VersionSkew; upgrade the router",
                file::SCHEMA_VERSION
            ),
        ),
        older => complain("schemaVersion", format!("is {older}; write {}", file::SCHEMA_VERSION)),
    }
}

fn check_listen(listen: &file::Listen) -> Checked {
    let all =
        [("listen.http", listen.http), ("listen.metrics", listen.metrics), ("listen.admin", listen.admin)];
    for (position, (field, address)) in all.iter().enumerate() {
        let same =
            all[..position].iter().find(|(_, other)| other.port() == address.port() && address.port() != 0);
        if let Some((other, _)) = same {
            return complain(*field, format!("has the port of {other}; give each its own"));
        }
    }
    Ok(())
}

fn check_discovery(file: &RouterConfig) -> Checked {
    let discovery = &file.discovery;
    match (discovery.backend, &discovery.kubernetes) {
        (DiscoveryBackend::Static, None) => check_workers(file),
        (DiscoveryBackend::Static, Some(_)) => {
            complain("discovery.kubernetes", "is set, but discovery.backend is Static; remove one of them")
        }
        (DiscoveryBackend::Kubernetes, None) => complain(
            "discovery.kubernetes",
            "is missing, and discovery.backend is Kubernetes; give namespace, selector and targetPorts",
        ),
        (DiscoveryBackend::Kubernetes, Some(_)) if !discovery.workers.is_empty() => {
            complain("discovery.workers", "are listed, but discovery.backend is Kubernetes; remove them")
        }
        (DiscoveryBackend::Kubernetes, Some(kubernetes)) => {
            check_kubernetes(kubernetes)?;
            check_last_rank(kubernetes, &file.kv_events)
        }
    }
}

fn check_kubernetes(kubernetes: &file::KubernetesDiscovery) -> Checked {
    let field = |name: &str| format!("discovery.kubernetes.{name}");
    if !is_dns_label(&kubernetes.namespace) {
        return complain(
            field("namespace"),
            "must be a DNS label: lower-case letters, digits and `-`, at most 63",
        );
    }
    check_selector(&field("selector"), &kubernetes.selector)?;
    let ports = &kubernetes.target_ports;
    if !(1..=MAX_TARGET_PORTS).contains(&ports.len()) {
        return complain(field("targetPorts"), format!("must be 1 to {MAX_TARGET_PORTS} ports"));
    }
    for (position, port) in ports.iter().enumerate() {
        let field = field(&format!("targetPorts[{position}]"));
        if *port == 0 {
            return complain(field, "must be 1 to 65535");
        }
        if ports[..position].contains(port) {
            return complain(field, format!("names {port} a second time; list each port once"));
        }
    }
    if !(1..=MAX_DP_SIZE).contains(&kubernetes.dp_size) {
        return complain(field("dpSize"), format!("must be 1 to {MAX_DP_SIZE}"));
    }
    for (position, role) in kubernetes.roles.iter().enumerate() {
        let field = |name: &str| field(&format!("roles[{position}].{name}"));
        if kubernetes.roles[..position].iter().any(|other| other.name == role.name) {
            return complain(
                field("name"),
                format!("names {:?} a second time; list each role once", role.name),
            );
        }
        check_selector(&field("selector"), &role.selector)?;
        check_role(field, role.name, role.protocol, role.bootstrap_port)?;
        let last = u32::from(role.bootstrap_port.unwrap_or(0)) + ports.len() as u32 - 1;
        if last > u32::from(u16::MAX) {
            return complain(
                format!("discovery.kubernetes.roles[{position}].bootstrapPort"),
                "is that of the first target port, and the last one's would be beyond 65535; lower it",
            );
        }
    }
    match &kubernetes.live_settings_config_map {
        Some(name) if !is_object_name(name) => complain(
            field("liveSettingsConfigMap"),
            "must be the name of a ConfigMap: lower-case letters, digits, `-` and `.`, at most 253",
        ),
        _ => Ok(()),
    }
}

/// Every rank of every target port has event ports of its own.
fn check_last_rank(kubernetes: &file::KubernetesDiscovery, events: &file::KvEvents) -> Checked {
    let ranks = kubernetes.target_ports.len() as u64 * u64::from(kubernetes.dp_size);
    let is_beyond = |port: u16| u64::from(port) + ranks > 1 << 16;
    if events.transport == EventTransport::ZMQ && (is_beyond(events.port) || is_beyond(events.replay_port)) {
        let message = format!(
            "makes {ranks} ranks per pod, and the last one's event ports are beyond 65535; lower it, kvEvents.port or \
             kvEvents.replayPort"
        );
        return complain("discovery.kubernetes.dpSize", message);
    }
    Ok(())
}

/// A selector without labels would select every pod of the namespace.
pub(super) fn check_selector(field: &str, selector: &BTreeMap<String, String>) -> Checked {
    if selector.is_empty() {
        return complain(field, "must not be empty: it would be every pod; give at least one label");
    }
    match selector.iter().find(|(name, value)| !is_label_name(name) || !is_label_value(value)) {
        Some((name, value)) => complain(field, format!("`{name}: {value}` is no label; write name: value")),
        None => Ok(()),
    }
}

/// Whether `name` can name a label: a word of at most 63, with or without a
/// domain and `/` before it.
fn is_label_name(name: &str) -> bool {
    let (domain, word) = name.split_once('/').map_or((None, name), |(domain, word)| (Some(domain), word));
    !word.is_empty() && is_label_value(word) && domain.is_none_or(is_object_name)
}

/// Whether `value` can be the value of a label.
fn is_label_value(value: &str) -> bool {
    let ends = |edge: Option<char>| edge.is_none_or(|edge| edge.is_ascii_alphanumeric());
    let inner = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    value.len() <= 63 && value.chars().all(inner) && ends(value.chars().next()) && ends(value.chars().last())
}

/// Whether `name` can name an object: DNS labels with dots between them.
fn is_object_name(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_dns_label)
}

fn check_workers(file: &RouterConfig) -> Checked {
    let mut seen = HashSet::new();
    for (position, worker) in file.discovery.workers.iter().enumerate() {
        let field = |name: &str| format!("discovery.workers[{position}].{name}");
        let id = worker_id(&worker.url).map_err(|message| Complaint { field: field("url"), message })?;
        if !seen.insert(id.clone()) {
            return complain(field("url"), format!("names {id} a second time; list each worker once"));
        }
        if worker.dp_size == 0 || worker.dp_size > MAX_DP_SIZE {
            return complain(field("dpSize"), format!("must be 1 to {MAX_DP_SIZE}"));
        }
        check_role(field, worker.role, worker.protocol, worker.bootstrap_port)?;
        let Some(events) = &worker.kv_events else { continue };
        let endpoints = [
            ("kvEvents.endpoint", Some(&events.endpoint)),
            ("kvEvents.replayEndpoint", events.replay_endpoint.as_ref()),
        ];
        for (name, endpoint) in endpoints {
            if let Some(Err(error)) = endpoint.map(|endpoint| endpoint.parse::<Endpoint>()) {
                return complain(field(name), error.to_string());
            }
        }
    }
    Ok(())
}

/// The worker that a base URL names: its `host:port`.
pub fn worker_id(url: &str) -> Result<String, String> {
    let hint = "write http://host:port";
    let uri: http::Uri = url.parse().map_err(|error| format!("is no URL ({error}); {hint}"))?;
    if uri.scheme_str() != Some("http") {
        return Err(format!("must be plain http inside the cluster; {hint}"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(format!("must have no path and no query; {hint}"));
    }
    let authority = uri.authority().ok_or_else(|| format!("has no host; {hint}"))?;
    let (host, port) = (authority.host().to_ascii_lowercase(), authority.port_u16());
    let spelt = authority.as_str().to_ascii_lowercase();
    match port {
        Some(port) if port > 0 && spelt == format!("{host}:{port}") => Ok(spelt),
        None if spelt == host => Ok(format!("{host}:80")),
        _ => Err(format!("must have a port of 1 to 65535 and no user; {hint}")),
    }
}

fn check_events(events: &file::KvEvents) -> Checked {
    for (field, port) in [("kvEvents.port", events.port), ("kvEvents.replayPort", events.replay_port)] {
        if port == 0 {
            return complain(field, "must be 1 to 65535");
        }
    }
    match (events.transport, &events.nats) {
        (EventTransport::NATS, None) => complain(
            "kvEvents.nats",
            "is missing, and kvEvents.transport is NATS; give nats.url, or transport ZMQ or None",
        ),
        (EventTransport::ZMQ | EventTransport::None, Some(_)) => {
            complain("kvEvents.nats", "is set, but kvEvents.transport is not NATS; remove one of them")
        }
        (EventTransport::NATS, Some(nats)) if nats.url.parse::<async_nats::ServerAddr>().is_err() => {
            complain("kvEvents.nats.url", "is no NATS address; write nats://host:port")
        }
        (EventTransport::NATS, Some(nats)) if !is_subject_prefix(&nats.subject_prefix) => {
            complain("kvEvents.nats.subjectPrefix", "must be letters, digits, `-` and `_`")
        }
        _ => Ok(()),
    }
}

/// Checks live settings of a router with the start settings `file`; `base` is in
/// force where they say nothing.
pub(super) fn check_live(live: &LiveSettings, file: &RouterConfig, base: &Settings) -> Checked {
    check_version(live.schema_version)?;
    let kind = live.policy.map_or(base.policy, kind_of);
    check_policy(kind, &live.overlap_weights.unwrap_or_default(), live.load_weights.as_ref())?;
    check_freshness(&live.freshness.unwrap_or_default())?;
    check_overload(&live.overload.unwrap_or_default())?;
    check_image_weight(live.image_weight.unwrap_or(0.0))?;
    check_tiers(&live.tier_credits.unwrap_or_default())?;
    check_sessions(&live.session_affinity.unwrap_or_default())?;
    check_shadows(live.shadow_policies.as_deref().unwrap_or_default(), kind)?;
    let demand = file::DecodeInputDemand {
        mode: super::file_demand(base.decode_demand.mode),
        request_weight: base.decode_demand.request_weight,
    };
    check_demand(&live.decode_input_demand.unwrap_or(demand), kind)?;
    if !live.foreign_selectors.is_empty() && file.discovery.backend == DiscoveryBackend::Static {
        return complain("foreignSelectors", "are about pods, and discovery.backend is Static; remove them");
    }
    for (position, selector) in live.foreign_selectors.iter().enumerate() {
        check_selector(&format!("foreignSelectors[{position}]"), selector)?;
    }
    Ok(())
}

fn check_overload(overload: &file::Overload) -> Checked {
    if overload.max_queued_tokens == Some(0) {
        return complain("overload.maxQueuedTokens", "must be at least 1; leave it out for no limit");
    }
    if !(0.0..=0.99).contains(&overload.cold_reserve) {
        return complain("overload.coldReserve", "must be 0 to 0.99");
    }
    if overload.cold_reserve > 0.0 && overload.max_queued_tokens.is_none() {
        return complain(
            "overload.coldReserve",
            "is a share of overload.maxQueuedTokens, which is not set; set it",
        );
    }
    Ok(())
}

fn check_image_weight(weight: f64) -> Checked {
    if (0.0..=MAX_WEIGHT).contains(&weight) {
        return Ok(());
    }
    complain("imageWeight", format!("is {weight}; must be 0 to {MAX_WEIGHT}"))
}

fn check_tiers(tiers: &file::TierCredits) -> Checked {
    let all = [("device", tiers.device), ("host", tiers.host), ("disk", tiers.disk)];
    for (tier, credit) in all {
        if !(0.0..=1.0).contains(&credit) {
            return complain(format!("tierCredits.{tier}"), format!("is {credit}; must be 0 to 1"));
        }
    }
    for [(faster, above), (slower, below)] in [[all[0], all[1]], [all[1], all[2]]] {
        if below > above {
            return complain(
                format!("tierCredits.{slower}"),
                format!("is {below}, more than tierCredits.{faster}; a slower tier cannot be worth more"),
            );
        }
    }
    Ok(())
}

fn check_sessions(affinity: &file::SessionAffinity) -> Checked {
    if (1..=604_800).contains(&affinity.ttl_seconds) {
        return Ok(());
    }
    complain("sessionAffinity.ttlSeconds", "must be 1 to 604800")
}

/// A shadow is evaluated beside the real policy, and each of them once.
fn check_shadows(shadows: &[file::Policy], real: PolicyKind) -> Checked {
    for (at, shadow) in shadows.iter().enumerate() {
        let field = format!("shadowPolicies[{at}]");
        if kind_of(*shadow) == real {
            return complain(field, "is the real policy, and shadows are evaluated beside it; remove it");
        }
        if shadows[..at].contains(shadow) {
            return complain(field, format!("names {shadow:?} a second time; list each policy once"));
        }
    }
    Ok(())
}

/// Input demand replaces what a cost policy prefers; the others have no cost.
fn check_demand(demand: &file::DecodeInputDemand, policy: PolicyKind) -> Checked {
    let weight = demand.request_weight;
    if !(0.0..=MAX_WEIGHT).contains(&weight) {
        return complain(
            "decodeInputDemand.requestWeight",
            format!("is {weight}; must be 0 to {MAX_WEIGHT}"),
        );
    }
    if demand.mode != file::DemandMode::Disabled && !decode_demand::suits(policy) {
        return complain(
            "decodeInputDemand.mode",
            format!(
                "needs policy CachePlusLoad or KvAware, and the policy is {}; change one of them",
                policy.label()
            ),
        );
    }
    Ok(())
}

/// Both workers of a pair must be told how they hand requests over.
fn check_role(
    field: impl Fn(&str) -> String,
    role: RoleName,
    protocol: Option<Protocol>,
    bootstrap_port: Option<u16>,
) -> Checked {
    match (role, protocol) {
        (RoleName::Mixed, Some(_)) => {
            return complain(
                field("protocol"),
                "is of Prefill and Decode alone; remove it or change the role",
            );
        }
        (RoleName::Prefill | RoleName::Decode, None) => {
            return complain(
                field("protocol"),
                "is missing; write SGLang or NIXL, whichever its engines speak",
            );
        }
        _ => {}
    }
    match bootstrap_port {
        Some(0) => complain(field("bootstrapPort"), "must be 1 to 65535"),
        Some(_) if (role, protocol) != (RoleName::Prefill, Some(Protocol::SGLang)) => {
            complain(field("bootstrapPort"), "is of Prefill with protocol SGLang alone; remove it")
        }
        _ => Ok(()),
    }
}

fn check_policy(
    policy: PolicyKind,
    overlap: &file::OverlapWeights,
    load: Option<&file::LoadWeights>,
) -> Checked {
    let mut weights = vec![("overlapWeights.default", overlap.default)];
    weights.extend(overlap.prefill.map(|weight| ("overlapWeights.prefill", weight)));
    weights.extend(overlap.decode.map(|weight| ("overlapWeights.decode", weight)));
    if let Some(load) = load {
        if policy != PolicyKind::CachePlusLoad {
            return complain(
                "loadWeights",
                "only count with policy CachePlusLoad; remove them or change policy",
            );
        }
        weights.extend([
            ("loadWeights.queue", load.queue),
            ("loadWeights.decode", load.decode),
            ("loadWeights.request", load.request),
            ("loadWeights.imbalance", load.imbalance),
        ]);
    }
    match weights.iter().find(|(_, weight)| !(0.0..=MAX_WEIGHT).contains(weight)) {
        Some((field, weight)) => complain(*field, format!("is {weight}; must be 0 to {MAX_WEIGHT}")),
        None => Ok(()),
    }
}

fn check_freshness(freshness: &file::Freshness) -> Checked {
    if !(3..=3600).contains(&freshness.budget_seconds) {
        return complain(
            "freshness.budgetSeconds",
            "must be 3 to 3600: below 3 a single lost heartbeat ends all credit",
        );
    }
    Ok(())
}

/// Whether `label` is a DNS label.
pub fn is_dns_label(label: &str) -> bool {
    let inner =
        |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-';
    (1..=63).contains(&label.len())
        && label.chars().all(inner)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Whether `prefix` can be the first token of a subject.
pub fn is_subject_prefix(prefix: &str) -> bool {
    let allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_');
    (1..=64).contains(&prefix.len()) && prefix.chars().all(allowed)
}
