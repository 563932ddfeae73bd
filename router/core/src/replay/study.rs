//! The study behind the default weights: many settings on ten pairs of fleet and
//! load, and the bars that the defaults must clear.
//!
//! The core knows what is compared and judges the figures; who runs it reads the
//! traces and shares the work out.

use std::fmt::Write as _;

use super::contender::Contender;
use super::engine::Model;
use super::run::{InFlightCredit, Plan};

/// Least share of the best goodput that the defaults must reach on every pair.
pub const OF_THE_BEST: f64 = 0.97;
/// Least ratio to a peer's goodput at its defaults, at the highest load of each
/// trace.
pub const OVER_PEERS: [(&str, f64); 2] = [("dynamo", 1.2), ("published", 1.25)];

/// Which trace a pair is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Mooncake's conversation trace.
    Conversation,
    /// Sessions of agents, in runs.
    Agentic,
}

/// A fleet and a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The trace.
    pub source: Source,
    /// Engines.
    pub workers: usize,
    /// Its rate over the recorded one, in thousandths.
    pub rate_milli: u64,
    /// Whether the ratios to peers are judged here.
    pub heaviest: bool,
}

/// The ten pairs: small fleets first.
pub const PAIRS: [Pair; 10] = [
    pair(Source::Conversation, 8, 1000, false),
    pair(Source::Conversation, 8, 1400, true),
    pair(Source::Agentic, 16, 1000, false),
    pair(Source::Agentic, 16, 2000, false),
    pair(Source::Agentic, 16, 3000, true),
    pair(Source::Conversation, 64, 8000, false),
    pair(Source::Conversation, 64, 11_200, false),
    pair(Source::Agentic, 64, 4000, false),
    pair(Source::Agentic, 64, 8000, false),
    pair(Source::Agentic, 64, 12_000, false),
];

const fn pair(source: Source, workers: usize, rate_milli: u64, heaviest: bool) -> Pair {
    Pair { source, workers, rate_milli, heaviest }
}

impl Pair {
    /// Its plan, on the engines of the documentation's tables.
    pub fn plan(&self) -> Plan {
        Plan {
            workers: self.workers,
            rate_milli: self.rate_milli,
            model: Model { capacity_blocks: 6000, ..Model::default() },
            in_flight_credit: InFlightCredit::Enabled,
        }
    }

    /// Its name in tables.
    pub fn name(&self) -> String {
        let source = match self.source {
            Source::Conversation => "conversation",
            Source::Agentic => "agentic",
        };
        format!("{source} {}x on {}", self.rate_milli as f64 / 1000.0, self.workers)
    }
}

/// How many settings are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Defaults alone: for the table, not for the best.
    Defaults,
    /// The neighbourhood of the defaults.
    Coarse,
    /// All.
    Fine,
}

impl Grid {
    /// What is compared: all defaults first, each setting once.
    pub fn contenders(self) -> Vec<Contender> {
        let mut all = Contender::defaults();
        let (overlaps, queues, decodes): (&[f64], &[f64], &[f64]) = match self {
            Self::Defaults => return all,
            Self::Coarse => (&[1.0, 5.0], &[0.5, 1.0], &[0.01, 0.02, 0.05]),
            Self::Fine => {
                (&[0.5, 1.0, 2.0, 5.0], &[0.0, 0.25, 0.5, 1.0, 2.0], &[0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2])
            }
        };
        let mut add = |text: String| {
            let contender = Contender::parse(&text).expect("spelt as the parser wants it");
            if !all.contains(&contender) {
                all.push(contender);
            }
        };
        for overlap in overlaps {
            for queue in queues {
                for decode in decodes {
                    add(format!("cache-plus-load:overlap={overlap}:queue={queue}:decode={decode}"));
                }
            }
        }
        let weights: &[f64] =
            if self == Self::Coarse { &[5.0, 10.0] } else { &[0.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0] };
        for weight in weights {
            add(format!("kv-aware:overlap={weight}"));
            add(format!("published:overlap={weight}"));
            add(format!("dynamo:scale={weight}"));
        }
        if self == Self::Fine {
            for (request, imbalance) in
                [(50.0, 0.0), (200.0, 0.0), (1000.0, 0.0), (0.0, 0.1), (0.0, 0.5), (0.0, 1.0)]
            {
                add(format!("cache-plus-load:request={request}:imbalance={imbalance}"));
            }
            for prefix in [1.0, 2.0, 5.0, 10.0] {
                add(format!("llm-d:prefix={prefix}"));
            }
        }
        all
    }
}

/// Goodput of every contender on every pair that was run, contenders first.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The contenders.
    pub contenders: Vec<Contender>,
    /// The pairs.
    pub pairs: Vec<Pair>,
    /// By contender, then by pair.
    pub goodput: Vec<Vec<f64>>,
}

impl Figures {
    /// What the defaults miss: one line a bar. Empty when all are cleared.
    pub fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        let Some(ours) = self.goodput.first() else { return missed };
        for (at, pair) in self.pairs.iter().enumerate() {
            let best = self.best(at);
            if ours[at] < OF_THE_BEST * best {
                let share = ours[at] / best;
                missed.push(format!("{}: {share:.3} of the best, and the bar is {OF_THE_BEST}", pair.name()));
            }
            for (name, bar) in OVER_PEERS.iter().filter(|_| pair.heaviest) {
                let ratio = ours[at] / self.default_of(name, at);
                if ratio < *bar {
                    missed.push(format!("{}: {ratio:.2} times {name}, and the bar is {bar}", pair.name()));
                }
            }
        }
        missed
    }

    /// The table of the documentation, and the ratios that are judged.
    pub fn table(&self) -> String {
        let defaults = Contender::defaults().len();
        let worst = |row: &[f64]| {
            (0..self.pairs.len()).map(|at| row[at] / self.best(at)).fold(f64::INFINITY, f64::min)
        };
        let mut table = "| policy | worst share of the best |".to_owned();
        self.pairs.iter().for_each(|pair| table += &format!(" {} |", pair.name()));
        table += &format!("\n|---|---|{}\n", "---|".repeat(self.pairs.len()));
        let mut rows: Vec<usize> = (0..self.contenders.len().min(defaults)).collect();
        rows.sort_by(|a, b| worst(&self.goodput[*b]).total_cmp(&worst(&self.goodput[*a])));
        let percent = |values: &mut dyn Iterator<Item = f64>| {
            values.fold(String::new(), |text, value| format!("{text} {:.1} |", value * 100.0))
        };
        for row in rows {
            let (name, goodput) = (self.contenders[row].name(), &self.goodput[row]);
            let cells = percent(&mut goodput.iter().copied());
            let _ = writeln!(table, "| {name} | {:.3} |{cells}", worst(goodput));
        }
        let best = percent(&mut (0..self.pairs.len()).map(|at| self.best(at)));
        let _ = writeln!(table, "| best of {} settings | 1 |{best}", self.contenders.len());
        for (at, pair) in self.pairs.iter().enumerate() {
            let best = self.goodput.iter().map(|row| row[at]).enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
            let _ = write!(
                table,
                "{}: best is {}",
                pair.name(),
                self.contenders[best.map_or(0, |best| best.0)].spelling()
            );
            for (name, _) in OVER_PEERS.iter().filter(|_| pair.heaviest) {
                let _ = write!(
                    table,
                    "; default over {name} {:.2}",
                    self.goodput[0][at] / self.default_of(name, at)
                );
            }
            table.push('\n');
        }
        table
    }

    fn best(&self, pair: usize) -> f64 {
        self.goodput.iter().map(|row| row[pair]).fold(0.0, f64::max)
    }

    /// Goodput of `name` with its default settings, which stand first.
    fn default_of(&self, name: &str, pair: usize) -> f64 {
        let found = self.contenders.iter().position(|contender| contender.name() == name);
        found.map_or(0.0, |found| self.goodput[found][pair])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_seen_to_be_missed() {
        let contenders = Contender::defaults();
        let check = |why: &str, change: &dyn Fn(&str, &mut Vec<f64>), expected: &[&str]| {
            let goodput = contenders.iter().map(|contender| {
                let mut row = match contender.name() {
                    "dynamo" | "published" => vec![0.5, 0.5],
                    _ => vec![0.8, 0.8],
                };
                change(contender.name(), &mut row);
                row
            });
            let figures = Figures {
                contenders: contenders.clone(),
                pairs: vec![PAIRS[0], PAIRS[1]],
                goodput: goodput.collect(),
            };
            assert_eq!(figures.missed(), expected, "{why}");
        };
        check("all clear", &|_, _| (), &[]);
        let best = |name: &str, row: &mut Vec<f64>| row[0] = if name == "lmetric" { 0.83 } else { row[0] };
        check("another is better", &best, &["conversation 1x on 8: 0.964 of the best, and the bar is 0.97"]);
        let peer = |name: &str, row: &mut Vec<f64>| row[1] = if name == "published" { 0.7 } else { row[1] };
        check(
            "a peer is near",
            &peer,
            &["conversation 1.4x on 8: 1.14 times published, and the bar is 1.25"],
        );
        let light = |name: &str, row: &mut Vec<f64>| row[0] = if name == "dynamo" { 0.8 } else { row[0] };
        check("near where the load is light", &light, &[]);
    }

    #[test]
    fn grids_hold_the_defaults_first_and_each_setting_once() {
        for (grid, count) in [(Grid::Defaults, 11), (Grid::Coarse, 28), (Grid::Fine, 181)] {
            let all = grid.contenders();
            assert_eq!(all[..11], Contender::defaults(), "{grid:?}");
            assert_eq!(all.len(), count, "{grid:?}");
            assert!((1..all.len()).all(|at| !all[..at].contains(&all[at])), "{grid:?}");
        }
    }
}
