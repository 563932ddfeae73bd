//! What was decided and why, never prompt text.
//!
//! A receipt holds hashes' counts, digests and terms: enough to explain a
//! decision and to repeat it. Every arrival has one, also when nothing could be
//! picked. The ring is bounded; the oldest receipt goes first.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::blocks::NamespaceId;
use crate::ids::{Role, Target};
use crate::policy::sessions::SessionUse;
use crate::policy::shadow::Shadow;
use crate::policy::tie::TieBranch;
use crate::policy::{Candidate, Decision, Evidence, Load, Outcome, Settings, Terms};
use crate::trust::Verdict;
use crate::units::{TierHits, Tokens};

/// Version of the receipt's fields.
pub const SCHEMA_VERSION: u32 = 1;

/// The record of one decision.
#[derive(Clone, Debug, Serialize)]
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
    /// All candidates, sorted by target.
    pub candidates: Vec<CandidateRecord>,
    /// The chosen one; `None` when there was none.
    pub chosen: Option<ChosenRecord>,
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

/// One candidate as it stood.
#[derive(Clone, Debug, Serialize)]
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
    /// Its load.
    pub load: Load,
    /// Blocks of this request that were active on it.
    pub shared_active: u64,
    /// Pictures of the request that it had seen.
    pub images_seen: u64,
    /// What its view was worth.
    pub trust: Verdict,
    /// Its price.
    pub terms: Terms,
}

/// The choice.
#[derive(Clone, Debug, Serialize)]
pub struct ChosenRecord {
    /// The target.
    pub target: Target,
    /// What decided among equals.
    pub tie: TieBranch,
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ResultRecord {
    /// HTTP status; 0 when the worker never answered.
    pub status: u16,
    /// Why it failed: a stable label; `None` when it did not.
    pub failure: Option<&'static str>,
    /// Milliseconds to the first byte of the body.
    pub first_byte_ms: Option<u64>,
    /// Prompt tokens as the engine counted them.
    pub engine_prompt_tokens: Option<u64>,
    /// Cached prompt tokens as the engine reported them.
    pub engine_cached_tokens: Option<u64>,
    /// Generated tokens as the engine counted them.
    pub completion_tokens: Option<u64>,
}

impl Receipt {
    /// The receipt of a request of which nothing is known and for which nothing
    /// was decided; what is known goes over it.
    pub fn undecided(request_id: Arc<str>, settings: Settings, block_size: u32) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            request_id,
            time_unix_ms: 0,
            attempt: 0,
            role: Role::Mixed,
            settings,
            namespace: NamespaceId(0),
            prompt_tokens: Tokens(0),
            exact_tokens: false,
            prompt_blocks: 0,
            block_size,
            candidates: Vec::new(),
            chosen: None,
            outcome: Outcome::NoTarget,
            predicted_hit_tokens: Tokens(0),
            images: 0,
            session: SessionUse::None,
            shadows: Vec::new(),
            result: None,
        }
    }

    /// Memory that it takes, roughly: candidates are the most of it.
    const fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.candidates.capacity() * size_of::<CandidateRecord>()
            + self.shadows.capacity() * size_of::<Shadow>()
    }

    /// Writes down who stood for choice and who was chosen.
    pub fn fill(&mut self, candidates: &[Candidate], decision: &Decision) {
        self.stand(candidates, &decision.terms);
        let chosen = &candidates[decision.chosen];
        self.chosen = Some(ChosenRecord { target: chosen.target.clone(), tie: decision.tie });
        self.outcome = decision.outcome;
        self.predicted_hit_tokens = Tokens(chosen.hits.total() * u64::from(self.block_size));
    }

    /// Writes down who stood for choice.
    pub fn stand(&mut self, candidates: &[Candidate], terms: &[Terms]) {
        self.candidates = candidates
            .iter()
            .zip(terms)
            .map(|(candidate, terms)| CandidateRecord {
                target: candidate.target.clone(),
                claimed: candidate.claimed,
                hits: candidate.hits,
                predicted: candidate.predicted,
                evidence: candidate.evidence,
                load: candidate.load,
                shared_active: candidate.shared_active,
                images_seen: candidate.images_seen,
                trust: candidate.trust,
                terms: *terms,
            })
            .collect();
    }
}

/// Most memory that a ring of receipts takes: with 2,000 candidates each, the
/// latest 150 receipts.
const MAX_RING_BYTES: usize = 64 << 20;

/// The latest receipts. Filed when decided, completed when answered.
#[derive(Debug)]
pub struct Ring {
    /// Shared with those who read them, so that nobody serialises under the
    /// ring's lock.
    receipts: VecDeque<Arc<Receipt>>,
    capacity: usize,
    bytes: usize,
    /// Number of the oldest receipt held.
    first: u64,
}

/// A receipt's number in its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiptNumber(u64);

impl Ring {
    /// A ring of `capacity` receipts, at least one; fewer where they are large.
    pub fn new(capacity: usize) -> Self {
        Self { receipts: VecDeque::new(), capacity: capacity.max(1), bytes: 0, first: 0 }
    }

    /// Files a receipt; the oldest makes room.
    pub fn file(&mut self, receipt: Receipt) -> ReceiptNumber {
        self.bytes += receipt.bytes();
        self.receipts.push_back(Arc::new(receipt));
        while self.receipts.len() > self.capacity || (self.bytes > MAX_RING_BYTES && self.receipts.len() > 1)
        {
            self.bytes -= self.receipts.pop_front().map_or(0, |oldest| oldest.bytes());
            self.first += 1;
        }
        ReceiptNumber(self.first + self.receipts.len() as u64 - 1)
    }

    /// Joins what became of it. A receipt that left the ring is not missed; one
    /// that is being read is copied first.
    pub fn join(&mut self, number: ReceiptNumber, result: ResultRecord) {
        let position = number.0.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(receipt) = position.and_then(|at| self.receipts.get_mut(at)) {
            Arc::make_mut(receipt).result = Some(result);
        }
    }

    /// The newest `limit` receipts that `wanted` accepts, newest first, as they
    /// are now: a result that is joined later does not show in them.
    pub fn latest(&self, limit: usize, wanted: impl Fn(&Receipt) -> bool) -> Vec<Arc<Receipt>> {
        self.receipts.iter().rev().filter(|receipt| wanted(receipt)).take(limit).cloned().collect()
    }

    /// Receipts ever filed.
    pub fn filed(&self) -> u64 {
        self.first + self.receipts.len() as u64
    }
}

/// `value` with keys in order, no spaces, and whole numbers without a fraction:
/// equal values have equal bytes.
pub fn canonical_json(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(value, &mut out);
    out
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut keys: Vec<_> = fields.iter().collect();
            keys.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (position, (key, value)) in keys.into_iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                write_canonical(value, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 1e15 => {
                out.push_str(&format!("{}", float as i64));
            }
            _ => out.push_str(&number.to_string()),
        },
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn receipt(id: &str) -> Receipt {
        Receipt::undecided(id.into(), Settings::default(), 16)
    }

    #[test]
    fn the_ring_is_bounded_and_joins_only_what_it_still_holds() {
        let mut ring = Ring::new(2);
        let numbers: Vec<_> = ["a", "b", "c"].iter().map(|id| ring.file(receipt(id))).collect();
        numbers
            .iter()
            .for_each(|number| ring.join(*number, ResultRecord { status: 200, ..Default::default() }));
        let held: Vec<_> = ring.latest(9, |receipt| receipt.result.is_some());
        assert_eq!(held.iter().map(|receipt| &*receipt.request_id).collect::<Vec<_>>(), ["c", "b"]);
        assert_eq!(ring.filed(), 3);
    }

    #[test]
    fn a_receipt_that_is_being_read_does_not_change_under_its_reader() {
        let mut ring = Ring::new(1);
        let number = ring.file(receipt("a"));
        let read = ring.latest(1, |_| true);
        ring.join(number, ResultRecord { status: 200, ..Default::default() });
        assert_eq!(read[0].result, None);
        let joined = ring.latest(1, |_| true)[0].result.as_ref().map(|result| result.status);
        assert_eq!(joined, Some(200));
    }

    #[test]
    fn canonical_json_does_not_depend_on_the_order_of_keys() {
        let one = json!({"b": [1, 2.0, 0.5], "a": {"y": null, "x": "ü\n"}});
        let other = json!({"a": {"x": "ü\n", "y": null}, "b": [1, 2, 0.5]});
        assert_eq!(canonical_json(&one), canonical_json(&other));
        assert_eq!(canonical_json(&one), r#"{"a":{"x":"ü\n","y":null},"b":[1,2,0.5]}"#);
    }
}
