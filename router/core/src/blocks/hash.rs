//! The bit-exact block hash chain.
//!
//! `h_i = XXH3_64(le_u64(h_{i-1}) ‖ le_u32(token) for each token of block i)`
//! over full blocks only, where `h_0` is the namespace's root. The root of the
//! default namespace is 0, which makes hashes agree with AMD Infera's. Engine
//! hashes play no part: they differ between versions, algorithms and seeds.

use xxhash_rust::xxh3::xxh3_64;

use crate::units::BlockSize;

/// The chained hash of one block: it names the block and everything before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// The hash of a block that holds `tokens` and follows `parent`.
///
/// `scratch` is overwritten; handing the same one in again saves an allocation.
pub fn next(parent: BlockHash, tokens: &[u32], scratch: &mut Vec<u8>) -> BlockHash {
    scratch.clear();
    scratch.extend_from_slice(&parent.0.to_le_bytes());
    for token in tokens {
        scratch.extend_from_slice(&token.to_le_bytes());
    }
    BlockHash(xxh3_64(scratch))
}

/// The hashes of all full blocks of `tokens`, in order. Empty for a prompt
/// shorter than one block. O(`tokens.len()`).
pub fn chain(root: BlockHash, size: BlockSize, tokens: &[u32]) -> Vec<BlockHash> {
    let mut scratch = Vec::with_capacity(8 + size.as_usize() * 4);
    let mut parent = root;
    tokens
        .chunks_exact(size.as_usize())
        .map(|block| {
            parent = next(parent, block, &mut scratch);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use xxhash_rust::xxh3::Xxh3;

    fn size(tokens: u32) -> BlockSize {
        BlockSize::new(tokens).expect("not zero")
    }

    #[test]
    fn golden_chain_agrees_with_infera() {
        let hashes = chain(BlockHash(0), size(4), &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(hashes, [BlockHash(0x341839abbe30be0b), BlockHash(0x37b6de0623bdb5ca)]);
    }

    /// The oracle feeds the streaming hasher one token at a time.
    fn oracle(root: u64, block_size: usize, tokens: &[u32]) -> Vec<BlockHash> {
        let mut hashes = Vec::new();
        let mut parent = root;
        let mut at = 0;
        while at + block_size <= tokens.len() {
            let mut hasher = Xxh3::new();
            hasher.update(&parent.to_le_bytes());
            for token in &tokens[at..at + block_size] {
                hasher.update(&token.to_le_bytes());
            }
            parent = hasher.digest();
            hashes.push(BlockHash(parent));
            at += block_size;
        }
        hashes
    }

    proptest! {
        #[test]
        fn chain_agrees_with_the_streaming_oracle(
            root in any::<u64>(), block in 1u32..40, tokens in prop::collection::vec(any::<u32>(), 0..200)
        ) {
            prop_assert_eq!(chain(BlockHash(root), size(block), &tokens), oracle(root, block as usize, &tokens));
        }
    }

    #[test]
    fn a_block_names_everything_before_it() {
        let one = chain(BlockHash(0), size(2), &[1, 2, 9, 9]);
        let other = chain(BlockHash(0), size(2), &[1, 3, 9, 9]);
        assert_ne!(one[1], other[1], "equal last blocks under different prefixes");
    }
}
