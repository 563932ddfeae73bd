//! `make parity`: our token ids beside the engines' for real models.
//!
//! Takes a folder with one model per folder in it, prints a row per model and
//! engine, and fails where a single id differs.

mod compare;

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(models) = std::env::args().nth(1).map(PathBuf::from) else {
        eprintln!("usage: parity MODELS");
        return ExitCode::FAILURE;
    };
    let entries = std::fs::read_dir(&models).expect("the folder can be read");
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    println!(
        "{:<14} {:<7} {:>6} {:>8} {:>10} {:>8}  refused for",
        "model", "engine", "equal", "refused", "different", "invalid"
    );
    let mut failed = false;
    for folder in folders {
        let name = folder.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        for engine in compare::ENGINES {
            let Some(row) = compare::compare(&name, &folder, engine) else { continue };
            let refused: usize = row.refused.values().map(Vec::len).sum();
            let reasons: Vec<String> =
                row.refused.iter().map(|(reason, cases)| format!("{reason} {}", cases.len())).collect();
            println!(
                "{name:<14} {:<7} {:>6} {refused:>8} {:>10} {:>8}  {}",
                engine.1,
                row.equal,
                row.different.len(),
                row.invalid,
                reasons.join(", ")
            );
            row.different.iter().for_each(|case| eprintln!("  different: {case}"));
            if std::env::args().any(|argument| argument == "--refused") {
                let all = row
                    .refused
                    .iter()
                    .flat_map(|(reason, cases)| cases.iter().map(move |case| (reason, case)));
                all.for_each(|(reason, case)| eprintln!("  {reason}: {case}"));
            }
            failed |= !row.different.is_empty();
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
