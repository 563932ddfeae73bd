//! Metrics: registered here, described in docs/metrics.md.
//!
//! Counters and histograms are updated where things happen; gauges are read at
//! scrape time from the pool itself, so they cannot drift.

use kvrouter_core::ids::Role;
use kvrouter_core::policy::decode_demand::{self, Demand};
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::fleet::{Worker, rendering};
use crate::pool::Pool;
use crate::receipts::files::Queue;

/// The counters and histograms of one router.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    /// Requests by endpoint and by the class of their final status.
    pub requests: IntCounterVec,
    /// Picks by policy, role and outcome.
    pub picks: IntCounterVec,
    /// Full blocks of all prompts picked for.
    pub prompt_blocks: IntCounter,
    /// Blocks that picks predicted as hits, by evidence.
    pub hit_blocks: IntCounterVec,
    /// Prompt tokens as engines counted them.
    pub engine_prompt_tokens: IntCounter,
    /// Cached prompt tokens as engines reported them.
    pub engine_cached_tokens: IntCounter,
    /// Texts that the tokenizer was given, by whose rendering they followed: one
    /// per prompt of a request at most.
    pub tokenisations: IntCounterVec,
    /// Prompt tokens, by whether the prefix cache had them.
    pub prompt_tokens: IntCounterVec,
    /// Prompts that were not turned into ids, by reason.
    pub refusals: IntCounterVec,
    /// Attempts that failed, by reason.
    pub failures: IntCounterVec,
    /// Event messages, by what became of them.
    pub events: IntCounterVec,
    /// Messages about load between routers, by direction and by what became of them.
    pub loads: IntCounterVec,
    /// Questions to engines what they have in hand, by what came of them.
    pub engine_loads: IntCounterVec,
    /// Views fetched anew, by reason.
    pub resyncs: IntCounterVec,
    /// What sessions had to say about picks.
    pub sessions: IntCounterVec,
    /// Shadow picks, by whether they agree with the real one.
    pub shadow_picks: IntCounterVec,
    /// Blocks that shadow policies would have reused in addition.
    pub shadow_regret: IntCounterVec,
    /// Decode picks that input demand judged.
    pub demand_decisions: IntCounterVec,
    /// What was compared with workers, and handed to them.
    pub tokens: TokenCounters,
    /// Workers that joined or left.
    pub fleet_changes: IntCounterVec,
    /// Failures to follow the Kubernetes API, by resource and reason.
    pub discovery_errors: IntCounterVec,
    /// Seconds of the pick alone: lookup, pricing, booking, receipt.
    pub decision_seconds: Histogram,
    /// Seconds to render and tokenise.
    pub prompt_seconds: Histogram,
    /// Seconds from forwarding to the first byte of the answer's body.
    pub first_byte_seconds: Histogram,
    gauges: Gauges,
}

/// Counters of tokens: predicted, compared, handed over.
#[derive(Debug, Clone)]
pub struct TokenCounters {
    /// Predictions that engines reported on, by how they came out.
    pub predictions: IntCounterVec,
    /// Comparisons of a worker's tokens, by their result.
    pub render_checks: IntCounterVec,
    /// Requests whose ids could be forwarded, by whether they were.
    pub forwarded: IntCounterVec,
}

#[derive(Debug, Clone)]
struct Gauges {
    in_flight: IntGaugeVec,
    active_blocks: IntGaugeVec,
    queued_tokens: IntGaugeVec,
    strangers: IntGaugeVec,
    demand_tokens: IntGaugeVec,
    demand_requests: IntGaugeVec,
    booked: IntGaugeVec,
    released: IntGaugeVec,
    view_blocks: IntGaugeVec,
    trust: IntGaugeVec,
    worker_ready: IntGaugeVec,
    worker_parity: IntGaugeVec,
    tokenize_micros: GaugeVec,
    tokenize_share: GaugeVec,
    prediction_share: GaugeVec,
    prediction_drift: IntGaugeVec,
    replicas_heard: IntGaugeVec,
    pool: IntGaugeVec,
    receipt_lines: IntGaugeVec,
}

/// Makes metrics under our prefix and registers them.
struct Register<'a>(&'a Registry);

impl Register<'_> {
    fn keep<T: prometheus::core::Collector + Clone + 'static>(
        &self,
        metric: T,
    ) -> Result<T, prometheus::Error> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.keep(IntCounter::new(format!("kvrouter_{name}"), help)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        self.keep(IntCounterVec::new(Opts::new(format!("kvrouter_{name}"), help), labels)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        self.keep(IntGaugeVec::new(Opts::new(format!("kvrouter_{name}"), help), labels)?)
    }

    fn fractions(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
        self.keep(GaugeVec::new(Opts::new(format!("kvrouter_{name}"), help), labels)?)
    }

    /// Ten steps a factor of 2.5 apart span four decades.
    fn histogram(&self, name: &str, help: &str, from: f64) -> Result<Histogram, prometheus::Error> {
        let buckets = prometheus::exponential_buckets(from, 2.5, 11)?;
        let options = HistogramOpts::new(format!("kvrouter_{name}"), help).buckets(buckets);
        self.keep(Histogram::with_opts(options)?)
    }
}

impl Metrics {
    /// Registers everything.
    // tidy: long, because it is a list.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let register = Register(&registry);
        let counter = |name: &str, help: &str| register.counter(name, help);
        let counters = |name: &str, help: &str, labels: &[&str]| register.counters(name, help, labels);
        let histogram = |name: &str, help: &str, from: f64| register.histogram(name, help, from);
        Ok(Self {
            requests: counters(
                "requests_total",
                "Requests by endpoint and final status class.",
                &["endpoint", "status"],
            )?,
            picks: counters(
                "picks_total",
                "Picks by policy, role and outcome.",
                &["policy", "role", "outcome"],
            )?,
            prompt_blocks: counter("prompt_blocks_total", "Full blocks of all prompts picked for.")?,
            hit_blocks: counters(
                "hit_blocks_total",
                "Blocks predicted as hits, by evidence.",
                &["evidence"],
            )?,
            engine_prompt_tokens: counter(
                "engine_prompt_tokens_total",
                "Prompt tokens as engines counted them.",
            )?,
            engine_cached_tokens: counter(
                "engine_cached_tokens_total",
                "Cached prompt tokens as engines reported them.",
            )?,
            tokenisations: counters("tokenisations_total", "Texts tokenised.", &["endpoint", "variant"])?,
            prompt_tokens: counters("prompt_tokens_total", "Prompt tokens, by their source.", &["source"])?,
            refusals: counters("prompt_refusals_total", "Prompts not tokenised.", &["endpoint", "reason"])?,
            failures: counters("attempt_failures_total", "Attempts that failed, by reason.", &["reason"])?,
            events: counters("event_messages_total", "Event messages, by what became of them.", &["result"])?,
            loads: counters(
                "load_messages_total",
                "Messages about load between routers, by what became of them.",
                &["direction", "result"],
            )?,
            engine_loads: counters(
                "engine_load_reads_total",
                "Questions to engines what they have in hand, by what came of them.",
                &["result"],
            )?,
            resyncs: counters("view_resyncs_total", "Views fetched anew, by reason.", &["reason"])?,
            sessions: counters("session_picks_total", "What sessions had to say about picks.", &["result"])?,
            shadow_picks: counters(
                "shadow_picks_total",
                "Shadow picks, by whether they agree with the real one.",
                &["policy", "agrees"],
            )?,
            shadow_regret: counters(
                "shadow_regret_blocks_total",
                "Blocks that a shadow policy would have reused in addition.",
                &["policy"],
            )?,
            demand_decisions: counters(
                "decode_demand_decisions_total",
                "Decode picks that input demand judged, by whether it agrees with the policy.",
                &["mode", "input", "agrees"],
            )?,
            tokens: TokenCounters::new(&register)?,
            fleet_changes: counters("fleet_changes_total", "Workers that joined or left.", &["change"])?,
            discovery_errors: counters(
                "discovery_errors_total",
                "Failures to follow the Kubernetes API.",
                &["resource", "reason"],
            )?,
            decision_seconds: histogram(
                "decision_seconds",
                "The pick alone: lookup, pricing, booking, receipt.",
                0.00005,
            )?,
            prompt_seconds: histogram("prompt_seconds", "To render and tokenise.", 0.00005)?,
            first_byte_seconds: histogram(
                "first_byte_seconds",
                "From forwarding to the answer's first byte.",
                0.005,
            )?,
            gauges: Gauges::new(&register)?,
            registry,
        })
    }

    /// The text exposition, gauges read from `pool` now.
    pub fn render(&self, pool: &Pool) -> Result<String, prometheus::Error> {
        self.gauges.read(pool);
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }
}

impl TokenCounters {
    fn new(register: &Register<'_>) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str| register.counters(name, help, &["result"]);
        Ok(Self {
            predictions: counters(
                "predictions_total",
                "Predictions that engines reported on, by how they came out.",
            )?,
            render_checks: counters(
                "render_checks_total",
                "Comparisons of a worker's tokens, by their result.",
            )?,
            forwarded: counters(
                "forwarded_prompts_total",
                "Requests whose token ids could be forwarded, by whether they were.",
            )?,
        })
    }
}

impl Gauges {
    fn new(register: &Register<'_>) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| register.gauges(name, help, labels);
        Ok(Self {
            in_flight: gauges("target_requests", "Leases in flight.", &["target"])?,
            active_blocks: gauges("target_active_blocks", "Distinct blocks in flight.", &["target"])?,
            queued_tokens: gauges(
                "target_queued_tokens",
                "Uncached tokens that wait for a first byte.",
                &["target"],
            )?,
            strangers: gauges(
                "target_strangers",
                "Sequences that an engine has in hand and no router of the pool sent.",
                &["target"],
            )?,
            demand_tokens: gauges(
                "decode_demand_tokens",
                "Input tokens held for decoding, once for every answer wanted.",
                &["target"],
            )?,
            demand_requests: gauges("decode_demand_requests", "Requests held for decoding.", &["target"])?,
            booked: gauges("leases_booked", "Leases ever booked.", &["target"])?,
            released: gauges("leases_released", "Leases ever released.", &["target"])?,
            view_blocks: gauges("view_blocks", "Blocks in the view of a target.", &["target"])?,
            trust: gauges(
                "view_trust",
                "1 for the state that a view is in.",
                &["target", "state", "reason"],
            )?,
            worker_ready: gauges("worker_ready", "Whether a worker may be picked.", &["worker", "reason"])?,
            worker_parity: gauges(
                "worker_parity",
                "1 for whether a worker makes the router's tokens.",
                &["worker", "variant", "state"],
            )?,
            tokenize_micros: register.fractions(
                "worker_tokenize_microseconds_per_token",
                "What a worker takes to tokenise, measured at its tokenize endpoint.",
                &["worker"],
            )?,
            tokenize_share: register.fractions(
                "worker_tokenize_share",
                "Part of the time to the first byte that a worker tokenises.",
                &["worker"],
            )?,
            prediction_share: register.fractions(
                "prediction_share",
                "Mean share of predicted hits that the engine reports.",
                &["target"],
            )?,
            prediction_drift: gauges(
                "prediction_drift",
                "1 while most predictions of a view do not come true.",
                &["target", "direction", "cause"],
            )?,
            replicas_heard: gauges(
                "replicas_heard",
                "Other routers of the pool that told of their load lately.",
                &[],
            )?,
            pool: gauges("pool", "Sizes of the pool's tables.", &["table"])?,
            receipt_lines: gauges(
                "receipt_lines",
                "Receipts for files, by what became of them since the start.",
                &["result"],
            )?,
        })
    }

    /// Targets that are gone and states that passed disappear.
    fn read(&self, pool: &Pool) {
        let all = [
            &self.in_flight,
            &self.active_blocks,
            &self.queued_tokens,
            &self.strangers,
            &self.demand_tokens,
            &self.demand_requests,
            &self.booked,
            &self.released,
            &self.view_blocks,
            &self.trust,
            &self.worker_ready,
            &self.worker_parity,
            &self.prediction_drift,
        ];
        all.iter().for_each(|gauges| gauges.reset());
        [&self.tokenize_micros, &self.tokenize_share, &self.prediction_share]
            .iter()
            .for_each(|gauges| gauges.reset());
        let now = pool.clock.now();
        let freshness = pool.live.read().freshness;
        let counts_demand = decode_demand::counts(&pool.live.read().settings, Role::Decode);
        let set = |gauges: &IntGaugeVec, labels: &[&str], value: u64| {
            gauges.with_label_values(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        for worker in pool.fleet.workers().iter() {
            let (ready, reason) = (worker.is_ready(), worker.reason().label());
            set(&self.worker_ready, &[worker.id.as_str(), reason], u64::from(ready));
            self.read_rendering(worker);
            for target in &worker.targets {
                let name = target.target.to_string();
                let load = target.account.load();
                let turnover = target.account.turnover();
                set(&self.in_flight, &[&name], load.requests);
                set(&self.active_blocks, &[&name], load.active_blocks);
                set(&self.queued_tokens, &[&name], load.queued.0);
                if let Some(strangers) = target.account.strangers(now) {
                    set(&self.strangers, &[&name], strangers.requests);
                }
                if counts_demand && worker.place().role == Role::Decode {
                    self.set_demand(&name, target.account.demand());
                }
                set(&self.booked, &[&name], turnover.booked);
                set(&self.released, &[&name], turnover.released);
                set(&self.view_blocks, &[&name], pool.index.block_count(target.slot) as u64);
                let verdict = target.trust.lock().verdict(now, freshness);
                set(&self.trust, &[&name, verdict.state.label(), verdict.reason.label()], 1);
                let (share, drift) = target.reconciled(now);
                if let Some(share) = share {
                    let share = f64::from(share.thousandths()) / 1000.0;
                    self.prediction_share.with_label_values(&[&name]).set(share);
                }
                if let Some(drift) = drift {
                    set(&self.prediction_drift, &[&name, drift.direction.label(), drift.cause.label()], 1);
                }
            }
        }
        self.read_tables(pool);
    }

    fn read_tables(&self, pool: &Pool) {
        let set = |gauges: &IntGaugeVec, labels: &[&str], value: u64| {
            gauges.with_label_values(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        if let Some(replicas) = pool.replicas_heard() {
            set(&self.replicas_heard, &[], replicas);
        }
        set(&self.pool, &["index_blocks"], pool.index.unique_blocks() as u64);
        set(&self.pool, &["index_bytes"], pool.index.heap_bytes() as u64);
        set(&self.pool, &["index_slots"], pool.index.slots_in_use() as u64);
        set(&self.pool, &["workers"], pool.fleet.workers().len() as u64);
        let tasks = tokio::runtime::Handle::try_current().map(|runtime| runtime.metrics().num_alive_tasks());
        set(&self.pool, &["tasks"], tasks.unwrap_or(0) as u64);
        set(&self.pool, &["history_pairs"], pool.history.lock().len() as u64);
        set(&self.pool, &["history_evicted"], pool.history.lock().evicted());
        let waiting = pool.config.waiting_places().saturating_sub(pool.waiting.available_permits());
        set(&self.pool, &["requests_waiting"], waiting as u64);
        set(&self.pool, &["sessions"], pool.ledger.sessions() as u64);
        set(&self.pool, &["responses"], pool.responses.lock().len() as u64);
        if let Some(cache) = pool.prompter.cache() {
            set(&self.pool, &["prompt_cache_bytes"], cache.bytes() as u64);
            set(&self.pool, &["prompt_cache_evicted"], cache.evicted());
        }
        set(&self.pool, &["receipts_filed"], pool.receipts.filed());
        for (result, count) in pool.receipts.queue().map(Queue::counts).into_iter().flatten() {
            set(&self.receipt_lines, &[result], count);
        }
    }

    fn set_demand(&self, target: &str, demand: Demand) {
        let set = |gauges: &IntGaugeVec, value: u64| {
            gauges.with_label_values(&[target]).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.demand_tokens, demand.tokens.0);
        set(&self.demand_requests, demand.requests);
    }

    fn read_rendering(&self, worker: &Worker) {
        let (known, id) = (worker.rendering.known(), worker.id.as_str());
        let labels = [id, known.variant.label(), rendering::label(known.parity)];
        self.worker_parity.with_label_values(&labels).set(1);
        if let Some(micros) = known.micros_per_token {
            self.tokenize_micros.with_label_values(&[id]).set(micros);
        }
        if let Some(share) = worker.rendering.share_of_first_byte() {
            self.tokenize_share.with_label_values(&[id]).set(share);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvrouter_core::policy::PolicyKind;

    use super::*;
    use crate::fleet::tests::pool;
    use crate::fleet::{Exclusion, ReadyReason};
    use crate::prompt::Refusal;
    use crate::prompt::endpoint::Endpoint;
    use crate::prompt::family::Family;

    const PAGE: &str = include_str!("../../docs/metrics.md");

    type Words = BTreeSet<&'static str>;

    /// The part of the page from behind `heading` to the next label or heading.
    fn part(heading: &str) -> &'static str {
        let (_, rest) = PAGE.split_once(heading).expect(heading);
        let ends = ["\n**`", "\n#"].into_iter().filter_map(|end| rest.find(end));
        &rest[..ends.min().unwrap_or(rest.len())]
    }

    /// What stands in backticks and is spelt as labels are.
    fn labels(text: &'static str) -> Words {
        let is_label = |word: &&str| {
            let of_labels = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
            word.starts_with(|first: char| first.is_ascii_lowercase()) && word.bytes().all(of_labels)
        };
        text.split('`').skip(1).step_by(2).filter(is_label).collect()
    }

    /// The same, of one column of the tables in `text`.
    fn column(text: &'static str, column: usize) -> Words {
        let rows = text.lines().filter(|line| line.starts_with('|'));
        rows.filter_map(|row| row.split('|').nth(column + 1)).flat_map(labels).collect()
    }

    /// Exactly these values are documented, as conditions are.
    #[test]
    fn the_documentation_lists_exactly_these_labels() {
        use Endpoint::{Chat, Completions, Embeddings, Generate, Messages, Other, Responses};
        let endpoints = [Chat, Completions, Messages, Responses, Generate, Embeddings, Other];
        assert_eq!(labels(part("**`endpoint`**")), endpoints.map(Endpoint::label).into());
        assert_eq!(labels(part("**`policy`**:")), PolicyKind::ALL.map(PolicyKind::label).into());
        let roles = [Role::Mixed, Role::Prefill, Role::Decode].map(Role::label);
        assert_eq!(labels(part("**`role`**")), roles.into());
        let refusals = [
            Refusal::NoTokenizer,
            Refusal::NoTemplate,
            Refusal::Unrenderable,
            Refusal::Family(Family::Harmony),
            Refusal::Media,
            Refusal::History,
            Refusal::Malformed,
            Refusal::Untokenizable,
            Refusal::Panicked,
        ];
        let found = column(part("**`reason`** of `kvrouter_prompt_refusals_total`"), 0);
        assert_eq!(found, refusals.map(Refusal::label).into());
    }

    /// Every error that clients can get has its row, and no row is of none.
    #[test]
    fn the_documentation_lists_exactly_these_errors() {
        let source = include_str!("proxy/errors.rs");
        let (_, code) = source.split_once("pub const fn code").expect("the function");
        let (code, _) = code.split_once("\n    }").expect("its end");
        let codes: Words = code.split('"').skip(1).step_by(2).collect();
        assert!(codes.len() > 20, "{codes:?}");
        assert_eq!(column(part("### Error codes"), 1), codes);
    }

    #[test]
    fn states_of_workers_and_tables_of_the_pool_are_documented() {
        let reasons = [
            ReadyReason::Ok,
            ReadyReason::NotProbed,
            ReadyReason::Unreachable,
            ReadyReason::Unhealthy,
            ReadyReason::NoModel,
            ReadyReason::OtherModel,
            ReadyReason::PageSize,
            ReadyReason::Excluded(Exclusion::PodNotReady),
            ReadyReason::Excluded(Exclusion::NoRole),
            ReadyReason::Excluded(Exclusion::TwoRoles),
            ReadyReason::Excluded(Exclusion::TwoPools),
            ReadyReason::Excluded(Exclusion::SameAddress),
        ];
        let found = labels(part("**`reason`** of `kvrouter_worker_ready`"));
        let missing: Words =
            reasons.map(ReadyReason::label).into_iter().filter(|it| !found.contains(it)).collect();
        assert_eq!(missing, Words::new());
        let text = pool();
        let text = text.metrics.render(&text).expect("it renders");
        let tables =
            text.lines().filter_map(|line| line.strip_prefix("kvrouter_pool{table=\"")?.split('"').next());
        let tables: Vec<&str> = tables.collect();
        assert!(tables.len() > 8, "{tables:?}");
        let found = labels(part("**`table`** of `kvrouter_pool`"));
        for table in tables {
            assert!(found.contains(table), "{table} is not documented");
        }
    }
}
