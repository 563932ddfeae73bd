//! Conditions of both kinds: their types, their reasons and how they are kept.
//!
//! Types and reasons are part of the interface: `docs/conditions.md` has a row
//! for each, and a test compares the two. There is no reason for "anything
//! else": what cannot be named cannot be acted upon.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// Declares an enum whose words are part of the interface, spelt as they are.
macro_rules! words {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $word:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$doc])* $word,)* }

        impl $name {
            /// Every one, in the order of their declaration.
            pub const ALL: &[Self] = &[$(Self::$word,)*];

            /// As conditions spell it.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$word => stringify!($word),)* }
            }

            /// The one that is spelt so; none if there is none.
            pub fn of(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|it| it.as_str() == word)
            }
        }
    };
}

words! {
    /// What a condition is about.
    pub enum ConditionType {
        /// The spec makes sense and this operator acts on it.
        Accepted,
        /// Everything that the spec names exists and can be used.
        ResolvedRefs,
        /// Router pods are being replaced.
        Progressing,
        /// Router pods serve requests.
        RouterAvailable,
        /// Every router reports the settings that the spec asks for.
        ConfigApplied,
        /// Routers can turn prompts into tokens.
        TokenizerReady,
        /// Engines make the tokens that routers make.
        RenderParity,
        /// Routers know what engines hold.
        IndexWarm,
        /// Page sizes are equal and divide the block size.
        PageSizeParity,
        /// Equal prompts have equal block hashes in every engine process.
        HashSeedStable,
        /// Cache events of all engines reach all routers.
        EventsConnected,
        /// Requests are served, but worse than the spec asks for.
        Degraded,
        /// Requests are served.
        Ready,
    }
}

/// Types that every InferencePool carries, in the order of its status.
pub const POOL_TYPES: &[ConditionType] = &[
    ConditionType::Accepted,
    ConditionType::ResolvedRefs,
    ConditionType::PageSizeParity,
    ConditionType::HashSeedStable,
    ConditionType::EventsConnected,
    ConditionType::Degraded,
    ConditionType::Ready,
];

/// Types that every KvRouter carries, in the order of its status.
pub const ROUTER_TYPES: &[ConditionType] = &[
    ConditionType::Accepted,
    ConditionType::ResolvedRefs,
    ConditionType::Progressing,
    ConditionType::RouterAvailable,
    ConditionType::ConfigApplied,
    ConditionType::TokenizerReady,
    ConditionType::RenderParity,
    ConditionType::IndexWarm,
    ConditionType::EventsConnected,
    ConditionType::Degraded,
    ConditionType::Ready,
];

words! {
    /// Why a condition has its status.
    pub enum Reason {
        /// Nothing is known yet, or what comes first is not in order.
        Pending,
        /// The spec makes sense.
        Accepted,
        /// The spec contradicts itself or lacks something.
        InvalidSpec,
        /// Pods carry the labels of two pools.
        PoolConflict,
        /// An object that the router needs exists and belongs to somebody else.
        NameTaken,
        /// All references are in order.
        ResolvedRefs,
        /// There is no pool of that name in the namespace.
        PoolNotFound,
        /// The pool itself is not accepted.
        PoolNotAccepted,
        /// The cluster does not have the kind that is referred to.
        KindNotInstalled,
        /// There is no pool of that name in the namespace, among those of the Gateway API.
        GatewayPoolNotFound,
        /// Pools of the Gateway API cannot be read.
        GatewayPoolUnreadable,
        /// The pool of the Gateway API has no selector or no ports that can be used.
        GatewayPoolUnusable,
        /// There is no workload of that kind and name.
        WorkloadNotFound,
        /// The workload is made by another controller, which would undo every change.
        WorkloadControlled,
        /// The workload's pods do not carry the pool's labels.
        WorkloadOutsidePool,
        /// The workload has no container of that name.
        ContainerNotFound,
        /// None or several of the workload's containers declare the first target port.
        ContainerAmbiguous,
        /// No container of the pool's pods declares a target port, and no router reaches it.
        PortNotDeclared,
        /// A Secret or a key of it is missing.
        SecretNotFound,
        /// A ConfigMap or a key of it is missing.
        ConfigMapNotFound,
        /// A persistent volume claim is missing.
        ClaimNotFound,
        /// Pods are being replaced.
        RollingOut,
        /// All pods are of the newest revision.
        RolloutComplete,
        /// New pods did not become ready in time.
        ProgressDeadlineExceeded,
        /// Pods may not be created.
        PodCreationFailed,
        /// The API server refused an object that the router needs.
        ApplyFailed,
        /// `kvrouter.dev/paused` is set, or the workload is paused.
        Paused,
        /// At least one replica serves.
        Available,
        /// No replica serves.
        NoReplicasReady,
        /// `spec.replicas` is 0.
        ScaledToZero,
        /// An image cannot be pulled.
        ImagePullFailed,
        /// A container ends again and again.
        CrashLooping,
        /// The kubelet cannot make a container from its description.
        ConfigError,
        /// A volume cannot be mounted.
        MountFailed,
        /// No node takes the pod.
        Unschedulable,
        /// Every replica reports the wanted settings.
        Applied,
        /// Not every replica has the wanted settings yet.
        RolloutPending,
        /// A router refused its settings.
        RouterRejectedConfig,
        /// The settings are of a newer version than the router.
        VersionSkew,
        /// Health reports do not arrive.
        RouterUnreachable,
        /// There is no router pod that could report.
        NoReplicas,
        /// No KvRouter serves the pool.
        NoRouters,
        /// The tokenizer is loaded.
        Loaded,
        /// The pool names no tokenizer.
        TokenizerNotConfigured,
        /// The tokenizer cannot be loaded.
        TokenizerFailed,
        /// Every engine makes the tokens that routers make.
        RenderConfirmed,
        /// An engine makes other tokens, so its cache earns no credit.
        RenderDiverged,
        /// Engines were not compared yet.
        RenderPending,
        /// Every view is complete.
        Warm,
        /// Views are being fetched.
        Syncing,
        /// Views lack blocks, so hits are counted too low.
        ViewsIncomplete,
        /// Routers know different things of the same caches.
        ViewsDiffer,
        /// Views earn no credit because the page does not divide the block.
        PageSizeMismatch,
        /// Views earn no credit because events do not tell adapters' blocks from others.
        AdaptersUntold,
        /// Views earn no credit because events name another data-parallel rank.
        RankMismatch,
        /// Engines finish prompts and tell of no stored block.
        NothingStored,
        /// What engines find cached is not what views predict.
        Drifting,
        /// Engines number no events, so that a loss could not be seen.
        Unsequenced,
        /// No worker is ready.
        NoWorkers,
        /// Page sizes are equal and divide the block size.
        SamePageSize,
        /// A page size does not divide the block size.
        BlockSizeMismatch,
        /// Pods of one role have different page sizes.
        MixedWithinRole,
        /// Roles have different page sizes.
        MixedAcrossRoles,
        /// The selector matches no pod.
        NoPods,
        /// No pod of the pool is ready.
        NoPodsReady,
        /// No worker of the role Prefill is ready, and Decode needs one.
        NoPrefillReady,
        /// No worker of the role Decode is ready, and Prefill needs one.
        NoDecodeReady,
        /// Nothing shows what is asked for.
        NotObservable,
        /// Engines are not ready yet.
        EngineStarting,
        /// Every engine runs with the same fixed seed.
        SeedSet,
        /// Engines run with different seeds.
        SeedDiffers,
        /// An engine runs without a fixed seed.
        SeedMissing,
        /// The engine's hashes do not depend on the seed.
        NotRequired,
        /// The engine's release has a fixed seed of its own.
        EngineDefaultSeed,
        /// Somebody undid the change of a workload; it is not repeated.
        PatchReverted,
        /// A changed workload did not roll out; it is not retried.
        PatchFailed,
        /// The operator may not change workloads.
        PatchingDisabled,
        /// All engines are heard.
        Connected,
        /// The pool wants no events.
        Disabled,
        /// The bridge beside the engines is of another release than the operator.
        BridgeOutdated,
        /// A router has no connection to the broker.
        NatsUnreachable,
        /// Some engines are not heard.
        SomeEnginesSilent,
        /// No engine is heard.
        NoPublishers,
        /// A bridge speaks of another model, revision, block size or identity seed.
        ForeignDomain,
        /// Nothing is worse than the spec asks for.
        AsExpected,
        /// Requests are served.
        Serving,
    }
}

/// Which reasons a type may carry, first the one with which all is well.
const REASONS: &[(ConditionType, &[Reason])] = &[
    (
        ConditionType::Accepted,
        &[Reason::Accepted, Reason::InvalidSpec, Reason::PoolConflict, Reason::NameTaken, Reason::Pending],
    ),
    (
        ConditionType::ResolvedRefs,
        &[
            Reason::ResolvedRefs,
            Reason::PoolNotFound,
            Reason::PoolNotAccepted,
            Reason::KindNotInstalled,
            Reason::GatewayPoolNotFound,
            Reason::GatewayPoolUnreadable,
            Reason::GatewayPoolUnusable,
            Reason::WorkloadNotFound,
            Reason::WorkloadControlled,
            Reason::WorkloadOutsidePool,
            Reason::ContainerNotFound,
            Reason::ContainerAmbiguous,
            Reason::PortNotDeclared,
            Reason::SecretNotFound,
            Reason::ConfigMapNotFound,
            Reason::ClaimNotFound,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::Progressing,
        &[
            Reason::RollingOut,
            Reason::RolloutComplete,
            Reason::ProgressDeadlineExceeded,
            Reason::PodCreationFailed,
            Reason::ApplyFailed,
            Reason::Paused,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::RouterAvailable,
        &[
            Reason::Available,
            Reason::NoReplicasReady,
            Reason::ScaledToZero,
            Reason::ImagePullFailed,
            Reason::CrashLooping,
            Reason::SecretNotFound,
            Reason::ConfigMapNotFound,
            Reason::ClaimNotFound,
            Reason::ConfigError,
            Reason::MountFailed,
            Reason::Unschedulable,
            Reason::PodCreationFailed,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::ConfigApplied,
        &[
            Reason::Applied,
            Reason::RolloutPending,
            Reason::RouterRejectedConfig,
            Reason::VersionSkew,
            Reason::RouterUnreachable,
            Reason::NoReplicas,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::TokenizerReady,
        &[
            Reason::Loaded,
            Reason::NotRequired,
            Reason::TokenizerNotConfigured,
            Reason::TokenizerFailed,
            Reason::RouterUnreachable,
            Reason::NoReplicas,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::RenderParity,
        &[
            Reason::RenderConfirmed,
            Reason::RenderDiverged,
            Reason::RenderPending,
            Reason::NotObservable,
            Reason::NotRequired,
            Reason::NoWorkers,
            Reason::RouterUnreachable,
            Reason::NoReplicas,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::IndexWarm,
        &[
            Reason::Warm,
            Reason::Disabled,
            Reason::Syncing,
            Reason::PageSizeMismatch,
            Reason::AdaptersUntold,
            Reason::RankMismatch,
            Reason::NothingStored,
            Reason::Drifting,
            Reason::ViewsIncomplete,
            Reason::ViewsDiffer,
            Reason::Unsequenced,
            Reason::NotObservable,
            Reason::NoWorkers,
            Reason::RouterUnreachable,
            Reason::NoReplicas,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::PageSizeParity,
        &[
            Reason::SamePageSize,
            Reason::BlockSizeMismatch,
            Reason::MixedWithinRole,
            Reason::MixedAcrossRoles,
            Reason::NoPods,
            Reason::NotObservable,
            Reason::EngineStarting,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::HashSeedStable,
        &[
            Reason::SeedSet,
            Reason::NotRequired,
            Reason::EngineDefaultSeed,
            Reason::SeedDiffers,
            Reason::SeedMissing,
            Reason::RollingOut,
            Reason::Paused,
            Reason::PatchReverted,
            Reason::PatchFailed,
            Reason::PatchingDisabled,
            Reason::NoPods,
            Reason::NotObservable,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::EventsConnected,
        &[
            Reason::Connected,
            Reason::Disabled,
            Reason::BridgeOutdated,
            Reason::NatsUnreachable,
            Reason::NoPublishers,
            Reason::ForeignDomain,
            Reason::SomeEnginesSilent,
            Reason::NothingStored,
            Reason::RollingOut,
            Reason::Paused,
            Reason::PatchReverted,
            Reason::PatchFailed,
            Reason::PatchingDisabled,
            Reason::NoPods,
            Reason::NoWorkers,
            Reason::NoRouters,
            Reason::NoReplicas,
            Reason::RouterUnreachable,
            Reason::Pending,
        ],
    ),
    (
        ConditionType::Degraded,
        &[
            Reason::AsExpected,
            Reason::NoPrefillReady,
            Reason::NoDecodeReady,
            Reason::BlockSizeMismatch,
            Reason::MixedWithinRole,
            Reason::MixedAcrossRoles,
            Reason::NatsUnreachable,
            Reason::NoPublishers,
            Reason::ForeignDomain,
            Reason::SomeEnginesSilent,
            Reason::NothingStored,
            Reason::RollingOut,
            Reason::Paused,
            Reason::PatchReverted,
            Reason::PatchFailed,
            Reason::PatchingDisabled,
            Reason::RouterRejectedConfig,
            Reason::VersionSkew,
            Reason::TokenizerNotConfigured,
            Reason::TokenizerFailed,
            Reason::RenderDiverged,
            Reason::Syncing,
            Reason::PageSizeMismatch,
            Reason::AdaptersUntold,
            Reason::RankMismatch,
            Reason::Drifting,
            Reason::ViewsIncomplete,
            Reason::ViewsDiffer,
            Reason::Unsequenced,
            Reason::NoPods,
            Reason::NoWorkers,
            Reason::NoRouters,
            Reason::NoReplicas,
            Reason::NotObservable,
            Reason::EngineStarting,
            Reason::RouterUnreachable,
            Reason::Pending,
        ],
    ),
    // And those of what comes first: see `reasons`.
    (
        ConditionType::Ready,
        &[
            Reason::Serving,
            Reason::NoPods,
            Reason::NoPodsReady,
            Reason::NoPrefillReady,
            Reason::NoDecodeReady,
            Reason::Pending,
        ],
    ),
];

/// Which reasons a type may carry, in the order of the documentation. `Ready`
/// has the troubles of all that must be in order first.
pub fn reasons(type_: ConditionType) -> Vec<Reason> {
    let own = |type_| REASONS.iter().find(|(known, _)| *known == type_).map_or(&[][..], |(_, own)| own);
    let mut reasons = own(type_).to_vec();
    if type_ == ConditionType::Ready {
        let first = [ConditionType::Accepted, ConditionType::ResolvedRefs, ConditionType::RouterAvailable];
        let mut troubles = Vec::new();
        for reason in first.into_iter().flat_map(|type_| own(type_).iter().skip(1)) {
            if !reasons.contains(reason) && !troubles.contains(reason) {
                troubles.push(*reason);
            }
        }
        reasons.splice(1..1, troubles);
    }
    reasons
}

/// A condition's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// It does not hold.
    False,
    /// Nobody can say.
    Unknown,
    /// It holds.
    True,
}

impl Status {
    /// As conditions spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::False => "False",
            Self::Unknown => "Unknown",
            Self::True => "True",
        }
    }

    /// The one that is spelt so; a word that no controller of ours writes is
    /// `Unknown`.
    pub fn of(word: &str) -> Self {
        match word {
            "False" => Self::False,
            "True" => Self::True,
            _ => Self::Unknown,
        }
    }
}

/// What a condition should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Whether it holds.
    pub status: Status,
    /// Why.
    pub reason: Reason,
    /// A sentence that ends with the next step, where there is one.
    pub message: String,
}

impl Finding {
    /// It holds.
    pub fn holds(reason: Reason, message: impl Into<String>) -> Self {
        Self { status: Status::True, reason, message: message.into() }
    }

    /// It does not.
    pub fn fails(reason: Reason, message: impl Into<String>) -> Self {
        Self { status: Status::False, reason, message: message.into() }
    }

    /// Nobody can say.
    pub fn unknown(reason: Reason, message: impl Into<String>) -> Self {
        Self { status: Status::Unknown, reason, message: message.into() }
    }
}

/// The condition of that type, if it is there.
pub fn find(conditions: &[Condition], type_: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.type_ == type_.as_str())
}

/// The condition that says `finding`: its transition time is the previous one's
/// unless the status differs, its generation always the given one.
pub fn merge(
    previous: Option<&Condition>,
    type_: ConditionType,
    finding: &Finding,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    let kept = previous.filter(|previous| previous.status == finding.status.as_str());
    Condition {
        type_: type_.as_str().to_owned(),
        status: finding.status.as_str().to_owned(),
        reason: finding.reason.as_str().to_owned(),
        message: shorten(&finding.message),
        observed_generation: generation,
        // The API stores whole seconds: anything finer would differ from what is read back.
        last_transition_time: kept
            .map_or_else(|| whole_seconds(now), |kept| kept.last_transition_time.clone()),
    }
}

fn whole_seconds(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

/// Longest message that the API server takes.
const MESSAGE_BYTES: usize = 32_768;
/// Longest message that is still read, well below that.
const READABLE_BYTES: usize = 2_048;
const _: () = assert!(READABLE_BYTES < MESSAGE_BYTES);

fn shorten(message: &str) -> String {
    if message.len() <= READABLE_BYTES {
        return message.to_owned();
    }
    let end = (0..=READABLE_BYTES - '…'.len_utf8()).rev().find(|&at| message.is_char_boundary(at));
    format!("{}…", &message[..end.unwrap_or(0)])
}

/// Most names that a message lists.
pub const NAMED: usize = 5;

/// At most five of the names in alphabetical order, then "and N more". Empty
/// for none.
pub fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let sorted: BTreeSet<&str> = names.into_iter().collect();
    let listed: Vec<&str> = sorted.iter().copied().take(NAMED).collect();
    match sorted.len().saturating_sub(NAMED) {
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

words! {
    /// Where a named workload stands, as its pool's `status.workloads[].state`
    /// spells it.
    pub enum WorkloadState {
        /// It has everything that the spec asks for.
        AlreadyRight,
        /// It was changed and its rollout is complete.
        Patched,
        /// It was changed and its rollout goes on, or goes on for other reasons.
        RollingOut,
        /// Another workload of the pool comes first.
        Waiting,
        /// It is paused, or its pool is: nothing is changed.
        Paused,
        /// Somebody undid the change; it is not repeated until the spec changes.
        PatchReverted,
        /// The changed workload did not roll out in time; it is not retried.
        PatchFailed,
        /// Its bridge is of another release than the operator.
        BridgeOutdated,
        /// The operator may not change workloads, or its pool is not accepted.
        PatchingDisabled,
        /// There is no such workload.
        WorkloadNotFound,
        /// Another controller makes it.
        WorkloadControlled,
        /// Its pods are not the pool's.
        WorkloadOutsidePool,
        /// It has no container of that name.
        ContainerNotFound,
        /// Its engine's container cannot be told from the others.
        ContainerAmbiguous,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_names(why: &str, given: &[&str], expected: &str) {
        assert_eq!(names(given.iter().copied()), expected, "{why}");
    }

    #[test]
    fn a_message_names_five_in_a_stable_order() {
        check_names("nobody", &[], "");
        check_names("sorted, none twice", &["b", "a", "b"], "a, b");
        check_names("five", &["e", "d", "c", "b", "a"], "a, b, c, d, e");
        check_names("six", &["f", "e", "d", "c", "b", "a"], "a, b, c, d, e and 1 more");
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for type_ in ConditionType::ALL {
            assert_eq!(ConditionType::of(type_.as_str()), Some(*type_));
        }
        assert_eq!(Reason::of("Other"), None, "there is no reason for anything else");
        assert_eq!(Status::of("False"), Status::False);
        assert_eq!(Status::of("true"), Status::Unknown);
    }

    #[test]
    fn every_type_has_reasons_and_every_reason_a_type() {
        let types: Vec<ConditionType> = REASONS.iter().map(|(type_, _)| *type_).collect();
        for type_ in ConditionType::ALL {
            assert_eq!(types.iter().filter(|it| *it == type_).count(), 1, "{type_:?}");
        }
        for reason in Reason::ALL {
            assert!(REASONS.iter().any(|(_, reasons)| reasons.contains(reason)), "{reason:?} is nobody's");
        }
        let carried: BTreeSet<_> = POOL_TYPES.iter().chain(ROUTER_TYPES).collect();
        assert_eq!(carried.len(), ConditionType::ALL.len(), "every type is carried by a kind");
    }

    #[test]
    fn transition_times_are_whole_seconds_and_move_with_the_status() {
        let at = |milliseconds| Timestamp::from_millisecond(milliseconds).expect("in range");
        let (good, bad) = (Finding::holds(Reason::Serving, "a"), Finding::fails(Reason::NoPodsReady, "b"));
        let first = merge(None, ConditionType::Ready, &good, Some(1), at(1_500));
        assert_eq!(first.last_transition_time.0, at(1_000), "whole seconds");
        let again = merge(Some(&first), ConditionType::Ready, &good, Some(2), at(9_000));
        assert_eq!(again.last_transition_time, first.last_transition_time, "the same status");
        assert_eq!(again.observed_generation, Some(2), "always the newest");
        let flipped = merge(Some(&again), ConditionType::Ready, &bad, Some(2), at(9_000));
        assert_eq!((flipped.last_transition_time.0, flipped.status.as_str()), (at(9_000), "False"));
    }

    #[test]
    fn a_long_message_ends_at_a_letter() {
        let long = Finding::holds(Reason::Serving, "ü".repeat(5_000));
        let condition = merge(None, ConditionType::Ready, &long, None, Timestamp::UNIX_EPOCH);
        assert!(condition.message.len() <= READABLE_BYTES && condition.message.ends_with('…'));
    }

    /// Rows of the documentation, as `type/reason`, in their order.
    fn documented(text: &str) -> Vec<String> {
        let mut section = "";
        let mut rows = Vec::new();
        for line in text.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                section = title;
            }
            if let Some(reason) = line.strip_prefix("| `").and_then(|row| row.split_once('`')) {
                rows.push(format!("{section}/{}", reason.0));
            }
        }
        rows
    }

    #[test]
    fn the_documentation_lists_exactly_these_reasons() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/conditions.md");
        let text = std::fs::read_to_string(path).expect("docs/conditions.md");
        let row = |type_: ConditionType, reason: Reason| format!("{}/{}", type_.as_str(), reason.as_str());
        let expected: Vec<String> = REASONS
            .iter()
            .flat_map(|(type_, _)| reasons(*type_).into_iter().map(|reason| row(*type_, reason)))
            .collect();
        assert_eq!(documented(&text), expected);
        for row in text.lines().filter(|line| line.starts_with("| `")) {
            assert_eq!(
                row.split(" | ").filter(|cell| !cell.trim_matches(['|', ' ']).is_empty()).count(),
                4,
                "{row}"
            );
        }
    }
}
