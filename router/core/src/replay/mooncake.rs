//! Mooncake traces: one JSON object a line.
//!
//! `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
//! "hash_ids": [..]}` with one id per block of 512 tokens, the partial last one
//! included. An id names its block and all before it, so it may stand behind one
//! other id only. Requests have no names of their own.
//! Authority: <https://github.com/kvcache-ai/Mooncake>, `FAST25-release`.

use rustc_hash::FxHashMap;

use super::trace::{Chain, MAX_REQUESTS, MAX_TOKENS, TimedRequest, Trace};
use crate::json::fields::{Fields, Problem, TraceError};
use crate::units::{BlockSize, Tokens};

/// Tokens per id.
pub const BLOCK_TOKENS: u32 = 512;
/// Name of the format.
pub const FORMAT: &str = "mooncake";

/// Reads a whole file.
pub fn parse(text: &str) -> Result<Trace, TraceError> {
    let size = BlockSize::new(BLOCK_TOKENS).expect("512 is not zero");
    let mut parents: FxHashMap<u64, Option<u64>> = FxHashMap::default();
    let mut requests = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fields = Fields::root(line, at + 1)?;
        if requests.len() == MAX_REQUESTS {
            let (found, limit) = (requests.len() as u64 + 1, MAX_REQUESTS as u64);
            return Err(fields.wrong("timestamp", Problem::Limit { found, limit }));
        }
        requests.push(request(&fields, size, &mut parents)?);
    }
    Ok(Trace::new(FORMAT, size, requests))
}

fn request(
    fields: &Fields<'_>,
    size: BlockSize,
    parents: &mut FxHashMap<u64, Option<u64>>,
) -> Result<TimedRequest, TraceError> {
    let prompt = Tokens(fields.whole("input_length", MAX_TOKENS)?);
    let output = fields.whole("output_length", MAX_TOKENS)?.max(1);
    let limit = MAX_TOKENS as usize / BLOCK_TOKENS as usize + 1;
    let ids: Vec<u64> = fields.list("hash_ids", limit, "a list of whole numbers, 0 or more")?;
    let expected = prompt.0.div_ceil(u64::from(BLOCK_TOKENS));
    if ids.len() as u64 != expected {
        return Err(fields.wrong("hash_ids", Problem::Count { found: ids.len() as u64, expected }));
    }
    let mut parent = None;
    for id in &ids {
        let before = *parents.entry(*id).or_insert(parent);
        if before != parent {
            let name = |id: Option<u64>| id.map_or("nothing".to_owned(), |id| id.to_string());
            let (found, before) = (name(parent), name(before));
            return Err(fields.wrong("hash_ids", Problem::Chain { block: id.to_string(), found, before }));
        }
        parent = Some(*id);
    }
    let mut chain = Chain::new(0, 1);
    ids.iter().take(size.full_blocks(prompt).0 as usize).for_each(|id| chain.push(*id));
    Ok(TimedRequest {
        id: "".into(),
        at: fields.time("timestamp", 1_000_000)?,
        pace: 0,
        prompt,
        output,
        blocks: chain.finish(),
        dense: Box::default(),
    })
}
