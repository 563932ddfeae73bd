//! Which pods are workers: pods and settings in, members out. Pure.
//!
//! A pod counts as long as it runs, has an address and is not being deleted;
//! each target port of it is a worker. Whether that may be picked is another
//! question: the pod must be ready, of exactly one role and of no other pool.
//! What does not count any more is left out, which ends its workers.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kvrouter_core::ids::{Role, WorkerId};
use kvrouter_crds::config::{Engine, EventTransport, KubernetesDiscovery, KvEvents, RoleName, RouterConfig};

use super::{EventSockets, Exclusion, Handover, Member, Place, PodName};

/// Labels that a pod must all carry.
pub type Selector = BTreeMap<String, String>;

/// What matters of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Which one.
    pub pod: PodName,
    labels: BTreeMap<String, String>,
    /// Where it can be reached; `None` for a pod that does not count.
    address: Option<String>,
    ready: bool,
    /// Seconds since 1970.
    created: i64,
}

/// The settings that decide what a pod is.
#[derive(Clone, Debug)]
pub struct Rules<'a> {
    /// Selector, ports and roles.
    pub discovery: &'a KubernetesDiscovery,
    /// Selectors of other pools.
    pub foreign: &'a [Selector],
    /// What the pool's engines are.
    pub engine: Engine,
    /// Where events are.
    pub events: &'a KvEvents,
}

impl<'a> Rules<'a> {
    /// The rules of `config`, where its workers are pods.
    pub fn of(config: &'a RouterConfig, foreign: &'a [Selector]) -> Option<Self> {
        let discovery = config.discovery.kubernetes.as_ref()?;
        Some(Self { discovery, foreign, engine: config.engine, events: &config.kv_events })
    }
}

impl PodFacts {
    /// What matters of `pod`; `None` for one without a name or UID, which no
    /// API server sends.
    pub fn of(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let name = PodName { name: meta.name.as_deref()?.into(), uid: meta.uid.as_deref()?.into() };
        let status = pod.status.as_ref();
        let runs = status.and_then(|status| status.phase.as_deref()) == Some("Running");
        let counts = runs && meta.deletion_timestamp.is_none();
        let address = status.and_then(|status| status.pod_ip.as_deref()).filter(|ip| !ip.is_empty());
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        Some(Self {
            pod: name,
            labels: meta.labels.clone().unwrap_or_default(),
            address: address.filter(|_| counts).map(host),
            ready: conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True"),
            created: meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        })
    }

    fn carries(&self, selector: &Selector) -> bool {
        selector.iter().all(|(name, value)| self.labels.get(name) == Some(value))
    }
}

/// As it stands in front of a port: IPv6 in brackets.
fn host(ip: &str) -> String {
    if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() }
}

/// The members that `pods` are, in the order of their addresses; those that may
/// not be picked say why. The order of `pods` does not matter.
pub fn members<'a>(pods: impl IntoIterator<Item = &'a PodFacts>, rules: &Rules<'_>) -> Vec<Member> {
    let mut by_address: BTreeMap<&str, Vec<&PodFacts>> = BTreeMap::new();
    for pod in pods {
        if let Some(address) = &pod.address {
            by_address.entry(address).or_default().push(pod);
        }
    }
    let mut members = Vec::new();
    for (address, mut pods) in by_address {
        // The address belongs to one of them: one that is ready, else the youngest.
        pods.sort_by_key(|pod| (!pod.ready, std::cmp::Reverse(pod.created), &pod.pod));
        let Some((owner, others)) = pods.split_first() else { continue };
        members.extend(workers(address, owner, place(owner, rules), rules));
        for other in others {
            let exclusion = Some(Exclusion::SameAddress);
            members.extend(workers(
                address,
                other,
                Place { role: Role::Mixed, handover: None, exclusion },
                rules,
            ));
        }
    }
    members
}

/// What a pod is picked for, and what speaks against it.
fn place(pod: &PodFacts, rules: &Rules<'_>) -> Place {
    let roles = &rules.discovery.roles;
    let mut matching = roles.iter().filter(|role| pod.carries(&role.selector));
    let (role, labels) = match (matching.next(), matching.next()) {
        (None, _) if roles.is_empty() => (None, None),
        (None, _) => (None, Some(Exclusion::NoRole)),
        (Some(role), None) => (Some(role), None),
        (Some(_), Some(_)) => (None, Some(Exclusion::TwoRoles)),
    };
    let foreign = rules.foreign.iter().any(|selector| !selector.is_empty() && pod.carries(selector));
    let exclusion = match labels {
        _ if foreign => Some(Exclusion::TwoPools),
        Some(exclusion) => Some(exclusion),
        None if pod.ready => None,
        None => Some(Exclusion::PodNotReady),
    };
    let handover = role.and_then(|role| Handover::of(role.protocol, role.bootstrap_port));
    Place { role: role.map_or(Role::Mixed, |role| role_of(role.name)), handover, exclusion }
}

/// One worker per target port. Ranks of a pod count on from port to port, and
/// so do their sockets.
fn workers<'a>(
    address: &'a str,
    pod: &'a PodFacts,
    place: Place,
    rules: &'a Rules<'a>,
) -> impl Iterator<Item = Member> + 'a {
    let with_sockets = rules.events.transport == EventTransport::ZMQ;
    let dp_size = rules.discovery.dp_size;
    rules.discovery.target_ports.iter().zip(0u32..).map(move |(port, nth)| Member {
        id: WorkerId::new(format!("{address}:{port}")),
        pod: Some(pod.pod.clone()),
        place: Place { handover: place.handover.map(|handover| handover.of_port(nth)), ..place },
        engine: rules.engine,
        dp_size,
        events: with_sockets.then(|| EventSockets::at(address, nth * dp_size, rules.events)).flatten(),
    })
}

/// A role of the settings as the core knows it.
pub const fn role_of(role: RoleName) -> Role {
    match role {
        RoleName::Mixed => Role::Mixed,
        RoleName::Prefill => Role::Prefill,
        RoleName::Decode => Role::Decode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A ready pod of the pool, changed by `patch` (null removes).
    fn pod(name: &str, patch: &Value) -> PodFacts {
        let mut pod = json!({
            "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": {"app": "qwen"},
                         "creationTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"phase": "Running", "podIP": "10.0.0.1",
                       "conditions": [{"type": "Ready", "status": "True"}]},
        });
        merge(&mut pod, patch);
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("named")
    }

    fn merge(into: &mut Value, patch: &Value) {
        let (Some(into), Some(patch)) = (into.as_object_mut(), patch.as_object()) else { return };
        for (key, value) in patch {
            if value.is_object() && into.get(key).is_some_and(Value::is_object) {
                merge(&mut into[key], value);
            } else if value.is_null() {
                into.remove(key);
            } else {
                into.insert(key.clone(), value.clone());
            }
        }
    }

    fn config(more: &str) -> RouterConfig {
        let text = format!(
            "schemaVersion: 1
model: {{name: tiny}}
discovery:
  backend: Kubernetes
  kubernetes:
    namespace: ai
    selector: {{app: qwen}}
    targetPorts: [8000]
{more}
"
        );
        crate::config::parse(std::path::Path::new("router.yaml"), &text).expect("settings")
    }

    fn selector(label: &str) -> Selector {
        let (name, value) = label.split_once('=').expect("name=value");
        Selector::from([(name.to_owned(), value.to_owned())])
    }

    /// `address role exclusion`, one for each member.
    fn found(pods: &[PodFacts], config: &RouterConfig, foreign: &[Selector]) -> Vec<String> {
        let rules = Rules::of(config, foreign).expect("pods");
        let word = |member: Member| {
            let exclusion = member.place.exclusion.map_or("ok", Exclusion::label);
            format!("{} {} {exclusion}", member.id, member.place.role.label())
        };
        members(pods, &rules).into_iter().map(word).collect()
    }

    #[track_caller]
    fn check(why: &str, patch: Value, expected: &[&str]) {
        let roles = "    roles:
      - {name: Mixed, selector: {part: whole}}
      - {name: Prefill, selector: {part: first}, protocol: SGLang}
      - {name: Decode, selector: {old: decode}, protocol: SGLang}";
        let roles = if patch.pointer("/metadata/labels").is_some() { roles } else { "" };
        let foreign = [selector("team=other"), Selector::new()];
        assert_eq!(found(&[pod("a", &patch)], &config(roles), &foreign), expected, "{why}");
    }

    #[test]
    fn a_pod_is_a_worker_while_it_runs_and_is_reachable() {
        let ok = ["10.0.0.1:8000 mixed ok"];
        let status = |patch: Value| json!({"status": patch});
        check("ready", json!({}), &ok);
        check("no address any more", status(json!({"podIP": null})), &[]);
        check("an empty address", status(json!({"podIP": ""})), &[]);
        check("being deleted", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), &[]);
        check("not scheduled", status(json!({"phase": "Pending"})), &[]);
        check("evicted", status(json!({"phase": "Failed"})), &[]);
        check("finished", status(json!({"phase": "Succeeded"})), &[]);
        check("node lost", status(json!({"phase": "Unknown"})), &[]);
        check("no status yet", json!({"status": null}), &[]);
        let not_ready = ["10.0.0.1:8000 mixed pod_not_ready"];
        let condition = |kind, status| json!({"conditions": [{"type": kind, "status": status}]});
        check("not ready", status(condition("Ready", "False")), &not_ready);
        check("nobody knows", status(condition("Ready", "Unknown")), &not_ready);
        check("another condition", status(condition("ContainersReady", "True")), &not_ready);
        check("no conditions", status(json!({"conditions": null})), &not_ready);
        check("IPv6", status(json!({"podIP": "fd00::1"})), &["[fd00::1]:8000 mixed ok"]);
    }

    #[test]
    fn a_pod_is_of_exactly_one_role_and_pool() {
        let labels = |labels: Value| json!({"metadata": {"labels": labels}});
        check("one role", labels(json!({"part": "first"})), &["10.0.0.1:8000 prefill ok"]);
        check("mixed", labels(json!({"part": "whole"})), &["10.0.0.1:8000 mixed ok"]);
        check("none", labels(json!({"part": "x"})), &["10.0.0.1:8000 mixed no_role"]);
        let two = labels(json!({"part": "first", "old": "decode"}));
        check("two", two, &["10.0.0.1:8000 mixed two_roles"]);
        let foreign = labels(json!({"part": "first", "team": "other"}));
        check("another pool's", foreign, &["10.0.0.1:8000 prefill two_pools"]);
        let mut late = json!({"status": {"conditions": []}});
        merge(&mut late, &labels(json!({"part": "x"})));
        late["metadata"] = json!({"labels": {"part": "x"}});
        check("labels are named before readiness", late, &["10.0.0.1:8000 mixed no_role"]);
    }

    #[test]
    fn every_port_is_a_worker_with_its_own_sockets() {
        let mut config = config("kvEvents: {transport: ZMQ}");
        config.discovery.kubernetes.as_mut().expect("pods").target_ports = vec![8000, 8001];
        let rules = Rules::of(&config, &[]).expect("pods");
        let members = self::members(&[pod("a", &json!({}))], &rules);
        let sockets = |member: &Member| {
            let events = member.events.as_ref().expect("ZMQ");
            let replay = events.replay.as_ref().expect("a replay socket");
            format!("{} {} {replay}", member.id, events.publisher)
        };
        let expected = [
            "10.0.0.1:8000 tcp://10.0.0.1:5557 tcp://10.0.0.1:5657",
            "10.0.0.1:8001 tcp://10.0.0.1:5558 tcp://10.0.0.1:5658",
        ];
        assert_eq!(members.iter().map(sockets).collect::<Vec<_>>(), expected);
        config.discovery.kubernetes.as_mut().expect("pods").dp_size = 4;
        let members = self::members(&[pod("a", &json!({}))], &Rules::of(&config, &[]).expect("pods"));
        let expected = [
            "10.0.0.1:8000 tcp://10.0.0.1:5557 tcp://10.0.0.1:5657",
            "10.0.0.1:8001 tcp://10.0.0.1:5561 tcp://10.0.0.1:5661",
        ];
        assert_eq!(members.iter().map(sockets).collect::<Vec<_>>(), expected, "after four ranks");
        assert!(members.iter().all(|member| member.dp_size == 4));
    }

    /// A node that died leaves pods behind whose addresses are given away again.
    #[test]
    fn an_address_belongs_to_one_pod() {
        let config = config("");
        let old = |ready: &str| {
            pod("old", &json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}}))
        };
        let young = |ready: &str| {
            let patch = json!({"metadata": {"creationTimestamp": "2026-02-01T00:00:00Z"},
                               "status": {"conditions": [{"type": "Ready", "status": ready}]}});
            pod("young", &patch)
        };
        for (why, pods, owner) in [
            ("both ready: the younger", [old("True"), young("True")], "young"),
            ("the ready one", [old("True"), young("False")], "old"),
            ("none ready: the younger", [old("False"), young("False")], "young"),
        ] {
            for pods in [pods.clone(), [pods[1].clone(), pods[0].clone()]] {
                let rules = Rules::of(&config, &[]).expect("pods");
                let members = members(&pods, &rules);
                let names: Vec<_> = members.iter().filter_map(|member| member.pod.as_ref()).collect();
                assert_eq!((names.len(), &*names[0].name), (2, owner), "{why}");
                assert_eq!(members[1].place.exclusion, Some(Exclusion::SameAddress), "{why}");
            }
        }
    }
}
