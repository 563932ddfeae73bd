//! Receipts there and back, and everything that must not pass for one.

use serde_json::{Value, json};

use super::chain::{Follower, Head};
use super::read::Content;
use super::record::Fault;
use super::*;
use crate::ids::{Epoch, WorkerId};
use crate::policy::decode_demand::{self, DecodeDemand, Demand, DemandMode};
use crate::policy::field::Field;
use crate::policy::images::ImageKey;
use crate::policy::price::Prices;
use crate::policy::shadow::{self, PolicySet};
use crate::policy::tie::Ties;
use crate::policy::{
    Candidate, ImageWeight, OverlapWeights, Overload, PickRequest, PolicyKind, choose, follow,
};
use crate::replay::contender::Contender;
use crate::replay::recorded::{self, Weights};
use crate::trust::{Reason, State};
use crate::units::{BlockSize, Millis};

/// Reproducible numbers below `below`.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % below
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u64) as usize]
    }
}

/// One decision, by the code that serves, among up to seven candidates.
struct World {
    settings: Settings,
    blocks: Vec<BlockHash>,
    images: Vec<ImageKey>,
    candidates: Vec<Candidate>,
    turn: Option<Target>,
    role: Role,
    bound: Option<usize>,
    choices: u32,
    /// How many prompts it has, where it has several; 0 else.
    several: u64,
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let blocks: Vec<BlockHash> = (0..dice.roll(9)).map(|_| BlockHash(dice.roll(u64::MAX))).collect();
        let count = dice.roll(8);
        let settings = Settings {
            policy: dice.pick(&PolicyKind::ALL),
            overlap: OverlapWeights {
                default: dice.pick(&[1.0, 0.0, 0.1, 20.0]),
                prefill: dice.pick(&[None, Some(20.0)]),
                decode: dice.pick(&[None, Some(1.0 / 3.0)]),
            },
            overload: Overload {
                max_queued: dice.pick(&[None, None, Some(Tokens(60))]),
                cold_reserve: dice.pick(&[0.0, 0.3]),
            },
            image_weight: ImageWeight(dice.pick(&[48.0, 0.7])),
            shadows: PolicySet::default().with(PolicyKind::LeastLoad).with(dice.pick(&PolicyKind::ALL)),
            ..Settings::default()
        };
        let mut candidates: Vec<Candidate> =
            (0..count).map(|number| Self::candidate(dice, number, blocks.len() as u64)).collect();
        let turn = candidates.get(dice.roll(9) as usize).map(|candidate| candidate.target.clone());
        let bound = Some(dice.roll(30) as usize).filter(|bound| *bound < candidates.len());
        let images = (0..dice.pick(&[0, 0, 2])).map(ImageKey).collect();
        let role = dice.pick(&[Role::Mixed, Role::Prefill, Role::Decode]);
        let mode = dice.pick(&[DemandMode::Disabled, DemandMode::Shadow, DemandMode::Enabled]);
        let decode_demand = DecodeDemand { mode, request_weight: dice.pick(&[0.0, 70.5]) };
        let settings = Settings { decode_demand, ..settings };
        if decode_demand::counts(&settings, role) {
            for candidate in &mut candidates {
                let tokens = Tokens(dice.pick(&[0, 300, 70_000]));
                candidate.demand = Demand { tokens, requests: dice.roll(3) };
            }
        }
        let (choices, several) = (dice.pick(&[1, 4]), dice.pick(&[0, 0, 2, 5]));
        Self { settings, blocks, images, candidates, turn, role, bound, choices, several }
    }

    /// Its prompts, where it has several: they have blocks in common, and their parts
    /// of what is claimed.
    fn prompts(&self, tokens: Tokens, claimed: TierHits) -> Vec<PromptRecord> {
        let part = |of: u64, at: u64| of * (at + 1) / self.several - of * at / self.several;
        let one = |at: u64| PromptRecord {
            tokens: Tokens(part(tokens.0, at)),
            blocks: part(self.blocks.len() as u64, at) + at % 2,
            claimed: TierHits {
                device: part(claimed.device, at),
                host: part(claimed.host, at),
                disk: part(claimed.disk, at),
            },
        };
        (0..self.several).map(one).collect()
    }

    fn candidate(dice: &mut Dice, number: u64, blocks: u64) -> Candidate {
        let mut rest = dice.roll(blocks + 1);
        let mut part = || {
            let part = dice.roll(rest + 1);
            rest -= part;
            part
        };
        let hits = TierHits { device: part(), host: part(), disk: part() };
        let claimed = TierHits { device: dice.pick(&[0, 3, 70_000]), ..hits };
        Candidate {
            target: Target::new(WorkerId::new(format!("10.0.0.{number}:8000")), dice.roll(3) as u32),
            claimed,
            hits,
            predicted: hits.device.min(1),
            evidence: dice.pick(&[Evidence::Nothing, Evidence::View, Evidence::InFlight, Evidence::History]),
            trust: Verdict {
                state: dice.pick(&[State::Exact, State::Unsequenced, State::Cold]),
                reason: dice.pick(&[Reason::Ok, Reason::NoSequence]),
                credited: dice.roll(2) == 0,
                epoch: Epoch(dice.pick(&[0, 1_795_970_300_559])),
                seq: dice.roll(300),
                age: dice.pick(&[None, Some(Millis(443))]),
            },
            load: Load {
                active_blocks: dice.roll(3),
                queued: Tokens(dice.pick(&[0, 0, 40, 3_000_000])),
                context: Tokens(dice.pick(&[0, 500])),
                requests: dice.roll(2),
            },
            shared_active: dice.roll(2),
            images_seen: dice.roll(3),
            demand: Demand::default(),
        }
    }

    /// The record of the decision.
    fn record(&self) -> Record {
        self.record_of(self.candidates.len())
    }

    /// The record of the decision with its first `kept` candidates alone.
    fn record_of(&self, kept: usize) -> Record {
        let request = PickRequest {
            id: "r-1",
            role: self.role,
            prompt: Tokens(self.blocks.len() as u64 * 16 + 5),
            blocks: &self.blocks,
            size: BlockSize::new(16).expect("not zero"),
            images: &self.images,
            session: None,
            choices: self.choices,
        };
        let mut field = Field::from(&self.candidates[..]);
        for at in (1..self.candidates.len()).step_by(2) {
            field.elsewhere.push((at as u32, 12));
        }
        let mut prices = Prices::default();
        let followed = self.bound.and_then(|bound| {
            follow(&self.settings, &request, &self.candidates[..], bound, &mut prices).ok()
        });
        let turn = self.turn.as_ref();
        let choice =
            followed.or_else(|| choose(&self.settings, &request, &field, turn, Ties::default(), &mut prices));
        let shadows = choice.map_or(Vec::new(), |choice| {
            shadow::evaluate(&self.settings, &request, &field, choice.chosen, turn)
        });
        let claimed = choice.map_or_else(TierHits::default, |choice| field.candidate(choice.chosen).claimed);
        let prompts = self.prompts(request.prompt, claimed);
        let kept = if kept < self.candidates.len() { &Field::from(&self.candidates[..kept]) } else { &field };
        let draft = Draft {
            time_unix_ms: 1_795_970_308_644,
            attempt: 1,
            role: self.role,
            namespace: NamespaceId(u128::MAX / 7),
            prompt_tokens: request.prompt,
            exact_tokens: true,
            blocks: &self.blocks,
            prompts: &prompts,
            images: self.images.len() as u64,
            turn,
            field: Some(kept),
            priced: self.candidates.len(),
            choices: self.choices,
            choice: choice.as_ref(),
            shadows: &shadows,
            ..Draft::undecided("r-1", &self.settings, 16)
        };
        draft.encode()
    }
}

fn receipt(seed: u64) -> Receipt {
    let mut dice = Dice(seed);
    let mut receipt = World::new(&mut dice).record().decode().expect("ours");
    receipt.result = match dice.roll(3) {
        0 => None,
        1 => Some(ResultRecord { status: 200, first_byte_ms: Some(31), ..ResultRecord::default() }),
        _ => Some(ResultRecord { failure: Some("client_gone".into()), ..ResultRecord::default() }),
    };
    receipt
}

/// A receipt with all that one can have.
fn full() -> Receipt {
    let rich = |receipt: &Receipt| {
        receipt.candidates.len() > 2
            && receipt.chosen.is_some()
            && receipt.result.is_some()
            && !receipt.shadows.is_empty()
            && receipt.prompt_blocks > 3
            && receipt.prompts.len() > 2
            && receipt.turn.is_some()
    };
    (0..).map(receipt).find(rich).expect("some are")
}

#[test]
fn records_lines_and_decisions_are_there_and_back() {
    let mut head = Head::default();
    let mut follower = Follower::default();
    let mut kinds = std::collections::BTreeSet::new();
    let mut judgements = std::collections::BTreeSet::new();
    let mut prompts = std::collections::BTreeSet::new();
    for seed in 0..3000 {
        let receipt = receipt(seed);
        let line = head.receipt(&receipt);
        let read = follower.line(&line, 1).expect("ours");
        let Content::Receipt(read) = read.content else { panic!("a receipt") };
        assert_eq!(*read, receipt, "seed {seed}");
        assert_eq!(recorded::repeat(seed, &receipt), Ok(()), "seed {seed}");
        let judged = receipt.demand.as_ref().and_then(|demand| demand.judgement.as_ref());
        judgements.insert(judged.map(|judged| judged.suggested == judged.original));
        prompts.insert((receipt.prompts.len(), receipt.chosen.is_some()));
        kinds.insert(format!("{:?} {:?}", receipt.outcome, receipt.chosen.map(|chosen| chosen.tie)));
    }
    assert!(kinds.len() > 10, "the worlds are many: {kinds:?}");
    assert_eq!(prompts.len(), 6, "one prompt, two and five, with a choice and without: {prompts:?}");
    assert_eq!(judgements.len(), 3, "input demand is not asked, agrees, and does not");
    assert_eq!((follower.head, follower.receipts), (Some(head), 3000));
}

/// What decode input-demand saw and preferred is in the receipt of a decode pick, of
/// every candidate, and another judgement is noticed.
#[test]
fn demand_is_recorded_for_every_candidate_and_repeated() {
    let judged = |receipt: &Receipt| {
        let judgement = receipt.demand.as_ref().and_then(|demand| demand.judgement.as_ref());
        judgement.is_some_and(|judged| judged.suggested != judged.original)
    };
    let mut receipt = (0..).map(receipt).find(judged).expect("some are");
    assert_eq!(receipt.role, Role::Decode);
    let text = receipt.to_value();
    let all = text["candidates"].as_array().expect("a list");
    assert!(all.iter().all(|one| one["demand"]["tokens"].is_u64() && one["demand"]["requests"].is_u64()));
    let judgement = receipt.demand.as_mut().and_then(|demand| demand.judgement.as_mut()).expect("found");
    judgement.projected.0 += 1;
    let difference = recorded::repeat(7, &receipt).expect_err("another judgement");
    assert_eq!(difference.field, "demand.judgement");
    let plain = (0..).map(self::receipt).find(|receipt| receipt.role == Role::Mixed).expect("some are");
    let plain = plain.to_value();
    assert!(plain.get("demand").is_none() && plain["candidates"][0].get("demand").is_none());
}

#[test]
fn a_record_that_is_cut_or_changed_is_no_receipt() {
    let large = |world: &World| world.candidates.len() > 3 && world.several > 0;
    let world = (0..).map(|seed| World::new(&mut Dice(seed))).find(large);
    let record = world.as_ref().expect("some have").record();
    assert_eq!(record.request_id(), "r-1");
    let bytes = record.as_bytes();
    let decode = |bytes: &[u8]| Record::from_parts(bytes, record.names().clone()).decode();
    for end in 0..bytes.len() {
        assert!(decode(&bytes[..end]).is_err(), "cut at {end}");
        // With the length that fits, so that it is not the length that tells.
        let mut cut = bytes[..end].to_vec();
        if end >= 4 {
            cut[..4].copy_from_slice(&(end as u32).to_le_bytes());
        }
        assert!(decode(&cut).is_err(), "cut at {end}, and says so");
    }
    let faults = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.to_vec();
        change(&mut changed);
        decode(&changed).map_err(|error| (error.field, error.fault)).map(|_| ())
    };
    assert_eq!(faults(&|bytes| bytes[4] = 9), Err(("version", Fault::Version(9))));
    assert_eq!(faults(&|bytes| bytes.push(0)), Err(("length", Fault::Length)));
    assert_eq!(faults(&|bytes| bytes[6] = 0xff), Err(("request_id", Fault::Text)));
    let role = bytes.len() - record_tail(&record);
    assert_eq!(faults(&|bytes| bytes[role] = 77), Err(("role", Fault::Unknown(77))));
}

/// A list of prompts says that there are several.
#[test]
fn a_record_that_lists_a_single_prompt_is_rejected() {
    let settings = Settings::default();
    let one = PromptRecord { tokens: Tokens(40), blocks: 2, claimed: TierHits::default() };
    let decode = |prompts: &[PromptRecord]| {
        Draft { prompts, ..Draft::undecided("r", &settings, 16) }.encode().decode()
    };
    for several in [vec![], vec![one; 2], vec![one; 1024]] {
        assert_eq!(decode(&several).map(|receipt| receipt.prompts), Ok(several));
    }
    let error = decode(&[one]).expect_err("the mutant was not noticed");
    assert_eq!((error.field, error.fault), ("prompts", Fault::Number));
}

/// The mutant decided by other weights than those that it wrote down.
#[test]
fn a_record_whose_facts_give_another_price_is_rejected() {
    let priced = |world: &World| {
        world.settings.policy == PolicyKind::CachePlusLoad
            && world.role == Role::Mixed
            && world.settings.overlap.default == 1.0
            && world.record().decode().is_ok_and(|receipt| receipt.chosen.is_some())
    };
    let world = (0..).map(|seed| World::new(&mut Dice(seed))).find(priced).expect("some are");
    let record = world.record();
    let mut bytes = record.as_bytes().to_vec();
    // Behind role, exact tokens, outcome, session, tie, the namespace and the policy.
    let weight = bytes.len() - record_tail(&record) + 5 + 16 + 1;
    assert_eq!(bytes[weight..weight + 8], 1.0f64.to_le_bytes(), "the rule");
    bytes[weight..weight + 8].copy_from_slice(&3.0f64.to_le_bytes());
    let changed = Record::from_parts(&bytes, record.names().clone());
    let error = changed.decode().expect_err("the mutant was not noticed");
    assert_eq!((error.field, error.fault), ("candidates.terms", Fault::Price));
}

/// Candidates that are not all of the lineup, and many of them: places are
/// written down, and every width of a column is read back.
#[test]
fn columns_of_every_width_are_there_and_back() {
    let mut dice = Dice(5);
    for bits in [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63] {
        let mut rows: Vec<Candidate> = (0..9).map(|number| World::candidate(&mut dice, number, 4)).collect();
        for (place, row) in rows.iter_mut().enumerate() {
            let number = if place % 2 == 0 { 0 } else { 1u64 << bits };
            row.load.queued = Tokens(number);
            row.load.requests = number / 3;
            row.trust.seq = u64::MAX - number;
        }
        let whole = Field::from(&rows[..]);
        let mut some = Field::default();
        some.begin(whole.lineup());
        let kept: Vec<Candidate> = rows.iter().skip(1).step_by(3).cloned().collect();
        for (row, place) in kept.iter().zip((1..).step_by(3)) {
            some.push(place, 0, row.trust.into());
            some.shape_of.push(place);
            some.loads.push(row.load);
        }
        some.shapes = whole.shapes.clone();
        for (field, rows) in [(&whole, &rows), (&some, &kept)] {
            let settings = Settings::default();
            let draft =
                Draft { field: Some(field), priced: rows.len(), ..Draft::undecided("r", &settings, 16) };
            let receipt = draft.encode().decode().expect("ours");
            let facts = |row: &Candidate| (row.target.clone(), row.hits, row.load, row.trust);
            let read =
                receipt.candidates.iter().map(|one| (one.target.clone(), one.hits, one.load, one.trust));
            assert!(read.eq(rows.iter().map(facts)), "{bits} bits");
        }
    }
}

/// Bytes from the role on.
fn record_tail(record: &Record) -> usize {
    let bytes = record.as_bytes();
    // Length, version, id, then six numbers.
    let mut at = 4 + 1 + 1 + "r-1".len();
    for _ in 0..6 {
        while bytes[at] >= 0x80 {
            at += 1;
        }
        at += 1;
    }
    bytes.len() - at
}

/// The mutant writes down the chosen candidate alone.
#[test]
fn a_record_with_candidates_dropped_is_rejected() {
    let world = (0..).map(|seed| World::new(&mut Dice(seed))).find(|world| world.candidates.len() > 3);
    let world = world.expect("some have");
    let all = world.candidates.len() as u64;
    assert!(world.record().decode().is_ok(), "the rule");
    let dropped = world.record_of(1);
    let error = dropped.decode().expect_err("the mutant was not noticed");
    assert_eq!((error.field, error.fault), ("candidates", Fault::Candidates { priced: all, found: 1 }));
}

/// The line of `value`, with a digest that fits.
fn sealed(mut value: Value) -> String {
    value.as_object_mut().expect("an object").shift_remove("digest");
    value["digest"] = Digest::of(&canonical_json(&value)).to_string().into();
    canonical_json(&value)
}

/// All paths to fields below `value`.
fn paths(value: &Value, at: &str, out: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(place, item)| (place.to_string(), item)).collect()
        }
        _ => Vec::new(),
    };
    for (key, child) in children {
        let path = format!("{at}/{key}");
        paths(child, &path, out);
        if value.is_object() {
            out.push(path);
        }
    }
}

/// The pointer `/candidates/0/terms` as complaints spell it.
fn spelt(path: &str) -> String {
    path.split('/').skip(1).fold(String::new(), |text, step| match step.parse::<usize>() {
        Ok(place) => format!("{text}[{place}]"),
        Err(_) if text.is_empty() => step.to_owned(),
        Err(_) => format!("{text}.{step}"),
    })
}

#[test]
fn a_line_without_any_one_of_its_fields_names_it() {
    let line = Head::default().receipt(&full());
    let whole: Value = serde_json::from_str(&line).expect("JSON");
    let mut all = Vec::new();
    paths(&whole, "", &mut all);
    assert!(all.len() > 90, "{}", all.len());
    for path in all.iter().filter(|path| *path != "/digest") {
        let (parent, key) = path.rsplit_once('/').expect("absolute");
        let mut value = whole.clone();
        value.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object").shift_remove(key);
        let error = Follower::default().line(&sealed(value), 7).expect_err(path);
        assert_eq!(error.to_string(), format!("line 7: {}: is missing", spelt(path)));
        let mut value = whole.clone();
        value
            .pointer_mut(parent)
            .and_then(Value::as_object_mut)
            .expect("an object")
            .insert("more".into(), json!(1));
        let error = Follower::default().line(&sealed(value), 7).expect_err(path);
        assert_eq!(error.problem.reason(), "unknown", "{path}: {error}");
    }
}

#[test]
fn a_line_that_contradicts_itself_names_the_field() {
    let line = Head::default().receipt(&full());
    let whole: Value = serde_json::from_str(&line).expect("JSON");
    let check = |path: &str, to: Value, field: &str, reason: &str| {
        let mut value = whole.clone();
        *value.pointer_mut(path).expect(path) = to;
        let error = Follower::default().line(&sealed(value), 3).expect_err(path);
        assert_eq!((error.line, error.field.as_str(), error.problem.reason()), (3, field, reason), "{path}");
    };
    let candidates = whole["candidates"].as_array().expect("a list").clone();
    check("/candidates", json!(candidates[1..]), "candidate_count", "differs");
    let reversed: Vec<&Value> = candidates.iter().rev().collect();
    check("/candidates", json!(reversed), "candidates", "expected");
    check("/schema_version", json!(1), "schema_version", "version");
    check("/kind", json!("note"), "kind", "label");
    check("/outcome", json!("lucky"), "outcome", "label");
    check("/candidates/1/trust/state", json!("fine"), "candidates[1].trust.state", "label");
    check("/settings/load/queue", json!(7), "policy_digest", "differs");
    check("/chosen/target", json!("10.9.9.9:1#0"), "chosen", "expected");
    check("/predicted_hit_tokens", json!(1), "predicted_hit_tokens", "differs");
    check("/candidates/0/hits/device", json!(-1), "candidates[0].hits.device", "expected");
    check("/candidates/0/terms/cost", json!(null), "candidates[0].terms.cost", "missing");
    check("/candidates/0/target", json!("here"), "candidates[0].target", "expected");
    check("/candidates/0/next_block", json!("xyz"), "candidates[0].next_block", "expected");
    check("/namespace", json!("00"), "namespace", "expected");
    check("/time_unix_ms", json!(1u64 << 53), "time_unix_ms", "limit");
    check("/block_size", json!(0), "block_size", "expected");
    let dominated = if whole["candidates"][0]["dominated_by"].is_null() { "a:1#0" } else { "b:1#0" };
    check("/candidates/0/dominated_by", json!(dominated), "candidates", "differs");
    check("/prompts", json!({}), "prompts", "expected");
    check("/prompts/1/tokens", json!(-1), "prompts[1].tokens", "expected");
    check("/prompts/2/claimed/disk", json!(10_000_001), "prompts[2].claimed.disk", "limit");
    check("/prompts", json!([whole["prompts"][0]]), "prompts", "expected");
    let other = |path: &str| json!(whole.pointer(path).and_then(Value::as_u64).expect(path) + 1);
    for path in ["tokens", "claimed/device", "claimed/host", "claimed/disk"] {
        let path = format!("/prompts/0/{path}");
        check(&path, other(&path), "prompts", "differs");
    }
    let blockless = |prompt: &Value| {
        let mut prompt = prompt.clone();
        prompt["blocks"] = json!(0);
        prompt
    };
    let blockless: Value = whole["prompts"].as_array().expect("a list").iter().map(blockless).collect();
    check("/prompts", blockless, "prompts", "expected");
    let spaced = line.replacen(':', ": ", 1);
    let error = Follower::default().line(&spaced, 3).expect_err("spaced");
    assert_eq!(error.problem.reason(), "not_canonical");
    let cut = Follower::default().line(&line[..line.len() - 9], 3).expect_err("cut");
    assert_eq!((cut.line, cut.problem.reason()), (3, "json"));
}

/// Where nobody was chosen, nothing is claimed of any prompt.
#[test]
fn prompts_that_nobody_was_chosen_for_claim_nothing() {
    let unrouted = |receipt: &Receipt| receipt.chosen.is_none() && receipt.prompts.len() > 1;
    let mut receipt = (0..).map(receipt).find(unrouted).expect("some are");
    let read = |receipt: &Receipt| Follower::default().line(&Head::default().receipt(receipt), 3);
    assert!(read(&receipt).is_ok(), "the rule");
    receipt.prompts[1].claimed.host = 1;
    let error = read(&receipt).expect_err("a claim of nobody").to_string();
    assert!(error.starts_with("line 3: prompts: is 1, and 0 was expected: "), "{error}");
}

/// A chain of four receipts and a gap.
fn chain() -> String {
    let mut head = Head::default();
    let mut lines: Vec<String> = (0..3).map(|seed| head.receipt(&receipt(seed))).collect();
    lines.push(head.gap(5, 3));
    lines.push(head.receipt(&receipt(3)));
    lines.join("\n") + "\n"
}

#[test]
fn a_chain_breaks_where_a_line_is_changed_moved_added_or_left_out() {
    let text = chain();
    let lines: Vec<&str> = text.lines().collect();
    let follow = |lines: &[&str]| {
        let found = Follower::default().file(&(lines.join("\n") + "\n"));
        found.map(|all| all.len()).map_err(|error| (error.line, error.field))
    };
    assert_eq!(follow(&lines), Ok(5));
    assert_eq!(follow(&lines[2..]), Ok(3), "a later file begins in the middle");
    let at = |line: usize, field: &str| Err((line, field.to_owned()));
    let swapped = [lines[0], lines[2], lines[1], lines[3], lines[4]];
    assert_eq!(follow(&swapped), at(2, "sequence"));
    assert_eq!(follow(&[lines[0], lines[2]]), at(2, "sequence"), "left out");
    assert_eq!(follow(&[lines[0], lines[0]]), at(2, "sequence"), "twice");
    let changed = lines[1].replacen("1795970308644", "1795970308645", 1);
    assert_eq!(follow(&[lines[0], &changed, lines[2]]), at(2, "digest"), "changed");
    let resealed = sealed(serde_json::from_str(&changed).expect("JSON"));
    assert_eq!(follow(&[lines[0], &resealed, lines[2]]), at(3, "previous"), "changed with its digest");
    let mut first: Value = serde_json::from_str(lines[0]).expect("JSON");
    first["previous"] = Digest::of("x").to_string().into();
    assert_eq!(follow(&[&sealed(first)]), at(1, "previous"), "the first of all follows nothing");
    let mut follower = Follower::default();
    follower.file(&text).expect("good");
    assert_eq!((follower.receipts, follower.lost), (4, 3));
    assert!(follower.clone().file(lines[0]).is_err(), "another file must continue");
}

#[test]
fn the_documented_receipt_is_one() {
    let page = include_str!("../../../../docs/receipts.md");
    let block = page.split("```json\n").nth(1).and_then(|rest| rest.split("\n```").next());
    let value: Value = serde_json::from_str(block.expect("an example")).expect("JSON");
    Follower::default().line(&canonical_json(&value), 1).expect("whole, and as strict as any");
}

#[test]
fn a_decision_that_does_not_repeat_is_reported_with_its_number() {
    let good = full();
    let check = |change: &dyn Fn(&mut Receipt), field: &str| {
        let mut receipt = good.clone();
        change(&mut receipt);
        let difference = recorded::repeat(41, &receipt).expect_err(field);
        assert_eq!((difference.sequence, difference.field.as_str()), (41, field));
    };
    assert_eq!(recorded::repeat(41, &good), Ok(()));
    check(&|receipt| receipt.candidates[1].terms.cost += 1.0, "candidates[1].terms");
    check(&|receipt| receipt.chosen = None, "chosen");
    check(&|receipt| receipt.outcome = Outcome::NoTarget, "outcome");
    check(&|receipt| receipt.shadows[0].regret_blocks += 1, "shadows");
    check(&|receipt| receipt.settings.policy = other_than(receipt.settings.policy), "candidates[0].terms");
}

fn other_than(policy: PolicyKind) -> PolicyKind {
    if policy == PolicyKind::LMetric { PolicyKind::RoundRobin } else { PolicyKind::LMetric }
}

#[test]
fn every_policy_is_asked_on_the_same_frozen_candidates() {
    let receipts: Vec<(u64, Receipt)> = (0..400).map(|seed| (seed, receipt(seed))).collect();
    let rows = recorded::evaluate(&receipts, &Contender::shipped(), Weights::Recorded, || ());
    for (row, policy) in rows.iter().zip(PolicyKind::ALL) {
        let of_policy = |receipt: &&(u64, Receipt)| receipt.1.settings.policy == policy;
        let own: Vec<(u64, Receipt)> = receipts.iter().filter(of_policy).cloned().collect();
        let alone = recorded::evaluate(
            &own,
            &[Contender::parse(policy.label()).expect("ours")],
            Weights::Recorded,
            || (),
        );
        assert_eq!(alone[0].agreement, 1.0, "{policy:?} agrees with itself");
        assert_eq!((alone[0].regret_blocks, alone[0].forgone_blocks), (0, 0), "{policy:?}");
        assert!(row.agreement < 1.0 && row.decisions > 200, "{row:?}");
    }
    let best = rows.iter().max_by_key(|row| row.hit_blocks).map(|row| row.policy.as_str());
    assert_eq!(best, Some("longest-prefix"));
}

#[test]
fn the_ring_is_bounded_and_joins_only_what_it_still_holds() {
    let settings = Settings::default();
    let mut ring = Ring::new(2);
    let numbers: Vec<_> = ["a", "b", "c"]
        .iter()
        .map(|id| ring.file(Draft::undecided(id, &settings, 16).encode(), None).number)
        .collect();
    let result = ResultRecord { status: 200, ..ResultRecord::default() };
    let before = ring.latest(1, |_| true);
    numbers.iter().for_each(|number| ring.join(*number, result.clone()));
    let held = ring.latest(9, |entry| entry.result.is_some());
    assert_eq!(held.iter().map(|entry| entry.record.request_id()).collect::<Vec<_>>(), ["c", "b"]);
    assert_eq!(ring.filed(), 3);
    assert_eq!(before[0].result, None, "what was read does not change under its reader");
    assert_eq!(held[0].receipt().and_then(|receipt| receipt.result), Some(result));
}

#[test]
fn dominance_is_what_a_plain_search_finds() {
    for seed in 0..500 {
        let receipt = receipt(seed);
        let key = |one: &CandidateRecord| (one.hits.total(), one.load.queued.0 + one.load.context.0);
        for candidate in &receipt.candidates {
            let (hits, work) = key(candidate);
            let better = receipt.candidates.iter().map(|other| (key(other), &other.target)).find(
                |((reuse, other), _)| *reuse >= hits && *other <= work && (*reuse > hits || *other < work),
            );
            assert_eq!(candidate.dominated_by.as_ref(), better.map(|(_, target)| target), "seed {seed}");
        }
    }
}

#[test]
fn tables_have_a_row_for_every_candidate() {
    let mut follower = Follower::default();
    let mut head = Head::default();
    let mut strange = full();
    strange.request_id = "a \"b\", c".into();
    let text =
        [head.receipt(&strange), head.gap(5, 3), head.receipt(&receipt_without_candidates())].join("\n");
    let lines = follower.file(&text).expect("good");
    let table: String = std::iter::once(csv::head()).chain(lines.iter().map(csv::rows)).collect();
    let rows: Vec<&str> = table.split_terminator("\r\n").collect();
    assert_eq!(rows.len(), 1 + strange.candidates.len() + 2);
    let columns = rows[0].split(',').count();
    assert!(rows[1].contains(",\"a \"\"b\"\", c\","), "{}", rows[1]);
    assert_eq!(rows[1].split(',').count(), columns + 1, "the quoted comma");
    let at = rows[0].split(',').position(|name| name == "prompts").expect("a column");
    let of = |row: &str, at: usize| row.split(',').nth(at).map(str::to_owned);
    assert_eq!(of(rows[1], at + 1), Some(strange.prompts.len().to_string()), "a list is its length");
    assert_eq!(of(rows[rows.len() - 1], at).as_deref(), Some("0"));
    for row in &rows[1 + strange.candidates.len()..] {
        assert_eq!(row.split(',').count(), columns, "{row}");
    }
    assert!(rows[rows.len() - 2].starts_with("1,gap,3,,5,"), "{}", rows[rows.len() - 2]);
}

fn receipt_without_candidates() -> Receipt {
    let settings = Settings::default();
    Draft::undecided("r", &settings, 16).encode().decode().expect("ours")
}

#[test]
fn numbers_that_json_cannot_hold_are_written_as_the_largest_it_can() {
    let world = (0..).map(|seed| World::new(&mut Dice(seed))).find(|world| world.candidates.len() > 1);
    let mut world = world.expect("some have");
    world.candidates[0].trust.seq = u64::MAX;
    let receipt = world.record().decode().expect("ours");
    assert_eq!(receipt.candidates[0].trust.seq, u64::MAX, "the record is exact");
    let line = Head::default().receipt(&receipt);
    let read = Follower::default().line(&line, 1).expect("readable");
    let Content::Receipt(read) = read.content else { panic!("a receipt") };
    assert_eq!(read.candidates[0].trust.seq, crate::json::canonical::MAX_WHOLE);
}

/// Files of the release before go on where they ended.
#[test]
fn lines_from_before_prompts_were_listed_are_read() {
    let line = Head::default().receipt(&receipt_without_candidates());
    let mut old: Value = serde_json::from_str(&line).expect("JSON");
    let fields = old.as_object_mut().expect("an object");
    fields.remove("prompts");
    fields.insert("schema_version".into(), json!(2));
    let follow = |line: &Value| Follower::default().line(&sealed(line.clone()), 1).map(|line| line.content);
    let read = follow(&old);
    let Ok(Content::Receipt(read)) = read else { panic!("a receipt: {read:?}") };
    assert_eq!((read.schema_version, read.prompts.len()), (2, 0));
    old["prompts"] = json!([]);
    assert!(follow(&old).is_err(), "they had no such field");
}
