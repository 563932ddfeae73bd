//! Which page is a pool's, by what its engines have.
//!
//! Routers leave workers out by it, and the operator names pods by it: both ask
//! here, so that what users read is what happens. Whose page counts is theirs to say.

use std::collections::BTreeMap;

/// Whether pages of that many tokens divide a block.
pub const fn fits(block: u32, page: u32) -> bool {
    page > 0 && block.is_multiple_of(page)
}

/// The page that most of `votes` have, among those that divide the block; of
/// pages that are equally common, the largest. None if none divides it.
pub fn usual(block: u32, votes: impl IntoIterator<Item = u32>) -> Option<u32> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for page in votes.into_iter().filter(|page| fits(block, *page)) {
        *counts.entry(page).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(page, count)| (*count, *page)).map(|(page, _)| page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, votes: &[u32], expected: Option<u32>) {
        assert_eq!(usual(64, votes.iter().copied()), expected, "{why}");
        assert_eq!(usual(64, votes.iter().rev().copied()), expected, "{why}: the order does not matter");
    }

    #[test]
    fn most_decide_and_of_equals_the_larger_page() {
        check("nobody", &[], None);
        check("most", &[16, 32, 16], Some(16));
        check("a tie", &[16, 32], Some(32));
        check("a tie of three", &[64, 1, 16], Some(64));
        check("those that do not divide have no vote", &[24, 24, 16], Some(16));
        check("larger than the block", &[128, 128], None);
        check("nothing is no page", &[0, 0], None);
    }
}
