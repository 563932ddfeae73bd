//! The values of receipts that have names: each with its name in JSON and its
//! number in a binary record.
//!
//! The number is the place in the declaration. Records never leave the process
//! that made them, so it may change; names may not.

use crate::ids::Role;
use crate::policy::decode_demand::DemandMode;
use crate::policy::sessions::{SessionMode, SessionUse};
use crate::policy::tie::TieBranch;
use crate::policy::{Evidence, Outcome, PolicyKind, Rejection, Switch};
use crate::trust::{Reason, State};

/// A value with a name.
pub(super) trait Named: Copy + 'static {
    /// All of them, in the order of their declaration.
    const ALL: &'static [Self];
    /// Its number.
    fn code(self) -> u8;
    /// Its name.
    fn name(self) -> &'static str;

    /// The value with this number.
    fn of_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// The value with this name.
    fn of_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|value| value.name() == name)
    }
}

macro_rules! named {
    ($kind:ident: $($variant:ident $name:literal),+ $(,)?) => {
        impl Named for $kind {
            const ALL: &'static [Self] = &[$(Self::$variant),+];
            fn code(self) -> u8 {
                self as u8
            }
            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }
    };
}

named!(Role: Mixed "Mixed", Prefill "Prefill", Decode "Decode");
named!(PolicyKind:
    CachePlusLoad "cache-plus-load", KvAware "kv-aware", LongestPrefix "longest-prefix",
    LeastLoad "least-load", RoundRobin "round-robin", LMetric "lmetric",
);
named!(Switch: Disabled "disabled", Enabled "enabled");
named!(DemandMode: Disabled "disabled", Shadow "shadow", Enabled "enabled");
named!(SessionMode: Disabled "disabled", Prefill "prefill", Both "both");
named!(SessionUse:
    None "none", New "new", Followed "followed", Replaced "replaced", Overloaded "overloaded",
    Unbound "unbound", ResponseFollowed "response_followed", ResponseGone "response_gone",
    ResponseUnknown "response_unknown",
);
named!(Evidence: Nothing "nothing", View "view", InFlight "in_flight", History "history");
named!(Rejection: Overloaded "overloaded", ColdReserve "cold_reserve");
named!(TieBranch:
    None "none", ActiveBlocks "active_blocks", RendezvousBlock "rendezvous_block",
    RendezvousRequest "rendezvous_request", Session "session", Target "target",
);
named!(Outcome:
    Hit "hit", Cold "cold", Approximate "approximate", OverloadEscape "overload_escape",
    MetadataRejection "metadata_rejection", NoAffinity "no_affinity", NoTarget "no_target",
);
named!(State:
    Cold "cold", Syncing "syncing", Exact "exact", Incomplete "incomplete", Unsound "unsound",
    Mismatched "mismatched", Unsequenced "unsequenced", NoCache "no_cache",
);
named!(Reason:
    Ok "ok", NothingHeard "nothing_heard", SnapshotPending "snapshot_pending",
    StoresMissing "stores_missing", Gap "gap", EngineUnreachable "engine_unreachable",
    Silence "silence", DomainMismatch "domain_mismatch", PageSizeMismatch "page_size_mismatch",
    ReportedPageSizeMismatch "reported_page_size_mismatch", NoSequence "no_sequence",
    RenderDiverged "render_diverged", PrefixCachingOff "prefix_caching_off", NothingStored "nothing_stored",
    Stalled "stalled", AdaptersUntold "adapters_untold", RankMismatch "rank_mismatch",
);

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[test]
    fn numbers_and_names_are_those_of_the_declaration() {
        fn check<T: Named + Serialize + std::fmt::Debug>() {
            for (place, value) in T::ALL.iter().enumerate() {
                assert_eq!(usize::from(value.code()), place, "{value:?}");
                assert_eq!(serde_json::json!(value), value.name(), "{value:?}");
            }
            assert!(T::of_code(T::ALL.len() as u8).is_none() && T::of_name("").is_none());
        }
        check::<Role>();
        check::<PolicyKind>();
        check::<Switch>();
        check::<SessionMode>();
        check::<SessionUse>();
        check::<Evidence>();
        check::<Rejection>();
        check::<TieBranch>();
        check::<Outcome>();
        check::<State>();
        check::<Reason>();
    }
}
