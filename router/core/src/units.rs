//! Units as types: tokens, blocks, block size, tiers, logical time.
//!
//! The only conversions are the true ones.

use std::num::NonZeroU32;
use std::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// A number of tokens. Never bytes, never blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tokens(pub u64);

/// A number of blocks. Never pages, never tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Blocks(pub u64);

/// Tokens per block. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSize(NonZeroU32);

/// A point in time: milliseconds on a clock that never goes back. Its zero is
/// the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tick(pub u64);

/// A duration in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Millis(pub u64);

/// Where an engine keeps a block. Ordered from fast to slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The accelerator's own memory.
    Device,
    /// The host's memory.
    Host,
    /// Anything slower: disk, object store, another node.
    Disk,
}

impl Tier {
    /// All tiers, fast to slow.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Position in [`Tier::ALL`].
    pub const fn index(self) -> usize {
        match self {
            Self::Device => 0,
            Self::Host => 1,
            Self::Disk => 2,
        }
    }

    /// The tier at `index` of [`Tier::ALL`].
    pub const fn from_index(index: u64) -> Option<Self> {
        match index {
            0 => Some(Self::Device),
            1 => Some(Self::Host),
            2 => Some(Self::Disk),
            _ => None,
        }
    }
}

/// Leading blocks of a request that a target holds, by the tier that each one
/// is in. A block in two tiers counts in the faster one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierHits {
    /// Blocks in the accelerator's memory.
    pub device: u64,
    /// Blocks in the host's memory.
    pub host: u64,
    /// Blocks in anything slower.
    pub disk: u64,
}

impl TierHits {
    /// All leading blocks held.
    pub const fn total(self) -> u64 {
        self.device + self.host + self.disk
    }

    /// Cut to `limit` blocks. What is cut is the deepest blocks; of mixed tiers the
    /// slower ones go first, which is where the deep blocks of an offloaded prefix
    /// are.
    pub fn at_most(self, limit: u64) -> Self {
        let mut excess = self.total().saturating_sub(limit);
        if excess == 0 {
            return self;
        }
        let mut cut = |blocks: u64| {
            let taken = blocks.min(excess);
            excess -= taken;
            blocks - taken
        };
        let disk = cut(self.disk);
        let host = cut(self.host);
        let device = cut(self.device);
        Self { device, host, disk }
    }

    /// Counts one more block in `tier`.
    pub fn add(&mut self, tier: Tier) {
        match tier {
            Tier::Device => self.device += 1,
            Tier::Host => self.host += 1,
            Tier::Disk => self.disk += 1,
        }
    }
}

impl BlockSize {
    /// `None` for zero: a block without tokens cannot be hashed or priced.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// Tokens in one block.
    pub const fn tokens(self) -> u32 {
        self.0.get()
    }

    /// Tokens in one block, to compare with the length of a slice.
    pub const fn as_usize(self) -> usize {
        self.0.get() as usize
    }

    /// Whole blocks in `prompt`. Engines do not share a partial last block, so
    /// it does not count.
    pub fn full_blocks(self, prompt: Tokens) -> Blocks {
        Blocks(prompt.0 / u64::from(self.tokens()))
    }

    /// Tokens in `blocks` whole blocks.
    pub fn tokens_in(self, blocks: Blocks) -> Tokens {
        Tokens(blocks.0.saturating_mul(u64::from(self.tokens())))
    }

    /// Whether an engine page of `page` tokens can be grouped into blocks of
    /// this size. Zero is no page.
    pub fn holds_pages_of(self, page: u32) -> bool {
        page != 0 && self.tokens().is_multiple_of(page)
    }
}

impl Tokens {
    /// Tokens left to prefill after a hit. A hit longer than the prompt leaves
    /// zero.
    pub const fn uncached(self, hit: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(hit.0))
    }
}

impl Tick {
    /// Time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn since(self, earlier: Tick) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }

    /// The point `after` later.
    pub const fn plus(self, after: Millis) -> Tick {
        Tick(self.0.saturating_add(after.0))
    }
}

impl Millis {
    /// Whole seconds as milliseconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1000))
    }
}

impl Add for Tokens {
    type Output = Tokens;
    fn add(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, other: Tokens) {
        *self = *self + other;
    }
}

impl Sub for Tokens {
    type Output = Tokens;
    /// Saturates at zero: a count of tokens is never negative.
    fn sub(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(other.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_blocks_drop_the_partial_last_one() {
        let size = BlockSize::new(16).expect("16 is not zero");
        for (prompt, blocks) in [(0, 0), (15, 0), (16, 1), (17, 1), (47, 2), (48, 3)] {
            assert_eq!(size.full_blocks(Tokens(prompt)), Blocks(blocks), "{prompt} tokens");
        }
        assert_eq!(BlockSize::new(0), None, "a block has tokens");
    }

    #[test]
    fn pages_fit_only_when_they_divide_the_block() {
        let size = BlockSize::new(16).expect("16 is not zero");
        for (page, fits) in [(0, false), (1, true), (2, true), (3, false), (8, true), (16, true), (32, false)]
        {
            assert_eq!(size.holds_pages_of(page), fits, "pages of {page}");
        }
    }
}
