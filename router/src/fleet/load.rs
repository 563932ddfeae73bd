//! Asks engines what they have in hand, so that requests which reach them by another way
//! count in decisions: a second gateway's, a batch job's, a direct client's.
//!
//! Every worker is asked once in an interval, beside the probes that decide whether it may
//! be picked: a question that fails says nothing of the worker. What its answer means is
//! `kvrouter_core::policy::strangers`'; here is only what engines write. An engine that
//! does not offer it is not asked again in this life.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kvrouter_core::ids::Role;
use kvrouter_core::policy::strangers::{EngineLoad, EngineReport, Sent};
use kvrouter_core::units::{Millis, Tokens};
use kvrouter_crds::config::{Engine, Switch};
use serde::Deserialize;
use tokio::time::sleep;

use super::{Worker, probe};
use crate::pool::Pool;
use crate::proxy::upstream::Upstream;

/// vLLM writes its metrics, and SGLang reads its load, within some milliseconds.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Largest answer that is read: `/metrics` of a large engine is below 1 MiB.
const MAX_ANSWER: usize = 4 << 20;
/// Largest number of sequences that an engine may say: more is no count.
const MAX_SEQUENCES: f64 = (1u64 << 32) as f64;
/// From an answer to its judgement, where routers tell each other what they sent: what the
/// other 64 at most sent before the answer is heard by then, with some time for the broker.
const SETTLING: Duration = Duration::from_millis(500);
/// Failures in a row that are told.
const LASTING: u32 = 5;
/// Intervals that an engine's word counts.
const LIFETIME: u32 = 3;

/// Where an engine tells its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// vLLM's metrics.
    Metrics,
    /// SGLang's loads.
    Loads,
}

/// What came of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// It told.
    Ok,
    /// It has no such endpoint, or tells nothing of its load there.
    NotOffered,
    /// No answer, or none that is about load.
    Failed,
    /// An answer that was not understood.
    Unreadable,
    /// It tells of other ranks than the worker is known to have.
    OtherRanks,
}

impl Source {
    const fn of(engine: Engine) -> Option<Self> {
        match engine {
            Engine::VLLM => Some(Self::Metrics),
            Engine::SGLang => Some(Self::Loads),
            Engine::ATOM | Engine::Auto => None,
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Metrics => "/metrics",
            Self::Loads => "/v1/loads?include=core",
        }
    }

    fn read(self, body: &[u8]) -> Result<Vec<EngineLoad>, Reading> {
        match self {
            Self::Metrics => read_metrics(body),
            Self::Loads => read_loads(body),
        }
    }
}

impl Reading {
    /// Stable label for metrics.
    const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NotOffered => "not_offered",
            Self::Failed => "failed",
            Self::Unreadable => "unreadable",
            Self::OtherRanks => "other_ranks",
        }
    }

    /// Why strangers at the worker do not count; `None` where they do.
    const fn complaint(self) -> Option<&'static str> {
        match self {
            Self::Ok => None,
            Self::Failed => Some("the engine's load could not be read for some time"),
            Self::NotOffered => Some("the engine does not tell its load"),
            Self::Unreadable => Some("the engine's load was not understood"),
            Self::OtherRanks => Some("the engine tells its load by other ranks than `dpSize` has"),
        }
    }
}

/// Asks `worker` for ever; dropped when it leaves.
pub async fn watch(pool: Arc<Pool>, upstream: Upstream, worker: Arc<Worker>) {
    let settings = pool.config.file.engine_load;
    if settings.mode == Switch::Disabled {
        return;
    }
    let interval = Duration::from_secs(settings.interval_seconds);
    // Workers that joined together are not asked together, now or later.
    sleep(part_of(&pool, interval)).await;
    // The life in which the engine did not offer it, and what was said last.
    let (mut refused, mut said, mut failures) = (None, Reading::Ok, 0_u32);
    loop {
        let now = pool.clock.now();
        worker.targets.iter().for_each(|target| target.account.about_to_ask(now));
        sleep(interval / 2).await;
        let life = worker.times_ready();
        let source = Source::of(worker.status().engine).filter(|_| worker.is_ready());
        if let Some(source) = source.filter(|_| refused != Some(life)) {
            let reading = ask(&pool, &upstream, &worker, source, interval).await;
            pool.metrics.engine_loads.with_label_values(&[reading.label()]).inc();
            refused = (reading == Reading::NotOffered).then_some(life);
            failures = if reading == Reading::Failed { failures.saturating_add(1) } else { 0 };
            // A single failure passes by itself.
            let is_sure = failures == 0 || failures >= LASTING;
            if let Some(complaint) = reading.complaint().filter(|_| is_sure && reading != said) {
                tracing::info!(
                    target: "kv_router::fleet", worker = %worker.id, path = source.path(),
                    "{complaint}: requests that reach it by another way do not count"
                );
            }
            said = if is_sure { reading } else { said };
        }
        sleep(interval / 2 + part_of(&pool, interval / 10)).await;
    }
}

/// Less than `whole`, any of it.
fn part_of(pool: &Pool, whole: Duration) -> Duration {
    let micros = u64::try_from(whole.as_micros()).unwrap_or(u64::MAX).max(1);
    Duration::from_micros(pool.clock.unique() % micros)
}

async fn ask(
    pool: &Pool,
    upstream: &Upstream,
    worker: &Worker,
    source: Source,
    interval: Duration,
) -> Reading {
    let asked = tokio::time::timeout(TIMEOUT, upstream.get(&worker.id, source.path(), MAX_ANSWER)).await;
    let body = match asked {
        Ok(Ok((200, body))) => body,
        Ok(Ok((404 | 405 | 501, _))) => return Reading::NotOffered,
        Ok(_) | Err(_) => return Reading::Failed,
    };
    let sent: Vec<Sent> = worker.targets.iter().map(|target| target.account.sent()).collect();
    let loads = match source.read(&body) {
        Ok(loads) => loads,
        Err(reading) => return reading,
    };
    if source == Source::Metrics {
        note_metrics(pool, worker, body);
    }
    let Some(loads) = by_target(&loads, worker.targets.len()) else { return Reading::OtherRanks };
    if pool.replicas_heard().is_some() {
        sleep(SETTLING).await;
    }
    let lifetime = LIFETIME * (interval + interval / 10);
    let lifetime = Millis(u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX));
    for ((target, load), sent) in worker.targets.iter().zip(loads).zip(sent) {
        // Caches of several kinds have tokens of several sizes, and what is handed over
        // stays in use when its request is over.
        let is_plain = worker.place().role == Role::Mixed && !target.facts().hybrid;
        let load = EngineLoad { used: load.used.filter(|_| is_plain), ..load };
        let (typical, size) = (pool.ledger.typical_prompt(), pool.config.size);
        let report = EngineReport { load, sent, typical, size, lifetime };
        target.account.engine_reported(pool.clock.now(), &report);
    }
    Reading::Ok
}

/// Spares the probe its own reading of the same page, as often as it would read it.
fn note_metrics(pool: &Pool, worker: &Worker, body: Bytes) {
    let now = pool.clock.now();
    if !worker.has_read_metrics(now, probe::READ_ENGINE_EVERY) {
        worker.metrics_read.store(now.0 + 1, Ordering::Relaxed);
        probe::note_metrics(pool, worker, Some((200, body)));
    }
}

/// Loads of ranks, in their order, as loads of so many targets: one each, or all on the
/// only one, where the engine spreads its requests by itself.
fn by_target(loads: &[EngineLoad], targets: usize) -> Option<Vec<EngineLoad>> {
    if loads.len() == targets {
        return Some(loads.to_vec());
    }
    let sum = |sum: EngineLoad, load: &EngineLoad| EngineLoad {
        waiting: sum.waiting + load.waiting,
        running: sum.running + load.running,
        used: sum.used.zip(load.used).map(|(sum, used)| sum + used),
    };
    let nothing = EngineLoad { used: Some(Tokens(0)), ..EngineLoad::default() };
    (targets == 1 && !loads.is_empty()).then(|| vec![loads.iter().fold(nothing, sum)])
}

/// One rank in vLLM's metrics.
#[derive(Default)]
struct Rank {
    running: Option<u64>,
    waiting: Option<u64>,
    /// The part of its cache that is in use.
    usage: Option<f64>,
    /// The size of its cache in tokens.
    capacity: Option<f64>,
}

fn read_metrics(body: &[u8]) -> Result<Vec<EngineLoad>, Reading> {
    let text = std::str::from_utf8(body).map_err(|_| Reading::Unreadable)?;
    let mut ranks: BTreeMap<u64, Rank> = BTreeMap::new();
    for line in text.lines() {
        let Some((name, _)) = line.strip_prefix("vllm:").and_then(|rest| rest.split_once('{')) else {
            continue;
        };
        if !matches!(
            name,
            "num_requests_running" | "num_requests_waiting" | "kv_cache_usage_perc" | "cache_config_info"
        ) {
            continue;
        }
        let number = label(line, "engine").map_or(Some(0), |engine| engine.parse().ok());
        let value = line.rsplit_once("} ").and_then(|(_, value)| value.trim().parse().ok());
        let (number, value) = number.zip(value).ok_or(Reading::Unreadable)?;
        let rank = ranks.entry(number).or_default();
        match name {
            "num_requests_running" => rank.running = Some(count(value)?),
            "num_requests_waiting" => rank.waiting = Some(count(value)?),
            "kv_cache_usage_perc" => rank.usage = Some(value),
            _ => rank.capacity = capacity(line),
        }
    }
    ranks.retain(|_, rank| rank.running.is_some());
    match ranks.is_empty() {
        true => Err(Reading::NotOffered),
        false => ranks.into_values().map(Rank::load).collect::<Option<_>>().ok_or(Reading::Unreadable),
    }
}

impl Rank {
    fn load(self) -> Option<EngineLoad> {
        let used = self.usage.filter(|usage| (0.0..=1.0).contains(usage)).zip(self.capacity);
        let used = used.map(|(usage, capacity)| Tokens((usage * capacity) as u64));
        Some(EngineLoad { waiting: self.waiting?, running: self.running?, used })
    }
}

fn count(value: f64) -> Result<u64, Reading> {
    match (0.0..=MAX_SEQUENCES).contains(&value) {
        true => Ok(value as u64),
        false => Err(Reading::Unreadable),
    }
}

/// Tokens of a cache: as newer releases say it, else its blocks.
fn capacity(line: &str) -> Option<f64> {
    let number = |name| label(line, name)?.parse().ok();
    let blocks = || Some(f64::from(number("num_gpu_blocks")?) * f64::from(number("block_size")?));
    number("kv_cache_size_tokens").map_or_else(blocks, |tokens: u32| Some(f64::from(tokens)))
}

/// A label of a line of metrics. A quote inside one is escaped, so it ends at the next.
pub(super) fn label<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let find = |before: char| line.split_once(&format!("{before}{name}=\""));
    let (_, value) = find('{').or_else(|| find(','))?;
    value.split('"').next()
}

fn read_loads(body: &[u8]) -> Result<Vec<EngineLoad>, Reading> {
    #[derive(Deserialize)]
    struct Answer {
        loads: Vec<Load>,
    }
    #[derive(Deserialize)]
    struct Load {
        #[serde(default)]
        dp_rank: u64,
        num_running_reqs: f64,
        num_waiting_reqs: f64,
    }
    let answer: Answer = serde_json::from_slice(body).map_err(|_| Reading::Unreadable)?;
    let mut loads = answer.loads;
    loads.sort_by_key(|load| load.dp_rank);
    // Its `num_used_tokens` are not those of its requests alone.
    let load = |it: &Load| {
        let (waiting, running) = (count(it.num_waiting_reqs)?, count(it.num_running_reqs)?);
        Ok(EngineLoad { waiting, running, used: None })
    };
    match loads.is_empty() {
        // It has just started.
        true => Err(Reading::Failed),
        false => loads.iter().map(load).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(waiting: u64, running: u64, used: Option<u64>) -> EngineLoad {
        EngineLoad { waiting, running, used: used.map(Tokens) }
    }

    /// As vLLM 0.32 wrote it.
    const METRICS: &str = include_str!("../../../tests/fixtures/engine-events/vllm-0.32.0-live/metrics.txt");

    #[test]
    fn the_load_of_every_rank_is_read_from_what_vllm_really_writes() {
        assert_eq!(read_metrics(METRICS.as_bytes()), Ok(vec![load(0, 0, Some(0))]));
        let busy = METRICS
            .replace(
                "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 0.0",
                "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0",
            )
            .replace(
                "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 0.0",
                "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 2.0",
            )
            .replace(
                "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.0",
                "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.5",
            );
        assert_eq!(read_metrics(busy.as_bytes()), Ok(vec![load(2, 3, Some(384))]), "half of 768 tokens");
        let of = |text: &str| read_metrics(text.as_bytes());
        let rank = |engine: u32, running: &str| {
            format!(
                "vllm:num_requests_running{{engine=\"{engine}\",model_name=\"a\"}} {running}\n\
                 vllm:num_requests_waiting{{engine=\"{engine}\",model_name=\"a\"}} 1.0\n"
            )
        };
        let two = format!("{}{}", rank(10, "7.0"), rank(9, "8.0"));
        assert_eq!(of(&two), Ok(vec![load(1, 8, None), load(1, 7, None)]), "in the order of their numbers");
        let blocks = format!(
            "{}vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.25\n\
             vllm:cache_config_info{{block_size=\"16\",engine=\"0\",kv_cache_size_tokens=\"None\",num_gpu_blocks=\"100\"}} 1.0\n",
            rank(0, "2")
        );
        assert_eq!(of(&blocks), Ok(vec![load(1, 2, Some(400))]), "before it told tokens");
        for (why, text, expected) in [
            ("statistics are off", "python_info 1.0\n", Reading::NotOffered),
            ("no number", &*rank(0, "many"), Reading::Unreadable),
            ("no count", &*rank(0, "-1"), Reading::Unreadable),
            ("no count", &*rank(0, "NaN"), Reading::Unreadable),
            ("absurd", &*rank(0, "1e300"), Reading::Unreadable),
            ("half of it", "vllm:num_requests_running{engine=\"0\"} 1\n", Reading::Unreadable),
            ("no rank", "vllm:num_requests_running{engine=\"x\"} 1\n", Reading::Unreadable),
        ] {
            assert_eq!(of(text), Err(expected), "{why}");
        }
        assert_eq!(read_metrics(&[0xff]), Err(Reading::Unreadable));
    }

    #[test]
    fn the_load_of_every_rank_is_read_from_what_sglang_writes() {
        let of = |text: &str| read_loads(text.as_bytes());
        let one = |rank: u32, running: u32| {
            format!(
                r#"{{"dp_rank":{rank},"num_running_reqs":{running},"num_waiting_reqs":2,"num_used_tokens":9}}"#
            )
        };
        let two = format!(
            r#"{{"timestamp":"2026-11-29T10:00:00","version":"0.5.23","loads":[{},{}]}}"#,
            one(1, 7),
            one(0, 3)
        );
        assert_eq!(of(&two), Ok(vec![load(2, 3, None), load(2, 7, None)]));
        assert_eq!(of(r#"{"loads":[]}"#), Err(Reading::Failed), "it has just started");
        assert_eq!(of(r#"{"loads":[{"dp_rank":0}]}"#), Err(Reading::Unreadable));
        assert_eq!(of("<html>"), Err(Reading::Unreadable));
        let negative = r#"{"loads":[{"num_running_reqs":-1,"num_waiting_reqs":0}]}"#;
        assert_eq!(of(negative), Err(Reading::Unreadable));
    }

    #[test]
    fn ranks_that_are_not_told_apart_are_one_target() {
        let ranks = [load(1, 2, Some(30)), load(4, 5, Some(60))];
        assert_eq!(by_target(&ranks, 2), Some(ranks.to_vec()));
        assert_eq!(by_target(&ranks, 1), Some(vec![load(5, 7, Some(90))]));
        assert_eq!(by_target(&[ranks[0], load(0, 0, None)], 1), Some(vec![load(1, 2, None)]));
        assert_eq!((by_target(&ranks, 3), by_target(&[], 1)), (None, None));
    }

    #[test]
    fn labels_are_found_wherever_they_stand() {
        let line = r#"vllm:x{engine="3",model_name="a,engine=\"7\"",e="5"} 1"#;
        assert_eq!(
            [label(line, "engine"), label(line, "e"), label(line, "gine")],
            [Some("3"), Some("5"), None]
        );
    }
}
