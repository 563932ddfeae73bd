//! Is the spec of a pool in order, and is everything there that it names? Pure.
//!
//! What makes the whole pool unusable is an [`Invalid`]; a named workload that
//! is not there leaves the others as they are, so it is a complaint beside a
//! [`ValidPool`].

use k8s_openapi::api::core::v1::{Container, PodSpec};
use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::{Finding, Reason, WorkloadState, names};
use kvrouter_crds::config::{DEFAULT_SUBJECT_PREFIX, EventTransport};
use kvrouter_crds::pool::{InferencePoolSpec, SecretKeyRef, WorkloadRef};

use super::observe::{Observed, WorkloadFacts, WorkloadSeen};
use super::rules;
use crate::config::ChildFlags;
use crate::facts::{is_finished, is_terminating, matches, name};
use crate::gateway::written;
use crate::verdict::Complaint;

/// A pool whose spec makes sense.
#[derive(Clone, Debug)]
pub struct ValidPool {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its spec.
    pub spec: InferencePoolSpec,
    /// The broker that its events take; none with another transport.
    pub broker: Option<Broker>,
    /// Named workloads that may be changed, in the order of the spec.
    pub targets: Vec<Target>,
    /// Named workloads that may not, and why.
    pub refused: Vec<Refused>,
    /// What is wrong with what the spec names, worst first.
    pub complaints: Vec<Complaint>,
}

/// The broker of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broker {
    /// `nats://host:port` or `tls://host:port`.
    pub url: String,
    /// Where its credentials are; none for no authentication.
    pub credentials: Option<SecretKeyRef>,
    /// First token of every subject.
    pub subject_prefix: String,
}

/// A named workload that may be changed.
#[derive(Clone, Debug)]
pub struct Target {
    /// As the spec names it.
    pub reference: WorkloadRef,
    /// What it is now.
    pub facts: WorkloadFacts,
    /// Name of the engine's container.
    pub container: String,
}

/// A named workload that may not be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// As the spec names it.
    pub reference: WorkloadRef,
    /// Why.
    pub why: Refusal,
    /// A sentence that ends with the next step.
    pub message: String,
}

/// Why a named workload may not be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such workload.
    NotFound,
    /// Another controller makes it.
    Controlled,
    /// Its pods are not the pool's.
    OutsidePool,
    /// It has no container of that name.
    ContainerNotFound,
    /// Its engine's container cannot be told from the others.
    ContainerAmbiguous,
}

impl Refusal {
    /// As the pool's `status.workloads[].state` spells it.
    pub const fn state(self) -> WorkloadState {
        match self {
            Self::NotFound => WorkloadState::WorkloadNotFound,
            Self::Controlled => WorkloadState::WorkloadControlled,
            Self::OutsidePool => WorkloadState::WorkloadOutsidePool,
            Self::ContainerNotFound => WorkloadState::ContainerNotFound,
            Self::ContainerAmbiguous => WorkloadState::ContainerAmbiguous,
        }
    }

    /// As the pool's condition `ResolvedRefs` does.
    pub const fn reason(self) -> Reason {
        match self {
            Self::NotFound => Reason::WorkloadNotFound,
            Self::Controlled => Reason::WorkloadControlled,
            Self::OutsidePool => Reason::WorkloadOutsidePool,
            Self::ContainerNotFound => Reason::ContainerNotFound,
            Self::ContainerAmbiguous => Reason::ContainerAmbiguous,
        }
    }
}

/// Why a pool cannot be used: at least one complaint, worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<Complaint>);

/// Judges a pool.
pub fn validate(pool: &InferencePool, observed: &Observed, flags: &ChildFlags) -> Result<ValidPool, Invalid> {
    let own_name = pool.metadata.name.clone().unwrap_or_default();
    let mut complaints = rules::complaints(&own_name, &pool.spec);
    complaints.extend(observed.unresolved.clone());
    let broker = broker(&pool.spec, flags);
    complaints.extend(broker.as_ref().err().cloned());
    complaints.extend(conflicts(&own_name, observed));
    let (Ok(broker), true) = (broker, complaints.is_empty()) else { return Err(Invalid(complaints)) };
    let mut targets = Vec::new();
    let mut refused = Vec::new();
    for seen in &observed.workloads {
        match target(&pool.spec, seen) {
            Ok(target) => targets.push(target),
            Err(refusal) => {
                complaints.push(complaint(&refusal));
                refused.push(refusal);
            }
        }
    }
    complaints.extend(undeclared_ports(&pool.spec, observed));
    Ok(ValidPool {
        namespace: pool.metadata.namespace.clone().unwrap_or_default(),
        name: own_name,
        spec: pool.spec.clone(),
        broker,
        targets,
        refused,
        complaints,
    })
}

/// The broker that a pool's events take; none with another transport than NATS.
pub fn broker(spec: &InferencePoolSpec, flags: &ChildFlags) -> Result<Option<Broker>, Complaint> {
    if spec.kv_events.transport != EventTransport::NATS {
        return Ok(None);
    }
    if let Some(nats) = &spec.kv_events.nats {
        return Ok(Some(Broker {
            url: nats.url.clone(),
            credentials: nats.credentials_secret_ref.clone(),
            subject_prefix: nats.subject_prefix.clone(),
        }));
    }
    let Some(url) = flags.nats_url.clone() else {
        return Err(Complaint::accepted(
            Reason::InvalidSpec,
            "spec.kvEvents.nats",
            "Events go over NATS and no broker is named; add spec.kvEvents.nats.url, install the operator with \
             nats.enabled, or choose spec.kvEvents.transport: ZMQ.",
        ));
    };
    Ok(Some(Broker { url, credentials: None, subject_prefix: DEFAULT_SUBJECT_PREFIX.to_owned() }))
}

/// Pods that two pools claim, one complaint for each other pool.
fn conflicts(own_name: &str, observed: &Observed) -> Vec<Complaint> {
    let conflict = |other: &InferencePool| {
        let selector = &other.spec.selector.match_labels;
        let shared = observed
            .pods
            .iter()
            .filter(|pod| !is_terminating(pod) && !is_finished(pod))
            .filter(|pod| matches(selector, pod.metadata.labels.as_ref()));
        let shared = names(shared.map(|pod| name(pod)));
        let other_name = other.metadata.name.as_deref().unwrap_or_default();
        (!shared.is_empty()).then(|| {
            Complaint::accepted(
                Reason::PoolConflict,
                "spec.selector",
                format!(
                    "Pods are in two pools, {own_name} and {other_name}, and get no requests: {shared}; make the \
                     selectors of both pools exclude each other."
                ),
            )
        })
    };
    observed.other_pools.iter().filter_map(|other| conflict(other)).collect()
}

fn target(spec: &InferencePoolSpec, seen: &WorkloadSeen) -> Result<Target, Refused> {
    let reference = &seen.reference;
    let title = title(reference);
    let refuse = |why, message: String| Refused { reference: reference.clone(), why, message };
    let Some(facts) = &seen.found else {
        let message = format!(
            "There is no {title} in the namespace; correct its name or remove it from spec.workloads."
        );
        return Err(refuse(Refusal::NotFound, message));
    };
    if let Some(owner) = &facts.controller {
        let message = format!(
            "{title} is made by {owner}, which would undo every change; set PYTHONHASHSEED and the bridge there and \
             remove it from spec.workloads."
        );
        return Err(refuse(Refusal::Controlled, message));
    }
    let labels = facts.template.metadata.as_ref().and_then(|metadata| metadata.labels.as_ref());
    if !matches(&spec.selector.match_labels, labels) {
        let message = format!(
            "The pods of {title} do not carry all labels of {} ({}); add them to its template or remove it from \
             spec.workloads.",
            written(spec, "spec.selector"),
            selector_text(spec)
        );
        return Err(refuse(Refusal::OutsidePool, message));
    }
    let container = container(spec, reference, facts.template.spec.as_ref())
        .map_err(|(why, message)| refuse(why, message))?;
    Ok(Target { reference: reference.clone(), facts: facts.clone(), container })
}

/// Name of the engine's container: the one that is named, else the only one that
/// declares the first target port, else the only one.
fn container(
    spec: &InferencePoolSpec,
    reference: &WorkloadRef,
    template: Option<&PodSpec>,
) -> Result<String, (Refusal, String)> {
    let containers = template.map_or(&[][..], |template| &template.containers);
    let title = title(reference);
    let all = containers.iter().map(|container| container.name.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(wanted) = &reference.container {
        let found = containers.iter().any(|container| container.name == *wanted);
        let message =
            format!("{title} has no container {wanted}, but {all}; correct container in spec.workloads.");
        return if found { Ok(wanted.clone()) } else { Err((Refusal::ContainerNotFound, message)) };
    }
    let Some(port) = spec.target_ports.first().map(|port| port.number) else {
        return Err((Refusal::ContainerAmbiguous, format!("{title}: the pool has no target port; add one.")));
    };
    let declaring: Vec<&Container> =
        containers.iter().filter(|container| declares(container, port)).collect();
    match (&declaring[..], containers) {
        ([one], _) => Ok(one.name.clone()),
        ([], [one]) => Ok(one.name.clone()),
        _ => {
            let how_many = if declaring.is_empty() { "None" } else { "More than one" };
            let message = format!(
                "{how_many} of the containers of {title} ({all}) declares port {port}; name the engine's as container \
                 in spec.workloads."
            );
            Err((Refusal::ContainerAmbiguous, message))
        }
    }
}

fn complaint(refusal: &Refused) -> Complaint {
    Complaint::resolved(refusal.why.reason(), "spec.workloads", refusal.message.clone())
}

/// Target ports that no container declares. Ports need no declaration to work,
/// so this is said only of pods that declare some, and not of a port at which a
/// router finds a worker.
fn undeclared_ports(spec: &InferencePoolSpec, observed: &Observed) -> Option<Complaint> {
    let mut declared: Vec<u16> = Vec::new();
    for pod in observed.pods.iter().filter(|pod| !is_terminating(pod)) {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        declared.extend(containers.flat_map(ports));
    }
    if declared.is_empty() {
        return None;
    }
    let served = |port: u16| {
        let reports = observed.routers.iter().flat_map(|router| &router.pods);
        let mut workers =
            reports.filter_map(|pod| pod.fresh_report(observed.now)).flat_map(|report| &report.workers);
        workers.any(|worker| worker.ready && worker.worker.ends_with(&format!(":{port}")))
    };
    let missing: Vec<u16> = spec
        .target_ports
        .iter()
        .map(|port| port.number)
        .filter(|port| !declared.contains(port) && !served(*port))
        .collect();
    let first = missing.first()?;
    declared.sort_unstable();
    declared.dedup();
    let declared: Vec<String> = declared.iter().take(10).map(u16::to_string).collect();
    Some(Complaint::resolved(
        Reason::PortNotDeclared,
        "spec.targetPorts",
        format!(
            "No container of the pool's pods declares target port {first}, and no router finds an engine there; they \
             declare {}; correct {} or declare the port.",
            declared.join(", "),
            written(spec, "spec.targetPorts")
        ),
    ))
}

fn declares(container: &Container, port: u16) -> bool {
    ports(container).any(|declared| declared == port)
}

fn ports(container: &Container) -> impl Iterator<Item = u16> {
    container.ports.iter().flatten().filter_map(|port| u16::try_from(port.container_port).ok())
}

/// A workload in words: `Deployment qwen`.
pub fn title(reference: &WorkloadRef) -> String {
    format!("{} {}", reference.kind.as_str(), reference.name)
}

/// The selector as `kubectl -l` takes it.
pub fn selector_text(spec: &InferencePoolSpec) -> String {
    let pairs: Vec<String> =
        spec.selector.match_labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

/// The command that lists pods of the pool that carry `labels`.
pub fn get_pods(pool: &InferencePool, labels: &str) -> String {
    format!("kubectl get pods -n {} -l {labels}", pool.metadata.namespace.as_deref().unwrap_or_default())
}

/// What is said of a pool whose selector matches nothing, or is not known.
pub fn no_pods(pool: &InferencePool) -> Finding {
    if pool.spec.selector.is_empty() {
        let message = "Not looked at before Accepted and ResolvedRefs are in order; see there.";
        return Finding::unknown(Reason::Pending, message);
    }
    let message = format!(
        "No pod carries the labels of {}; check with: {}",
        written(&pool.spec, "spec.selector"),
        get_pods(pool, &selector_text(&pool.spec))
    );
    Finding::unknown(Reason::NoPods, message)
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
