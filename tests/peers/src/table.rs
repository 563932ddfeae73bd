//! Paired measurements, their ratios, and the bars they have to pass.

use serde_json::{Value, json};

/// All rows.
#[derive(Debug)]
pub(crate) struct Table {
    /// Whom ours is compared with.
    peer: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    name: String,
    unit: &'static str,
    ours: f64,
    theirs: Option<f64>,
    verdict: Verdict,
}

#[derive(Debug)]
enum Verdict {
    /// How many times theirs is ours: mean and 95 % interval; the bar.
    Ratio { mean: f64, low: f64, high: f64, bar: f64 },
    /// Ours must be at most this.
    Limit(f64),
}

/// Ratios below this are reported, not gated.
const GATED: f64 = 1.5;

impl Table {
    /// An empty table of comparisons with `peer`.
    pub(crate) fn beside(peer: &'static str) -> Self {
        Self { peer, rows: Vec::new() }
    }

    /// Adds a ratio from pairs of (ours, theirs), of which less is better.
    pub(crate) fn ratio(&mut self, name: String, unit: &'static str, pairs: &[(f64, f64)], bar: f64) {
        let logs: Vec<f64> = pairs.iter().map(|(ours, theirs)| (theirs / ours).ln()).collect();
        let (mean, half) = interval(&logs);
        let median = |side: fn(&(f64, f64)) -> f64| {
            let mut all: Vec<f64> = pairs.iter().map(side).collect();
            all.sort_unstable_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let verdict =
            Verdict::Ratio { mean: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp(), bar };
        self.push(Row {
            name,
            unit,
            ours: median(|pair| pair.0),
            theirs: Some(median(|pair| pair.1)),
            verdict,
        });
    }

    /// Adds a number of ours that has a limit, and theirs to compare.
    pub(crate) fn limit(
        &mut self,
        name: &str,
        unit: &'static str,
        ours: f64,
        theirs: Option<f64>,
        limit: f64,
    ) {
        self.push(Row { name: name.to_owned(), unit, ours, theirs, verdict: Verdict::Limit(limit) });
    }

    fn push(&mut self, row: Row) {
        eprintln!("{}", row.text());
        self.rows.push(row);
    }

    /// Whether no gated bar is missed.
    pub(crate) fn passes(&self) -> bool {
        self.rows.iter().all(|row| row.passes() || !row.is_gated())
    }

    /// The table for people.
    pub(crate) fn text(&self) -> String {
        let rows = self.rows.iter().map(|row| row.text() + "\n");
        let header = format!(
            "\n{:44} {:>10} {:>10}  {:18} ratio (95 % interval), bar\n",
            format!("theirs: {}", self.peer),
            "ours",
            "theirs",
            ""
        );
        header + &rows.collect::<String>()
    }

    /// The table for machines.
    pub(crate) fn json(&self, pairs: usize) -> String {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        let table = json!({"peer": self.peer, "pairs": pairs, "machine": machine(), "rows": rows});
        format!("{table:#}\n")
    }
}

impl Row {
    fn is_gated(&self) -> bool {
        !matches!(self.verdict, Verdict::Ratio { bar, .. } if bar < GATED)
    }

    fn passes(&self) -> bool {
        match self.verdict {
            Verdict::Ratio { low, bar, .. } => low >= bar,
            Verdict::Limit(limit) => self.ours <= limit,
        }
    }

    fn text(&self) -> String {
        let theirs = self.theirs.map_or_else(|| "-".to_owned(), digits);
        let verdict = match self.verdict {
            Verdict::Ratio { mean, low, high, bar } => format!("{mean:6.2} ({low:.2} to {high:.2}), {bar}"),
            Verdict::Limit(limit) => format!("at most {limit}"),
        };
        let mark = match (self.passes(), self.is_gated()) {
            (true, _) => "ok",
            (false, true) => "MISSED",
            (false, false) => "below, not gated",
        };
        format!(
            "{:44} {:>10} {:>10}  {:18} {verdict}  {mark}",
            self.name,
            digits(self.ours),
            theirs,
            self.unit
        )
    }

    fn json(&self) -> Value {
        let verdict = match self.verdict {
            Verdict::Ratio { mean, low, high, bar } => {
                json!({"ratio": mean, "low": low, "high": high, "bar": bar})
            }
            Verdict::Limit(limit) => json!({"limit": limit}),
        };
        json!({
            "name": self.name, "unit": self.unit, "ours": self.ours, "theirs": self.theirs,
            "verdict": verdict, "gated": self.is_gated(), "passes": self.passes(),
        })
    }
}

/// Three significant digits at least.
fn digits(value: f64) -> String {
    if value < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

/// Mean and half width of the 95 % interval. Student's t, by its expansion in
/// the degrees of freedom, which errs by less than 1 % from five on.
fn interval(samples: &[f64]) -> (f64, f64) {
    let count = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / count;
    let variance = samples.iter().map(|sample| (sample - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let (normal, freedom) = (1.959_964_f64, count - 1.0);
    let first = (normal.powi(3) + normal) / 4.0;
    let second = (5.0 * normal.powi(5) + 16.0 * normal.powi(3) + 3.0 * normal) / 96.0;
    let t = normal + first / freedom + second / freedom.powi(2);
    (mean, t * (variance / count).sqrt())
}

fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{}, {cores} cores", model.unwrap_or("unknown processor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_agree_with_tables_of_t() {
        for (count, t) in [(6, 2.571), (10, 2.262), (20, 2.093), (40, 2.023)] {
            let samples: Vec<f64> = (0..count).map(f64::from).collect();
            let (mean, half) = interval(&samples);
            let variance = samples.iter().map(|at| (at - mean).powi(2)).sum::<f64>() / f64::from(count - 1);
            let expected = t * (variance / f64::from(count)).sqrt();
            assert!((half / expected - 1.0).abs() < 0.01, "{count} samples: {half}, {expected}");
        }
    }
}
