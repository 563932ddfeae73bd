//! The simulator's own endpoints: faults on demand, what the engine saw, a way back to empty.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Engine, Refusal, json_response};
use crate::rank::Rank;

/// How long the answer to a restart may take to reach its client before connections are cut.
const RESTART_GRACE: Duration = Duration::from_millis(20);
/// Longest stall: an hour is for ever in a test.
const MAX_STALL_MS: u64 = 3_600_000;

/// Faults of the HTTP side that are still to come.
#[derive(Debug, Default)]
pub(super) struct Faults {
    refuse: Option<RefuseFault>,
    hang: u32,
    pub(super) die_after_chunks: Option<usize>,
    unhealthy: bool,
    pub(super) hides_load: bool,
    tokenize: Tokenize,
}

/// Body of `POST /sim/fault`; any number of faults at once.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultRequest {
    /// Restricts event and scheduler faults to one rank.
    rank: Option<usize>,
    drop_events: Option<u32>,
    hold_events: Option<bool>,
    #[serde(default)]
    restart: bool,
    stall_ms: Option<u64>,
    die_after_chunks: Option<usize>,
    refuse: Option<RefuseFault>,
    hang: Option<u32>,
    garbage_events: Option<u16>,
    /// 0 tells the truth again.
    page_size_lie: Option<u64>,
    health: Option<Health>,
    /// Chats are rendered with this template; an empty one is the model's own again.
    chat_template: Option<String>,
    tokenize: Option<Tokenize>,
    /// Nothing tells how many requests there are: vLLM without statistics, SGLang before 0.5.8.
    hide_load: Option<bool>,
    /// Share of hits that is reported to have been used.
    hit_percent: Option<u8>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RefuseFault {
    status: u16,
    count: u32,
    /// How long the request is looked at first.
    #[serde(default)]
    after_ms: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    Ok,
    Fail,
}

/// What `/tokenize` does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Tokenize {
    #[default]
    Ok,
    /// There is no such endpoint.
    Missing,
    /// It never answers.
    Hang,
    /// It knows texts and no chats, as older releases of SGLang.
    Texts,
}

impl Engine {
    /// What a fault answers to `/tokenize`, if there is one. May never return.
    pub(super) async fn faulty_tokenize(&self, is_a_chat: bool) -> Option<Response> {
        let fault = self.faults.lock().tokenize;
        let status = match fault {
            Tokenize::Ok => return None,
            Tokenize::Texts if !is_a_chat => return None,
            Tokenize::Texts => StatusCode::BAD_REQUEST,
            Tokenize::Missing => StatusCode::NOT_FOUND,
            Tokenize::Hang => std::future::pending().await,
        };
        Some(self.refuse(&Refusal { status, message: "refused by the simulator".to_owned() }))
    }

    /// What a pending fault answers to an inference request, if there is one. May never return.
    pub(super) async fn faulty_answer(&self) -> Option<Response> {
        let (hangs, refused) = {
            let mut faults = self.faults.lock();
            let hangs = faults.hang > 0;
            faults.hang = faults.hang.saturating_sub(1);
            let mut refused = None;
            if let Some(refuse) = faults.refuse.as_mut().filter(|refuse| !hangs && refuse.count > 0) {
                refuse.count -= 1;
                refused = Some((refuse.status, Duration::from_millis(refuse.after_ms.min(MAX_STALL_MS))));
            }
            (hangs, refused)
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        let (status, time) = refused?;
        tokio::time::sleep(time).await;
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        let message = "refused by the simulator".to_owned();
        Some(self.refuse(&Refusal { status, message }))
    }

    pub(super) fn is_healthy(&self) -> bool {
        !self.faults.lock().unhealthy
    }

    fn apply(&self, request: &FaultRequest) {
        for (index, rank) in self.ranks.iter().enumerate() {
            if request.rank.is_none_or(|wanted| wanted == index) {
                apply_to_rank(rank, request);
            }
        }
        let mut faults = self.faults.lock();
        if request.refuse.is_some() {
            faults.refuse = request.refuse;
        }
        faults.hides_load = request.hide_load.unwrap_or(faults.hides_load);
        if let Some(count) = request.hang {
            faults.hang = count;
        }
        if request.die_after_chunks.is_some() {
            faults.die_after_chunks = request.die_after_chunks;
        }
        if let Some(health) = request.health {
            faults.unhealthy = matches!(health, Health::Fail);
        }
        faults.tokenize = request.tokenize.unwrap_or(faults.tokenize);
    }
}

fn apply_to_rank(rank: &Rank, request: &FaultRequest) {
    if request.restart {
        rank.restart();
    }
    if let Some(count) = request.drop_events {
        rank.drop_batches(count);
    }
    if let Some(held) = request.hold_events {
        rank.hold_events(held);
    }
    if let Some(time) = request.stall_ms {
        rank.stall(Duration::from_millis(time.min(MAX_STALL_MS)));
    }
    if let Some(count) = request.garbage_events {
        rank.publish_garbage(u32::from(count));
    }
    if let Some(lie) = request.page_size_lie {
        rank.lie_about_page_size(Some(lie).filter(|lie| *lie > 0));
    }
    if let Some(percent) = request.hit_percent {
        rank.use_of_hits(percent.min(100));
    }
}

pub(super) async fn fault(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let request: FaultRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return engine.refuse(&Refusal::bad_request(format!("unknown fault: {error}"))),
    };
    let bad_rank = request.rank.is_some_and(|rank| rank >= engine.ranks.len());
    let bad_status = request.refuse.is_some_and(|refuse| !(400..600).contains(&refuse.status));
    if bad_rank || bad_status {
        return engine.refuse(&Refusal::bad_request("rank or status is out of range"));
    }
    if let Some(Err(error)) =
        request.chat_template.as_deref().map(|source| engine.prompter.use_template(source))
    {
        return engine.refuse(&Refusal::bad_request(format!("chat_template: {error}")));
    }
    engine.apply(&request);
    if request.restart && request.rank.is_none() {
        engine.handover.restart();
        let dying = engine.connections.replace();
        tokio::spawn(async move {
            tokio::time::sleep(RESTART_GRACE).await;
            dying.cancel();
        });
    }
    json_response(StatusCode::OK, &json!({"ok": true}))
}

pub(super) async fn state(State(engine): State<Arc<Engine>>) -> Response {
    let rank = |(index, rank): (usize, &Arc<Rank>)| {
        let snapshot = rank.snapshot();
        json!({
            "rank": index,
            "epoch": snapshot.epoch,
            "seq": snapshot.next_seq,
            "replayed_total": snapshot.replayed,
            "cached_pages": snapshot.usage.cached,
            "pinned_pages": snapshot.usage.pinned,
            "capacity_pages": snapshot.usage.capacity,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "requests_total": snapshot.counters.requests,
            "finished_total": snapshot.counters.finished,
            "aborted_total": snapshot.counters.aborted,
            "preemptions_total": snapshot.counters.preemptions,
            "prompt_tokens_total": snapshot.counters.queried_tokens,
            "cached_tokens_total": snapshot.counters.hit_tokens,
            "generated_tokens_total": snapshot.counters.generated_tokens,
        })
    };
    let ranks: Vec<Value> = engine.ranks.iter().enumerate().map(rank).collect();
    let request = |received: &super::Received| {
        json!({
            "serial": received.serial,
            "path": received.path,
            "rank": received.rank,
            "body_sha256": received.body_sha256,
            "body_bytes": received.body_bytes,
            "prompt_sha256": received.prompt_sha256,
            "prompt_tokens": received.prompt_tokens,
            "given_ids": received.given_ids,
            "headers": received.headers,
        })
    };
    let recent: Vec<Value> = engine.recent.lock().iter().map(request).collect();
    let healthy = engine.is_healthy();
    let version = engine.config.wire.version();
    let given = engine.given_ids.load(Ordering::Relaxed);
    let body = json!({"version": version, "healthy": healthy, "ranks": ranks, "requests": recent,
                      "given_ids_total": given, "handover": engine.handover.report()});
    json_response(StatusCode::OK, &body)
}

/// Empties caches the way the engine does, so that events say so, and zeroes what is counted.
/// Refused while requests run.
pub(super) async fn reset(State(engine): State<Arc<Engine>>) -> Response {
    let cleared = engine.clear_caches();
    if !cleared {
        let body = json!({"ok": false, "reason": "requests are running"});
        return (StatusCode::CONFLICT, [("content-type", "application/json")], body.to_string())
            .into_response();
    }
    for rank in &engine.ranks {
        rank.reset_counters();
    }
    engine.recent.lock().clear();
    engine.given_ids.store(0, Ordering::Relaxed);
    engine.handover.reset_counters();
    json_response(StatusCode::OK, &json!({"ok": true}))
}
