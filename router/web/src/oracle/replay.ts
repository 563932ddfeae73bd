// The lab's oracle: every decision of a trace made again, in the browser, from the design's words.
//
// Nothing is carried from decision to decision but the list of bookings. What a view holds is asked of the events
// that were accepted by then, what a target has in hand is asked of the bookings: slow and obvious. Each policy
// starts with an empty list. The result has the shape and the digest of `kv-router replay --json`.

import { digest } from "./digest.ts";
import { canonical, type Value } from "./json.ts";
import {
  cheapest,
  dominators,
  outcome,
  price,
  spelling,
  type Facts,
  type Load,
  type Outcome,
  type Policy,
  type Settings,
  type Terms,
} from "./policy.ts";
import { bySize, type Trace, type TraceEvent, type TraceRequest, type TraceWorker } from "./trace.ts";

/** The service model and its clocks, in ticks of a millisecond. */
export interface Model {
  prefill_tokens_per_tick: number;
  ticks_per_decode_token: number;
  in_flight_credit_ticks: number;
  silence_ticks: number;
  budget_ticks: number;
}

export const MODEL: Model = {
  prefill_tokens_per_tick: 10,
  ticks_per_decode_token: 10,
  in_flight_credit_ticks: 2000,
  silence_ticks: 3000,
  budget_ticks: 10_000,
};

export interface Trust {
  state: "exact" | "unsound";
  reason: "ok" | "silence";
  credited: boolean;
  epoch: bigint;
  seq: bigint;
  age: number;
}

export interface LabCandidate {
  target: string;
  claimed: number;
  hits: number;
  rejected_other_namespace: number;
  load: Load;
  shared_active: number;
  trust: Trust;
  terms: Terms;
  dominated_by: string | null;
}

export interface LabReceipt {
  request_id: string;
  tick: number;
  namespace: string;
  candidates: LabCandidate[];
  chosen: string | null;
  tie: "none" | "target" | null;
  outcome: Outcome;
  stale_claim: boolean;
  first_byte_tick: number | null;
}

export interface LabSummary {
  recomputed_tokens: number;
  hit_share: number;
  hit_count: number;
  load_max_over_mean: number;
  route_churn: number;
  stale_events: number;
  tenant_rejections: number;
  dominated_choices: number;
  stale_claims: number;
  unrouted: number;
  latency_proxy_ticks: number;
}

/** A request on a worker, with its modelled times. */
export interface Booking {
  /** Null for what the first snapshot says was under way. */
  request: TraceRequest | null;
  worker: number;
  prompt: number;
  uncached: number;
  start: number;
  firstByte: number;
  decode: number;
  end: number;
}

export interface LabRun {
  name: Policy;
  policy: string;
  receipts: LabReceipt[];
  summary: LabSummary;
  /** For pictures; no part of the ledger. */
  bookings: Booking[];
}

export interface Ledger {
  runs: LabRun[];
  value: Value;
  /** SHA-256 of the canonical JSON of the rest. */
  digest: string;
  /** The file that `kv-router replay --json` writes. */
  text: string;
}

export const targetOf = (worker: TraceWorker): string => `${worker.name}#0`;

/** Replays under each policy from a clean copy. */
export function replay(trace: Trace, model: Model, policies: Settings[]): Ledger {
  const runs = policies.map((settings) => run(trace, model, settings));
  const first = policies[0];
  const body = {
    schema_version: 1,
    modelled: "latencies and loads come from the service model below, none from an engine",
    trace: {
      format: "lab",
      requests: trace.requests.length,
      workers: trace.workers.length,
      block_tokens: trace.blockSize,
    },
    model: { ...model },
    overload: { max_queued: first?.maxQueued ?? null, cold_reserve: first?.coldReserve ?? 0 },
    policies: runs.map(({ policy, receipts, summary }) => ({ policy, receipts, summary })),
  } as unknown as Record<string, Value>;
  const sum = digest(canonical(body));
  const value: Value = { ...body, digest: sum };
  return { runs, value, digest: sum, text: `${canonical(value)}\n` };
}

function run(trace: Trace, model: Model, settings: Settings): LabRun {
  const bookings = trace.workers.flatMap((worker, place) => underway(worker, place, model));
  const receipts: LabReceipt[] = [];
  let previous = -1;
  for (const request of trace.requests) {
    const seen = trace.workers.map((_, place) => look(trace, model, bookings, request, place));
    const facts = seen.map((one) => one.facts);
    const ask = { prompt: request.prompt, blocks: request.blocks.length, blockSize: trace.blockSize };
    const terms = price(settings, ask, facts, previous);
    const tied = cheapest(terms);
    const chosen = tied[0] ?? -1;
    const own = seen[chosen];
    let firstByte: number | null = null;
    if (own) {
      const booking = book(trace, model, bookings, request, chosen, own.facts.hits);
      bookings.push(booking);
      firstByte = booking.firstByte;
      previous = chosen;
    }
    const name = (place: number) => {
      const worker = trace.workers[place];
      return worker ? targetOf(worker) : null;
    };
    const better = dominators(facts);
    receipts.push({
      request_id: request.id,
      tick: request.tick,
      namespace: request.namespace,
      candidates: seen.map(({ facts: fact, trust, elsewhere }, place) => ({
        target: name(place) ?? "",
        claimed: fact.claimed,
        hits: fact.hits,
        rejected_other_namespace: elsewhere,
        load: fact.load,
        shared_active: fact.sharedActive,
        trust,
        terms: terms[place] as Terms,
        dominated_by: name(better[place] ?? -1),
      })),
      chosen: name(chosen),
      tie: own ? (tied.length > 1 ? "target" : "none") : null,
      outcome: outcome(ask, facts, terms, chosen),
      stale_claim: own !== undefined && own.facts.claimed > 0 && own.trust.state !== "exact",
      first_byte_tick: firstByte,
    });
  }
  const summary = summarise(trace, receipts);
  return { name: settings.policy, policy: spelling(settings), receipts, summary, bookings };
}

/** What the snapshot says waited is prefilled first; what decoded goes on for as long as its tokens take to make. */
function underway(worker: TraceWorker, place: number, model: Model): Booking[] {
  const { observed, queued, context } = worker;
  const waits = observed + Math.ceil(queued / model.prefill_tokens_per_tick);
  const base = { request: null, worker: place, start: observed, decode: 0 };
  const found: Booking[] = [];
  if (queued > 0) found.push({ ...base, prompt: queued, uncached: queued, firstByte: waits, end: waits });
  if (context > 0) {
    const end = observed + context * model.ticks_per_decode_token;
    found.push({ ...base, prompt: context, uncached: 0, firstByte: observed, end });
  }
  return found;
}

/** First come, first served, at a fixed rate. */
function book(
  trace: Trace,
  model: Model,
  bookings: Booking[],
  request: TraceRequest,
  place: number,
  hits: number,
): Booking {
  const observed = trace.workers[place]?.observed ?? 0;
  const uncached = Math.max(0, request.prompt - hits * trace.blockSize);
  const before = bookings.filter((one) => one.worker === place).map((one) => one.firstByte);
  const start = Math.max(observed, request.tick, ...before);
  const firstByte = start + Math.ceil(uncached / model.prefill_tokens_per_tick);
  const end = firstByte + request.decode * model.ticks_per_decode_token;
  return { request, worker: place, prompt: request.prompt, uncached, start, firstByte, decode: request.decode, end };
}

interface Seen {
  facts: Facts;
  trust: Trust;
  /** Leading blocks held for one other namespace, where that is more than is claimed. */
  elsewhere: number;
}

/** One worker as the decision sees it. */
function look(trace: Trace, model: Model, bookings: Booking[], request: TraceRequest, place: number): Seen {
  const now = request.tick;
  const worker = trace.workers[place] as TraceWorker;
  const heard = accepted(trace, place, request).kept;
  const view = viewOf(worker, heard);
  const leading = (holds: (block: string) => boolean) => {
    const miss = request.blocks.findIndex((block) => !holds(block));
    return miss < 0 ? request.blocks.length : miss;
  };
  const holds = (namespace: string) => leading((block) => view.get(namespace)?.has(block) ?? false);
  const claimed = holds(request.namespace);
  const others = [...view.keys()].filter((namespace) => namespace !== request.namespace).map(holds);
  const most = Math.max(0, ...others);
  const trust = verdict(worker, heard, now, model);

  const own = bookings.filter((one) => one.worker === place);
  const kin = own.filter((one) => one.request?.namespace === request.namespace);
  const within = (some: Booking[]) => leading((block) => some.some((one) => one.request?.blocks.includes(block)));
  const booked = within(kin.filter((one) => now <= one.firstByte + model.in_flight_credit_ticks));
  const usable = Math.floor(Math.max(0, request.prompt - 1) / trace.blockSize);
  const hits = Math.min(usable, Math.max(trust.credited ? claimed : 0, booked));

  const live = (one: Booking) => now < Math.max(one.end, one.firstByte);
  const facts: Facts = {
    hits,
    credit: hits,
    claimed,
    credited: trust.credited,
    load: loadOf(own.filter(live), now, trace.blockSize, model),
    sharedActive: within(kin.filter(live)),
    images: 0,
  };
  return { facts, trust, elsewhere: most > claimed ? most : 0 };
}

function loadOf(live: Booking[], now: number, blockSize: number, model: Model): Load {
  const made = (one: Booking) =>
    Math.min(one.decode, Math.floor(Math.max(0, now - one.firstByte) / model.ticks_per_decode_token));
  const distinct = new Set(
    live.flatMap(({ request }) => (request?.blocks ?? []).map((block) => `${request?.namespace} ${block}`)),
  );
  const sum = (of: (one: Booking) => number) => live.reduce((total, one) => total + of(one), 0);
  return {
    // One private tail block each, and one per block's worth of generated tokens.
    active_blocks: distinct.size + sum((one) => 1 + Math.floor(made(one) / blockSize)),
    queued: sum((one) => (now < one.firstByte ? one.uncached : 0)),
    context: sum((one) => one.prompt + made(one)),
    requests: live.length,
  };
}

/** Events of one worker that are due at the request, without those of an older life or an older place in it. */
export function accepted(
  trace: Trace,
  place: number,
  until: { tick: number; seq: bigint },
): { kept: TraceEvent[]; stale: number } {
  let epoch = trace.workers[place]?.epoch ?? 0n;
  let seq = -1n;
  const kept: TraceEvent[] = [];
  let stale = 0;
  for (const event of trace.events) {
    // Of equal ticks and seqs the event comes first.
    const late = event.tick - until.tick || bySize(event.seq, until.seq);
    if (event.worker !== place || late > 0) continue;
    if (event.epoch > epoch || (event.epoch === epoch && event.seq > seq)) {
      kept.push(event);
      epoch = event.epoch;
      seq = event.seq;
    } else {
      stale += 1;
    }
  }
  return { kept, stale };
}

/** What the worker's cache holds by namespace, as its events tell. A new life begins empty. */
export function viewOf(worker: TraceWorker, heard: TraceEvent[]): Map<string, Set<string>> {
  let view = new Map<string, Set<string>>();
  const of = (namespace: string) => {
    const held = view.get(namespace) ?? new Set<string>();
    view.set(namespace, held);
    return held;
  };
  const life = heard.at(-1)?.epoch ?? worker.epoch;
  if (life === worker.epoch) {
    for (const entry of worker.entries) for (const block of entry.blocks) of(entry.namespace).add(block);
  }
  for (const { kind, entry } of heard.filter((event) => event.epoch === life)) {
    if (kind === "cleared") view = new Map();
    for (const block of entry.blocks) {
      if (kind === "stored") of(entry.namespace).add(block);
      else of(entry.namespace).delete(block);
    }
  }
  return view;
}

/** News proves a view; silence makes it unsound, and ends its credit when the budget is spent. */
function verdict(worker: TraceWorker, heard: TraceEvent[], now: number, model: Model): Trust {
  const last = heard.at(-1);
  const age = Math.max(0, now - (last?.tick ?? worker.observed));
  const silent = age > model.silence_ticks;
  return {
    state: silent ? "unsound" : "exact",
    reason: silent ? "silence" : "ok",
    credited: !silent || age <= model.budget_ticks,
    epoch: last?.epoch ?? worker.epoch,
    seq: last?.seq ?? 0n,
    age,
  };
}

function summarise(trace: Trace, receipts: LabReceipt[]): LabSummary {
  const last = trace.requests.at(-1);
  const count = <T>(all: T[], of: (one: T) => boolean) => all.filter(of).length;
  const work = new Map(trace.workers.map((worker) => [targetOf(worker), 0]));
  const homes = new Map<string, string>();
  let [prompts, uncached, waited, hitCount, dominated, churn] = [0, 0, 0, 0, 0, 0];
  receipts.forEach((receipt, number) => {
    const request = trace.requests[number];
    const chosen = receipt.candidates.find((one) => one.target === receipt.chosen);
    if (!request || !chosen) return;
    const own = request.prompt - chosen.hits * trace.blockSize;
    prompts += request.prompt;
    uncached += own;
    waited += (receipt.first_byte_tick ?? 0) - receipt.tick;
    hitCount += chosen.hits > 0 ? 1 : 0;
    dominated += chosen.dominated_by === null ? 0 : 1;
    work.set(chosen.target, (work.get(chosen.target) ?? 0) + own);
    const [first] = request.blocks;
    if (first === undefined) return;
    const key = `${request.namespace} ${first}`;
    churn += (homes.get(key) ?? chosen.target) === chosen.target ? 0 : 1;
    homes.set(key, chosen.target);
  });
  const ratio = (part: number, whole: number) => (whole === 0 ? 0 : part / whole);
  const routed = count(receipts, (one) => one.chosen !== null);
  const heard = trace.workers.map((_, place) => (last ? accepted(trace, place, last).stale : 0));
  return {
    recomputed_tokens: uncached,
    hit_share: ratio(prompts - uncached, prompts),
    hit_count: hitCount,
    load_max_over_mean: ratio(Math.max(...work.values()) * work.size, uncached),
    route_churn: churn,
    stale_events: heard.reduce((sum, one) => sum + one, 0),
    tenant_rejections: receipts.reduce(
      (sum, one) => sum + count(one.candidates, (candidate) => candidate.rejected_other_namespace > 0),
      0,
    ),
    dominated_choices: dominated,
    stale_claims: count(receipts, (one) => one.stale_claim),
    unrouted: receipts.length - routed,
    latency_proxy_ticks: ratio(waited, routed),
  };
}
