//! `kv-router receipts`: what can be done with files of receipts.
//!
//! Reads whole files before anything is written, so that a bad line leaves
//! nothing half done.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kvrouter_core::json::fields::TraceError;
use kvrouter_core::receipts::chain::Follower;
use kvrouter_core::receipts::csv;

/// Flags of `receipts`.
#[derive(Clone, Debug, Args)]
pub struct ReceiptsFlags {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// What to do with files of receipts.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Checks that lines are whole and that each names the one before; several
    /// files must continue each other, in the order given.
    Verify {
        /// Files of receipts.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Prints receipts as CSV, a row for every candidate, once all are checked.
    Csv {
        /// Files of receipts.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

/// Why a file of receipts was refused.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptsError {
    /// It cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A line is not whole, or not the next one.
    #[error("{path}: {problem}", path = path.display())]
    Chain {
        /// The file.
        path: PathBuf,
        /// Line, field and what is wrong.
        problem: Box<TraceError>,
    },
}

/// Does it; what goes to stdout.
pub fn run(flags: &ReceiptsFlags) -> Result<String, ReceiptsError> {
    let mut follower = Follower::default();
    match &flags.action {
        Action::Verify { files } => {
            let mut text = String::new();
            for path in files {
                let before = (follower.receipts, follower.lost);
                let lines = follow(&mut follower, path)?;
                let first = lines.first().map_or(0, |line| line.sequence);
                text += &format!(
                    "{}: {} receipts from sequence {first}, {} lost; the chain holds\n",
                    path.display(),
                    follower.receipts - before.0,
                    follower.lost - before.1,
                );
            }
            let head = follower.head.unwrap_or_default();
            Ok(text + &format!("last digest {}, next sequence {}\n", head.digest, head.sequence))
        }
        Action::Csv { files } => {
            let mut text = csv::head();
            for path in files {
                follow(&mut follower, path)?.iter().for_each(|line| text += &csv::rows(line));
            }
            Ok(text)
        }
    }
}

fn follow(
    follower: &mut Follower,
    path: &Path,
) -> Result<Vec<kvrouter_core::receipts::read::Line>, ReceiptsError> {
    let read = |source| ReceiptsError::Read { path: path.to_owned(), source };
    let text = std::fs::read_to_string(path).map_err(read)?;
    let broken = |problem| ReceiptsError::Chain { path: path.to_owned(), problem: Box::new(problem) };
    follower.file(&text).map_err(broken)
}
