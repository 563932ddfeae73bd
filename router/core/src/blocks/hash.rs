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
    if let Ok(tokens) = tokens.try_into() {
        let mixed = mix_of_16(parent.0 ^ SECRET[0], tokens);
        return BlockHash(mixed ^ mixed >> 32);
    }
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
    if size.as_usize() == 16 {
        return chain_of_16(root, tokens.as_chunks().0);
    }
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

/// The first 96 bytes of XXH3's default secret, as little-endian words.
const SECRET: [u64; 12] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
];
const XXH3_PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const XXH3_PRIME_MX1: u64 = 0x1656_6791_9e37_79f9;

/// [`chain`] for blocks of 16 tokens, the default.
///
/// Its time is that of what each block waits for: one multiplication and the
/// final mix of the block before. Everything else overlaps with that.
fn chain_of_16(root: BlockHash, blocks: &[[u32; 16]]) -> Vec<BlockHash> {
    // A hash before XXH3's last step, `x ^ x >> 32`, which undoes itself. The
    // secret goes onto one half of that step while the other is being shifted.
    let mut last = root.0 ^ root.0 >> 32;
    let follow = |block: &[u32; 16]| {
        last = mix_of_16((last ^ SECRET[0]) ^ last >> 32, block);
        BlockHash(last ^ last >> 32)
    };
    blocks.iter().map(follow).collect()
}

/// XXH3_64 of 72 bytes, written out, up to its last step (`x ^ x >> 32`): the
/// parent's hash, already under the secret's first word, and 16 tokens.
#[inline]
fn mix_of_16(masked_parent: u64, tokens: &[u32; 16]) -> u64 {
    let word = |at: usize| u64::from(tokens[2 * at]) | u64::from(tokens[2 * at + 1]) << 32;
    // What XXH3 calls mix16B; its input's word 0 is the parent, word n + 1 is ours.
    let mix = |at: usize, secret: usize| fold(word(at - 1) ^ SECRET[secret], word(at) ^ SECRET[secret + 1]);
    let rest = 72u64
        .wrapping_mul(XXH3_PRIME64_1)
        .wrapping_add(mix(4, 8))
        .wrapping_add(mix(3, 10))
        .wrapping_add(mix(2, 4))
        .wrapping_add(mix(5, 6))
        .wrapping_add(mix(7, 2));
    // Hidden from the optimiser, which would otherwise add up the parent's part
    // first and make the next block wait for all these sums.
    let sum = std::hint::black_box(rest).wrapping_add(fold(masked_parent, word(0) ^ SECRET[1]));
    (sum ^ sum >> 37).wrapping_mul(XXH3_PRIME_MX1)
}

/// The halves of the 128-bit product, folded.
const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
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

    proptest! {
        #[test]
        fn blocks_of_16_agree_with_the_streaming_oracle(
            root in any::<u64>(), tokens in prop::collection::vec(any::<u32>(), 0..200)
        ) {
            let expected = oracle(root, 16, &tokens);
            prop_assert_eq!(chain(BlockHash(root), size(16), &tokens), &expected[..]);
            let first = tokens.first_chunk::<16>().map(|block| next(BlockHash(root), block, &mut Vec::new()));
            prop_assert_eq!(first, expected.first().copied());
        }
    }

    #[test]
    fn a_block_names_everything_before_it() {
        let one = chain(BlockHash(0), size(2), &[1, 2, 9, 9]);
        let other = chain(BlockHash(0), size(2), &[1, 3, 9, 9]);
        assert_ne!(one[1], other[1], "equal last blocks under different prefixes");
    }
}
