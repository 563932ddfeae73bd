//! The `kv-router` program: reads settings, serves, drains.

use std::process::ExitCode;

use clap::Parser;
use kvrouter_router::config::{Cli, Command, ServeConfig};
use kvrouter_router::lab;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

/// Exit code for settings that cannot be used.
const BAD_SETTINGS: u8 = 2;
/// Exit code for files that cannot be used.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Command::Serve(flags) => {
            init_logs(flags.log_json);
            match ServeConfig::load(&flags) {
                Ok(config) => run(kvrouter_router::serve::run(config)),
                Err(error) => {
                    eprintln!("kv-router: {error}");
                    ExitCode::from(BAD_SETTINGS)
                }
            }
        }
        Command::Bridge(flags) => {
            init_logs(flags.log_json);
            match kvrouter_router::feed::bridge::Settings::of(&flags) {
                Ok(settings) => run(kvrouter_router::feed::bridge::run(settings)),
                Err(error) => {
                    eprintln!("kv-router: {error}");
                    ExitCode::from(BAD_SETTINGS)
                }
            }
        }
        Command::Replay(flags) => match kvrouter_router::replay::run(&flags) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error, error.exit_code()),
        },
        Command::Tokenize(flags) => match kvrouter_router::prompt::trace::run(&flags) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error, error.exit_code()),
        },
        Command::Lab(flags) => lab(&flags),
        Command::Study(flags) => match kvrouter_router::study::run(&flags) {
            Ok((table, missed)) => {
                print!("{table}");
                missed.iter().for_each(|bar| eprintln!("kv-router: {bar}"));
                if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => failed(&error, error.exit_code()),
        },
        Command::Receipts(flags) => match kvrouter_router::receipts::command::run(&flags) {
            Ok(text) => {
                print!("{text}");
                ExitCode::SUCCESS
            }
            // It reads files and does nothing else.
            Err(error) => failed(&error, BAD_INPUT),
        },
    }
}

/// Says what was wrong, in one line.
fn failed(error: &(dyn std::error::Error + 'static), code: u8) -> ExitCode {
    eprintln!("kv-router: {}", kvrouter_router::chain(error));
    ExitCode::from(code)
}

/// Serves until Ctrl-C, or writes a file.
fn lab(flags: &lab::LabFlags) -> ExitCode {
    if let Some(path) = &flags.export {
        return match lab::export(flags, path) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error, error.exit_code()),
        };
    }
    let stop = CancellationToken::new();
    let asked = stop.clone();
    run(async move {
        tokio::spawn(async move {
            // Without a handler the signal ends the program by itself.
            if tokio::signal::ctrl_c().await.is_ok() {
                asked.cancel();
            }
        });
        let announce = |address| println!("lab: http://{address}/");
        Ok(lab::serve(flags, stop, announce).await?)
    })
}

fn run(work: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("kv-router: failed to start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv-router: {error:#}");
            let code = error.downcast_ref::<lab::LabError>().map_or(1, lab::LabError::exit_code);
            ExitCode::from(code)
        }
    }
}

/// Our own state changes; the tokenizer's tables and every attempt to reach a
/// broker or an API server are of no interest here.
const DEFAULT_LOGS: &str = "info,tk_encode=warn,async_nats=error,kube=off";

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
