//! `kv-router replay` as it is run: what it prints, what it writes, how it ends.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvrouter_core::ids::{Epoch, Target, WorkerId};
use kvrouter_core::policy::decode_demand::Demand;
use kvrouter_core::policy::field::Field;
use kvrouter_core::policy::price::Prices;
use kvrouter_core::policy::tie::Ties;
use kvrouter_core::policy::{Candidate, Evidence, Load, PickRequest, Settings, choose};
use kvrouter_core::receipts::Draft;
use kvrouter_core::receipts::chain::Head;
use kvrouter_core::trust::{Reason, State, Verdict};
use kvrouter_core::units::{BlockSize, TierHits, Tokens};

/// Four turns of two conversations.
const TURNS: &str = r#"{"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]}
{"timestamp": 100, "input_length": 1200, "output_length": 20, "hash_ids": [1, 4, 5]}
{"timestamp": 4000, "input_length": 1700, "output_length": 20, "hash_ids": [1, 2, 3, 7]}
{"timestamp": 4100, "input_length": 1700, "output_length": 20, "hash_ids": [1, 4, 5, 9]}
"#;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/traces/lab.json")
}

fn replay(trace: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-router"));
    command.arg("replay").arg("--trace").arg(trace).args(arguments);
    command.output().expect("kv-router runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn all_outputs_are_written_and_repeat() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("turns.jsonl");
    std::fs::write(&trace, TURNS).expect("written");
    let run = |number: usize| {
        let path = |kind: &str| folder.path().join(format!("{number}.{kind}")).to_string_lossy().into_owned();
        let (json, csv, plot) = (path("json"), path("csv"), path("svg"));
        let arguments = ["--workers", "2", "--oracle", "--json", &json, "--csv", &csv, "--plot", &plot];
        let output = replay(&trace, &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let read = |path: &str| std::fs::read_to_string(path).expect("written");
        (text(&output.stdout), read(&json), read(&csv), read(&plot))
    };
    let (table, json, csv, plot) = run(1);
    assert!(
        table.contains("modelled") && table.contains("round-robin") && table.contains("dynamo"),
        "{table}"
    );
    assert!(table.ends_with("24 assignments of our policies recomputed, all equal\n"), "{table}");
    assert!(json.contains("\"digest\"") && csv.lines().count() == 12 && plot.starts_with("<svg"));
    assert_eq!((table, json, csv, plot), run(2), "the same bytes again");
}

#[test]
fn the_lab_trace_is_replayed_with_its_oracle() {
    let output = replay(&fixture(), &["--oracle"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).ends_with("oracle: 144 assignments recomputed, all equal\n"));
}

#[test]
fn bad_input_ends_with_2_names_its_place_and_writes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("bad.jsonl");
    let json = folder.path().join("out.json");
    let check = |why: &str, content: &str, arguments: &[&str], message: &str| {
        std::fs::write(&trace, content).expect("written");
        let json = json.to_string_lossy();
        let output = replay(&trace, &[&["--json", &*json], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{why}");
        assert!(text(&output.stderr).trim_end().ends_with(message), "{why}: {}", text(&output.stderr));
        let files = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(files, 1, "{why}: only the trace is there");
    };
    let place = "bad.jsonl: line 2: ";
    check(
        "truncated",
        &TURNS[..120],
        &[],
        &format!("{place}object: is not JSON: EOF while parsing an object"),
    );
    let negative = TURNS.replacen("100, \"input_length\": 1200", "100, \"input_length\": -1", 1);
    check("negative", &negative, &[], &format!("{place}input_length: must be a whole number, 0 or more"));
    let unchained = TURNS.replacen("[1, 4, 5]", "[4, 1, 5]", 1);
    let message = format!(
        "{place}hash_ids: block 1 follows 4 here and nothing on an earlier line: the hashes do not chain"
    );
    check("chain", &unchained, &[], &message);
    check("policy", TURNS, &["--policies", "fast"], "--policies: no policy is called \"fast\"");
    check("rate", TURNS, &["--rate", "0"], "--rate: must be between 0.001 and 1000");
    check("workers", TURNS, &["--workers", "0"], "--workers: must be between 1 and 1024");
}

/// A chain of decisions by the code that serves, a gap among them.
fn receipts() -> String {
    let mut head = Head::default();
    let mut text = String::new();
    for number in 0..6u64 {
        text += &decision(number, &mut head);
        text.push('\n');
        if number == 3 {
            text += &head.gap(4, 2);
            text.push('\n');
        }
    }
    text
}

fn decision(number: u64, head: &mut Head) -> String {
    let blocks: Vec<_> = (0..8).map(|block| kvrouter_core::blocks::BlockHash(number * 100 + block)).collect();
    let candidate = |place: u64| {
        let hits = TierHits { device: place * number % 5, ..TierHits::default() };
        let queued = Tokens(place * 70 * (number % 2));
        let (reason, state) = (Reason::Ok, State::Exact);
        Candidate {
            target: Target::new(WorkerId::new(format!("10.0.0.{place}:8000")), 0),
            claimed: hits,
            hits,
            predicted: 0,
            evidence: Evidence::View,
            trust: Verdict { state, reason, credited: true, epoch: Epoch(1), seq: 1, age: None },
            load: Load { queued, ..Load::default() },
            shared_active: 0,
            images_seen: 0,
            demand: Demand::default(),
        }
    };
    let candidates: Vec<Candidate> = (0..3).map(candidate).collect();
    let settings = Settings::default();
    let (id, size) = (format!("r-{number}"), BlockSize::new(16).expect("not zero"));
    let (role, prompt) = (kvrouter_core::ids::Role::Mixed, Tokens(130));
    let request =
        PickRequest { id: &id, role, prompt, blocks: &blocks, size, images: &[], session: None, choices: 1 };
    let field = Field::from(&candidates[..]);
    let choice = choose(&settings, &request, &field, None, Ties::default(), &mut Prices::default());
    let draft = Draft {
        attempt: 1,
        prompt_tokens: prompt,
        blocks: &blocks,
        field: Some(&field),
        priced: candidates.len(),
        choice: choice.as_ref(),
        ..Draft::undecided(&id, &settings, 16)
    };
    head.receipt(&draft.encode().decode().expect("ours"))
}

fn receipts_command(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kv-router")).arg("receipts").args(arguments).output().expect("it runs")
}

#[test]
fn receipts_are_repeated_and_other_policies_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (trace, json, csv) = (path("receipts.jsonl"), path("out.json"), path("out.csv"));
    std::fs::write(&trace, receipts()).expect("written");
    let output = replay(Path::new(&trace), &["--json", &json, "--csv", &csv]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.starts_with("6 receipts, 2 lost in gaps; all decisions made again"), "{table}");
    let own = table.lines().find(|line| line.starts_with("cache-plus-load")).expect("a row");
    assert!(own.contains(" 100.0 "), "it agrees with itself: {own}");
    assert_eq!(table.lines().count(), 2 + 1 + 6);
    let json = std::fs::read_to_string(json).expect("written");
    assert!(json.contains("\"repeated\":6") && json.contains("\"lost\":2"), "{json}");
    assert_eq!(std::fs::read_to_string(csv).expect("written").lines().count(), 1 + 6);
    let given = replay(Path::new(&trace), &["--policies", "kv-aware:overlap=20,lmetric"]);
    assert!(text(&given.stdout).contains("kv-aware:overlap=20"), "{}", text(&given.stdout));

    let verified = receipts_command(&["verify", &trace]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));
    assert!(text(&verified.stdout).contains("6 receipts from sequence 0, 2 lost; the chain holds\n"));
    let table = receipts_command(&["csv", &trace]);
    assert_eq!(text(&table.stdout).lines().count(), 1 + 6 * 3 + 1);
}

#[test]
fn bad_receipts_end_with_2_name_their_place_and_write_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("bad.jsonl");
    let json = folder.path().join("out.json").to_string_lossy().into_owned();
    let check = |why: &str, content: &str, message: &str| {
        std::fs::write(&trace, content).expect("written");
        let path = trace.to_string_lossy();
        for output in [
            replay(&trace, &["--json", &json]),
            receipts_command(&["verify", &path]),
            receipts_command(&["csv", &path]),
        ] {
            assert_eq!(output.status.code(), Some(2), "{why}: {}", text(&output.stderr));
            assert!(text(&output.stderr).contains(message), "{why}: {}", text(&output.stderr));
            assert!(output.stdout.is_empty(), "{why}: nothing half");
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "{why}");
    };
    let good = receipts();
    let lines: Vec<&str> = good.lines().collect();
    let without = [&lines[..2], &lines[3..]].concat().join("\n");
    check("left out", &without, "bad.jsonl: line 3: sequence: is 3, and 2 was expected");
    let changed = good.replacen("\"request_id\":\"r-2\"", "\"request_id\":\"r-9\"", 1);
    check("changed", &changed, "bad.jsonl: line 3: digest: is ");
    check("cut", &good[..good.len() - 50], "bad.jsonl: line 7: object: is not JSON");
    check("cut at once", &good[..90], "bad.jsonl: line 1: object: is not JSON");
    let incomplete = good.replacen("\"outcome\":", "\"outcom\":", 1);
    check("incomplete", &incomplete, "bad.jsonl: line 1: outcom: is not a known field");
}

#[test]
fn an_oracle_of_receipts_is_refused_and_not_ignored() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("receipts.jsonl");
    std::fs::write(&trace, receipts()).expect("written");
    let output = replay(&trace, &["--oracle"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--oracle: receipts have no oracle"), "{}", text(&output.stderr));
}

/// The receipt is whole and its chain holds, but no policy decides like that.
#[test]
fn a_decision_that_does_not_repeat_ends_with_1() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("receipts.jsonl");
    let lines = receipts();
    let first = lines.lines().next().expect("a line");
    let line = kvrouter_core::receipts::read::line(first, 1).expect("good");
    let kvrouter_core::receipts::read::Content::Receipt(mut receipt) = line.content else {
        panic!("a receipt")
    };
    receipt.candidates[0].terms.load += 1.0;
    std::fs::write(&trace, Head::default().receipt(&receipt) + "\n").expect("written");
    let output = replay(&trace, &[]);
    assert_eq!(output.status.code(), Some(1));
    let message = "1 of 1 recorded decisions do not repeat; receipt 0: candidates[0].terms: recorded ";
    assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
}
