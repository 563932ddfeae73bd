//! What a receipt costs: `cargo bench -p kvrouter-core --bench receipts`.
//!
//! The record is on the hot path, everything else is not. Medians of one process
//! on whatever else runs here.
#![allow(clippy::disallowed_methods, reason = "a benchmark measures time")]

use std::hint::black_box;
use std::time::Instant;

use kvrouter_core::blocks::BlockHash;
use kvrouter_core::ids::{Epoch, Role, Target, WorkerId};
use kvrouter_core::policy::decode_demand::Demand;
use kvrouter_core::policy::field::Field;
use kvrouter_core::policy::price::Prices;
use kvrouter_core::policy::tie::Ties;
use kvrouter_core::policy::{Candidate, Evidence, Load, PickRequest, Settings, choose};
use kvrouter_core::receipts::Draft;
use kvrouter_core::receipts::chain::{Follower, Head};
use kvrouter_core::trust::{Reason, State, Verdict};
use kvrouter_core::units::{BlockSize, Millis, TierHits, Tokens};

fn main() {
    println!("receipts: bytes, then ns: record, receipt of it, line of a chain, reading the line");
    for count in [8, 64, 512] {
        measure(count);
    }
}

fn measure(count: u64) {
    let candidates: Vec<Candidate> = (0..count).map(candidate).collect();
    let blocks: Vec<BlockHash> =
        (0..1000).map(|block: u64| BlockHash(block.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    let settings = Settings::default();
    let id = "chatcmpl-5f0c1d3e8a7b4f6d9c2e";
    let request = PickRequest {
        id,
        role: Role::Mixed,
        prompt: Tokens(16_005),
        blocks: &blocks,
        size: BlockSize::new(16).expect("not zero"),
        images: &[],
        session: None,
        choices: 1,
    };
    let field = Field::from(&candidates[..]);
    let choice = choose(&settings, &request, &field, None, Ties::default(), &mut Prices::default());
    let draft = Draft {
        time_unix_ms: 1_795_970_308_644,
        attempt: 1,
        prompt_tokens: request.prompt,
        exact_tokens: true,
        blocks: &blocks,
        field: Some(&field),
        priced: candidates.len(),
        choice: choice.as_ref(),
        ..Draft::undecided(id, &settings, 16)
    };
    let record = draft.encode();
    let receipt = record.decode().expect("ours");
    let line = Head::default().receipt(&receipt);
    let mut spare = None;
    let times = [
        median(|| spare = Some(black_box(&draft).encode_over(spare.take()))),
        median(|| drop(black_box(record.decode()))),
        median(|| drop(black_box(Head::default().receipt(&receipt)))),
        median(|| drop(black_box(Follower::default().line(&line, 1)))),
    ];
    let [record_ns, receipt_ns, line_ns, read_ns] = times;
    println!(
        "  {count:4} candidates {:7} {record_ns:8.0} {receipt_ns:9.0} {line_ns:9.0} {read_ns:9.0}",
        record.as_bytes().len()
    );
}

/// A candidate as a busy fleet has them: every number is there.
fn candidate(number: u64) -> Candidate {
    let mixed = |below: u64| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) % below;
    let hits = TierHits { device: mixed(900), host: mixed(7), ..TierHits::default() };
    Candidate {
        target: Target::new(WorkerId::new(format!("10.244.{}.{}:8000", number / 200, number % 200)), 0),
        claimed: hits,
        hits,
        predicted: mixed(3),
        evidence: Evidence::View,
        trust: Verdict {
            state: State::Exact,
            reason: Reason::Ok,
            credited: true,
            epoch: Epoch(1_795_970_300_559 + number),
            seq: mixed(100_000),
            age: Some(Millis(mixed(900))),
        },
        load: Load {
            active_blocks: mixed(5000),
            queued: Tokens(mixed(60_000)),
            context: Tokens(mixed(900_000)),
            requests: mixed(60),
        },
        shared_active: mixed(40),
        images_seen: 0,
        demand: Demand::default(),
    }
}

/// Nanoseconds of one call, the median of batches.
fn median(mut call: impl FnMut()) -> f64 {
    const BATCH: u32 = 50;
    let mut samples: Vec<f64> = (0..200)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| call());
            start.elapsed().as_nanos() as f64 / f64::from(BATCH)
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
