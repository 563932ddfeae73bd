// The oracle against `kv-router replay`: byte for byte on the lab trace and on generated ones, and equal in what
// both refuse.

import assert from "node:assert/strict";
import { test } from "node:test";

import { canonical, lineOf, parse } from "../src/oracle/json.ts";
import { DEFAULTS, POLICIES, price, type Facts, type Settings } from "../src/oracle/policy.ts";
import { MODEL, replay } from "../src/oracle/replay.ts";
import { readTrace, TraceError } from "../src/oracle/trace.ts";
import { dice, generate, shuffle } from "./generate.ts";
import { cli, LAB } from "./router.ts";

const all = (change: Partial<Settings> = {}): Settings[] =>
  POLICIES.map((policy) => ({ ...DEFAULTS, ...change, policy }));

const ledger = (text: string, change: Partial<Settings> = {}, budget = MODEL.budget_ticks) =>
  replay(readTrace(text), { ...MODEL, budget_ticks: budget }, all(change));

test("the lab trace has the ledger that kv-router writes, byte for byte", () => {
  assert.equal(ledger(LAB).text, cli(LAB));
});

test("so have 50 generated traces, under moved settings too, in any order of their objects", () => {
  const outcomes = new Set<string>();
  for (let seed = 1; seed <= 50; seed += 1) {
    const value = generate(seed);
    const text = JSON.stringify(value);
    const mixed = JSON.stringify(shuffle(value, seed), null, 1);
    assert.equal(ledger(mixed).digest, ledger(text).digest, `seed ${seed}, shuffled`);
    const roll = dice(seed);
    const pick = (...of: number[]) => of[roll(of.length)] as number;
    const change: Partial<Settings> =
      seed % 2 === 0
        ? {}
        : {
            overlap: pick(0, 0.3, 1, 5),
            queue: pick(0, 0.5, 1.7),
            decode: pick(0, 0.02, 0.1),
            request: pick(0, 10.5),
            imbalance: pick(0, 0.1),
            maxQueued: pick(0, 50, 400, 2000),
            coldReserve: pick(0, 0.2, 0.5),
          };
    const budget = pick(10_000, 0, 4000, 60_000);
    const ours = ledger(text, change, budget);
    ours.runs.forEach((run) => run.receipts.forEach((receipt) => outcomes.add(receipt.outcome)));
    const { overlap, queue, decode, request, imbalance, maxQueued, coldReserve } = { ...DEFAULTS, ...change };
    const keys = `overlap=${overlap}:queue=${queue}:decode=${decode}:request=${request}:imbalance=${imbalance}`;
    const names = POLICIES.map((policy) => {
      if (policy === "cache-plus-load") return `${policy}:${keys}`;
      return policy === "kv-aware" ? `${policy}:overlap=${overlap}` : policy;
    });
    const flags = ["--policies", names.join(","), "--budget-ms", `${budget}`, "--cold-reserve", `${coldReserve}`];
    if (maxQueued !== null) flags.push("--max-queued-tokens", `${maxQueued}`);
    assert.equal(ours.text, cli(text, [...flags, "--oracle"]), `seed ${seed}`);
  }
  assert.deepEqual([...outcomes].sort(), ["cold", "hit", "metadata_rejection", "no_affinity", "no_target", "overload_escape"]);
});

const refusals: [string, (text: string) => string][] = [
  ["negative load", (text) => text.replace('"active_decode_tokens": 900', '"active_decode_tokens": -1')],
  ["unknown worker", (text) => text.replace('"seq": 10, "worker": "w1"', '"seq": 10, "worker": "<img src=x onerror=alert(1)>"')],
  ["duplicate id", (text) => text.replace('"r02"', '"r01"')],
  ["non-integer epoch", (text) => text.replace('"epoch": 3', '"epoch": 3.5')],
  ["epoch beyond 64 bits", (text) => text.replace('"epoch": 3', '"epoch": 18446744073709551616')],
  ["missing namespace", (text) => text.replace('"seq": 101, "tenant": "acme",', '"seq": 101,')],
  ["empty namespace", (text) => text.replace('"seq": 101, "tenant": "acme"', '"seq": 101, "tenant": ""')],
  ["no worker", () => '{"schema_version": 1, "block_size": 16, "workers": [], "events": [], "requests": []}'],
  ["too many tokens", (text) => text.replace('"prompt_tokens": 330', '"prompt_tokens": 9000')],
  ["unknown field", (text) => text.replace('"expected_decode_tokens": 100', '"decode": 100')],
  ["field twice", (text) => text.replace('"id": "r05"', '"id": "r05", "id": "r05"')],
  ["too few blocks", (text) => text.replace('"cold-3/1..20"', '"cold-3/1..19"')],
  ["a range without end", (text) => text.replace('"cold-3/1..20"', '"cold-3/1..9999999"')],
  ["ranges beyond the limit", (text) => text.replace('"report-3/7"', '"a/1..8000", "b/1..8000"')],
  ["two events of one place", (text) => text.replace(/\n {2}(\{"tick": 1500.*\}),\n/, "\n  $1,\n  $1,\n")],
  ["a list instead of an object", (text) => text.replace(/\{"id": "r03".*\}/, "[]")],
  ["a number instead of a list", (text) => text.replace(/"entries": \[\]/, '"entries": 7')],
  ["a kind that does not exist", (text) => text.replace('"kind": "removed"', '"kind": "moved"')],
  ["a block size of zero", (text) => text.replace('"block_size": 16', '"block_size": 0')],
  ["a later version", (text) => text.replace('"schema_version": 1', '"schema_version": 2')],
  ["too many workers", (text) => text.replace(/\n {2}(\{"worker": "w1".*\}),\n/, `\n  ${"$1,\n".repeat(9)}`)],
];

test("what kv-router refuses is refused in the same words", () => {
  for (const [why, spoil] of refusals) {
    const text = spoil(LAB);
    assert.notEqual(text, LAB, why);
    let theirs = "";
    try {
      cli(text);
    } catch (error) {
      theirs = String((error as { stderr: Buffer }).stderr);
    }
    let ours = "";
    try {
      readTrace(text);
    } catch (error) {
      assert.ok(error instanceof TraceError, why);
      ours = error.message;
    }
    assert.notEqual(ours, "", `${why}: accepted here`);
    assert.ok(theirs.includes(ours), `${why}:\n${ours}\n${theirs}`);
  }
});

test("text that is no JSON is refused with its line, and nothing hangs", () => {
  const line = (text: string) => {
    try {
      readTrace(text);
    } catch (error) {
      return error instanceof TraceError ? `${error.line}: ${error.problem}` : String(error);
    }
    return "accepted";
  };
  assert.equal(line(LAB.slice(0, LAB.length / 2)), "29: is not JSON: the text ends early");
  assert.equal(line(""), "1: is not JSON: the text ends early");
  assert.equal(line("[".repeat(100_000)), "1: is not JSON: more than 64 levels deep");
  assert.equal(line("[1]"), "1: must be an object");
  assert.equal(line('{"a": 01}'), "1: is not JSON: a comma or a closing brace was expected");
  assert.match(line("x".repeat(50 << 20)), /^1: has 52,428,800 characters, and the limit is 16,777,216$/);
});

test("canonical JSON is that of RFC 8785", () => {
  const text = '{"€":1,"\\r":2,"1":[1e30,4.50,2e-3,1e-27,333333333.33333329],"😀":"\\u000f\\n\\"/","ﬀ":null}';
  const expected = '{"\\r":2,"1":[1e+30,4.5,0.002,1e-27,333333333.3333333],"€":1,"😀":"\\u000f\\n\\"/","ﬀ":null}';
  assert.equal(canonical(JSON.parse(text) as never), expected);
  assert.equal(canonical([18446744073709551615n, -0, 7n]), "[18446744073709552000,0,7]");
  assert.equal(lineOf("a\nb\n", 2), 2);
  assert.equal(parse(" [1] ").kind, "list");
});

/** Design §6: 10 blocks; W0 holds 8 with 6 active, W1 is cold with 1. */
test("the worked example of the published formula", () => {
  const facts = (hits: number, active: number): Facts => ({
    hits,
    credit: hits,
    claimed: hits,
    credited: true,
    load: { active_blocks: active, queued: 0, context: 0, requests: 0 },
    sharedActive: 0,
    images: 0,
  });
  const costs = (overlap: number) =>
    price({ ...DEFAULTS, policy: "kv-aware", overlap }, { prompt: 160, blocks: 10, blockSize: 16 }, [facts(8, 6), facts(0, 1)], -1).map((one) => one.cost);
  assert.deepEqual(costs(1), [8, 11]);
  assert.deepEqual(costs(0), [6, 1]);
});
