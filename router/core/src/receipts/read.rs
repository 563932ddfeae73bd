//! Lines of a chain back into receipts, strictly.
//!
//! Every field must be there, in its kind and range, and no other; a line must
//! be canonical and have its own digest; candidates must be as many as were
//! priced, and what follows from other fields must follow. A complaint names
//! line and field.

use std::borrow::Cow;
use std::sync::Arc;

use super::labels::Named;
use super::{
    CandidateRecord, ChosenRecord, DemandRecord, Digest, JudgementRecord, PromptRecord, Receipt,
    ResultRecord, SCHEMA_VERSION,
};
use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{DpRank, Epoch, Target, WorkerId};
use crate::json::canonical::canonical_text;
use crate::json::fields::{Fields, Problem, TraceError};

use crate::policy::decode_demand::{self, DecodeDemand, Demand};
use crate::policy::shadow::{PolicySet, Shadow};
use crate::policy::{
    ImageWeight, Load, LoadWeights, OverlapWeights, Overload, PolicyKind, SessionSettings, Settings, Terms,
    TierCredit,
};
use crate::trust::Verdict;
use crate::units::{Millis, TierHits, Tokens};

/// Most candidates of one receipt.
const MAX_CANDIDATES: usize = 1 << 16;
/// Most blocks of one prompt: ten million tokens in blocks of one.
const MAX_BLOCKS: u64 = 10_000_000;
/// Most prompts of one receipt: more than a body of 64 MiB can list.
const MAX_PROMPTS: usize = 1 << 25;

/// One line of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// How many lines the chain had before it.
    pub sequence: u64,
    /// Digest of the line before.
    pub previous: Digest,
    /// Its own.
    pub digest: Digest,
    /// What it says.
    pub content: Content,
}

/// What a line says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A decision.
    Receipt(Box<Receipt>),
    /// Receipts were not written.
    Gap {
        /// When that was found, in milliseconds since 1970.
        time_unix_ms: u64,
        /// How many.
        lost: u64,
    },
}

type Read<T> = Result<T, TraceError>;

const CHAINED: [&str; 4] = ["kind", "sequence", "previous", "digest"];
const RECEIPT: [&str; 23] = [
    "schema_version",
    "request_id",
    "time_unix_ms",
    "attempt",
    "role",
    "settings",
    "policy_digest",
    "namespace",
    "prompt_tokens",
    "exact_tokens",
    "prompt_blocks",
    "block_size",
    "prompts",
    "turn",
    "candidate_count",
    "candidates",
    "chosen",
    "outcome",
    "predicted_hit_tokens",
    "images",
    "session",
    "shadows",
    "result",
];
/// Lines of this version are read too: those of files that a router goes on with.
const WITHOUT_PROMPTS: u32 = 2;
const GAP: [&str; 3] = ["schema_version", "time_unix_ms", "lost"];

/// Reads `text`, which is line `number` of its file.
pub fn line(text: &str, number: usize) -> Read<Line> {
    let fields = Fields::root(text, number)?;
    let found = fields.count("schema_version")?;
    let known = [SCHEMA_VERSION, WITHOUT_PROMPTS].into_iter().find(|known| u64::from(*known) == found);
    let Some(version) = known else {
        let problem = Problem::Version { found, known: u64::from(SCHEMA_VERSION) };
        return Err(fields.wrong("schema_version", problem));
    };
    let content = match fields.text("kind")?.as_str() {
        "receipt" => {
            let counted = counts_demand(&fields)?;
            let mut names = [&RECEIPT[..], &CHAINED, demand_if(counted)].concat();
            names.retain(|name| *name != "prompts" || version != WITHOUT_PROMPTS);
            fields.only(&names)?;
            Content::Receipt(Box::new(receipt(&fields, version, counted)?))
        }
        "gap" => {
            fields.only(&[&GAP[..], &CHAINED].concat())?;
            Content::Gap { time_unix_ms: fields.count("time_unix_ms")?, lost: fields.count("lost")? }
        }
        other => return Err(fields.wrong("kind", Problem::Label(other.to_owned()))),
    };
    let line = Line {
        sequence: fields.count("sequence")?,
        previous: digest(&fields, "previous")?,
        digest: digest(&fields, "digest")?,
        content,
    };
    if canonical_text(text).as_deref() != Some(text) {
        return Err(TraceError { line: number, field: "object".to_owned(), problem: Problem::NotCanonical });
    }
    follows(&fields, "digest", line.digest, Digest::of(&fields.without("digest")), "the line itself")?;
    Ok(line)
}

fn follows<T: PartialEq + ToString>(
    fields: &Fields<'_>,
    name: &str,
    found: T,
    expected: T,
    why: &'static str,
) -> Read<()> {
    if found == expected {
        return Ok(());
    }
    let problem = Problem::Differs { found: found.to_string(), expected: expected.to_string(), why };
    Err(fields.wrong(name, problem))
}

fn digest(fields: &Fields<'_>, name: &str) -> Read<Digest> {
    let found = Digest::parse(&fields.text(name)?);
    found.ok_or_else(|| fields.wrong(name, Problem::Expected("64 lower-case hexadecimal digits")))
}

fn target(fields: &Fields<'_>, name: &str) -> Read<Target> {
    let text = fields.text(name)?;
    let parts = text.rsplit_once('#').and_then(|(worker, rank)| Some((worker, rank.parse().ok()?)));
    let (worker, rank) =
        parts.ok_or_else(|| fields.wrong(name, Problem::Expected("a target, host:port#rank")))?;
    Ok(Target { worker: WorkerId::new(worker), rank: DpRank(rank) })
}

fn named<T: Named>(fields: &Fields<'_>, name: &str) -> Read<T> {
    fields.choice(name, T::of_name)
}

fn small(fields: &Fields<'_>, name: &str) -> Read<u32> {
    fields.whole(name, u64::from(u32::MAX)).map(|number| number as u32)
}

fn tokens(fields: &Fields<'_>, name: &str) -> Read<Tokens> {
    fields.count(name).map(Tokens)
}

/// Whether decode input-demand counts in the receipt, so that it must say so.
fn counts_demand(fields: &Fields<'_>) -> Read<bool> {
    Ok(decode_demand::counts(&settings(&fields.object("settings")?)?, named(fields, "role")?))
}

fn demand_if(counted: bool) -> &'static [&'static str] {
    if counted { &["demand"] } else { &[] }
}

fn receipt(fields: &Fields<'_>, version: u32, counted: bool) -> Read<Receipt> {
    let mut found = Receipt {
        schema_version: version,
        request_id: Arc::from(fields.text("request_id")?),
        time_unix_ms: fields.count("time_unix_ms")?,
        attempt: small(fields, "attempt")?,
        role: named(fields, "role")?,
        settings: settings(&fields.object("settings")?)?,
        policy_digest: digest(fields, "policy_digest")?,
        namespace: NamespaceId(fields.hexadecimal("namespace", 32)?),
        prompt_tokens: tokens(fields, "prompt_tokens")?,
        exact_tokens: fields.flag("exact_tokens")?,
        prompt_blocks: fields.whole("prompt_blocks", MAX_BLOCKS)?,
        block_size: small(fields, "block_size")?,
        prompts: match version {
            WITHOUT_PROMPTS => Vec::new(),
            _ => fields.objects("prompts", MAX_PROMPTS)?.iter().map(prompt).collect::<Read<_>>()?,
        },
        turn: fields.nullable("turn", target)?,
        candidate_count: fields.count("candidate_count")?,
        candidates: fields
            .objects("candidates", MAX_CANDIDATES)?
            .iter()
            .map(|fields| candidate(fields, counted))
            .collect::<Read<_>>()?,
        chosen: fields.nullable("chosen", chosen)?,
        demand: counted.then(|| demand(&fields.object("demand")?)).transpose()?,
        outcome: named(fields, "outcome")?,
        predicted_hit_tokens: tokens(fields, "predicted_hit_tokens")?,
        images: fields.whole("images", 1 << 16)?,
        session: named(fields, "session")?,
        shadows: fields.objects("shadows", 64)?.iter().map(shadow).collect::<Read<_>>()?,
        result: fields.nullable("result", result)?,
    };
    if found.block_size == 0 {
        return Err(fields.wrong("block_size", Problem::Expected("1 or more")));
    }
    check(fields, &mut found)?;
    Ok(found)
}

/// What must follow from other fields.
fn check(fields: &Fields<'_>, found: &mut Receipt) -> Read<()> {
    let settings = super::policy_digest(&found.settings);
    follows(fields, "policy_digest", found.policy_digest, settings, "the settings have that digest")?;
    let listed = found.candidates.len() as u64;
    let why = "so many candidates follow, and all that were priced must";
    follows(fields, "candidate_count", found.candidate_count, listed, why)?;
    if !found.candidates.is_sorted_by(|a, b| a.target < b.target) {
        return Err(fields.wrong("candidates", Problem::Expected("sorted by target, each once")));
    }
    let chosen = found
        .chosen
        .as_ref()
        .map(|chosen| found.candidates.iter().find(|candidate| candidate.target == chosen.target));
    let hits = match chosen {
        None => 0,
        Some(Some(chosen)) => chosen.hits.total(),
        Some(None) => return Err(fields.wrong("chosen", Problem::Expected("one of the candidates"))),
    };
    let skipped = hits.saturating_mul(u64::from(found.block_size));
    let why = "the hits of the chosen candidate";
    follows(fields, "predicted_hit_tokens", found.predicted_hit_tokens.0, skipped, why)?;
    check_prompts(fields, found, chosen.flatten().map_or_else(TierHits::default, |chosen| chosen.claimed))?;
    for candidate in &found.candidates {
        // What decides among equals must be known for whoever may be the deepest.
        if (candidate.hits.total() < found.prompt_blocks) != candidate.next_block.is_some() {
            let problem = Problem::Expected("with a next_block where the prompt is longer than its hits");
            return Err(fields.wrong("candidates", problem));
        }
    }
    let before: Vec<_> = found.candidates.iter().map(|one| one.dominated_by.clone()).collect();
    super::dominance::mark(&mut found.candidates);
    let differs = before.iter().zip(&found.candidates).find(|(before, now)| **before != now.dominated_by);
    match differs {
        None => Ok(()),
        Some((before, now)) => {
            let text = |one: &Option<Target>| one.as_ref().map_or("null".to_owned(), Target::to_string);
            let why = "the candidates' hits and loads say so";
            follows(fields, "candidates", text(before), text(&now.dominated_by), why)
        }
    }
}

/// What must follow of several prompts, of which the chosen target claims `claimed`.
fn check_prompts(fields: &Fields<'_>, found: &Receipt, claimed: TierHits) -> Read<()> {
    let prompts = &found.prompts;
    if prompts.is_empty() {
        return Ok(());
    }
    if prompts.len() == 1 {
        return Err(fields.wrong("prompts", Problem::Expected("empty, or a list of two prompts or more")));
    }
    let sum = |of: fn(&PromptRecord) -> u64| prompts.iter().map(of).fold(0, u64::saturating_add);
    let why = "their tokens add up to prompt_tokens";
    follows(fields, "prompts", sum(|one| one.tokens.0), found.prompt_tokens.0, why)?;
    if sum(|one| one.blocks) < found.prompt_blocks {
        return Err(fields.wrong("prompts", Problem::Expected("of as many blocks as prompt_blocks, or more")));
    }
    let why = "what the chosen candidate claims on the device";
    follows(fields, "prompts", sum(|one| one.claimed.device), claimed.device, why)?;
    let why = "what the chosen candidate claims in the host's memory";
    follows(fields, "prompts", sum(|one| one.claimed.host), claimed.host, why)?;
    let why = "what the chosen candidate claims on disk";
    follows(fields, "prompts", sum(|one| one.claimed.disk), claimed.disk, why)
}

fn settings(fields: &Fields<'_>) -> Read<Settings> {
    let known = ["policy", "overlap", "load", "tiers", "in_flight_credit", "overload"];
    fields.only(&[&known[..], &["image_weight", "sessions", "shadows", "decode_demand"]].concat())?;
    let overlap = fields.object("overlap")?;
    overlap.only(&["default", "prefill", "decode"])?;
    let load = fields.object("load")?;
    load.only(&["queue", "decode", "request", "imbalance"])?;
    let tiers = fields.object("tiers")?;
    tiers.only(&["device", "host", "disk"])?;
    let overload = fields.object("overload")?;
    overload.only(&["max_queued", "cold_reserve"])?;
    let sessions = fields.object("sessions")?;
    sessions.only(&["mode", "time_to_live"])?;
    let demand = fields.object("decode_demand")?;
    demand.only(&["mode", "request_weight"])?;
    let shadows = fields.whole("shadows", (1 << PolicyKind::ALL.len()) - 1)?;
    let contained = |policy: &&PolicyKind| shadows & 1 << policy.code() != 0;
    Ok(Settings {
        policy: named(fields, "policy")?,
        overlap: OverlapWeights {
            default: overlap.number("default")?,
            prefill: overlap.nullable("prefill", Fields::number)?,
            decode: overlap.nullable("decode", Fields::number)?,
        },
        load: LoadWeights {
            queue: load.number("queue")?,
            decode: load.number("decode")?,
            request: load.number("request")?,
            imbalance: load.number("imbalance")?,
        },
        tiers: TierCredit {
            device: tiers.number("device")?,
            host: tiers.number("host")?,
            disk: tiers.number("disk")?,
        },
        in_flight_credit: named(fields, "in_flight_credit")?,
        overload: Overload {
            max_queued: overload.nullable("max_queued", tokens)?,
            cold_reserve: overload.number("cold_reserve")?,
        },
        image_weight: ImageWeight(fields.number("image_weight")?),
        sessions: SessionSettings {
            mode: named(&sessions, "mode")?,
            time_to_live: Millis(sessions.count("time_to_live")?),
        },
        shadows: PolicyKind::ALL
            .iter()
            .filter(contained)
            .copied()
            .fold(PolicySet::default(), PolicySet::with),
        decode_demand: DecodeDemand {
            mode: named(&demand, "mode")?,
            request_weight: demand.number("request_weight")?,
        },
    })
}

fn tier_hits(fields: &Fields<'_>, name: &str) -> Read<TierHits> {
    let fields = fields.object(name)?;
    fields.only(&["device", "host", "disk"])?;
    let count = |name| fields.whole(name, MAX_BLOCKS);
    Ok(TierHits { device: count("device")?, host: count("host")?, disk: count("disk")? })
}

fn prompt(fields: &Fields<'_>) -> Read<PromptRecord> {
    fields.only(&["tokens", "blocks", "claimed"])?;
    Ok(PromptRecord {
        tokens: tokens(fields, "tokens")?,
        blocks: fields.whole("blocks", MAX_BLOCKS)?,
        claimed: tier_hits(fields, "claimed")?,
    })
}

fn demand(fields: &Fields<'_>) -> Read<DemandRecord> {
    fields.only(&["choices", "judgement"])?;
    let judgement = |fields: &Fields<'_>, name: &str| {
        let fields = fields.object(name)?;
        fields.only(&["suggested", "original", "projected"])?;
        let (suggested, original) = (target(&fields, "suggested")?, target(&fields, "original")?);
        Ok(JudgementRecord { suggested, original, projected: tokens(&fields, "projected")? })
    };
    Ok(DemandRecord {
        choices: small(fields, "choices")?,
        judgement: fields.nullable("judgement", judgement)?,
    })
}

fn held(fields: &Fields<'_>) -> Read<Demand> {
    fields.only(&["tokens", "requests"])?;
    Ok(Demand { tokens: tokens(fields, "tokens")?, requests: fields.count("requests")? })
}

fn candidate(fields: &Fields<'_>, counted: bool) -> Read<CandidateRecord> {
    let known =
        ["target", "claimed", "hits", "predicted", "evidence", "rejected_other_namespace", "next_block"];
    let more = ["load", "shared_active", "images_seen", "trust", "terms", "dominated_by"];
    fields.only(&[&known[..], &more, demand_if(counted)].concat())?;
    let load = fields.object("load")?;
    load.only(&["active_blocks", "queued", "context", "requests"])?;
    Ok(CandidateRecord {
        target: target(fields, "target")?,
        claimed: tier_hits(fields, "claimed")?,
        hits: tier_hits(fields, "hits")?,
        predicted: fields.whole("predicted", MAX_BLOCKS)?,
        evidence: named(fields, "evidence")?,
        rejected_other_namespace: fields.whole("rejected_other_namespace", MAX_BLOCKS)?,
        next_block: fields.nullable("next_block", |fields, name| {
            fields.hexadecimal(name, 16).map(|hash| BlockHash(hash as u64))
        })?,
        load: Load {
            active_blocks: load.count("active_blocks")?,
            queued: tokens(&load, "queued")?,
            context: tokens(&load, "context")?,
            requests: load.count("requests")?,
        },
        demand: counted.then(|| held(&fields.object("demand")?)).transpose()?,
        shared_active: fields.count("shared_active")?,
        images_seen: fields.count("images_seen")?,
        trust: verdict(&fields.object("trust")?)?,
        terms: terms(&fields.object("terms")?)?,
        dominated_by: fields.nullable("dominated_by", target)?,
    })
}

fn verdict(fields: &Fields<'_>) -> Read<Verdict> {
    fields.only(&["state", "reason", "credited", "epoch", "seq", "age"])?;
    Ok(Verdict {
        state: named(fields, "state")?,
        reason: named(fields, "reason")?,
        credited: fields.flag("credited")?,
        epoch: Epoch(fields.count("epoch")?),
        seq: fields.count("seq")?,
        age: fields.nullable("age", Fields::count)?.map(Millis),
    })
}

fn terms(fields: &Fields<'_>) -> Read<Terms> {
    fields.only(&["cost", "uncached", "load", "images", "rejection"])?;
    Ok(Terms {
        cost: fields.number("cost")?,
        uncached: fields.number("uncached")?,
        load: fields.number("load")?,
        images: fields.number("images")?,
        rejection: fields.nullable("rejection", named)?,
    })
}

fn chosen(fields: &Fields<'_>, name: &str) -> Read<ChosenRecord> {
    let fields = fields.object(name)?;
    fields.only(&["target", "tie"])?;
    Ok(ChosenRecord { target: target(&fields, "target")?, tie: named(&fields, "tie")? })
}

fn shadow(fields: &Fields<'_>) -> Read<Shadow> {
    fields.only(&["policy", "target", "regret_blocks"])?;
    Ok(Shadow {
        policy: named(fields, "policy")?,
        target: target(fields, "target")?,
        regret_blocks: fields.integer("regret_blocks")?,
    })
}

fn result(fields: &Fields<'_>, name: &str) -> Read<ResultRecord> {
    let fields = fields.object(name)?;
    let known = ["status", "failure", "first_byte_ms", "engine_prompt_tokens", "engine_cached_tokens"];
    fields.only(&[&known[..], &["completion_tokens"]].concat())?;
    Ok(ResultRecord {
        status: fields.whole("status", u64::from(u16::MAX))? as u16,
        failure: fields.nullable("failure", Fields::text)?.map(Cow::Owned),
        first_byte_ms: fields.nullable("first_byte_ms", Fields::count)?,
        engine_prompt_tokens: fields.nullable("engine_prompt_tokens", Fields::count)?,
        engine_cached_tokens: fields.nullable("engine_cached_tokens", Fields::count)?,
        completion_tokens: fields.nullable("completion_tokens", Fields::count)?,
    })
}
