//! Every decision of a lab replay again, each from nothing.
//!
//! The replay carries a world from decision to decision. The oracle carries
//! nothing: for each decision it asks of every block which accepted event spoke of
//! it last, and of every earlier receipt where its request stands now.

use super::lab::{LabModel, LabRun};
use super::lab_trace::{LabEvent, LabEventKind, LabRequest, LabTrace};
use super::oracle::Difference;
use crate::blocks::BlockHash;
use crate::policy::{PolicyKind, Settings};

/// One worker as one decision should have seen it.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    hits: u64,
    active: u64,
    shared: u64,
    queued: u64,
    context: u64,
    requests: u64,
    free_at: u64,
}

/// A request on a worker, with its times.
#[derive(Clone, Copy, Debug)]
struct Stay<'a> {
    request: Option<&'a LabRequest>,
    prompt: u64,
    uncached: u64,
    decode: u64,
    first_byte: u64,
    end: u64,
}

/// Recomputes every choice of `run`, its hits and its first byte.
pub fn check(trace: &LabTrace, model: LabModel, settings: &Settings, run: &LabRun) -> Result<(), Difference> {
    for (number, (request, receipt)) in trace.requests.iter().zip(&run.receipts).enumerate() {
        let facts: Vec<Facts> =
            (0..trace.workers.len()).map(|worker| facts(trace, model, run, number, worker)).collect();
        let place = |name: &str| trace.workers.iter().position(|worker| worker.name == name).unwrap_or(0);
        let previous = run.receipts[..number].iter().rev().find_map(|before| before.chosen.as_ref());
        let previous = previous.map(|chosen| place(chosen.worker.as_str()));
        let costs: Vec<f64> =
            (0..facts.len()).map(|at| cost(settings, trace, request, &facts, at, previous)).collect();
        let open: Vec<usize> =
            (0..facts.len()).filter(|at| takes(settings, trace, request, &facts[*at])).collect();
        let least = open.iter().map(|at| costs[*at]).fold(f64::INFINITY, f64::min);
        // Sums in another order may differ in their last digit.
        let near = |at: &usize| costs[*at] - least <= 1e-9 * (1.0 + least.abs());
        let first = open.iter().copied().find(near);
        let chosen = receipt.chosen.as_ref().map(|chosen| place(chosen.worker.as_str()));
        let number_of = |at: Option<usize>| at.map_or(u64::MAX, |at| at as u64);
        let Some(chosen) = chosen.filter(|_| chosen == first) else {
            if chosen == first {
                continue;
            }
            let (replay, oracle) = (number_of(chosen), number_of(first));
            return Err(Difference { request: request.id.clone(), what: "worker", replay, oracle });
        };
        let uncached = request.prompt.0 - facts[chosen].hits * u64::from(trace.size.tokens());
        let first_byte =
            facts[chosen].free_at.max(request.tick.0) + uncached.div_ceil(model.prefill_tokens_per_tick);
        let hits = receipt.candidates.get(chosen).map_or(0, |candidate| candidate.hits);
        for (what, replay, oracle) in [
            ("hit blocks", hits, facts[chosen].hits),
            ("time of the first token", receipt.first_byte_tick.unwrap_or(u64::MAX), first_byte),
        ] {
            if replay != oracle {
                return Err(Difference { request: request.id.clone(), what, replay, oracle });
            }
        }
    }
    Ok(())
}

fn facts(trace: &LabTrace, model: LabModel, run: &LabRun, number: usize, worker: usize) -> Facts {
    let request = &trace.requests[number];
    let (now, block) = (request.tick.0, u64::from(trace.size.tokens()));
    let heard = accepted(trace, worker, request);
    let snapshot = &trace.workers[worker];
    let last_news = heard.iter().map(|event| event.tick.0).next_back().unwrap_or(snapshot.observed.0);
    let leading = |counts: &dyn Fn(&BlockHash) -> bool| {
        request.blocks.iter().take_while(|hash| counts(hash)).count() as u64
    };
    let claimed = leading(&|hash| holds(trace, worker, &heard, request, hash));
    // Until it is silent a view is exact, however short the budget.
    let fresh = model.budget_ticks.max(model.silence_ticks);
    let sound = if now.saturating_sub(last_news) <= fresh { claimed } else { 0 };
    let stays = stays(trace, model, run, number, worker);
    let shares = |stay: &Stay<'_>, hash: &BlockHash| {
        stay.request.is_some_and(|other| other.namespace == request.namespace && other.blocks.contains(hash))
    };
    let booked = leading(&|hash| {
        stays.iter().any(|stay| now <= stay.first_byte + model.in_flight_credit_ticks && shares(stay, hash))
    });
    let live: Vec<&Stay<'_>> = stays.iter().filter(|stay| now < stay.end.max(stay.first_byte)).collect();
    let made = |stay: &Stay<'_>| {
        (now.saturating_sub(stay.first_byte) / model.ticks_per_decode_token).min(stay.decode)
    };
    let mut blocks: Vec<_> = live
        .iter()
        .filter_map(|stay| stay.request)
        .flat_map(|other| other.blocks.iter().map(|hash| (other.namespace, *hash)))
        .collect();
    blocks.sort_unstable();
    blocks.dedup();
    Facts {
        hits: sound.max(booked).min(request.prompt.0.saturating_sub(1) / block),
        active: blocks.len() as u64 + live.iter().map(|stay| 1 + made(stay) / block).sum::<u64>(),
        shared: leading(&|hash| live.iter().any(|stay| shares(stay, hash))),
        queued: live.iter().filter(|stay| now < stay.first_byte).map(|stay| stay.uncached).sum(),
        context: live.iter().map(|stay| stay.prompt + made(stay)).sum(),
        requests: live.len() as u64,
        free_at: stays
            .iter()
            .filter(|stay| stay.uncached > 0)
            .map(|stay| stay.first_byte)
            .fold(snapshot.observed.0, u64::max),
    }
}

/// Whether the cap and the reserve let the request onto the worker.
fn takes(settings: &Settings, trace: &LabTrace, request: &LabRequest, one: &Facts) -> bool {
    let Some(cap) = settings.overload.max_queued.filter(|_| one.queued > 0) else { return true };
    let cached = one.hits * u64::from(trace.size.tokens());
    let after = one.queued + request.prompt.0.saturating_sub(cached);
    let reserved = if one.hits > 0 { settings.overload.cold_reserve } else { 0.0 };
    after <= (cap.0 as f64 * (1.0 - reserved)) as u64
}

/// Events of `worker` that were heard by then and are younger than all before.
fn accepted<'a>(trace: &'a LabTrace, worker: usize, request: &LabRequest) -> Vec<&'a LabEvent> {
    let mut youngest = (trace.workers[worker].epoch, None);
    let due =
        |event: &&LabEvent| event.worker == worker && (event.tick, event.seq) <= (request.tick, request.seq);
    let younger = |event: &&LabEvent| {
        let age = (event.epoch, Some(event.seq));
        let accepted = age > youngest;
        youngest = youngest.max(age);
        accepted
    };
    trace.events.iter().filter(due).filter(younger).collect()
}

/// Who spoke of the block last, in the worker's present life?
fn holds(
    trace: &LabTrace,
    worker: usize,
    heard: &[&LabEvent],
    request: &LabRequest,
    hash: &BlockHash,
) -> bool {
    let snapshot = &trace.workers[worker];
    let life = heard.last().map_or(snapshot.epoch, |event| event.epoch);
    for event in heard.iter().rev().filter(|event| event.epoch == life) {
        let speaks = event.entry.namespace == request.namespace && event.entry.blocks.contains(hash);
        match event.kind {
            LabEventKind::Cleared => return false,
            LabEventKind::Stored if speaks => return true,
            LabEventKind::Removed if speaks => return false,
            LabEventKind::Stored | LabEventKind::Removed => {}
        }
    }
    life == snapshot.epoch
        && snapshot
            .entries
            .iter()
            .any(|entry| entry.namespace == request.namespace && entry.blocks.contains(hash))
}

/// Everything that was ever on the worker, in order.
fn stays<'a>(
    trace: &'a LabTrace,
    model: LabModel,
    run: &LabRun,
    number: usize,
    worker: usize,
) -> Vec<Stay<'a>> {
    let snapshot = &trace.workers[worker];
    let (seen, waits, runs) = (snapshot.observed.0, snapshot.queued.0, snapshot.context.0);
    let mut free_at = seen + waits.div_ceil(model.prefill_tokens_per_tick);
    let mut stays = Vec::new();
    if waits > 0 {
        let times = (free_at, free_at);
        stays.push(Stay {
            request: None,
            prompt: waits,
            uncached: waits,
            decode: 0,
            first_byte: times.0,
            end: times.1,
        });
    }
    if runs > 0 {
        let end = seen + runs * model.ticks_per_decode_token;
        stays.push(Stay { request: None, prompt: runs, uncached: 0, decode: 0, first_byte: seen, end });
    }
    for (request, receipt) in trace.requests[..number].iter().zip(&run.receipts) {
        if receipt.chosen.as_ref().is_none_or(|chosen| chosen.worker.as_str() != snapshot.name) {
            continue;
        }
        let hits = receipt.candidates.get(worker).map_or(0, |candidate| candidate.hits);
        let uncached = request.prompt.0.saturating_sub(hits * u64::from(trace.size.tokens()));
        free_at = free_at.max(request.tick.0) + uncached.div_ceil(model.prefill_tokens_per_tick);
        stays.push(Stay {
            request: Some(request),
            prompt: request.prompt.0,
            uncached,
            decode: request.decode,
            first_byte: free_at,
            end: free_at + request.decode * model.ticks_per_decode_token,
        });
    }
    stays
}

fn cost(
    settings: &Settings,
    trace: &LabTrace,
    request: &LabRequest,
    facts: &[Facts],
    at: usize,
    previous: Option<usize>,
) -> f64 {
    let one = &facts[at];
    let weight = settings.overlap.default;
    let missing = (request.blocks.len() as u64 - one.hits) as f64;
    let uncached = request.prompt.0.saturating_sub(one.hits * u64::from(trace.size.tokens()));
    match settings.policy {
        PolicyKind::CachePlusLoad => {
            let work = |one: &Facts| (one.queued + one.context) as f64;
            let mean = facts.iter().map(work).sum::<f64>() / facts.len() as f64;
            settings.load.imbalance * (work(one) - mean).max(0.0)
                + settings.load.request * one.requests as f64
                + settings.load.decode * one.context as f64
                + settings.load.queue * one.queued as f64
                + weight * uncached as f64
        }
        PolicyKind::KvAware => weight * missing + one.active.saturating_sub(one.shared) as f64,
        PolicyKind::LongestPrefix => missing,
        PolicyKind::LeastLoad => one.active as f64,
        PolicyKind::LMetric => ((one.queued + uncached) * (one.requests + 1)) as f64,
        PolicyKind::RoundRobin => {
            let start = previous.map_or(0, |previous| previous + 1);
            ((at + facts.len() - start) % facts.len()) as f64
        }
    }
}
