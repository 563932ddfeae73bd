// A router's receipts in the lab: the chain followed, every decision made again, every policy asked on the same facts.

import { useMemo, useState } from "preact/hooks";
import { compare } from "../oracle/compare.ts";
import type { Value } from "../oracle/json.ts";
import { DEFAULTS } from "../oracle/policy.ts";
import { evaluate, repeat, type Evaluation, type Recorded } from "../oracle/recorded.ts";
import { Controls } from "./controls.tsx";
import { ofReceipt } from "./decision_model.ts";
import { DecisionPanel, OutcomeBadge } from "./decision.tsx";
import { count, digestOf, plural, share, worker } from "./format.ts";
import { Differences, ProofStrip, type Proof } from "./proof.tsx";
import { flags, SLIDERS, type View } from "./state.ts";

/** Rows that are shown: what one looks through. */
const MAX_ROWS = 200;

interface Props {
  name: string;
  trace: Recorded;
  view: View;
  theme: string;
  file: { from: string; value: Record<string, Value> } | null;
  change: (next: Partial<View>) => void;
  save: (name: string, text: string) => void;
}

export function RecordedView({ name, trace, view, theme, file, change, save }: Props) {
  const [words, setWords] = useState("");
  const weights = SLIDERS.filter((one) => one.key !== "budget").every(({ key }) => view.weights[key as "queue"] === DEFAULTS[key as "queue"]) ? null : view.weights;
  const found = useMemo(() => evaluate(trace, weights), [trace, JSON.stringify(weights)]);
  const broken = useMemo(() => trace.receipts.flatMap(({ sequence, raw }) => repeat(raw).map((what) => ({ sequence, id: String(raw["request_id"]), what }))), [trace]);
  const proof = prove(name, found.digest, found.value, trace.receipts.length, file, view);
  const opened = trace.receipts.findLast(({ raw }) => raw["request_id"] === view.request);
  const rows = trace.receipts.filter(({ raw }) => String(raw["request_id"]).includes(words)).slice(-MAX_ROWS).reverse();
  return (
    <>
      <ProofStrip proof={proof} onShow={() => document.getElementById("differences-title")?.focus()} />
      <div class="layout">
        <Controls view={view} change={change} only={["overlap", "queue", "decode", "request", "imbalance"]} />
        <div class="sections">
          <section class="panel" aria-labelledby="chain-title">
            <header class="row">
              <h2 id="chain-title">Receipts of a router</h2>
              <button type="button" class="push" onClick={() => save(`ledger-${digestOf(found.digest)}.json`, found.text)}>Export JSON</button>
            </header>
            <p class="story" data-repeated={broken.length}>
              {`The chain holds: ${plural(trace.receipts.length, "receipt")}, each with the digest of the line before${trace.lost > 0 ? `; ${plural(trace.lost, "receipt")} missing, as its gaps say` : ""}. `}
              {broken.length === 0
                ? "Every decision, made again here from the facts in its receipt, comes to the recorded terms, choice, tie and outcome."
                : `${plural(broken.length, "field")} differ from the recorded ones.`}
            </p>
            {broken.length > 0 && <ul class="plain">{broken.slice(0, 20).map((one) => <li class="mono" key={`${one.sequence} ${one.what}`}>{`${one.id} ${one.what}`}</li>)}</ul>}
          </section>
          <section class="panel" aria-labelledby="asked-title">
            <h2 id="asked-title">What each policy would have chosen</h2>
            <p class="note">Asked on the recorded candidates of each receipt. Nothing is simulated: it shows what they would have chosen then, not what would have followed.</p>
            <div class="scroll" role="region" aria-label="Policies" tabIndex={0}>
              <table>
                <thead>
                  <tr><th scope="col">Policy</th>{COLUMNS.map((one) => <th scope="col" class="num" key={one.key}>{one.name}<small>{one.unit}</small></th>)}</tr>
                </thead>
                <tbody>
                  {found.rows.map((row) => (
                    <tr key={row.name}>
                      <th scope="row" class="mono" title={row.policy}>{row.name}</th>
                      {COLUMNS.map((one) => <td class="num" key={one.key}>{one.key === "agreement" ? share(row.agreement) : count(row[one.key])}</td>)}
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </section>
          {opened && <DecisionPanel decision={ofReceipt(opened.raw)} theme={theme} onClose={() => change({ request: null })} />}
          <section class="panel" aria-labelledby="requests-title">
            <header class="row">
              <h2 id="requests-title">Receipts</h2>
              <span class="tag">{`the latest ${count(rows.length)} of ${count(trace.receipts.length)}`}</span>
              <input type="search" class="push" aria-label="Find a request" placeholder="Request id" value={words} onInput={(event) => setWords(event.currentTarget.value)} />
            </header>
            <div class="scroll" role="region" aria-label="Receipts" tabIndex={0}>
              <table class="requests">
                <thead>
                  <tr>
                    <th scope="col">Request</th>
                    <th scope="col">Went to</th>
                    <th scope="col">Outcome</th>
                    {found.rows.map((one) => <th scope="col" class="other" key={one.name}>{one.name}</th>)}
                  </tr>
                </thead>
                <tbody>
                  {rows.map(({ sequence, raw }) => {
                    const id = String(raw["request_id"]);
                    const chosen = (raw["chosen"] as { target?: string } | null)?.target ?? null;
                    return (
                      <tr key={sequence} class={id === view.request ? "selected" : ""} onClick={() => change({ request: id })}>
                        <th scope="row"><button type="button" class="open mono" onClick={() => change({ request: id })}>{id}</button></th>
                        <td class="mono name strong">{chosen === null ? "–" : worker(chosen)}</td>
                        <td><OutcomeBadge outcome={String(raw["outcome"])} /></td>
                        {(found.picks.get(sequence) ?? found.rows.map(() => null)).map((pick, at) => (
                          <td key={found.rows[at]?.name} class={`mono name other${pick === chosen ? "" : " differs"}`}>{pick === null ? "–" : worker(pick)}</td>
                        ))}
                      </tr>
                    );
                  })}
                </tbody>
              </table>
            </div>
          </section>
          <Differences proof={proof} />
        </div>
      </div>
    </>
  );
}

const COLUMNS: { key: Exclude<keyof Evaluation, "policy">; name: string; unit: string }[] = [
  { key: "decisions", name: "Decisions", unit: "asked" },
  { key: "agreement", name: "Agrees", unit: "with the recorded choice" },
  { key: "hit_blocks", name: "Hits", unit: "blocks" },
  { key: "regret_blocks", name: "More reuse", unit: "blocks" },
  { key: "forgone_blocks", name: "Less reuse", unit: "blocks" },
  { key: "uncached_tokens", name: "To compute", unit: "tokens" },
  { key: "queued_tokens", name: "Waiting before it", unit: "tokens" },
  { key: "no_target", name: "Sent away", unit: "requests" },
];

function prove(name: string, digest: string, value: Value, decisions: number, file: Props["file"], view: View): Proof {
  if (file === null) {
    const policies = flags(view).filter((one) => one.startsWith("--policies"));
    return { kind: "none", digest, command: ["kv-router replay", `--trace ${name}`, ...policies, "--json OUT"].join(" ") };
  }
  const theirs = String(file.value["digest"]);
  const lines = theirs === digest ? [] : compare(value, file.value);
  return theirs === digest
    ? { kind: "equal", digest, theirs, from: file.from, decisions, partial: false }
    : { kind: "differs", digest, theirs, from: file.from, lines };
}
