// What a link keeps: policy, request, settings, part of the time. All of it lives in the address behind `#`, so that
// it survives a reload and can be sent to somebody.

import { DEFAULTS, POLICIES, type Policy, type Settings } from "../oracle/policy.ts";
import { MODEL } from "../oracle/replay.ts";

export type Weights = Omit<Settings, "policy">;

export interface View {
  policy: Policy;
  /** The opened request. */
  request: string | null;
  weights: Weights;
  budget: number;
  /** The scene that the timeline shows; `all` for everything. */
  scene: string;
}

export interface Slider {
  key: "overlap" | "queue" | "decode" | "request" | "imbalance" | "budget" | "maxQueued" | "coldReserve";
  label: string;
  unit: string;
  help: string;
  max: number;
  step: number;
  /** The largest value means no limit. */
  openEnded?: boolean;
}

export const SLIDERS: Slider[] = [
  { key: "overlap", label: "Uncached work", unit: "per token or block", help: "Weight of what is not cached", max: 10, step: 0.1 },
  { key: "queue", label: "Queue", unit: "per queued token", help: "Weight of uncached tokens that wait", max: 4, step: 0.05 },
  { key: "decode", label: "Decode", unit: "per context token", help: "Weight of tokens in contexts in flight", max: 0.5, step: 0.005 },
  { key: "request", label: "Requests", unit: "tokens per request", help: "Weight of each request in flight", max: 200, step: 1 },
  { key: "imbalance", label: "Imbalance", unit: "per token above the mean", help: "Weight of load above the fleet's mean", max: 2, step: 0.05 },
  { key: "budget", label: "Freshness budget", unit: "ms", help: "Time without news after which hits stop counting; a view is exact for 3,000 ms whatever stands here", max: 30_000, step: 500 },
  { key: "maxQueued", label: "Cap", unit: "queued tokens", help: "Most uncached tokens that may wait on one worker", max: 2000, step: 10, openEnded: true },
  { key: "coldReserve", label: "Cold reserve", unit: "of the cap", help: "Share of the cap that only requests without hits may use", max: 1, step: 0.05 },
];

export const START: View = { policy: "cache-plus-load", request: null, weights: DEFAULTS, budget: MODEL.budget_ticks, scene: "all" };

/** Reads an address; what makes no sense counts as absent. */
export function fromHash(hash: string): View {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const value = (key: Slider["key"], otherwise: number | null): number | null => {
    const slider = SLIDERS.find((one) => one.key === key);
    const number = Number(given.get(key) ?? NaN);
    return slider && number >= 0 && number <= slider.max ? number : otherwise;
  };
  const policy = POLICIES.find((one) => one === given.get("policy")) ?? START.policy;
  const weights: Weights = {
    overlap: value("overlap", DEFAULTS.overlap) ?? 0,
    queue: value("queue", DEFAULTS.queue) ?? 0,
    decode: value("decode", DEFAULTS.decode) ?? 0,
    request: value("request", DEFAULTS.request) ?? 0,
    imbalance: value("imbalance", DEFAULTS.imbalance) ?? 0,
    maxQueued: value("maxQueued", null),
    coldReserve: value("coldReserve", DEFAULTS.coldReserve) ?? 0,
  };
  if (weights.maxQueued !== null && !Number.isInteger(weights.maxQueued)) weights.maxQueued = null;
  const budget = Math.round(value("budget", START.budget) ?? START.budget);
  return { policy, request: given.get("r"), weights, budget, scene: given.get("scene") ?? "all" };
}

/** What differs from the start, and nothing else. */
export function toHash(view: View): string {
  const out = new URLSearchParams();
  if (view.policy !== START.policy) out.set("policy", view.policy);
  if (view.request !== null) out.set("r", view.request);
  if (view.scene !== "all") out.set("scene", view.scene);
  for (const { key } of SLIDERS) {
    const now = key === "budget" ? view.budget : view.weights[key];
    const start = key === "budget" ? START.budget : DEFAULTS[key];
    if (now !== start && now !== null) out.set(key, String(now));
  }
  const text = out.toString();
  return text === "" ? "" : `#${text}`;
}

/** The flags with which `kv-router replay` makes the same ledger. */
export function flags(view: View): string[] {
  const { overlap, queue, decode, request, imbalance, maxQueued, coldReserve } = view.weights;
  const weights = { overlap, queue, decode, request, imbalance };
  const moved = Object.entries(weights).filter(([key, value]) => value !== DEFAULTS[key as keyof typeof weights]);
  const tail = moved.map(([key, value]) => `:${key}=${value}`).join("");
  const own = moved.filter(([key]) => key === "overlap").map(([key, value]) => `:${key}=${value}`).join("");
  const names = `cache-plus-load${tail},kv-aware${own},longest-prefix,least-load,round-robin,lmetric`;
  return [
    ...(tail === "" ? [] : [`--policies ${names}`]),
    ...(view.budget === MODEL.budget_ticks ? [] : [`--budget-ms ${view.budget}`]),
    ...(maxQueued === null ? [] : [`--max-queued-tokens ${maxQueued}`]),
    ...(coldReserve === 0 ? [] : [`--cold-reserve ${coldReserve}`]),
  ];
}
