//! The memory that picks work in, used again and again.

use crate::brief::Brief;
use crate::index::Holdings;
use crate::policy::field::Field;
use crate::receipts::Record;

/// What picks work in, to use again: one allocates nothing for its candidates.
#[derive(Debug, Default)]
pub struct Scratches([Shelf; SHELVES]);

/// Some of them. Threads have shelves of their own, as far as there are enough, so
/// that they do not wait for each other or pass lines of memory to and fro.
#[derive(Debug, Default)]
#[repr(align(128))]
#[allow(clippy::vec_box, reason = "what is handed to and fro is a pointer, not 300 bytes")]
struct Shelf(Brief<Vec<Box<Scratch>>>);

/// What one pick works in.
#[derive(Debug, Default)]
pub struct Scratch {
    /// What targets hold of its prompts.
    pub held: Vec<Holdings>,
    /// Its candidates.
    pub field: Field,
    /// A record that is not needed any more, to write the next one over.
    pub spare: Option<Record>,
}

const SHELVES: usize = 16;
/// Most of them that a shelf keeps: more picks than this are never under way at once
/// on the threads that use it.
const MAX_SCRATCHES: usize = 8;
/// Most prompts whose holdings are kept.
const MAX_KEPT_PROMPTS: usize = 4;
/// Largest record that is kept, in bytes: several thousand candidates.
const MAX_KEPT_RECORD: usize = 1 << 20;

impl Scratches {
    /// One that nobody uses, for the thread of this number.
    pub fn take(&self, thread: usize) -> Box<Scratch> {
        self.shelf(thread).0.lock().pop().unwrap_or_default()
    }

    /// Keeps one for others, without what only an unusual request needs.
    pub fn give_back(&self, thread: usize, mut scratch: Box<Scratch>) {
        scratch.held.truncate(MAX_KEPT_PROMPTS);
        scratch.spare.take_if(|spare| spare.memory() > MAX_KEPT_RECORD);
        let mut kept = self.shelf(thread).0.lock();
        if kept.len() < MAX_SCRATCHES {
            kept.push(scratch);
        }
    }

    /// Forgets all: the fleet has changed, and they keep its accounts.
    pub fn clear(&self) {
        self.0.iter().for_each(|shelf| shelf.0.lock().clear());
    }

    const fn shelf(&self, thread: usize) -> &Shelf {
        &self.0[thread % SHELVES]
    }
}

impl Scratch {
    /// Room for what targets hold of `prompts` prompts.
    pub fn held(&mut self, prompts: usize) -> &mut [Holdings] {
        if self.held.len() < prompts {
            self.held.resize_with(prompts, Holdings::default);
        }
        &mut self.held[..prompts]
    }
}
