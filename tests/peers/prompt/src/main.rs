//! kvrouter's prompt path beside two tokenizers: the same conversation, in one
//! process, in alternating runs.
//!
//! `make peers` runs it. Ours goes from the bytes of a request to token ids and
//! block hashes, by the code that serves requests. `tokenizers` 0.22, which most
//! routers use, is given the rendered text and makes ids of it. `llm-tokenizer`
//! parses, renders and makes ids with both of its caches on. All three must give
//! the same ids. Prints one table, writes `out/peers/prompt.json`, and fails where
//! the lower end of an interval misses its bar.

#[path = "../../../../router/benches/conversation/mod.rs"]
mod conversation;
mod ours;
#[path = "../../src/table.rs"]
mod table;
mod theirs;

use std::hint::black_box;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use self::conversation::{Long, short};
use self::ours::Ours;
use self::table::Table;
use self::theirs::{Cached, Plain};

/// Pairs of runs behind each ratio.
const PAIRS: usize = 20;
/// Next turns of a conversation in one run.
const TURNS: usize = 5;
/// Different short chats, and how many of them make a run.
const SHORT: usize = 500;
const SHORT_RUN: usize = 2_000;

/// What is compared.
struct World {
    ours: Ours,
    plain: Plain,
    cached: Cached,
    pairs: usize,
}

/// Both sides' times, in milliseconds, of one way to compare.
#[derive(Default)]
struct Samples {
    plain: Vec<(f64, f64)>,
    cached: Vec<(f64, f64)>,
    /// Ours, less the tokenizer alone on the whole text.
    above_encode: Vec<f64>,
}

fn main() -> anyhow::Result<ExitCode> {
    let (pairs, out, model) = arguments()?;
    let world = World {
        ours: Ours::load(&model)?,
        plain: Plain::load(&model)?,
        cached: Cached::load(&model)?,
        pairs,
    };
    let mut table = Table::beside("tokenizers 0.22.2, llm-tokenizer 1.10.0");
    world.long(&mut table)?;
    world.short(&mut table);
    print!("{}", table.text());
    std::fs::create_dir_all(&out).with_context(|| format!("failed to create {}", out.display()))?;
    let file = out.join("prompt.json");
    std::fs::write(&file, table.json(pairs))
        .with_context(|| format!("failed to write {}", file.display()))?;
    Ok(if table.passes() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl World {
    /// A long conversation: its first decision, then its next turns.
    fn long(&self, table: &mut Table) -> anyhow::Result<()> {
        let (mut first, mut next) = (Samples::default(), Samples::default());
        // Tables that tokenizers keep of words are warm; the conversations that
        // are measured have another beginning, so nothing of them is known.
        let tokens = self.compare(&[Long::numbered(0).body()], 0, &mut Samples::default())?;
        for pair in 0..self.pairs {
            let mut chat = Long::numbered(pair as u64 + 1);
            self.compare(&[chat.body()], pair, &mut first)?;
            let mut turn = || {
                chat.turn();
                chat.body()
            };
            let turns: Vec<Vec<u8>> = (0..TURNS).map(|_| turn()).collect();
            self.compare(&turns, pair, &mut next)?;
        }
        let name = |what: &str| format!("{what} ({}k tokens)", tokens / 1000);
        table.ratio(name("first decision, to tokenizers"), "ms p50", &first.plain, 20.0);
        table.ratio(name("next turn, to tokenizers"), "ms p50", &next.plain, 100.0);
        table.ratio(name("first decision, to llm-tokenizer"), "ms p50", &first.cached, 3.0);
        table.ratio(name("next turn, to llm-tokenizer"), "ms p50", &next.cached, 3.0);
        table.limit("first decision above encode alone", "ms p50", median(first.above_encode), None, 2.0);
        let turns = next.plain.iter().map(|(ours, _)| *ours).collect();
        table.limit("next turn", "ms p50", median(turns), None, 1.0);
        Ok(())
    }

    /// Everybody on all of `bodies`, in an order that alternates; samples are
    /// medians. How many tokens the last one has.
    fn compare(&self, bodies: &[Vec<u8>], pair: usize, samples: &mut Samples) -> anyhow::Result<usize> {
        let texts: Vec<String> = bodies.iter().map(|body| self.ours.text(body)).collect();
        let ours = || -> Vec<_> { bodies.iter().map(|body| timed(|| self.ours.ids(body))).collect() };
        let plain = || -> Vec<_> { texts.iter().map(|text| timed(|| self.plain.ids(text))).collect() };
        let cached = || -> Vec<_> { bodies.iter().map(|body| timed(|| self.cached.ids(body))).collect() };
        let (ours, plain, cached) = if pair.is_multiple_of(2) {
            let ours = ours();
            (ours, plain(), cached())
        } else {
            let (cached, plain) = (cached(), plain());
            (ours(), plain, cached)
        };
        for ((ours, plain), cached) in ours.iter().zip(&plain).zip(&cached) {
            ensure!(plain.1.as_ref().is_ok_and(|ids| *ids == ours.1), "tokenizers has other ids");
            ensure!(cached.1.as_ref().is_ok_and(|ids| *ids == ours.1), "llm-tokenizer has other ids");
        }
        let alone = median(texts.iter().map(|text| timed(|| self.ours.encode(text)).0).collect());
        let time = median(ours.iter().map(|run| run.0).collect());
        samples.plain.push((time, median(plain.iter().map(|run| run.0).collect())));
        samples.cached.push((time, median(cached.iter().map(|run| run.0).collect())));
        samples.above_encode.push(time - alone);
        Ok(ours.last().map_or(0, |run| run.1.len()))
    }

    /// Short chats that were seen before.
    fn short(&self, table: &mut Table) {
        let bodies: Vec<Vec<u8>> = (0..SHORT).map(short).collect();
        let run =
            || timed(|| (0..SHORT_RUN).map(|at| self.ours.ids(&bodies[at % SHORT]).len()).sum::<usize>());
        run();
        let each = (0..self.pairs).map(|_| run().0 * 1000.0 / SHORT_RUN as f64).collect();
        table.limit("2 KiB chat, warm", "us each", median(each), None, 50.0);
    }
}

/// Milliseconds, and what came of it.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let made = black_box(work());
    (started.elapsed().as_secs_f64() * 1000.0, made)
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// `[--pairs N] [--out FOLDER] --model FOLDER`.
fn arguments() -> anyhow::Result<(usize, PathBuf, PathBuf)> {
    let (mut pairs, mut out, mut model) = (PAIRS, PathBuf::from("out/peers"), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--pairs" => pairs = value.parse().with_context(|| format!("--pairs {value} is not a number"))?,
            "--out" => out = value.into(),
            "--model" => model = Some(value.into()),
            _ => bail!("unknown argument {name}; there are --pairs N, --out FOLDER and --model FOLDER"),
        }
    }
    if pairs < 2 {
        bail!("an interval needs two pairs at least");
    }
    Ok((pairs, out, model.context("--model needs a folder with tokenizer.json; `make peers` names one")?))
}
