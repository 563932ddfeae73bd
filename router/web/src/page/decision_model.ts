// One decision as the page shows it, from a lab receipt or from a receipt of a running router.

import { dominators, POLICIES, UNITS, type Load, type Policy } from "../oracle/policy.ts";
import type { LabReceipt, LabRun } from "../oracle/replay.ts";
import type { Trace } from "../oracle/trace.ts";
import { REJECTIONS, worker } from "./format.ts";

export interface Tiers {
  device: number;
  host: number;
  disk: number;
}

export interface Candidate {
  target: string;
  claimed: Tiers;
  hits: Tiers;
  /** Hits that prompts in flight will leave behind; null where the receipt does not tell. */
  predicted: number | null;
  evidence: string | null;
  elsewhere: number | null;
  load: Load;
  sharedActive: number;
  trust: { state: string; reason: string; credited: boolean; epoch: string; seq: string; age: number | null };
  cost: number;
  uncached: number;
  loadCost: number;
  images: number;
  rejection: string | null;
  dominatedBy: string | null;
}

export interface Decision {
  id: string;
  policy: string;
  unit: string;
  namespace: string;
  prompt: number;
  blocks: number;
  /** Prompts of the request: 1 unless the receipt lists several. */
  prompts: number;
  blockSize: number;
  /** Milliseconds: of the trace, or since 1970. */
  at: number;
  live: boolean;
  outcome: string;
  chosen: string | null;
  tie: string | null;
  firstByte: number | null;
  staleClaim: boolean;
  candidates: Candidate[];
  /** Candidates that the receipt does not hold. */
  missing: number;
  shadows: { policy: string; target: string; regret: number }[];
  result: Record<string, unknown> | null;
}

export const total = (tiers: Tiers): number => tiers.device + tiers.host + tiers.disk;

const device = (blocks: number): Tiers => ({ device: blocks, host: 0, disk: 0 });

export function ofLab(trace: Trace, run: LabRun, receipt: LabReceipt): Decision {
  const request = trace.requests.find((one) => one.id === receipt.request_id);
  return {
    id: receipt.request_id,
    policy: run.name,
    unit: UNITS[run.name],
    namespace: receipt.namespace,
    prompt: request?.prompt ?? 0,
    blocks: request?.blocks.length ?? 0,
    prompts: 1,
    blockSize: trace.blockSize,
    at: receipt.tick,
    live: false,
    outcome: receipt.outcome,
    chosen: receipt.chosen,
    tie: receipt.tie,
    firstByte: receipt.first_byte_tick,
    staleClaim: receipt.stale_claim,
    missing: 0,
    shadows: [],
    result: null,
    candidates: receipt.candidates.map((one) => ({
      target: one.target,
      claimed: device(one.claimed),
      hits: device(one.hits),
      predicted: Math.max(0, one.hits - (one.trust.credited ? one.claimed : 0)),
      evidence: null,
      elsewhere: one.rejected_other_namespace,
      load: one.load,
      sharedActive: one.shared_active,
      trust: { ...one.trust, epoch: String(one.trust.epoch), seq: String(one.trust.seq) },
      cost: one.terms.cost,
      uncached: one.terms.uncached,
      loadCost: one.terms.load,
      images: one.terms.images,
      rejection: one.terms.rejection,
      dominatedBy: one.dominated_by,
    })),
  };
}

type Raw = Record<string, unknown>;

const object = (value: unknown): Raw =>
  typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Raw) : {};
const text = (value: unknown): string => (typeof value === "string" ? value : typeof value === "number" ? String(value) : "");
const num = (value: unknown): number => (typeof value === "number" && Number.isFinite(value) ? value : 0);
const tiers = (value: unknown): Tiers => {
  const raw = object(value);
  return { device: num(raw["device"]), host: num(raw["host"]), disk: num(raw["disk"]) };
};
const list = (value: unknown): Raw[] => (Array.isArray(value) ? value.map(object) : []);

/** A receipt as `/v1/admin/receipts` answers it. Fields that this page does not know are left alone. */
export function ofReceipt(receipt: unknown): Decision {
  const raw = object(receipt);
  const settings = object(raw["settings"]);
  const policy = text(settings["policy"]);
  const chosen = object(raw["chosen"]);
  const candidates = list(raw["candidates"]).map(ofCandidate);
  const facts = candidates.map((one) => ({
    hits: total(one.hits),
    credit: 0,
    claimed: 0,
    credited: true,
    load: one.load,
    sharedActive: 0,
    images: 0,
  }));
  // A fleet of thousands: dominance is asked of each pair, so only where that is quick.
  if (facts.length <= 4096 && candidates.some((one) => one.dominatedBy === null)) {
    dominators(facts).forEach((place, at) => {
      const one = candidates[at];
      if (one) one.dominatedBy = candidates[place]?.target ?? null;
    });
  }
  const own = candidates.find((one) => one.target === chosen["target"]);
  const known = POLICIES.find((one) => one === policy) as Policy | undefined;
  return {
    id: text(raw["request_id"]),
    policy,
    unit: known ? UNITS[known] : "",
    namespace: text(raw["namespace"]),
    prompt: num(raw["prompt_tokens"]),
    blocks: num(raw["prompt_blocks"]),
    prompts: Math.max(1, list(raw["prompts"]).length),
    blockSize: num(raw["block_size"]),
    at: num(raw["time_unix_ms"]),
    live: true,
    outcome: text(raw["outcome"]),
    chosen: typeof chosen["target"] === "string" ? chosen["target"] : null,
    tie: typeof chosen["tie"] === "string" ? chosen["tie"] : null,
    firstByte: null,
    staleClaim: own !== undefined && total(own.claimed) > 0 && own.trust.state !== "exact",
    missing: Math.max(0, num(raw["candidate_count"]) - candidates.length),
    candidates,
    shadows: list(raw["shadows"]).map((one) => ({
      policy: text(one["policy"]),
      target: text(one["target"]),
      regret: num(one["regret_blocks"]),
    })),
    result: raw["result"] ? object(raw["result"]) : null,
  };
}

function ofCandidate(raw: Raw): Candidate {
  const load = object(raw["load"]);
  const trust = object(raw["trust"]);
  const terms = object(raw["terms"]);
  const optional = (value: unknown) => (typeof value === "string" ? value : null);
  return {
    target: text(raw["target"]),
    claimed: tiers(raw["claimed"]),
    hits: tiers(raw["hits"]),
    predicted: num(raw["predicted"]),
    evidence: optional(raw["evidence"]),
    elsewhere: typeof raw["rejected_other_namespace"] === "number" ? raw["rejected_other_namespace"] : null,
    load: {
      active_blocks: num(load["active_blocks"]),
      queued: num(load["queued"]),
      context: num(load["context"]),
      requests: num(load["requests"]),
    },
    sharedActive: num(raw["shared_active"]),
    trust: {
      state: text(trust["state"]),
      reason: text(trust["reason"]),
      credited: trust["credited"] === true,
      epoch: text(trust["epoch"]),
      seq: text(trust["seq"]),
      age: typeof trust["age"] === "number" ? trust["age"] : null,
    },
    cost: num(terms["cost"]),
    uncached: num(terms["uncached"]),
    loadCost: num(terms["load"]),
    images: num(terms["images"]),
    rejection: optional(terms["rejection"]),
    dominatedBy: optional(raw["dominated_by"]),
  };
}

/** Tokens in hand once this request is on it: what waits, what decodes, and this prompt. */
export const workAfter = (decision: Decision, one: Candidate): number =>
  one.load.queued + one.load.context + decision.prompt;

/** A claim that does not count, or not for sure: the view is not exact. */
export const isStale = (one: Candidate): boolean => total(one.claimed) > 0 && one.trust.state !== "exact";

/** Why a candidate lost, or that it won. */
export function fate(decision: Decision, one: Candidate): string {
  const winner = decision.candidates.find((other) => other.target === decision.chosen);
  if (one === winner) return "chosen";
  if (one.rejection !== null) return REJECTIONS[one.rejection] ?? `rejected: ${one.rejection}`;
  if (!winner) return "not chosen";
  const more = one.cost - winner.cost;
  const cost = more > 0 ? `costs ${trim(more)} ${decision.unit} more` : more === 0 ? "costs as much, lost the tie" : "cheaper, and still not chosen";
  return one.dominatedBy === null ? cost : `${cost}; dominated by ${worker(one.dominatedBy)}`;
}

export const trim = (value: number): string => String(Math.round(value * 100) / 100);

/** The decision in two or three sentences. */
export function story(decision: Decision): string[] {
  const winner = decision.candidates.find((one) => one.target === decision.chosen);
  const said: string[] = [];
  const best = Math.max(0, ...decision.candidates.map((one) => total(one.hits)));
  if (!winner) {
    said.push(
      decision.candidates.length === 0
        ? "Nobody was there to choose from."
        : "Every worker was over its cap, so the request was sent away.",
    );
  } else {
    const hits = total(winner.hits);
    const left = Math.max(0, decision.prompt - hits * decision.blockSize);
    const name = worker(winner.target);
    said.push(
      hits > 0
        ? `${name} skips ${hits} of ${decision.blocks} blocks; ${left} of ${decision.prompt} tokens are computed.`
        : `${name} computes all ${decision.prompt} tokens.`,
    );
    if (best > hits) {
      const holder = decision.candidates.find((one) => total(one.hits) === best);
      if (holder) said.push(`${worker(holder.target)} would skip ${best} blocks, but ${fate(decision, holder)}.`);
    }
  }
  for (const one of decision.candidates) {
    if ((one.elsewhere ?? 0) > 0) {
      said.push(
        `${worker(one.target)} holds ${one.elsewhere} of these blocks for another tenant: rejected before scoring, so they earn nothing.`,
      );
    }
    if (isStale(one) && said.length < 6) {
      const counts = one.trust.credited ? "they still count" : "they do not count";
      said.push(`${worker(one.target)} claims ${total(one.claimed)} blocks by a view that is ${one.trust.state}; ${counts}.`);
    }
  }
  return said.slice(0, 6);
}
