//! One request's facts to one pick.
//!
//! Gathers what the core needs (hits from the index, trust, routing history),
//! lets it select and book, and writes down the receipt and the pick line. The
//! core decides; nothing is decided here.

use std::sync::Arc;

use kvrouter_core::blocks::{BlockHash, Namespace, NamespaceId, chain};
use kvrouter_core::ids::{Role, Target, WorkerId};
use kvrouter_core::index::Hit;
use kvrouter_core::policy::images::ImageKey;
use kvrouter_core::policy::leases::{Lease, NoPick, Pick, Prospect};
use kvrouter_core::policy::sessions::SessionKey;
use kvrouter_core::policy::shadow::{self, Shadow};
use kvrouter_core::policy::{
    Candidate, Decision, Evidence, NoChoice, Outcome, PickRequest, PolicyKind, Settings, Terms, hits,
};
use kvrouter_core::receipts::elsewhere::{self, Other};
use kvrouter_core::receipts::{Draft, ReceiptNumber, Record, ResultRecord};
use kvrouter_core::units::{Blocks, TierHits, Tokens};
use kvrouter_crds::config::Fallback;

use crate::config::Live;
use crate::fleet::{self, TargetState, Worker};
use crate::pool::Pool;
use crate::prompt::Prompt;

/// A request as routing sees it.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Its id.
    pub request_id: Arc<str>,
    /// What a worker is wanted for.
    pub role: Role,
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Whether they were counted, not estimated.
    pub exact_tokens: bool,
    /// What may share its blocks.
    pub namespace: NamespaceId,
    /// Its full blocks; empty where it was not tokenised.
    pub blocks: Arc<[BlockHash]>,
    /// Pictures, clips and recordings in it.
    pub images: Vec<ImageKey>,
    /// The session it belongs to.
    pub session: Option<SessionKey>,
    /// The adapter it needs: only workers that serve it stand for choice.
    pub adapter: Option<Arc<str>>,
    /// The engine will not read its cache for it.
    pub bypasses_cache: bool,
    /// Where it and its like begin, whatever their namespace.
    pub beginning: Option<Beginning>,
}

/// How a prompt begins, and who else was sent one like it.
#[derive(Clone, Debug)]
pub struct Beginning {
    /// Its first block under one root for all.
    pub first: BlockHash,
    /// Its own namespace.
    pub own: Other,
    /// Another namespace that was sent such a prompt, and its first blocks as that
    /// one would hold them.
    pub other: Option<(NamespaceId, Vec<BlockHash>)>,
}

/// A pick: where to send a request, and what holds the booking.
#[derive(Debug)]
pub struct Routed {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The rank of it.
    pub target: Target,
    /// The booking.
    pub lease: Lease,
    /// Where the receipt was filed.
    pub receipt: ReceiptNumber,
}

impl Ask {
    /// Hashes a prompt. CPU-bound: about 2 ns a token.
    pub fn new(pool: &Pool, request_id: Arc<str>, prompt: &Prompt) -> Self {
        let root = pool.identity.root(&prompt.namespace);
        Self {
            request_id,
            role: Role::Mixed,
            prompt_tokens: prompt.count,
            exact_tokens: prompt.refused.is_none(),
            namespace: pool.identity.id(&prompt.namespace),
            blocks: chain(root, pool.config.size, &prompt.tokens).into(),
            images: prompt.images.clone(),
            session: None,
            adapter: prompt.namespace.adapter.clone(),
            bypasses_cache: prompt.bypasses_cache,
            beginning: Beginning::of(pool, prompt),
        }
    }

    /// Whether `worker` may be picked for it now.
    pub fn is_for(&self, worker: &Worker) -> bool {
        worker.is_ready() && worker.takes(self.role) && worker.serves(self.adapter.as_deref())
    }

    fn pick_request(&self, pool: &Pool) -> PickRequest<'_> {
        PickRequest {
            id: &self.request_id,
            role: self.role,
            prompt: self.prompt_tokens,
            blocks: &self.blocks,
            size: pool.config.size,
            images: &self.images,
            session: self.session.as_ref(),
        }
    }

    fn draft<'a>(&'a self, pool: &Pool, settings: &'a Settings, attempt: u32) -> Draft<'a> {
        Draft {
            time_unix_ms: pool.clock.unix_ms(),
            attempt,
            role: self.role,
            namespace: self.namespace,
            prompt_tokens: self.prompt_tokens,
            exact_tokens: self.exact_tokens,
            blocks: &self.blocks,
            images: self.images.len() as u64,
            ..Draft::undecided(&self.request_id, settings, pool.config.size.tokens())
        }
    }
}

impl Beginning {
    /// `None` for a prompt without a full block.
    fn of(pool: &Pool, prompt: &Prompt) -> Option<Self> {
        let size = pool.config.size;
        let start = prompt.tokens.get(..size.as_usize())?;
        let common = pool.identity.root(&Namespace::default());
        let first = *chain(common, size, start).first()?;
        let namespace = pool.identity.id(&prompt.namespace);
        let own = Other { namespace, root: pool.identity.root(&prompt.namespace) };
        let other = pool.beginnings.lock().other(first, namespace);
        let looked_at = prompt.tokens.len().min(elsewhere::DEPTH * size.as_usize());
        let other =
            other.map(|other| (other.namespace, chain(other.root, size, &prompt.tokens[..looked_at])));
        Some(Self { first, own, other })
    }
}

/// A request that found nobody.
#[derive(Debug)]
pub struct Unrouted {
    /// Where the receipt was filed.
    pub receipt: ReceiptNumber,
    /// Whether there were workers, all over their hard cap.
    pub overloaded: bool,
}

/// Picks a ready worker outside `excluded`, books the request there and files
/// the receipt.
pub fn pick(pool: &Pool, ask: &Ask, attempt: u32, excluded: &[WorkerId]) -> Result<Routed, Unrouted> {
    // Read once: decision, receipt and pick line must speak of the same settings.
    let live = pool.live.read().clone();
    let settings = live.settings;
    let workers = pool.fleet.workers();
    let (prospects, elsewhere) = prospects(pool, ask, &live, &workers, excluded);
    let mut draft = ask.draft(pool, &settings, attempt);
    draft.elsewhere = &elsewhere;
    let request = ask.pick_request(pool);
    let now = pool.clock.now();
    let picked = pool.ledger.select_and_book(now, &settings, &request, ask.namespace, &ask.blocks, prospects);
    let pick = match picked {
        Ok(pick) => pick,
        Err(nobody) => {
            count(pool, ask, settings.policy, Outcome::NoTarget, None);
            let overloaded = matches!(nobody.reason, NoChoice::Overloaded(_));
            let receipt = pool.receipts.file(unanswered(draft, &nobody), None);
            return Err(Unrouted { receipt, overloaded });
        }
    };
    let shadows = shadow::evaluate(&settings, &request, &pick.candidates, &pick.decision, pick.turn.as_ref());
    let draft = Draft { turn: pick.turn.as_ref(), session: pick.session, shadows: &shadows, ..draft };
    let record = answered(draft, &pick.candidates, &pick.decision);
    let chosen = &pick.candidates[pick.decision.chosen];
    log_pick(pool, ask, settings.policy, chosen, &pick);
    count(pool, ask, settings.policy, pick.decision.outcome, Some(chosen));
    count_shadows(pool, &shadows, chosen);
    pool.metrics.sessions.with_label_values(&[pick.session.label()]).inc();
    let receipt = pool.receipts.file(record, None);
    if let Some(beginning) = &ask.beginning {
        pool.beginnings.lock().sent(beginning.first, beginning.own);
    }
    let found = fleet::find(&workers, chosen.target.worker.as_str());
    let worker = Arc::clone(found.expect("candidates come from this very list"));
    if let Some(state) = worker.targets.get(chosen.target.rank.0 as usize) {
        pool.remember(state, ask.namespace, &ask.blocks);
    }
    Ok(Routed { worker, target: chosen.target.clone(), lease: pick.lease, receipt })
}

/// Files the receipt of a request that was refused or abandoned before a pick:
/// every arrival has one. `failure` is a stable label.
pub fn file_rejection(pool: &Pool, request_id: Arc<str>, status: u16, failure: &'static str) {
    let prompt = Prompt {
        tokens: Arc::from([]),
        count: Tokens(0),
        namespace: Namespace::default(),
        refused: None,
        images: Vec::new(),
        bypasses_cache: false,
    };
    let settings = pool.live.read().settings;
    let ask = Ask { exact_tokens: false, ..Ask::new(pool, request_id, &prompt) };
    let record = ask.draft(pool, &settings, 0).encode();
    let failure = Some(failure.into());
    pool.receipts.file(record, Some(ResultRecord { status, failure, ..ResultRecord::default() }));
}

/// The record of what [`pick`] would do now, without doing it.
pub fn explain(pool: &Pool, ask: &Ask) -> Record {
    let live = pool.live.read().clone();
    let settings = live.settings;
    let (prospects, elsewhere) = prospects(pool, ask, &live, &pool.fleet.workers(), &[]);
    let turn = pool.ledger.turn();
    let mut draft = ask.draft(pool, &settings, 0);
    (draft.elsewhere, draft.turn) = (&elsewhere, turn.as_ref());
    let request = ask.pick_request(pool);
    match pool.ledger.preview(pool.clock.now(), &settings, &request, ask.namespace, prospects) {
        Ok((decision, candidates)) => {
            let shadows = shadow::evaluate(&settings, &request, &candidates, &decision, turn.as_ref());
            answered(Draft { shadows: &shadows, ..draft }, &candidates, &decision)
        }
        Err(nobody) => unanswered(draft, &nobody),
    }
}

/// The record of a decision.
fn answered(draft: Draft<'_>, candidates: &[Candidate], decision: &Decision) -> Record {
    let chosen = Some((decision.chosen, decision.tie));
    Draft { candidates, terms: &decision.terms, chosen, outcome: decision.outcome, ..draft }.encode()
}

/// The record of a request that found nobody: who was rejected and for what.
fn unanswered(draft: Draft<'_>, nobody: &NoPick) -> Record {
    let terms: &[Terms] = match &nobody.reason {
        NoChoice::Empty => &[],
        NoChoice::Overloaded(terms) => terms,
    };
    Draft { candidates: &nobody.candidates, terms, turn: nobody.turn.as_ref(), ..draft }.encode()
}

fn count_shadows(pool: &Pool, shadows: &[Shadow], chosen: &Candidate) {
    for shadow in shadows {
        let agrees = if shadow.target == chosen.target { "true" } else { "false" };
        pool.metrics.shadow_picks.with_label_values(&[shadow.policy.label(), agrees]).inc();
        let regret = u64::try_from(shadow.regret_blocks).unwrap_or(0);
        pool.metrics.shadow_regret.with_label_values(&[shadow.policy.label()]).inc_by(regret);
    }
}

/// All ranks of all ready workers, with what their views and the routing
/// history are worth for this request; and which of them hold more of it for
/// another namespace, sorted.
fn prospects(
    pool: &Pool,
    ask: &Ask,
    live: &Live,
    workers: &[Arc<Worker>],
    excluded: &[WorkerId],
) -> (Vec<Prospect>, Vec<(Target, u64)>) {
    let other = ask.beginning.as_ref().and_then(|beginning| beginning.other.as_ref());
    let others = other.map_or_else(Vec::new, |(namespace, blocks)| pool.index.hits(*namespace, blocks));
    let mut elsewhere = Vec::new();
    let claims = pool.index.hits(ask.namespace, &ask.blocks);
    let now = pool.clock.now();
    let held = |hits: &[Hit], slot| {
        let found = hits.binary_search_by_key(&slot, |hit| hit.slot);
        found.map_or_else(|_| TierHits::default(), |at| hits[at].tiers())
    };
    let prospect = |state: &Arc<TargetState>| {
        let claimed = held(&claims, state.slot);
        let for_others = held(&others, state.slot).total();
        if for_others > claimed.total() {
            elsewhere.push((state.target.clone(), for_others));
        }
        let trust = state.trust.lock().verdict(now, live.freshness);
        let paired = state.facts().paired;
        let usable = |held| match ask.bypasses_cache {
            true => TierHits::default(),
            false => hits::usable(held, ask.prompt_tokens, pool.config.size, paired),
        };
        let (hits, evidence) = if trust.credited {
            (usable(claimed), Evidence::View)
        } else if live.fallback == Fallback::History {
            let sent = pool.history.lock().hits(now, state.slot, ask.namespace, &ask.blocks);
            (usable(TierHits { device: sent, ..TierHits::default() }), Evidence::History)
        } else {
            (TierHits::default(), Evidence::Nothing)
        };
        let evidence = if hits.total() == 0 { Evidence::Nothing } else { evidence };
        let account = Arc::clone(&state.account);
        let limit = hits::limit(ask.prompt_tokens, pool.config.size, paired);
        let usable = if ask.bypasses_cache { 0 } else { limit };
        Prospect { target: state.target.clone(), account, claimed, hits, usable, evidence, trust }
    };
    let eligible = workers.iter().filter(|worker| ask.is_for(worker) && !excluded.contains(&worker.id));
    let prospects = eligible.flat_map(|worker| &worker.targets).map(prospect).collect();
    elsewhere.sort();
    (prospects, elsewhere)
}

fn count(pool: &Pool, ask: &Ask, policy: PolicyKind, outcome: Outcome, chosen: Option<&Candidate>) {
    pool.metrics.picks.with_label_values(&[policy.label(), ask.role.label(), outcome.label()]).inc();
    let Some(chosen) = chosen else { return };
    pool.metrics.prompt_blocks.inc_by(ask.blocks.len() as u64);
    let evidence = match chosen.evidence {
        Evidence::Nothing => return,
        Evidence::View | Evidence::InFlight => "view",
        Evidence::History => "history",
    };
    let confirmed = chosen.hits.total() - chosen.predicted;
    pool.metrics.hit_blocks.with_label_values(&[evidence]).inc_by(confirmed);
    pool.metrics.hit_blocks.with_label_values(&["in_flight"]).inc_by(chosen.predicted);
}

/// The line that our documentation promises.
fn log_pick(pool: &Pool, ask: &Ask, policy: PolicyKind, chosen: &Candidate, pick: &Pick) {
    let decision = &pick.decision;
    let cost = decision.terms[decision.chosen].cost;
    tracing::info!(
        target: "kv_router::pick",
        policy = %policy.label(),
        role = %ask.role.label(),
        picked = %chosen.target,
        hits = chosen.hits.total(),
        predicted = chosen.predicted,
        blocks = ask.blocks.len(),
        cost = (cost * 1000.0).round() / 1000.0,
        active_blocks = chosen.load.active_blocks,
        queued_tokens = chosen.load.queued.0,
        outcome = %decision.outcome.label(),
        trust = %chosen.trust.state.label(),
        tie = %decision.tie.label(),
        hit_tokens = pool.config.size.tokens_in(Blocks(chosen.hits.total())).0,
        prompt_tokens = ask.prompt_tokens.0,
        mm_images = ask.images.len(),
        mm_affinity_hits = chosen.images_seen,
        session = %pick.session.label(),
        request_id = %ask.request_id,
        "pick"
    );
}
