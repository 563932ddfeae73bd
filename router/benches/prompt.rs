//! The prompt path: a long conversation's first decision and its next turns, and
//! short chats, all from bytes.
//!
//! Takes a folder with a model (`--model DIR`; the small one of our tests without
//! it) and prints a line per measure: the median, the 90th percentile and the
//! least.

use std::path::PathBuf;
use std::time::Instant;

use kvrouter_core::blocks::{Identity, IdentitySeed};
use kvrouter_core::units::BlockSize;
use kvrouter_crds::config::Engine;
use kvrouter_router::prompt::body::Body;
use kvrouter_router::prompt::endpoint::Endpoint;
use kvrouter_router::prompt::{Asked, Prompt, Prompter};

#[path = "conversation/mod.rs"]
mod conversation;

const ROOM: usize = 256 << 20;
/// Next turns, and cold starts, of the long conversation.
const TURNS: usize = 60;
const COLD: usize = 8;
const SHORT: usize = 20_000;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut model: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "..", "tests", "fixtures", "tokenizer"].iter().collect();
    while let Some(argument) = arguments.next() {
        if argument == "--model" {
            model = arguments.next().expect("--model needs a folder").into();
        }
    }
    let load = || Prompter::load(&model, ROOM, 1).expect("the model loads");
    let mut prompter = load();
    let mut chat = conversation::Long::numbered(0);
    let tokens = prepare(&prompter, &chat.body()).count.0;
    println!("a conversation of {} KB, {tokens} tokens", chat.body().len() / 1000);

    let mut cold = Vec::new();
    for _ in 0..COLD {
        prompter = load();
        let body = chat.body();
        // The tokenizer's own tables are warm: what is measured is the text.
        prepare(&prompter, &conversation::short(usize::MAX));
        cold.push(time(|| prepare(&prompter, &body)));
    }
    report("first decision", cold);
    let (mut turns, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        chat.turn();
        let body = chat.body();
        alone.push(time(|| Body::parse(Endpoint::Chat, &body).expect("JSON")));
        turns.push(time(|| prepare(&prompter, &body)));
    }
    report("  of the next, JSON alone", alone);
    report("next turn", turns);
    let bodies: Vec<Vec<u8>> = (0..SHORT).map(|number| conversation::short(number % 500)).collect();
    bodies.iter().take(500).for_each(|body| drop(prepare(&prompter, body)));
    let took = time(|| bodies.iter().map(|body| prepare(&prompter, body).count.0).sum::<u64>());
    println!("{:<28} {:>9.0} per second on one core", "2 KiB chats, warm", SHORT as f64 / took);
    println!("{:<28} {:>9} bytes", "prefix cache", prompter.cache().map_or(0, |cache| cache.bytes()));
}

fn prepare(prompter: &Prompter, body: &[u8]) -> Prompt {
    let identity = Identity::new(IdentitySeed::new(b""));
    let asked = Asked {
        endpoint: Endpoint::Chat,
        engine: Engine::VLLM,
        adapter: None,
        identity: &identity,
        size: BlockSize::new(16).expect("not zero"),
        now_unix_ms: 0,
    };
    let read = prompter.read(Endpoint::Chat, 0, body).expect("JSON");
    let prompt = prompter.prepare(&asked, read);
    assert_eq!(prompt.refused, None);
    prompt
}

/// Seconds.
#[allow(clippy::disallowed_methods, reason = "a benchmark takes times, and its clock is not the router's")]
fn time<T>(work: impl FnOnce() -> T) -> f64 {
    let started = Instant::now();
    std::hint::black_box(work());
    started.elapsed().as_secs_f64()
}

fn report(what: &str, mut seconds: Vec<f64>) {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share) as usize] * 1000.0;
    println!("{what:<28} {:>9.3} ms p50 {:>9.3} ms p90 {:>9.3} ms least", at(0.5), at(0.9), at(0.0));
}
