//! The `beside` program: see `make peers-http`.

use std::process::ExitCode;

use clap::Parser;
use kvrouter_tests::beside::{self, Options};

#[tokio::main]
async fn main() -> ExitCode {
    match beside::run(&Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("beside: {error:#}");
            ExitCode::FAILURE
        }
    }
}
