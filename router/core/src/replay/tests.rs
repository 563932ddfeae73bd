//! The replay's rules: strict reading, one order, clean copies, an oracle that
//! thinks differently, and mutants that must be seen to fail.

use super::contender::Contender;
use super::engine::Model;
use super::lab::{self, LabModel, LabReceipt, LabRun, Mutant};
use super::report::{Objective, summarise, to_csv, to_json};
use super::run::{InFlightCredit, Plan, run};
use super::trace::{Trace, TraceError};
use super::{lab_oracle, lab_trace, mooncake, oracle, runs};
use crate::policy::{Outcome, Overload, PolicyKind, Settings};
use crate::units::BlockSize;

const LAB: &str = include_str!("../../../../tests/fixtures/traces/lab.json");

fn settings(policy: PolicyKind) -> Settings {
    Settings { policy, ..Settings::default() }
}

/// A conversation trace of `count` requests: sessions that grow by a few blocks a
/// turn over a shared first block, from a linear congruential seed.
fn conversations(seed: u64, count: usize) -> String {
    let mut state = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
    let mut next = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let mut sessions: Vec<Vec<u64>> = vec![vec![0]; 12];
    let (mut fresh, mut now) = (1, 0);
    let mut text = String::new();
    for _ in 0..count {
        now += next(400);
        let session = next(12) as usize;
        if sessions[session].len() > 20 {
            sessions[session].truncate(1);
        }
        for _ in 0..=next(4) {
            sessions[session].push(fresh);
            fresh += 1;
        }
        let ids = &sessions[session];
        let prompt = (ids.len() as u64 - 1) * 512 + 1 + next(512);
        text += &format!(
            "{{\"timestamp\": {now}, \"input_length\": {prompt}, \"output_length\": {}, \"hash_ids\": {ids:?}}}\n",
            1 + next(600)
        );
    }
    text
}

fn plan(workers: usize, capacity: u64) -> Plan {
    Plan {
        workers,
        rate_milli: 1000,
        model: Model { capacity_blocks: capacity, max_decoding: 6, ..Model::default() },
        in_flight_credit: InFlightCredit::Enabled,
    }
}

fn report(trace: &Trace, plan: &Plan) -> String {
    let rows: Vec<_> = Contender::defaults()
        .iter()
        .map(|contender| {
            summarise(trace, plan, contender, Objective::default(), &run(trace, plan, contender, |_| ()))
        })
        .collect();
    assert_eq!(to_csv(&rows).lines().count(), rows.len() + 1, "a head and a line each");
    to_json(trace, plan, Objective::default(), &rows)
}

#[test]
fn lines_in_any_order_give_the_same_bytes() {
    let text = conversations(3, 120);
    let mut lines: Vec<&str> = text.lines().collect();
    let straight = report(&mooncake::parse(&text).expect("good"), &plan(3, 60));
    lines.reverse();
    lines.swap(5, 50);
    let shuffled = report(&mooncake::parse(&lines.join("\n")).expect("good"), &plan(3, 60));
    assert_eq!(straight, shuffled);
}

#[test]
fn the_oracle_agrees_under_every_policy() {
    for seed in 0..12u64 {
        let trace = mooncake::parse(&conversations(seed, 150)).expect("good");
        let mut plan = plan(1 + seed as usize % 5, [8, 40, 1000][seed as usize % 3]);
        plan.rate_milli = [500, 1000, 2000][(seed / 3) as usize % 3];
        if seed % 2 == 1 {
            plan.in_flight_credit = InFlightCredit::Disabled;
        }
        for contender in Contender::shipped() {
            let Contender::Shipped(mut settings) = contender else { continue };
            settings.load.request = seed as f64 * 10.0;
            settings.load.imbalance = (seed % 4) as f64 * 0.1;
            let contender = Contender::Shipped(settings);
            let done = run(&trace, &plan, &contender, |_| ());
            assert_eq!(
                oracle::check(&trace, &plan, &settings, &done, |_| ()),
                Ok(()),
                "seed {seed}: {contender:?}"
            );
        }
    }
}

#[test]
fn the_oracle_sees_another_choice_and_another_time() {
    let trace = mooncake::parse(&conversations(1, 60)).expect("good");
    let (plan, settings) = (plan(4, 100), settings(PolicyKind::CachePlusLoad));
    let done = run(&trace, &plan, &Contender::Shipped(settings), |_| ());
    let mut moved = done.clone();
    moved.served[30].worker = (moved.served[30].worker + 1) % 4;
    let found = oracle::check(&trace, &plan, &settings, &moved, |_| ()).expect_err("moved");
    assert_eq!(found.what, "worker");
    let mut late = done;
    late.served[30].first_token += 1;
    let found = oracle::check(&trace, &plan, &settings, &late, |_| ()).expect_err("late");
    assert_eq!(found.what, "time of the first token");
}

/// One request, by hand: 1,100 tokens in one chunk, then four tokens.
#[test]
fn step_times_follow_the_stated_model() {
    let line = r#"{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}"#;
    let trace = mooncake::parse(line).expect("good");
    let done = run(&trace, &plan(1, 100), &Contender::shipped()[0], |_| ());
    let prefill = 6_000_000 + 1100 * 100_000;
    let decode: u64 = (1..5).map(|made| 6_000_000 + 100_000 + 60 * (1100 + made)).sum();
    let served = done.served[0];
    assert_eq!(served.first_token - served.arrived, prefill);
    assert_eq!(served.finished - served.first_token, decode);
}

#[test]
fn a_second_turn_hits_what_the_first_one_stored() {
    let text = r#"{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
{"timestamp": 9000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
{"timestamp": 18000, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}"#;
    let trace = mooncake::parse(text).expect("good");
    let done = run(&trace, &plan(2, 100), &Contender::shipped()[0], |_| ());
    let hits: Vec<u64> = done.served.iter().map(|served| served.hits).collect();
    assert_eq!(hits, [0, 1, 2], "the last token is always computed, so a full hit gives up a block");
}

#[track_caller]
fn rejects(why: &str, found: Result<impl Sized, TraceError>, message: &str) {
    match found {
        Ok(_) => panic!("{why}: accepted"),
        Err(error) => assert_eq!(error.to_string(), message, "{why}"),
    }
}

#[test]
fn bad_conversation_traces_name_line_and_field() {
    let good = r#"{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [7, 8]}"#;
    let check = |why: &str, line: &str, message: &str| {
        rejects(why, mooncake::parse(&format!("{good}\n{line}\n")), message);
    };
    check("truncated", &good[..44], "line 2: object: is not JSON: EOF while parsing a string");
    let wrong = |from: &str, to: &str| good.replace(from, to);
    check("negative", &wrong("1000", "-5"), "line 2: input_length: must be a whole number, 0 or more");
    check(
        "fraction",
        &wrong("th\": 1,", "th\": 1.5,"),
        "line 2: output_length: must be a whole number, 0 or more",
    );
    check("missing", &wrong("timestamp", "time"), "line 2: timestamp: is missing");
    check("count", &wrong("1000", "1025"), "line 2: hash_ids: holds 2 blocks, and the prompt has 3");
    check(
        "chain",
        &wrong("[7, 8]", "[9, 8]"),
        "line 2: hash_ids: block 8 follows 9 here and 7 on an earlier line: the hashes do not chain",
    );
    check(
        "text",
        &wrong("[7, 8]", "[7, \"x\"]"),
        "line 2: hash_ids: must be a list of whole numbers, 0 or more",
    );
    check("twice", &wrong("\"output_length\": 1", "\"timestamp\": 3"), "line 2: timestamp: is given twice");
    check(
        "too long",
        &wrong("1000", "10000001"),
        "line 2: input_length: is 10000001, and the limit is 10000000",
    );
    check("a list", "[1]", "line 2: object: must be an object");
}

const SESSION: &str = r#"{"s": "a", "kind": "session", "block_size": 64}
{"s": "a", "kind": "subagent", "agent": "x"}
{"s": "a", "i": 0, "t": 1.5, "in": 650, "out": 3, "runs": [[1, 10]]}
{"s": "a", "i": 1, "t": 60.0, "in": 1300, "out": 3, "runs": [[1, 8], [20, 12]]}
"#;

#[test]
fn sessions_in_runs_become_blocks_and_arrivals() {
    let layout = runs::Layout { size: BlockSize::new(256).expect("not zero"), spacing_ms: 1000 };
    let other = SESSION.replace("\"a\"", "\"b\"");
    let trace = runs::parse(&format!("{other}{SESSION}"), layout).expect("good");
    let found: Vec<_> =
        trace.requests.iter().map(|r| (&*r.id, (r.at + r.pace) / 1_000_000, r.blocks.len())).collect();
    let expected =
        [("a/000000", 1500, 2), ("b/000000", 2500, 2), ("a/000001", 60_000, 5), ("b/000001", 61_000, 5)];
    assert_eq!(found, expected);
    assert_eq!(trace.requests[0].blocks[..2], trace.requests[2].blocks[..2], "one session shares its prefix");
    assert_ne!(trace.requests[0].blocks[0], trace.requests[1].blocks[0], "two sessions share nothing");
    assert_eq!(trace.unique_blocks, 10);
}

#[test]
fn bad_session_traces_name_line_and_field() {
    let layout = runs::Layout { size: BlockSize::new(256).expect("not zero"), spacing_ms: 0 };
    let check = |why: &str, from: &str, to: &str, message: &str| {
        rejects(why, runs::parse(&SESSION.replace(from, to), layout), message);
    };
    check(
        "unknown",
        "{\"s\": \"a\", \"i\": 0",
        "{\"s\": \"b\", \"i\": 0",
        "line 3: s: names \"b\", which the trace does not list",
    );
    check("unit", "64", "100", "line 1: block_size: must be a divisor of the replay's block size");
    check("twice", "\"i\": 1", "\"i\": 0", "line 4: i: \"a/0\" is used twice");
    check("count", "1300", "13", "line 4: runs: holds 20 blocks, and the prompt has 0");
    check("time", "60.0", "-1", "line 4: t: must be a time of 0 or more, below 100 years");
    check(
        "chain",
        "[[1, 8], [20, 12]]",
        "[[1, 8], [10, 12]]",
        "line 4: runs: block 10 follows 8 here and 9 on an earlier line: the hashes do not chain",
    );
    check(
        "huge",
        "[20, 12]",
        "[18446744073709551615, 12]",
        "line 4: runs: is 18446744073709551615, and the limit is 16777216",
    );
}

#[test]
fn lab_events_have_one_order_and_ranges_a_limit() {
    let check = |why: &str, from: &str, to: &str, message: &str| {
        rejects(why, lab_trace::parse(&LAB.replacen(from, to, 1)), message);
    };
    check(
        "two events of one place",
        "\"seq\": 20, \"worker\": \"w2\", \"epoch\": 3",
        "\"seq\": 20, \"worker\": \"w1\", \"epoch\": 5",
        "line 14: events[4].seq: \"20\" is used twice",
    );
    check(
        "ranges beyond the limit",
        "\"report-3/7\"",
        "\"a/1..8000\", \"b/1..8000\"",
        "line 20: events[10].blocks: is 16000, and the limit is 8192",
    );
}

#[test]
fn bad_lab_traces_name_line_and_field() {
    let check = |why: &str, from: &str, to: &str, message: &str| {
        assert!(LAB.contains(from), "{why}: the fixture has {from}");
        rejects(why, lab_trace::parse(&LAB.replacen(from, to, 1)), message);
    };
    let negative = "must be a whole number, 0 or more";
    check(
        "load",
        "\"active_decode_tokens\": 900",
        "\"active_decode_tokens\": -1",
        &format!("line 7: workers[2].active_decode_tokens: {negative}"),
    );
    check("epoch", "\"epoch\": 3", "\"epoch\": 3.5", &format!("line 6: workers[1].epoch: {negative}"));
    check(
        "worker",
        "\"seq\": 10, \"worker\": \"w1\"",
        "\"seq\": 10, \"worker\": \"w9\"",
        "line 10: events[0].worker: names \"w9\", which the trace does not list",
    );
    check("id", "\"r02\"", "\"r01\"", "line 24: requests[1].id: \"r01\" is used twice");
    check(
        "namespace",
        "\"seq\": 101, \"tenant\": \"acme\"",
        "\"seq\": 101, \"tenant\": \"\"",
        "line 24: requests[1].tenant: must be a string that is not empty",
    );
    check(
        "no namespace",
        "\"seq\": 101, \"tenant\": \"acme\",",
        "\"seq\": 101,",
        "line 24: requests[1].tenant: is missing",
    );
    check(
        "long",
        "\"prompt_tokens\": 330",
        "\"prompt_tokens\": 9000",
        "line 31: requests[8].prompt_tokens: is 9000, and the limit is 8192",
    );
    check(
        "field",
        "\"expected_decode_tokens\": 100",
        "\"decode\": 100",
        "line 31: requests[8].decode: is not a known field",
    );
    rejects(
        "cut",
        lab_trace::parse(&LAB[..LAB.len() / 2]).map(|_| ()),
        "line 29: object: is not JSON: EOF while parsing a string",
    );
    let request = "  {\"id\": \"r01\"";
    let many: String = (0..70)
        .map(|n| {
            LAB[LAB.find(request).expect("r01")..]
                .lines()
                .next()
                .expect("line")
                .replace("r01", &format!("x{n}"))
                + "\n"
        })
        .collect();
    let text = LAB.replacen(request, &format!("{many}{request}"), 1);
    rejects("many", lab_trace::parse(&text), "line 22: requests: is 94, and the limit is 64");
}

/// The lab trace under the default policy, last of all.
fn lab_run(mutant: Option<Mutant>) -> LabRun {
    let trace = lab_trace::parse(LAB).expect("good");
    let policies = [settings(PolicyKind::KvAware), settings(PolicyKind::CachePlusLoad)];
    lab::run_with(&trace, LabModel::default(), &policies, mutant).pop().expect("two runs")
}

fn receipt<'a>(run: &'a LabRun, id: &str) -> &'a LabReceipt {
    run.receipts.iter().find(|receipt| receipt.request_id == id).expect("the fixture has it")
}

/// The rule holds, and does not once it is broken on purpose.
#[track_caller]
fn holds(rule: impl Fn(&LabRun) -> bool, mutant: Mutant) {
    assert!(rule(&lab_run(None)), "the rule");
    assert!(!rule(&lab_run(Some(mutant))), "the mutant {mutant:?} was not noticed");
}

/// Case of a forbidden match: w2 holds ten blocks of r21, for another tenant.
#[test]
fn a_longer_prefix_of_another_tenant_is_rejected_before_scoring() {
    let rule = |run: &LabRun| {
        let (theirs, own) = (receipt(run, "r21"), receipt(run, "r22"));
        let w2 = |receipt: &LabReceipt| receipt.candidates[1].clone();
        theirs.outcome == Outcome::Cold
            && w2(theirs).hits == 0
            && w2(theirs).rejected_other_namespace == 12
            && own.outcome == Outcome::Hit
            && w2(own).hits == 12
    };
    holds(rule, Mutant::TenantScopeRemoved);
}

#[test]
fn an_eviction_of_an_older_life_changes_nothing() {
    let rule = |run: &LabRun| receipt(run, "r17").candidates[0].claimed == 8 && run.summary.stale_events == 1;
    holds(rule, Mutant::OlderEpochAccepted);
}

/// w3 begins with 900 tokens in decode and nothing else.
#[test]
fn decode_load_is_part_of_the_price() {
    let rule = |run: &LabRun| {
        let w3 = &receipt(run, "r01").candidates[2];
        w3.load.context.0 == 900 && w3.terms.load > 0.0
    };
    holds(rule, Mutant::DecodeLoadIgnored);
}

#[test]
fn policies_start_from_clean_copies() {
    let trace = lab_trace::parse(LAB).expect("good");
    let alone = lab::run(&trace, LabModel::default(), &[settings(PolicyKind::CachePlusLoad)]);
    let alone = lab::digest(&alone[0]);
    holds(|run| lab::digest(run) == alone, Mutant::StateShared);
}

#[test]
fn receipts_hold_every_candidate() {
    let trace = lab_trace::parse(LAB).expect("good");
    holds(
        |run| run.receipts.iter().all(|receipt| lab::complete(&trace, receipt).is_ok()),
        Mutant::CandidatesDropped,
    );
}

#[test]
fn the_lab_oracle_agrees_under_every_policy_and_sees_a_mutant() {
    let trace = lab_trace::parse(LAB).expect("good");
    let policies = PolicyKind::ALL.map(settings);
    let model = LabModel::default();
    let check = |mutant| {
        let runs = lab::run_with(&trace, model, &policies, mutant);
        policies
            .iter()
            .zip(&runs)
            .try_for_each(|(settings, run)| lab_oracle::check(&trace, model, settings, run))
    };
    assert_eq!(check(None), Ok(()));
    for mutant in [
        Mutant::TenantScopeRemoved,
        Mutant::OlderEpochAccepted,
        Mutant::DecodeLoadIgnored,
        Mutant::StateShared,
        Mutant::CandidatesDropped,
    ] {
        assert!(check(Some(mutant)).is_err(), "{mutant:?}");
    }
}

#[test]
fn a_cap_sends_requests_away_and_the_oracle_agrees() {
    let mut trace = lab_trace::parse(LAB).expect("good");
    // All at once, so that something waits everywhere.
    trace.requests[..8].iter_mut().for_each(|request| request.tick = crate::units::Tick(0));
    let overload = Overload { max_queued: Some(crate::units::Tokens(100)), cold_reserve: 0.5 };
    let policies = PolicyKind::ALL.map(|policy| Settings { overload, ..settings(policy) });
    let model = LabModel { budget_ticks: 1_000, ..LabModel::default() };
    let runs = lab::run(&trace, model, &policies);
    for (settings, run) in policies.iter().zip(&runs) {
        assert_eq!(lab_oracle::check(&trace, model, settings, run), Ok(()), "{}", run.policy);
        let away = run.receipts.iter().filter(|receipt| receipt.outcome == Outcome::NoTarget).count() as u64;
        assert_eq!(run.summary.unrouted, away);
    }
    assert!(runs.iter().any(|run| run.summary.unrouted > 0), "the cap is low enough");
}

#[test]
fn lab_objects_in_any_order_give_the_same_bytes() {
    let trace = lab_trace::parse(LAB).expect("good");
    let mut value: serde_json::Value = serde_json::from_str(LAB).expect("good");
    for name in ["workers", "events", "requests"] {
        value[name].as_array_mut().expect("a list").reverse();
    }
    let other = lab_trace::parse(&value.to_string()).expect("good");
    assert_eq!(trace, other);
    let bytes = |trace| {
        lab::to_json(
            trace,
            LabModel::default(),
            Overload::default(),
            &lab::run(trace, LabModel::default(), &[Settings::default()]),
        )
    };
    assert_eq!(bytes(&trace), bytes(&other));
}
