// The rules that choose, as the design states them: what a candidate costs, what rejects it, who is cheapest, how
// the route ended. Plain functions of facts; the lab's replay and recorded receipts both ask here.

export const POLICIES = [
  "cache-plus-load",
  "kv-aware",
  "longest-prefix",
  "least-load",
  "round-robin",
  "lmetric",
] as const;

export type Policy = (typeof POLICIES)[number];

/** Weights and caps. Weights are 0 or more. */
export interface Settings {
  policy: Policy;
  overlap: number;
  queue: number;
  decode: number;
  request: number;
  imbalance: number;
  /** Most uncached tokens that may wait on one target; null for no cap. */
  maxQueued: number | null;
  /** Share of the cap that only requests without hits may use. */
  coldReserve: number;
}

export const DEFAULTS: Omit<Settings, "policy"> = {
  overlap: 1,
  queue: 0.5,
  decode: 0.02,
  request: 0,
  imbalance: 0,
  maxQueued: null,
  coldReserve: 0,
};

/** Settings that a policy looks at, in the order in which it is spelt. */
export const WEIGHTS: Record<Policy, ("overlap" | "queue" | "decode" | "request" | "imbalance")[]> = {
  "cache-plus-load": ["overlap", "queue", "decode", "request", "imbalance"],
  "kv-aware": ["overlap"],
  "longest-prefix": [],
  "least-load": [],
  "round-robin": [],
  lmetric: [],
};

/** What each policy's costs are counted in. */
export const UNITS: Record<Policy, string> = {
  "cache-plus-load": "tokens",
  "kv-aware": "blocks",
  "longest-prefix": "blocks",
  "least-load": "blocks",
  "round-robin": "turns",
  lmetric: "tokens × requests",
};

export interface Load {
  active_blocks: number;
  queued: number;
  context: number;
  requests: number;
}

/** What a policy may know of a candidate. */
export interface Facts {
  /** Leading blocks that count. */
  hits: number;
  /** The same, weighed by tier; equal to `hits` where all are on the device. */
  credit: number;
  /** Leading blocks that its view claims. */
  claimed: number;
  credited: boolean;
  load: Load;
  sharedActive: number;
  /** What its unseen pictures cost, in blocks. */
  images: number;
}

/** What a policy may know of a request. */
export interface Ask {
  prompt: number;
  blocks: number;
  blockSize: number;
}

export type Rejection = "overloaded" | "cold_reserve";

export interface Terms {
  cost: number;
  uncached: number;
  load: number;
  images: number;
  rejection: Rejection | null;
}

/** `name:key=value:…`, with all weights that count for the policy. */
export function spelling(settings: Settings): string {
  return [settings.policy, ...WEIGHTS[settings.policy].map((key) => `${key}=${plain(settings[key])}`)].join(":");
}

/** A number without an exponent. */
function plain(value: number): string {
  const text = String(value);
  return text.includes("e") ? value.toFixed(20).replace(/0+$/, "") : text;
}

/**
 * Prices every candidate. `previous` is the place of the target chosen last, for round-robin; −1 before the first.
 * Sums run from left to right as the formulas are written, so that equal inputs give equal bits.
 */
export function price(settings: Settings, ask: Ask, all: Facts[], previous: number): Terms[] {
  const inHand = (one: Facts) => one.load.queued + one.load.context;
  const mean = all.reduce((sum, one) => sum + inHand(one), 0) / Math.max(1, all.length);
  return all.map((one, place) => {
    const [uncached, load, images] = parts(settings, ask, one, inHand(one) - mean);
    const turns = (place - previous - 1 + all.length) % all.length;
    const cost = settings.policy === "round-robin" ? turns : uncached + load + images;
    return { cost, uncached, load, images, rejection: rejection(settings, ask, one) };
  });
}

/** The parts of a cost: what is not cached, load, unseen pictures. */
function parts(settings: Settings, ask: Ask, one: Facts, excess: number): [number, number, number] {
  const { load } = one;
  const missing = ask.blocks - one.credit;
  const uncached = Math.max(0, ask.prompt - one.credit * ask.blockSize);
  switch (settings.policy) {
    case "cache-plus-load": {
      const { queue, decode, request, imbalance } = settings;
      const waiting = queue * load.queued + decode * load.context;
      const weighted = waiting + request * load.requests + imbalance * Math.max(0, excess);
      return [settings.overlap * uncached, weighted, one.images * ask.blockSize];
    }
    case "kv-aware":
      return [settings.overlap * missing, Math.max(0, load.active_blocks - one.sharedActive), one.images];
    case "longest-prefix":
      return [missing, 0, one.images];
    case "least-load":
      return [0, load.active_blocks, 0];
    case "round-robin":
      return [0, 0, 0];
    case "lmetric": {
      const batch = load.requests + 1;
      return [uncached * batch, load.queued * batch, one.images * ask.blockSize * batch];
    }
  }
}

/** A target where nothing waits takes any request. */
function rejection(settings: Settings, ask: Ask, one: Facts): Rejection | null {
  const cap = settings.maxQueued;
  if (cap === null || one.load.queued === 0) return null;
  const after = one.load.queued + Math.max(0, ask.prompt - one.hits * ask.blockSize);
  if (after > cap) return "overloaded";
  const open = Math.floor(cap * (1 - settings.coldReserve));
  return one.hits > 0 && after > open ? "cold_reserve" : null;
}

/** Places of the cheapest candidates that are not rejected, in order; several when they tie. */
export function cheapest(terms: Terms[]): number[] {
  const open = [...terms.keys()].filter((at) => terms[at]?.rejection === null);
  const least = Math.min(...open.map((at) => terms[at]?.cost ?? Infinity));
  return open.filter((at) => terms[at]?.cost === least);
}

export type Outcome =
  | "hit"
  | "cold"
  | "approximate"
  | "overload_escape"
  | "metadata_rejection"
  | "no_affinity"
  | "no_target";

/** How a route ended that chose the candidate at `chosen`; −1 for none. */
export function outcome(ask: Ask, all: Facts[], terms: Terms[], chosen: number): Outcome {
  const own = all[chosen];
  const price = terms[chosen];
  if (!own || !price) return "no_target";
  if (terms.some((other) => other.rejection !== null && other.cost < price.cost)) return "overload_escape";
  if (ask.blocks === 0) return "no_affinity";
  if (own.hits > 0) return "hit";
  return all.some((one) => one.claimed > 0 && !one.credited) ? "metadata_rejection" : "cold";
}

/**
 * For each candidate the place of the first other one that keeps at least as much reuse while it takes no more
 * work, one of them strictly; −1 if there is none. Rules that reject do not count: dominance speaks of facts.
 */
export function dominators(all: Facts[]): number[] {
  const work = (one: Facts) => one.load.queued + one.load.context;
  return all.map((one) =>
    all.findIndex((other) => {
      const reuse = other.hits - one.hits;
      const less = work(one) - work(other);
      return reuse >= 0 && less >= 0 && reuse + less > 0;
    }),
  );
}
