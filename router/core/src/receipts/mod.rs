//! What was decided and why, never prompt text.
//!
//! A decision writes a [`record`]: bytes, on the hot path. From it come, off the
//! hot path, the [`Receipt`] that people read, its canonical JSON, its place in a
//! [`chain`] of digests, and rows of [`csv`]. [`read`] takes receipts back from
//! text, strictly. The [`ring`] holds the latest records and joins what became of
//! them. [`elsewhere`] knows which other namespace was sent the same prompt.
//!
//! A receipt holds counts, digests and terms: enough to explain a decision and
//! to repeat it exactly. Every arrival has one, also when nothing could be
//! picked.

pub mod chain;
pub mod csv;
mod dominance;
pub mod elsewhere;
mod labels;
pub mod read;
pub mod record;
pub mod ring;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{Role, Target};
use crate::json::canonical::MAX_WHOLE;
use crate::json::canonical_json;
use crate::policy::decode_demand::Demand;
use crate::policy::sessions::SessionUse;
use crate::policy::shadow::Shadow;
use crate::policy::tie::TieBranch;
use crate::policy::{Evidence, Load, Outcome, Settings, Terms};
use crate::trust::Verdict;
use crate::units::{TierHits, Tokens};

pub use record::{Draft, Record};
pub use ring::{ReceiptNumber, Ring};

/// Version of the receipt's fields.
pub const SCHEMA_VERSION: u32 = 3;

/// The record of one decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Receipt {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The request's id.
    pub request_id: Arc<str>,
    /// Milliseconds since 1970 when it was decided.
    pub time_unix_ms: u64,
    /// Attempt of the request, from 1.
    pub attempt: u32,
    /// What was picked for.
    pub role: Role,
    /// The settings in force.
    pub settings: Settings,
    /// [`policy_digest`] of them.
    pub policy_digest: Digest,
    /// Digest of the namespace.
    pub namespace: NamespaceId,
    /// Tokens of the prompt; an estimate unless `exact_tokens`.
    pub prompt_tokens: Tokens,
    /// Whether the prompt was tokenised.
    pub exact_tokens: bool,
    /// Full blocks of the prompt.
    pub prompt_blocks: u64,
    /// Tokens per block.
    pub block_size: u32,
    /// The prompts, in the order of the body, where there are several; empty else.
    pub prompts: Vec<PromptRecord>,
    /// The target that was chosen before this pick, for round-robin.
    pub turn: Option<Target>,
    /// How many candidates were priced.
    pub candidate_count: u64,
    /// All of them, sorted by target.
    pub candidates: Vec<CandidateRecord>,
    /// The chosen one; `None` when there was none.
    pub chosen: Option<ChosenRecord>,
    /// What decode input-demand made of it; absent where that is not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub demand: Option<DemandRecord>,
    /// How the route ended.
    pub outcome: Outcome,
    /// Tokens that the chosen target is predicted to skip.
    pub predicted_hit_tokens: Tokens,
    /// Pictures, clips and recordings in the request.
    pub images: u64,
    /// What the request's session had to say.
    pub session: SessionUse,
    /// What shadow policies would have chosen.
    pub shadows: Vec<Shadow>,
    /// Joined when the answer has ended.
    pub result: Option<ResultRecord>,
}

/// One of several prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PromptRecord {
    /// Its length.
    pub tokens: Tokens,
    /// Its full blocks.
    pub blocks: u64,
    /// Its leading blocks that the chosen target's view claims, before trust: a part
    /// of what that candidate claims. Zeros where nobody was chosen.
    pub claimed: TierHits,
}

/// One candidate as it stood.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateRecord {
    /// The target.
    pub target: Target,
    /// Blocks that its view claims.
    pub claimed: TierHits,
    /// Blocks that counted.
    pub hits: TierHits,
    /// How many of them are predicted from prompts in flight.
    pub predicted: u64,
    /// Where they come from.
    pub evidence: Evidence,
    /// Leading blocks that it holds for another namespace, if they are more than
    /// it claims for this one: rejected before scoring. See [`elsewhere`].
    pub rejected_other_namespace: u64,
    /// The prompt's first block that does not count as a hit: what may decide
    /// among equals. `None` where all count.
    #[serde(serialize_with = "hexadecimal")]
    pub next_block: Option<BlockHash>,
    /// Its load.
    pub load: Load,
    /// The input that it held for decoding; absent where that is not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub demand: Option<Demand>,
    /// Blocks of this request that were active on it.
    pub shared_active: u64,
    /// Pictures of the request that it had seen.
    pub images_seen: u64,
    /// What its view was worth.
    pub trust: Verdict,
    /// Its price.
    pub terms: Terms,
    /// The first candidate that keeps at least as much of the prompt while it has
    /// no more work, one of them strictly.
    pub dominated_by: Option<Target>,
}

/// The choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChosenRecord {
    /// The target.
    pub target: Target,
    /// What decided among equals.
    pub tie: TieBranch,
}

/// What decode input-demand made of a pick.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemandRecord {
    /// Answers that the request wants: its tokens count once for each.
    pub choices: u32,
    /// What it prefers; `None` where it was not asked, because a session decided or
    /// nobody could be chosen.
    pub judgement: Option<JudgementRecord>,
}

/// What decode input-demand prefers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JudgementRecord {
    /// The target that it prefers.
    pub suggested: Target,
    /// The target that the policy prefers.
    pub original: Target,
    /// Input that the suggested one holds with this request.
    pub projected: Tokens,
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ResultRecord {
    /// HTTP status; 0 when the worker never answered.
    pub status: u16,
    /// Why it failed: a stable label; `None` when it did not.
    pub failure: Option<Cow<'static, str>>,
    /// Milliseconds to the first byte of the body.
    pub first_byte_ms: Option<u64>,
    /// Prompt tokens as the engine counted them.
    pub engine_prompt_tokens: Option<u64>,
    /// Cached prompt tokens as the engine reported them.
    pub engine_cached_tokens: Option<u64>,
    /// Generated tokens as the engine counted them.
    pub completion_tokens: Option<u64>,
}

/// A SHA-256, in text 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of `text`.
    pub fn of(text: &str) -> Self {
        Self(Sha256::digest(text.as_bytes()).into())
    }

    /// The digest that `text` spells.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        if text.len() != 64 || !text.as_bytes().iter().all(plain) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte =
                std::str::from_utf8(digits).ok().and_then(|digits| u8::from_str_radix(digits, 16).ok())?;
        }
        Some(Self(bytes))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Names settings: the digest of their canonical JSON.
pub fn policy_digest(settings: &Settings) -> Digest {
    Digest::of(&canonical_json(&json!(settings)))
}

impl Receipt {
    /// The receipt as JSON. Whole numbers end at [`MAX_WHOLE`]: a larger one is
    /// written as that, so that every reader reads the same.
    pub fn to_value(&self) -> Value {
        let mut value = json!(self);
        saturate(&mut value);
        value
    }
}

fn saturate(value: &mut Value) {
    match value {
        Value::Number(number) if number.as_u64().is_some_and(|whole| whole > MAX_WHOLE) => {
            *value = Value::from(MAX_WHOLE);
        }
        Value::Array(items) => items.iter_mut().for_each(saturate),
        Value::Object(fields) => fields.values_mut().for_each(saturate),
        _ => {}
    }
}

fn hexadecimal<S: Serializer>(block: &Option<BlockHash>, serializer: S) -> Result<S::Ok, S::Error> {
    match block {
        Some(block) => serializer.collect_str(&format_args!("{:016x}", block.0)),
        None => serializer.serialize_none(),
    }
}
