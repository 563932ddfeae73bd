//! Decisions: the worked example, ties, every policy against an oracle.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::decode_demand::Demand;
use super::field::Field;
use super::leases::{Charge, Ledger, NoPick, Pick};
use super::lineup::{Entrant, Lineup, Standing};
use super::shadow::PolicySet;
use super::strangers::{EngineLoad, EngineReport, Sent};
use super::*;
use crate::blocks::NamespaceId;
use crate::gather::{Lookup, Question, gather};
use crate::ids::{Epoch, Slot, WorkerId};
use crate::trust::{Freshness, Reason, SharedTrust, State, Verdict};
use crate::units::Tick;

fn target(number: usize) -> Target {
    Target::new(WorkerId::new(format!("10.0.0.{number}:8000")), 0)
}

fn exact() -> Verdict {
    Verdict { state: State::Exact, reason: Reason::Ok, credited: true, epoch: Epoch(1), seq: 1, age: None }
}

/// A candidate with (hits, active blocks, queued tokens, context tokens).
fn candidate(number: usize, (hits, active, queued, context): (u64, u64, u64, u64)) -> Candidate {
    let hits = TierHits { device: hits, ..TierHits::default() };
    let load = Load {
        active_blocks: active,
        queued: Tokens(queued),
        context: Tokens(context),
        requests: active.min(1),
    };
    let evidence = if hits.total() > 0 { Evidence::View } else { Evidence::Nothing };
    Candidate {
        target: target(number),
        claimed: hits,
        hits,
        predicted: 0,
        evidence,
        trust: exact(),
        load,
        shared_active: 0,
        images_seen: 0,
        demand: Demand::default(),
    }
}

fn candidates(facts: &[(u64, u64, u64, u64)]) -> Vec<Candidate> {
    facts.iter().enumerate().map(|(number, facts)| candidate(number, *facts)).collect()
}

fn settings(policy: PolicyKind, weight: f64) -> Settings {
    Settings {
        policy,
        overlap: OverlapWeights { default: weight, ..OverlapWeights::default() },
        ..Settings::default()
    }
}

fn request<'a>(blocks: &'a [BlockHash], id: &'a str) -> PickRequest<'a> {
    let size = BlockSize::new(16).expect("not zero");
    PickRequest {
        id,
        role: Role::Mixed,
        prompt: Tokens(blocks.len() as u64 * 16 + 1),
        blocks,
        size,
        images: &[],
        session: None,
        choices: 1,
    }
}

fn ten_blocks() -> Vec<BlockHash> {
    (100..110).map(BlockHash).collect()
}

#[track_caller]
fn check(why: &str, settings: &Settings, facts: &[(u64, u64, u64, u64)], expected: Option<usize>) {
    let blocks = ten_blocks();
    let decision = decide(settings, &request(&blocks, "r"), &candidates(facts), None);
    assert_eq!(decision.ok().map(|decision| decision.chosen), expected, "{why}");
}

#[test]
fn the_worked_example_of_the_published_formula() {
    let facts = [(8, 6, 0, 0), (0, 1, 0, 0)];
    let blocks = ten_blocks();
    let decision =
        decide(&settings(PolicyKind::KvAware, 1.0), &request(&blocks, "r"), &candidates(&facts), None)
            .expect("two");
    assert_eq!(decision.terms.iter().map(|terms| terms.cost).collect::<Vec<_>>(), [8.0, 11.0]);
    check("weight 1: the cache wins", &settings(PolicyKind::KvAware, 1.0), &facts, Some(0));
    check("weight 0: the load wins", &settings(PolicyKind::KvAware, 0.0), &facts, Some(1));
}

#[test]
fn picks_the_cheapest_target() {
    let default = settings(PolicyKind::CachePlusLoad, 1.0);
    check("no candidates", &default, &[], None);
    check("a hit wins over an idle worker", &default, &[(8, 0, 0, 0), (0, 0, 0, 0)], Some(0));
    check("a long queue outweighs the hit", &default, &[(8, 0, 500, 0), (0, 0, 0, 0)], Some(1));
    check("decode load outweighs a small hit", &default, &[(1, 0, 0, 1000), (0, 0, 0, 0)], Some(1));
    check("decode load below the hit", &default, &[(1, 0, 0, 700), (0, 0, 0, 0)], Some(0));
    check(
        "least-load ignores the cache",
        &settings(PolicyKind::LeastLoad, 1.0),
        &[(9, 2, 0, 0), (0, 1, 0, 0)],
        Some(1),
    );
    let busy_but_cached = [(0, 0, 0, 0), (0, 3, 0, 0), (0, 9, 0, 0)];
    check("cold prompts go to the idle worker", &default, &busy_but_cached, Some(0));
}

#[test]
fn slower_tiers_earn_less() {
    let blocks = ten_blocks();
    let mut two = candidates(&[(8, 0, 0, 0), (0, 0, 0, 0)]);
    two[1].hits = TierHits { device: 0, host: 9, disk: 0 };
    for policy in [PolicyKind::KvAware, PolicyKind::CachePlusLoad] {
        let decision = decide(&settings(policy, 1.0), &request(&blocks, "r"), &two, None).expect("two");
        assert_eq!(decision.chosen, 0, "8 blocks at 1 beat 9 at 0.75 under {policy:?}");
    }
}

#[test]
fn a_sibling_is_not_repelled_by_the_blocks_it_shares() {
    let blocks = ten_blocks();
    let mut two = candidates(&[(0, 11, 0, 0), (0, 0, 0, 0)]);
    two[0].hits = TierHits { device: 9, ..TierHits::default() };
    two[0].shared_active = 10;
    let decision =
        decide(&settings(PolicyKind::KvAware, 1.0), &request(&blocks, "r"), &two, None).expect("two");
    assert_eq!((decision.chosen, decision.terms[0].cost), (0, 2.0), "one block to do, one tail ahead");
}

/// Another way to say it: the winner is the one that no other beats in the
/// lexical order (cost, active blocks).
#[test]
fn agrees_with_an_unbeaten_candidate_in_every_small_world() {
    let values = [(0, 0), (0, 2), (3, 0), (3, 2), (9, 7)];
    let blocks = ten_blocks();
    for world in 0..values.len().pow(3) {
        let facts: Vec<_> = (0..3)
            .map(|place| values[world / values.len().pow(place) % values.len()])
            .map(|(hits, active)| (hits, active, 0, 0))
            .collect();
        let decision =
            decide(&settings(PolicyKind::KvAware, 1.0), &request(&blocks, "r"), &candidates(&facts), None)
                .expect("3");
        let price = |(hits, active, ..): &(u64, u64, u64, u64)| (10 - hits + active, *active);
        let chosen = price(&facts[decision.chosen]);
        assert!(facts.iter().all(|other| chosen <= price(other)), "{facts:?} chose {}", decision.chosen);
    }
}

#[test]
fn same_facts_in_any_order_give_the_same_pick() {
    let blocks: Arc<[BlockHash]> = ten_blocks().into();
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    let mut picks = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let lineup = Arc::new(Lineup::new(order.map(entrant)));
        let (pick, field) =
            book(&Ledger::default(), 0, &settings, &request(&blocks, "r"), &blocks, &lineup).expect("three");
        picks.push(field.candidate(pick.choice.chosen).target);
    }
    assert!(picks.iter().all(|pick| *pick == picks[0]), "{picks:?}");
}

/// A target with a sound view of an empty cache.
fn entrant(number: usize) -> (Target, Entrant) {
    let trust = SharedTrust::default();
    trust.lock().synced(Tick(0), Epoch(1), 1, Default::default());
    let standing = Arc::new(Standing::open(Role::Mixed));
    let entrant =
        Entrant { slot: Slot(number as u32), account: Arc::default(), trust: Arc::new(trust), standing };
    (target(number), entrant)
}

fn fleet(count: usize) -> Arc<Lineup> {
    Arc::new(Lineup::new((0..count).map(entrant)))
}

/// All of `lineup` as candidates, of which nobody holds anything.
fn field(request: &PickRequest<'_>, lineup: &Arc<Lineup>) -> Field {
    let mut field = Field::default();
    let held = Default::default();
    let prompts = [Lookup { tokens: request.prompt, blocks: request.blocks, held: &held }];
    let question = Question {
        now: Tick(0),
        role: request.role,
        freshness: Freshness::default(),
        size: request.size,
        namespace: NamespaceId(0),
        prompts: &prompts,
        others: &held,
        bypasses_cache: false,
        history: None,
    };
    gather(&question, lineup, |_| true, &mut field);
    field
}

fn book(
    ledger: &Ledger,
    now: u64,
    settings: &Settings,
    request: &PickRequest<'_>,
    blocks: &Arc<[BlockHash]>,
    lineup: &Arc<Lineup>,
) -> Result<(Pick, Field), NoPick> {
    let mut field = field(request, lineup);
    let pick = ledger.select_and_book(Tick(now), settings, request, NamespaceId(0), blocks, &mut field)?;
    Ok((pick, field))
}

/// Case C17, G18: on a cold fleet every idle worker gets its share.
#[test]
fn cold_prompts_spread_evenly_over_idle_workers() {
    let mut share: BTreeMap<usize, u32> = BTreeMap::new();
    for prompt in 0..1_000u64 {
        let blocks: Vec<BlockHash> = crate::blocks::chain(
            BlockHash(0),
            BlockSize::new(16).expect("not zero"),
            &(0..32).map(|at| (prompt * 32 + at) as u32).collect::<Vec<_>>(),
        );
        let decision = decide(
            &settings(PolicyKind::CachePlusLoad, 1.0),
            &request(&blocks, "same id"),
            &candidates(&[(0, 0, 0, 0); 4]),
            None,
        )
        .expect("four");
        assert_eq!(decision.tie, TieBranch::RendezvousBlock);
        *share.entry(decision.chosen).or_default() += 1;
    }
    assert!(share.values().all(|count| (200..=300).contains(count)), "{share:?}");
}

/// Case C18: a miss goes to the idle worker, however much the busy one holds.
#[test]
fn a_cold_prompt_prefers_the_idle_worker() {
    for policy in [PolicyKind::CachePlusLoad, PolicyKind::KvAware] {
        check("idle wins", &settings(policy, 1.0), &[(0, 4, 300, 300), (0, 0, 0, 0)], Some(1));
    }
}

/// Case C19: picks at once see each other.
#[test]
fn simultaneous_prompts_do_not_herd() {
    let ledger = Ledger::default();
    let lineup = fleet(8);
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (ledger, lineup, sender) = (&ledger, &lineup, sender.clone());
            scope.spawn(move || {
                for prompt in 0..25u64 {
                    let seed = (thread * 25 + prompt) * 1_000_003;
                    let blocks: Arc<[BlockHash]> = (0..10).map(|at| BlockHash(seed + at)).collect();
                    let request = request(&blocks, "r");
                    let (pick, _) = book(ledger, 0, &settings, &request, &blocks, lineup).expect("eight");
                    sender.send(pick).expect("the receiver outlives the threads");
                }
            });
        }
    });
    drop(sender);
    let picks: Vec<_> = receiver.iter().collect();
    let mut share: BTreeMap<usize, u32> = BTreeMap::new();
    picks.iter().for_each(|pick| *share.entry(pick.choice.chosen).or_default() += 1);
    assert_eq!(share.values().copied().collect::<Vec<_>>(), [25; 8], "max/mean is 1");
    drop(picks);
    assert!(lineup.entrants().iter().all(|entrant| entrant.account.load() == Load::default()));
}

#[test]
fn a_pick_tells_whose_turn_it_was_before_whatever_the_policy() {
    let (ledger, lineup, blocks) = (Ledger::default(), fleet(2), ten_blocks());
    let blocks: Arc<[BlockHash]> = blocks.into();
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    let pick = |lineup: &Arc<Lineup>| {
        let (pick, field) =
            book(&ledger, 0, &settings, &request(&blocks, "r"), &blocks, lineup).expect("some");
        let turn = pick.turn.as_ref().map(|turn| turn.target(field.names()).clone());
        (turn, field.target(pick.choice.chosen).clone())
    };
    let (none, first) = pick(&lineup);
    let (before, second) = pick(&lineup);
    assert_eq!((none, before), (None, Some(first)));
    assert_eq!(pick(&fleet(1)).0, Some(second), "of a lineup that is gone");
}

#[test]
fn round_robin_takes_turns_even_when_the_fleet_changes() {
    let settings = settings(PolicyKind::RoundRobin, 1.0);
    let all = candidates(&[(9, 0, 0, 0), (0, 7, 0, 0), (0, 0, 0, 0)]);
    let blocks = ten_blocks();
    let pick = |candidates: &[Candidate], turn: Option<&Target>| {
        let decision = decide(&settings, &request(&blocks, "r"), candidates, turn).expect("some");
        candidates[decision.chosen].target.clone()
    };
    let mut turn = None;
    for expected in [0, 1, 2, 0, 1] {
        turn = Some(pick(&all, turn.as_ref()));
        assert_eq!(turn, Some(target(expected)));
    }
    assert_eq!(pick(&all[..1], turn.as_ref()), target(0), "the rest left");
    assert_eq!(pick(&all[2..], turn.as_ref()), target(2), "the next in order");
}

/// Eight siblings of one cold prompt at once: the second follows the first
/// although nothing is confirmed yet, until the load evens out.
#[test]
fn siblings_of_a_cold_prompt_share_it_and_then_the_fleet() {
    let ledger = Ledger::default();
    let lineup = fleet(2);
    let blocks: Arc<[BlockHash]> = ten_blocks()[..4].into();
    let mut share = [0; 2];
    let mut leases = Vec::new();
    for _ in 0..8 {
        let settings = settings(PolicyKind::KvAware, 1.0);
        let (pick, _) = book(&ledger, 0, &settings, &request(&blocks, "r"), &blocks, &lineup).expect("two");
        share[pick.choice.chosen] += 1;
        leases.push(pick.lease);
    }
    assert_eq!(share, [4, 4]);
    let off = Settings { in_flight_credit: Switch::Disabled, ..settings(PolicyKind::KvAware, 1.0) };
    let mut field = field(&request(&blocks, "r"), &lineup);
    ledger.preview(Tick(0), &off, &request(&blocks, "r"), NamespaceId(0), &mut field).expect("two");
    let rows = field.rows();
    assert!(rows.iter().all(|candidate| candidate.predicted == 0), "switched off, nothing is predicted");
}

fn overloaded(cap: u64, reserve: f64) -> Settings {
    let overload = Overload { max_queued: Some(Tokens(cap)), cold_reserve: reserve };
    Settings { overload, ..settings(PolicyKind::CachePlusLoad, 1.0) }
}

#[test]
fn a_target_over_its_cap_is_passed_over_and_the_receipt_says_so() {
    let blocks = ten_blocks();
    let pick = |settings: &Settings, facts: &[(u64, u64, u64, u64)]| {
        decide(settings, &request(&blocks, "r"), &candidates(facts), None)
    };
    let hot_and_idle = [(10, 1, 50, 0), (0, 0, 0, 0)];
    assert_eq!(pick(&overloaded(100, 0.0), &hot_and_idle).expect("one").outcome, Outcome::Hit);
    let escaped = pick(&overloaded(50, 0.0), &hot_and_idle).expect("one");
    assert_eq!((escaped.chosen, escaped.outcome), (1, Outcome::OverloadEscape));
    assert_eq!(escaped.terms[0].rejection, Some(Rejection::Overloaded));
    let reserved = pick(&overloaded(100, 0.6), &hot_and_idle).expect("one");
    assert_eq!(
        reserved.terms[0].rejection,
        Some(Rejection::ColdReserve),
        "what is left is for cold requests"
    );
    let full = [(0, 1, 50, 0), (0, 1, 50, 0)];
    assert!(matches!(pick(&overloaded(100, 0.0), &full), Err(NoChoice::Overloaded(_))));
    let long_but_idle = [(0, 0, 0, 0)];
    assert!(pick(&overloaded(10, 0.0), &long_but_idle).is_ok(), "a prompt above the cap must go somewhere");
}

#[test]
fn views_that_may_not_be_credited_are_named_as_the_reason() {
    let blocks = ten_blocks();
    let mut two = candidates(&[(0, 0, 0, 0), (0, 0, 0, 0)]);
    two[0].claimed = TierHits { device: 8, ..TierHits::default() };
    two[0].trust =
        Verdict { state: State::Mismatched, reason: Reason::DomainMismatch, credited: false, ..exact() };
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    let decision = decide(&settings, &request(&blocks, "r"), &two, None).expect("two");
    assert_eq!(decision.outcome, Outcome::MetadataRejection);
}

#[test]
fn a_picture_goes_where_it_was_seen_unless_that_costs_more() {
    let ledger = Ledger::default();
    let blocks: Arc<[BlockHash]> = Arc::from([]);
    let picture = [images::ImageKey(7)];
    let lineup = fleet(4);
    let settings = settings(PolicyKind::KvAware, 1.0);
    let mut first = None;
    for id in ["a", "b", "c", "d"] {
        let request = PickRequest { images: &picture, ..request(&blocks, id) };
        let (pick, field) = book(&ledger, 0, &settings, &request, &blocks, &lineup).expect("four");
        let chosen = field.candidate(pick.choice.chosen);
        assert_eq!(chosen.images_seen, u64::from(first.is_some()), "warm from the second on");
        assert_eq!(first.get_or_insert(chosen.target.clone()), &chosen.target);
    }
    let decode = PickRequest { images: &picture, role: Role::Decode, ..request(&blocks, "e") };
    let mut field = field(&decode, &lineup);
    ledger.preview(Tick(0), &settings, &decode, NamespaceId(0), &mut field).expect("four");
    let terms = price::terms(&settings, &decode.task(), &field, None);
    assert!(terms.iter().all(|terms| terms.images == 0.0), "decode encodes no pictures");
}

#[test]
fn a_session_follows_its_first_target_until_that_fails_leaves_or_is_full() {
    use sessions::{SessionKey, SessionMode, SessionUse};
    let ledger = Ledger::default();
    let blocks: Arc<[BlockHash]> = ten_blocks().into();
    let mut settings = overloaded(1_000, 0.0);
    settings.sessions.mode = SessionMode::Both;
    let key = SessionKey { id: "s".into(), role: Role::Mixed };
    let lineup = fleet(2);
    let pick = |now: u64, lineup: &Arc<Lineup>| {
        let request = PickRequest { session: Some(&key), ..request(&blocks, "r") };
        let (pick, field) = book(&ledger, now, &settings, &request, &blocks, lineup).expect("some");
        (field.candidate(pick.choice.chosen).target, pick.session, pick.lease)
    };
    let (first, used, lease) = pick(0, &lineup);
    assert_eq!(used, SessionUse::New);
    let (again, used, mut failing) = pick(1, &lineup);
    assert_eq!((again, used), (first.clone(), SessionUse::Followed), "although the other one is idle");
    failing.fail();
    drop((lease, failing));
    let (_, used, lease) = pick(2, &lineup);
    assert_eq!(used, SessionUse::New, "a failure ended the binding");
    drop(lease);
    let place = |target: &Target| lineup.names().iter().position(|name| name == target).expect("known");
    let entrants = || lineup.names().iter().cloned().zip(lineup.entrants().iter().cloned());
    let alone = Arc::new(Lineup::new(entrants().filter(|(target, _)| *target == first)));
    let (_, used, lease) = pick(3, &alone);
    assert!(matches!(used, SessionUse::Replaced | SessionUse::Followed), "the target may have left");
    drop(lease);
    let (bound, _, lease) = pick(4, &lineup);
    let _queue = ledger.charge(
        &lineup.entrants()[place(&bound)].account,
        &Charge {
            namespace: NamespaceId(9),
            blocks: &Arc::from([]),
            size: request(&blocks, "q").size,
            prompt: Tokens(1),
            uncached: Tokens(990),
        },
    );
    let (moved, used, _lease) = pick(5, &lineup);
    assert_eq!((moved != bound, used), (true, SessionUse::Overloaded));
    drop(lease);
}

#[test]
fn shadows_see_the_same_facts_and_book_nothing() {
    let blocks = ten_blocks();
    let all = candidates(&[(8, 6, 0, 0), (0, 1, 0, 0)]);
    let mut settings = settings(PolicyKind::KvAware, 1.0);
    settings.shadows = PolicySet::default().with(PolicyKind::LeastLoad).with(PolicyKind::RoundRobin);
    let decision = decide(&settings, &request(&blocks, "r"), &all, None).expect("two");
    let shadows =
        shadow::evaluate(&settings, &request(&blocks, "r"), &all[..], decision.chosen, Some(&target(0)));
    let picks: Vec<_> =
        shadows.iter().map(|shadow| (shadow.policy, &shadow.target, shadow.regret_blocks)).collect();
    let other = target(1);
    assert_eq!(picks, [(PolicyKind::LeastLoad, &other, -8), (PolicyKind::RoundRobin, &other, -8)]);
}

fn demanding(mode: DemandMode, request_weight: f64) -> Settings {
    let decode_demand = DecodeDemand { mode, request_weight };
    Settings { decode_demand, ..settings(PolicyKind::CachePlusLoad, 1.0) }
}

/// Candidates with (tokens, requests, active blocks) held for decoding.
fn holding(facts: &[(u64, u64, u64)]) -> Vec<Candidate> {
    let one = |(number, (tokens, requests, active)): (usize, &(u64, u64, u64))| Candidate {
        demand: Demand { tokens: Tokens(*tokens), requests: *requests },
        ..candidate(number, (0, *active, 0, 0))
    };
    facts.iter().enumerate().map(one).collect()
}

fn decode_request<'a>(blocks: &'a [BlockHash], choices: u32) -> PickRequest<'a> {
    PickRequest { role: Role::Decode, choices, ..request(blocks, "d") }
}

#[track_caller]
fn check_demand(why: &str, weight: f64, choices: u32, facts: &[(u64, u64, u64)], expected: (usize, u64)) {
    let blocks = ten_blocks();
    let (request, candidates) = (decode_request(&blocks, choices), holding(facts));
    let decision =
        decide(&demanding(DemandMode::Enabled, weight), &request, &candidates, None).expect("some");
    let demand = decision.demand.expect("it is asked");
    assert_eq!((decision.chosen, demand.projected.0), expected, "{why}");
}

#[test]
fn decode_picks_follow_the_input_that_targets_hold() {
    // A prompt of ten blocks has 161 tokens.
    check_demand("least input", 0.0, 1, &[(500, 1, 0), (400, 9, 0)], (1, 561));
    check_demand("requests weigh too", 50.0, 1, &[(500, 1, 0), (400, 9, 0)], (0, 661));
    check_demand("every choice counts its prompt", 0.0, 3, &[(0, 0, 0)], (0, 483));
    check_demand("no choices is one", 0.0, 0, &[(0, 0, 0)], (0, 161));
    check_demand("equals: fewer active blocks", 0.0, 1, &[(9, 1, 5), (9, 1, 4)], (1, 170));
    check_demand("then the first", 0.0, 1, &[(9, 1, 4), (9, 1, 4), (9, 1, 4)], (0, 170));
}

/// The oracle says it the other way round: no other candidate is better in the
/// order of (demand, active blocks, place).
#[test]
fn demand_agrees_with_an_unbeaten_candidate_in_every_small_world() {
    let values = [(0, 0, 0), (0, 1, 2), (100, 0, 1), (100, 2, 0), (150, 1, 1)];
    let blocks = ten_blocks();
    for (world, weight) in (0..values.len().pow(3)).flat_map(|world| [(world, 0.0), (world, 50.0)]) {
        let facts = [world % 5, world / 5 % 5, world / 25].map(|at| values[at]);
        let settings = demanding(DemandMode::Enabled, weight);
        let decision = decide(&settings, &decode_request(&blocks, 1), &holding(&facts), None).expect("three");
        let key = |at: usize| {
            let (tokens, requests, active) = facts[at];
            (tokens + weight as u64 * requests, active, at)
        };
        assert!((0..3).all(|other| key(decision.chosen) <= key(other)), "{facts:?} at {weight}");
    }
}

#[test]
fn shadow_demand_is_told_and_not_followed_and_other_picks_do_not_ask() {
    let blocks = ten_blocks();
    // The policy likes the second one, which holds less context.
    let mut two = holding(&[(0, 0, 1), (900, 3, 0)]);
    two[0].load.context = Tokens(90_000);
    let decode = decode_request(&blocks, 1);
    let original = decide(&demanding(DemandMode::Disabled, 0.0), &decode, &two, None).expect("two");
    assert_eq!((original.chosen, original.demand), (1, None));
    let shadow = decide(&demanding(DemandMode::Shadow, 0.0), &decode, &two, None).expect("two");
    let judged = shadow.demand.expect("it is asked");
    assert_eq!((shadow.chosen, judged.suggested, judged.original), (1, 0, 1));
    let enabled = decide(&demanding(DemandMode::Enabled, 0.0), &decode, &two, None).expect("two");
    assert_eq!(enabled.chosen, 0);
    for role in [Role::Prefill, Role::Mixed] {
        let other = PickRequest { role, ..decode.clone() };
        let decision = decide(&demanding(DemandMode::Enabled, 0.0), &other, &two, None).expect("two");
        assert_eq!((decision.chosen, decision.demand), (1, None), "{role:?}");
    }
    let rule = Settings { policy: PolicyKind::RoundRobin, ..demanding(DemandMode::Enabled, 0.0) };
    assert_eq!(decide(&rule, &decode, &two, None).expect("two").demand, None, "only on a cost policy");
}

#[test]
fn demand_is_booked_until_the_lease_ends_and_not_at_all_when_disabled() {
    let lineup = fleet(2);
    let blocks: Arc<[BlockHash]> = ten_blocks().into();
    let ledger = Ledger::default();
    let pick = |mode| {
        let request = decode_request(&blocks, 2);
        let settings = demanding(mode, 0.0);
        book(&ledger, 0, &settings, &request, &blocks, &lineup).expect("two")
    };
    let held = |(_, field): &(Pick, Field)| {
        field.rows().iter().map(|candidate| candidate.demand.tokens.0).collect::<Vec<_>>()
    };
    for mode in [DemandMode::Shadow, DemandMode::Enabled] {
        let mut first = pick(mode);
        first.0.lease.first_byte(Tick(1), None);
        let second = pick(mode);
        let mut seen = held(&second);
        seen.sort_unstable();
        assert_eq!(seen, [0, 322], "decoding holds its input beyond the first byte, under {mode:?}");
        drop((first, second));
        assert_eq!(held(&pick(mode)), [0, 0], "and not beyond the lease");
    }
    let first = pick(DemandMode::Disabled);
    assert_eq!(held(&pick(DemandMode::Enabled)), [0, 0], "disabled, nothing is counted");
    drop(first);
}

/// A decode worker fetches its prompts; what waits to be computed waits elsewhere.
#[test]
fn decode_picks_queue_nothing_and_take_turns_by_themselves() {
    let lineup = fleet(2);
    let blocks: Arc<[BlockHash]> = ten_blocks().into();
    let ledger = Ledger::default();
    let settings = settings(PolicyKind::RoundRobin, 1.0);
    let mut chosen = Vec::new();
    for _ in 0..2 {
        for role in [Role::Prefill, Role::Decode] {
            let request = PickRequest { role, ..request(&blocks, "r") };
            let (pick, field) = book(&ledger, 0, &settings, &request, &blocks, &lineup).expect("two");
            let target = field.candidate(pick.choice.chosen);
            let (account, place) = (field.account(pick.choice.chosen), pick.choice.chosen);
            let queued = account.load().queued.0;
            assert_eq!(queued > 0, role == Role::Prefill, "{role:?} on {}", target.target);
            chosen.push(place);
        }
    }
    assert_eq!(chosen, [0, 0, 1, 1], "each role has its own round");
}

/// Another router's bookings and an engine's own word count until they are old.
#[test]
fn load_from_outside_repels_while_it_is_fresh() {
    let lineup = fleet(2);
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    let blocks: Arc<[BlockHash]> = Arc::from([]);
    let ledger = Ledger::default();
    let chosen = |now: u64, id: &str| {
        let (pick, field) =
            book(&ledger, now, &settings, &request(&blocks, id), &blocks, &lineup).expect("two");
        (pick.choice.chosen, field.rows().iter().map(|one| one.load.queued.0).collect::<Vec<_>>())
    };
    let account = |at: usize| &lineup.entrants()[at].account;
    let free = chosen(0, "r").0;
    let load = Load { active_blocks: 9, queued: Tokens(1_000), context: Tokens(1_000), requests: 1 };
    let told = outside::Booking { load, sent: Some(Sent::default()) };
    account(free).replica_booked(Tick(0), outside::ReplicaId(7), told);
    let (other, queued) = chosen(3_000, "r");
    assert_eq!((other, queued[free]), (1 - free, 1_000), "it is busy with another router's work");
    assert_eq!(chosen(3_001, "r"), (free, vec![0, 0]), "that has not been renewed");
    let size = BlockSize::new(16).expect("not zero");
    let load = EngineLoad { waiting: 4, running: 0, used: None };
    let (sent, lifetime) = (account(free).sent(), Millis(6_000));
    (0..3).for_each(|_| account(free).about_to_ask(Tick(5_000)));
    let report = EngineReport { load, sent, typical: ledger.typical_prompt(), size, lifetime };
    account(free).engine_reported(Tick(5_000), &report);
    assert_eq!(account(free).strangers(Tick(5_000)).map(|load| load.requests), Some(4));
    assert_eq!(chosen(5_000, "r").0, 1 - free, "its engine has four more than anybody sent");
    assert_eq!(chosen(11_000, "r").0, 1 - free, "until that is old");
    assert_eq!(chosen(11_001, "r"), (free, vec![0, 0]), "which it is");
    account(free).engine_reported(Tick(12_000), &report);
    assert_eq!(chosen(12_000, "r").0, 1 - free);
    account(free).engine_restarted();
    assert_eq!(chosen(12_000, "r"), (free, vec![0, 0]), "they were its former life's");
    account(free).engine_reported(Tick(12_000), &report);
    assert_eq!(chosen(12_000, "r"), (free, vec![0, 0]), "and so is what it said then and is heard now");
    assert_eq!(account(free).load(), Load::default(), "what it tells others is its own only");
}

/// An account's place is handed on when the account is gone, and with it goes
/// what was predicted.
#[test]
fn seats_do_not_grow_with_the_churn_of_workers() {
    let (ledger, blocks) = (Ledger::default(), Arc::<[BlockHash]>::from(ten_blocks()));
    let settings = settings(PolicyKind::CachePlusLoad, 1.0);
    for number in 0..200 {
        let lineup = Arc::new(Lineup::new([entrant(number)]));
        let (mut pick, field) =
            book(&ledger, 0, &settings, &request(&blocks, "r"), &blocks, &lineup).expect("one");
        assert_eq!(field.candidate(0).predicted, 0, "worker {number} is new");
        // Its prefill is done and unconfirmed when the worker leaves.
        pick.lease.first_byte(Tick(0), None);
    }
    let seats = ledger.desk().lock().seats();
    assert!(seats <= 8, "{seats} seats for one worker at a time");
}

/// A pick works on columns, and replays on rows: all policies must price, choose
/// and break ties alike on both.
#[test]
fn columns_and_rows_decide_alike() {
    let (blocks, mut state) = (ten_blocks(), 7u64);
    let mut roll = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    for world in 0..400 {
        let facts: Vec<_> = (0..roll(9)).map(|_| (roll(4), roll(3), roll(3) * 40, roll(2) * 500)).collect();
        let mut rows = candidates(&facts);
        for row in &mut rows {
            (row.shared_active, row.images_seen) = (roll(2), roll(2));
            row.demand = Demand { tokens: Tokens(roll(3)), requests: roll(2) };
        }
        let columns = Field::from(&rows[..]);
        assert_eq!(columns.rows(), rows, "world {world}");
        let turn = rows.get(roll(4) as usize).map(|row| row.target.clone());
        for policy in PolicyKind::ALL {
            let mut settings = Settings { policy, ..overloaded(60, 0.3) };
            settings.load.imbalance = roll(2) as f64;
            settings.decode_demand.mode = DemandMode::Enabled;
            let images = [images::ImageKey(1)];
            let role = [Role::Mixed, Role::Decode][roll(2) as usize];
            let request = PickRequest { images: &images, role, ..request(&blocks, "r") };
            let (turn, ties) = (turn.as_ref(), Ties::default());
            let of_columns = choose(&settings, &request, &columns, turn, ties, &mut Prices::default());
            let of_rows = choose(&settings, &request, &rows[..], turn, ties, &mut Prices::default());
            assert_eq!(of_columns, of_rows, "world {world} {policy:?}");
            let task = request.task();
            let terms = price::terms(&settings, &task, &columns, turn);
            assert_eq!(terms, price::terms(&settings, &task, &rows[..], turn), "world {world} {policy:?}");
            let decided = decide(&settings, &request, &rows, turn).ok();
            assert_eq!(
                decided.as_ref().map(|decision| decision.chosen),
                of_columns.map(|choice| choice.chosen)
            );
            if let (Some(decision), Some(choice)) = (decided, of_columns) {
                assert_eq!(decision.terms[choice.chosen].cost, choice.cost, "the price is the terms'");
            }
        }
    }
}
