// Two ledgers, line by line: one line a decision, with the fields in which they differ.

import type { Value } from "./json.ts";
import { digest } from "./digest.ts";
import { canonical } from "./json.ts";

export interface Line {
  policy: string;
  /** The request, or `summary`, or `ledger` for what is common to all. */
  what: string;
  ours: string | null;
  theirs: string | null;
  /** Paths whose values differ. */
  fields: string[];
}

/** The ledger in a file, or why it is none. */
export function readLedger(text: string): { ledger: Record<string, Value> } | { problem: string } {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return { problem: "is not JSON" };
  }
  const found = value as Record<string, Value>;
  if (!isObject(found) || !Array.isArray(found["policies"]) || typeof found["digest"] !== "string") {
    return { problem: "is no ledger: `kv-router replay --trace FILE --json FILE` writes one" };
  }
  const rest = Object.fromEntries(Object.entries(found).filter(([key]) => key !== "digest"));
  if (digest(canonical(rest)) !== found["digest"]) return { problem: "has another digest than it says" };
  return { ledger: found };
}

function isObject(value: unknown): value is Record<string, Value> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Lines in which `theirs` differs from `ours`. Policies that `theirs` does not have are left out. */
export function compare(ours: Value, theirs: Value): Line[] {
  if (!isObject(ours) || !isObject(theirs)) return [];
  const head = (ledger: Record<string, Value>) =>
    Object.fromEntries(Object.entries(ledger).filter(([key]) => key !== "policies" && key !== "digest"));
  const lines = difference("all", "ledger", head(ours), head(theirs));
  const runs = (ledger: Record<string, Value>) => (Array.isArray(ledger["policies"]) ? ledger["policies"] : []);
  const own = new Map(runs(ours).map((run) => [nameOf(run, "policy"), run]));
  for (const run of runs(theirs)) {
    const policy = nameOf(run, "policy");
    const mine = own.get(policy);
    if (!isObject(run)) continue;
    if (!isObject(mine)) {
      lines.push({ policy, what: "policy", ours: null, theirs: policy, fields: [] });
      continue;
    }
    const short = policy.split(":")[0] ?? policy;
    if (!Array.isArray(run["receipts"]) && !Array.isArray(mine["receipts"])) {
      lines.push(...difference(short, "figures", mine, run));
      continue;
    }
    const [left, right] = [receiptsOf(mine), receiptsOf(run)];
    for (const id of new Set([...left.keys(), ...right.keys()])) {
      lines.push(...difference(short, id, left.get(id) ?? null, right.get(id) ?? null));
    }
    lines.push(...difference(short, "summary", mine["summary"] ?? null, run["summary"] ?? null));
  }
  return lines;
}

/** Policies that a ledger has, by their spelling. */
export function policiesOf(ledger: Value): string[] {
  const runs = isObject(ledger) && Array.isArray(ledger["policies"]) ? ledger["policies"] : [];
  return runs.map((run) => nameOf(run, "policy"));
}

function receiptsOf(run: Record<string, Value>): Map<string, Value> {
  const all = Array.isArray(run["receipts"]) ? run["receipts"] : [];
  return new Map(all.map((receipt) => [nameOf(receipt, "request_id"), receipt]));
}

function nameOf(value: Value | undefined, key: string): string {
  const name = value !== undefined && isObject(value) ? value[key] : undefined;
  return typeof name === "string" ? name : "?";
}

function difference(policy: string, what: string, ours: Value, theirs: Value): Line[] {
  const [left, right] = [canonical(ours), canonical(theirs)];
  if (left === right) return [];
  return [{ policy, what, ours: left, theirs: right, fields: paths(ours, theirs, "") }];
}

/** Most paths that are named for one line. */
const MAX_PATHS = 12;

function paths(a: Value | undefined, b: Value | undefined, path: string): string[] {
  if (canonical(a ?? null) === canonical(b ?? null)) return [];
  if (Array.isArray(a) && Array.isArray(b) && a.length === b.length) {
    return a.flatMap((one, at) => paths(one, b[at], `${path}[${at}]`)).slice(0, MAX_PATHS);
  }
  if (a !== undefined && b !== undefined && isObject(a) && isObject(b)) {
    const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].sort();
    return keys.flatMap((key) => paths(a[key], b[key], path === "" ? key : `${path}.${key}`)).slice(0, MAX_PATHS);
  }
  const show = (value: Value | undefined) => {
    const text = canonical(value ?? null);
    return text.length > 40 ? `${text.slice(0, 39)}…` : text;
  };
  return [`${path === "" ? "line" : path}: ${show(a)} here, ${show(b)} there`];
}
