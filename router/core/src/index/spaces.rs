//! Namespaces as small numbers.
//!
//! A number belongs to one 128-bit namespace while any run is in it, and may
//! name another one later. Equality of numbers is equality of namespaces; no
//! hash decides it.

use rustc_hash::FxHashMap;

use crate::blocks::NamespaceId;

/// A namespace that has a number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    /// Its number.
    pub(super) number: u32,
    /// Mixed into its hashes, so that namespaces with equal hashes do not crowd
    /// the same shards.
    pub(super) salt: u64,
}

/// The namespaces in use.
#[derive(Debug, Default)]
pub(super) struct Spaces {
    numbers: FxHashMap<NamespaceId, u32>,
    /// By number: whose it is, and how many runs are in it.
    used: Vec<(NamespaceId, u32)>,
    free: Vec<u32>,
}

impl Spaces {
    /// The number of `id`; `None` if nothing is in it.
    pub(super) fn find(&self, id: NamespaceId) -> Option<Space> {
        self.numbers.get(&id).map(|number| Space { number: *number, salt: salt(id) })
    }

    /// The namespace that has `number`.
    pub(super) fn of(&self, number: u32) -> Space {
        Space { number, salt: salt(self.used[number as usize].0) }
    }

    /// The number of `id`, a new one if it has none. Whoever asks puts a run
    /// into it, or calls [`Spaces::release`] after [`Spaces::retain`].
    pub(super) fn intern(&mut self, id: NamespaceId) -> Space {
        let number = *self.numbers.entry(id).or_insert_with(|| {
            let entry = (id, 0);
            match self.free.pop() {
                Some(number) => {
                    self.used[number as usize] = entry;
                    number
                }
                None => {
                    self.used.push(entry);
                    self.used.len() as u32 - 1
                }
            }
        });
        Space { number, salt: salt(id) }
    }

    /// One more run is in it.
    pub(super) fn retain(&mut self, number: u32) {
        self.used[number as usize].1 += 1;
    }

    /// One run less is in it; the last one frees the number.
    pub(super) fn release(&mut self, number: u32) {
        let (id, runs) = &mut self.used[number as usize];
        *runs -= 1;
        if *runs == 0 {
            self.numbers.remove(id);
            self.free.push(number);
            if self.numbers.is_empty() {
                *self = Self::default();
            } else if self.numbers.len() < self.numbers.capacity() / 8 {
                self.numbers.shrink_to(self.numbers.len() * 2);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }
}

const fn salt(id: NamespaceId) -> u64 {
    id.0 as u64 ^ ((id.0 >> 64) as u64).rotate_left(32)
}
