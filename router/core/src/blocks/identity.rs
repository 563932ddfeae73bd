//! What may share a cache: namespaces inside a domain.
//!
//! A *namespace* is what events can prove: the adapter and the effective cache
//! salt. It decides the root of the hash chain, and it is also carried beside
//! every hash as an interned 128-bit digest, so that a collision of two 64-bit
//! roots can never serve one tenant's prefix to another.
//! A *domain* is what events do not carry: model, revision, block size and hash
//! scheme. Both sides compute it from the pool's settings and compare.

use std::sync::Arc;

use serde::{Serialize, Serializer};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::hash::BlockHash;
use crate::units::BlockSize;

/// Version of the hash chain and of the encodings below. A change makes every
/// view cold, nothing worse.
pub const HASH_SCHEME: u32 = 1;

/// What may share cached blocks inside one domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Name of the LoRA adapter; `None` for the base model.
    pub adapter: Option<Arc<str>>,
    /// The cache salt in force; `None` without one. An empty salt is a salt.
    pub salt: Option<Arc<str>>,
}

/// Digest of a whole [`Namespace`] and of the pool's identity seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u128);

/// Digest of what must be equal before two caches speak of the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain(pub u128);

/// A pool's secret: it keys every root, so that hashes of known prompts cannot
/// be guessed by who sees only hashes. Absent: roots are public.
#[derive(Clone, Default)]
pub struct IdentitySeed(Option<Arc<[u8]>>);

/// Turns namespaces into roots and ids under one seed.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    seed: IdentitySeed,
}

impl IdentitySeed {
    /// A seed of these bytes. An empty one is no seed.
    pub fn new(secret: &[u8]) -> Self {
        Self((!secret.is_empty()).then(|| secret.into()))
    }
}

impl std::fmt::Debug for IdentitySeed {
    /// Never shows the secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if self.0.is_some() { "IdentitySeed(set)" } else { "IdentitySeed(none)" })
    }
}

impl Identity {
    /// An identity keyed by `seed`.
    pub const fn new(seed: IdentitySeed) -> Self {
        Self { seed }
    }

    /// Where the hash chain of `namespace` starts. 0 for the default namespace
    /// of a pool without a seed.
    pub fn root(&self, namespace: &Namespace) -> BlockHash {
        if self.seed.0.is_none() && *namespace == Namespace::default() {
            return BlockHash(0);
        }
        BlockHash(xxh3_64(&self.encode(b"root", namespace)))
    }

    /// The digest that keeps `namespace` apart from all others.
    pub fn id(&self, namespace: &Namespace) -> NamespaceId {
        NamespaceId(xxh3_128(&self.encode(b"namespace", namespace)))
    }

    fn encode(&self, purpose: &[u8], namespace: &Namespace) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        frame(&mut out, Some(purpose));
        frame(&mut out, self.seed.0.as_deref());
        frame(&mut out, namespace.adapter.as_deref().map(str::as_bytes));
        frame(&mut out, namespace.salt.as_deref().map(str::as_bytes));
        out
    }
}

impl Domain {
    /// The domain of blocks of `block_size` tokens under `model` at `revision`.
    /// An empty revision is "whatever the engine serves". A seed is part of it
    /// by what it makes of the default namespace, so that two sides with
    /// different seeds notice.
    pub fn new(model: &str, revision: &str, block_size: BlockSize, identity: &Identity) -> Self {
        let mut out = Vec::with_capacity(64);
        frame(&mut out, Some(model.as_bytes()));
        frame(&mut out, Some(revision.as_bytes()));
        frame(&mut out, Some(&block_size.tokens().to_le_bytes()));
        frame(&mut out, Some(&HASH_SCHEME.to_le_bytes()));
        if identity.seed.0.is_some() {
            frame(&mut out, Some(&identity.id(&Namespace::default()).0.to_le_bytes()));
        }
        Self(xxh3_128(&out))
    }
}

/// Appends one field so that no two field lists have the same encoding: absent
/// and empty differ, and a boundary cannot be moved.
fn frame(out: &mut Vec<u8>, field: Option<&[u8]>) {
    match field {
        None => out.push(0),
        Some(bytes) => {
            out.push(1);
            out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            out.extend_from_slice(bytes);
        }
    }
}

impl Serialize for NamespaceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", self.0))
    }
}

impl Serialize for Domain {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn namespace(adapter: Option<&str>, salt: Option<&str>) -> Namespace {
        Namespace { adapter: adapter.map(Into::into), salt: salt.map(Into::into) }
    }

    #[test]
    fn the_default_root_is_zero_until_a_seed_keys_it() {
        let public = Identity::default();
        let keyed = Identity::new(IdentitySeed::new(b"secret"));
        assert_eq!(public.root(&Namespace::default()), BlockHash(0));
        assert_ne!(keyed.root(&Namespace::default()), BlockHash(0));
        assert_eq!(format!("{keyed:?}"), "Identity { seed: IdentitySeed(set) }", "the secret is not shown");
    }

    #[test]
    fn namespaces_that_differ_anywhere_stay_apart() {
        let all = [
            namespace(None, None),
            namespace(Some(""), None),
            namespace(None, Some("")),
            namespace(Some("a"), None),
            namespace(None, Some("a")),
            namespace(Some("a"), Some("b")),
            namespace(Some("ab"), Some("")),
            namespace(Some(""), Some("ab")),
        ];
        for identity in [Identity::default(), Identity::new(IdentitySeed::new(b"x"))] {
            let ids: HashSet<_> = all.iter().map(|n| identity.id(n)).collect();
            let roots: HashSet<_> = all.iter().map(|n| identity.root(n)).collect();
            assert_eq!((ids.len(), roots.len()), (all.len(), all.len()));
        }
    }

    #[test]
    fn domains_that_differ_anywhere_stay_apart() {
        let size = |tokens| BlockSize::new(tokens).expect("not zero");
        let (public, keyed) = (Identity::default(), Identity::new(IdentitySeed::new(b"x")));
        let all = [
            Domain::new("m", "", size(16), &public),
            Domain::new("m", "1", size(16), &public),
            Domain::new("m1", "", size(16), &public),
            Domain::new("m", "", size(32), &public),
            Domain::new("m", "", size(16), &keyed),
            Domain::new("m", "", size(16), &Identity::new(IdentitySeed::new(b"y"))),
        ];
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }
}
