//! Do equal prompts have equal block hashes in every engine process? Pure.
//!
//! Evidence is the environment of the pods that run. Routing itself does not
//! depend on the seed; caches that outlive a process or are shared do.

use std::collections::{BTreeMap, BTreeSet};

use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, WorkloadState, names};
use kvrouter_crds::config::Engine;
use kvrouter_crds::pool::{HashSeedPolicy, InferencePoolSpec, WorkloadStatus};

use super::arguments::{self, Seed};
use super::members::Member;
use super::validate::no_pods;
use crate::hysteresis::{Pace, Seen};

/// First release of vLLM whose hashes have a fixed seed of their own.
const VLLM_DEFAULT_SEED: (u32, u32) = (0, 29);

/// What one pod's hashes depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Basis {
    /// This seed.
    Fixed(String),
    /// The engine's own constant.
    Default,
    /// Nothing that a seed could change.
    Independent,
    /// Another number in each process.
    Random,
    /// Nobody can say.
    Unknown,
}

/// What `HashSeedStable` should say.
pub fn seed(pool: &InferencePool, members: &[Member<'_>], workloads: &[WorkloadStatus]) -> Seen {
    let spec = &pool.spec;
    let mut pods: BTreeMap<Basis, BTreeSet<&str>> = BTreeMap::new();
    for member in members {
        pods.entry(basis(spec, member)).or_default().insert(member.name());
    }
    let random = |member: &&Member<'_>| basis(spec, member) == Basis::Random;
    let shared = members.iter().filter(random).flat_map(|member| member.engines(spec));
    let shared = shared.filter_map(arguments::shared_cache).min();
    let (finding, blamed) = judge(pool, &pods, shared, workloads);
    let pace = if finding.reason == Reason::NoPods { Pace::AtOnce } else { Pace::AfterWindow };
    Seen { type_: ConditionType::HashSeedStable, finding, pace, blamed }
}

fn basis(spec: &InferencePoolSpec, member: &Member<'_>) -> Basis {
    let engine = member.engine(spec);
    if engine == Engine::SGLang {
        return Basis::Independent;
    }
    let seeds: BTreeSet<Seed> = member.engines(spec).into_iter().map(arguments::seed).collect();
    // Of several containers that may be the engine, the one that sets a seed is it.
    match seeds.into_iter().next() {
        Some(Seed::Fixed(value)) => Basis::Fixed(value),
        Some(Seed::Elsewhere) | None => Basis::Unknown,
        Some(Seed::Missing) if engine == Engine::Auto => Basis::Unknown,
        Some(Seed::Missing) if has_default_seed(engine, member) => Basis::Default,
        Some(Seed::Missing) => Basis::Random,
    }
}

fn has_default_seed(engine: Engine, member: &Member<'_>) -> bool {
    let version = member.workers.iter().find_map(|worker| worker.engine_version.as_deref());
    engine == Engine::VLLM && version.and_then(release).is_some_and(|release| VLLM_DEFAULT_SEED <= release)
}

/// Major and minor number of a version; none for one that is not numbered.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_start_matches('v').split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

fn judge(
    pool: &InferencePool,
    pods: &BTreeMap<Basis, BTreeSet<&str>>,
    shared: Option<&str>,
    workloads: &[WorkloadStatus],
) -> (Finding, BTreeSet<String>) {
    let spec = &pool.spec;
    let of = |basis: &Basis| pods.get(basis).cloned().unwrap_or_default();
    let owned = |pods: &BTreeSet<&str>| pods.iter().map(|pod| (*pod).to_owned()).collect();
    let fixed: Vec<(&str, &BTreeSet<&str>)> = pods
        .iter()
        .filter_map(
            |(basis, pods)| if let Basis::Fixed(value) = basis { Some((value.as_str(), pods)) } else { None },
        )
        .collect();
    let (random, default, unknown) = (of(&Basis::Random), of(&Basis::Default), of(&Basis::Unknown));
    if pods.is_empty() {
        return (no_pods(pool), BTreeSet::new());
    }
    if !random.is_empty() {
        let finding = in_progress(workloads).unwrap_or_else(|| unseeded(spec, &random, &default, shared));
        return (finding, owned(&random));
    }
    if 1 < fixed.len() || (!fixed.is_empty() && !default.is_empty()) {
        let (finding, odd) = differing(spec, &fixed, &default);
        return (in_progress(workloads).unwrap_or(finding), owned(&odd));
    }
    if !unknown.is_empty() {
        let message = format!(
            "Nothing shows PYTHONHASHSEED of {}: it comes from an object that the operator does not read, or the engine \
             is not known yet; set it as a plain value, or create a KvRouter for the pool.",
            names(unknown.iter().copied())
        );
        return (Finding::unknown(Reason::NotObservable, message), BTreeSet::new());
    }
    let finding = match fixed.first() {
        Some((value, _)) => Finding::holds(
            Reason::SeedSet,
            format!("PYTHONHASHSEED is {value} in every engine that depends on it."),
        ),
        None if !default.is_empty() => {
            let message = "vLLM 0.29 and later have a fixed seed of their own, and no pod overrules it.";
            Finding::holds(Reason::EngineDefaultSeed, message)
        }
        None => {
            Finding::holds(Reason::NotRequired, "The engines' block hashes do not depend on PYTHONHASHSEED.")
        }
    };
    (finding, BTreeSet::new())
}

/// Pods whose processes have another seed each; `default` are those on the
/// engine's own constant, and `shared` is the connector to a cache of several engines.
fn unseeded(
    spec: &InferencePoolSpec,
    random: &BTreeSet<&str>,
    default: &BTreeSet<&str>,
    shared: Option<&str>,
) -> Finding {
    let pods = names(random.iter().copied());
    if !default.is_empty() {
        let message = format!(
            "vLLM 0.29 and later have a fixed seed of their own, here in {}, and earlier releases another one in each \
             process, here in {pods}; {}",
            names(default.iter().copied()),
            remedy(spec)
        );
        return Finding::fails(Reason::SeedDiffers, message);
    }
    let effect = shared.map_or_else(String::new, |connector| {
        format!(", so that in the cache which they share ({connector}) no engine finds blocks of another one")
    });
    let message = format!("PYTHONHASHSEED is not set to a number in {pods}{effect}; {}", remedy(spec));
    Finding::fails(Reason::SeedMissing, message)
}

/// Pods with another seed than most have; a pod on the engine's own constant
/// differs from one that sets any number.
fn differing<'a>(
    spec: &InferencePoolSpec,
    fixed: &[(&str, &BTreeSet<&'a str>)],
    default: &BTreeSet<&'a str>,
) -> (Finding, BTreeSet<&'a str>) {
    let wanted = spec.hash_seed.value.to_string();
    let is_wanted = |(value, _): &&(&str, &BTreeSet<&'a str>)| *value == wanted;
    let usual = fixed.iter().find(is_wanted).or(fixed.iter().max_by_key(|(_, pods)| pods.len()));
    let usual = usual.map_or("", |(value, _)| value);
    let mut described: Vec<String> = default.iter().map(|pod| format!("{pod} (the engine's own)")).collect();
    let mut odd = default.clone();
    for (value, pods) in fixed.iter().filter(|(value, _)| *value != usual) {
        described.extend(pods.iter().map(|pod| format!("{pod} ({value})")));
        odd.extend(pods.iter().copied());
    }
    let message = format!(
        "PYTHONHASHSEED is {usual} in some engines and not in {}; {}",
        names(described.iter().map(String::as_str)),
        remedy(spec)
    );
    (Finding::fails(Reason::SeedDiffers, message), odd)
}

/// What stands between the spec and the pods, where it is a change of ours.
fn in_progress(workloads: &[WorkloadStatus]) -> Option<Finding> {
    let (reason, workload) = stuck(workloads)?;
    Some(Finding::fails(reason, workload.message.clone()))
}

/// The first named workload whose wanted changes are not in its pods, worst first.
pub fn stuck(workloads: &[WorkloadStatus]) -> Option<(Reason, &WorkloadStatus)> {
    let order = [
        (WorkloadState::PatchFailed, Reason::PatchFailed),
        (WorkloadState::PatchReverted, Reason::PatchReverted),
        (WorkloadState::Paused, Reason::Paused),
        (WorkloadState::RollingOut, Reason::RollingOut),
        (WorkloadState::PatchingDisabled, Reason::PatchingDisabled),
    ];
    let at = |state: WorkloadState| workloads.iter().find(|workload| workload.state == state.as_str());
    order.into_iter().find_map(|(state, reason)| Some((reason, at(state)?)))
}

fn remedy(spec: &InferencePoolSpec) -> String {
    let value = spec.hash_seed.value;
    match spec.hash_seed.policy {
        HashSeedPolicy::Observe => {
            format!("set it to {value} in the engines' workloads, or choose spec.hashSeed.policy: Enforce.")
        }
        HashSeedPolicy::Enforce if spec.workloads.is_empty() => {
            format!("name the engines' workloads in spec.workloads, or set it to {value} there.")
        }
        HashSeedPolicy::Enforce => {
            format!(
                "set it to {value} in workloads that spec.workloads does not name, and remove other values of it."
            )
        }
    }
}
