//! What a bridge and its routers say to each other.
//!
//! One message is a MessagePack array with the version first:
//! `[version, domain, epoch, seq, page size, block size, deltas, status]`; an
//! idle heartbeat is the same with the last seq and nil for deltas, so that
//! silence means broken and never "no traffic", and so that a heartbeat behind a
//! lost message is not taken for a message that changed nothing. A snapshot page is `[version, domain,
//! epoch, seq, page size, block size, deltas, status, page index, pages]`.
//! Integers that are wider than 64 bits travel as big-endian bytes. Readers
//! ignore elements they do not know.

use rmp::encode as write;

use super::digest::Quality;
use super::msgpack::{ReadError, Reader, infallible};
use super::{Delta, Tier};
use crate::blocks::{BlockHash, Domain, NamespaceId};
use crate::ids::Epoch;

/// Version of this encoding. A reader refuses a newer one by name.
pub const VERSION: u64 = 1;
/// Most deltas in one message.
pub const MAX_DELTAS: usize = 1 << 20;
/// Most hashes in one delta.
pub const MAX_HASHES: usize = 1 << 21;

/// One message of a bridge about one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// What the hashes are about.
    pub domain: Domain,
    /// The engine's life.
    pub epoch: Epoch,
    /// Number of the message, from 1 in every epoch; in a heartbeat that of the
    /// last one, 0 before the first.
    pub seq: u64,
    /// Tokens per engine page; 0 while unknown.
    pub page: u32,
    /// Tokens per block, as configured at the bridge.
    pub block: u32,
    /// What changed, perhaps nothing; `None` in a heartbeat.
    pub deltas: Option<Vec<Delta>>,
    /// What the bridge knows of the view's soundness.
    pub status: Status,
}

/// What a bridge knows of the soundness of its view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The view claims too little.
    pub incomplete: bool,
    /// The view may claim what is gone: a gap or a removal that nothing repaired.
    pub unsound: bool,
    /// Groups other than main attention exist.
    pub hybrid: bool,
    /// Tokens come as pairs (EAGLE).
    pub paired: bool,
    /// A page does not divide the block.
    pub page_misfit: bool,
    /// The engine numbers nothing, so nothing can be proven.
    pub unsequenced: bool,
    /// The bridge has no proof that the engine's stream still stands where the
    /// view says: it cannot reach the engine's sockets.
    pub disconnected: bool,
    /// The events name another rank than the one whose socket they came from.
    pub rank_mismatch: bool,
}

/// One page of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPage {
    /// Head and part of the set; `seq` says up to which message it is current.
    pub envelope: Envelope,
    /// Position of this page, from 0.
    pub index: u32,
    /// Pages in all, at least 1.
    pub pages: u32,
}

/// Why a message was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// Not the expected MessagePack.
    #[error("failed to read {field} of a bridge message")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What was wrong.
        #[source]
        source: ReadError,
    },
    /// A newer bridge.
    #[error("bridge speaks version {found}, this router understands {VERSION}; upgrade the router first")]
    Version {
        /// The version it speaks.
        found: u64,
    },
    /// A value that cannot be.
    #[error("{field} of a bridge message is out of range")]
    Range {
        /// Name of the field.
        field: &'static str,
    },
}

impl EnvelopeError {
    /// Stable label for metrics and logs.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Field { .. } => "unreadable_field",
            Self::Version { .. } => "newer_version",
            Self::Range { .. } => "out_of_range",
        }
    }
}

impl Status {
    /// The part of a status that a digester's content decides.
    pub const fn of(quality: Quality) -> Self {
        Self {
            incomplete: quality.incomplete,
            unsound: quality.lost_removal,
            hybrid: quality.hybrid,
            paired: quality.paired,
            page_misfit: quality.page_misfit,
            unsequenced: false,
            disconnected: false,
            rank_mismatch: false,
        }
    }

    /// The status as a bridge's message carries it; eight bits.
    pub(crate) const fn bits(self) -> u64 {
        (self.incomplete as u64)
            | (self.unsound as u64) << 1
            | (self.hybrid as u64) << 2
            | (self.paired as u64) << 3
            | (self.page_misfit as u64) << 4
            | (self.unsequenced as u64) << 5
            | (self.disconnected as u64) << 6
            | (self.rank_mismatch as u64) << 7
    }

    /// The status of these bits; others are ignored.
    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self {
            incomplete: bits & 1 != 0,
            unsound: bits & 2 != 0,
            hybrid: bits & 4 != 0,
            paired: bits & 8 != 0,
            page_misfit: bits & 16 != 0,
            unsequenced: bits & 32 != 0,
            disconnected: bits & 64 != 0,
            rank_mismatch: bits & 128 != 0,
        }
    }
}

const ENVELOPE_ELEMENTS: u32 = 8;
const DELTA_STORED: u64 = 0;
const DELTA_REMOVED: u64 = 1;
const DELTA_CLEARED: u64 = 2;

impl Envelope {
    /// The bytes of this message.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        self.write(&mut out, ENVELOPE_ELEMENTS);
        out
    }

    /// Reads a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        let mut reader = Reader::new(bytes);
        let length = reader.array_len().at("message")?;
        Self::read(&mut reader, length)
    }

    fn write(&self, out: &mut Vec<u8>, elements: u32) {
        infallible(write::write_array_len(out, elements));
        infallible(write::write_uint(out, VERSION));
        infallible(write::write_bin(out, &self.domain.0.to_be_bytes()));
        infallible(write::write_uint(out, self.epoch.0));
        infallible(write::write_uint(out, self.seq));
        infallible(write::write_uint(out, u64::from(self.page)));
        infallible(write::write_uint(out, u64::from(self.block)));
        match &self.deltas {
            None => infallible(write::write_nil(out)),
            Some(deltas) => {
                infallible(write::write_array_len(out, deltas.len() as u32));
                deltas.iter().for_each(|delta| write_delta(out, delta));
            }
        }
        infallible(write::write_uint(out, self.status.bits()));
    }

    fn read(reader: &mut Reader<'_>, length: usize) -> Result<Self, EnvelopeError> {
        let found = reader.u64().at("version")?;
        if found > VERSION {
            return Err(EnvelopeError::Version { found });
        }
        if length < ENVELOPE_ELEMENTS as usize {
            return Err(EnvelopeError::Range { field: "message" });
        }
        Ok(Self {
            domain: Domain(wide(reader, "domain")?),
            epoch: Epoch(reader.u64().at("epoch")?),
            seq: reader.u64().at("seq")?,
            page: reader.u32().at("page size")?,
            block: reader.u32().at("block size")?,
            deltas: read_deltas(reader)?,
            status: Status::from_bits(reader.u64().at("status")?),
        })
    }
}

impl SnapshotPage {
    /// The bytes of this page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        self.envelope.write(&mut out, ENVELOPE_ELEMENTS + 2);
        infallible(write::write_uint(&mut out, u64::from(self.index)));
        infallible(write::write_uint(&mut out, u64::from(self.pages)));
        out
    }

    /// Reads a page.
    pub fn decode(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        let mut reader = Reader::new(bytes);
        let length = reader.array_len().at("snapshot")?;
        let envelope = Envelope::read(&mut reader, length)?;
        if length < ENVELOPE_ELEMENTS as usize + 2 {
            return Err(EnvelopeError::Range { field: "snapshot" });
        }
        let index = reader.u32().at("page index")?;
        let pages = reader.u32().at("pages")?;
        if index >= pages {
            return Err(EnvelopeError::Range { field: "page index" });
        }
        Ok(Self { envelope, index, pages })
    }
}

/// Bytes of a store besides its hashes: namespace, parent, lengths.
const STORE_BYTES: usize = 48;
/// Bytes of a page besides its stores.
const PAGE_BYTES: usize = 128;

/// Cuts a snapshot into parts whose messages take at most `bytes` each. At
/// least one part; a part holds at least one hash, however small `bytes` is.
pub fn paginate(deltas: Vec<Delta>, bytes: usize) -> Vec<Vec<Delta>> {
    let whole = bytes.saturating_sub(PAGE_BYTES).max(STORE_BYTES + 8);
    let mut pages = vec![Vec::new()];
    let mut room = whole;
    for delta in deltas {
        let Delta::Stored { namespace, mut parent, hashes, tier } = delta else { continue };
        let mut rest = hashes.as_slice();
        while !rest.is_empty() {
            if room < STORE_BYTES + 8 {
                pages.push(Vec::new());
                room = whole;
            }
            let (head, tail) = rest.split_at(rest.len().min((room - STORE_BYTES) / 8));
            room -= STORE_BYTES + head.len() * 8;
            if let (Some(page), Some(last)) = (pages.last_mut(), head.last()) {
                page.push(Delta::Stored { namespace, parent, hashes: head.to_vec(), tier });
                parent = *last;
            }
            rest = tail;
        }
    }
    pages
}

fn write_delta(out: &mut Vec<u8>, delta: &Delta) {
    match delta {
        Delta::Stored { namespace, parent, hashes, tier } => {
            infallible(write::write_array_len(out, 5));
            infallible(write::write_uint(out, DELTA_STORED));
            infallible(write::write_bin(out, &namespace.0.to_be_bytes()));
            infallible(write::write_uint(out, tier.index() as u64));
            write_hashes(out, hashes);
            infallible(write::write_bin(out, &parent.0.to_be_bytes()));
        }
        Delta::Removed { namespace, hashes, tier } => {
            infallible(write::write_array_len(out, 4));
            infallible(write::write_uint(out, DELTA_REMOVED));
            infallible(write::write_bin(out, &namespace.0.to_be_bytes()));
            infallible(write::write_uint(out, tier.index() as u64));
            write_hashes(out, hashes);
        }
        Delta::Cleared => {
            infallible(write::write_array_len(out, 1));
            infallible(write::write_uint(out, DELTA_CLEARED));
        }
    }
}

/// Hashes travel as one run of 8-byte big-endian words: 8 bytes a block.
fn write_hashes(out: &mut Vec<u8>, hashes: &[BlockHash]) {
    infallible(write::write_bin_len(out, (hashes.len() * 8) as u32));
    for hash in hashes {
        out.extend_from_slice(&hash.0.to_be_bytes());
    }
}

fn read_deltas(reader: &mut Reader<'_>) -> Result<Option<Vec<Delta>>, EnvelopeError> {
    if reader.take_nil().at("deltas")? {
        return Ok(None);
    }
    let length = reader.array_len().at("deltas")?;
    if length > MAX_DELTAS {
        return Err(EnvelopeError::Range { field: "deltas" });
    }
    (0..length).map(|_| read_delta(reader)).collect::<Result<_, _>>().map(Some)
}

fn read_delta(reader: &mut Reader<'_>) -> Result<Delta, EnvelopeError> {
    let length = reader.array_len().at("delta")?;
    let kind = reader.u64().at("delta kind")?;
    let (delta, read) = match kind {
        DELTA_CLEARED => (Delta::Cleared, 1),
        DELTA_STORED | DELTA_REMOVED => {
            let namespace = NamespaceId(wide(reader, "namespace")?);
            let tier =
                Tier::from_index(reader.u64().at("tier")?).ok_or(EnvelopeError::Range { field: "tier" })?;
            let hashes = read_hashes(reader)?;
            if kind == DELTA_REMOVED {
                (Delta::Removed { namespace, hashes, tier }, 4)
            } else {
                let parent: [u8; 8] = fixed(reader, "parent")?;
                let parent = BlockHash(u64::from_be_bytes(parent));
                (Delta::Stored { namespace, parent, hashes, tier }, 5)
            }
        }
        _ => return Err(EnvelopeError::Range { field: "delta kind" }),
    };
    for _ in read..length {
        reader.skip().at("delta")?;
    }
    Ok(delta)
}

fn read_hashes(reader: &mut Reader<'_>) -> Result<Vec<BlockHash>, EnvelopeError> {
    let bytes = reader.bin().at("hashes")?;
    let (words, rest) = bytes.as_chunks::<8>();
    if words.is_empty() || !rest.is_empty() || words.len() > MAX_HASHES {
        return Err(EnvelopeError::Range { field: "hashes" });
    }
    Ok(words.iter().map(|word| BlockHash(u64::from_be_bytes(*word))).collect())
}

fn wide(reader: &mut Reader<'_>, field: &'static str) -> Result<u128, EnvelopeError> {
    fixed(reader, field).map(u128::from_be_bytes)
}

fn fixed<const N: usize>(reader: &mut Reader<'_>, field: &'static str) -> Result<[u8; N], EnvelopeError> {
    reader.bin().at(field)?.try_into().map_err(|_| EnvelopeError::Range { field })
}

trait AtField<T> {
    fn at(self, field: &'static str) -> Result<T, EnvelopeError>;
}

impl<T> AtField<T> for Result<T, ReadError> {
    fn at(self, field: &'static str) -> Result<T, EnvelopeError> {
        self.map_err(|source| EnvelopeError::Field { field, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stored(first: u64, count: u64) -> Delta {
        let hashes = (first..first + count).map(BlockHash).collect();
        Delta::Stored { namespace: NamespaceId(7), parent: BlockHash(first - 1), hashes, tier: Tier::Host }
    }

    fn envelope(deltas: Vec<Delta>) -> Envelope {
        let status = Status { incomplete: true, disconnected: true, ..Status::default() };
        let (domain, epoch) = (Domain(u128::MAX - 5), Epoch(1_800_000_000_000));
        Envelope { domain, epoch, seq: 9, page: 16, block: 64, deltas: Some(deltas), status }
    }

    #[test]
    fn what_is_written_is_read() {
        let removed =
            Delta::Removed { namespace: NamespaceId(1), hashes: vec![BlockHash(3)], tier: Tier::Device };
        let message = envelope(vec![stored(1, 3), removed, Delta::Cleared]);
        assert_eq!(Envelope::decode(&message.encode()), Ok(message.clone()));
        for deltas in [None, Some(vec![])] {
            let bare = Envelope { deltas, ..message.clone() };
            assert_eq!(Envelope::decode(&bare.encode()), Ok(bare.clone()), "a heartbeat is no empty change");
        }
        let page = SnapshotPage { envelope: message, index: 1, pages: 2 };
        assert_eq!(SnapshotPage::decode(&page.encode()), Ok(page));
    }

    #[test]
    fn a_newer_version_is_refused_by_name() {
        let mut bytes = envelope(vec![]).encode();
        bytes[1] = 2;
        assert_eq!(Envelope::decode(&bytes), Err(EnvelopeError::Version { found: 2 }));
    }

    #[test]
    fn pages_hold_what_was_cut_and_fit() {
        let all = vec![stored(1, 10), stored(100, 1), stored(200, 300)];
        let pages = paginate(all.clone(), 400);
        for (index, deltas) in pages.iter().enumerate() {
            let page = SnapshotPage { envelope: envelope(deltas.clone()), index: index as u32, pages: 99 };
            assert!(page.encode().len() <= 400, "page {index}");
        }
        let mut joined: Vec<Delta> = Vec::new();
        for delta in pages.into_iter().flatten() {
            match (joined.last_mut(), &delta) {
                (Some(Delta::Stored { hashes, .. }), Delta::Stored { parent, hashes: more, .. })
                    if hashes.last() == Some(parent) =>
                {
                    hashes.extend_from_slice(more);
                }
                _ => joined.push(delta),
            }
        }
        assert_eq!(joined, all, "a cut chain keeps its parent");
        assert_eq!(paginate(vec![], 400).len(), 1, "an empty view is one empty page");
        assert_eq!(paginate(vec![stored(1, 3)], 0).len(), 3, "one hash a page at least");
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..200) {
            let _ = SnapshotPage::decode(&bytes);
            let good = envelope(vec![stored(1, 5), Delta::Cleared]).encode();
            let _ = Envelope::decode(&good[..cut.min(good.len())]);
        }
    }
}
