// What the explorer knows of a router: the latest answer, receipts so far, and what changed in between. No picture.

export interface Rank {
  rank: number;
  state: string;
  reason: string;
  credited: boolean;
  epoch: number;
  seq: number;
  age: number | null;
  blocks: number;
  active: number;
  queued: number;
  context: number;
  requests: number;
}

export interface Worker {
  name: string;
  role: string;
  ready: boolean;
  reason: string;
  engine: string;
  ranks: Rank[];
  /** Probes in a row that it did not pass. */
  missed: number;
}

export interface Shadow {
  policy: string;
  target: string;
  regret: number;
}

export interface Brief {
  id: string;
  attempt: number;
  at: number;
  role: string;
  policy: string;
  prompt: number;
  blocks: number;
  outcome: string;
  target: string | null;
  tie: string | null;
  predicted: number;
  shadows: Shadow[];
  status: number | null;
  failure: string | null;
  firstByte: number | null;
  enginePrompt: number | null;
  engineCached: number | null;
}

export interface Problem {
  reason: string;
  worker: string | null;
  message: string;
}

export interface News {
  at: number;
  worker: string;
  text: string;
  bad: boolean;
}

export interface Live {
  now: number;
  pool: string;
  version: string;
  policy: string;
  blockSize: number;
  ready: boolean;
  filed: number;
  workers: Worker[];
  problems: Problem[];
  problemCount: number;
  namespaces: Map<string, number>;
  /** Newest first, of one namespace. */
  receipts: Brief[];
  news: News[];
}

/** Receipts that the page keeps: half a minute of 200 a second. */
const MAX_RECEIPTS = 6000;
const MAX_NEWS = 40;
/** A failed attempt marks its worker for so long, in milliseconds. */
export const FAILING_MS = 5000;

export const EMPTY: Live = {
  now: 0,
  pool: "",
  version: "",
  policy: "",
  blockSize: 0,
  ready: false,
  filed: 0,
  workers: [],
  problems: [],
  problemCount: 0,
  namespaces: new Map(),
  receipts: [],
  news: [],
};

type Row = unknown[];
const text = (value: unknown): string => (typeof value === "string" ? value : "");
const num = (value: unknown): number => (typeof value === "number" ? value : 0);
const maybe = (value: unknown): number | null => (typeof value === "number" ? value : null);
const words = (value: unknown): string | null => (typeof value === "string" ? value : null);
const rows = (value: unknown): Row[] => (Array.isArray(value) ? value.filter(Array.isArray) : []);

function rankOf(row: Row): Rank {
  const [rank, state, reason, credited, epoch, seq, age, blocks, active, queued, context, requests] = row;
  return {
    rank: num(rank),
    state: text(state),
    reason: text(reason),
    credited: credited === true,
    epoch: num(epoch),
    seq: num(seq),
    age: maybe(age),
    blocks: num(blocks),
    active: num(active),
    queued: num(queued),
    context: num(context),
    requests: num(requests),
  };
}

function workerOf([name, role, ready, reason, engine, ranks, missed]: Row): Worker {
  return {
    name: text(name),
    role: text(role),
    ready: ready === true,
    reason: text(reason),
    engine: text(engine),
    ranks: rows(ranks).map(rankOf),
    missed: num(missed),
  };
}

function briefOf(row: Row): Brief {
  const [id, attempt, at, role, policy, prompt, blocks, outcome, target, tie, predicted, shadows, status, failure] = row;
  const [firstByte, enginePrompt, engineCached] = row.slice(14);
  return {
    id: text(id),
    attempt: num(attempt),
    at: num(at),
    role: text(role),
    policy: text(policy),
    prompt: num(prompt),
    blocks: num(blocks),
    outcome: text(outcome),
    target: words(target),
    tie: words(tie),
    predicted: num(predicted),
    shadows: rows(shadows).map(([one, chosen, regret]) => ({ policy: text(one), target: text(chosen), regret: num(regret) })),
    status: maybe(status),
    failure: words(failure),
    firstByte: maybe(firstByte),
    enginePrompt: maybe(enginePrompt),
    engineCached: maybe(engineCached),
  };
}

/** The next state, from an answer of `/v1/admin/live`. */
export function next(before: Live, answer: Record<string, unknown>): Live {
  const workers = rows(answer["workers"]).map(workerOf);
  const now = num(answer["now_unix_ms"]);
  const namespaces = new Map(before.namespaces);
  // Answers overlap a little, so these are shares rather than counts.
  for (const [name, seen] of Object.entries((answer["namespaces"] ?? {}) as Record<string, unknown>)) {
    namespaces.set(name, (namespaces.get(name) ?? 0) + num(seen));
  }
  const problems = (Array.isArray(answer["problems"]) ? answer["problems"] : []).map((one: Record<string, unknown>) => ({
    reason: text(one["reason"]),
    worker: words(one["worker"]),
    message: text(one["message"]),
  }));
  const receipts = merge(before.receipts, rows(answer["receipts"]).map(briefOf));
  return {
    now,
    pool: text(answer["pool"]),
    version: text(answer["router_version"]),
    policy: text(answer["policy"]),
    blockSize: num(answer["block_size"]),
    ready: answer["ready"] === true,
    filed: num(answer["filed"]),
    workers,
    problems,
    problemCount: num(answer["problem_count"]),
    namespaces,
    receipts,
    news: [...newsOf(before, workers, receipts, now), ...before.news].slice(0, MAX_NEWS),
  };
}

const keyOf = (one: Brief): string => `${one.at} ${one.attempt} ${one.id}`;

/** Both lists are newest first; what came again has its answer now. */
function merge(known: Brief[], fresh: Brief[]): Brief[] {
  if (fresh.length === 0) return known;
  const again = new Set(fresh.map(keyOf));
  const oldest = fresh[fresh.length - 1]?.at ?? 0;
  const cut = known.findIndex((one) => one.at < oldest);
  const [near, far] = cut < 0 ? [known, []] : [known.slice(0, cut), known.slice(cut)];
  const kept = near.filter((one) => !again.has(keyOf(one)));
  const mixed = kept.length === 0 ? fresh : [...fresh, ...kept].sort((a, b) => b.at - a.at);
  return [...mixed, ...far].slice(0, MAX_RECEIPTS);
}

function newsOf(before: Live, workers: Worker[], receipts: Brief[], now: number): News[] {
  if (before.now === 0) return [];
  const found: News[] = [];
  const say = (worker: string, text: string, bad: boolean) => found.push({ at: now, worker, text, bad });
  const old = new Map(before.workers.map((one) => [one.name, one]));
  const failing = failuresOf(receipts, now);
  const failed = failuresOf(before.receipts, before.now);
  for (const worker of workers) {
    const was = old.get(worker.name);
    old.delete(worker.name);
    if (!was) {
      say(worker.name, "joined", false);
      continue;
    }
    if (was.ready && !worker.ready) say(worker.name, `gets no requests: ${worker.reason.replaceAll("_", " ")}`, true);
    if (worker.ready && worker.missed > 0 && was.missed === 0) say(worker.name, "did not answer a probe", true);
    if (!was.ready && worker.ready) say(worker.name, "is ready", false);
    const failure = failing.get(worker.name);
    if (failure !== undefined && !failed.has(worker.name)) say(worker.name, `fails: ${failure.replaceAll("_", " ")}`, true);
    worker.ranks.forEach((rank, place) => {
      const past = was.ranks[place];
      if (!past) return;
      if (past.epoch !== 0 && rank.epoch > past.epoch) say(worker.name, "began a new life (epoch)", false);
      if (past.state !== rank.state) {
        say(worker.name, `view of rank ${rank.rank} is ${rank.state}: ${rank.reason.replaceAll("_", " ")}`, !rank.credited);
      }
    });
  }
  for (const name of old.keys()) say(name, "left", true);
  return found;
}

export const workerOfTarget = (target: string): string => target.slice(0, Math.max(0, target.lastIndexOf("#")));

/** Workers whose last answer of late was a failure, with its label. */
export function failuresOf(receipts: Brief[], now: number): Map<string, string> {
  const seen = new Map<string, string | null>();
  for (const one of receipts) {
    if (one.at < now - FAILING_MS) break;
    if (one.target === null || one.status === null) continue;
    const name = workerOfTarget(one.target);
    if (!seen.has(name)) seen.set(name, one.failure);
  }
  return new Map([...seen].filter((entry): entry is [string, string] => entry[1] !== null));
}

/** Sums over the kept receipts, by worker. */
export interface Tally {
  requests: number;
  prompt: number;
  predicted: number;
  /** Of answers in which the engine said how much was cached. */
  told: number;
  toldPredicted: number;
  cached: number;
}

export function tallyOf(receipts: Brief[]): Map<string, Tally> {
  const found = new Map<string, Tally>();
  for (const one of receipts) {
    if (one.target === null) continue;
    const name = workerOfTarget(one.target);
    const tally = found.get(name) ?? { requests: 0, prompt: 0, predicted: 0, told: 0, toldPredicted: 0, cached: 0 };
    tally.requests += 1;
    tally.prompt += one.prompt;
    tally.predicted += one.predicted;
    if (one.engineCached !== null) {
      tally.told += 1;
      tally.toldPredicted += one.predicted;
      tally.cached += one.engineCached;
    }
    found.set(name, tally);
  }
  return found;
}

export interface ShadowTally {
  policy: string;
  decisions: number;
  agreed: number;
  regret: number;
}

export function shadowsOf(receipts: Brief[]): ShadowTally[] {
  const found = new Map<string, ShadowTally>();
  for (const one of receipts) {
    for (const shadow of one.shadows) {
      const tally = found.get(shadow.policy) ?? { policy: shadow.policy, decisions: 0, agreed: 0, regret: 0 };
      tally.decisions += 1;
      tally.agreed += shadow.target === one.target ? 1 : 0;
      tally.regret += shadow.regret;
      found.set(shadow.policy, tally);
    }
  }
  return [...found.values()].sort((a, b) => (a.policy < b.policy ? -1 : 1));
}

/** Seconds that the charts of the stream show. */
export const SPAN_S = 90;

/** Decisions a second, share of predicted hits, share that engines confirmed; by second, ending with the last whole one. */
export function ratesOf(receipts: Brief[], now: number): [number[], number[], (number | null)[], (number | null)[]] {
  const last = Math.floor(now / 1000) - 1;
  const times = Array.from({ length: SPAN_S }, (_, place) => last - SPAN_S + 1 + place);
  const sums = times.map(() => ({ count: 0, prompt: 0, predicted: 0, told: 0, cached: 0 }));
  for (const one of receipts) {
    const sum = sums[Math.floor(one.at / 1000) - (last - SPAN_S + 1)];
    if (!sum) continue;
    sum.count += 1;
    sum.prompt += one.prompt;
    sum.predicted += one.predicted;
    if (one.engineCached !== null) {
      sum.told += one.enginePrompt ?? one.prompt;
      sum.cached += one.engineCached;
    }
  }
  return [
    times,
    sums.map((one) => one.count),
    sums.map((one) => (one.prompt > 0 ? (one.predicted / one.prompt) * 100 : null)),
    sums.map((one) => (one.told > 0 ? (one.cached / one.told) * 100 : null)),
  ];
}
