//! A hand-made trace under every policy, decision by decision.
//!
//! The trace freezes requests, first snapshots and cache events; each policy
//! starts from a clean copy of them. Views change by events alone: an event of an
//! older epoch, or an older seq in the same epoch, is dropped and counted. Booked
//! prompts count as predicted hits until two seconds after their first byte.
//! Prefill is served first come first served at a fixed rate, then a request
//! decodes at a fixed pace: the latency proxy. Ties fall to the lower target.
//! Every request leaves a receipt with all candidates, what was rejected in other
//! namespaces, and which candidates are dominated.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_128;

use super::contender::Contender;
use super::lab_trace::{LabEvent, LabEventKind, LabRequest, LabTrace};
use super::report::with_digest;
use crate::blocks::{BlockHash, NamespaceId};
use crate::events::envelope::Status;
use crate::ids::{Epoch, Role, Target, WorkerId};
use crate::json::canonical_json;
use crate::policy::hits::usable;
use crate::policy::tie::{TieBranch, Ties};
use crate::policy::{
    Candidate, Evidence, Load, NoChoice, Outcome, Overload, PickRequest, Settings, Terms, decide_with,
};
use crate::trust::{Freshness, State, Trust, Verdict};
use crate::units::{Millis, TierHits, Tokens};

/// The lab's service model and clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LabModel {
    /// Tokens that a worker prefills in a tick.
    pub prefill_tokens_per_tick: u64,
    /// Ticks per generated token.
    pub ticks_per_decode_token: u64,
    /// Ticks after the first byte for which a booked prompt counts as a hit.
    pub in_flight_credit_ticks: u64,
    /// Ticks without news after which a view is unsound.
    pub silence_ticks: u64,
    /// Ticks without news after which its hits no longer count.
    pub budget_ticks: u64,
}

impl Default for LabModel {
    fn default() -> Self {
        Self {
            prefill_tokens_per_tick: 10,
            ticks_per_decode_token: 10,
            in_flight_credit_ticks: 2_000,
            silence_ticks: 3_000,
            budget_ticks: 10_000,
        }
    }
}

/// One decision, with all that it was made from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabReceipt {
    /// The request.
    pub request_id: String,
    /// When it was decided.
    pub tick: u64,
    /// Digest of its namespace.
    pub namespace: NamespaceId,
    /// Every worker, sorted by name.
    pub candidates: Vec<LabCandidate>,
    /// The chosen one; `None` when the cap rejected all.
    pub chosen: Option<Target>,
    /// What decided among equals; `None` when none was chosen.
    pub tie: Option<TieBranch>,
    /// How the route ended.
    pub outcome: Outcome,
    /// Whether reuse was claimed by a view that was not exact.
    pub stale_claim: bool,
    /// Modelled tick of the first byte: the latency proxy. `None` when none was
    /// chosen.
    pub first_byte_tick: Option<u64>,
}

/// One candidate as it stood.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabCandidate {
    /// The target.
    pub target: Target,
    /// Leading blocks that its view claims.
    pub claimed: u64,
    /// Leading blocks that counted.
    pub hits: u64,
    /// Leading blocks that it holds for others: rejected before scoring.
    pub rejected_other_namespace: u64,
    /// Its load.
    pub load: Load,
    /// Blocks of this request that were active on it.
    pub shared_active: u64,
    /// What its view was worth.
    pub trust: Verdict,
    /// Its price.
    pub terms: Terms,
    /// The first target that keeps as much reuse while it has no more work, one
    /// of them strictly.
    pub dominated_by: Option<Target>,
}

/// One policy's replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabRun {
    /// The policy and its settings.
    pub policy: String,
    /// In the order of decisions.
    pub receipts: Vec<LabReceipt>,
    /// The figures.
    pub summary: LabSummary,
}

/// The figures of one policy's replay. Modelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LabSummary {
    /// Prompt tokens that are computed again.
    pub recomputed_tokens: u64,
    /// Share of prompt tokens that are not.
    pub hit_share: f64,
    /// Requests with a hit.
    pub hit_count: u64,
    /// The most tokens to prefill on one worker over the mean.
    pub load_max_over_mean: f64,
    /// Consecutive requests that share a first block and went to different
    /// workers.
    pub route_churn: u64,
    /// Events dropped as stale.
    pub stale_events: u64,
    /// Candidates that hold a longer prefix for another namespace.
    pub tenant_rejections: u64,
    /// Decisions for a dominated candidate.
    pub dominated_choices: u64,
    /// Decisions in which a stale view claimed reuse.
    pub stale_claims: u64,
    /// Requests that the cap sent away. No other figure counts them.
    pub unrouted: u64,
    /// Ticks to the first byte, mean.
    pub latency_proxy_ticks: f64,
}

/// A rule that is broken on purpose, so that a test is seen to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Blocks of any namespace are hits.
    TenantScopeRemoved,
    /// Events of an older life change the view.
    OlderEpochAccepted,
    /// Contexts cost nothing.
    DecodeLoadIgnored,
    /// A policy sees what the one before it did.
    StateShared,
    /// Only the chosen candidate is written down.
    CandidatesDropped,
}

/// Replays `trace` under each of `policies`.
pub fn run(trace: &LabTrace, model: LabModel, policies: &[Settings]) -> Vec<LabRun> {
    run_with(trace, model, policies, None)
}

/// [`run`], with a rule broken on purpose.
pub fn run_with(
    trace: &LabTrace,
    model: LabModel,
    policies: &[Settings],
    mutant: Option<Mutant>,
) -> Vec<LabRun> {
    let mut world = World::new(trace, model, mutant);
    let mut runs = Vec::new();
    for settings in policies {
        if mutant != Some(Mutant::StateShared) {
            world = World::new(trace, model, mutant);
        }
        runs.push(world.replay(settings));
    }
    runs
}

/// The runs as canonical JSON with their digest. `overload` is that of all of them.
pub fn to_json(trace: &LabTrace, model: LabModel, overload: Overload, runs: &[LabRun]) -> String {
    with_digest(json!({
        "schema_version": super::report::SCHEMA_VERSION,
        "modelled": "latencies and loads come from the service model below, none from an engine",
        "trace": {
            "format": "lab",
            "requests": trace.requests.len(),
            "workers": trace.workers.len(),
            "block_tokens": trace.size.tokens(),
        },
        "model": model,
        "overload": overload,
        "policies": runs,
    }))
}

/// Digest of one policy's receipts.
pub fn digest(run: &LabRun) -> u128 {
    let value = serde_json::to_value(&run.receipts).unwrap_or_default();
    xxh3_128(canonical_json(&value).as_bytes())
}

/// What a complete receipt has; the name of what is missing otherwise.
pub fn complete(trace: &LabTrace, receipt: &LabReceipt) -> Result<(), &'static str> {
    let names = receipt.candidates.iter().map(|candidate| candidate.target.worker.as_str());
    if !names.eq(trace.workers.iter().map(|worker| worker.name.as_str())) {
        return Err("candidates");
    }
    let known = |target: &Target| receipt.candidates.iter().any(|candidate| candidate.target == *target);
    if receipt.chosen.as_ref().is_none_or(known) { Ok(()) } else { Err("chosen") }
}

/// One policy's fleet.
struct World<'a> {
    trace: &'a LabTrace,
    model: LabModel,
    mutant: Option<Mutant>,
    workers: Vec<Worker>,
    turn: Option<Target>,
    /// Events that are applied.
    heard: usize,
    stale_events: u64,
}

/// What the router knows of a worker.
#[derive(Clone, Debug)]
struct Worker {
    target: Target,
    epoch: Epoch,
    seq: Option<u64>,
    trust: Trust,
    view: BTreeMap<NamespaceId, BTreeSet<BlockHash>>,
    leases: Vec<Lease>,
    /// When its prefill queue is empty.
    free_at: u64,
}

/// One request on a worker, with its modelled times.
#[derive(Clone, Debug)]
struct Lease {
    namespace: NamespaceId,
    blocks: Vec<BlockHash>,
    prompt: u64,
    uncached: u64,
    first_byte: u64,
    decode: u64,
    end: u64,
}

impl<'a> World<'a> {
    fn new(trace: &'a LabTrace, model: LabModel, mutant: Option<Mutant>) -> Self {
        let workers = trace.workers.iter().map(|snapshot| Worker::new(snapshot, model)).collect();
        Self { trace, model, mutant, workers, turn: None, heard: 0, stale_events: 0 }
    }

    fn replay(&mut self, settings: &Settings) -> LabRun {
        let trace = self.trace;
        let receipts: Vec<LabReceipt> =
            trace.requests.iter().map(|request| self.route(settings, request)).collect();
        let policy = Contender::Shipped(*settings).spelling();
        let summary = self.summarise(&receipts);
        LabRun { policy, receipts, summary }
    }

    fn route(&mut self, settings: &Settings, request: &LabRequest) -> LabReceipt {
        let trace = self.trace;
        // Of equal ticks and seqs the event comes first.
        let due = |event: &LabEvent| (event.tick, event.seq) <= (request.tick, request.seq);
        while let Some(event) = trace.events.get(self.heard).filter(|event| due(event)) {
            self.heard += 1;
            let accepts_all = self.mutant == Some(Mutant::OlderEpochAccepted);
            self.stale_events += u64::from(!self.workers[event.worker].hear(event, accepts_all));
        }
        let candidates: Vec<Candidate> =
            self.workers.iter().map(|worker| self.candidate(worker, request)).collect();
        let pick = PickRequest {
            id: &request.id,
            role: Role::Mixed,
            prompt: request.prompt,
            blocks: &request.blocks,
            size: trace.size,
            images: &[],
            session: None,
            choices: 1,
        };
        let found = decide_with(settings, &pick, &candidates, self.turn.as_ref(), Ties::Target);
        let (terms, decision) = match found {
            Ok(decision) => (decision.terms.clone(), Some(decision)),
            Err(NoChoice::Overloaded(terms)) => (terms, None),
            Err(NoChoice::Empty) => (Vec::new(), None),
        };
        let chosen = decision.as_ref().map(|decision| decision.chosen);
        let mut records = self.records(request, &candidates, &terms);
        if self.mutant == Some(Mutant::CandidatesDropped)
            && let Some(chosen) = chosen
        {
            records = vec![records.swap_remove(chosen)];
        }
        let block = u64::from(trace.size.tokens());
        let first_byte_tick = chosen.map(|chosen| {
            let cached = candidates[chosen].hits.total() * block;
            self.workers[chosen].book(request, cached, self.model)
        });
        let chosen = chosen.map(|chosen| &candidates[chosen]);
        let target = chosen.map(|chosen| chosen.target.clone());
        if target.is_some() {
            self.turn.clone_from(&target);
        }
        LabReceipt {
            request_id: request.id.clone(),
            tick: request.tick.0,
            namespace: request.namespace,
            candidates: records,
            chosen: target,
            tie: decision.as_ref().map(|decision| decision.tie),
            outcome: decision.map_or(Outcome::NoTarget, |decision| decision.outcome),
            stale_claim: chosen
                .is_some_and(|chosen| chosen.claimed.total() > 0 && chosen.trust.state != State::Exact),
            first_byte_tick,
        }
    }

    /// The candidates as the receipt has them.
    fn records(&self, request: &LabRequest, candidates: &[Candidate], terms: &[Terms]) -> Vec<LabCandidate> {
        candidates
            .iter()
            .zip(terms)
            .zip(&self.workers)
            .map(|((candidate, terms), worker)| LabCandidate {
                target: candidate.target.clone(),
                claimed: candidate.claimed.total(),
                hits: candidate.hits.total(),
                rejected_other_namespace: worker.elsewhere(request, candidate.claimed.total()),
                load: candidate.load,
                shared_active: candidate.shared_active,
                trust: candidate.trust,
                terms: *terms,
                dominated_by: dominated(candidate, candidates),
            })
            .collect()
    }

    fn candidate(&self, worker: &Worker, request: &LabRequest) -> Candidate {
        let now = request.tick.0;
        let freshness =
            Freshness { silence: Millis(self.model.silence_ticks), budget: Millis(self.model.budget_ticks) };
        let trust = worker.trust.verdict(request.tick, freshness);
        let any = self.mutant == Some(Mutant::TenantScopeRemoved);
        let claimed = worker.claims(request, any);
        let credit = self.model.in_flight_credit_ticks;
        let predicted = |hash: &&BlockHash| {
            worker.leases.iter().any(|lease| {
                lease.namespace == request.namespace
                    && now <= lease.first_byte + credit
                    && lease.blocks.contains(hash)
            })
        };
        let sound = if trust.credited { claimed } else { 0 };
        let booked = request.blocks.iter().take_while(predicted).count() as u64;
        let held = TierHits { device: sound.max(booked), ..TierHits::default() };
        let hits = usable(held, request.prompt, self.trace.size, false);
        let mut load = worker.load(now, self.trace.size.tokens(), self.model);
        if self.mutant == Some(Mutant::DecodeLoadIgnored) {
            load.context = Tokens(0);
        }
        Candidate {
            target: worker.target.clone(),
            claimed: TierHits { device: claimed, ..TierHits::default() },
            hits,
            predicted: hits.total().saturating_sub(sound),
            evidence: match hits.total() {
                0 => Evidence::Nothing,
                hits if hits > sound => Evidence::InFlight,
                _ => Evidence::View,
            },
            trust,
            load,
            shared_active: worker.shared(request),
            images_seen: 0,
            demand: Default::default(),
        }
    }

    fn summarise(&self, receipts: &[LabReceipt]) -> LabSummary {
        let block = u64::from(self.trace.size.tokens());
        let mut summary = LabSummary { stale_events: self.stale_events, ..LabSummary::default() };
        let mut work: BTreeMap<&Target, u64> =
            self.workers.iter().map(|worker| (&worker.target, 0)).collect();
        let mut last: BTreeMap<(NamespaceId, BlockHash), &Target> = BTreeMap::new();
        let (mut prompts, mut waited) = (0, 0);
        for (request, receipt) in self.trace.requests.iter().zip(receipts) {
            summary.tenant_rejections +=
                receipt.candidates.iter().filter(|candidate| candidate.rejected_other_namespace > 0).count()
                    as u64;
            summary.stale_claims += u64::from(receipt.stale_claim);
            let (Some(target), Some(first_byte)) = (&receipt.chosen, receipt.first_byte_tick) else {
                summary.unrouted += 1;
                continue;
            };
            let chosen = receipt.candidates.iter().find(|candidate| candidate.target == *target);
            let hits = chosen.map_or(0, |chosen| chosen.hits);
            let uncached = request.prompt.0 - hits * block;
            prompts += request.prompt.0;
            waited += first_byte - receipt.tick;
            summary.recomputed_tokens += uncached;
            summary.hit_count += u64::from(hits > 0);
            summary.dominated_choices +=
                u64::from(chosen.is_some_and(|chosen| chosen.dominated_by.is_some()));
            *work.entry(target).or_default() += uncached;
            if let Some(first) = request.blocks.first() {
                let before = last.insert((request.namespace, *first), target);
                summary.route_churn += u64::from(before.is_some_and(|before| before != target));
            }
        }
        let most = work.values().max().copied().unwrap_or(0);
        summary.hit_share = ratio(prompts - summary.recomputed_tokens, prompts);
        summary.load_max_over_mean = ratio(most * work.len() as u64, summary.recomputed_tokens);
        summary.latency_proxy_ticks = ratio(waited, receipts.len() as u64 - summary.unrouted);
        summary
    }
}

impl Worker {
    /// As its snapshot says: what waited then is prefilled first, what decoded
    /// then decodes on for as long as its tokens would take to make.
    fn new(snapshot: &super::lab_trace::LabWorker, model: LabModel) -> Self {
        let mut trust = Trust::default();
        trust.syncing();
        trust.synced(snapshot.observed, snapshot.epoch, 0, Status::default());
        let free_at = snapshot.observed.0 + snapshot.queued.0.div_ceil(model.prefill_tokens_per_tick);
        let mut leases = Vec::new();
        let background = |prompt: u64, uncached: u64, first_byte: u64, decode: u64| Lease {
            namespace: NamespaceId(0),
            blocks: Vec::new(),
            prompt,
            uncached,
            first_byte,
            decode: 0,
            end: first_byte + decode * model.ticks_per_decode_token,
        };
        if snapshot.queued.0 > 0 {
            leases.push(background(snapshot.queued.0, snapshot.queued.0, free_at, 0));
        }
        if snapshot.context.0 > 0 {
            leases.push(background(snapshot.context.0, 0, snapshot.observed.0, snapshot.context.0));
        }
        let mut view: BTreeMap<NamespaceId, BTreeSet<BlockHash>> = BTreeMap::new();
        for entry in &snapshot.entries {
            view.entry(entry.namespace).or_default().extend(&entry.blocks);
        }
        let target = Target::new(WorkerId::new(snapshot.name.as_str()), 0);
        Self { target, epoch: snapshot.epoch, seq: None, trust, view, leases, free_at }
    }

    /// Applies an event; `false` if it is stale and dropped.
    fn hear(&mut self, event: &LabEvent, accepts_all: bool) -> bool {
        let stale = event.epoch < self.epoch
            || event.epoch == self.epoch && self.seq.is_some_and(|seq| event.seq <= seq);
        if stale && !accepts_all {
            return false;
        }
        if event.epoch > self.epoch {
            // A new life begins empty.
            self.view.clear();
            self.trust.reset();
            self.trust.synced(event.tick, event.epoch, event.seq, Status::default());
        }
        if !stale {
            (self.epoch, self.seq) = (event.epoch, Some(event.seq));
            self.trust.heard(event.tick, event.epoch, event.seq, Status::default());
        }
        let held = self.view.entry(event.entry.namespace).or_default();
        match event.kind {
            LabEventKind::Stored => held.extend(&event.entry.blocks),
            LabEventKind::Removed => event.entry.blocks.iter().for_each(|hash| {
                held.remove(hash);
            }),
            LabEventKind::Cleared => self.view.clear(),
        }
        true
    }

    /// Leading blocks that the view holds, in the request's namespace or in any.
    fn claims(&self, request: &LabRequest, any: bool) -> u64 {
        let holds = |hash: &&BlockHash| {
            self.view
                .iter()
                .any(|(namespace, held)| (any || *namespace == request.namespace) && held.contains(hash))
        };
        request.blocks.iter().take_while(holds).count() as u64
    }

    /// Leading blocks that it holds in one other namespace, if more than `own`.
    fn elsewhere(&self, request: &LabRequest, own: u64) -> u64 {
        let others = self.view.iter().filter(|(namespace, _)| **namespace != request.namespace);
        let longest = others
            .map(|(_, held)| request.blocks.iter().take_while(|hash| held.contains(hash)).count() as u64)
            .max();
        longest.filter(|longest| *longest > own).unwrap_or(0)
    }

    fn live(&self, now: u64) -> impl Iterator<Item = &Lease> {
        self.leases.iter().filter(move |lease| now < lease.end.max(lease.first_byte))
    }

    fn load(&self, now: u64, block: u32, model: LabModel) -> Load {
        let generated = |lease: &Lease| {
            (now.saturating_sub(lease.first_byte) / model.ticks_per_decode_token).min(lease.decode)
        };
        let distinct: BTreeSet<(NamespaceId, BlockHash)> = self
            .live(now)
            .flat_map(|lease| lease.blocks.iter().map(|hash| (lease.namespace, *hash)))
            .collect();
        let private: u64 = self.live(now).map(|lease| 1 + generated(lease) / u64::from(block)).sum();
        Load {
            active_blocks: distinct.len() as u64 + private,
            queued: Tokens(
                self.live(now).filter(|lease| now < lease.first_byte).map(|lease| lease.uncached).sum(),
            ),
            context: Tokens(self.live(now).map(|lease| lease.prompt + generated(lease)).sum()),
            requests: self.live(now).count() as u64,
        }
    }

    fn shared(&self, request: &LabRequest) -> u64 {
        let now = request.tick.0;
        let active = |hash: &&BlockHash| {
            self.live(now).any(|lease| lease.namespace == request.namespace && lease.blocks.contains(hash))
        };
        request.blocks.iter().take_while(active).count() as u64
    }

    /// Books a request and says when its first byte comes.
    fn book(&mut self, request: &LabRequest, cached: u64, model: LabModel) -> u64 {
        let uncached = request.prompt.0.saturating_sub(cached);
        let start = self.free_at.max(request.tick.0);
        let first_byte = start + uncached.div_ceil(model.prefill_tokens_per_tick);
        self.free_at = first_byte;
        self.leases.push(Lease {
            namespace: request.namespace,
            blocks: request.blocks.clone(),
            prompt: request.prompt.0,
            uncached,
            first_byte,
            decode: request.decode,
            end: first_byte + request.decode * model.ticks_per_decode_token,
        });
        first_byte
    }
}

/// The first candidate that is at least as good in reuse and in work, and better
/// in one of them.
fn dominated(candidate: &Candidate, all: &[Candidate]) -> Option<Target> {
    let key = |one: &Candidate| (one.hits.total(), one.load.queued.0 + one.load.context.0);
    let (hits, work) = key(candidate);
    let better = all.iter().find(|other| {
        let (reuse, other_work) = key(other);
        reuse >= hits && other_work <= work && (reuse > hits || other_work < work)
    });
    better.map(|better| better.target.clone())
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
