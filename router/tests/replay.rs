//! `kv-router replay` as it is run: what it prints, what it writes, how it ends.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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
