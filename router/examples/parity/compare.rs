//! Our token ids beside the engines', case by case.
//!
//! `tests/parity/cases.json` holds requests, `tests/parity/expected/` what vLLM and
//! SGLang made of them by their own code (`expect.py` there): per prompt a count
//! and a digest. A case is *equal*, *refused* by us although the engine takes it,
//! *different*, or *invalid*: the engine itself refuses it, so nothing is sent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvrouter_core::blocks::{Identity, IdentitySeed};
use kvrouter_core::units::BlockSize;
use kvrouter_crds::config::Engine;
use kvrouter_router::prompt::body::Body;
use kvrouter_router::prompt::endpoint::Endpoint;
use kvrouter_router::prompt::{Asked, Part, Prompter};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Room for prefixes: every case runs twice, the second time from the cache.
const ROOM: usize = 64 << 20;
/// 2026-07-26, noon in UTC: the day of the expectations.
const NOW_UNIX_MS: u64 = 1_785_067_200_000;

/// What became of the cases of one model and engine.
#[derive(Debug, Default)]
pub(crate) struct Row {
    /// Cases with the engine's ids.
    pub equal: usize,
    /// Cases that the engine itself refuses.
    pub invalid: usize,
    /// Cases that only we refuse, by reason.
    pub refused: BTreeMap<&'static str, Vec<String>>,
    /// Names of cases with other ids.
    pub different: Vec<String>,
}

/// Where cases and expectations are.
pub(crate) fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "tests", "parity"].iter().collect()
}

/// The engines that there are expectations of.
pub(crate) const ENGINES: [(Engine, &str); 2] = [(Engine::VLLM, "vllm"), (Engine::SGLang, "sglang")];

/// Compares model `name` in `model`; `None` without expectations of this engine.
pub(crate) fn compare(name: &str, model: &Path, engine: (Engine, &str)) -> Option<Row> {
    let expected = folder().join("expected").join(format!("{name}.{}.json", engine.1));
    let expected: Value =
        serde_json::from_str(&std::fs::read_to_string(expected).ok()?).expect("expectations are JSON");
    let cases = std::fs::read_to_string(folder().join("cases.json")).expect("the cases are there");
    let cases: Vec<Value> = serde_json::from_str(&cases).expect("cases are JSON");
    let prompter = Prompter::load(model, ROOM, 1).expect("the model loads");
    if let Some(reason) = prompter.uncached() {
        eprintln!("{name}: prefixes are not kept: {reason}");
    }
    let mut row = Row::default();
    for case in &cases {
        let title = case["name"].as_str().expect("cases are named");
        let wanted = &expected[title];
        if wanted.is_null() {
            row.invalid += 1;
            continue;
        }
        let endpoint = Endpoint::of(case["endpoint"].as_str().expect("a path"));
        let first = ids(&prompter, endpoint, engine.0, expand(&case["body"]));
        let again = ids(&prompter, endpoint, engine.0, expand(&case["body"]));
        match first {
            Ok(found) if digests(&found) == *wanted && again.as_ref() == Ok(&found) => row.equal += 1,
            Ok(_) => row.different.push(title.to_owned()),
            Err(reason) => row.refused.entry(reason).or_default().push(title.to_owned()),
        }
    }
    Some(row)
}

/// The ids of each prompt, or why there are none.
pub(crate) fn ids(
    prompter: &Prompter,
    endpoint: Endpoint,
    engine: Engine,
    body: Value,
) -> Result<Vec<Vec<u32>>, &'static str> {
    let identity = Identity::new(IdentitySeed::new(b""));
    let size = BlockSize::new(16).expect("not zero");
    let asked =
        Asked { endpoint, engine, adapter: None, identity: &identity, size, now_unix_ms: NOW_UNIX_MS };
    // From bytes, as a request comes.
    let bytes = serde_json::to_vec(&body).expect("it is JSON");
    let prompt = prompter.prepare(&asked, Body::parse(endpoint, &bytes).expect("it is JSON"));
    match prompt.refused {
        None => Ok(prompt.parts.into_iter().map(|part: Part| part.tokens).collect()),
        Some(refusal) => Err(refusal.label()),
    }
}

/// Counts and digests, as the expectations have them.
fn digests(prompts: &[Vec<u32>]) -> Value {
    let of = |ids: &Vec<u32>| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let hash = Sha256::digest(&bytes);
        let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        serde_json::json!([ids.len(), hex])
    };
    prompts.iter().map(of).collect()
}

/// A body with its repeats written out.
pub(crate) fn expand(value: &Value) -> Value {
    match value {
        Value::Object(fields) => match fields.get("$repeat") {
            Some(pair) => {
                let times = pair[1].as_u64().and_then(|times| usize::try_from(times).ok()).expect("a number");
                pair[0].as_str().expect("a text").repeat(times).into()
            }
            None => Value::Object(fields.iter().map(|(name, value)| (name.clone(), expand(value))).collect()),
        },
        Value::Array(items) => items.iter().map(expand).collect(),
        value => value.clone(),
    }
}
