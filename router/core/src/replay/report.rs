//! What a run comes to. All of it is modelled, and says so.
//!
//! Counts are whole numbers; shares and ratios are one division each, so they
//! are the same on every machine.

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3;

use super::contender::Contender;
use super::run::{Plan, Run};
use super::trace::Trace;
use crate::json::canonical_json;

/// Version of the report's fields.
pub const SCHEMA_VERSION: u32 = 1;

/// What an answer must keep to be good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Objective {
    /// Most milliseconds to the first token.
    pub ttft_ms: u64,
    /// Most milliseconds per token after it.
    pub tpot_ms: u64,
}

impl Default for Objective {
    fn default() -> Self {
        Self { ttft_ms: 2000, tpot_ms: 100 }
    }
}

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The rule and its settings.
    pub policy: String,
    /// Whether it is ours.
    pub shipped: bool,
    /// How much faster than recorded.
    pub rate: f64,
    /// Blocks in each worker's cache.
    pub capacity_blocks: u64,
    /// Share of requests that kept the objective.
    pub goodput: f64,
    /// Share of prompt tokens that were not computed again.
    pub hit_share: f64,
    /// Requests with at least one hit block.
    pub hit_count: u64,
    /// Prompt tokens that were computed.
    pub recomputed_tokens: u64,
    /// The busiest worker's time in steps over the mean.
    pub load_max_over_mean: f64,
    /// The most requests on one worker over the mean.
    pub requests_max_over_mean: f64,
    /// Of the requests whose prompt was sent before by half or more: the share
    /// that went elsewhere than last time.
    pub route_churn: f64,
    /// Milliseconds to the first token, median.
    pub ttft_p50_ms: f64,
    /// The same, 99th percentile.
    pub ttft_p99_ms: f64,
    /// Milliseconds per token after the first, median.
    pub tpot_p50_ms: f64,
    /// The same, 99th percentile.
    pub tpot_p99_ms: f64,
    /// Blocks evicted by all workers.
    pub evicted_blocks: u64,
    /// Share of the blocks predicted to hit that did not.
    pub false_hit_share: f64,
    /// Digest of every assignment and its times.
    pub assignments: String,
}

/// The figures of `run`.
pub fn summarise(
    trace: &Trace,
    plan: &Plan,
    contender: &Contender,
    objective: Objective,
    run: &Run,
) -> Summary {
    let block = u64::from(trace.size.tokens());
    let pairs = || trace.requests.iter().zip(&run.served);
    let hit_tokens: u64 = run.served.iter().map(|served| served.hits * block).sum();
    let prompts = trace.prompt_tokens();
    let mut ttft: Vec<u64> = run.served.iter().map(|served| served.first_token - served.arrived).collect();
    let per_token = |output: u64, first: u64, last: u64| (last - first) / (output - 1).max(1);
    let mut tpot: Vec<u64> = pairs()
        .filter(|(request, _)| request.output > 1)
        .map(|(request, served)| per_token(request.output, served.first_token, served.finished))
        .collect();
    let good = pairs().filter(|(request, served)| {
        let ttft = served.first_token - served.arrived;
        // Compared as products, so that no division rounds a miss into the limit.
        let decoding = u128::from(served.finished - served.first_token);
        let allowed = u128::from(objective.tpot_ms) * 1_000_000 * u128::from(request.output - 1);
        ttft <= objective.ttft_ms * 1_000_000 && decoding <= allowed
    });
    let good = good.count() as u64;
    ttft.sort_unstable();
    tpot.sort_unstable();
    let mut requests = vec![0u64; plan.workers];
    run.served.iter().for_each(|served| requests[served.worker as usize] += 1);
    Summary {
        policy: contender.spelling(),
        shipped: matches!(contender, Contender::Shipped(_)),
        rate: plan.rate_milli as f64 / 1000.0,
        capacity_blocks: plan.model.capacity_blocks,
        goodput: share(good, run.served.len() as u64),
        hit_share: share(hit_tokens, prompts),
        hit_count: run.served.iter().filter(|served| served.hits > 0).count() as u64,
        recomputed_tokens: prompts - hit_tokens,
        load_max_over_mean: max_over_mean(&run.busy_ns),
        requests_max_over_mean: max_over_mean(&requests),
        route_churn: churn(trace, run),
        ttft_p50_ms: percentile(&ttft, 50),
        ttft_p99_ms: percentile(&ttft, 99),
        tpot_p50_ms: percentile(&tpot, 50),
        tpot_p99_ms: percentile(&tpot, 99),
        evicted_blocks: run.evicted.iter().sum(),
        false_hit_share: share(
            run.served.iter().map(|served| served.predicted.saturating_sub(served.hits)).sum(),
            run.served.iter().map(|served| served.predicted).sum(),
        ),
        assignments: format!("{:032x}", assignments(trace, run)),
    }
}

/// The whole comparison, as canonical JSON with its own digest.
pub fn to_json(trace: &Trace, plan: &Plan, objective: Objective, rows: &[Summary]) -> String {
    let body = json!({
        "schema_version": SCHEMA_VERSION,
        "modelled": "all times, hits and loads come from the step-level model below, none from an engine",
        "trace": {
            "format": trace.format,
            "digest": format!("{:032x}", trace.digest()),
            "requests": trace.requests.len(),
            "block_tokens": trace.size.tokens(),
            "unique_blocks": trace.unique_blocks,
            "prompt_tokens": trace.prompt_tokens(),
        },
        "model": plan.model,
        "workers": plan.workers,
        "in_flight_credit": plan.in_flight_credit,
        "objective": objective,
        "policies": rows,
    });
    with_digest(body)
}

/// `body` as canonical JSON, with the digest of the rest in `digest`: SHA-256, so that
/// any program can check it.
pub(super) fn with_digest(mut body: Value) -> String {
    let sum = Sha256::digest(canonical_json(&body).as_bytes());
    let digest: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    if let Value::Object(fields) = &mut body {
        fields.insert("digest".to_owned(), Value::from(digest));
    }
    let mut text = canonical_json(&body);
    text.push('\n');
    text
}

/// The rows as CSV, with a head line.
pub fn to_csv<T: Serialize>(rows: &[T]) -> String {
    let mut text = String::new();
    for row in rows {
        let Ok(Value::Object(fields)) = serde_json::to_value(row) else { continue };
        if text.is_empty() {
            text = fields.keys().cloned().collect::<Vec<_>>().join(",") + "\n";
        }
        let cell = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        text += &(fields.values().map(cell).collect::<Vec<_>>().join(",") + "\n");
    }
    text
}

fn churn(trace: &Trace, run: &Run) -> f64 {
    let mut last: Vec<Option<u32>> = vec![None; trace.unique_blocks];
    let (mut returning, mut moved) = (0, 0);
    let mut order: Vec<usize> = (0..run.served.len()).collect();
    order.sort_by_key(|place| (run.served[*place].arrived, *place));
    for place in order {
        let (request, served) = (&trace.requests[place], &run.served[place]);
        let known = request.dense.iter().map_while(|block| last[*block as usize]).enumerate().last();
        if let Some((depth, worker)) = known
            && (depth + 1) * 2 >= request.dense.len()
        {
            returning += 1;
            moved += u64::from(worker != served.worker);
        }
        request.dense.iter().for_each(|block| last[*block as usize] = Some(served.worker));
    }
    share(moved, returning)
}

fn assignments(trace: &Trace, run: &Run) -> u128 {
    let mut hasher = Xxh3::new();
    for (request, served) in trace.requests.iter().zip(&run.served) {
        hasher.update(request.id.as_bytes());
        for number in [u64::from(served.worker), served.hits, served.first_token, served.finished] {
            hasher.update(&number.to_le_bytes());
        }
    }
    hasher.digest128()
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn max_over_mean(values: &[u64]) -> f64 {
    let most = values.iter().max().copied().unwrap_or(0);
    share(most.saturating_mul(values.len() as u64), values.iter().sum())
}

/// Nearest rank, in milliseconds of sorted nanoseconds.
fn percentile(sorted: &[u64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(rank).map_or(0.0, |nanoseconds| (nanoseconds / 1000) as f64 / 1000.0)
}
