//! Image affinity: which pictures a target has seen lately.
//!
//! Media placeholders look alike, so text blocks say nothing about a picture.
//! But a worker that has seen a picture has its encoding cached. Each target
//! remembers a few keys; a policy charges for every one it has not seen.

use std::collections::VecDeque;

/// Keys remembered per target: about what an encoder cache holds.
const REMEMBERED: usize = 256;

/// A picture, clip or recording: a 64-bit hash of its reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageKey(pub u64);

/// What one target has seen, the latest last.
#[derive(Debug, Default)]
pub struct ImageMemory {
    seen: VecDeque<ImageKey>,
}

impl ImageMemory {
    /// How many of `images` it has seen.
    pub fn seen(&self, images: &[ImageKey]) -> u64 {
        images.iter().filter(|image| self.seen.contains(image)).count() as u64
    }

    /// Remembers `images`; the longest unseen ones make room.
    pub fn record(&mut self, images: &[ImageKey]) {
        for image in images {
            if let Some(at) = self.seen.iter().position(|seen| seen == image) {
                self.seen.remove(at);
            } else if self.seen.len() == REMEMBERED {
                self.seen.pop_front();
            }
            self.seen.push_back(*image);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case G32.
    #[test]
    fn the_longest_unseen_picture_is_forgotten_first() {
        let mut memory = ImageMemory::default();
        let all: Vec<ImageKey> = (0..REMEMBERED as u64).map(ImageKey).collect();
        memory.record(&all);
        memory.record(&[ImageKey(0), ImageKey(9_999)]);
        assert_eq!(
            memory.seen(&[ImageKey(0), ImageKey(1), ImageKey(9_999)]),
            2,
            "1 made room, 0 was seen again"
        );
        assert_eq!(memory.seen.len(), REMEMBERED);
    }
}
