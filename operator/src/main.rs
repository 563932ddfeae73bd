//! The `kv-router-operator` program: reads settings, then runs or renders.

use std::process::ExitCode;

use clap::Parser;
use kvrouter_operator::config::{Cli, Command, RenderFlags};
use kvrouter_operator::{chain, check, render, run};
use tracing_subscriber::EnvFilter;

/// Exit code for settings and manifests that cannot be used.
const BAD_SETTINGS: u8 = 2;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(flags) => {
            init_logs(flags.log_json);
            match flags.config() {
                Ok(config) => in_runtime(run::run(config)),
                Err(error) => complain([error.to_string()]),
            }
        }
        Command::Render(flags) => print(&flags),
        Command::Check(flags) => in_runtime(check::check(&flags)),
    }
}

fn in_runtime<E: std::error::Error + 'static>(work: impl Future<Output = Result<(), E>>) -> ExitCode {
    // Two threads: the operator waits most of its time, and each costs memory.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("kv-router-operator: failed to start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv-router-operator: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn print(flags: &RenderFlags) -> ExitCode {
    if let Err(error) = flags.children.check() {
        return complain([error.to_string()]);
    }
    match render::render(flags) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(complaints) => complain(complaints),
    }
}

fn complain(complaints: impl IntoIterator<Item = String>) -> ExitCode {
    for complaint in complaints {
        eprintln!("kv-router-operator: {complaint}");
    }
    ExitCode::from(BAD_SETTINGS)
}

/// Our own state changes; what libraries do is of no interest here. `kube_runtime`
/// warns of each attempt to watch without the right, of which we tell once.
const DEFAULT_LOGS: &str = "info,kube=warn,kube_runtime=error,kube_client=warn,tower=warn,hyper=warn";

/// Logs go to stderr; `RUST_LOG` chooses what.
fn init_logs(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_LOGS));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        logs.json().flatten_event(true).init();
    } else {
        logs.with_ansi(false).init();
    }
}
