//! The pods of a pool and what routers say of them. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use kvrouter_crds::config::{Engine, RoleName};
use kvrouter_crds::health::WorkerHealth;
use kvrouter_crds::pool::{Endpoints, InferencePoolSpec, RoleEndpoints};

use super::arguments;
use super::build::BRIDGE;
use super::observe::Observed;
use crate::facts::{self, is_finished, is_ready, is_terminating, matches};

/// A living pod of the pool.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its role; none for a pod of no role or of two.
    pub role: Option<RoleName>,
    /// Whether it is ready.
    pub ready: bool,
    /// What routers say of the workers in it.
    pub workers: Vec<&'a WorkerHealth>,
}

impl<'a> Member<'a> {
    /// Its name.
    pub fn name(&self) -> &'a str {
        facts::name(self.pod)
    }

    /// Containers that may run the engine: those that declare a target port,
    /// else all but the bridge.
    pub fn engines(&self, spec: &InferencePoolSpec) -> Vec<&'a Container> {
        let all = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let all: Vec<&Container> = all.filter(|container| container.name != BRIDGE).collect();
        let is_target = |port: i32| spec.target_ports.iter().any(|target| i32::from(target.number) == port);
        let declares = |container: &&&Container| {
            container.ports.iter().flatten().any(|port| is_target(port.container_port))
        };
        let declaring: Vec<&Container> = all.iter().filter(declares).copied().collect();
        if declaring.is_empty() { all } else { declaring }
    }

    /// What it runs: as a router found out, else as the spec says, else by its command.
    pub fn engine(&self, spec: &InferencePoolSpec) -> Engine {
        let found = self.workers.iter().find_map(|worker| engine_of(&worker.engine));
        let by_command = || {
            let engines: Vec<Engine> = self.engines(spec).into_iter().map(arguments::engine).collect();
            engines.into_iter().find(|engine| *engine != Engine::Auto).unwrap_or_default()
        };
        match (found, spec.engine) {
            (Some(engine), _) => engine,
            (None, Engine::Auto) => by_command(),
            (None, engine) => engine,
        }
    }
}

fn engine_of(label: &str) -> Option<Engine> {
    [Engine::VLLM, Engine::SGLang, Engine::ATOM].into_iter().find(|engine| engine.label() == label)
}

/// All living pods of the pool, by name.
pub fn members<'a>(spec: &InferencePoolSpec, observed: &'a Observed) -> Vec<Member<'a>> {
    let reports: Vec<_> = observed
        .routers
        .iter()
        .flat_map(|router| &router.pods)
        .filter(|router| !is_terminating(&router.pod))
        .filter_map(|router| router.fresh_report(observed.now))
        .collect();
    let living = observed.pods.iter().filter(|pod| !is_terminating(pod) && !is_finished(pod));
    let mut members: Vec<Member<'a>> = living
        .map(|pod| Member {
            role: role(spec, pod),
            ready: is_ready(pod),
            workers: reports
                .iter()
                .flat_map(|report| &report.workers)
                .filter(|worker| is_of(worker, pod))
                .collect(),
            pod,
        })
        .collect();
    members.sort_by_key(Member::name);
    members
}

fn is_of(worker: &WorkerHealth, pod: &Pod) -> bool {
    if let Some(name) = &worker.pod {
        return name == facts::name(pod);
    }
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
    let host = worker.worker.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']));
    address.is_some() && address == host
}

/// The one role whose selector the pod matches.
fn role(spec: &InferencePoolSpec, pod: &Pod) -> Option<RoleName> {
    if spec.roles.is_empty() {
        return Some(RoleName::Mixed);
    }
    let labels = pod.metadata.labels.as_ref();
    let mut roles = spec.roles.iter().filter(|role| matches(&role.selector.match_labels, labels));
    match (roles.next(), roles.next()) {
        (Some(role), None) => Some(role.name),
        _ => None,
    }
}

/// How many there are, in all and by role.
pub fn endpoints(spec: &InferencePoolSpec, members: &[Member<'_>]) -> Endpoints {
    let count = |pods: &mut dyn Iterator<Item = &Member<'_>>| {
        pods.fold((0, 0), |(ready, total), member| (ready + u32::from(member.ready), total + 1))
    };
    let named: BTreeSet<RoleName> = spec.roles.iter().map(|role| role.name).collect();
    let roles = named.into_iter().map(|role| {
        let (ready, total) = count(&mut members.iter().filter(|member| member.role == Some(role)));
        RoleEndpoints { role, ready, total }
    });
    let (ready, total): (u32, u32) = count(&mut members.iter());
    Endpoints { summary: format!("{ready}/{total}"), roles: roles.collect() }
}
