// The lab: one frozen trace, replayed under every policy, compared with kv-router's own ledger.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { compare, policiesOf, readLedger } from "../oracle/compare.ts";
import { toCsv } from "../oracle/csv.ts";
import type { Value } from "../oracle/json.ts";
import { POLICIES, spelling, type Policy, type Settings } from "../oracle/policy.ts";
import { MODEL, replay, type LabRun, type LabSummary, type Ledger } from "../oracle/replay.ts";
import { isRecorded, MAX_RECORDED, readRecorded, type Recorded } from "../oracle/recorded.ts";
import { LIMITS, readTrace, TraceError, type Trace } from "../oracle/trace.ts";
import { Controls } from "./controls.tsx";
import { ofLab } from "./decision_model.ts";
import { DecisionPanel, OutcomeBadge } from "./decision.tsx";
import { count, digestOf, number, plural, share, time, worker } from "./format.ts";
import { Differences, ProofStrip, type Proof } from "./proof.tsx";
import { RecordedView } from "./recorded.tsx";
import { scenesOf, type Scene } from "./scenes.ts";
import { flags, fromHash, toHash, type View } from "./state.ts";
import { Timeline } from "./timeline.tsx";

/** What the page starts with. */
export interface Start {
  name: string;
  trace: string;
  /** kv-router's ledger of it with the settings that the page starts with. */
  ledger: string;
  /** Whether kv-router is there to be asked for others. */
  served: boolean;
}

interface Opened {
  name: string;
  text: string;
  trace: Trace;
}

interface Theirs {
  from: string;
  value: Record<string, Value>;
}

/** A slider that moves asks once it rests. */
const REST_MS = 150;
const LINK_MS = 100;

export function Lab({ start, theme }: { start: Start; theme: string }) {
  const [opened, setOpened] = useState<Opened>(() => ({ name: start.name, text: start.trace, trace: readTrace(start.trace) }));
  const [view, setView] = useState<View>(() => fromHash(location.hash));
  const [problem, setProblem] = useState<string | null>(null);
  const [file, setFile] = useState<Theirs | null>(null);
  const [receipts, setReceipts] = useState<{ name: string; trace: Recorded } | null>(null);

  const change = (next: Partial<View>) => setView((before) => ({ ...before, ...next }));
  useEffect(() => {
    const read = () => setView(fromHash(location.hash));
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  useEffect(() => {
    // Browsers count changes of the address, and a slider makes many.
    const timer = setTimeout(() => history.replaceState(null, "", `${location.pathname}${location.search}${toHash(view)}`), LINK_MS);
    return () => clearTimeout(timer);
  }, [view]);

  const settings = useMemo(() => POLICIES.map((policy): Settings => ({ ...view.weights, policy })), [view.weights]);
  const model = useMemo(() => ({ ...MODEL, budget_ticks: view.budget }), [view.budget]);
  const ledger = useMemo(() => replay(opened.trace, model, settings), [opened, model, settings]);
  const asked = useTheirs(start, opened, view, settings);
  const proof = useMemo(() => prove(ledger, file, asked, opened, view), [ledger, file, asked]);

  const run = ledger.runs.find((one) => one.name === view.policy) ?? (ledger.runs[0] as LabRun);
  const scenes = useMemo(() => scenesOf(opened.trace), [opened]);
  const scene = scenes.find((one) => one.key === view.scene) ?? (scenes[0] as Scene);
  const receipt = run.receipts.find((one) => one.request_id === view.request);

  const openTrace = async (chosen: File) => {
    try {
      const head = await chosen.slice(0, 4 << 20).text();
      const limit = isRecorded(head) ? MAX_RECORDED : LIMITS.bytes;
      if (chosen.size > limit) {
        throw new TraceError(1, "file", `has ${count(chosen.size)} bytes, and the limit is ${count(limit)}`);
      }
      const text = await chosen.text();
      if (isRecorded(head)) {
        setReceipts({ name: chosen.name, trace: readRecorded(text) });
      } else {
        setOpened({ name: chosen.name, text, trace: readTrace(text) });
        setReceipts(null);
      }
      setFile(null);
      setProblem(null);
      change({ request: null, scene: "all" });
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      setProblem(`${chosen.name} was not opened, and the former trace stays. ${why}`);
    }
  };
  const openLedger = async (chosen: File) => {
    const found = chosen.size > LIMITS.bytes * 2 ? { problem: "is too large" } : readLedger(await chosen.text());
    if ("problem" in found) return setProblem(`${chosen.name} ${found.problem}.`);
    setProblem(null);
    setFile({ from: chosen.name, value: found.ledger });
  };
  const close = () => {
    const id = view.request;
    change({ request: null });
    setTimeout(() => document.getElementById(`open-${id}`)?.focus());
  };

  return (
    <>
      <section class="panel intro" aria-label="Trace">
        <div>
          <p class="lead">
            <strong class="mono name">{receipts?.name ?? opened.name}</strong>{" "}
            {receipts ? plural(receipts.trace.receipts.length, "receipt") : `${plural(opened.trace.requests.length, "request")}, ${plural(opened.trace.workers.length, "worker")}, blocks of ${plural(opened.trace.blockSize, "token")}`}
          </p>
          <p class="note">
            {receipts
              ? "Facts as a router recorded them; the other policies' choices are made on this page."
              : "Every number on this page is modelled: made from the trace by a stated service model, not measured on an engine."}
          </p>
        </div>
        <div class="row tools">
          <Picker id="trace" label="Open a trace" onPick={openTrace} />
          <Picker id="ledger" label="Compare a ledger" onPick={openLedger} />
          {!receipts && <button type="button" onClick={() => download(`ledger-${digestOf(ledger.digest)}.json`, ledger.text, "application/json")}>Export JSON</button>}
          {!receipts && <button type="button" onClick={() => download(`ledger-${digestOf(ledger.digest)}.csv`, toCsv(ledger), "text/csv")}>Export CSV</button>}
        </div>
      </section>
      {problem !== null && (
        <p class="problem" role="alert">
          <span>{problem}</span>
          <button type="button" class="quiet push" onClick={() => setProblem(null)}>Dismiss</button>
        </p>
      )}
      {receipts && <RecordedView {...receipts} view={view} theme={theme} file={file} change={change} save={(name, text) => download(name, text, "application/json")} />}
      {!receipts && <ProofStrip proof={proof} onShow={() => document.getElementById("differences-title")?.focus()} />}
      {!receipts && <div class="layout">
        <Controls view={view} change={change} />
        <div class="sections">
          <PolicyTable ledger={ledger} policy={view.policy} choose={(policy) => change({ policy })} />
          <section class="panel" aria-labelledby="timeline-title">
            <header class="row">
              <h2 id="timeline-title">Workers over time</h2>
              <SceneButtons scenes={scenes} scene={scene} choose={(key) => change({ scene: key })} />
            </header>
            {scene.text !== "" && <p class="story">{scene.text}</p>}
            <Timeline trace={opened.trace} model={model} run={run} scene={scene} selected={view.request} theme={theme} />
            <ul class="keys" aria-label="Lines">
              <li><span class="line queue" /> waits for prefill</li>
              <li><span class="line decode" /> decodes</li>
              <li><span class="line cache" /> blocks in the view</li>
              <li><span class="line tick" /> a request arrives</li>
            </ul>
          </section>
          {receipt && <DecisionPanel decision={ofLab(opened.trace, run, receipt)} theme={theme} onClose={close} />}
          {view.request !== null && !receipt && (
            <p class="problem" role="alert"><span>{`This trace has no request “${view.request}”.`}</span></p>
          )}
          <RequestTable trace={opened.trace} ledger={ledger} run={run} scene={scene} selected={view.request} open={(request) => change({ request })} />
          <Differences proof={proof} />
        </div>
      </div>}
    </>
  );
}

/** kv-router's ledger for the settings in force; null while there is none. */
function useTheirs(start: Start, opened: Opened, view: View, settings: Settings[]): Theirs | "asking" | null {
  const [found, setFound] = useState<{ key: string; theirs: Theirs | null } | null>(null);
  const spelt = settings.map(spelling).join(",");
  const key = `${opened.text.length} ${opened.name} ${spelt} ${view.budget} ${view.weights.maxQueued} ${view.weights.coldReserve}`;
  const untouched = opened.text === start.trace && flags(view).length === 0;
  useEffect(() => {
    if (untouched || !start.served) return;
    const abort = new AbortController();
    const body = JSON.stringify({
      trace: opened.text,
      policies: settings.map(spelling),
      budget_ms: view.budget,
      max_queued_tokens: view.weights.maxQueued,
      cold_reserve: view.weights.coldReserve,
    });
    const ask = async () => {
      const answer = await fetch("replay", { method: "POST", body, headers: { "content-type": "application/json" }, signal: abort.signal });
      const ledger = answer.ok ? readLedger(await answer.text()) : { problem: "" };
      setFound({ key, theirs: "ledger" in ledger ? { from: "kv-router", value: ledger.ledger } : null });
    };
    const timer = setTimeout(() => ask().catch(() => undefined), REST_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key, untouched]);
  const given = useMemo(() => readLedger(start.ledger), [start]);
  if (untouched) return "ledger" in given ? { from: "kv-router", value: given.ledger } : null;
  if (!start.served) return null;
  return found?.key === key ? found.theirs : "asking";
}

function prove(ledger: Ledger, file: Theirs | null, asked: Theirs | "asking" | null, opened: Opened, view: View): Proof {
  const theirs = file ?? asked;
  const { digest } = ledger;
  if (theirs === "asking") return { kind: "asking", digest };
  if (theirs === null) {
    const command = ["kv-router replay", `--trace ${quoted(opened.name)}`, ...flags(view), "--json OUT"].join(" ");
    return { kind: "none", digest, command };
  }
  const sum = String(theirs.value["digest"]);
  const lines = sum === digest ? [] : compare(ledger.value, theirs.value);
  if (lines.length > 0) return { kind: "differs", digest, theirs: sum, from: theirs.from, lines };
  const policies = policiesOf(theirs.value);
  const shared = ledger.runs.filter((run) => policies.includes(run.policy));
  const decisions = shared.reduce((sum, run) => sum + run.receipts.length, 0);
  return { kind: "equal", digest, theirs: sum, from: theirs.from, decisions, partial: sum !== digest };
}

/** As a shell takes it. */
const quoted = (name: string): string => (/^[\w./-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`);

function Picker({ id, label, onPick }: { id: string; label: string; onPick: (file: File) => Promise<unknown> }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        id={`pick-${id}`}
        class="visually-hidden"
        type="file"
        tabIndex={-1}
        aria-label={label}
        accept=".json,.jsonl,application/json"
        onChange={(event) => {
          const [chosen] = event.currentTarget.files ?? [];
          if (chosen) void onPick(chosen);
          event.currentTarget.value = "";
        }}
      />
      <button type="button" onClick={() => input.current?.click()}>{label}</button>
    </>
  );
}

export function download(name: string, text: string, type: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

interface Figure {
  key: keyof LabSummary;
  name: string;
  unit: string;
  help: string;
  show: (value: number) => string;
  /** Which end is better; neither where it is a fact of the trace. */
  better: "low" | "high" | null;
}

const FIGURES: Figure[] = [
  { key: "recomputed_tokens", name: "Recomputed", unit: "prompt tokens", help: "Prompt tokens that are computed", show: count, better: "low" },
  { key: "hit_share", name: "Hit share", unit: "of tokens", help: "Share of prompt tokens that are not computed", show: share, better: "high" },
  { key: "hit_count", name: "Hits", unit: "requests", help: "Requests with at least one hit block", show: count, better: "high" },
  { key: "load_max_over_mean", name: "Max ÷ mean", unit: "load", help: "The most tokens to prefill on one worker over the mean", show: number, better: "low" },
  { key: "latency_proxy_ticks", name: "First byte", unit: "ms, mean", help: "Latency proxy: mean time to the modelled first byte", show: number, better: "low" },
  { key: "route_churn", name: "Churn", unit: "moves", help: "Consecutive requests that share a first block and went to different workers", show: count, better: "low" },
  { key: "dominated_choices", name: "Dominated", unit: "choices", help: "Decisions for a candidate that another one dominates", show: count, better: "low" },
  { key: "stale_claims", name: "Stale claims", unit: "choices", help: "Decisions for a worker whose view is not exact and claims reuse", show: count, better: null },
  { key: "stale_events", name: "Stale", unit: "events", help: "Cache events dropped because they are of an older life or place", show: count, better: null },
  { key: "tenant_rejections", name: "Other tenant", unit: "rejections", help: "Candidates that hold a longer prefix for another namespace", show: count, better: null },
  { key: "unrouted", name: "Sent away", unit: "requests", help: "Requests that the cap sent away", show: count, better: "low" },
];

function PolicyTable({ ledger, policy, choose }: { ledger: Ledger; policy: Policy; choose: (policy: Policy) => void }) {
  // Nobody is sent away without a cap.
  const shown = FIGURES.filter(({ key }) => key !== "unrouted" || ledger.runs.some((run) => run.summary.unrouted > 0));
  return (
    <section class="panel" aria-labelledby="policies-title">
      <header class="row">
        <h2 id="policies-title">Policies side by side</h2>
        <span class="tag">modelled</span>
      </header>
      <div class="scroll" role="region" aria-label="Figures by policy" tabIndex={0}>
        <table class="policies">
          <thead>
            <tr>
              <th scope="col">Policy</th>
              {shown.map((figure) => (
                <th scope="col" class="num" key={figure.key} title={figure.help}>{figure.name}<small>{figure.unit}</small></th>
              ))}
            </tr>
          </thead>
          <tbody>
            {ledger.runs.map((run) => (
              <tr key={run.name} class={run.name === policy ? "selected" : ""} data-policy={run.name} onClick={() => choose(run.name)}>
                <th scope="row">
                  <label>
                    <input type="radio" name="policy" value={run.name} checked={run.name === policy} onChange={() => choose(run.name)} />
                    <span class="mono" title={run.policy}>{run.name}</span>
                  </label>
                </th>
                {shown.map((figure) => <Cell key={figure.key} figure={figure} value={run.summary[figure.key]} all={ledger.runs.map((one) => one.summary[figure.key])} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Cell({ figure, value, all }: { figure: Figure; value: number; all: number[] }) {
  const most = Math.max(...all);
  const best = figure.better === "low" ? Math.min(...all) : most;
  const isBest = figure.better !== null && value === best && all.some((other) => other !== best);
  const width = most > 0 && figure.better !== null ? `${(value / most) * 100}%` : "0";
  return (
    <td class={`num${isBest ? " best" : ""}`}>
      {figure.show(value)}
      {isBest && <span class="visually-hidden"> (best)</span>}
      {figure.better !== null && <span class="bar" aria-hidden="true"><span style={{ width }} /></span>}
    </td>
  );
}

function SceneButtons({ scenes, scene, choose }: { scenes: Scene[]; scene: Scene; choose: (key: string) => void }) {
  if (scenes.length < 2) return null;
  return (
    <div class="segments push" role="group" aria-label="Part of the trace">
      {scenes.map((one) => (
        <button type="button" key={one.key} aria-pressed={one.key === scene.key} onClick={() => choose(one.key)}>{one.name}</button>
      ))}
    </div>
  );
}

function RequestTable(props: {
  trace: Trace;
  ledger: Ledger;
  run: LabRun;
  scene: Scene;
  selected: string | null;
  open: (id: string) => void;
}) {
  const { trace, ledger, run, scene, selected, open } = props;
  const others = ledger.runs.filter((one) => one !== run);
  const step = (event: KeyboardEvent) => {
    const down = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (down === 0) return;
    const buttons = [...(event.currentTarget as HTMLElement).querySelectorAll<HTMLButtonElement>("button.open")];
    const next = buttons[buttons.indexOf(document.activeElement as HTMLButtonElement) + down];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  };
  return (
    <section class="panel" aria-labelledby="requests-title">
      <header class="row">
        <h2 id="requests-title">Requests</h2>
        <span class="tag">{run.name}</span>
      </header>
      <p class="note">Open one to see why. On the right: where the other policies sent it; bold where they differ.</p>
      <div class="scroll" role="region" aria-label="Requests" tabIndex={0}>
        <table class="requests" onKeyDown={step}>
          <thead>
            <tr>
              <th scope="col">Request</th>
              <th scope="col" class="num">Arrives<small>ms</small></th>
              <th scope="col">Tenant<small>digest</small></th>
              <th scope="col" class="num">Prompt<small>tokens</small></th>
              <th scope="col">Went to</th>
              <th scope="col">Outcome</th>
              <th scope="col" class="num">Hits<small>of blocks</small></th>
              <th scope="col" class="num">First byte<small>after</small></th>
              {others.map((one) => <th scope="col" class="other" key={one.name}>{one.name}</th>)}
            </tr>
          </thead>
          <tbody>
            {run.receipts.map((receipt, place) => {
              const request = trace.requests[place];
              const chosen = receipt.candidates.find((one) => one.target === receipt.chosen);
              const inScene = receipt.tick >= scene.from && receipt.tick <= scene.to;
              return (
                <tr
                  key={receipt.request_id}
                  class={`${receipt.request_id === selected ? "selected" : ""}${inScene ? "" : " faint"}`}
                  aria-current={receipt.request_id === selected ? "true" : undefined}
                  onClick={() => open(receipt.request_id)}
                >
                  <th scope="row">
                    <button type="button" class="open mono" id={`open-${receipt.request_id}`} onClick={() => open(receipt.request_id)}>{receipt.request_id}</button>
                  </th>
                  <td class="num">{count(receipt.tick)}</td>
                  <td class="mono" title={receipt.namespace}>{digestOf(receipt.namespace)}</td>
                  <td class="num">{count(request?.prompt ?? 0)}</td>
                  <td class="mono name strong">{receipt.chosen === null ? "–" : worker(receipt.chosen)}</td>
                  <td><OutcomeBadge outcome={receipt.outcome} />{receipt.stale_claim && <small class="stale"> stale claim</small>}</td>
                  <td class="num">{`${chosen?.hits ?? 0} / ${request?.blocks.length ?? 0}`}</td>
                  <td class="num">{receipt.first_byte_tick === null ? "–" : time(receipt.first_byte_tick - receipt.tick)}</td>
                  {others.map((one) => {
                    const pick = one.receipts[place]?.chosen ?? null;
                    return <td key={one.name} class={`mono name other${pick === receipt.chosen ? "" : " differs"}`}>{pick === null ? "–" : worker(pick)}</td>;
                  })}
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </section>
  );
}
