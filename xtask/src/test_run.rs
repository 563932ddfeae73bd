//! `cargo xtask test`: the workspace's tests, and one sum over all test programs.
//!
//! `cargo test` ends each test program with a line of its own, the last of which may say `0 passed`. The sum
//! is for whoever reads only the end of a log, a person or a machine.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

/// What test programs reported, added up.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Runs the tests with `arguments` behind `cargo test --workspace`, passing their output on as it comes.
pub(crate) fn run(root: &Path, arguments: &[String]) -> anyhow::Result<()> {
    // Without --no-fail-fast the programs behind the first failure are neither run nor counted.
    let mut cargo = Command::new("cargo")
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(arguments)
        .current_dir(root)
        .stdout(Stdio::piped())
        .spawn()
        .context("failed to start cargo")?;
    let output = cargo.stdout.take().context("cargo has no standard output")?;
    let mut counts = Counts::default();
    for line in BufReader::new(output).lines() {
        let line = line.context("failed to read the output of cargo test")?;
        counts.add(&line);
        println!("{line}");
    }
    let status = cargo.wait().context("failed to wait for cargo test")?;
    println!("{}", counts.line());
    ensure!(status.success(), "cargo test failed: {status}");
    ensure!(counts.passed > 0, "no test ran");
    Ok(())
}

impl Counts {
    /// Adds a line if it is the last one of a test program:
    /// `test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
    fn add(&mut self, line: &str) {
        let Some((_, result)) = line.split_once("test result: ") else { return };
        let Some((_, counts)) = result.split_once(". ") else { return };
        for count in counts.split("; ") {
            match count.split_once(' ') {
                Some((number, "passed")) => self.passed += number.parse().unwrap_or(0),
                Some((number, "failed")) => self.failed += number.parse().unwrap_or(0),
                Some((number, "ignored")) => self.ignored += number.parse().unwrap_or(0),
                _ => {}
            }
        }
    }

    fn line(&self) -> String {
        let skipped = if self.ignored == 0 { String::new() } else { format!(", {} skipped", self.ignored) };
        format!("{} passed, {} failed{skipped}", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, lines: &[&str], expected: &str) {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.add(line));
        assert_eq!(counts.line(), expected, "{why}");
    }

    #[test]
    fn sums_the_closing_lines() {
        let ok =
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        let bad = "test result: FAILED. 1 passed; 2 failed; 4 ignored; 0 measured; 9 filtered out";
        check("nothing ran", &[], "0 passed, 0 failed");
        check("one program", &["running 3 tests", "test a ... ok", ok], "3 passed, 0 failed");
        check("two programs", &[ok, ok], "6 passed, 0 failed");
        check("a failing one", &[ok, bad], "4 passed, 2 failed, 4 skipped");
        check(
            "other lines that count",
            &["30 passed; 0 failed", "test result of mine: 3 passed"],
            "0 passed, 0 failed",
        );
    }
}
