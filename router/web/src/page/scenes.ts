// Parts of a trace that one looks at together. The hand-made trace has four with a point each; any other is cut
// where nothing arrives for long.

import type { Trace } from "../oracle/trace.ts";

export interface Scene {
  key: string;
  name: string;
  /** What to see in it. */
  text: string;
  from: number;
  to: number;
}

const HAND_MADE = [
  {
    key: "warm",
    name: "Warm burst",
    first: "r01",
    last: "r08",
    text: "Eight prompts share a prefix of 8 blocks that w1 holds whole and w2 by half. What the cache saves outweighs the queue, so they stay together; a policy that is blind to caches spreads and computes the prefix again.",
  },
  {
    key: "cold",
    name: "Cold, balanced",
    first: "r09",
    last: "r16",
    text: "Eight prompts that share nothing. Only load decides: w3 still decodes old work, so it is taken last. Whoever looks at prefixes alone sends all eight to one worker.",
  },
  {
    key: "stale",
    name: "Stale eviction",
    first: "r17",
    last: "r20",
    text: "An eviction of w1's former life (epoch 4) arrives late and is dropped: w1 lives in epoch 5 and still holds the prefix. w3's eviction is of its present life and counts.",
  },
  {
    key: "tenant",
    name: "Cross-tenant match",
    first: "r21",
    last: "r24",
    text: "r21 and r23 ask for twelve blocks that w2 holds, but for another tenant: rejected before scoring. r22 is of that tenant and hits. By r24 the views are silent, and claims of a stale view are dotted.",
  },
] as const;

/** Nothing arrives for so long, in milliseconds: a new part begins. */
const PAUSE = 1500;
/** More parts than buttons. */
const MAX_PARTS = 6;

export function scenesOf(trace: Trace): Scene[] {
  const all: Scene = { key: "all", name: "All", text: "", from: 0, to: endOf(trace) };
  const at = (id: string) => trace.requests.find((one) => one.id === id)?.tick;
  const known = HAND_MADE.flatMap(({ first, last, ...rest }) => {
    const [from, to] = [at(first), at(last)];
    return from === undefined || to === undefined ? [] : [framed({ ...rest, from, to })];
  });
  if (known.length === HAND_MADE.length && trace.requests.length === 24) return [all, ...known];
  const parts: { from: number; to: number }[] = [];
  for (const { tick } of trace.requests) {
    const last = parts.at(-1);
    if (last && tick - last.to < PAUSE) last.to = tick;
    else parts.push({ from: tick, to: tick });
  }
  if (parts.length < 2 || parts.length > MAX_PARTS) return [all];
  const named = (part: { from: number; to: number }, place: number) =>
    framed({ key: `part-${place + 1}`, name: `Part ${place + 1}`, text: "", ...part });
  return [all, ...parts.map(named)];
}

/** With room on both sides, more behind than before: work ends after it arrives. */
function framed(scene: Scene): Scene {
  const length = Math.max(60, scene.to - scene.from);
  return { ...scene, from: Math.max(0, scene.from - length * 0.06), to: scene.to + length * 0.35 };
}

function endOf(trace: Trace): number {
  const last = Math.max(0, ...trace.requests.map((one) => one.tick), ...trace.events.map((one) => one.tick));
  return last + Math.max(200, last * 0.04);
}
