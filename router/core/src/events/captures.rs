//! Recorded engine payloads, and what their manifests say that they mean. For tests.
//!
//! The bytes lie in `tests/fixtures/engine-events`, each folder with a `manifest.json` that an independent decoder
//! (the engines' own msgspec) wrote. Both are compiled in: the core reads no files, not even in its tests.

use std::collections::BTreeMap;

use serde_json::Value;

/// One payload and its meaning.
pub(super) struct Capture {
    /// Path below the folder of fixtures.
    pub(super) name: &'static str,
    /// The message's last frame.
    pub(super) payload: &'static [u8],
    /// The manifest's value; bytes are written as `{"__bytes_hex__": ".."}`.
    pub(super) decoded: Value,
}

/// Path and payload.
type Recorded = (&'static str, &'static [u8]);

macro_rules! fixture {
    ($include:ident, $($part:literal),+) => {
        $include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/engine-events/", $($part),+))
    };
}

macro_rules! payload {
    ($($part:literal),+) => { (concat!($($part),+), fixture!(include_bytes, $($part),+).as_slice()) };
}

macro_rules! batches {
    ($folder:literal, [$($number:literal),+]) => {
        vec![$(payload!($folder, "/batch_", $number, ".payload.bin")),+]
    };
}

macro_rules! synthetic {
    ($version:literal, [$($kind:literal),+]) => {
        vec![$(payload!("synthetic/", $version, "_", $kind, ".payload.bin")),+]
    };
}

macro_rules! vllm {
    ($version:literal) => {
        synthetic!($version, ["stored_min", "stored_full", "stored_bytes", "mixed"])
    };
}

macro_rules! sglang {
    ($version:literal) => {
        synthetic!($version, ["stored", "mixed", "bigram"])
    };
}

/// Folders and their manifests.
const MANIFESTS: [(&str, &str); 3] = [
    ("synthetic", fixture!(include_str, "synthetic/manifest.json")),
    ("vllm-0.32.0-live", fixture!(include_str, "vllm-0.32.0-live/manifest.json")),
    ("sglang-0.5.23-live", fixture!(include_str, "sglang-0.5.23-live/manifest.json")),
];

/// Every recorded payload: batches of live engines in their order, and one set per wire layout.
pub(super) fn recorded() -> Vec<Recorded> {
    let run1: Vec<Recorded> = batches!(
        "vllm-0.32.0-live/run1",
        [
            "000", "001", "002", "003", "004", "005", "006", "007", "008", "009", "010", "011", "012", "013",
            "014", "015", "016"
        ]
    );
    let swa = batches!(
        "vllm-0.32.0-live/swa",
        ["000", "001", "002", "003", "004", "005", "006", "007", "008", "009", "010"]
    );
    let sglang = batches!(
        "sglang-0.5.23-live/sg",
        [
            "000", "001", "002", "003", "004", "005", "006", "007", "008", "009", "010", "011", "012", "013",
            "014", "015", "016", "017"
        ]
    );
    [
        run1,
        swa,
        sglang,
        batches!("vllm-0.32.0-live/dp0", ["000"]),
        batches!("vllm-0.32.0-live/dp1", ["000", "001"]),
        batches!("vllm-0.32.0-live/nixl_pd/nixl_p", ["000", "001", "002"]),
        batches!("vllm-0.32.0-live/nixl_pd/nixl_d", ["000", "001", "002"]),
        vllm!("vllm_0_10_2"),
        vllm!("vllm_0_14_0"),
        vllm!("vllm_0_17_0"),
        vllm!("vllm_0_20_0"),
        vllm!("vllm_0_22_0"),
        vllm!("vllm_0_24_0"),
        vllm!("vllm_0_26_0"),
        vllm!("vllm_0_30_0"),
        vllm!("vllm_0_33_0"),
        synthetic!("vllm_main", ["0181ea31_mapmap"]),
        sglang!("sglang_0_5_5"),
        sglang!("sglang_0_5_9"),
        sglang!("sglang_0_5_17"),
        sglang!("sglang_0_5_18"),
        sglang!("sglang_0_5_20"),
        sglang!("sglang_0_5_22"),
        sglang!("sglang_0_5_23"),
    ]
    .concat()
}

/// Every recorded payload with its meaning. Panics when one lacks the other.
pub(super) fn all() -> Vec<Capture> {
    let mut described = descriptions();
    let captures = recorded()
        .into_iter()
        .map(|(name, payload)| Capture { name, payload, decoded: described.remove(name).expect(name) })
        .collect();
    assert!(described.is_empty(), "described but not recorded: {:?}", described.keys());
    captures
}

/// The batches of one live engine, in their order.
pub(super) fn live(folder: &str) -> Vec<Capture> {
    all().into_iter().filter(|capture| capture.name.starts_with(&format!("{folder}/"))).collect()
}

fn descriptions() -> BTreeMap<String, Value> {
    let mut described = BTreeMap::new();
    for (folder, text) in MANIFESTS {
        let manifest: Vec<Value> = serde_json::from_str(text).expect("a manifest is a list");
        for entry in manifest {
            let file = entry["file"].as_str().expect("an entry names its file");
            // The load feed is no event stream.
            if !file.starts_with("sgload/") {
                let name = format!("{folder}/{}", file.replace(".multipart.", ".payload."));
                described.insert(name, entry["decoded"].clone());
            }
        }
    }
    described
}

impl Capture {
    /// What the manifest says about each event of the batch.
    pub(super) fn events(&self) -> &[Value] {
        let events = self.decoded.get(1).or_else(|| self.decoded.get("events"));
        events.and_then(Value::as_array).expect("a batch has events")
    }
}
