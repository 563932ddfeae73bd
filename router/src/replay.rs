//! `kv-router replay`: a trace file in, a table, JSON, CSV and a plot out.
//!
//! Reads and writes files, shows progress, and nothing else: parsing, deciding,
//! timing and summing up are the core's. Its flags stand here and not in
//! `config.rs`, because they shape no service. Outputs are written beside their
//! names first and renamed when all of them are complete.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kvrouter_core::policy::{Overload, Settings};
use kvrouter_core::receipts::Receipt;
use kvrouter_core::replay::contender::{Contender, SpellingError};
use kvrouter_core::replay::engine::Model;
use kvrouter_core::replay::oracle::{self, Difference};
use kvrouter_core::replay::recorded::Weights;
use kvrouter_core::replay::report::{self, Objective, Summary};
use kvrouter_core::replay::run::{self, InFlightCredit, MAX_WORKERS, Plan};
use kvrouter_core::replay::trace::{Trace, TraceError};
use kvrouter_core::replay::{Format, lab, lab_oracle, lab_trace, mooncake, recorded, runs};
use kvrouter_core::units::{BlockSize, Tokens};

use crate::plot;

/// Flags of `replay`. Defaults of the model are those of the documentation's
/// tables.
#[derive(Clone, Debug, Args)]
pub struct ReplayFlags {
    /// Trace: Mooncake JSONL, session runs JSONL, a lab trace, or receipts of a
    /// router, whose decisions are made again.
    #[arg(long)]
    pub trace: PathBuf,
    /// Engines; a lab trace brings its own.
    #[arg(long, default_value_t = 8)]
    pub workers: usize,
    /// Policies, `name:key=value:..`, with commas between; all of ours and the
    /// models of other routers when absent. For receipts: all of ours, with the
    /// recorded weights.
    #[arg(long, value_delimiter = ',')]
    pub policies: Vec<String>,
    /// Blocks in each engine's cache; several make a sweep.
    #[arg(long, value_delimiter = ',', default_value = "6000")]
    pub capacity: Vec<u64>,
    /// How much faster than recorded requests arrive or sessions start; several
    /// make a sweep.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub rate: Vec<f64>,
    /// Most milliseconds to the first token of a good answer.
    #[arg(long, default_value_t = 2000)]
    pub slo_ttft_ms: u64,
    /// Most milliseconds per token after it.
    #[arg(long, default_value_t = 100)]
    pub slo_tpot_ms: u64,
    /// Tokens per block for traces of session runs.
    #[arg(long, default_value_t = 512)]
    pub block_size: u32,
    /// Milliseconds between the starts of sessions in traces of session runs.
    #[arg(long, default_value_t = 36_000)]
    pub session_spacing_ms: u64,
    /// Whether booked prompts count as hits until their first byte.
    #[arg(long, value_enum, default_value_t = CreditFlag::Enabled)]
    pub in_flight_credit: CreditFlag,
    /// Recomputes every assignment of our policies in another way.
    #[arg(long)]
    pub oracle: bool,
    /// Writes canonical JSON here.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Writes CSV here; not for lab traces.
    #[arg(long)]
    pub csv: Option<PathBuf>,
    /// Writes a plot here, as SVG.
    #[arg(long)]
    pub plot: Option<PathBuf>,
    /// Constants of the modelled engine.
    #[command(flatten)]
    pub model: ModelFlags,
    /// What a lab trace's replay may set.
    #[command(flatten)]
    pub lab: LabSettings,
}

/// Settings of a lab trace's replay, the same for all policies.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Lab traces")]
pub struct LabSettings {
    /// Milliseconds without news after which a view's hits no longer count.
    #[arg(long, default_value_t = 10_000)]
    pub budget_ms: u64,
    /// Most uncached tokens that may wait on one worker; no cap when absent.
    #[arg(long)]
    pub max_queued_tokens: Option<u64>,
    /// Share of that cap which only requests without hits may use.
    #[arg(long, default_value_t = 0.0)]
    pub cold_reserve: f64,
}

impl LabSettings {
    /// The lab's clocks, with this budget.
    pub fn model(&self) -> lab::LabModel {
        lab::LabModel { budget_ticks: self.budget_ms, ..lab::LabModel::default() }
    }

    /// The cap and its reserve.
    pub fn overload(&self) -> Result<Overload, ReplayError> {
        if !(0.0..=1.0).contains(&self.cold_reserve) {
            return Err(unusable("cold-reserve", "must be between 0 and 1"));
        }
        Ok(Overload { max_queued: self.max_queued_tokens.map(Tokens), cold_reserve: self.cold_reserve })
    }
}

/// The modelled engine.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Modelled engine")]
pub struct ModelFlags {
    /// Microseconds of every step.
    #[arg(long, default_value_t = 6000)]
    pub step_us: u64,
    /// Nanoseconds per prefilled token.
    #[arg(long, default_value_t = 100_000)]
    pub prefill_token_ns: u64,
    /// Microseconds per decoding request in a step.
    #[arg(long, default_value_t = 100)]
    pub decode_request_us: u64,
    /// Nanoseconds per context token of decoding requests in a step.
    #[arg(long, default_value_t = 60)]
    pub context_token_ns: u64,
    /// Most tokens prefilled in a step.
    #[arg(long, default_value_t = 2048)]
    pub chunk_tokens: u64,
    /// Most requests decoding at once.
    #[arg(long, default_value_t = 256)]
    pub max_decoding: u64,
}

/// Whether in-flight credit is given, as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the settings'")]
pub enum CreditFlag {
    Enabled,
    Disabled,
}

/// Why nothing was replayed, or its results were not written.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The trace is bad.
    #[error("{path}: {problem}", path = path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Line, field and what is wrong.
        problem: Box<TraceError>,
    },
    /// A flag's value cannot be used.
    #[error("--{flag}: {problem}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The oracle found another assignment.
    #[error("{policy}: the oracle disagrees: {difference}")]
    Oracle {
        /// The policy.
        policy: String,
        /// Where.
        difference: Box<Difference>,
    },
    /// Recorded decisions are not what the policies decide.
    #[error("{count} of {of} recorded decisions do not repeat; {first}")]
    Recorded {
        /// How many.
        count: usize,
        /// Of how many.
        of: usize,
        /// The first of them.
        first: Box<recorded::Difference>,
    },
    /// The plot cannot be drawn.
    #[error("failed to draw the plot: {0}")]
    Plot(String),
    /// An output cannot be written.
    #[error("failed to write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl ReplayError {
    /// 2 for what the caller gave, 1 for what went wrong here.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } | Self::Trace { .. } | Self::Flag { .. } => 2,
            Self::Oracle { .. } | Self::Recorded { .. } | Self::Plot(_) | Self::Write { .. } => 1,
        }
    }
}

/// Replays as `flags` say: the table to stdout, the rest to its files.
pub fn run(flags: &ReplayFlags) -> Result<(), ReplayError> {
    let read = |source| ReplayError::Read { path: flags.trace.clone(), source };
    let text = std::fs::read_to_string(&flags.trace).map_err(read)?;
    let bad = |problem| ReplayError::Trace { path: flags.trace.clone(), problem: Box::new(problem) };
    let contenders = contenders(flags)?;
    let outputs = match Format::of(&text) {
        Format::Lab => lab_outputs(flags, &lab_trace::parse(&text).map_err(bad)?, &contenders)?,
        Format::Receipts => recorded_outputs(flags, &recorded::parse(&text).map_err(bad)?, &contenders)?,
        Format::Mooncake => timed_outputs(flags, &mooncake::parse(&text).map_err(bad)?, &contenders)?,
        Format::Runs => {
            let size = BlockSize::new(flags.block_size)
                .ok_or_else(|| unusable("block-size", "must be 1 or more"))?;
            let layout = runs::Layout { size, spacing_ms: flags.session_spacing_ms };
            timed_outputs(flags, &runs::parse(&text, layout).map_err(bad)?, &contenders)?
        }
    };
    write_all(&outputs.files)?;
    print!("{}", outputs.table);
    Ok(())
}

/// What a replay prints and writes.
struct Outputs {
    table: String,
    files: Vec<(PathBuf, String)>,
}

fn timed_outputs(
    flags: &ReplayFlags,
    trace: &Trace,
    contenders: &[Contender],
) -> Result<Outputs, ReplayError> {
    let plans = plans(flags)?;
    let objective = Objective { ttft_ms: flags.slo_ttft_ms, tpot_ms: flags.slo_tpot_ms };
    let bar = progress(trace.requests.len() * plans.len() * contenders.len());
    let mut rows = Vec::new();
    let mut checked = 0;
    for plan in &plans {
        for contender in contenders {
            bar.set_message(contender.name());
            let done = run::run(trace, plan, contender, |_| bar.inc(1));
            if let (true, Contender::Shipped(settings)) = (flags.oracle, contender) {
                bar.set_message("oracle");
                oracle::check(trace, plan, settings, &done, |_| ()).map_err(|difference| {
                    ReplayError::Oracle { policy: contender.spelling(), difference: Box::new(difference) }
                })?;
                checked += done.served.len();
            }
            rows.push(report::summarise(trace, plan, contender, objective, &done));
        }
    }
    bar.finish_and_clear();
    let mut table = head(trace, &plans[0], objective);
    table += &table_of(&rows);
    if flags.oracle {
        let _ = writeln!(table, "oracle: {checked} assignments of our policies recomputed, all equal");
    }
    let mut files = Vec::new();
    if let Some(path) = &flags.json {
        files.push((path.clone(), report::to_json(trace, &plans[0], objective, &rows)));
    }
    if let Some(path) = &flags.csv {
        files.push((path.clone(), report::to_csv(&rows)));
    }
    if let Some(path) = &flags.plot {
        files.push((path.clone(), plot::rows(&rows).map_err(ReplayError::Plot)?));
    }
    Ok(Outputs { table, files })
}

fn lab_outputs(
    flags: &ReplayFlags,
    trace: &lab_trace::LabTrace,
    contenders: &[Contender],
) -> Result<Outputs, ReplayError> {
    if flags.csv.is_some() {
        return Err(unusable("csv", "a lab trace has receipts, not rows: use --json"));
    }
    let ours = |contender: &Contender| match contender {
        Contender::Shipped(settings) => Some(*settings),
        Contender::Peer(_) => None,
    };
    let overload = flags.lab.overload()?;
    let policies: Vec<Settings> =
        contenders.iter().filter_map(ours).map(|settings| Settings { overload, ..settings }).collect();
    let model = flags.lab.model();
    let done = lab::run(trace, model, &policies);
    if flags.oracle {
        for (settings, run) in policies.iter().zip(&done) {
            lab_oracle::check(trace, model, settings, run).map_err(|difference| ReplayError::Oracle {
                policy: run.policy.clone(),
                difference: Box::new(difference),
            })?;
        }
    }
    let mut table = lab_table(trace, &done);
    table += "latency: ticks to the modelled first byte, mean; ties fall to the lower target\n";
    let json = lab::to_json(trace, model, overload, &done);
    let _ = writeln!(table, "ledger: SHA-256 {}", digest_of(&json));
    if flags.oracle {
        let _ = writeln!(
            table,
            "oracle: {} assignments recomputed, all equal",
            trace.requests.len() * done.len()
        );
    }
    let mut files = Vec::new();
    if let Some(path) = &flags.json {
        files.push((path.clone(), json));
    }
    if let Some(path) = &flags.plot {
        files.push((path.clone(), plot::lab(&done).map_err(ReplayError::Plot)?));
    }
    Ok(Outputs { table, files })
}

/// What a ledger says of itself.
fn digest_of(json: &str) -> String {
    let ledger: Option<serde_json::Value> = serde_json::from_str(json).ok();
    ledger.and_then(|ledger| Some(ledger.get("digest")?.as_str()?.to_owned())).unwrap_or_default()
}

/// One row a policy.
fn lab_table(trace: &lab_trace::LabTrace, done: &[lab::LabRun]) -> String {
    let mut table = format!("{} requests, {} workers; modelled\n", trace.requests.len(), trace.workers.len());
    let _ = writeln!(
        table,
        "{:<16} {:>10} {:>6} {:>5} {:>8} {:>6} {:>6} {:>9} {:>9} {:>8}",
        "policy",
        "recomputed",
        "hit %",
        "hits",
        "max/mean",
        "churn",
        "stale",
        "rejected",
        "dominated",
        "latency"
    );
    for run in done {
        let summary = &run.summary;
        let _ = writeln!(
            table,
            "{:<16} {:>10} {:>6.1} {:>5} {:>8.2} {:>6} {:>6} {:>9} {:>9} {:>8.1}",
            run.policy.split(':').next().unwrap_or_default(),
            summary.recomputed_tokens,
            summary.hit_share * 100.0,
            summary.hit_count,
            summary.load_max_over_mean,
            summary.route_churn,
            summary.stale_events,
            summary.tenant_rejections,
            summary.dominated_choices,
            summary.latency_proxy_ticks
        );
    }
    table
}

fn recorded_outputs(
    flags: &ReplayFlags,
    trace: &recorded::Recorded,
    contenders: &[Contender],
) -> Result<Outputs, ReplayError> {
    if flags.plot.is_some() {
        return Err(unusable("plot", "receipts have nothing to plot: use --csv"));
    }
    if flags.oracle {
        let problem =
            "receipts have no oracle: every recorded decision is made again without it; leave it out";
        return Err(unusable("oracle", problem));
    }
    let receipts = &trace.receipts;
    let repeat = |(sequence, receipt): &(u64, Receipt)| recorded::repeat(*sequence, receipt).err();
    let mut differences = receipts.iter().filter_map(repeat);
    if let Some(first) = differences.next() {
        let first = Box::new(first);
        let rest = differences.inspect(|difference| eprintln!("kv-router: {difference}")).count();
        return Err(ReplayError::Recorded { count: 1 + rest, of: receipts.len(), first });
    }
    let weights = if flags.policies.is_empty() { Weights::Recorded } else { Weights::Given };
    let bar = progress(receipts.len());
    let rows = recorded::evaluate(receipts, contenders, weights, || bar.inc(1));
    bar.finish_and_clear();
    let mut files = Vec::new();
    if let Some(path) = &flags.json {
        files.push((path.clone(), recorded::to_json(trace, &rows)));
    }
    if let Some(path) = &flags.csv {
        files.push((path.clone(), report::to_csv(&rows)));
    }
    let head = format!(
        "{} receipts, {} lost in gaps; all decisions made again from their receipts, and equal\n\
         every policy on the same frozen candidates, where no session decided; nothing is simulated\n",
        receipts.len(),
        trace.lost
    );
    Ok(Outputs { table: head + &recorded_table(&rows), files })
}

/// One row a policy.
fn recorded_table(rows: &[recorded::Evaluation]) -> String {
    let width = rows.iter().map(|row| row.policy.len()).max().unwrap_or(0).max("policy".len());
    let mut table = format!(
        "{:<width$} {:>9} {:>7} {:>10} {:>8} {:>8} {:>13} {:>13}\n",
        "policy", "decisions", "agree %", "hit blocks", "regret", "forgone", "uncached", "queued before"
    );
    for row in rows {
        let _ = writeln!(
            table,
            "{:<width$} {:>9} {:>7.1} {:>10} {:>8} {:>8} {:>13} {:>13}",
            row.policy,
            row.decisions,
            row.agreement * 100.0,
            row.hit_blocks,
            row.regret_blocks,
            row.forgone_blocks,
            row.uncached_tokens,
            row.queued_tokens
        );
    }
    table
}

fn contenders(flags: &ReplayFlags) -> Result<Vec<Contender>, ReplayError> {
    if flags.policies.is_empty() {
        return Ok(Contender::defaults());
    }
    let parse = |text: &String| {
        Contender::parse(text).map_err(|error: SpellingError| unusable("policies", &error.to_string()))
    };
    flags.policies.iter().map(parse).collect()
}

/// One plan per rate and capacity.
fn plans(flags: &ReplayFlags) -> Result<Vec<Plan>, ReplayError> {
    if !(1..=MAX_WORKERS).contains(&flags.workers) {
        return Err(unusable("workers", &format!("must be between 1 and {MAX_WORKERS}")));
    }
    let model = &flags.model;
    if model.chunk_tokens == 0 || model.max_decoding == 0 || model.step_us == 0 {
        return Err(unusable("chunk-tokens, max-decoding, step-us", "must be 1 or more"));
    }
    let mut plans = Vec::new();
    for rate in &flags.rate {
        if !(0.001..=1000.0).contains(rate) {
            return Err(unusable("rate", "must be between 0.001 and 1000"));
        }
        for capacity in &flags.capacity {
            plans.push(Plan {
                workers: flags.workers,
                rate_milli: (rate * 1000.0).round() as u64,
                model: Model {
                    step_ns: model.step_us.saturating_mul(1000),
                    prefill_token_ns: model.prefill_token_ns,
                    decode_request_ns: model.decode_request_us.saturating_mul(1000),
                    context_token_ns: model.context_token_ns,
                    chunk_tokens: model.chunk_tokens,
                    max_decoding: model.max_decoding,
                    capacity_blocks: *capacity,
                },
                in_flight_credit: match flags.in_flight_credit {
                    CreditFlag::Enabled => InFlightCredit::Enabled,
                    CreditFlag::Disabled => InFlightCredit::Disabled,
                },
            });
        }
    }
    if plans.is_empty() {
        return Err(unusable("rate", "needs a value, and --capacity too"));
    }
    Ok(plans)
}

fn unusable(flag: &'static str, problem: &str) -> ReplayError {
    ReplayError::Flag { flag, problem: problem.to_owned() }
}

/// The trace and all constants, so that a table says what it is a table of.
fn head(trace: &Trace, plan: &Plan, objective: Objective) -> String {
    let model = plan.model;
    format!(
        "{} trace: {} requests, {} prompt tokens, {} distinct blocks of {} tokens; {} workers\n\
         modelled engine: step {} us + {} ns per prefilled token + {} us per decoding request + {} ns per context \
         token; chunk {} tokens, at most {} decoding\n\
         goodput: first token within {} ms and {} ms per token after it\n",
        trace.format,
        trace.requests.len(),
        trace.prompt_tokens(),
        trace.unique_blocks,
        trace.size.tokens(),
        plan.workers,
        model.step_ns / 1000,
        model.prefill_token_ns,
        model.decode_request_ns / 1000,
        model.context_token_ns,
        model.chunk_tokens,
        model.max_decoding,
        objective.ttft_ms,
        objective.tpot_ms,
    )
}

fn table_of(rows: &[Summary]) -> String {
    let width = rows.iter().map(|row| row.policy.len()).max().unwrap_or(0).max("policy".len());
    let mut table = format!(
        "{:<width$} {:>5} {:>7} {:>7} {:>6} {:>6} {:>12} {:>8} {:>6} {:>9} {:>9} {:>8} {:>8}\n",
        "policy",
        "rate",
        "blocks",
        "good %",
        "hit %",
        "hits",
        "recomputed",
        "max/mean",
        "churn",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99"
    );
    for row in rows {
        let _ = writeln!(
            table,
            "{:<width$} {:>5} {:>7} {:>7.1} {:>6.1} {:>6} {:>12} {:>8.2} {:>6.2} {:>9.0} {:>9.0} {:>8.1} {:>8.1}",
            row.policy,
            row.rate,
            row.capacity_blocks,
            row.goodput * 100.0,
            row.hit_share * 100.0,
            row.hit_count,
            row.recomputed_tokens,
            row.load_max_over_mean,
            row.route_churn,
            row.ttft_p50_ms,
            row.ttft_p99_ms,
            row.tpot_p50_ms,
            row.tpot_p99_ms
        );
    }
    table
}

/// On a terminal only; it redraws ten times a second at most.
pub(crate) fn progress(arrivals: usize) -> ProgressBar {
    let bar = ProgressBar::new(arrivals as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} % {eta} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// All or nothing: a failure leaves no file with a final name changed.
fn write_all(files: &[(PathBuf, String)]) -> Result<(), ReplayError> {
    let partial = |path: &Path| {
        let mut name = path.as_os_str().to_owned();
        name.push(".partial");
        PathBuf::from(name)
    };
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ReplayError::Write { path, source }
    };
    let written =
        files.iter().try_for_each(|(path, text)| std::fs::write(partial(path), text).map_err(failed(path)));
    if written.is_err() {
        // What could not be removed was never there.
        files.iter().for_each(|(path, _)| drop(std::fs::remove_file(partial(path))));
    }
    written?;
    files.iter().try_for_each(|(path, _)| std::fs::rename(partial(path), path).map_err(failed(path)))
}
