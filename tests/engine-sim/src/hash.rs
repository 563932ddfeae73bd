//! The engines' own hash chains, one digest per full page. The authority is
//! `tests/fixtures/engine-events/block_hashes.json`, made from the engines' code.
//!
//! vLLM (`sha256_cbor`): `sha256(cbor([parent, [tokens], extra keys or null]))`; SGLang:
//! `sha256(parent || tokens as u32 little endian)`. Both roots depend on the namespace.

use sha2::{Digest as _, Sha256};

use crate::config::{Lora, Wire};

/// Hash of a page and everything before it.
pub type Digest = [u8; 32];

/// What keeps equal token prefixes apart in an engine's cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Request field `cache_salt`.
    pub cache_salt: Option<String>,
    /// SGLang's `extra_key`: separates caches, but shows in neither hash nor event.
    pub extra_key: Option<String>,
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// The adapter's path; enters vLLM's hash since 0.31.
    pub lora_path: Option<String>,
    /// Position of the adapter among the engine's, from 1.
    pub lora_id: Option<u64>,
}

/// A chain rule with its root. One engine process has one.
#[derive(Clone, Debug)]
pub struct ChainRule {
    wire: Wire,
    page_size: usize,
    none_hash: Digest,
}

impl Namespace {
    /// The namespace of an adapter, the `id`-th from 1.
    pub fn of_lora(lora: &Lora, id: u64) -> Self {
        Self {
            lora_name: Some(lora.name.clone()),
            lora_path: Some(lora.path.clone()),
            lora_id: Some(id),
            ..Self::default()
        }
    }
}

impl ChainRule {
    /// The rule of one engine process.
    ///
    /// `seed` is vLLM's `PYTHONHASHSEED`; `process` stands for the randomness that old vLLM
    /// takes in its absence.
    pub fn new(wire: Wire, page_size: usize, seed: Option<&str>, process: u64) -> Self {
        let random = format!("process-{process}");
        let root = match (seed, wire) {
            (Some(seed), _) => seed,
            (None, Wire::Vllm022) => random.as_str(),
            (None, _) => "vllm-none-hash",
        };
        let mut bytes = Vec::new();
        cbor_text(&mut bytes, root);
        Self { wire, page_size, none_hash: Sha256::digest(&bytes).into() }
    }

    /// Makes `chain` cover every full page of `tokens`; what it holds already stays.
    pub fn extend(&self, chain: &mut Vec<Digest>, tokens: &[u32], namespace: &Namespace) {
        for page in tokens.chunks_exact(self.page_size).skip(chain.len()) {
            let digest = if self.wire.is_vllm() {
                self.vllm(chain.last(), page, namespace)
            } else {
                sglang(chain.last(), page, namespace)
            };
            chain.push(digest);
        }
    }

    fn vllm(&self, parent: Option<&Digest>, page: &[u32], namespace: &Namespace) -> Digest {
        let mut bytes = Vec::with_capacity(64 + page.len() * 5);
        cbor_head(&mut bytes, 4, 3);
        let digest = parent.unwrap_or(&self.none_hash);
        cbor_head(&mut bytes, 2, digest.len() as u64);
        bytes.extend_from_slice(digest);
        cbor_head(&mut bytes, 4, page.len() as u64);
        for token in page {
            cbor_head(&mut bytes, 0, u64::from(*token));
        }
        self.vllm_extra_keys(&mut bytes, parent.is_none(), namespace);
        Sha256::digest(&bytes).into()
    }

    /// The adapter comes first; the salt belongs to the first block only.
    fn vllm_extra_keys(&self, bytes: &mut Vec<u8>, first: bool, namespace: &Namespace) {
        let salt = namespace.cache_salt.as_ref().filter(|_| first);
        let count = usize::from(namespace.lora_name.is_some()) + usize::from(salt.is_some());
        if count == 0 {
            bytes.push(0xf6);
            return;
        }
        let tagged = self.wire != Wire::Vllm022;
        cbor_head(bytes, 4, count as u64);
        if let Some(name) = &namespace.lora_name {
            if tagged {
                cbor_head(bytes, 4, 3);
                cbor_text(bytes, "lora");
                cbor_text(bytes, name);
                cbor_text(bytes, namespace.lora_path.as_deref().unwrap_or(""));
            } else {
                cbor_text(bytes, name);
            }
        }
        if let Some(salt) = salt {
            if tagged {
                cbor_head(bytes, 4, 2);
                cbor_text(bytes, "cache_salt");
            }
            cbor_text(bytes, salt);
        }
    }
}

/// A digest as vLLM publishes it: the low 8 bytes, big endian.
pub fn vllm_event_hash(digest: &Digest) -> u64 {
    let mut low = [0; 8];
    low.copy_from_slice(&digest[24..]);
    u64::from_be_bytes(low)
}

/// A digest as SGLang publishes it: the first 8 bytes, big endian and signed.
///
/// Under an adapter, SGLang mixes the adapter's name in once more; the exact seed it takes is
/// not covered by the fixtures.
pub fn sglang_event_hash(digest: &Digest, namespace: &Namespace, wire: Wire) -> i64 {
    let plain = first_i64(digest);
    match &namespace.lora_name {
        Some(name) if wire == Wire::Sglang0523 => {
            let mut hasher = Sha256::new();
            hasher.update(name.as_bytes());
            hasher.update(plain.to_be_bytes());
            first_i64(&hasher.finalize().into())
        }
        _ => plain,
    }
}

fn first_i64(digest: &Digest) -> i64 {
    let mut high = [0; 8];
    high.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(high)
}

fn sglang(parent: Option<&Digest>, page: &[u32], namespace: &Namespace) -> Digest {
    let mut hasher = Sha256::new();
    match (parent, &namespace.cache_salt) {
        (Some(parent), _) => hasher.update(parent),
        (None, Some(salt)) => {
            let mut root = Sha256::new();
            root.update(b"sglang-cache-salt-v1\0");
            root.update(salt.as_bytes());
            hasher.update(root.finalize());
        }
        (None, None) => {}
    }
    for token in page {
        hasher.update(token.to_le_bytes());
    }
    hasher.finalize().into()
}

fn cbor_text(bytes: &mut Vec<u8>, text: &str) {
    cbor_head(bytes, 3, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

/// Canonical CBOR: the shortest head that holds `value`.
fn cbor_head(bytes: &mut Vec<u8>, major: u8, value: u64) {
    let major = major << 5;
    let be = value.to_be_bytes();
    match value {
        0..24 => bytes.push(major | be[7]),
        24..0x100 => bytes.extend([major | 24, be[7]]),
        0x100..0x1_0000 => bytes.extend([major | 25, be[6], be[7]]),
        0x1_0000..0x1_0000_0000 => bytes.extend([major | 26, be[4], be[5], be[6], be[7]]),
        _ => {
            bytes.push(major | 27);
            bytes.extend(be);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn fixtures() -> Vec<Value> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/engine-events/block_hashes.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn hex(digest: &Digest) -> String {
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn chains_are_those_of_the_engines() {
        let tokens: Vec<u32> = (1000..1096).collect();
        let mut checked = 0;
        for row in fixtures() {
            let (engine, algo) = (row["engine"].as_str().unwrap(), row["algo"].as_str().unwrap());
            let case = row["case"].as_str().unwrap_or("");
            if (engine == "vllm" && algo != "sha256_cbor") || case == "mm" {
                continue;
            }
            let (wire, page) = match engine {
                "vllm" if row["version"].as_str().unwrap().starts_with("<=0.30") => {
                    (Wire::Vllm022, "block_size")
                }
                "vllm" => (Wire::Vllm033, "block_size"),
                _ => (Wire::Sglang0523, "page_size"),
            };
            let mut namespace = Namespace::default();
            if case == "lora" {
                let lora = Lora { name: "my-lora".to_owned(), path: "/adapters/my-lora".to_owned() };
                namespace = Namespace::of_lora(&lora, 1);
            }
            if case == "cache_salt" || row["cache_salt"].is_string() {
                namespace.cache_salt = Some("salty".to_owned());
            }
            let page_size = usize::try_from(row[page].as_u64().unwrap()).unwrap();
            let rule = ChainRule::new(wire, page_size, row["pythonhashseed"].as_str(), 0);
            let mut chain = Vec::new();
            rule.extend(&mut chain, &tokens, &namespace);
            // The fixture keeps the first hashes of long chains.
            chain.truncate(row["hashes"].as_array().unwrap().len());
            let found: Vec<String> = chain.iter().map(hex).collect();
            assert_eq!(serde_json::json!(found), row["hashes"], "{row}");
            if wire.is_vllm() {
                let events: Vec<u64> = chain.iter().map(vllm_event_hash).collect();
                assert_eq!(serde_json::json!(events), row["event_u64"]);
            } else {
                let event = |digest| sglang_event_hash(digest, &namespace, wire);
                let events: Vec<i64> = chain.iter().map(event).collect();
                assert_eq!(serde_json::json!(events), row["event_i64"]);
            }
            checked += 1;
        }
        assert!(checked >= 24, "only {checked} chains were compared");
    }

    #[test]
    fn a_chain_grows_without_being_recomputed() {
        let rule = ChainRule::new(Wire::Sglang0523, 4, None, 0);
        let tokens: Vec<u32> = (0..19).collect();
        let (mut whole, mut grown) = (Vec::new(), Vec::new());
        rule.extend(&mut whole, &tokens, &Namespace::default());
        for end in 0..=tokens.len() {
            rule.extend(&mut grown, &tokens[..end], &Namespace::default());
        }
        assert_eq!(whole.len(), 4);
        assert_eq!(whole, grown);
    }

    #[test]
    fn an_unseeded_old_vllm_differs_from_process_to_process() {
        let root = |wire, process| ChainRule::new(wire, 16, None, process).none_hash;
        assert_ne!(root(Wire::Vllm022, 1), root(Wire::Vllm022, 2));
        assert_eq!(root(Wire::Vllm033, 1), root(Wire::Vllm033, 2));
    }
}
