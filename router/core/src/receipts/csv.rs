//! Receipts as a table: a row for every candidate, with what the receipt says
//! beside it, and one for a receipt without candidates or a gap.
//!
//! RFC 4180. Cells are as in JSON, strings without quotes; of a list its length;
//! null and what does not apply are empty.

use serde_json::Value;

use super::read::{Content, Line};

/// Paths into a receipt, the columns of the same names.
const RECEIPT: [&str; 35] = [
    "request_id",
    "time_unix_ms",
    "attempt",
    "role",
    "policy_digest",
    "settings.policy",
    "namespace",
    "prompt_tokens",
    "exact_tokens",
    "prompt_blocks",
    "block_size",
    "turn",
    "candidate_count",
    "chosen.target",
    "chosen.tie",
    "outcome",
    "predicted_hit_tokens",
    "images",
    "session",
    "result.status",
    "result.failure",
    "result.first_byte_ms",
    "result.engine_prompt_tokens",
    "result.engine_cached_tokens",
    "result.completion_tokens",
    "settings.overlap.default",
    "settings.load.queue",
    "settings.load.decode",
    "settings.load.request",
    "settings.load.imbalance",
    "demand.choices",
    "demand.judgement.suggested",
    "demand.judgement.original",
    "demand.judgement.projected",
    "prompts",
];
/// Paths into a candidate, the columns of the same names behind `candidate.`.
const CANDIDATE: [&str; 31] = [
    "target",
    "claimed.device",
    "claimed.host",
    "claimed.disk",
    "hits.device",
    "hits.host",
    "hits.disk",
    "predicted",
    "evidence",
    "rejected_other_namespace",
    "next_block",
    "load.active_blocks",
    "load.queued",
    "load.context",
    "load.requests",
    "shared_active",
    "images_seen",
    "trust.state",
    "trust.reason",
    "trust.credited",
    "trust.epoch",
    "trust.seq",
    "trust.age",
    "terms.cost",
    "terms.uncached",
    "terms.load",
    "terms.images",
    "terms.rejection",
    "dominated_by",
    "demand.tokens",
    "demand.requests",
];

/// The first row: names of columns.
pub fn head() -> String {
    let mut row: Vec<String> = ["sequence", "kind", "lost"].map(str::to_owned).to_vec();
    row.extend(RECEIPT.map(str::to_owned));
    row.extend(CANDIDATE.map(|name| format!("candidate.{name}")));
    row.join(",") + "\r\n"
}

/// The rows of one line of a chain.
pub fn rows(line: &Line) -> String {
    let receipt = match &line.content {
        Content::Gap { time_unix_ms, lost } => {
            let (sequence, time) = (line.sequence.to_string(), time_unix_ms.to_string());
            let mut row = vec![sequence, "gap".to_owned(), lost.to_string(), String::new(), time];
            row.resize(3 + RECEIPT.len() + CANDIDATE.len(), String::new());
            return row.join(",") + "\r\n";
        }
        Content::Receipt(receipt) => receipt.to_value(),
    };
    let mut shared = vec![line.sequence.to_string(), "receipt".to_owned(), String::new()];
    shared.extend(RECEIPT.map(|path| cell(&receipt, path)));
    let none = vec![Value::Null];
    let candidates = receipt["candidates"].as_array().filter(|all| !all.is_empty()).unwrap_or(&none);
    let row = |candidate: &Value| {
        let cells = CANDIDATE.map(|path| cell(candidate, path));
        let row: Vec<&str> = shared.iter().chain(&cells).map(String::as_str).collect();
        row.join(",") + "\r\n"
    };
    candidates.iter().map(row).collect()
}

fn cell(value: &Value, path: &str) -> String {
    let found = path.split('.').try_fold(value, |value, name| value.get(name));
    let text = match found {
        None | Some(Value::Null) => return String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(all)) => all.len().to_string(),
        Some(other) => crate::json::canonical_json(other),
    };
    if text.contains(['"', ',', '\r', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}
