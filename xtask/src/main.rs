//! Automation longer than a line: `cargo xtask NAME`.
//!
//! What make, cargo and a script of three lines can do stays with them. Commands print for people and leave
//! with a non-zero code when something is wrong.

mod scan;
mod test_run;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

/// One command: its name, what it is for, what it runs with the arguments behind its name.
type Command = (&'static str, &'static str, fn(&Path, &[String]) -> anyhow::Result<()>);

const COMMANDS: [Command; 2] = [
    ("tidy", "checks the rules of the house that no compiler knows (see CONTRIBUTING.md)", tidy::run),
    ("test", "runs `cargo test --workspace ARGS`, then sums all test programs on one line", test_run::run),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        print!("{}", list());
        return ExitCode::SUCCESS;
    };
    let Some((_, _, run)) = COMMANDS.iter().find(|(known, ..)| known == name) else {
        eprint!("no command `{name}`; there are\n{}", list());
        return ExitCode::from(2);
    };
    match run(workspace_root(), rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn list() -> String {
    COMMANDS.iter().map(|(name, purpose, _)| format!("cargo xtask {name:<6} {purpose}\n")).collect()
}

/// The folder that holds the workspace: the parent of this crate's, as `cargo
/// run` says it now. Clones may share built files, this program among them.
#[allow(clippy::disallowed_methods, reason = "no setting: cargo says where it runs us from")]
fn workspace_root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let here =
            std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        Path::new(&here).parent().expect("this crate lies inside the workspace").to_owned()
    })
}
