//! Which page is a pool's, by what its engines have.
//!
//! Routers leave workers out by it, and the operator names pods by it: both ask
//! here, so that what users read is what happens. Whose page counts is theirs to say.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::RoleName;

/// Whether pages of that many tokens divide a block.
pub const fn fits(block: u32, page: u32) -> bool {
    page > 0 && block.is_multiple_of(page)
}

/// The page that most of `votes` have, among those that divide the block and by
/// which requests can be served; where there is none of these, among those that
/// divide it. Of pages that are equally common, the largest.
pub fn usual(block: u32, votes: impl IntoIterator<Item = (RoleName, u32)>) -> Option<u32> {
    let votes = votes.into_iter().filter(|(_, page)| fits(block, *page)).collect::<Vec<_>>();
    serving(&votes).or_else(|| most(votes.iter().map(|(_, page)| *page)))
}

/// The page that most of `votes` have, among those by which requests can be served:
/// that of a mixed worker, or of a prefill and a decode worker.
pub fn serving(votes: &[(RoleName, u32)]) -> Option<u32> {
    let of = |role| votes.iter().filter(move |(own, _)| *own == role).map(|(_, page)| *page);
    let decode: BTreeSet<u32> = of(RoleName::Decode).collect();
    let pairs = of(RoleName::Prefill).filter(|page| decode.contains(page));
    let serve: BTreeSet<u32> = of(RoleName::Mixed).chain(pairs).collect();
    most(votes.iter().map(|(_, page)| *page).filter(|page| serve.contains(page)))
}

fn most(pages: impl Iterator<Item = u32>) -> Option<u32> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    pages.for_each(|page| *counts.entry(page).or_default() += 1);
    counts.into_iter().max_by_key(|(page, count)| (*count, *page)).map(|(page, _)| page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, votes: &[u32], expected: Option<u32>) {
        let mixed = |page: &u32| (RoleName::Mixed, *page);
        assert_eq!(usual(64, votes.iter().map(mixed)), expected, "{why}");
        assert_eq!(usual(64, votes.iter().rev().map(mixed)), expected, "{why}: the order does not matter");
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

    #[test]
    fn a_page_that_cannot_serve_is_not_the_pools_where_another_can() {
        use RoleName::{Decode, Mixed, Prefill};
        let check = |votes: &[(RoleName, u32)], expected| {
            assert_eq!(usual(64, votes.iter().copied()), expected, "{votes:?}");
        };
        check(&[(Prefill, 16), (Prefill, 16), (Prefill, 64), (Decode, 64)], Some(64));
        check(&[(Prefill, 16), (Prefill, 16), (Mixed, 32)], Some(32));
        check(&[(Prefill, 16), (Prefill, 16), (Decode, 64)], Some(16));
        check(&[(Prefill, 24), (Decode, 24), (Decode, 16)], Some(16));
    }
}
