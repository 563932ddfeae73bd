//! The `engine-sim` program: starts one engine, says where it listens in one line of JSON, and
//! serves until it is told to stop.

use std::io::Write as _;

use clap::Parser as _;
use engine_sim::{Config, EngineSim};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = Config::parse();
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let mut terminate = signal(SignalKind::terminate())?;
    let engine = EngineSim::start(config).await?;
    let ready = serde_json::json!({
        "http": engine.http_addr().to_string(),
        "kv_events": engine.kv_event_endpoints(),
        "replay": engine.replay_endpoints(),
        "transfer": engine.transfer_addr().map(|address| address.to_string()),
    });
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{ready}")?;
    stdout.flush()?;
    tokio::select! {
        _ = terminate.recv() => {}
        result = tokio::signal::ctrl_c() => result?,
    }
    engine.stop().await;
    Ok(())
}
