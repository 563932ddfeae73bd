//! Asks workers whether they can serve, what they serve and in which pages.
//!
//! Readiness needs an answer to `/v1/models` that names the pool's model (an
//! engine that still loads weights is healthy and serves nothing) and, for
//! vLLM, a healthy `/health`; SGLang's generates a token and is left alone.
//! Page sizes from live endpoints are a second opinion: events are the truth.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kvrouter_core::trust::PrefixCaching;
use kvrouter_crds::config::{Engine, EventTransport};
use kvrouter_crds::health::Problem;
use serde_json::Value;

use super::load::label;
use super::{ReadyReason, ServedModel, Worker, WorkerStatus};
use crate::pool::Pool;
use crate::proxy::forward::version;
use crate::proxy::upstream::{Blame, ROUTER_EXHAUSTED, Upstream};

/// Between two probes of one worker.
const INTERVAL: Duration = Duration::from_secs(1);
/// An engine answers `/v1/models` from memory; two seconds are generous.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Between two readings of page size and version, which change with a restart only.
pub(super) const READ_ENGINE_EVERY: Duration = Duration::from_secs(15);
/// The same in probes.
const READ_ENGINE_PROBES: u64 = READ_ENGINE_EVERY.as_secs() / INTERVAL.as_secs();
/// Failed probes in a row after which a ready worker is no longer picked: one
/// lost answer under load is not an outage.
const FAILURES: u32 = 2;
/// Longest version: `0.33.1.dev123+gdeadbeef.d20261129` has 33 characters.
const MAX_VERSION: usize = 128;
/// Largest answer that is read: `/metrics` of a large engine is below 1 MiB.
const MAX_ANSWER: usize = 4 << 20;

/// Probes in a row for which this machine may have no address to ask a worker from
/// before the worker is taken for unreachable: its name may have addresses of a kind
/// that this machine has none of, and then nobody will ever reach it.
const NO_ADDRESS: u32 = 3;
/// Probes in a row that have to be asked before a router that had nothing to ask
/// with counts as well again: it may succeed now and then.
const CALM: u32 = 5;

/// Probes `worker` for ever; dropped when it leaves.
pub async fn watch(pool: Arc<Pool>, upstream: Upstream, worker: Arc<Worker>) {
    let (mut failures, mut round) = (0, 0u64);
    let mut asking = Asking::default();
    loop {
        let asked = ask(&pool, &upstream, &worker).await;
        let found = asking.note(asked);
        note_exhaustion(&pool, &worker, asking.is_exhausted());
        if let Some(status) = found {
            let found = status.unwrap_or_else(|| unreachable(&worker));
            failures = if found.reason == ReadyReason::Ok { 0 } else { failures + 1 };
            worker.missed_probes.store(failures, Ordering::Relaxed);
            let was_ready = worker.status().ready;
            // Before it can be picked: its page may keep it out.
            if found.ready && (!was_ready || round.is_multiple_of(READ_ENGINE_PROBES)) {
                // One that could not be asked is as it was.
                let _ = read_engine(&pool, &upstream, &worker, found.engine, !was_ready).await;
            }
            if found.ready {
                note_adapters(&pool, &worker, &found);
            }
            if found.ready || failures >= FAILURES || !was_ready {
                let turned = found.ready != was_ready;
                worker.times_ready.fetch_add(u32::from(found.ready && turned), Ordering::Relaxed);
                publish(&worker, found);
                if turned {
                    pool.review_pages();
                }
            }
            round += 1;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Why a worker could not be asked, which says nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unasked {
    /// The router has no sockets or memory left.
    Exhausted,
    /// This machine has no address and port to call that worker from.
    NoAddress,
}

/// How asking one worker went lately.
#[derive(Debug, Default)]
struct Asking {
    /// Probes in a row without an address to ask from.
    without_address: u32,
    /// Probes still to be asked before the router is well again.
    to_calm: u32,
}

impl Asking {
    /// What a probe tells of the worker: what it `found`, or, with `None`, that
    /// nothing reaches it. Nothing at all where it was not asked.
    fn note<T>(&mut self, found: Result<T, Unasked>) -> Option<Option<T>> {
        self.to_calm = match found {
            Err(Unasked::Exhausted) => CALM,
            _ => self.to_calm.saturating_sub(1),
        };
        self.without_address = match found {
            Err(Unasked::NoAddress) => self.without_address.saturating_add(1),
            _ => 0,
        };
        match found {
            Ok(found) => Some(Some(found)),
            Err(Unasked::NoAddress) if self.without_address > NO_ADDRESS => Some(None),
            Err(_) => None,
        }
    }

    fn is_exhausted(&self) -> bool {
        self.to_calm > 0
    }
}

/// Nothing reaches it; the rest is as it was.
fn unreachable(worker: &Worker) -> WorkerStatus {
    WorkerStatus { ready: false, reason: ReadyReason::Unreachable, ..worker.status() }
}

/// Notes whether the router lately had nothing to ask `worker` with, and logs the
/// first of all workers that this is true of.
fn note_exhaustion(pool: &Pool, worker: &Worker, is_exhausted: bool) {
    let is_first = is_exhausted && !pool.fleet.is_unable_to_ask();
    worker.is_unasked.store(is_exhausted, Ordering::Relaxed);
    if is_first {
        tracing::warn!(target: "kv_router::fleet", "unable to probe workers: no sockets or memory left");
    }
}

/// That workers cannot be asked.
pub fn exhausted() -> Problem {
    let message = "the router has no sockets or memory left to ask workers whether they can serve; raise its limit of open files, or run more replicas.";
    Problem { reason: ROUTER_EXHAUSTED.to_owned(), worker: None, message: message.to_owned() }
}

/// Takes over what was found, and says so when readiness changed.
fn publish(worker: &Worker, found: WorkerStatus) {
    let mut status = worker.write_status();
    if status.ready != found.ready || (!found.ready && status.reason != found.reason) {
        tracing::info!(
            target: "kv_router::fleet", worker = %worker.id, ready = found.ready,
            reason = %found.reason.label(), engine = %found.engine.label(), "worker readiness"
        );
    }
    let engine_version = status.engine_version.clone();
    *status = WorkerStatus { reported_page: status.reported_page, engine_version, ..found };
}

/// What the worker is now. What it serves is forgotten only when it says
/// something else: a worker that does not answer has not lost its adapters.
async fn ask(pool: &Pool, upstream: &Upstream, worker: &Worker) -> Result<WorkerStatus, Unasked> {
    let mut status = WorkerStatus { ready: false, ..worker.status() };
    let entries = match listed(get(upstream, worker, "/v1/models").await?) {
        Ok(entries) => entries,
        Err(reason) => {
            status.reason = reason;
            return Ok(status);
        }
    };
    if worker.configured_engine == Engine::Auto {
        status.engine = engine_of(&entries).unwrap_or(status.engine);
    }
    status.models = entries.iter().filter_map(served_model).collect();
    let base = &pool.config.file.model.name;
    status.reason = if status.models.is_empty() {
        ReadyReason::NoModel
    } else if !status.models.iter().any(|model| model.name == *base) {
        ReadyReason::OtherModel
    } else if status.engine == Engine::VLLM
        && get(upstream, worker, "/health").await?.is_none_or(|(code, _)| code != 200)
    {
        ReadyReason::Unhealthy
    } else {
        ReadyReason::Ok
    };
    status.ready = status.reason == ReadyReason::Ok;
    Ok(status)
}

/// The entries of an answer to `/v1/models`, or why there are none. An empty
/// list is a list.
fn listed(answer: Option<(u16, Bytes)>) -> Result<Vec<Value>, ReadyReason> {
    let (code, body) = answer.ok_or(ReadyReason::Unreachable)?;
    let parsed: Option<Value> = serde_json::from_slice(&body).ok().filter(|_| code == 200);
    match parsed.as_ref().and_then(|parsed| parsed.get("data")) {
        Some(Value::Array(entries)) => Ok(entries.clone()),
        _ => Err(ReadyReason::Unhealthy),
    }
}

fn engine_of(entries: &[Value]) -> Option<Engine> {
    entries.iter().find_map(|entry| match entry.get("owned_by").and_then(Value::as_str)? {
        "vllm" => Some(Engine::VLLM),
        "sglang" => Some(Engine::SGLang),
        "atom" => Some(Engine::ATOM),
        _ => None,
    })
}

/// Entries that cannot be read are left out; the others still count.
fn served_model(entry: &Value) -> Option<ServedModel> {
    let name = entry.get("id").and_then(Value::as_str)?;
    let adapter = entry.get("parent").is_some_and(Value::is_string);
    Some(ServedModel { name: name.to_owned(), adapter })
}

/// Reads page size, version and whether prefixes are kept, which change with a
/// restart only.
async fn read_engine(
    pool: &Pool,
    upstream: &Upstream,
    worker: &Worker,
    engine: Engine,
    joins: bool,
) -> Result<(), Unasked> {
    let version = match engine {
        Engine::SGLang => {
            let info = get(upstream, worker, "/server_info").await?;
            note_cache(pool, worker, sglang_page(info.clone()), sglang_caching(info.clone()));
            version_in(info)
        }
        Engine::VLLM | Engine::ATOM | Engine::Auto => {
            // Who reads its load reads the same page, and more often.
            if joins || !worker.has_read_metrics(pool.clock.now(), 2 * READ_ENGINE_EVERY) {
                note_metrics(pool, worker, get(upstream, worker, "/metrics").await?);
            }
            version_in(get(upstream, worker, "/version").await?)
        }
    };
    let mut status = worker.write_status();
    // One that does not say it this time has not become another release.
    status.engine_version = version.or(status.engine_version.take());
    Ok(())
}

/// Takes over what the metrics of vLLM say of its cache.
pub(super) fn note_metrics(pool: &Pool, worker: &Worker, answer: Option<(u16, Bytes)>) {
    note_cache(pool, worker, vllm_page(answer.clone()), vllm_caching(answer));
}

fn note_cache(pool: &Pool, worker: &Worker, page: Option<u32>, caching: PrefixCaching) {
    worker.write_status().reported_page = page;
    let misfit = page.is_some_and(|page| !pool.config.size.holds_pages_of(page));
    for target in &worker.targets {
        let mut trust = target.trust.lock();
        trust.set_reported_page_misfit(misfit);
        trust.set_prefix_caching(caching);
    }
}

/// SGLang's events name adapters since 0.5.22. Before that, their blocks look like
/// the base model's.
fn note_adapters(pool: &Pool, worker: &Worker, found: &WorkerStatus) {
    let has_events = pool.config.file.kv_events.transport != EventTransport::None;
    let serves_any = found.models.iter().any(|model| model.adapter);
    if !has_events || found.engine != Engine::SGLang || !serves_any {
        return;
    }
    // One that does not say its release may be an old one.
    if worker.status().engine_version.as_deref().and_then(version).is_none_or(|it| it < [0, 5, 22]) {
        for target in &worker.targets {
            target.trust.lock().adapters_untold();
        }
    }
}

/// The field `version`, which vLLM's `/version` and SGLang's `/server_info`
/// have.
fn version_in(answer: Option<(u16, Bytes)>) -> Option<Arc<str>> {
    let (_, body) = answer.filter(|(code, _)| *code == 200)?;
    let info: Value = serde_json::from_slice(&body).ok()?;
    let version = info.get("version").and_then(Value::as_str)?;
    let plain = version.len() <= MAX_VERSION && version.chars().all(|c| c.is_ascii_graphic());
    (plain && !version.is_empty()).then(|| version.into())
}

/// `kv_events.block_size` counts what a page of events holds, context
/// parallelism included; `page_size` alone does not.
fn sglang_page(answer: Option<(u16, Bytes)>) -> Option<u32> {
    let (_, body) = answer.filter(|(code, _)| *code == 200)?;
    let info: Value = serde_json::from_slice(&body).ok()?;
    let page = info.pointer("/kv_events/block_size").or_else(|| info.get("page_size"))?;
    page.as_u64().and_then(|page| u32::try_from(page).ok()).filter(|page| *page > 0)
}

/// The setting `disable_radix_cache`.
fn sglang_caching(answer: Option<(u16, Bytes)>) -> PrefixCaching {
    let info: Option<Value> =
        answer.filter(|(code, _)| *code == 200).and_then(|(_, body)| serde_json::from_slice(&body).ok());
    match info.and_then(|info| info.get("disable_radix_cache")?.as_bool()) {
        Some(true) => PrefixCaching::Off,
        Some(false) => PrefixCaching::On,
        None => PrefixCaching::Unknown,
    }
}

/// The label `block_size` of `vllm:cache_config_info`.
fn vllm_page(answer: Option<(u16, Bytes)>) -> Option<u32> {
    cache_config(answer, "block_size")?.parse().ok().filter(|page: &u32| *page > 0)
}

/// Its label `enable_prefix_caching`, as Python prints it.
fn vllm_caching(answer: Option<(u16, Bytes)>) -> PrefixCaching {
    match cache_config(answer, "enable_prefix_caching").as_deref() {
        Some("True") => PrefixCaching::On,
        Some("False") => PrefixCaching::Off,
        _ => PrefixCaching::Unknown,
    }
}

/// A label of `vllm:cache_config_info`.
fn cache_config(answer: Option<(u16, Bytes)>, name: &str) -> Option<String> {
    let (_, body) = answer.filter(|(code, _)| *code == 200)?;
    let text = std::str::from_utf8(&body).ok()?;
    let line = text.lines().find(|line| line.starts_with("vllm:cache_config_info{"))?;
    label(line, name).map(str::to_owned)
}

/// What it answers; `None` where it does not.
async fn get(upstream: &Upstream, worker: &Worker, path: &str) -> Result<Option<(u16, Bytes)>, Unasked> {
    match tokio::time::timeout(TIMEOUT, upstream.get(&worker.id, path, MAX_ANSWER)).await {
        Ok(Ok(answer)) => Ok(Some(answer)),
        Ok(Err(error)) => match error.blame() {
            Blame::Router => Err(Unasked::Exhausted),
            Blame::Unclear => Err(Unasked::NoAddress),
            Blame::Worker => Ok(None),
        },
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_that_never_comes_is_the_workers_fault() {
        use Unasked::{Exhausted, NoAddress};
        let mut asking = Asking::default();
        let mut note = |found| (asking.note(found), asking.is_exhausted());
        (0..100).for_each(|_| assert_eq!(note(Err(Exhausted)), (None, true), "not the worker's, ever"));
        (0..NO_ADDRESS).for_each(|_| assert_eq!(note(Err(NoAddress)).0, None, "it may pass"));
        assert_eq!(note(Ok(7)).0, Some(Some(7)), "it passed");
        (0..NO_ADDRESS).for_each(|_| assert_eq!(note(Err(NoAddress)).0, None, "counted from the start"));
        assert_eq!(note(Err(NoAddress)), (Some(None), false), "nothing will ever reach it");
        assert_eq!(note(Err(NoAddress)).0, Some(None));
        assert_eq!(note(Err(Exhausted)), (None, true));
        (1..CALM).for_each(|_| assert_eq!(note(Ok(7)), (Some(Some(7)), true), "it may be exhausted again"));
        assert_eq!(note(Ok(7)), (Some(Some(7)), false));
    }

    #[test]
    fn page_sizes_are_read_from_what_engines_really_say() {
        let metrics = "# HELP x\nvllm:cache_config_info{_block_size_resolved=\"True\",block_size=\"32\",mamba_block_size=\"None\"} 1.0\n";
        assert_eq!(vllm_page(Some((200, Bytes::from(metrics)))), Some(32));
        let first = "vllm:cache_config_info{block_size=\"16\"} 1.0\n";
        assert_eq!(vllm_page(Some((200, Bytes::from(first)))), Some(16));
        assert_eq!(vllm_page(Some((200, Bytes::from("vllm:other 1")))), None);
        let info = r#"{"page_size": 16, "kv_events": {"block_size": 32}}"#;
        assert_eq!(
            sglang_page(Some((200, Bytes::from(info)))),
            Some(32),
            "context parallelism multiplies it"
        );
        assert_eq!(
            sglang_page(Some((200, Bytes::from(r#"{"page_size": 16, "kv_events": null}"#)))),
            Some(16)
        );
        assert_eq!(sglang_page(Some((404, Bytes::new()))), None);
    }

    #[test]
    fn whether_prefixes_are_kept_is_read_from_what_engines_really_say() {
        use PrefixCaching::{Off, On, Unknown};
        let metrics = |value: &str| {
            let line = format!(
                "vllm:cache_config_info{{block_size=\"16\",enable_prefix_caching=\"{value}\"}} 1.0\n"
            );
            vllm_caching(Some((200, Bytes::from(line))))
        };
        assert_eq!([metrics("True"), metrics("False"), metrics("None")], [On, Off, Unknown]);
        assert_eq!(vllm_caching(None), Unknown);
        let info = |code, text: &'static str| sglang_caching(Some((code, Bytes::from(text))));
        assert_eq!(info(200, r#"{"disable_radix_cache": true}"#), Off);
        assert_eq!(info(200, r#"{"disable_radix_cache": false}"#), On);
        assert_eq!(info(200, r#"{"page_size": 1}"#), Unknown);
        assert_eq!(info(404, r#"{"disable_radix_cache": true}"#), Unknown);
    }

    #[test]
    fn versions_are_read_from_what_engines_really_say() {
        let long = format!(r#"{{"version": "{}"}}"#, "1".repeat(MAX_VERSION + 1));
        for (code, body, version) in [
            (200, r#"{"version":"0.33.0"}"#, Some("0.33.0")),
            (200, r#"{"page_size": 1, "version": "0.5.23"}"#, Some("0.5.23")),
            (200, r#"{"version": ""}"#, None),
            (200, r#"{"version": "a\nb"}"#, None),
            (200, &long, None),
            (200, r#"{"version": 3}"#, None),
            (401, r#"{"version": "1"}"#, None),
        ] {
            let answer = Some((code, Bytes::from(body.to_owned())));
            assert_eq!(version_in(answer).as_deref(), version, "{code} {body}");
        }
    }

    #[test]
    fn only_a_readable_list_says_what_a_worker_serves() {
        let of = |code: u16, body: &'static str| {
            listed(Some((code, Bytes::from(body)))).map(|entries| entries.len())
        };
        assert_eq!(of(200, r#"{"data": [{}, 5]}"#), Ok(2));
        assert_eq!(of(200, r#"{"data": []}"#), Ok(0), "it still loads its weights");
        assert_eq!(of(200, r#"{"data": null}"#), Err(ReadyReason::Unhealthy));
        assert_eq!(of(200, "<html>"), Err(ReadyReason::Unhealthy));
        assert_eq!(of(503, r#"{"data": []}"#), Err(ReadyReason::Unhealthy));
        assert_eq!(listed(None), Err(ReadyReason::Unreachable));
    }

    #[test]
    fn odd_entries_do_not_hide_the_others() {
        let entries = serde_json::json!([5, {"id": 7}, {"id": "base", "owned_by": "vllm", "parent": null}, {"id": "lora", "parent": "base"}]);
        let entries = entries.as_array().expect("a list");
        let models: Vec<_> = entries.iter().filter_map(served_model).collect();
        let model = |name: &str, adapter| ServedModel { name: name.to_owned(), adapter };
        assert_eq!(models, [model("base", false), model("lora", true)]);
        assert_eq!(engine_of(entries), Some(Engine::VLLM));
    }
}
