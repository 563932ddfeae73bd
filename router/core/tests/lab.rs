//! The committed lab trace under every shipped policy, against the committed
//! output. `UPDATE_EXPECT=1` writes it anew.

#![allow(clippy::disallowed_methods, reason = "a test that reads its own switch")]

use std::fmt::Write;
use std::path::Path;

use kvrouter_core::policy::{Overload, PolicyKind, Settings};
use kvrouter_core::replay::lab::Mutant;
use kvrouter_core::replay::{lab, lab_trace};

#[test]
fn the_lab_trace_gives_the_expected_output() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/traces");
    let text = std::fs::read_to_string(folder.join("lab.json")).expect("the fixture");
    let trace = lab_trace::parse(&text).expect("good");
    let policies = PolicyKind::ALL.map(|policy| Settings { policy, ..Settings::default() });
    let runs = lab::run(&trace, lab::LabModel::default(), &policies);
    let mut found = String::new();
    for run in &runs {
        writeln!(found, "{}\n  {:?}", run.policy, run.summary).expect("a string");
        for receipt in &run.receipts {
            let hits: Vec<u64> = receipt.candidates.iter().map(|candidate| candidate.hits).collect();
            let others: Vec<u64> =
                receipt.candidates.iter().map(|candidate| candidate.rejected_other_namespace).collect();
            let costs: Vec<f64> = receipt.candidates.iter().map(|candidate| candidate.terms.cost).collect();
            writeln!(
                found,
                "  {} {:>5} -> {} {:?} hits {hits:?} rejected {others:?} costs {costs:.1?} first byte {}",
                receipt.request_id,
                receipt.tick,
                receipt.chosen.as_ref().expect("no cap"),
                receipt.outcome,
                receipt.first_byte_tick.expect("no cap")
            )
            .expect("a string");
        }
    }
    let json = lab::to_json(&trace, lab::LabModel::default(), Overload::default(), &runs);
    writeln!(found, "canonical JSON: {} bytes, its digest field: {}", json.len(), digest(&json))
        .expect("a string");
    let path = folder.join("lab.expected.txt");
    if std::env::var("UPDATE_EXPECT").is_ok() {
        std::fs::write(&path, &found).expect("the expected output is writable");
    }
    let expected = std::fs::read_to_string(&path).expect("the expected output");
    assert_eq!(found, expected, "run with UPDATE_EXPECT=1 if the change is meant");
}

/// The page of `router/web` must see each mutant as a difference: its tests read
/// the ledgers that stand here.
#[test]
fn the_ledgers_of_the_mutants_are_as_committed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/traces");
    let text = std::fs::read_to_string(folder.join("lab.json")).expect("the fixture");
    let trace = lab_trace::parse(&text).expect("good");
    // State is shared with the policy before; the others are seen in the last one.
    let policies = [PolicyKind::KvAware, PolicyKind::CachePlusLoad]
        .map(|policy| Settings { policy, ..Settings::default() });
    for (name, mutant) in [
        ("tenant-scope-removed", Mutant::TenantScopeRemoved),
        ("older-epoch-accepted", Mutant::OlderEpochAccepted),
        ("decode-load-ignored", Mutant::DecodeLoadIgnored),
        ("state-shared", Mutant::StateShared),
        ("candidates-dropped", Mutant::CandidatesDropped),
    ] {
        let model = lab::LabModel::default();
        let runs = lab::run_with(&trace, model, &policies, Some(mutant));
        let found = lab::to_json(&trace, model, Overload::default(), &runs[1..]);
        let path = folder.join("lab-mutants").join(format!("{name}.json"));
        if std::env::var("UPDATE_EXPECT").is_ok() {
            std::fs::write(&path, &found).expect("the ledger is writable");
        }
        assert_eq!(found, std::fs::read_to_string(&path).expect("the ledger"), "{name}");
    }
}

fn digest(json: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(json).expect("JSON");
    value["digest"].as_str().expect("a digest").to_owned()
}
