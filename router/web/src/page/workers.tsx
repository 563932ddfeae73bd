// Thousands of workers in one table: only the rows in sight are in the document.

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, REASONS, share, time } from "./format.ts";
import type { Rank, Tally, Worker } from "./live.ts";

/** One row, in pixels; the style sheet keeps rows at it. */
const ROW = 44;
/** Rows beyond the edges, so that scrolling shows no gap. */
const MARGIN = 8;

type Key = "name" | "state" | "age" | "queued" | "context" | "active" | "requests" | "blocks" | "predicted" | "cached";

interface Row {
  worker: Worker;
  /** The rank in the worst state stands for all. */
  rank: Rank;
  failure: string | undefined;
  tally: Tally | undefined;
  sums: { queued: number; context: number; active: number; requests: number; blocks: number };
  badness: number;
}

const STATES = ["exact", "incomplete", "unsequenced", "syncing", "cold", "unsound", "mismatched"];
const NOTHING: Rank = { rank: 0, state: "cold", reason: "nothing_heard", credited: false, epoch: 0, seq: 0, age: null, blocks: 0, active: 0, queued: 0, context: 0, requests: 0 };

function rowOf(worker: Worker, tallies: Map<string, Tally>, failing: Map<string, string>): Row {
  const bad = (rank: Rank) => STATES.indexOf(rank.state) + (rank.credited ? 0 : 10);
  const rank = worker.ranks.reduce((worst, one) => (bad(one) > bad(worst) ? one : worst), worker.ranks[0] ?? NOTHING);
  const sum = (of: (rank: Rank) => number) => worker.ranks.reduce((total, one) => total + of(one), 0);
  const failure = failing.get(worker.name);
  return {
    worker,
    rank,
    failure,
    tally: tallies.get(worker.name),
    sums: {
      queued: sum((one) => one.queued),
      context: sum((one) => one.context),
      active: sum((one) => one.active),
      requests: sum((one) => one.requests),
      blocks: sum((one) => one.blocks),
    },
    badness: (worker.ready ? 0 : 1000) + (worker.missed > 0 ? 700 : 0) + (failure === undefined ? 0 : 500) + bad(rank),
  };
}

function valueOf(row: Row, key: Key): number | string {
  switch (key) {
    case "name":
      return row.worker.name;
    case "state":
      return row.badness;
    case "age":
      return row.rank.age ?? Infinity;
    case "predicted":
      return ratio(row.tally?.predicted, row.tally?.prompt);
    case "cached":
      return ratio(row.tally?.cached, row.tally?.toldPredicted);
    default:
      return row.sums[key];
  }
}

const ratio = (part = 0, whole = 0): number => (whole === 0 ? -1 : part / whole);

const COLUMNS: { key: Key; name: string; unit: string; num: boolean; help: string }[] = [
  { key: "name", name: "Worker", unit: "role, engine", num: false, help: "host:port" },
  { key: "state", name: "State", unit: "view and why", num: false, help: "Whether it may be picked, and what its view is worth" },
  { key: "age", name: "Lag", unit: "since proven", num: true, help: "Time since its view was last proven" },
  { key: "requests", name: "In flight", unit: "requests", num: true, help: "Requests on it now" },
  { key: "queued", name: "Queued", unit: "tokens", num: true, help: "Uncached tokens that wait for a first byte" },
  { key: "context", name: "Context", unit: "tokens", num: true, help: "Prompt and generated tokens of its requests" },
  { key: "active", name: "Active", unit: "blocks", num: true, help: "Distinct blocks in flight" },
  { key: "blocks", name: "Cached", unit: "blocks", num: true, help: "Blocks in its view" },
  { key: "predicted", name: "Predicted hits", unit: "of prompt tokens", num: true, help: "Over the receipts that this page holds, of the chosen namespace" },
  { key: "cached", name: "Real hits", unit: "of predicted", num: true, help: "What engines confirmed, over what was predicted" },
];

export function Workers({ workers, tallies, failing }: { workers: Worker[]; tallies: Map<string, Tally>; failing: Map<string, string> }) {
  const [order, setOrder] = useState<{ key: Key; down: boolean }>({ key: "state", down: true });
  const [words, setWords] = useState("");
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(480);
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const rows = useMemo(() => {
    const wanted = words === "" ? workers : workers.filter((one) => one.name.includes(words));
    const all = wanted.map((one) => rowOf(one, tallies, failing));
    const sign = order.down ? -1 : 1;
    return all.sort((a, b) => {
      const [left, right] = [valueOf(a, order.key), valueOf(b, order.key)];
      if (left !== right) return left < right ? -sign : sign;
      return a.worker.name < b.worker.name ? -1 : 1;
    });
  }, [workers, tallies, failing, words, order]);
  const first = Math.max(0, Math.min(Math.floor(top / ROW) - MARGIN, rows.length - 1));
  const last = Math.min(rows.length, first + Math.ceil(height / ROW) + 2 * MARGIN);
  const sort = (key: Key) => setOrder((before) => ({ key, down: before.key === key ? !before.down : key !== "name" }));
  return (
    <section class="panel" aria-labelledby="workers-title">
      <header class="row">
        <h2 id="workers-title">Workers</h2>
        <span class="tag">{`${count(rows.length)} of ${count(workers.length)}`}</span>
        <input type="search" class="push" aria-label="Find workers" placeholder="host:port" value={words} onInput={(event) => setWords(event.currentTarget.value)} />
      </header>
      <div class="scroll workers-box" role="region" aria-label="Workers" tabIndex={0} ref={box} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
        <table class="workers" aria-rowcount={rows.length + 1}>
          <thead>
            <tr aria-rowindex={1}>
              {COLUMNS.map((column) => (
                <th scope="col" key={column.key} class={column.num ? "num" : ""} title={column.help} aria-sort={order.key === column.key ? (order.down ? "descending" : "ascending") : "none"}>
                  <button type="button" class="sort" onClick={() => sort(column.key)}>
                    {column.name}
                    {order.key === column.key && <span aria-hidden="true">{order.down ? " ↓" : " ↑"}</span>}
                  </button>
                  <small>{column.unit}</small>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {first > 0 && <tr aria-hidden="true" class="spacer"><td colSpan={COLUMNS.length} style={{ height: `${first * ROW}px` }} /></tr>}
            {rows.slice(first, last).map((row, place) => <WorkerRow key={row.worker.name} row={row} index={first + place + 2} />)}
            {last < rows.length && <tr aria-hidden="true" class="spacer"><td colSpan={COLUMNS.length} style={{ height: `${(rows.length - last) * ROW}px` }} /></tr>}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function WorkerRow({ row, index }: { row: Row; index: number }) {
  const { worker, rank, failure, tally, sums } = row;
  const silent = worker.ready && worker.missed > 0;
  const state = silent ? "did not answer a probe" : !worker.ready ? `gets no requests: ${worker.reason.replaceAll("_", " ")}` : failure !== undefined ? `fails: ${failure.replaceAll("_", " ")}` : rank.state;
  const good = worker.ready && !silent && failure === undefined && rank.credited;
  return (
    <tr aria-rowindex={index} data-worker={worker.name} data-ready={worker.ready}>
      <th scope="row" class="mono name">{worker.name}<small>{`${worker.role.toLowerCase()}, ${worker.engine}${worker.ranks.length > 1 ? `, ${worker.ranks.length} ranks` : ""}`}</small></th>
      <td title={`epoch ${rank.epoch}`}><span class={good ? "good" : "bad"}>{state}</span><small>{`${REASONS[rank.reason] ?? rank.reason}${rank.credited ? "" : ", no credit"}; seq ${count(rank.seq)}`}</small></td>
      <td class="num">{rank.age === null ? "–" : time(rank.age)}</td>
      <td class="num">{count(sums.requests)}</td>
      <td class="num">{count(sums.queued)}</td>
      <td class="num">{count(sums.context)}</td>
      <td class="num">{count(sums.active)}</td>
      <td class="num">{count(sums.blocks)}</td>
      <td class="num">{tally && tally.prompt > 0 ? share(tally.predicted / tally.prompt) : "–"}<small>{tally ? `${count(tally.requests)} req.` : ""}</small></td>
      <td class="num">{tally && tally.toldPredicted > 0 ? share(tally.cached / tally.toldPredicted) : "–"}<small>{tally && tally.told > 0 ? `${count(tally.told)} told` : ""}</small></td>
    </tr>
  );
}
