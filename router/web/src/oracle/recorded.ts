// A router's own receipts as a trace. Every line proves the one before it, so the chain is followed first. Then every
// decision is made again from the facts in its receipt, and every policy is asked about the same frozen candidates:
// nothing is simulated. The result has the shape and the digest of `kv-router replay --trace RECEIPTS --json`.

import { digest } from "./digest.ts";
import { byBytes, canonical, type Value } from "./json.ts";
import {
  cheapest,
  DEFAULTS,
  outcome,
  POLICIES,
  price,
  spelling,
  WEIGHTS,
  type Ask,
  type Facts,
  type Policy,
  type Settings,
  type Terms,
} from "./policy.ts";
import { TraceError } from "./trace.ts";
import { xxh3 } from "./xxh3.ts";

type Raw = { [key: string]: Value };

export interface Recorded {
  receipts: { sequence: number; raw: Raw }[];
  /** Receipts that gaps say are missing. */
  lost: number;
  /** Digest of the last line. */
  head: string;
}

/** Longest file: what the admin port answers with, and room. */
export const MAX_RECORDED = 24 << 20;

/** Whether a file looks like receipts rather than a lab trace. */
export const isRecorded = (text: string): boolean => /^\{[^\n]*"kind":"(receipt|gap)"/.test(text.slice(0, 4 << 20));

/** Reads a chain, or says which line of it is wrong. */
export function readRecorded(text: string): Recorded {
  const found: Recorded = { receipts: [], lost: 0, head: "0".repeat(64) };
  let expected: { sequence: number; previous: string } | null = null;
  const lines = text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  lines.forEach((line, place) => {
    const wrong = (field: string, problem: string) => new TraceError(place + 1, field, problem);
    let raw: Raw;
    try {
      raw = JSON.parse(line) as Raw;
    } catch {
      throw wrong("object", "is not JSON");
    }
    if (typeof raw !== "object" || raw === null || Array.isArray(raw)) throw wrong("object", "must be an object");
    if (raw["schema_version"] !== 3) throw wrong("schema_version", `is ${canonical(raw["schema_version"] ?? null)}, and this page reads 3`);
    if (canonical(raw) !== line) throw wrong("object", "is not canonical JSON (RFC 8785)");
    const { digest: own, ...rest } = raw;
    if (digest(canonical(rest)) !== own) throw wrong("digest", "is not that of the line");
    if (expected !== null && raw["sequence"] !== expected.sequence) throw wrong("sequence", "does not follow the line before");
    if (expected !== null && raw["previous"] !== expected.previous) throw wrong("previous", "is not the digest of the line before");
    expected = { sequence: num(raw["sequence"]) + 1, previous: String(own) };
    found.head = String(own);
    if (raw["kind"] === "gap") found.lost += num(raw["lost"]);
    else if (Array.isArray(raw["candidates"]) && raw["candidate_count"] === raw["candidates"].length) {
      found.receipts.push({ sequence: num(raw["sequence"]), raw });
    } else throw wrong("candidates", "are not as many as were priced");
  });
  return found;
}

const num = (value: Value | undefined): number => (typeof value === "number" ? value : 0);
const object = (value: Value | undefined): Raw =>
  typeof value === "object" && value !== null && !Array.isArray(value) ? value : {};
const list = (value: Value | undefined): Raw[] => (Array.isArray(value) ? value.map(object) : []);
const text = (value: Value | undefined): string => (typeof value === "string" ? value : "");

interface Decision {
  terms: Terms[];
  /** Place of the choice; −1 for none. */
  chosen: number;
  tie: string | null;
  outcome: string;
}

/** A receipt's facts and settings. */
interface Case {
  raw: Raw;
  ask: Ask;
  facts: Facts[];
  targets: string[];
  histories: boolean[];
  settings: Settings;
  /** Places before the next turn of round-robin. */
  previous: number;
  /** Hash of the block at a depth that no candidate holds. */
  blocks: Map<number, bigint>;
  /** Place of the choice as recorded; −1 for none. */
  recorded: number;
  session: boolean;
}

function caseOf(raw: Raw): Case {
  const settings = object(raw["settings"]);
  const [tiers, overlap, load, overload] = ["tiers", "overlap", "load", "overload"].map((key) => object(settings[key])) as [Raw, Raw, Raw, Raw];
  const role = text(raw["role"]);
  const weight = role === "Prefill" ? overlap["prefill"] : role === "Decode" ? overlap["decode"] : null;
  const blocks = new Map<number, bigint>();
  const candidates = list(raw["candidates"]);
  const total = (hits: Raw) => num(hits["device"]) + num(hits["host"]) + num(hits["disk"]);
  const facts = candidates.map((one): Facts => {
    const [hits, own, trust] = [object(one["hits"]), object(one["load"]), object(one["trust"])];
    if (typeof one["next_block"] === "string") blocks.set(total(hits), BigInt(`0x${one["next_block"]}`));
    const unseen = Math.max(0, num(raw["images"]) - num(one["images_seen"]));
    return {
      hits: total(hits),
      credit: num(tiers["device"]) * num(hits["device"]) + num(tiers["host"]) * num(hits["host"]) + num(tiers["disk"]) * num(hits["disk"]),
      claimed: total(object(one["claimed"])),
      credited: trust["credited"] === true,
      load: { active_blocks: num(own["active_blocks"]), queued: num(own["queued"]), context: num(own["context"]), requests: num(own["requests"]) },
      sharedActive: num(one["shared_active"]),
      images: role === "Decode" ? 0 : num(settings["image_weight"]) * unseen,
    };
  });
  const targets = candidates.map((one) => text(one["target"]));
  const turn = raw["turn"];
  const chosen = object(raw["chosen"]);
  return {
    raw,
    ask: { prompt: num(raw["prompt_tokens"]), blocks: num(raw["prompt_blocks"]), blockSize: num(raw["block_size"]) },
    facts,
    targets,
    histories: candidates.map((one) => one["evidence"] === "history"),
    settings: {
      policy: (POLICIES.find((one) => one === settings["policy"]) ?? "cache-plus-load") as Policy,
      overlap: typeof weight === "number" ? weight : num(overlap["default"]),
      queue: num(load["queue"]),
      decode: num(load["decode"]),
      request: num(load["request"]),
      imbalance: num(load["imbalance"]),
      maxQueued: typeof overload["max_queued"] === "number" ? overload["max_queued"] : null,
      coldReserve: num(overload["cold_reserve"]),
    },
    previous: typeof turn === "string" ? targets.filter((one) => byTarget(one, turn) <= 0).length - 1 : -1,
    blocks,
    recorded: targets.indexOf(text(chosen["target"])),
    session: chosen["tie"] === "session",
  };
}

/** `host:port#rank`, by host and port, then by rank. */
function byTarget(a: string, b: string): number {
  const cut = (target: string): [string, number] => [target.slice(0, target.lastIndexOf("#")), Number(target.slice(target.lastIndexOf("#") + 1))];
  const [[left, rank], [right, other]] = [cut(a), cut(b)];
  return byBytes(left, right) || rank - other;
}

const utf8 = new TextEncoder();

/** How much a rendezvous key wants a target. */
function weightOf(target: string, key: bigint): bigint {
  const name = utf8.encode(target.slice(0, target.lastIndexOf("#")));
  const bytes = new Uint8Array(name.length + 5);
  bytes.set(name);
  new DataView(bytes.buffer).setUint32(name.length + 1, Number(target.slice(target.lastIndexOf("#") + 1)), true);
  return xxh3(bytes, key);
}

function decide(one: Case, settings: Settings): Decision {
  const bound = one.session ? one.recorded : -1;
  const terms = price(settings, one.ask, one.facts, bound >= 0 ? -1 : one.previous);
  if (bound >= 0 && terms[bound]?.rejection === null) {
    return { terms, chosen: bound, tie: "session", outcome: ended(one, terms.map((term) => ({ ...term, rejection: null })), bound) };
  }
  const all = bound >= 0 ? price(settings, one.ask, one.facts, one.previous) : terms;
  const [chosen, tie] = untie(one, cheapest(all));
  return { terms: all, chosen, tie, outcome: ended(one, all, chosen) };
}

function ended(one: Case, terms: Terms[], chosen: number): string {
  const how = outcome(one.ask, one.facts, terms, chosen);
  return how === "hit" && one.histories[chosen] ? "approximate" : how;
}

/** Fewer active blocks, then a rendezvous hash, then the lower target. */
function untie(one: Case, tied: number[]): [number, string | null] {
  const first = tied[0];
  if (first === undefined) return [-1, null];
  if (tied.length === 1) return [first, "none"];
  const active = (at: number) => one.facts[at]?.load.active_blocks ?? 0;
  const fewest = Math.min(...tied.map(active));
  const left = tied.filter((at) => active(at) === fewest);
  if (left.length === 1) return [left[0] ?? -1, "active_blocks"];
  const deepest = Math.max(...left.map((at) => one.facts[at]?.hits ?? 0));
  const byBlock = deepest < one.ask.blocks;
  const key = byBlock ? (one.blocks.get(deepest) ?? 0n) : xxh3(utf8.encode(text(one.raw["request_id"])), 0n);
  let best = left[0] ?? -1;
  let most = -1n;
  for (const at of left) {
    const weight = weightOf(one.targets[at] ?? "", key);
    if (weight > most) [best, most] = [at, weight];
  }
  return [best, byBlock ? "rendezvous_block" : "rendezvous_request"];
}

/** Fields in which a decision, made again, is not the recorded one. */
export function repeat(raw: Raw): string[] {
  const one = caseOf(raw);
  const found = decide(one, one.settings);
  const differ: string[] = [];
  const check = (field: string, recorded: Value, repeated: Value) => {
    const [left, right] = [canonical(recorded), canonical(repeated)];
    if (left !== right) differ.push(`${field}: recorded ${left}, and repeated ${right}`);
  };
  list(raw["candidates"]).forEach((candidate, place) => check(`candidates[${place}].terms`, candidate["terms"] ?? null, (found.terms[place] ?? null) as unknown as Value));
  check("chosen", raw["chosen"] ?? null, found.chosen < 0 ? null : { target: one.targets[found.chosen] ?? "", tie: found.tie });
  check("outcome", raw["outcome"] ?? null, found.outcome);
  return differ;
}

export interface Evaluation {
  policy: string;
  decisions: number;
  no_target: number;
  agreed: number;
  agreement: number;
  hit_blocks: number;
  regret_blocks: number;
  forgone_blocks: number;
  uncached_tokens: number;
  queued_tokens: number;
}

export interface Evaluated {
  rows: (Evaluation & { name: Policy })[];
  /** For each receipt each policy's choice. */
  picks: Map<number, (string | null)[]>;
  value: Value;
  digest: string;
  text: string;
}

/** Asks every policy. The recorded weights count unless others are given. */
export function evaluate(trace: Recorded, weights: Omit<Settings, "policy"> | null): Evaluated {
  const cases = trace.receipts.map(({ sequence, raw }) => ({ sequence, one: caseOf(raw) }));
  const picks = new Map<number, (string | null)[]>();
  const given = (policy: Policy): Settings => ({ ...DEFAULTS, ...weights, policy });
  const rows = POLICIES.map((policy) => {
    const row = { policy: weights === null ? policy : spelling(given(policy)), decisions: 0, no_target: 0, agreed: 0, agreement: 0, hit_blocks: 0, regret_blocks: 0, forgone_blocks: 0, uncached_tokens: 0, queued_tokens: 0 };
    // A policy has its own weights where given, and the default for those that it does not look at.
    const own = Object.fromEntries(["overlap", "queue", "decode", "request", "imbalance"].map((key) => [key, (WEIGHTS[policy] as string[]).includes(key) ? given(policy)[key as "overlap"] : DEFAULTS[key as "overlap"]]));
    for (const { sequence, one } of cases) {
      if (one.recorded < 0 || one.session) continue;
      const settings = { ...one.settings, ...(weights === null ? {} : own), policy };
      const { chosen } = decide(one, settings);
      picks.set(sequence, [...(picks.get(sequence) ?? []), one.targets[chosen] ?? null]);
      row.decisions += 1;
      const [pick, real] = [one.facts[chosen], one.facts[one.recorded]];
      if (!pick || !real) {
        row.no_target += 1;
        continue;
      }
      row.agreed += chosen === one.recorded ? 1 : 0;
      row.hit_blocks += pick.hits;
      row.regret_blocks += Math.max(0, pick.hits - real.hits);
      row.forgone_blocks += Math.max(0, real.hits - pick.hits);
      row.uncached_tokens += Math.max(0, one.ask.prompt - pick.hits * one.ask.blockSize);
      row.queued_tokens += pick.load.queued;
    }
    row.agreement = row.decisions === 0 ? 0 : row.agreed / row.decisions;
    return row;
  });
  const body: Raw = {
    schema_version: 1,
    frozen: "every policy was asked on the recorded candidates of each receipt; nothing is simulated",
    trace: { format: "receipts", receipts: trace.receipts.length, lost: trace.lost, head: trace.head },
    repeated: trace.receipts.length,
    policies: rows.map((row) => ({ ...row })),
  };
  const sum = digest(canonical(body));
  const value: Value = { ...body, digest: sum };
  return { rows: rows.map((row, at) => ({ ...row, name: POLICIES[at] as Policy })), picks, value, digest: sum, text: `${canonical(value)}\n` };
}
