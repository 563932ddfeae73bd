//! Settings of workers that share requests: who prefills, who decodes, and how
//! decode workers are picked.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether decode picks follow the input that targets hold. Not part of mixed
/// and prefill picks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DecodeInputDemand {
    /// Whether it is in force.
    pub mode: DemandMode,
    /// Tokens that every request held counts beside its input.
    #[schemars(range(min = 0.0, max = super::MAX_WEIGHT))]
    pub request_weight: f64,
}

impl DecodeInputDemand {
    /// Whether it is what it is where nothing is said.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Whether decode picks follow input demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DemandMode {
    /// Nothing is counted.
    #[default]
    Disabled,
    /// Counted and judged, not followed.
    Shadow,
    /// Followed.
    Enabled,
}

/// How long a prefill worker is charged for a request that another one decodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PrefillGuardRelease {
    /// Until decode ends.
    #[default]
    Decode,
    /// Until its own part is done. The decode worker stays charged.
    Completion,
}

impl PrefillGuardRelease {
    /// Whether it is until decode ends.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
    pub fn is_decode(&self) -> bool {
        *self == Self::Decode
    }
}

/// How prefill and decode workers hand a request over. Both of a pair speak the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Protocol {
    /// SGLang's bootstrap rooms: both get the request at once.
    SGLang,
    /// vLLM's NixlConnector: prefill first, then decode with what it returned.
    NIXL,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::SGLang, Self::NIXL];

    /// Lower-case name, for logs, labels and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::SGLang => "sglang",
            Self::NIXL => "nixl",
        }
    }
}

/// Port of SGLang's bootstrap server, unless settings say otherwise.
pub const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;
