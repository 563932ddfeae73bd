//! The demo: the same conversations through four policies, on simulated engines and a real router.
//!
//! [`workload`] makes the conversations from a seed, [`fleet`] starts the programs, [`mod@drive`] talks
//! to the router and takes times, [`results`] adds up and judges, [`picture`] draws. Every policy
//! gets engines and a router of its own, so that none inherits a warm cache.

pub mod drive;
pub mod fleet;
pub mod manifests;
pub mod picture;
pub mod results;
pub mod workload;

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;

use crate::client::Client;
use drive::{Reach, drive, progress};
use fleet::{Events, Fleet, Nats};
use results::{Policy, PolicyResult};
use workload::{Shape, Workload};

/// Four routing policies, the same conversations, one table.
#[derive(Clone, Debug, Parser)]
#[command(name = "demo")]
pub struct Options {
    /// Leaves the last router and its engines running until Ctrl-C, and prints requests to try.
    #[arg(long)]
    pub keep: bool,
    /// A nats-server program: events go over NATS and bridges instead of straight to the router.
    #[arg(long, value_name = "PROGRAM")]
    pub nats: Option<PathBuf>,
    /// Seed of the conversations.
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Where table, picture and logs go.
    #[arg(long, default_value = "out/demo", value_name = "FOLDER")]
    pub out: PathBuf,
}

/// Runs the whole demo. Fails when a request fails, or when a cache-aware policy does not come out
/// ahead.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let logs = options.out.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("failed to create {}", logs.display()))?;
    let shape = Shape::default();
    let workload = Workload::new(&shape, options.seed);
    let nats = match &options.nats {
        Some(program) => Some(Nats::start(program, &logs).await?),
        None => None,
    };
    introduce(options, &shape, &workload, nats.as_ref());

    let mut all = Vec::new();
    let mut last = None;
    for policy in Policy::ALL {
        // The fleet before this one ends here, so that two never share the machine.
        drop(last.take());
        let events = nats.as_ref().map_or(Events::Zmq, |nats| Events::Nats(nats.url.clone()));
        let fleet = Fleet::start(policy, &events, &logs).await?;
        all.push(measure(policy, &fleet, &workload).await?);
        last = Some(fleet);
    }
    results::write_json(&options.out.join("results.json"), options.seed, &shape, &all)?;
    picture::draw(&options.out.join("demo.svg"), options.seed, &all)?;
    println!("\n{}", results::table(&all));
    println!("{}", results::conclusion(&all));
    let judged = results::judge(&all);
    if judged.is_ok() {
        look_next(options);
    }
    if let Some(fleet) = last.filter(|_| options.keep) {
        println!("{}", fleet.things_to_try());
        // Ctrl-C ends the demo from outside, which ends the fleet too.
        tokio::signal::ctrl_c().await.context("failed to wait for Ctrl-C")?;
        println!("\nStopped.");
    }
    judged
}

fn introduce(options: &Options, shape: &Shape, workload: &Workload, nats: Option<&Nats>) {
    println!(
        "kvrouter demo: the same {} conversations through four policies, about 25 s each\n",
        shape.conversations
    );
    println!(
        "  workload  {} requests, {} conversations at a time, {} to {} turns each (seed {});",
        workload.requests(),
        shape.concurrent,
        shape.turns.0,
        shape.turns.1,
        options.seed
    );
    println!("            each user waits for the answer, thinks, and goes on; the conversations");
    println!("            share {} long system prompts", shape.systems);
    println!(
        "  engines   {} x engine-sim, which speaks as vLLM 0.33 does: a prefix cache of",
        fleet::ENGINES
    );
    println!(
        "            {} tokens each, {} prefill tokens per second",
        results::thousands(u64::from(fleet::PAGES * fleet::PAGE_TOKENS)),
        results::thousands(fleet::PREFILL_TOKENS_PER_SECOND)
    );
    match nats {
        Some(nats) => println!("  events    over NATS at {}, one kv-router bridge per engine", nats.url),
        None => println!("  events    over ZMQ, straight from the engines to the router"),
    }
    println!("  files     {}\n", options.out.display());
}

/// Drives the workload through one router.
async fn measure(policy: Policy, fleet: &Fleet, workload: &Workload) -> anyhow::Result<PolicyResult> {
    let name = policy.label();
    println!("{name:<16} {}", fleet.addresses());
    let bar = progress(name, workload)?;
    let client = Client::new();
    let driven = drive(&client, &[fleet.url()], Reach::Kept, name, workload, &bar).await;
    bar.finish_and_clear();
    let driven = driven.with_context(|| format!("{name} failed; see {}", fleet.router_log().display()))?;
    let per_worker = fleet.engines().requests(&client).await?;
    let result = PolicyResult::new(policy.label(), &driven, per_worker);
    println!("{name:<16} {} requests in {:.1} s", result.requests, result.seconds);
    Ok(result)
}

fn look_next(options: &Options) {
    println!("Look next:");
    println!("  {}  the picture", options.out.join("demo.svg").display());
    println!("  {}  the numbers", options.out.join("results.json").display());
    println!(
        "  {}  why each request went where it went: lines with `pick`",
        options.out.join("logs").display()
    );
    println!("  README.md  what the router does, and what is not there yet");
    if !options.keep {
        println!("  make demo KEEP=1  leaves the last router running, with requests to try");
    }
    if options.nats.is_none() {
        println!("  make demo NATS=1  the same with events over a real NATS server");
    }
}
