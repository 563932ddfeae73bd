//! The explorer: the page on the admin port, and what it asks once or twice a
//! second.
//!
//! The page itself holds nothing of the cluster and needs no token; what it shows
//! does. Receipts come in short form, of one namespace at a time, and without
//! prompts, as receipts have none; one opened receipt comes from
//! `/v1/admin/receipts`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use kvrouter_core::blocks::NamespaceId;
use kvrouter_core::receipts::ring::Entry;
use kvrouter_core::receipts::{Receipt, ResultRecord};
use kvrouter_core::trust::Freshness;
use kvrouter_core::units::Tick;
use serde_json::{Value, json};

use super::health;
use crate::fleet::{TargetState, Worker};
use crate::page::{self, Kind};
use crate::pool::Pool;

/// Receipts that are looked through for one answer: five seconds of 200 a second.
const MAX_RECEIPTS: u64 = 1000;
/// How many of those that the page has seen are looked at again: they may have
/// their results by now.
const AGAIN: u64 = 200;
/// Problems in one answer, worst first.
const MAX_PROBLEMS: usize = 20;

/// The page: no token, no data.
pub fn page_routes() -> axum::Router {
    axum::Router::new()
        .route("/explorer", get(|| async { page::document(Kind::Explorer, "explorer/") }))
        .route("/explorer/page.js", get(page::script))
        .route("/explorer/page.css", get(page::style))
        .route("/explorer/licences.txt", get(page::licences))
}

/// `/v1/admin/live?namespace=DIGEST&seen=NUMBER`: the fleet as it is, and the
/// receipts of that namespace that were filed after so many, and a few before.
pub async fn live(State(pool): State<Arc<Pool>>, Query(query): Query<HashMap<String, String>>) -> Response {
    let seen = query.get("seen").and_then(|seen| seen.parse().ok()).unwrap_or(0);
    let wanted = query.get("namespace").cloned();
    // Thousands of workers and receipts are written down off the async threads.
    match tokio::task::spawn_blocking(move || answer(&pool, wanted.as_deref(), seen)).await {
        Ok(value) => {
            let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
            (headers, value.to_string()).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn answer(pool: &Pool, wanted: Option<&str>, seen: u64) -> Value {
    let (now, freshness) = (pool.clock.now(), pool.live.read().freshness);
    let workers: Vec<Value> =
        pool.fleet.workers().iter().map(|worker| worker_row(pool, worker, now, freshness)).collect();
    let mut problems = health::report(pool).problems;
    let all_problems = problems.len();
    problems.truncate(MAX_PROBLEMS);
    let filed = pool.receipts.filed();
    let looked_at = filed.saturating_sub(seen).saturating_add(AGAIN).min(MAX_RECEIPTS);
    let entries = pool.receipts.latest(looked_at as usize, |_| true);
    let mut namespaces: BTreeMap<String, u64> = BTreeMap::new();
    let mut receipts = Vec::new();
    for receipt in entries.iter().filter_map(Entry::receipt) {
        let namespace = namespace_of(receipt.namespace);
        if wanted == Some(namespace.as_str()) {
            receipts.push(receipt_row(&receipt));
        }
        *namespaces.entry(namespace).or_default() += 1;
    }
    json!({
        "now_unix_ms": pool.clock.unix_ms(),
        "pool": format!("{}/{}", pool.config.file.pool.namespace, pool.config.file.pool.name),
        "router_version": env!("CARGO_PKG_VERSION"),
        "policy": pool.live.read().settings.policy.label(),
        "block_size": pool.config.size.tokens(),
        "ready": pool.is_ready(),
        "filed": filed,
        "workers": workers,
        "problems": problems,
        "problem_count": all_problems,
        "namespaces": namespaces,
        "receipts": receipts,
    })
}

fn namespace_of(namespace: NamespaceId) -> String {
    format!("{:032x}", namespace.0)
}

/// `[name, role, ready, reason, engine, [rank …], missed probes]`.
fn worker_row(pool: &Pool, worker: &Worker, now: Tick, freshness: Freshness) -> Value {
    let status = worker.status();
    let ranks: Vec<Value> =
        worker.targets.iter().map(|target| rank_row(pool, target, now, freshness)).collect();
    let (ready, reason) = (status.ready, status.reason.label());
    let (role, missed) = (worker.place().role.label(), worker.missed_probes());
    json!([worker.id.as_str(), role, ready, reason, status.engine.label(), ranks, missed])
}

/// `[rank, state, reason, credited, epoch, seq, age, blocks, active, queued,
/// context, requests]`.
fn rank_row(pool: &Pool, target: &TargetState, now: Tick, freshness: Freshness) -> Value {
    let verdict = target.trust.lock().verdict(now, freshness);
    let load = target.account.load();
    json!([
        target.target.rank.0,
        verdict.state.label(),
        verdict.reason.label(),
        verdict.credited,
        verdict.epoch.0,
        verdict.seq,
        verdict.age.map(|age| age.0),
        pool.index.block_count(target.slot),
        load.active_blocks,
        load.queued.0,
        load.context.0,
        load.requests,
    ])
}

/// `[id, attempt, time, role, policy, prompt tokens, blocks, outcome, target, tie,
/// predicted hit tokens, shadows, status, failure, first byte, engine's prompt
/// tokens, engine's cached tokens]`.
fn receipt_row(receipt: &Receipt) -> Value {
    let nothing = ResultRecord::default();
    let result = receipt.result.as_ref().unwrap_or(&nothing);
    let shadows: Vec<Value> = receipt
        .shadows
        .iter()
        .map(|shadow| json!([shadow.policy.label(), shadow.target.to_string(), shadow.regret_blocks]))
        .collect();
    json!([
        &*receipt.request_id,
        receipt.attempt,
        receipt.time_unix_ms,
        receipt.role,
        receipt.settings.policy.label(),
        receipt.prompt_tokens.0,
        receipt.prompt_blocks,
        receipt.outcome.label(),
        receipt.chosen.as_ref().map(|chosen| chosen.target.to_string()),
        receipt.chosen.as_ref().map(|chosen| chosen.tie),
        receipt.predicted_hit_tokens.0,
        shadows,
        receipt.result.as_ref().map(|result| result.status),
        result.failure,
        result.first_byte_ms,
        result.engine_prompt_tokens,
        result.engine_cached_tokens,
    ])
}
