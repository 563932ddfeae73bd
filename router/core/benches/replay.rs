//! How long a replay takes: `cargo bench -p kvrouter-core --bench replay [-- TRACE]`.
//!
//! The gate: a conversation trace of 12,031 requests on 8 workers, under all
//! policies of ours and all models of others', in less than ten seconds on one
//! core. Without a trace (Mooncake JSONL) one of that size is made up.
#![allow(clippy::disallowed_methods, reason = "a benchmark measures time")]

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvrouter_core::replay::contender::Contender;
use kvrouter_core::replay::mooncake;
use kvrouter_core::replay::run::run;
use kvrouter_core::replay::study::PAIRS;

/// All policies together.
const GATE: Duration = Duration::from_secs(10);
const REQUESTS: usize = 12_031;

fn main() -> ExitCode {
    let path = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let text = match &path {
        Some(path) => std::fs::read_to_string(path).expect("the trace can be read"),
        None => made_up(),
    };
    let trace = mooncake::parse(&text).expect("a conversation trace");
    println!("replay of {} requests on 8 workers, s", trace.requests.len());
    let mut all = Duration::ZERO;
    for contender in Contender::defaults() {
        let start = Instant::now();
        let done = run(&trace, &PAIRS[0].plan(), &contender, |_| ());
        let took = start.elapsed();
        all += took;
        println!("  {:16} {:6.2}  {} served", contender.name(), took.as_secs_f64(), done.served.len());
    }
    println!("  {:16} {:6.2}  and the gate is {}", "all", all.as_secs_f64(), GATE.as_secs());
    if all < GATE { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Conversations that grow by a few blocks a turn; 24 blocks on average, an hour.
fn made_up() -> String {
    let mut state = 7u64;
    let mut roll = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut sessions: Vec<Vec<u64>> = vec![vec![0]; 400];
    let (mut fresh, mut now, mut text) = (1, 0, String::new());
    for _ in 0..REQUESTS {
        now += roll(600);
        let session = &mut sessions[roll(400) as usize];
        if session.len() > 46 {
            session.truncate(1);
        }
        for _ in 0..1 + roll(12) {
            session.push(fresh);
            fresh += 1;
        }
        let prompt = session.len() as u64 * 512 - roll(512);
        let output = 1 + roll(680);
        let _ = writeln!(
            text,
            "{{\"timestamp\": {now}, \"input_length\": {prompt}, \"output_length\": {output}, \"hash_ids\": {session:?}}}"
        );
    }
    text
}
