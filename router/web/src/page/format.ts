// Numbers with their units, and labels in plain words.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

export const count = (value: number): string => whole.format(value);
export const number = (value: number): string => short.format(value);
export const share = (value: number): string => `${new Intl.NumberFormat("en", { maximumFractionDigits: 1 }).format(value * 100)} %`;

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Milliseconds, in the largest unit that reads well. */
export function time(ms: number): string {
  if (ms < 1000) return `${number(ms)} ms`;
  if (ms < 60_000) return `${number(ms / 1000)} s`;
  return `${number(ms / 60_000)} min`;
}

/** `w1#0` without the rank of a worker that has but one. */
export const worker = (target: string): string => target.replace(/#0$/, "");

/** The first digits of a digest. */
export const digestOf = (digest: string): string => digest.slice(0, 8);

export const OUTCOMES: Record<string, string> = {
  hit: "hit",
  cold: "cold",
  approximate: "approximate",
  overload_escape: "escaped overload",
  metadata_rejection: "no credit",
  no_affinity: "no blocks",
  no_target: "sent away",
};

export const OUTCOME_HELP: Record<string, string> = {
  hit: "The chosen worker holds a part of the prompt.",
  cold: "No part of the prompt counts on the chosen worker.",
  approximate: "Routing history says that it may hold a part.",
  overload_escape: "A cheaper worker was over its cap.",
  metadata_rejection: "Views claim a part of the prompt, but none may be credited.",
  no_affinity: "The prompt has no full block, so only load counted.",
  no_target: "Every worker was over its cap, or there was none.",
};

export const TIES: Record<string, string> = {
  none: "no tie: one candidate was cheapest",
  target: "tie: equal costs fall to the lower name",
  active_blocks: "tie: fewer active blocks",
  rendezvous_block: "tie: rendezvous hash of the first block that none of them holds",
  rendezvous_request: "tie: rendezvous hash of the request's id",
  session: "its session is bound to the worker",
};

export const REASONS: Record<string, string> = {
  ok: "proven",
  nothing_heard: "nothing heard",
  snapshot_pending: "being fetched",
  stores_missing: "stores missing",
  gap: "messages lost",
  engine_unreachable: "engine unreachable",
  silence: "silent",
  domain_mismatch: "other model or seed",
  page_size_mismatch: "page size",
  reported_page_size_mismatch: "page size",
  no_sequence: "not numbered",
  render_diverged: "other tokens",
  prefix_caching_off: "prefix caching off",
  nothing_stored: "nothing stored",
  stalled: "stores missing",
  adapters_untold: "adapters not told",
  rank_mismatch: "another rank's",
};

export const REJECTIONS: Record<string, string> = {
  overloaded: "rejected: over the cap of queued tokens",
  cold_reserve: "rejected: the rest of its queue is kept for requests without hits",
};
