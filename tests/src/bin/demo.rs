//! The `demo` program: see `make demo`.

use std::process::ExitCode;

use clap::Parser;
use kvrouter_tests::demo::{self, Options};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    match until_told_to_stop(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the demo, or drops it and with it all it started.
async fn until_told_to_stop(options: Options) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        // The demo first: with --keep, Ctrl-C is how it ends well.
        biased;
        result = demo::run(&options) => result,
        _ = terminate.recv() => anyhow::bail!("told to stop"),
        result = tokio::signal::ctrl_c() => {
            result?;
            anyhow::bail!("interrupted")
        }
    }
}
