//! Routers side by side over HTTP: the demo's conversations through each, and what each costs.
//!
//! [`contenders`] starts them, each with its own defaults, [`hop`] measures what a router adds to a
//! request. All stand before the same simulated engines. Nothing here passes or fails: it is a
//! measurement, and the peers' releases are theirs to change.

pub mod contenders;
pub mod hop;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Parser;
use serde::Serialize;
use serde_json::json;

use crate::client::Client;
use crate::demo::drive::{Reach, drive, progress};
use crate::demo::fleet::{self, Engines};
use crate::demo::results::{PolicyResult, thousands};
use crate::demo::workload::{Shape, Workload};
use contenders::Contender;

/// Our router and others: what a hop costs, and the same conversations through each.
#[derive(Clone, Debug, Parser)]
#[command(name = "beside")]
pub struct Options {
    /// Folder of the other routers' programs: `sglang-router`, `smg`, `vllm-router`.
    #[arg(long, value_name = "FOLDER")]
    pub programs: PathBuf,
    /// Rounds of conversations, each with texts of its own.
    #[arg(long, default_value_t = 3)]
    pub rounds: u64,
    /// Where tables and logs go.
    #[arg(long, default_value = "out/peers", value_name = "FOLDER")]
    pub out: PathBuf,
}

/// What the conversations are led through.
#[derive(Clone, Copy, Debug)]
struct Scene {
    name: &'static str,
    /// Routers of a kind.
    routers: usize,
    /// How users reach them.
    reach: Reach,
    /// Pages of an engine's cache.
    pages: u32,
    /// Times as many conversations at a time as in the demo.
    crowd: usize,
}

/// All, plainest first.
const SCENES: [Scene; 5] = [
    Scene { name: "one router", routers: 1, reach: Reach::Kept, pages: fleet::PAGES, crowd: 1 },
    Scene { name: "two, kept", routers: 2, reach: Reach::Kept, pages: fleet::PAGES, crowd: 1 },
    Scene { name: "two, in turn", routers: 2, reach: Reach::InTurn, pages: fleet::PAGES, crowd: 1 },
    Scene { name: "two, kept, small caches", routers: 2, reach: Reach::Kept, pages: 500, crowd: 1 },
    Scene {
        name: "two, kept, twice the users",
        routers: 2,
        reach: Reach::Kept,
        pages: fleet::PAGES,
        crowd: 2,
    },
];

/// What a router achieved in a scene, one entry per round.
#[derive(Clone, Debug, Serialize)]
struct Talked {
    scene: &'static str,
    router: &'static str,
    rounds: Vec<PolicyResult>,
}

/// Measures all, and prints a table of hops and one for each scene.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let logs = options.out.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("failed to create {}", logs.display()))?;
    let hops = hop::measure(&options.programs, &logs).await?;
    println!("{}", hop::table(&hops));
    let mut talked = Vec::new();
    for scene in SCENES {
        let rows = talk(scene, options, &logs).await?;
        println!("{}", table(&rows));
        talked.extend(rows);
    }
    let path = options.out.join("http.json");
    let all = json!({ "hops": hops, "conversations": talked });
    fs::write(&path, format!("{all:#}\n")).with_context(|| format!("failed to write {}", path.display()))
}

/// Lets contenders serve the conversations of every round, each with new engines.
async fn talk(scene: Scene, options: &Options, logs: &Path) -> anyhow::Result<Vec<Talked>> {
    let contenders = Contender::DISTINCT;
    let of =
        |contender: Contender| Talked { scene: scene.name, router: contender.label(), rounds: Vec::new() };
    let mut all: Vec<Talked> = contenders.into_iter().map(of).collect();
    let mut shape = Shape::default();
    shape.concurrent *= scene.crowd;
    shape.conversations *= scene.crowd;
    for round in 0..options.rounds {
        let workload = Workload::new(&shape, 100 + round);
        // Whoever begins is another one each time.
        for at in 0..contenders.len() {
            let at = (at + round as usize) % contenders.len();
            all[at].rounds.push(converse(scene, contenders[at], &workload, options, logs).await?);
        }
    }
    Ok(all)
}

async fn converse(
    scene: Scene,
    contender: Contender,
    workload: &Workload,
    options: &Options,
    logs: &Path,
) -> anyhow::Result<PolicyResult> {
    let (label, pages) = (contender.label(), scene.pages.to_string());
    let engines = Engines::start(label, &["--num-pages", &pages], logs).await?;
    let mut routers = Vec::new();
    for number in 1..=scene.routers {
        let logs = logs.join(format!("router-{number}"));
        fs::create_dir_all(&logs).with_context(|| format!("failed to create {}", logs.display()))?;
        routers.push(contender.start(&options.programs, &engines, &logs).await?);
    }
    let urls: Vec<String> = routers.iter().map(|router| router.url.clone()).collect();
    let client = Client::new();
    let bar = progress(label, workload)?;
    let driven = drive(&client, &urls, scene.reach, label, workload, &bar).await;
    bar.finish_and_clear();
    let driven = driven.with_context(|| format!("{label} failed; see {}", logs.display()))?;
    Ok(PolicyResult::new(label, &driven, engines.requests(&client).await?))
}

fn table(all: &[Talked]) -> String {
    let mut text = format!(
        "{:<29} {:>9} {:>11} {:>9} {:>9} {:>9}\n{}\n",
        all.first().map_or("", |row| row.scene),
        "hit share",
        "recomputed",
        "TTFT p50",
        "TTFT p99",
        "max/mean",
        "-".repeat(81)
    );
    for Talked { router, rounds, .. } in all {
        let of = |number: fn(&PolicyResult) -> f64| median(rounds.iter().map(number).collect());
        text.push_str(&format!(
            "{router:<29} {:>7.1} % {:>11} {:>6.0} ms {:>6.0} ms {:>9.2}\n",
            of(|row| row.hit_share) * 100.0,
            thousands(of(|row| row.recomputed_tokens as f64) as u64),
            of(|row| row.first_token_p50_ms),
            of(|row| row.first_token_p99_ms),
            of(|row| row.max_over_mean),
        ));
    }
    text
}

/// The median; 0 of none.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}
