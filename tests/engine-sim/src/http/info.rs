//! What an engine tells of itself: health, models, metrics, configuration, discovery of its
//! event sockets, and the endpoints that clear its cache.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::{Engine, json_response, unix_time};
use crate::config::{Disaggregation, Wire};
use crate::rank::Snapshot;

/// One metric: name, kind, help, and a reading per rank.
type Metric = (&'static str, &'static str, &'static str, fn(&Snapshot) -> f64);

impl Engine {
    /// Empties all caches, or tells that one is in use.
    pub(super) fn clear_caches(&self) -> bool {
        // Every rank is asked, also after one has refused.
        self.ranks.iter().filter(|rank| !rank.clear_cache()).count() == 0
    }
}

/// `/kv_event_sources` came with vLLM 0.31.
pub(super) fn has_event_sources(wire: Wire) -> bool {
    match wire {
        Wire::Vllm032 | Wire::Vllm033 => true,
        Wire::Vllm022 | Wire::Sglang0518 | Wire::Sglang0523 => false,
    }
}

pub(super) async fn health(State(engine): State<Arc<Engine>>) -> Response {
    if engine.is_healthy() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }.into_response()
}

pub(super) async fn version(State(engine): State<Arc<Engine>>) -> Response {
    json_response(StatusCode::OK, &json!({"version": engine.config.wire.version()}))
}

pub(super) async fn models(State(engine): State<Arc<Engine>>) -> Response {
    let config = &engine.config;
    let owner = if config.wire.is_vllm() { "vllm" } else { "sglang" };
    let model = |name: &str, root: &str, parent: Option<&str>| {
        json!({"id": name, "object": "model", "created": unix_time(), "owned_by": owner, "root": root,
               "parent": parent, "max_model_len": config.max_model_len})
    };
    let mut data = vec![model(&config.model, &config.model, None)];
    data.extend(config.lora.iter().map(|lora| model(&lora.name, &lora.path, Some(&config.model))));
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

pub(super) async fn reset_prefix_cache(State(engine): State<Arc<Engine>>) -> Response {
    json_response(StatusCode::OK, &json!({"success": engine.clear_caches()}))
}

pub(super) async fn flush_cache(State(engine): State<Arc<Engine>>) -> Response {
    let text = "Cache flushed.\nPlease check backend logs for more details. (When there are running or \
                waiting requests, the operation will not be performed.)\n";
    let status = if engine.clear_caches() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    (status, text).into_response()
}

/// vLLM's resolved event configuration, per rank.
pub(super) async fn kv_event_sources(State(engine): State<Arc<Engine>>) -> Response {
    let ports = &engine.ports;
    let mut sources = Map::new();
    for rank in 0..engine.ranks.len() {
        let endpoint = |addresses: &[std::net::SocketAddr]| {
            addresses.get(rank).map(|address| format!("tcp://*:{}", address.port()))
        };
        let events = endpoint(&ports.events);
        let source = json!({
            "enable_kv_cache_events": events.is_some(),
            "publisher": if events.is_some() { "zmq" } else { "null" },
            "endpoint": events.unwrap_or_else(|| "tcp://*:5557".to_owned()),
            "replay_endpoint": endpoint(&ports.replay),
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": engine.config.topic,
        });
        sources.insert(rank.to_string(), source);
    }
    json_response(StatusCode::OK, &Value::Object(sources))
}

pub(super) async fn server_info(State(engine): State<Arc<Engine>>) -> Response {
    let config = &engine.config;
    let kv_events = engine.ports.events.first().map(|first| {
        let mut events = json!({
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": first.port(),
            "topic": config.topic,
            "block_size": config.page_size,
            "dp_size": config.dp_size,
        });
        if let Some(replay) = engine.ports.replay.first() {
            events["replay_endpoint_port_base"] = json!(replay.port());
        }
        events
    });
    let total = u64::from(config.num_pages) * u64::from(config.page_size);
    let body = json!({
        "model_path": config.model,
        "served_model_name": config.model,
        "tokenizer_path": config.tokenizer,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_running,
        "chunked_prefill_size": config.chunk_tokens,
        "page_size": config.page_size,
        "dp_size": config.dp_size,
        "disable_radix_cache": !config.keeps_prefixes(),
        "disaggregation_mode": config.disaggregation.map_or("null", Disaggregation::name),
        "disaggregation_bootstrap_port": engine.handover.address().map_or(8998, |address| address.port()),
        "status": "ready",
        "max_total_num_tokens": total,
        "internal_states": vec![json!({"page_size": config.page_size}); engine.ranks.len()],
        "version": config.wire.version(),
        "kv_events": kv_events,
    });
    json_response(StatusCode::OK, &body)
}

/// SGLang's load per rank.
pub(super) async fn loads(State(engine): State<Arc<Engine>>) -> Response {
    if engine.faults.lock().hides_load {
        return StatusCode::NOT_FOUND.into_response();
    }
    let page = engine.config.page_size as usize;
    let load = |(index, rank): (usize, &Arc<crate::rank::Rank>)| {
        let snapshot = rank.snapshot();
        json!({
            "dp_rank": index,
            "num_running_reqs": snapshot.running,
            "num_waiting_reqs": snapshot.waiting,
            "num_waiting_uncached_tokens": snapshot.waiting_uncached_tokens,
            "num_used_tokens": snapshot.usage.pinned * page,
            "max_total_num_tokens": snapshot.usage.capacity * page,
            "max_running_requests": engine.config.max_running,
            "token_usage": pinned_share(&snapshot),
        })
    };
    let loads: Vec<Value> = engine.ranks.iter().enumerate().map(load).collect();
    let body = json!({"timestamp": unix_time(), "version": engine.config.wire.version(), "loads": loads});
    json_response(StatusCode::OK, &body)
}

pub(super) async fn metrics(State(engine): State<Arc<Engine>>) -> Response {
    let snapshots: Vec<Snapshot> = engine.ranks.iter().map(|rank| rank.snapshot()).collect();
    let text = if engine.faults.lock().hides_load {
        "python_info{implementation=\"CPython\"} 1.0\n".to_owned()
    } else if engine.config.wire.is_vllm() {
        vllm_metrics(&engine, &snapshots)
    } else {
        sglang_metrics(&engine, &snapshots)
    };
    ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn vllm_metrics(engine: &Engine, snapshots: &[Snapshot]) -> String {
    let model = &engine.config.model;
    let metrics: [Metric; 9] = [
        ("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", |s| {
            float(s.running)
        }),
        ("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", |s| {
            float(s.waiting)
        }),
        ("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", pinned_share),
        (
            "vllm:prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in terms of number of queried tokens.",
            |s| total(s.counters.queried_tokens),
        ),
        (
            "vllm:prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in terms of number of cached tokens.",
            |s| total(s.counters.hit_tokens),
        ),
        ("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", |s| {
            total(s.counters.queried_tokens)
        }),
        ("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", |s| {
            total(s.counters.generated_tokens)
        }),
        ("vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", |s| {
            total(s.counters.preemptions)
        }),
        ("vllm:request_success_total", "counter", "Count of successfully processed requests.", |s| {
            total(s.counters.finished)
        }),
    ];
    let mut out = String::new();
    write_metrics(&mut out, &metrics, snapshots, |rank| format!("engine=\"{rank}\",model_name=\"{model}\""));
    write_cache_config(&mut out, engine, snapshots.len());
    out
}

fn write_cache_config(out: &mut String, engine: &Engine, ranks: usize) {
    out.push_str("# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n");
    out.push_str("# TYPE vllm:cache_config_info gauge\n");
    let page = engine.config.page_size;
    let pages = engine.config.num_pages;
    for rank in 0..ranks {
        let mut labels = vec![
            ("block_size", page.to_string()),
            ("cache_dtype", "auto".to_owned()),
            (
                "enable_prefix_caching",
                if engine.config.no_prefix_caching { "False" } else { "True" }.to_owned(),
            ),
            ("engine", rank.to_string()),
            ("mamba_block_size", "None".to_owned()),
            ("num_gpu_blocks", pages.to_string()),
            ("prefix_caching_hash_algo", "sha256_cbor".to_owned()),
            ("sliding_window", "None".to_owned()),
        ];
        if has_event_sources(engine.config.wire) {
            let tokens = u64::from(page) * u64::from(pages);
            labels.push(("effective_attention_block_size", page.to_string()));
            labels.push(("hash_block_size", "None".to_owned()));
            labels.push(("kv_cache_size_tokens", tokens.to_string()));
        }
        labels.sort_unstable();
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        let _ = writeln!(out, "vllm:cache_config_info{{{}}} 1.0", labels.join(","));
    }
}

fn sglang_metrics(engine: &Engine, snapshots: &[Snapshot]) -> String {
    let config = &engine.config;
    let model = &config.model;
    let metrics: [Metric; 4] = [
        ("sglang:num_running_reqs", "gauge", "The number of running requests.", |s| float(s.running)),
        ("sglang:num_queue_reqs", "gauge", "The number of requests in the waiting queue.", |s| {
            float(s.waiting)
        }),
        ("sglang:token_usage", "gauge", "The token usage.", pinned_share),
        ("sglang:num_pages", "gauge", "Number of KV cache pages.", |s| float(s.usage.capacity)),
    ];
    let engine_type = config.disaggregation.map_or("unified", Disaggregation::name);
    let dp = config.dp_size > 1;
    let labels = |rank: usize| {
        let dp_rank = if dp { format!("dp_rank=\"{rank}\",") } else { String::new() };
        format!(
            "{dp_rank}engine_type=\"{engine_type}\",model_name=\"{model}\",moe_ep_rank=\"0\",pp_rank=\"0\",\
             tp_rank=\"{}\"",
            if dp { rank } else { 0 }
        )
    };
    let mut out = String::new();
    write_metrics(&mut out, &metrics, snapshots, labels);
    let page = f64::from(config.page_size);
    let constants = [
        ("sglang:page_size", "KV cache page size in tokens.", page),
        (
            "sglang:max_total_num_tokens",
            "Maximum total number of tokens.",
            page * f64::from(config.num_pages),
        ),
    ];
    for (name, help, value) in constants {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for rank in 0..snapshots.len() {
            let _ = writeln!(out, "{name}{{{}}} {value:?}", labels(rank));
        }
    }
    let sum = |read: fn(&Snapshot) -> u64| total(snapshots.iter().map(read).sum());
    let _ = writeln!(
        out,
        "# HELP sglang:prompt_tokens_total Number of prefill tokens processed.\n\
         # TYPE sglang:prompt_tokens_total counter\n\
         sglang:prompt_tokens_total{{engine_type=\"{engine_type}\",model_name=\"{model}\"}} {:?}\n\
         # HELP sglang:cached_tokens_total Number of cached prompt tokens by source (device/host/storage).\n\
         # TYPE sglang:cached_tokens_total counter\n\
         sglang:cached_tokens_total{{cache_source=\"device\",engine_type=\"{engine_type}\",model_name=\"{model}\"}} {:?}",
        sum(|s| s.counters.queried_tokens),
        sum(|s| s.counters.hit_tokens),
    );
    out
}

fn write_metrics(
    out: &mut String,
    metrics: &[Metric],
    snapshots: &[Snapshot],
    labels: impl Fn(usize) -> String,
) {
    for (name, kind, help, read) in metrics {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (rank, snapshot) in snapshots.iter().enumerate() {
            let _ = writeln!(out, "{name}{{{}}} {:?}", labels(rank), read(snapshot));
        }
    }
}

/// Share of the cache that running requests hold.
fn pinned_share(snapshot: &Snapshot) -> f64 {
    float(snapshot.usage.pinned) / float(snapshot.usage.capacity.max(1))
}

fn float(value: usize) -> f64 {
    total(value as u64)
}

/// Counts stay far below the integers that a float holds exactly.
#[allow(clippy::cast_precision_loss)]
fn total(value: u64) -> f64 {
    value as f64
}
