//! Whose page is not the others'.
//!
//! The pool's page is the one that most able workers have, among the pages that
//! divide the block and by which requests can be served; of two that are equally
//! common, the larger one. A worker is odd if its page does not divide the block or
//! is not the pool's. Workers whose page is unknown are not judged.
//!
//! Where all that serve are odd they stay: unequal pages cost hits, no workers
//! cost requests. Mixed workers stay if each of them is odd. A prefill and a decode
//! worker with different pages are no pair: where no pair has the pool's page, those
//! of the most common page of a pair stay, and no others of these roles.

use std::sync::Arc;

use kvrouter_core::ids::{Role, WorkerId};
use kvrouter_crds::config::RoleName;
use kvrouter_crds::pages::{fits, serving, usual};

use super::Worker;

/// What is known of one worker.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Its name.
    pub id: WorkerId,
    /// What it is picked for.
    pub role: Role,
    /// Whether it could be picked, its page aside.
    pub able: bool,
    /// Tokens per page, where known.
    pub page: Option<u32>,
}

/// What comes of comparing pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The pool's page; `None` while no page that divides the block is known.
    pub page: Option<u32>,
    /// Workers whose page is odd, with that page, sorted.
    pub odd: Vec<(WorkerId, u32)>,
    /// Those of them that parity keeps out.
    kept_out: Vec<WorkerId>,
    /// Roles whose workers stay although all able ones are odd.
    pub spared: Vec<Role>,
}

impl Verdict {
    /// Whether parity, where it is required, keeps a worker out of routing.
    pub fn is_kept_out(&self, id: &WorkerId) -> bool {
        self.kept_out.binary_search(id).is_ok()
    }
}

/// The facts about `workers`.
pub fn facts(workers: &[Arc<Worker>]) -> Vec<Facts> {
    let fact = |worker: &Arc<Worker>| Facts {
        id: worker.id.clone(),
        role: worker.place().role,
        able: worker.is_able(),
        page: worker.page(),
    };
    workers.iter().map(fact).collect()
}

/// Judges all workers of a pool with blocks of `block` tokens.
pub fn judge(block: u32, workers: &[Facts]) -> Verdict {
    let able = || workers.iter().filter(|worker| worker.able);
    let votes: Vec<_> = able().filter_map(|worker| Some((name_of(worker.role), worker.page?))).collect();
    let page = usual(block, votes.iter().copied());
    let is_odd = |worker: &Facts| {
        worker.page.is_some_and(|own| !fits(block, own) || page.is_some_and(|common| own != common))
    };
    let mixed = || able().filter(|worker| worker.role == Role::Mixed);
    let spares_mixed = mixed().next().is_some() && mixed().all(is_odd);
    // The page of pairs that serve although it is not the pool's.
    let parts: Vec<_> = votes.iter().copied().filter(|(role, _)| *role != RoleName::Mixed).collect();
    let own: Vec<_> = parts.iter().copied().filter(|(_, own)| Some(*own) == page).collect();
    let stands_in = if serving(&own).is_some() { None } else { serving(&parts) };
    let is_out = |worker: &Facts| match worker.role {
        Role::Mixed => is_odd(worker) && !spares_mixed,
        Role::Prefill | Role::Decode => match stands_in {
            Some(pair) => worker.page.is_some_and(|own| own != pair),
            None => is_odd(worker),
        },
    };
    let mut sorted: Vec<&Facts> = workers.iter().collect();
    sorted.sort_by(|a, b| a.id.cmp(&b.id));
    let spared = [
        (Role::Mixed, spares_mixed),
        (Role::Prefill, stands_in.is_some()),
        (Role::Decode, stands_in.is_some()),
    ];
    let named = |worker: &&Facts| Some((worker.id.clone(), worker.page?));
    Verdict {
        page,
        kept_out: sorted.iter().filter(|worker| is_out(worker)).map(|worker| worker.id.clone()).collect(),
        odd: sorted.iter().filter(|worker| is_odd(worker)).filter_map(named).collect(),
        spared: spared.into_iter().filter(|(_, is)| *is).map(|(role, _)| role).collect(),
    }
}

const fn name_of(role: Role) -> RoleName {
    match role {
        Role::Mixed => RoleName::Mixed,
        Role::Prefill => RoleName::Prefill,
        Role::Decode => RoleName::Decode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Workers `a`, `b`, … with these pages, 0 for unknown; an upper-case role
    /// letter in front (`P`, `D`) is not mixed, a `!` behind is not able.
    fn workers(text: &str) -> Vec<Facts> {
        let fact = |(at, word): (usize, &str)| {
            let (role, rest) = match word.strip_prefix('P') {
                Some(rest) => (Role::Prefill, rest),
                None => word.strip_prefix('D').map_or((Role::Mixed, word), |rest| (Role::Decode, rest)),
            };
            let (page, able) = rest.strip_suffix('!').map_or((rest, true), |page| (page, false));
            let page = Some(page.parse().expect("a number")).filter(|page| *page > 0);
            let name = char::from(b'a' + u8::try_from(at).expect("few"));
            Facts { id: WorkerId::new(name.to_string()), role, able, page }
        };
        text.split_whitespace().enumerate().map(fact).collect()
    }

    #[track_caller]
    fn check(why: &str, text: &str, page: Option<u32>, kept_out: &str, spared: &[Role]) {
        let workers = workers(text);
        let verdict = judge(64, &workers);
        let out: Vec<_> = verdict.kept_out.iter().map(WorkerId::as_str).collect();
        assert_eq!(
            (verdict.page, out.concat().as_str(), &*verdict.spared),
            (page, kept_out, spared),
            "{why}"
        );
        let mut turned = workers;
        turned.reverse();
        assert_eq!(judge(64, &turned), verdict, "{why}: the order does not matter");
    }

    #[test]
    fn odd_pages_are_kept_out_unless_nobody_would_serve() {
        check("nobody", "", None, "", &[]);
        check("all alike", "16 16 16", Some(16), "", &[]);
        check("one differs", "16 32 16", Some(16), "b", &[]);
        check("one does not divide", "16 24 16", Some(16), "b", &[]);
        check("most do not divide", "24 24 16", Some(16), "ab", &[]);
        check("a tie goes to the larger page", "16 32", Some(32), "a", &[]);
        check("a tie of three", "16 32 64", Some(64), "ab", &[]);
        check("unknown pages are not judged", "0 16 0", Some(16), "", &[]);
        check("who is not able has no vote", "32! 32! 16", Some(16), "ab", &[]);
        check("nobody would be left", "24 24", None, "", &[Role::Mixed]);
        check("one of unknown page is left", "24 0", None, "a", &[]);
        let pair = [Role::Prefill, Role::Decode];
        check("mixed workers alone stay", "16 P32 P32 D32", Some(32), "", &[Role::Mixed]);
        check("half of a pair does not spare the other", "16 16 P32 P32 D16", Some(16), "cd", &[]);
        check("a pair of one page stays", "16 16 16 P32 D32", Some(16), "", &pair);
        check("and where it does not divide", "P24 D24", None, "", &pair);
        check("but no two that do not divide", "P24 D48", None, "ab", &[]);
        check("case K30: the tie goes to the larger", "P64 D1", Some(64), "b", &[]);
        check("case K30: most decide", "P64 D1 D1", Some(1), "a", &[]);
        check("case K30: mixed workers go on", "16 P64 P64 D1", Some(16), "bcd", &[]);
        check("most cannot serve", "P16 P16 P16 P64 D64", Some(64), "abc", &[]);
        check("a repair that has begun", "P24 P24 D24 D24 D16", Some(16), "e", &pair);
        check("and is half done", "P16 P24 D24 D24 D16", Some(16), "bcd", &[]);
        check("decode that is not there yet", "16 16 P32", Some(16), "c", &[]);
        check("a role with one that fits", "16 16 P32 P16", Some(16), "c", &[]);
        check("a larger page does not divide either", "128 64", Some(64), "a", &[]);
    }
}
