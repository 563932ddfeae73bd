//! `cargo xtask tidy`: the rules of the house that no compiler and no lint knows.
//!
//! The tables come first; a new rule is a row, or a function in [`check_source`]. Everything is read from the
//! working tree, committed or not, and each finding is one line, `path:line: what is wrong`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, iter};

use anyhow::{Context, bail};

use crate::scan::{self, Source};

/// A function fits a screen.
const FUNCTION_LINES: usize = 70;
/// A file is one notion behind a small interface.
const FILE_LINES: usize = 800;
/// In a comment above a function of more than [`FUNCTION_LINES`], with the reason behind it.
const LONG_FUNCTION: &str = "tidy: long, because ";
/// In the header of a file of more than [`FILE_LINES`], with the reason behind it.
const LONG_FILE: &str = "tidy: large, because ";

/// Words that say nothing about what a module owns.
const BANNED_MODULES: &[&str] = &["utils", "common", "helpers", "manager"];
/// A test that does not run, or that any panic satisfies, proves nothing.
const BANNED_ATTRIBUTES: &[&str] = &["ignore", "should_panic"];
/// Unfinished code is an issue, not a macro.
const BANNED_MACROS: &[&str] = &["todo", "unimplemented"];
/// Unfinished code is an issue, not a comment.
const BANNED_COMMENT: &str = "FIXME";

/// Paths that the files under a folder must not mention, and why.
const MODULE_EDGES: &[(&str, &[&str], &str)] = &[
    (
        "router/core/src/",
        &[
            "tokio",
            "tracing",
            "std::net",
            "std::fs",
            "std::env",
            "std::time::Instant",
            "std::time::SystemTime",
        ],
        "the core decides from its arguments alone: no I/O, no async, no clock, no logging",
    ),
    (
        "router/core/src/policy",
        &["crate::index", "super::index"],
        "a policy sees candidates, never the index they came from",
    ),
];

/// Crates of this workspace, and those of it they may depend on. A new crate gets its row here.
const CRATE_ARROWS: &[(&str, &[&str])] = &[
    ("kvrouter-crds", &[]),
    ("kvrouter-core", &[]),
    ("kvrouter-router", &["kvrouter-core", "kvrouter-crds"]),
    ("kvrouter-operator", &["kvrouter-crds"]),
    // A stand-in for engines that shared the router's code would share its mistakes.
    ("engine-sim", &[]),
    (
        "kvrouter-tests",
        &["kvrouter-core", "kvrouter-crds", "kvrouter-router", "kvrouter-operator", "engine-sim"],
    ),
    (
        "kvrouter-e2e",
        &["kvrouter-core", "kvrouter-crds", "kvrouter-router", "kvrouter-operator", "engine-sim"],
    ),
    // A workspace of its own beside this one.
    ("kvrouter-peers", &["kvrouter-core"]),
    ("kvrouter-prompt-peers", &["kvrouter-core", "kvrouter-crds", "kvrouter-router"]),
    ("xtask", &[]),
];

/// Each of these may be named in one file of a crate at most, which keeps its types out of all others.
const ONE_FILE_CRATES: &[&str] = &["serde_yaml"];

/// Folders whose contents are not ours.
const SKIPPED_FOLDERS: &[&str] = &["target", "out", "node_modules"];

/// One broken rule. `path` is relative to the workspace, with slashes; `line` counts from 1.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    line: usize,
    what: String,
}

pub(crate) fn run(root: &Path, arguments: &[String]) -> anyhow::Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("tidy takes no argument, got `{argument}`");
    }
    let files = read_files(root)?;
    let findings = check(&files);
    for Finding { path, line, what } in &findings {
        println!("{path}:{line}: {what}");
    }
    if !findings.is_empty() {
        bail!("tidy: {} findings in {} files", findings.len(), files.len());
    }
    println!("tidy: {} files", files.len());
    Ok(())
}

/// The text of every Rust file, manifest and document, by its path relative to `root`.
fn read_files(root: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let listing =
            fs::read_dir(root.join(&folder)).with_context(|| format!("failed to list {folder:?}"))?;
        for entry in listing {
            let entry = entry.with_context(|| format!("failed to list {folder:?}"))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = folder.join(&name);
            let is_folder =
                entry.file_type().with_context(|| format!("failed to look at {path:?}"))?.is_dir();
            if is_folder && !name.starts_with('.') && !SKIPPED_FOLDERS.contains(&name.as_str()) {
                folders.push(path);
            } else if !is_folder && (name.ends_with(".rs") || name.ends_with(".md") || name == "Cargo.toml") {
                let text = fs::read_to_string(root.join(&path))
                    .with_context(|| format!("failed to read {path:?}"))?;
                files.insert(path.to_string_lossy().replace('\\', "/"), text);
            }
        }
    }
    Ok(files)
}

fn check(files: &BTreeMap<String, String>) -> Vec<Finding> {
    // The workspace's own manifest has no package and no files.
    let is_crate = |text: &str| read_manifest(text).0.is_some();
    let manifests = || files.iter().filter(|(path, text)| path.ends_with("Cargo.toml") && is_crate(text));
    let sources: BTreeMap<&str, (&str, Source)> = files
        .iter()
        .filter(|(path, _)| path.ends_with(".rs"))
        .map(|(path, text)| (path.as_str(), (text.as_str(), Source::new(text))))
        .collect();
    let mut findings: Vec<Finding> =
        sources.iter().flat_map(|(path, (text, source))| check_source(path, text, source)).collect();
    findings.extend(manifests().flat_map(|(path, text)| check_manifest(path, text)));
    let documents = files.iter().filter(|(path, _)| path.ends_with(".md"));
    findings.extend(documents.flat_map(|(path, text)| check_tables(path, text)));
    for (manifest, _) in manifests() {
        findings.extend(check_one_file_crates(manifest, &sources));
    }
    findings
}

/// All rules that look at one Rust file.
fn check_source(path: &str, text: &str, source: &Source) -> Vec<Finding> {
    let rules =
        [check_header, check_module_name, check_functions, check_unfinished, check_attributes, check_edges];
    rules
        .iter()
        .flat_map(|rule| rule(path, text, source))
        .map(|(line, what)| Finding { path: path.to_owned(), line, what })
        .collect()
}

/// What a rule about one file reports: a line and what is wrong with it.
type Broken = (usize, String);

fn check_header(_: &str, text: &str, _: &Source) -> Vec<Broken> {
    let header: Vec<&str> = text.lines().take_while(|line| line.starts_with("//!")).collect();
    let lines = text.lines().count();
    let mut broken = Vec::new();
    if header.is_empty() {
        broken.push((1, "the file does not open with `//!`: what it owns, and what it does not".to_owned()));
    }
    if lines > FILE_LINES && !header.iter().any(|line| gives_reason(line, LONG_FILE)) {
        let advice = format!("split it, or `//! {LONG_FILE}...` in its header");
        broken.push((1, format!("{lines} lines, more than {FILE_LINES}: {advice}")));
    }
    broken
}

fn gives_reason(line: &str, marker: &str) -> bool {
    line.split_once(marker).is_some_and(|(_, reason)| !reason.trim().is_empty())
}

fn check_module_name(path: &str, _: &str, source: &Source) -> Vec<Broken> {
    let banned = |name: &&str| BANNED_MODULES.contains(name);
    let message =
        |name: &str| format!("`{name}` names no notion of the domain; name the module after what it owns");
    let in_path = path.trim_end_matches(".rs").split('/').filter(banned).map(|name| (1, message(name)));
    let inline = BANNED_MODULES.iter().flat_map(|name| {
        scan::words(&source.code, name)
            .filter(|&offset| source.code[..offset].trim_end().ends_with("mod"))
            .map(|offset| (scan::line_of(&source.code, offset), message(name)))
    });
    in_path.chain(inline).collect()
}

fn check_functions(_: &str, text: &str, source: &Source) -> Vec<Broken> {
    let lines: Vec<&str> = text.lines().collect();
    // Between the reason and the function there may be attributes and documentation, and nothing else.
    let excused = |line: usize| {
        let above = lines[..line - 1].iter().rev().map(|line| line.trim_start());
        above
            .take_while(|line| line.starts_with("//") || line.starts_with("#["))
            .any(|line| gives_reason(line, LONG_FUNCTION))
    };
    scan::functions(&source.code)
        .into_iter()
        .filter(|function| function.length > FUNCTION_LINES && !excused(function.line))
        .map(|function| {
            let scan::Function { name, line, length } = function;
            let advice = format!("split it, or `// {LONG_FUNCTION}...` above it");
            (line, format!("`{name}` has {length} lines, more than {FUNCTION_LINES}: {advice}"))
        })
        .collect()
}

fn check_unfinished(_: &str, _: &str, source: &Source) -> Vec<Broken> {
    let macros = BANNED_MACROS.iter().flat_map(|name| {
        scan::words(&source.code, name)
            .filter(|&offset| source.code[offset + name.len()..].trim_start().starts_with('!'))
            .map(move |offset| {
                (scan::line_of(&source.code, offset), format!("`{name}!`: finish it, or file an issue"))
            })
    });
    let comments = scan::words(&source.comments, BANNED_COMMENT).map(|offset| {
        (scan::line_of(&source.comments, offset), format!("`{BANNED_COMMENT}`: fix it, or file an issue"))
    });
    macros.chain(comments).collect()
}

fn check_attributes(_: &str, _: &str, source: &Source) -> Vec<Broken> {
    scan::attributes(&source.code)
        .filter_map(|(offset, text)| Some((scan::line_of(&source.code, offset), banned_attribute(text)?)))
        .map(|(line, name)| (line, format!("`#[{name}]`: such a test proves nothing")))
        .collect()
}

/// What is banned in the text of one attribute: its own name, or any word if it depends on a condition.
fn banned_attribute(text: &str) -> Option<&str> {
    let looked_at = if text.trim_start().starts_with("cfg_attr") { usize::MAX } else { 1 };
    let words = text.split(|char| !scan::is_word(char)).filter(|word| !word.is_empty());
    words.take(looked_at).find(|word| BANNED_ATTRIBUTES.contains(word))
}

fn check_edges(path: &str, _: &str, source: &Source) -> Vec<Broken> {
    MODULE_EDGES
        .iter()
        .filter(|(folder, ..)| path.starts_with(folder))
        .flat_map(|(_, banned, why)| banned.iter().zip(iter::repeat(why)))
        .filter_map(|(banned, why)| Some((scan::mention(&source.code, banned)?, banned, why)))
        .map(|(offset, banned, why)| {
            (scan::line_of(&source.code, offset), format!("mentions `{banned}`: {why}"))
        })
        .collect()
}

/// A table is its heading, a line of dashes and rows, without a gap: what stands behind a
/// gap is shown as text.
fn check_tables(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (mut is_code, mut is_table) = (false, false);
    let mut lines = text.lines().zip(1..).peekable();
    while let Some((line, number)) = lines.next() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        let is_row = !is_code && !is_fence && line.starts_with('|');
        let is_headed = lines.peek().is_some_and(|(next, _)| next.starts_with("|-"));
        if is_row && !is_table && !is_headed {
            let what = "a row without a table: close the gap above it, or give it a heading".to_owned();
            findings.push(Finding { path: path.to_owned(), line: number, what });
        }
        is_table = is_row;
    }
    findings
}

fn check_manifest(path: &str, text: &str) -> Vec<Finding> {
    let (package, dependencies) = read_manifest(text);
    let Some(package) = package else { return Vec::new() };
    let finding = |line, what| Finding { path: path.to_owned(), line, what };
    let Some((_, allowed)) = CRATE_ARROWS.iter().find(|(name, _)| *name == package) else {
        return vec![finding(1, format!("`{package}` has no row in the table of crates that tidy keeps"))];
    };
    dependencies
        .into_iter()
        .filter(|(_, name)| CRATE_ARROWS.iter().any(|(known, _)| known == name) && !allowed.contains(name))
        .map(|(line, name)| finding(line, format!("`{package}` must not depend on `{name}`")))
        .collect()
}

/// The package's name, and every dependency with its line, dev and build dependencies too.
///
/// Reads the one way in which our manifests are written, a dependency a line; not TOML in general.
fn read_manifest(text: &str) -> (Option<&str>, Vec<(usize, &str)>) {
    let (mut package, mut dependencies, mut section) = (None, Vec::new(), "");
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let name = key.split('.').next().unwrap_or(key).trim();
        if section == "package" && name == "name" {
            package = Some(value.trim().trim_matches('"'));
        } else if section.ends_with("dependencies") {
            dependencies.push((number, name));
        }
    }
    (package, dependencies)
}

/// Rules about all files of the crate whose manifest is given.
fn check_one_file_crates(manifest: &str, sources: &BTreeMap<&str, (&str, Source)>) -> Vec<Finding> {
    let folder = manifest.trim_end_matches("Cargo.toml");
    // A crate inside another's folder is not part of it.
    let is_source = |path: &str| {
        path.strip_prefix(folder)
            .is_some_and(|inside| ["src/", "tests/", "benches/"].iter().any(|own| inside.starts_with(own)))
    };
    let mut findings = Vec::new();
    for name in ONE_FILE_CRATES {
        let mentions =
            sources.iter().filter(|(path, _)| is_source(path)).filter_map(|(path, (_, source))| {
                let offset = scan::mention(&source.code, name)?;
                Some((*path, scan::line_of(&source.code, offset)))
            });
        let mentions: Vec<(&str, usize)> = mentions.collect();
        let Some(((home, _), others)) = mentions.split_first() else { continue };
        findings.extend(others.iter().map(|&(path, line)| Finding {
            path: path.to_owned(),
            line,
            what: format!("`{name}` is already used in {home}; one file of a crate talks to it"),
        }));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a small world of files; `expected` are the findings as `path:line: beginning`, in order.
    #[track_caller]
    fn check(why: &str, files: &[(&str, &str)], expected: &[&str]) {
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        let found: Vec<String> = super::check(&files)
            .iter()
            .map(|Finding { path, line, what }| format!("{path}:{line}: {what}"))
            .collect();
        let agree =
            found.len() == expected.len() && iter::zip(&found, expected).all(|(f, e)| f.starts_with(e));
        assert!(agree, "{why}\n found    {found:#?}\n expected {expected:#?}");
    }

    /// A function of `lines` lines under `above`, in a file with a header.
    fn function(above: &str, lines: usize) -> String {
        format!("//! x\n{above}fn f() {{\n{}}}\n", "\n".repeat(lines - 2))
    }

    #[test]
    fn files_open_with_a_header() {
        check("it does", &[("a.rs", "//! x\n")], &[]);
        check("an empty file", &[("a.rs", "")], &["a.rs:1: the file does not open"]);
        check("an item comment", &[("a.rs", "/// x\nfn f() {}")], &["a.rs:1: the file does not open"]);
        check("a header below the code", &[("a.rs", "mod b;\n//! x")], &["a.rs:1: the file does not open"]);
    }

    #[test]
    fn large_files_give_a_reason() {
        let file = |header: &str, lines: usize| format!("//! {header}\n{}", "\n".repeat(lines - 1));
        check("at the limit", &[("a.rs", &file("x", 800))], &[]);
        check("above it", &[("a.rs", &file("x", 801))], &["a.rs:1: 801 lines"]);
        check("with a reason", &[("a.rs", &file("tidy: large, because it is a table", 801))], &[]);
        check("without one", &[("a.rs", &file("tidy: large, because ", 801))], &["a.rs:1: 801 lines"]);
    }

    #[test]
    fn long_functions_give_a_reason() {
        check("at the limit", &[("a.rs", &function("", 70))], &[]);
        check("above it", &[("a.rs", &function("", 71))], &["a.rs:2: `f` has 71 lines"]);
        check("with a reason", &[("a.rs", &function("// tidy: long, because it is a table\n", 71))], &[]);
        check(
            "attributes between",
            &[("a.rs", &function("// tidy: long, because of x\n/// f\n#[test]\n", 71))],
            &[],
        );
        check("no reason", &[("a.rs", &function("// tidy: long, because \n", 71))], &["a.rs:3: `f` has"]);
        check(
            "too far away",
            &[("a.rs", &function("// tidy: long, because x\n\n", 71))],
            &["a.rs:4: `f` has"],
        );
    }

    #[test]
    fn nothing_is_left_unfinished() {
        check("a macro", &[("a.rs", "//! x\nfn f() { todo!() }")], &["a.rs:2: `todo!`"]);
        check("another", &[("a.rs", "//! x\nfn f() { unimplemented!() }")], &["a.rs:2: `unimplemented!`"]);
        check("a comment", &[("a.rs", "//! x\n\n/* FIXME: y */")], &["a.rs:3: `FIXME`"]);
        check(
            "only in strings and words",
            &[("a.rs", "//! todo!\nfn f() { my_todo!(\"FIXME todo!()\") }")],
            &[],
        );
    }

    #[test]
    fn tests_run_and_say_what_they_expect() {
        check("ignored", &[("a.rs", "//! x\n#[test]\n#[ignore]\nfn f() {}")], &["a.rs:3: `#[ignore]`"]);
        check(
            "with a reason",
            &[("a.rs", "//! x\n#[ignore = \"slow\"]\nfn f() {}")],
            &["a.rs:2: `#[ignore]`"],
        );
        check(
            "on some systems",
            &[("a.rs", "//! x\n#[cfg_attr(windows, ignore)]\nfn f() {}")],
            &["a.rs:2: `#[ignore]`"],
        );
        check(
            "any panic",
            &[("a.rs", "//! x\n#[should_panic(expected = \"a\")]\nfn f() {}")],
            &["a.rs:2: `#[should"],
        );
        check("other attributes", &[("a.rs", "//! #[ignore]\n#[serde(ignore)]\nfn ignore() {}")], &[]);
    }

    #[test]
    fn modules_are_named_after_what_they_own() {
        check("a file", &[("src/utils.rs", "//! x")], &["src/utils.rs:1: `utils`"]);
        check("a folder", &[("tests/common/mod.rs", "//! x")], &["tests/common/mod.rs:1: `common`"]);
        check("inline", &[("a.rs", "//! x\npub mod helpers { }")], &["a.rs:2: `helpers`"]);
        check("a longer name", &[("src/common_prefix.rs", "//! x\nuse crate::manager;")], &[]);
    }

    #[test]
    fn the_core_does_no_io() {
        let core = "router/core/src/a.rs";
        check("async", &[(core, "//! x\nuse tokio::time;")], &["router/core/src/a.rs:2: mentions `tokio`"]);
        check(
            "logs",
            &[(core, "//! x\nfn f() { tracing::info!() }")],
            &["router/core/src/a.rs:2: mentions `tracing`"],
        );
        check(
            "files",
            &[(core, "//! x\nuse std::{fmt, fs::File};")],
            &["router/core/src/a.rs:2: mentions `std::fs`"],
        );
        check(
            "sockets",
            &[(core, "//! x\nuse std::net::IpAddr;")],
            &["router/core/src/a.rs:2: mentions `std::net`"],
        );
        check(
            "variables",
            &[(core, "//! x\nuse std::env;")],
            &["router/core/src/a.rs:2: mentions `std::env`"],
        );
        check(
            "a clock",
            &[(core, "//! x\nuse std::time::Instant;")],
            &["router/core/src/a.rs:2: mentions `std::time::Instant`"],
        );
        check(
            "a wall clock",
            &[(core, "//! x\nuse std::time::{Duration, SystemTime};")],
            &["router/core/src/a.rs:2: mentions"],
        );
        check("a duration", &[(core, "//! x, not tokio\nuse std::time::Duration;")], &[]);
        check("the shell", &[("router/src/a.rs", "//! x\nuse std::{fs, net}; use tokio::time;")], &[]);
    }

    #[test]
    fn policies_do_not_see_the_index() {
        let policy = "router/core/src/policy/kv_aware.rs";
        check(
            "from the root",
            &[(policy, "//! x\nuse crate::{index::Index, units};")],
            &["router/core/src/policy/kv_aware.rs:2: mentions"],
        );
        check(
            "from above",
            &[("router/core/src/policy.rs", "//! x\nuse super::index;")],
            &["router/core/src/policy.rs:2: mentions"],
        );
        check("others do", &[("router/core/src/trust.rs", "//! x\nuse crate::index::Index;")], &[]);
    }

    #[test]
    fn crates_depend_one_way() {
        let manifest = |name: &str, lines: &str| format!("[package]\nname = \"{name}\"\n{lines}");
        let core = manifest(
            "kvrouter-core",
            "[dependencies]\nserde.workspace = true\nkvrouter-crds.workspace = true",
        );
        check(
            "the core stands alone",
            &[("router/core/Cargo.toml", &core)],
            &["router/core/Cargo.toml:5: `kvrouter-core` must not"],
        );
        let crds = manifest("kvrouter-crds", "[dev-dependencies]\nkvrouter-core = { workspace = true }");
        check(
            "dev dependencies too",
            &[("crds/Cargo.toml", &crds)],
            &["crds/Cargo.toml:4: `kvrouter-crds` must not"],
        );
        let operator = manifest("kvrouter-operator", "[dependencies]\nkvrouter-router.workspace = true");
        check(
            "not each other",
            &[("operator/Cargo.toml", &operator)],
            &["operator/Cargo.toml:4: `kvrouter-operator` must not"],
        );
        let router = manifest(
            "kvrouter-router",
            "[dependencies]\nkvrouter-core.workspace = true\nkvrouter-crds.workspace = true",
        );
        check("what is allowed", &[("router/Cargo.toml", &router)], &[]);
        check(
            "a new crate",
            &[("new/Cargo.toml", &manifest("new", ""))],
            &["new/Cargo.toml:1: `new` has no row"],
        );
        check(
            "the workspace",
            &[("Cargo.toml", "[workspace.dependencies]\nkvrouter-core = { path = \"x\" }")],
            &[],
        );
    }

    #[test]
    fn tables_have_no_gaps() {
        let table = "# x\n\n| a | b |\n|---|---|\n| 1 | 2 |\n";
        check("a table", &[("a.md", table)], &[]);
        check("two", &[("a.md", &format!("{table}\n{table}"))], &[]);
        let gap = format!("{table}\n| 3 | 4 |\n| 5 | 6 |\n");
        check("a gap", &[("a.md", &gap)], &["a.md:7: a row without"]);
        check("in a block of code", &[("a.md", &format!("```text\n{gap}```\n"))], &[]);
    }

    #[test]
    fn one_file_of_a_crate_talks_yaml() {
        let manifest = ("router/Cargo.toml", "[package]\nname = \"kvrouter-router\"\n");
        let yaml = "//! x\nuse serde_yaml::Value;";
        check("one", &[manifest, ("router/src/a.rs", yaml), ("router/src/b.rs", "//! serde_yaml")], &[]);
        check(
            "two",
            &[manifest, ("router/src/a.rs", yaml), ("router/src/b/c.rs", yaml)],
            &["router/src/b/c.rs:2: `serde_yaml`"],
        );
        check("two crates", &[manifest, ("router/src/a.rs", yaml), ("router/core/src/b.rs", yaml)], &[]);
        let workspace = ("Cargo.toml", "[workspace]\nmembers = [\"tests\", \"tests/engine-sim\"]\n");
        let crates = [workspace, ("tests/src/a.rs", yaml), ("tests/engine-sim/src/b.rs", yaml)];
        check("crates in a folder called tests", &crates, &[]);
    }
}
