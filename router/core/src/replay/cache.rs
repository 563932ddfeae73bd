//! One engine's prefix cache: least recently used blocks go first.
//!
//! Blocks are the trace's dense numbers, so the cache is two arrays and a list
//! threaded through them. A prompt's blocks are touched from its end to its
//! start, so that a block is never older than one behind it and the deep ends of
//! prefixes are evicted first, as engines do.

/// No block.
const NONE: u32 = u32::MAX;

/// The cache of one engine.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Per block: its neighbours in the order of use, or `absent`.
    links: Vec<Links>,
    newest: u32,
    oldest: u32,
    len: u64,
    capacity: u64,
    evicted: u64,
}

#[derive(Clone, Copy, Debug)]
struct Links {
    newer: u32,
    older: u32,
    held: bool,
}

impl Cache {
    /// An empty cache of at most `capacity` blocks, for a trace of `blocks`
    /// distinct ones.
    pub fn new(blocks: usize, capacity: u64) -> Self {
        let absent = Links { newer: NONE, older: NONE, held: false };
        Self { links: vec![absent; blocks], newest: NONE, oldest: NONE, len: 0, capacity, evicted: 0 }
    }

    /// Whether `block` is held.
    pub fn holds(&self, block: u32) -> bool {
        self.links[block as usize].held
    }

    /// Leading blocks of `prompt` that are held.
    pub fn leading(&self, prompt: &[u32]) -> u64 {
        prompt.iter().take_while(|block| self.holds(**block)).count() as u64
    }

    /// Marks `prompt` as used now and stores what is missing of it. What does
    /// not fit is the end of the prompt.
    pub fn store(&mut self, prompt: &[u32]) {
        let fits = usize::try_from(self.capacity).unwrap_or(usize::MAX).min(prompt.len());
        for block in prompt[..fits].iter().rev() {
            if self.holds(*block) {
                self.unlink(*block);
            } else if self.len == self.capacity {
                self.unlink(self.oldest);
                self.evicted += 1;
            }
            self.link(*block);
        }
    }

    /// Marks the held blocks of `prompt` as used now.
    pub fn touch(&mut self, prompt: &[u32]) {
        for block in prompt.iter().rev() {
            if self.holds(*block) {
                self.unlink(*block);
                self.link(*block);
            }
        }
    }

    /// Blocks held.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is held.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Blocks ever evicted.
    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    fn link(&mut self, block: u32) {
        self.links[block as usize] = Links { newer: NONE, older: self.newest, held: true };
        match self.newest {
            NONE => self.oldest = block,
            newest => self.links[newest as usize].newer = block,
        }
        self.newest = block;
        self.len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Links { newer, older, .. } = self.links[block as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        self.links[block as usize].held = false;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_deep_end_of_the_oldest_prefix_goes_first() {
        let mut cache = Cache::new(16, 5);
        cache.store(&[0, 1, 2]);
        cache.store(&[0, 3]);
        assert_eq!((cache.leading(&[0, 1, 2]), cache.leading(&[0, 3])), (3, 2));
        cache.store(&[8, 9]);
        assert_eq!((cache.leading(&[0, 1, 2]), cache.leading(&[0, 3]), cache.evicted()), (2, 2, 1));
        cache.touch(&[0, 1]);
        cache.store(&[10, 11]);
        assert_eq!((cache.leading(&[0, 1]), cache.leading(&[0, 3]), cache.leading(&[8, 9])), (2, 1, 1));
    }

    #[test]
    fn a_prompt_longer_than_the_cache_keeps_its_start() {
        let mut cache = Cache::new(16, 3);
        cache.store(&[5]);
        cache.store(&[0, 1, 2, 3, 4]);
        assert_eq!((cache.leading(&[0, 1, 2, 3, 4]), cache.len()), (3, 3));
    }

    proptest! {
        /// The oracle keeps a list, newest last, and searches it.
        #[test]
        fn agrees_with_a_list(
            capacity in 1u64..8,
            actions in prop::collection::vec((any::<bool>(), prop::collection::btree_set(0u32..12, 1..6)), 1..40),
        ) {
            let mut cache = Cache::new(12, capacity);
            let mut list: Vec<u32> = Vec::new();
            for (store, prompt) in actions {
                let prompt: Vec<u32> = prompt.into_iter().collect();
                if store { cache.store(&prompt) } else { cache.touch(&prompt) }
                let fits = if store { prompt.len().min(capacity as usize) } else { prompt.len() };
                for block in prompt[..fits].iter().rev() {
                    let held = list.contains(block);
                    list.retain(|other| other != block);
                    if store && !held && list.len() == capacity as usize { list.remove(0); }
                    if store || held { list.push(*block); }
                }
                for block in 0..12 { prop_assert_eq!(cache.holds(block), list.contains(&block)); }
                prop_assert_eq!(cache.len(), list.len() as u64);
            }
        }
    }
}
