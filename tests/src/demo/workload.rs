//! Conversations made from a seed: the same for every policy, on every machine.
//!
//! Several system prompts are each shared by many conversations, and every turn repeats the whole
//! conversation before it. The text is English prose, sentence by sentence from the corpus that
//! the test tokenizer was made from.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

/// Prose to draw sentences from.
const CORPUS: &str = include_str!("../../fixtures/tokenizer/corpus.txt");
/// What the system prompts are about; each begins with its own word, so no two share a block.
const DESKS: [&str; 10] = [
    "Billing", "Kitchen", "Garden", "Travel", "Library", "Workshop", "Harbour", "Weather", "Museum", "Cinema",
];
/// How users begin.
const OPENINGS: [&str; 6] = [
    "I read this and do not understand it:",
    "Please put this into simpler words:",
    "Is this still true today?",
    "Compare this with what you said before:",
    "My colleague wrote the following. What is missing?",
    "One more thing:",
];

/// What the conversations look like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    /// Conversations in all.
    pub conversations: usize,
    /// Conversations at a time.
    pub concurrent: usize,
    /// System prompts; each is shared by several conversations.
    pub systems: usize,
    /// Characters of a system prompt, least and most. A token is about four and a half.
    pub system_characters: (usize, usize),
    /// Turns of a conversation, least and most.
    pub turns: (usize, usize),
    /// Sentences of a user's turn, least and most.
    pub sentences: (usize, usize),
    /// Tokens of an answer, least and most.
    pub answer_tokens: (usize, usize),
    /// Mean time that a user thinks before a turn; exponential, at most four times this.
    pub think_ms: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            conversations: 48,
            concurrent: 24,
            systems: 10,
            system_characters: (6_000, 9_500),
            turns: (4, 8),
            sentences: (4, 10),
            answer_tokens: (30, 90),
            think_ms: 700,
        }
    }
}

/// All conversations.
#[derive(Clone, Debug)]
pub struct Workload {
    /// In the order in which they begin.
    pub conversations: Vec<Conversation>,
    /// How many go on at a time.
    pub concurrent: usize,
}

/// What one user will say.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// The system prompt.
    pub system: Arc<str>,
    /// The turns.
    pub turns: Vec<Turn>,
}

/// One turn of a user.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Time before it is sent.
    pub think: Duration,
    /// What is said.
    pub text: String,
    /// Tokens wanted.
    pub answer_tokens: usize,
}

impl Workload {
    /// The conversations of `seed`.
    pub fn new(shape: &Shape, seed: u64) -> Self {
        let mut random = Random(seed);
        let sentences = sentences();
        let systems: Vec<Arc<str>> =
            (0..shape.systems).map(|at| system(&mut random, &sentences, shape, at)).collect();
        let conversations = (0..shape.conversations)
            .map(|_| {
                // Some prompts are more popular than others, as they are in life.
                let system = random.below(systems.len()).min(random.below(systems.len()));
                let count = random.between(shape.turns);
                let turns = (0..count).map(|_| turn(&mut random, &sentences, shape)).collect();
                Conversation { system: Arc::clone(&systems[system]), turns }
            })
            .collect();
        Self { conversations, concurrent: shape.concurrent }
    }

    /// Requests in all.
    pub fn requests(&self) -> usize {
        self.conversations.iter().map(|conversation| conversation.turns.len()).sum()
    }
}

fn sentences() -> Vec<&'static str> {
    CORPUS
        .split(['\n'])
        .flat_map(|line| line.split_inclusive(". "))
        .map(str::trim)
        .filter(|sentence| sentence.len() > 20)
        .collect()
}

fn system(random: &mut Random, sentences: &[&str], shape: &Shape, at: usize) -> Arc<str> {
    let desk = DESKS[at % DESKS.len()];
    let length = random.between(shape.system_characters);
    let mut text = format!("{desk} desk {at}: you help whoever asks, briefly and from these notes.");
    while text.len() < length {
        text.push(' ');
        text.push_str(sentences[random.below(sentences.len())]);
    }
    text.into()
}

fn turn(random: &mut Random, sentences: &[&str], shape: &Shape) -> Turn {
    let mut text = OPENINGS[random.below(OPENINGS.len())].to_owned();
    for _ in 0..random.between(shape.sentences) {
        text.push(' ');
        text.push_str(sentences[random.below(sentences.len())]);
    }
    let think = -(1.0 - random.unit()).ln().max(-4.0);
    Turn {
        think: Duration::from_millis(shape.think_ms).mul_f64(think),
        text,
        answer_tokens: random.between(shape.answer_tokens),
    }
}

/// SplitMix64: small, and equal everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `count`, which is not zero.
    fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % count as u64).unwrap_or(0)
    }

    /// From least to most, both included.
    fn between(&mut self, (least, most): (usize, usize)) -> usize {
        least + self.below(most - least + 1)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_workload() {
        let shape = Shape::default();
        let texts = |seed| {
            let workload = Workload::new(&shape, seed);
            workload.conversations.iter().flat_map(|c| c.turns.clone()).collect::<Vec<_>>()
        };
        assert_eq!(texts(7), texts(7));
        assert_ne!(texts(7), texts(8));
    }

    #[test]
    fn turns_keep_to_their_shape() {
        let shape = Shape::default();
        let workload = Workload::new(&shape, 1);
        assert_eq!(workload.conversations.len(), shape.conversations);
        for conversation in &workload.conversations {
            assert!((shape.turns.0..=shape.turns.1).contains(&conversation.turns.len()));
            let limit = Duration::from_millis(4 * shape.think_ms);
            assert!(conversation.turns.iter().all(|turn| turn.think <= limit));
        }
    }
}
