//! What people and probes ask: metrics, health report, cache view, explain,
//! receipts.
//!
//! Two ports: `/metrics` and `/health/report` hold neither prompts nor hashes
//! and need no token; the admin port does where one is configured.

pub mod explorer;
pub mod health;

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header};
use kvrouter_core::blocks::NamespaceId;
use kvrouter_core::ids::Role;
use kvrouter_core::json::canonical_json;
use kvrouter_core::policy::Load;
use kvrouter_core::policy::leases::Account;
use kvrouter_core::receipts::Receipt;
use kvrouter_core::receipts::chain::Head;
use kvrouter_core::receipts::ring::Entry;
use serde_json::{Value, json};

use crate::page::Guard;
use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::proxy::pd;
use crate::proxy::prepared::prepare_blocking;
use crate::proxy::{self, errors};
use crate::route;

/// Receipts in one answer unless asked otherwise, and at most.
const RECEIPTS: usize = 20;
const MAX_RECEIPTS: usize = 1000;
/// Largest answer about receipts. One of a pool of 2,000 targets takes about a
/// megabyte, and nobody reads a gigabyte; an answer that was cut says so.
const MAX_ANSWER: usize = 16 << 20;
/// How a list of receipts ends, and one that was cut.
const END: &str = "]}";
const TRUNCATED: &str = r#"],"truncated":true}"#;

/// `/metrics` and `/health/report`.
pub fn metrics_router(pool: Arc<Pool>) -> axum::Router {
    axum::Router::new()
        .route("/metrics", axum::routing::get(metrics))
        .route("/health/report", axum::routing::get(report))
        .with_state(pool)
}

/// The admin endpoints.
pub fn admin_router(pool: Arc<Pool>) -> axum::Router {
    let guard = if pool.config.admin_token.is_some() { Guard::Token } else { Guard::Open };
    let body_limit = usize::try_from(pool.config.file.limits.request_body_bytes).unwrap_or(usize::MAX);
    axum::Router::new()
        .route("/v1/admin/cache-view/{worker}", axum::routing::get(cache_view))
        .route("/v1/admin/workers", axum::routing::get(workers))
        .route("/v1/admin/explain", axum::routing::post(explain).layer(DefaultBodyLimit::max(body_limit)))
        .route("/v1/admin/receipts", axum::routing::get(receipts))
        .route("/v1/admin/live", axum::routing::get(explorer::live))
        .route("/metrics", axum::routing::get(metrics))
        .route("/health/report", axum::routing::get(report))
        .layer(middleware::from_fn_with_state(Arc::clone(&pool), require_token))
        .with_state(pool)
        .merge(explorer::page_routes())
        .layer(middleware::from_fn(move |request, next| guard.check(request, next)))
}

async fn require_token(State(pool): State<Arc<Pool>>, request: Request, next: Next) -> Response {
    let Some(token) = &pool.config.admin_token else { return next.run(request).await };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer "));
    if given.is_some_and(|given| equal_in_constant_time(given.as_bytes(), token.as_bytes())) {
        return next.run(request).await;
    }
    let message = "This port needs a token. Send `Authorization: Bearer TOKEN`, from adminTokenFile.";
    refuse(StatusCode::UNAUTHORIZED, message, "invalid_token")
}

/// Compares without telling, by its time, how much is equal.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

fn refuse(status: StatusCode, message: &str, code: &str) -> Response {
    (status, Json(errors::object(message, "invalid_request_error", code))).into_response()
}

async fn metrics(State(pool): State<Arc<Pool>>) -> Response {
    match pool.metrics.render(&pool) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            tracing::error!(target: "kv_router", error = %error, "metrics were not rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn report(State(pool): State<Arc<Pool>>) -> Response {
    Json(health::report(&pool)).into_response()
}

/// `{"worker_id", "block_count", …}`; counts are summed over ranks.
async fn cache_view(State(pool): State<Arc<Pool>>, Path(worker): Path<String>) -> Response {
    let Some(worker) = pool.fleet.worker(&worker) else {
        let workers = pool.fleet.workers();
        let known: Vec<&str> = workers.iter().map(|worker| worker.id.as_str()).collect();
        let message = format!("There is no worker `{worker}`. Known: {}.", known.join(", "));
        return refuse(StatusCode::NOT_FOUND, &message, "worker_not_found");
    };
    let freshness = pool.live.read().freshness;
    let now = pool.clock.now();
    let ranks: Vec<Value> = worker
        .targets
        .iter()
        .map(|target| {
            let verdict = target.trust.lock().verdict(now, freshness);
            json!({
                "rank": target.target.rank.0, "block_count": pool.index.block_count(target.slot),
                "trust": verdict.state.label(), "reason": verdict.reason.label(), "credited": verdict.credited,
                "epoch": verdict.epoch.0, "seq": verdict.seq, "age_ms": verdict.age.map(|age| age.0),
            })
        })
        .collect();
    let blocks: usize = worker.targets.iter().map(|target| pool.index.block_count(target.slot)).sum();
    Json(json!({
        "worker_id": worker.id.as_str(), "block_count": blocks,
        "block_size": pool.config.size.tokens(), "ranks": ranks,
    }))
    .into_response()
}

/// Loads by target: booked by this router and by others of the pool, and what came by
/// another way.
async fn workers(State(pool): State<Arc<Pool>>) -> Response {
    let report = health::report(&pool);
    let fleet = pool.fleet.workers();
    let now = pool.clock.now();
    let by_target = |load: &dyn Fn(&Account) -> Load| -> HashMap<String, Load> {
        let targets = fleet.iter().flat_map(|worker| &worker.targets);
        targets.map(|target| (target.target.to_string(), load(&target.account))).collect()
    };
    let (load, elsewhere) = (by_target(&Account::load), by_target(&|it| it.booked_elsewhere(now)));
    let strangers = by_target(&|it| it.strangers(now).unwrap_or_default());
    let all = json!({
        "workers": report.workers, "load": load, "booked_elsewhere": elsewhere, "strangers": strangers,
    });
    Json(all).into_response()
}

/// What would be picked for the posted body now. Books nothing.
async fn explain(
    State(pool): State<Arc<Pool>>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = query.get("path").map_or("/v1/chat/completions", String::as_str);
    let tenant = match proxy::tenant(&pool, &Method::POST, path, &headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let endpoint = Endpoint::of(path);
    let role = match query.get("role").map(String::as_str) {
        None | Some("mixed") => Role::Mixed,
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some(_) => {
            return refuse(
                StatusCode::BAD_REQUEST,
                "`role` must be mixed, prefill or decode.",
                "invalid_role",
            );
        }
    };
    let work = move || {
        let mut ask = prepare_blocking(&pool, endpoint, "explain".into(), &body, tenant)?.ask;
        match pd::standing(&pool, ask.needs()).filter(|_| role != Role::Mixed) {
            Some(protocol) => ask = ask.part(role, protocol),
            None => ask.role = role,
        }
        let receipt = route::explain(&pool, &ask).decode();
        Ok::<_, errors::ClientError>(receipt.map(|receipt| explanation(receipt, MAX_ANSWER)))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(Ok(text))) => text_of("application/json", text),
        Ok(Err(error)) => error.into_response(),
        Ok(Ok(Err(_))) | Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The latest receipts, newest first; of one request with `?request_id=`, of one
/// namespace with `?namespace=`.
async fn receipts(State(pool): State<Arc<Pool>>, Query(query): Query<HashMap<String, String>>) -> Response {
    let limit = match query.get("limit").map(|limit| limit.parse::<usize>()) {
        None => RECEIPTS,
        Some(Ok(limit)) if (1..=MAX_RECEIPTS).contains(&limit) => limit,
        Some(_) => {
            let message = format!("`limit` must be 1 to {MAX_RECEIPTS}.");
            return refuse(StatusCode::BAD_REQUEST, &message, "invalid_limit");
        }
    };
    let namespace = match query.get("namespace").map(|digest| namespace(digest)) {
        None => None,
        Some(Some(namespace)) => Some(namespace),
        Some(None) => {
            let message = "`namespace` must be 32 digits of 0-9 and a-f, as receipts print it.";
            return refuse(StatusCode::BAD_REQUEST, message, "invalid_namespace");
        }
    };
    let id = query.get("request_id");
    let wanted = |entry: &Entry| {
        id.is_none_or(|id| *id == entry.record.request_id())
            && namespace.is_none_or(|namespace| entry.record.namespace() == Some(namespace))
    };
    let found = pool.receipts.latest(limit, wanted);
    // Hundreds of large receipts take a second to write down.
    let written = match query.get("format").map(String::as_str) {
        None | Some("json") => {
            tokio::task::spawn_blocking(move || ("application/json", listing(&found, MAX_ANSWER))).await
        }
        Some("jsonl") => {
            tokio::task::spawn_blocking(move || ("application/jsonl", chained(&found, MAX_ANSWER))).await
        }
        Some(_) => {
            return refuse(StatusCode::BAD_REQUEST, "`format` must be json or jsonl.", "invalid_format");
        }
    };
    match written {
        Ok((kind, text)) => text_of(kind, text),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The namespace whose digest this is, spelt as receipts spell it.
fn namespace(digest: &str) -> Option<NamespaceId> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_digest = digest.len() == 32 && digest.bytes().all(is_digit);
    is_digest.then(|| u128::from_str_radix(digest, 16).ok())?.map(NamespaceId)
}

/// The receipts as canonical JSON of at most `limit` bytes; the oldest are left
/// out where they do not fit.
fn listing(entries: &[Entry], limit: usize) -> String {
    let mut text = r#"{"receipts":["#.to_owned();
    let mut written = 0;
    for receipt in entries.iter().filter_map(Entry::receipt) {
        let receipt = canonical_json(&receipt.to_value());
        if text.len() + 1 + receipt.len() + TRUNCATED.len() > limit {
            break;
        }
        if written > 0 {
            text.push(',');
        }
        text.push_str(&receipt);
        written += 1;
    }
    text.push_str(if written < entries.len() { TRUNCATED } else { END });
    text
}

/// The receipts as a chain of its own, the oldest first, as
/// `kv-router replay --trace` takes it. Where they do not fit into `limit` bytes
/// the oldest are left out, and a gap at the end says how many.
fn chained(entries: &[Entry], limit: usize) -> String {
    let all: Vec<Receipt> = entries.iter().filter_map(Entry::receipt).collect();
    // What a line has beside its receipt takes less.
    const MORE: usize = 256;
    let mut room = limit;
    let fits = |receipt: &&Receipt| {
        let length = canonical_json(&receipt.to_value()).len() + MORE;
        room = room.saturating_sub(length);
        room > 0
    };
    let kept = all.iter().take_while(fits).count();
    let mut head = Head::default();
    let mut lines: Vec<String> = all[..kept].iter().rev().map(|receipt| head.receipt(receipt)).collect();
    if kept < entries.len() {
        let last = all.first().map_or(0, |receipt| receipt.time_unix_ms);
        lines.push(head.gap(last, (entries.len() - kept) as u64));
    }
    lines.iter().fold(String::new(), |text, line| text + line + "\n")
}

/// The receipt as canonical JSON of at most `limit` bytes; candidates and prompts are
/// left out where they do not fit.
fn explanation(mut receipt: Receipt, limit: usize) -> String {
    let mut text = canonical_json(&receipt.to_value());
    while text.len() > limit {
        match (receipt.candidates.len(), receipt.prompts.len()) {
            (0, 0) => break,
            (candidates, prompts) if candidates < prompts => receipt.prompts.truncate(prompts / 2),
            (candidates, _) => receipt.candidates.truncate(candidates / 2),
        }
        let mut cut = receipt.to_value();
        cut["truncated"] = Value::Bool(true);
        text = canonical_json(&cut);
    }
    text
}

fn text_of(kind: &'static str, text: String) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    use kvrouter_core::policy::Settings;
    use kvrouter_core::receipts::chain::Follower;
    use kvrouter_core::receipts::read::Content;
    use kvrouter_core::receipts::{Draft, PromptRecord};
    use kvrouter_core::units::{TierHits, Tokens};

    fn entry(id: &str) -> Entry {
        Entry { record: Draft::undecided(id, &Settings::default(), 16).encode(), result: None }
    }

    fn receipt(id: &str) -> Receipt {
        entry(id).receipt().expect("ours")
    }

    #[test]
    fn a_namespace_is_spelt_as_receipts_spell_it() {
        let of = |id: u128| json!(NamespaceId(id)).as_str().map(str::to_owned).expect("a text");
        let settings = Settings::default();
        for id in [0, 1, u128::MAX, 0x89e3_43d9] {
            assert_eq!(namespace(&of(id)), Some(NamespaceId(id)));
            let draft = Draft { namespace: NamespaceId(id), ..Draft::undecided("r", &settings, 16) };
            assert_eq!(draft.encode().namespace(), Some(NamespaceId(id)), "read without the rest");
        }
        let long = of(1) + "0";
        for bad in
            ["", "0", "+1", &*long, &of(1)[1..], &of(u128::MAX).to_uppercase(), &of(1).replace('1', "g")]
        {
            assert_eq!(namespace(bad), None, "{bad}");
        }
        assert_eq!(namespace(&format!("+{}", &of(1)[1..])), None, "a sign is no digit");
    }

    #[test]
    fn a_listing_keeps_to_its_limit_and_says_so() {
        let receipts = ["a", "b"].map(entry);
        let whole = listing(&receipts, usize::MAX);
        assert_eq!(whole, canonical_json(&json!({"receipts": (["a", "b"].map(receipt))})), "it is canonical");
        let cases: [(usize, &[&str]); 3] =
            [(whole.len() + 20, &["a", "b"]), (whole.len() - 1, &["a"]), (0, &[])];
        for (limit, ids) in cases {
            let text = listing(&receipts, limit);
            let value: Value = serde_json::from_str(&text).expect("valid");
            let found = value["receipts"].as_array().expect("a list");
            let found: Vec<_> = found.iter().filter_map(|one| one["request_id"].as_str()).collect();
            assert_eq!(found, ids, "at most {limit} bytes");
            assert_eq!(value["truncated"] == true, ids.len() < 2, "at most {limit} bytes");
            assert!(limit == 0 || text.len() <= limit);
        }
    }

    #[test]
    fn a_chain_of_what_is_in_memory_is_whole_and_says_what_it_lacks() {
        let entries = ["c", "b", "a"].map(entry);
        let read = |limit: usize| {
            let mut follower = Follower::default();
            let lines = follower.file(&chained(&entries, limit)).expect("a chain");
            let ids = lines.iter().filter_map(|line| match &line.content {
                Content::Receipt(receipt) => Some(receipt.request_id.to_string()),
                Content::Gap { .. } => None,
            });
            (ids.collect::<Vec<_>>(), follower.lost)
        };
        assert_eq!(read(usize::MAX), (vec!["a".to_owned(), "b".to_owned(), "c".to_owned()], 0));
        assert_eq!(read(3000), (vec!["b".to_owned(), "c".to_owned()], 1));
    }

    #[test]
    fn an_explanation_without_candidates_is_given_whole() {
        let text = explanation(receipt("a"), 0);
        assert_eq!(text, canonical_json(&json!(receipt("a"))));
    }

    #[test]
    fn an_explanation_of_very_many_prompts_keeps_to_its_limit_and_says_so() {
        let one = PromptRecord { tokens: Tokens(3), blocks: 0, claimed: TierHits::default() };
        let many = Receipt { prompts: vec![one; 1000], ..receipt("a") };
        let text = explanation(many, 40_000);
        let value: Value = serde_json::from_str(&text).expect("valid");
        let left = value["prompts"].as_array().expect("a list").len();
        assert!(text.len() <= 40_000 && value["truncated"] == true, "{} bytes", text.len());
        assert_eq!(left, 500);
    }
}
