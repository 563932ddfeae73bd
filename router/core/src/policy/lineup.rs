//! Who may stand for choice: the targets of a fleet, in order.
//!
//! A lineup changes when the fleet does, so its names are shared by all receipts
//! of that time, which say of a candidate only where it stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::leases::Account;
use crate::ids::{Role, Slot, Target};
use crate::trust::SharedTrust;

/// Targets of a fleet, sorted and distinct.
#[derive(Clone, Debug)]
pub struct Lineup {
    names: Names,
    entrants: Vec<Entrant>,
}

/// The names of a lineup's targets, in its order.
pub type Names = Arc<[Target]>;

/// What a pick reads of one target.
#[derive(Clone, Debug)]
pub struct Entrant {
    /// Its place in the index.
    pub slot: Slot,
    /// What is booked on it.
    pub account: Arc<Account>,
    /// What its view is worth.
    pub trust: Arc<SharedTrust>,
    /// Whether its worker may be picked.
    pub standing: Arc<Standing>,
}

impl Default for Lineup {
    fn default() -> Self {
        Self { names: Arc::from([]), entrants: Vec::new() }
    }
}

impl Lineup {
    /// The lineup of `targets`, in any order.
    pub fn new(targets: impl IntoIterator<Item = (Target, Entrant)>) -> Self {
        let mut targets: Vec<_> = targets.into_iter().collect();
        targets.sort_by(|(a, _), (b, _)| a.cmp(b));
        targets.dedup_by(|(a, _), (b, _)| a == b);
        let (names, entrants): (Vec<Target>, Vec<Entrant>) = targets.into_iter().unzip();
        Self { names: names.into(), entrants }
    }

    /// Its names.
    pub const fn names(&self) -> &Names {
        &self.names
    }

    /// What a pick reads of each.
    pub fn entrants(&self) -> &[Entrant] {
        &self.entrants
    }
}

/// Whether a worker may be picked, and for what. Written when that changes and
/// read by every pick, without a lock.
#[derive(Debug, Default)]
pub struct Standing(AtomicU8);

impl Standing {
    /// A worker that is picked for `role`.
    pub fn open(role: Role) -> Self {
        let standing = Self::default();
        standing.set(Some(role));
        standing
    }

    /// Lets the worker be picked for `role`, or keeps it out.
    pub fn set(&self, role: Option<Role>) {
        self.0.store(role.map_or(0, Self::roles), Ordering::Release);
    }

    /// Whether it may be picked for `role`. A mixed worker does all of a request,
    /// so also each part of it.
    pub fn takes(&self, role: Role) -> bool {
        self.0.load(Ordering::Acquire) & Self::bit(role) != 0
    }

    const fn bit(role: Role) -> u8 {
        1 << role as u8
    }

    const fn roles(of: Role) -> u8 {
        match of {
            Role::Mixed => Self::bit(Role::Mixed) | Self::bit(Role::Prefill) | Self::bit(Role::Decode),
            Role::Prefill | Role::Decode => Self::bit(of),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_takes_what_its_role_covers_while_it_may_be_picked() {
        let all = [Role::Mixed, Role::Prefill, Role::Decode];
        for (own, expected) in [
            (None, [false, false, false]),
            (Some(Role::Mixed), [true, true, true]),
            (Some(Role::Prefill), [false, true, false]),
            (Some(Role::Decode), [false, false, true]),
        ] {
            let standing = Standing::default();
            standing.set(own);
            assert_eq!(all.map(|role| standing.takes(role)), expected, "{own:?}");
        }
    }
}
