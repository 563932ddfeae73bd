//! Receipts as a trace: every recorded decision, made again.
//!
//! A receipt holds all facts that its decision was made from, so the policy code
//! must come to the same choice, the same terms, the same tie break and the same
//! shadow picks, on any machine. [`repeat`] says where it does not. [`evaluate`]
//! asks other policies on the same frozen candidates: nothing is simulated, so
//! it shows what they would have chosen then and not what would have followed.

use serde::Serialize;
use serde_json::{Value, json};

use super::contender::Contender;
use super::report::{SCHEMA_VERSION, with_digest};
use crate::blocks::BlockHash;
use crate::json::fields::TraceError;
use crate::policy::images::ImageKey;
use crate::policy::tie::TieBranch;
use crate::policy::{
    Candidate, Decision, NoChoice, Outcome, PickRequest, Settings, Terms, decide, follow_session, shadow,
};
use crate::receipts::chain::Follower;
use crate::receipts::read::{Content, Line};
use crate::receipts::{CandidateRecord, DemandRecord, Digest, JudgementRecord, Receipt};
use crate::units::{BlockSize, Blocks, Tokens};

/// A file of receipts whose chain holds.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The receipts, by their places in the chain.
    pub receipts: Vec<(u64, Receipt)>,
    /// Receipts that gaps say are missing.
    pub lost: u64,
    /// Digest of the last line.
    pub head: Digest,
}

/// Where a repeated decision is not the recorded one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("receipt {sequence}: {field}: recorded {recorded}, and repeated {repeated}")]
pub struct Difference {
    /// The receipt's place in the chain.
    pub sequence: u64,
    /// The field.
    pub field: String,
    /// What the receipt says.
    pub recorded: String,
    /// What the policy says.
    pub repeated: String,
}

/// What one policy would have done with recorded decisions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The policy, and the weights that replaced the recorded ones.
    pub policy: String,
    /// Decisions that it was asked about: those that a session did not decide.
    pub decisions: u64,
    /// Those where it rejects all candidates.
    pub no_target: u64,
    /// Those where it chooses who was chosen.
    pub agreed: u64,
    /// The same as a share.
    pub agreement: f64,
    /// Hits of its choices.
    pub hit_blocks: u64,
    /// Blocks that it would have reused beyond the recorded choices.
    pub regret_blocks: u64,
    /// Blocks that it would have reused less.
    pub forgone_blocks: u64,
    /// Prompt tokens that its choices would have to compute.
    pub uncached_tokens: u64,
    /// Uncached tokens that waited before it on its choices.
    pub queued_tokens: u64,
}

/// Reads a chain of receipts.
pub fn parse(text: &str) -> Result<Recorded, TraceError> {
    let mut follower = Follower::default();
    let lines = follower.file(text)?;
    let receipt = |line: Line| match line.content {
        Content::Receipt(receipt) => Some((line.sequence, *receipt)),
        Content::Gap { .. } => None,
    };
    Ok(Recorded {
        receipts: lines.into_iter().filter_map(receipt).collect(),
        lost: follower.lost,
        head: follower.head.map_or_else(Digest::default, |head| head.digest),
    })
}

/// A receipt's facts, as a policy sees them.
struct Facts {
    candidates: Vec<Candidate>,
    blocks: Vec<BlockHash>,
    images: Vec<ImageKey>,
    size: BlockSize,
}

impl Facts {
    fn of(receipt: &Receipt) -> Self {
        let mut blocks = vec![BlockHash(0); usize::try_from(receipt.prompt_blocks).unwrap_or(0)];
        for candidate in &receipt.candidates {
            // Policies look at no other blocks than these.
            let place = usize::try_from(candidate.hits.total()).ok();
            if let (Some(next), Some(block)) =
                (candidate.next_block, place.and_then(|place| blocks.get_mut(place)))
            {
                *block = next;
            }
        }
        Self {
            candidates: receipt.candidates.iter().map(candidate).collect(),
            blocks,
            images: vec![ImageKey(0); usize::try_from(receipt.images).unwrap_or(0)],
            size: BlockSize::new(receipt.block_size).unwrap_or(ONE),
        }
    }

    fn request<'a>(&'a self, receipt: &'a Receipt) -> PickRequest<'a> {
        PickRequest {
            id: &receipt.request_id,
            role: receipt.role,
            prompt: receipt.prompt_tokens,
            blocks: &self.blocks,
            size: self.size,
            images: &self.images,
            session: None,
            choices: receipt.demand.as_ref().map_or(1, |demand| demand.choices),
        }
    }
}

/// The reader of receipts accepts no block size of zero.
const ONE: BlockSize = BlockSize::new(1).expect("one is not zero");

fn candidate(record: &CandidateRecord) -> Candidate {
    Candidate {
        target: record.target.clone(),
        claimed: record.claimed,
        hits: record.hits,
        predicted: record.predicted,
        evidence: record.evidence,
        trust: record.trust,
        load: record.load,
        shared_active: record.shared_active,
        images_seen: record.images_seen,
        demand: record.demand.unwrap_or_default(),
    }
}

/// Makes the decision of `receipt` again, from its own facts and settings.
pub fn repeat(sequence: u64, receipt: &Receipt) -> Result<(), Difference> {
    let facts = Facts::of(receipt);
    let request = facts.request(receipt);
    let found = decision(receipt, &receipt.settings, &facts, &request);
    let differs = |field: &str, recorded: String, repeated: String| {
        if recorded == repeated {
            return Ok(());
        }
        Err(Difference { sequence, field: field.to_owned(), recorded, repeated })
    };
    let text = |value: Value| value.to_string();
    let recorded: Vec<Terms> = receipt.candidates.iter().map(|candidate| candidate.terms).collect();
    let (terms, outcome, chosen) = match &found {
        Ok(decision) => {
            let target = facts.candidates[decision.chosen].target.to_string();
            (&decision.terms[..], decision.outcome, json!({"target": target, "tie": decision.tie}))
        }
        Err(NoChoice::Overloaded(terms)) => (&terms[..], Outcome::NoTarget, Value::Null),
        Err(NoChoice::Empty) => (&[][..], Outcome::NoTarget, Value::Null),
    };
    differs("candidates", recorded.len().to_string(), terms.len().to_string())?;
    for (place, (recorded, repeated)) in recorded.iter().zip(terms).enumerate() {
        differs(&format!("candidates[{place}].terms"), text(json!(recorded)), text(json!(repeated)))?;
    }
    differs("chosen", text(json!(receipt.chosen)), text(chosen))?;
    if let Some(DemandRecord { judgement, .. }) = &receipt.demand {
        let judged = found.as_ref().ok().and_then(|decision| decision.demand);
        let target = |place: usize| facts.candidates[place].target.clone();
        let repeated = judged.map(|it| JudgementRecord {
            suggested: target(it.suggested),
            original: target(it.original),
            projected: it.projected,
        });
        differs("demand.judgement", text(json!(judgement)), text(json!(repeated)))?;
    }
    differs("outcome", text(json!(receipt.outcome)), text(json!(outcome)))?;
    let shadows = match &found {
        Ok(decision) => {
            let turn = receipt.turn.as_ref();
            shadow::evaluate(&receipt.settings, &request, &facts.candidates[..], decision.chosen, turn)
        }
        Err(_) => Vec::new(),
    };
    differs("shadows", text(json!(receipt.shadows)), text(json!(shadows)))
}

/// The decision under `settings`. Where a session decided, it does again.
fn decision(
    receipt: &Receipt,
    settings: &Settings,
    facts: &Facts,
    request: &PickRequest<'_>,
) -> Result<Decision, NoChoice> {
    let followed = receipt.chosen.as_ref().filter(|chosen| chosen.tie == TieBranch::Session);
    let bound = followed
        .and_then(|chosen| facts.candidates.iter().position(|candidate| candidate.target == chosen.target));
    let kept = bound.and_then(|bound| follow_session(settings, request, &facts.candidates, bound).ok());
    match kept {
        Some(decision) => Ok(decision),
        None => decide(settings, request, &facts.candidates, receipt.turn.as_ref()),
    }
}

/// What `contenders`, policies of ours, would have done with `receipts`. Their
/// weights replace the recorded ones where `weights` says so; all other settings
/// are the recorded ones. `progress` is told of every receipt.
pub fn evaluate(
    receipts: &[(u64, Receipt)],
    contenders: &[Contender],
    weights: Weights,
    mut progress: impl FnMut(),
) -> Vec<Evaluation> {
    let ours: Vec<(&Contender, Settings)> = contenders
        .iter()
        .filter_map(|contender| match contender {
            Contender::Shipped(settings) => Some((contender, *settings)),
            Contender::Peer(_) => None,
        })
        .collect();
    let name = |contender: &Contender| match weights {
        Weights::Recorded => contender.name().to_owned(),
        Weights::Given => contender.spelling(),
    };
    let mut rows: Vec<Evaluation> =
        ours.iter().map(|(contender, _)| Evaluation::new(name(contender))).collect();
    for (_, receipt) in receipts {
        progress();
        let Some(chosen) = receipt.chosen.as_ref().filter(|chosen| chosen.tie != TieBranch::Session) else {
            continue;
        };
        let Some(real) = receipt.candidates.iter().position(|one| one.target == chosen.target) else {
            continue;
        };
        let facts = Facts::of(receipt);
        let request = facts.request(receipt);
        for ((_, given), row) in ours.iter().zip(&mut rows) {
            let mut settings = Settings { policy: given.policy, ..receipt.settings };
            if weights == Weights::Given {
                (settings.overlap, settings.load) = (given.overlap, given.load);
            }
            row.count(real, &facts, request.prompt, decision(receipt, &settings, &facts, &request).ok());
        }
    }
    for row in &mut rows {
        row.agreement = if row.decisions == 0 { 0.0 } else { row.agreed as f64 / row.decisions as f64 };
    }
    rows
}

/// Whose weights an evaluation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Those in each receipt.
    Recorded,
    /// The contender's.
    Given,
}

impl Evaluation {
    const fn new(policy: String) -> Self {
        Self {
            policy,
            decisions: 0,
            no_target: 0,
            agreed: 0,
            agreement: 0.0,
            hit_blocks: 0,
            regret_blocks: 0,
            forgone_blocks: 0,
            uncached_tokens: 0,
            queued_tokens: 0,
        }
    }

    fn count(&mut self, real: usize, facts: &Facts, prompt: Tokens, decision: Option<Decision>) {
        self.decisions += 1;
        let Some(decision) = decision else {
            self.no_target += 1;
            return;
        };
        let choice = &facts.candidates[decision.chosen];
        let (hits, of_real) = (choice.hits.total(), facts.candidates[real].hits.total());
        self.agreed += u64::from(decision.chosen == real);
        self.hit_blocks += hits;
        self.regret_blocks += hits.saturating_sub(of_real);
        self.forgone_blocks += of_real.saturating_sub(hits);
        self.uncached_tokens += prompt.uncached(facts.size.tokens_in(Blocks(hits))).0;
        self.queued_tokens += choice.load.queued.0;
    }
}

/// The evaluation as canonical JSON with its digest.
pub fn to_json(recorded: &Recorded, rows: &[Evaluation]) -> String {
    with_digest(json!({
        "schema_version": SCHEMA_VERSION,
        "frozen": "every policy was asked on the recorded candidates of each receipt; nothing is simulated",
        "trace": {
            "format": "receipts",
            "receipts": recorded.receipts.len(),
            "lost": recorded.lost,
            "head": recorded.head,
        },
        "repeated": recorded.receipts.len(),
        "policies": rows,
    }))
}
