//! One request's facts to one pick.
//!
//! Gathers what the core needs (hits from the index, trust, routing history),
//! lets it select and book, and writes down the receipt and the pick line. The
//! core decides; nothing is decided here.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvrouter_core::blocks::{BlockHash, Namespace, NamespaceId, chain};
use kvrouter_core::gather::{self, Lookup, Question};
use kvrouter_core::ids::{Role, Target, WorkerId};
use kvrouter_core::index::Holdings;
use kvrouter_core::policy::decode_demand::Judgement;
use kvrouter_core::policy::field::Field;
use kvrouter_core::policy::images::ImageKey;
use kvrouter_core::policy::leases::{Lease, Pick};
use kvrouter_core::policy::sessions::{SessionKey, SessionUse};
use kvrouter_core::policy::shadow::{self, Shadow};
use kvrouter_core::policy::{Candidate, Choice, Evidence, Outcome, PickRequest, PolicyKind, Settings};
use kvrouter_core::receipts::elsewhere::{self, Other};
use kvrouter_core::receipts::{Draft, PromptRecord, ReceiptNumber, Record, ResultRecord};
use kvrouter_core::scratch::Scratch;
use kvrouter_core::trust::Parity;
use kvrouter_core::units::{Blocks, TierHits, Tokens};
use kvrouter_crds::config::{Fallback, Protocol};

use crate::config::Live;
use crate::expected::Expected;
use crate::fleet::{Listed, Needs, Worker};
use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::prompt::{Part, Prompt};
use crate::proxy::sse::Usage;
use crate::responses::Maker;

/// A request as routing sees it.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Its id.
    pub request_id: Arc<str>,
    /// What a worker is wanted for.
    pub role: Role,
    /// How it must hand requests over, where it is wanted for a part of one.
    pub protocol: Option<Protocol>,
    /// Answers that it wants of its prompt.
    pub choices: u32,
    /// Sequences that it is to an engine: answers, of all its prompts.
    pub sequences: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: Tokens,
    /// Whether they were counted, not estimated.
    pub exact_tokens: bool,
    /// Whether it has a cache salt.
    pub salted: bool,
    /// Where it was sent.
    pub endpoint: Endpoint,
    /// What may share its blocks.
    pub namespace: NamespaceId,
    /// Its full blocks, of all its prompts, each once; empty where it was not
    /// tokenised.
    pub blocks: Arc<[BlockHash]>,
    /// Its prompts, where it has several: hits are looked up for each and added up.
    pub several: Vec<OnePrompt>,
    /// Pictures, clips and recordings in it.
    pub images: Vec<ImageKey>,
    /// The session it belongs to.
    pub session: Option<SessionKey>,
    /// The adapter it needs: only workers that serve it stand for choice.
    pub adapter: Option<Arc<str>>,
    /// Its endpoint, where only workers stand for choice that heed a salt there.
    pub apart: Option<Endpoint>,
    /// The engine will not read its cache for it.
    pub bypasses_cache: bool,
    /// The response that it goes on from, whose worker has the rest.
    pub previous_response: Option<Arc<str>>,
    /// Where it and its like begin, whatever their namespace.
    pub beginning: Option<Beginning>,
}

/// One of several prompts of a request.
#[derive(Clone, Debug)]
pub struct OnePrompt {
    /// Its length.
    pub tokens: Tokens,
    /// Its full blocks.
    pub blocks: Arc<[BlockHash]>,
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
    /// What it is to do of the request.
    pub role: Role,
    /// Where the receipt was filed.
    pub receipt: ReceiptNumber,
    /// What the answer's usage is compared with.
    pub expected: Expected,
    /// Whether the prompt has a block that the engine could keep.
    has_blocks: bool,
}

impl Routed {
    /// The worker answered in full, and reports this usage.
    pub fn prompt_finished(&self, pool: &Pool, usage: Usage) {
        let Some(state) = self.worker.target(self.target.rank) else { return };
        if self.has_blocks {
            state.trust.lock().prompt_finished();
        }
        self.expected.note_unstored(pool, state, usage);
        self.expected.compare(pool, state, usage);
    }
}

impl Ask {
    /// What routing asks for a prompt.
    pub fn new(pool: &Pool, request_id: Arc<str>, prompt: Prompt) -> Self {
        let beginning = Beginning::of(pool, &prompt);
        let (blocks, several) = one_or_several(prompt.parts);
        Self {
            request_id,
            role: Role::Mixed,
            protocol: None,
            choices: 1,
            sequences: 1,
            prompt_tokens: prompt.count,
            exact_tokens: prompt.is_exact,
            salted: prompt.namespace.salt.is_some(),
            endpoint: prompt.endpoint,
            namespace: pool.identity.id(&prompt.namespace),
            blocks,
            several,
            images: prompt.images,
            session: None,
            adapter: prompt.namespace.adapter,
            apart: None,
            bypasses_cache: prompt.bypasses_cache,
            previous_response: prompt.previous_response,
            beginning,
        }
    }

    /// Its prompts: their lengths and full blocks.
    fn prompts(&self) -> impl Iterator<Item = (Tokens, &[BlockHash])> {
        let one = self.several.is_empty().then_some((self.prompt_tokens, &*self.blocks));
        one.into_iter().chain(self.several.iter().map(|one| (one.tokens, &*one.blocks)))
    }

    /// Its prompts as its receipt lists them, of which targets hold `held`: with what
    /// the chosen candidate's view claims of each. Nothing where it has only one.
    fn each_prompt(&self, held: &[Holdings], field: &Field, chosen: Option<usize>) -> Vec<PromptRecord> {
        let slot = chosen.map(|chosen| field.lineup().entrants()[field.place(chosen)].slot);
        let one = |(one, held): (&OnePrompt, &Holdings)| PromptRecord {
            tokens: one.tokens,
            blocks: one.blocks.len() as u64,
            claimed: slot.map_or_else(TierHits::default, |slot| held.of(slot)),
        };
        self.several.iter().zip(held).map(one).collect()
    }

    /// The same request, wanting a worker for the part `role` of it.
    pub fn part(&self, role: Role, protocol: Protocol) -> Self {
        let session = self.session.clone().map(|session| SessionKey { role, ..session });
        Self { role, protocol: Some(protocol), session, ..self.clone() }
    }

    /// Whether `worker` may be picked for it now.
    pub fn is_for(&self, worker: &Worker) -> bool {
        match self.protocol {
            Some(protocol) => worker.does(self.role, protocol, self.needs()),
            None => worker.takes(self.role) && worker.serves(self.needs()),
        }
    }

    /// What it needs of its workers.
    pub fn needs(&self) -> Needs<'_> {
        Needs { adapter: self.adapter.as_deref(), apart: self.apart }
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
            choices: self.choices,
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
            choices: self.choices,
            ..Draft::undecided(&self.request_id, settings, pool.config.size.tokens())
        }
    }
}

/// The blocks of all prompts, each once and in order, and the prompts where there
/// are several.
fn one_or_several(mut parts: Vec<Part>) -> (Arc<[BlockHash]>, Vec<OnePrompt>) {
    if parts.len() < 2 {
        return (parts.pop().map_or_else(Vec::new, |part| part.blocks).into(), Vec::new());
    }
    let mut seen = HashSet::new();
    let all = parts.iter().flat_map(|part| &part.blocks).copied();
    let union: Vec<BlockHash> = all.filter(|block| seen.insert(*block)).collect();
    let one = |part: Part| OnePrompt { tokens: Tokens(part.tokens.len() as u64), blocks: part.blocks.into() };
    (union.into(), parts.into_iter().map(one).collect())
}

impl Beginning {
    /// Of the first prompt of a body; `None` without a full block.
    fn of(pool: &Pool, prompt: &Prompt) -> Option<Self> {
        let size = pool.config.size;
        let tokens = &prompt.parts.first()?.tokens;
        let start = tokens.get(..size.as_usize())?;
        let common = pool.identity.root(&Namespace::default());
        let first = *chain(common, size, start).first()?;
        let namespace = pool.identity.id(&prompt.namespace);
        let own = Other { namespace, root: pool.identity.root(&prompt.namespace) };
        let other = pool.beginnings.lock().other(first, namespace);
        let looked_at = tokens.len().min(elsewhere::DEPTH * size.as_usize());
        let other = other.map(|other| (other.namespace, chain(other.root, size, &tokens[..looked_at])));
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
    /// Whether only the worker that made the response to go on from stood for choice.
    pub follows_its_maker: bool,
}

/// Picks a ready worker outside `excluded`, books the request there and files
/// the receipt.
pub fn pick(pool: &Pool, ask: &Ask, attempt: u32, excluded: &[WorkerId]) -> Result<Routed, Unrouted> {
    let thread = thread_number();
    let mut scratch = pool.scratches.take(thread);
    let picked = pick_in(pool, ask, attempt, excluded, &mut scratch);
    pool.scratches.give_back(thread, scratch);
    picked
}

fn pick_in(
    pool: &Pool,
    ask: &Ask,
    attempt: u32,
    excluded: &[WorkerId],
    scratch: &mut Scratch,
) -> Result<Routed, Unrouted> {
    // Read once: decision, receipt and pick line must speak of the same settings.
    let live = pool.live.read().clone();
    let settings = live.settings;
    let listed = pool.fleet.listed();
    let (followed, maker) = previous(pool, ask, &listed.workers, excluded);
    gather(pool, ask, &live, &listed, excluded, maker.as_deref(), scratch);
    let Scratch { held, field, spare } = scratch;
    let draft = Draft {
        priced: field.len(),
        session: followed.unwrap_or_default(),
        ..ask.draft(pool, &settings, attempt)
    };
    let request = ask.pick_request(pool);
    let now = pool.clock.now();
    let picked = pool.ledger.select_and_book(now, &settings, &request, ask.namespace, &ask.blocks, field);
    let field = &*field;
    let mut pick = match picked {
        Ok(pick) => pick,
        Err(nobody) => {
            count(pool, ask, settings.policy, Outcome::NoTarget, None);
            let turn = nobody.turn.as_ref().map(|turn| turn.target(field.names()));
            let prompts = ask.each_prompt(held, field, None);
            let draft = Draft { prompts: &prompts, field: Some(field), turn, ..draft };
            let receipt = pool.receipts.file(draft.encode_over(spare.take()), None).number;
            let follows_its_maker = maker.is_some();
            return Err(Unrouted { receipt, overloaded: nobody.overloaded, follows_its_maker });
        }
    };
    pick.lease.runs(ask.sequences);
    let choice = &pick.choice;
    let session = followed.unwrap_or(pick.session);
    let turn = pick.turn.as_ref().map(|turn| turn.target(field.names()));
    let priced = choice.priced;
    let shadows = shadow::evaluate(&settings, &request, field, choice.chosen, turn);
    let prompts = ask.each_prompt(held, field, Some(choice.chosen));
    let draft = Draft { field: Some(field), priced, choice: Some(choice), shadows: &shadows, ..draft };
    let record = Draft { prompts: &prompts, turn, session, ..draft }.encode_over(spare.take());
    let chosen = field.candidate(choice.chosen);
    log_pick(pool, ask, settings.policy, &chosen, &pick, session);
    count(pool, ask, settings.policy, choice.outcome, Some(&chosen));
    count_shadows(pool, &shadows, &chosen);
    pool.metrics.sessions.with_label_values(&[session.label()]).inc();
    let worker = Arc::clone(listed.owner(field.place(choice.chosen)));
    tell_demand(pool, ask, &settings, field, choice, &worker);
    let filed = pool.receipts.file(record, None);
    *spare = filed.spare;
    if let Some(beginning) = &ask.beginning {
        pool.beginnings.lock().sent(beginning.first, beginning.own);
    }
    let state = worker.target(chosen.target.rank).expect("its targets stood for choice");
    ask.prompts().for_each(|(_, blocks)| pool.remember(state, ask.namespace, blocks));
    let expected = Expected::of(pool, ask, &chosen, state);
    // A decode engine may keep nothing of a prompt that it fetched.
    let has_blocks = !ask.blocks.is_empty() && ask.role != Role::Decode;
    let (target, lease, role, receipt) = (chosen.target, pick.lease, ask.role, filed.number);
    Ok(Routed { worker, target, lease, role, receipt, expected, has_blocks })
}

/// The calling thread's.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    THREAD.with(|thread| *thread)
}

/// What the response that a request goes on from has to say, and the worker that
/// made it: nobody else knows the conversation.
fn previous(
    pool: &Pool,
    ask: &Ask,
    workers: &[Arc<Worker>],
    excluded: &[WorkerId],
) -> (Option<SessionUse>, Option<Arc<Worker>>) {
    let Some(id) = &ask.previous_response else { return (None, None) };
    let stands = |worker: &Arc<Worker>| {
        let is_listed = workers.iter().any(|listed| Arc::ptr_eq(listed, worker));
        is_listed && ask.is_for(worker) && !excluded.contains(&worker.id)
    };
    match pool.responses.lock().maker(pool.clock.now(), id) {
        Maker::Here(worker) if stands(&worker) => (Some(SessionUse::ResponseFollowed), Some(worker)),
        Maker::Here(_) | Maker::Gone => (Some(SessionUse::ResponseGone), None),
        Maker::Unknown => (Some(SessionUse::ResponseUnknown), None),
    }
}

/// Files the receipt of a request that was refused or abandoned before a pick:
/// every arrival has one. `failure` is a stable label.
pub fn file_rejection(pool: &Pool, request_id: Arc<str>, status: u16, failure: &'static str) {
    let settings = pool.live.read().settings;
    let ask = Ask::new(pool, request_id, Prompt::default());
    let record = ask.draft(pool, &settings, 0).encode();
    let failure = Some(failure.into());
    pool.receipts.file(record, Some(ResultRecord { status, failure, ..ResultRecord::default() }));
}

/// The record of what [`pick`] would do now, without doing it.
pub fn explain(pool: &Pool, ask: &Ask) -> Record {
    let live = pool.live.read().clone();
    let settings = live.settings;
    let listed = pool.fleet.listed();
    let (followed, maker) = previous(pool, ask, &listed.workers, &[]);
    let mut scratch = Scratch::default();
    gather(pool, ask, &live, &listed, &[], maker.as_deref(), &mut scratch);
    let Scratch { held, mut field, .. } = scratch;
    let request = ask.pick_request(pool);
    let found = pool.ledger.preview(pool.clock.now(), &settings, &request, ask.namespace, &mut field);
    let session = followed.unwrap_or_default();
    let draft = Draft { field: Some(&field), priced: field.len(), session, ..ask.draft(pool, &settings, 0) };
    match found {
        Ok((choice, turn)) => {
            let turn = turn.as_ref();
            let shadows = shadow::evaluate(&settings, &request, &field, choice.chosen, turn);
            let prompts = ask.each_prompt(&held, &field, Some(choice.chosen));
            Draft { prompts: &prompts, turn, choice: Some(&choice), shadows: &shadows, ..draft }.encode()
        }
        Err(nobody) => {
            let turn = nobody.turn.as_ref().map(|turn| turn.target(field.names()));
            let prompts = ask.each_prompt(&held, &field, None);
            Draft { prompts: &prompts, turn, ..draft }.encode()
        }
    }
}

fn count_shadows(pool: &Pool, shadows: &[Shadow], chosen: &Candidate) {
    for shadow in shadows {
        let agrees = if shadow.target == chosen.target { "true" } else { "false" };
        pool.metrics.shadow_picks.with_label_values(&[shadow.policy.label(), agrees]).inc();
        let regret = u64::try_from(shadow.regret_blocks).unwrap_or(0);
        pool.metrics.shadow_regret.with_label_values(&[shadow.policy.label()]).inc_by(regret);
    }
}

/// Makes the field of `scratch` all ranks of all ready workers, or of the one that
/// made the response to go on from, with what their views and the routing history
/// are worth for this request.
fn gather(
    pool: &Pool,
    ask: &Ask,
    live: &Live,
    listed: &Listed,
    excluded: &[WorkerId],
    maker: Option<&Worker>,
    scratch: &mut Scratch,
) {
    let other = ask.beginning.as_ref().and_then(|beginning| beginning.other.as_ref());
    let mut others = Holdings::default();
    if let Some((namespace, blocks)) = other {
        pool.index.look_up(*namespace, blocks, &mut others);
    }
    for ((_, blocks), held) in ask.prompts().zip(scratch.held(ask.prompts().count())) {
        pool.index.look_up(ask.namespace, blocks, held);
    }
    let Scratch { held, field, .. } = scratch;
    let prompts = ask.prompts().zip(&*held);
    let prompts: Vec<_> = prompts.map(|((tokens, blocks), held)| Lookup { tokens, blocks, held }).collect();
    let question = Question {
        now: pool.clock.now(),
        role: ask.role,
        freshness: live.freshness,
        size: pool.config.size,
        namespace: ask.namespace,
        prompts: &prompts,
        others: &others,
        bypasses_cache: ask.bypasses_cache,
        history: (live.fallback == Fallback::History).then_some(&pool.history),
    };
    let admits = |place| {
        let worker = listed.owner(place);
        let is_maker = maker.is_none_or(|maker| std::ptr::eq(maker, &**worker));
        is_maker && ask.is_for(worker) && !excluded.contains(&worker.id)
    };
    let is_plain = ask.adapter.is_none() && ask.apart.is_none() && ask.protocol.is_none();
    let all = is_plain && excluded.is_empty() && maker.is_none();
    gather::gather(&question, &listed.lineup, |place| all || admits(place), field);
}

/// Counts what decode input-demand made of a pick, and tells who asks for it.
fn tell_demand(pool: &Pool, ask: &Ask, settings: &Settings, field: &Field, choice: &Choice, worker: &Worker) {
    let Some(Judgement { suggested, original, projected }) = choice.demand else { return };
    // What was not compared counts as exact: most engines agree.
    let diverged = worker.rendering.known().parity == Parity::Diverged;
    let exact = ask.exact_tokens && ask.images.is_empty() && !diverged;
    let (mode, input) = (settings.decode_demand.mode.label(), if exact { "exact" } else { "estimated" });
    let agrees = if suggested == original { "true" } else { "false" };
    pool.metrics.demand_decisions.with_label_values(&[mode, input, agrees]).inc();
    tracing::debug!(
        target: "kv_router::decode_demand",
        mode,
        input,
        prompt_tokens = ask.prompt_tokens.0,
        choices = ask.choices,
        projected_tokens = projected.0,
        original = %field.candidate(original).target,
        suggested = %field.candidate(suggested).target,
        actual = %field.candidate(choice.chosen).target,
        request_id = %ask.request_id,
        "decode demand"
    );
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
fn log_pick(
    pool: &Pool,
    ask: &Ask,
    policy: PolicyKind,
    chosen: &Candidate,
    pick: &Pick,
    session: SessionUse,
) {
    let Choice { cost, outcome, tie, .. } = pick.choice;
    let demand = pick.choice.demand.map(|demand| demand.projected.0);
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
        outcome = %outcome.label(),
        trust = %chosen.trust.state.label(),
        trust_reason = %chosen.trust.reason.label(),
        tie = %tie.label(),
        hit_tokens = pool.config.size.tokens_in(Blocks(chosen.hits.total())).0,
        prompt_tokens = ask.prompt_tokens.0,
        mm_images = ask.images.len(),
        mm_affinity_hits = chosen.images_seen,
        session = %session.label(),
        demand_tokens = demand,
        request_id = %ask.request_id,
        "pick"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule for several prompts: each is looked up by itself, and their blocks
    /// are active once, however many of them begin alike.
    #[test]
    fn several_prompts_are_looked_up_one_by_one_and_active_once() {
        let part = |blocks: &[u64]| Part {
            tokens: vec![0; blocks.len() * 16 + 3],
            blocks: blocks.iter().copied().map(BlockHash).collect(),
        };
        let (blocks, several) = one_or_several(vec![part(&[1, 2, 3]), part(&[]), part(&[1, 2, 9])]);
        assert_eq!(&*blocks, [1, 2, 3, 9].map(BlockHash));
        let each: Vec<(Tokens, usize)> = several.iter().map(|one| (one.tokens, one.blocks.len())).collect();
        assert_eq!(each, [(Tokens(51), 3), (Tokens(3), 0), (Tokens(51), 3)]);
        let (blocks, several) = one_or_several(vec![part(&[1, 2])]);
        assert_eq!((blocks.len(), several.len()), (2, 0));
        assert_eq!(one_or_several(Vec::new()).0.len(), 0);
    }
}
