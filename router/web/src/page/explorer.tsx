// The explorer: the same page on a live router. Asks a few times a second while it is looked at.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { axis, Chart, type Ink } from "./chart.tsx";
import { ofReceipt, type Decision } from "./decision_model.ts";
import { DecisionPanel, OutcomeBadge } from "./decision.tsx";
import { count, digestOf, number, OUTCOMES, plural, share, time, worker as nameOf } from "./format.ts";
import { download } from "./lab.tsx";
import { EMPTY, failuresOf, next, ratesOf, shadowsOf, tallyOf, type Brief, type Live, type News } from "./live.ts";
import { Workers } from "./workers.tsx";

/** Between two questions: a killed worker is to be seen within two seconds, of which the router's probe takes one. */
const ASK_MS = 300;
/** The same where answers are large: from so many workers on. */
const ASK_MANY_MS = 500;
const MANY = 500;
/** Rows of the stream: as many as one looks through. */
const STREAM_ROWS = 60;

interface Place {
  request: string | null;
  namespace: string | null;
}

function placeOf(hash: string): Place {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const namespace = given.get("ns");
  return { request: given.get("r"), namespace: namespace !== null && /^[0-9a-f]{32}$/.test(namespace) ? namespace : null };
}

function remember(token: string): void {
  try {
    sessionStorage.setItem("kvrouter-token", token);
  } catch {
    // Without storage the token lasts until the page is closed.
  }
}

function remembered(): string {
  try {
    return sessionStorage.getItem("kvrouter-token") ?? "";
  } catch {
    return "";
  }
}

type Trouble = { kind: "token" } | { kind: "gone"; why: string } | null;

export function Explorer({ theme }: { theme: string }) {
  const [place, setPlace] = useState<Place>(() => placeOf(location.hash));
  const [token, setToken] = useState(remembered);
  const [live, setLive] = useState<Live>(EMPTY);
  const [trouble, setTrouble] = useState<Trouble>(null);
  const [paused, setPaused] = useState(false);
  const [frozen, setFrozen] = useState<Brief[] | null>(null);
  const chosen = place.namespace ?? mostOf(live.namespaces);
  const now = useRef({ live, chosen, token });
  now.current = { live, chosen, token };

  useEffect(() => {
    const read = () => setPlace(placeOf(location.hash));
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  useEffect(() => {
    const out = new URLSearchParams();
    if (place.request !== null) out.set("r", place.request);
    if (place.namespace !== null) out.set("ns", place.namespace);
    const hash = out.toString();
    history.replaceState(null, "", `${location.pathname}${hash === "" ? "" : `#${hash}`}`);
  }, [place]);
  useEffect(() => {
    let stopped = false;
    let timer = 0;
    const round = async () => {
      const { live: before, chosen: namespace, token: bearer } = now.current;
      if (document.visibilityState === "visible") {
        const fresh = before.receipts.length === 0 || namespace === null;
        const query = new URLSearchParams(fresh ? {} : { seen: String(before.filed) });
        if (namespace !== null) query.set("namespace", namespace);
        try {
          const answer = await ask(`v1/admin/live?${query}`, bearer);
          const value = (await answer.json()) as Record<string, unknown>;
          if (!stopped && namespace === now.current.chosen) setLive((state) => next(state, value));
          else if (!stopped) setLive((state) => next(state, { ...value, receipts: [] }));
          setTrouble(null);
        } catch (error) {
          if (!stopped) setTrouble(error instanceof Unauthorized ? { kind: "token" } : { kind: "gone", why: String(error instanceof Error ? error.message : error) });
        }
      }
      if (!stopped) timer = window.setTimeout(round, now.current.live.workers.length < MANY ? ASK_MS : ASK_MANY_MS);
    };
    void round();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, [token]);
  // Another namespace: the receipts of the former one go.
  useEffect(() => {
    setLive((state) => ({ ...state, receipts: [] }));
    setFrozen(null);
  }, [chosen]);

  const save = async () => {
    const answer = await ask("v1/admin/receipts?limit=1000&format=jsonl", token);
    download("receipts.jsonl", await answer.text(), "application/jsonl");
  };

  if (trouble?.kind === "token") {
    return <TokenForm wrong={token !== ""} give={(given) => {
      remember(given);
      setToken(given);
      setTrouble(null);
    }} />;
  }
  const receipts = frozen ?? live.receipts;
  return (
    <>
      {trouble !== null && <p class="problem" role="alert"><span>{`The router does not answer (${trouble.why}). What stands here is old.`}</span></p>}
      <Overview live={live} chosen={chosen} choose={(namespace) => setPlace((before) => ({ ...before, namespace }))} save={save} />
      <NewsList news={live.news} now={live.now} />
      {live.problems.length > 0 && <Problems live={live} />}
      <Why request={place.request} token={token} theme={theme} open={(request) => setPlace((before) => ({ ...before, request }))} />
      <Rates live={live} theme={theme} />
      <Stream
        receipts={receipts}
        paused={paused}
        pause={() => {
          setFrozen(paused ? null : live.receipts);
          setPaused(!paused);
        }}
        selected={place.request}
        open={(request) => setPlace((before) => ({ ...before, request }))}
      />
      <Workers workers={live.workers} tallies={useTallies(live)} failing={useFailures(live)} />
      <Shadows receipts={live.receipts} />
    </>
  );
}

/** Sums move with receipts; workers are drawn more often than that. */
function useTallies(live: Live) {
  return useMemo(() => tallyOf(live.receipts), [live.receipts]);
}

function useFailures(live: Live) {
  return useMemo(() => failuresOf(live.receipts, live.now), [live.receipts, live.now]);
}

class Unauthorized extends Error {}

/** Relative to the admin port's root, where the page is `/explorer`. */
async function ask(path: string, token: string): Promise<Response> {
  const headers: Record<string, string> = token === "" ? {} : { authorization: `Bearer ${token}` };
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer;
}

function mostOf(namespaces: Map<string, number>): string | null {
  let best: string | null = null;
  for (const [name, seen] of namespaces) if (best === null || seen > (namespaces.get(best) ?? 0)) best = name;
  return best;
}

function TokenForm({ wrong, give }: { wrong: boolean; give: (token: string) => void }) {
  const [token, setToken] = useState("");
  return (
    <form class="panel token" onSubmit={(event) => {
      event.preventDefault();
      give(token.trim());
    }}>
      <h2>This router wants a token</h2>
      <p>{wrong ? "That token was refused. " : ""}It stands in the file that <span class="mono">adminTokenFile</span> names. The page keeps it until its tab is closed.</p>
      <label class="row">
        <span>Token</span>
        <input type="password" autocomplete="off" value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        <button type="submit" class="primary" disabled={token.trim() === ""}>Connect</button>
      </label>
    </form>
  );
}

function Overview(props: { live: Live; chosen: string | null; choose: (namespace: string) => void; save: () => Promise<void> }) {
  const { live, chosen, choose, save } = props;
  const ready = live.workers.filter((one) => one.ready).length;
  const [saved, setSaved] = useState("");
  return (
    <section class="panel intro" aria-label="Router">
      <div>
        <p class="lead">
          <strong class="mono name">{live.pool || "connecting"}</strong>{" "}
          {live.now > 0 && `${plural(live.workers.length, "worker")}, ${count(ready)} ready; ${live.policy}; blocks of ${plural(live.blockSize, "token")}`}
        </p>
        <p class="note">{live.now > 0 ? `${plural(live.filed, "receipt")} since it started; kv-router ${live.version}. Tenants appear by digest, one namespace at a time.` : "Asking the router."}</p>
      </div>
      <div class="row tools">
        <label class="row">
          <span>Namespace</span>
          <select value={chosen ?? ""} onChange={(event) => choose(event.currentTarget.value)} disabled={live.namespaces.size === 0}>
            {live.namespaces.size === 0 && <option value="">none yet</option>}
            {[...live.namespaces.keys()].sort().map((name) => <option key={name} value={name}>{digestOf(name)}</option>)}
          </select>
        </label>
        <button type="button" title="The latest 1,000, as a chain that `kv-router replay --trace` repeats" onClick={() => {
          save().then(() => setSaved("saved"), () => setSaved("not saved"));
        }}>Save receipts</button>
        <span class="note" role="status">{saved}</span>
      </div>
    </section>
  );
}

function NewsList({ news, now }: { news: News[]; now: number }) {
  return (
    <section class="panel news" aria-labelledby="news-title">
      <h2 id="news-title">What changed</h2>
      <div role="log" aria-live="polite" aria-relevant="additions">
      <ul class="plain">
        {news.length === 0 && <li class="note">Nothing since this page was opened.</li>}
        {news.slice(0, 6).map((one) => (
          <li key={`${one.at} ${one.worker} ${one.text}`} class={one.bad ? "bad" : ""}>
            <span class="note">{`${time(Math.max(0, Math.round((now - one.at) / 1000)) * 1000)} ago`}</span>{" "}
            <span class="mono name">{one.worker}</span> {one.text}
          </li>
        ))}
      </ul>
      </div>
    </section>
  );
}

function Problems({ live }: { live: Live }) {
  const more = live.problemCount - Math.min(5, live.problems.length);
  return (
    <section class="panel" aria-labelledby="problems-title">
      <h2 id="problems-title">What is wrong now</h2>
      <ul class="plain">
        {live.problems.slice(0, 5).map((one) => <li class="name" key={`${one.reason} ${one.worker}`}><span class="badge outcome-no_target">{one.reason.replaceAll("_", " ")}</span> {one.message}</li>)}
        {more > 0 && <li class="note">{`And ${count(more)} more.`}</li>}
      </ul>
    </section>
  );
}

function Why(props: { request: string | null; token: string; theme: string; open: (request: string | null) => void }) {
  const { request, token, theme, open } = props;
  const [typed, setTyped] = useState(request ?? "");
  const [found, setFound] = useState<{ request: string; decisions: Decision[]; problem: string | null } | null>(null);
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    if (request === null) return setFound(null);
    let stopped = false;
    setTyped(request);
    setAttempt(0);
    const look = async () => {
      try {
        const answer = await ask(`v1/admin/receipts?limit=20&request_id=${encodeURIComponent(request)}`, token);
        const value = (await answer.json()) as { receipts?: unknown[] };
        const decisions = (value.receipts ?? []).map(ofReceipt);
        const problem = decisions.length === 0 ? "No receipt of that request is in memory any more, or ever was." : null;
        if (!stopped) setFound({ request, decisions, problem });
      } catch (error) {
        if (!stopped) setFound({ request, decisions: [], problem: `The receipt could not be fetched: ${error instanceof Error ? error.message : error}.` });
      }
    };
    void look();
    return () => {
      stopped = true;
    };
  }, [request, token]);
  const decision = found?.decisions[attempt];
  return (
    <>
      <form class="panel why" onSubmit={(event) => {
        event.preventDefault();
        open(typed.trim() === "" ? null : typed.trim());
      }}>
        <label class="row">
          <strong>Why did this request go there?</strong>
          <input type="search" class="grow" placeholder="Request id, from the X-Request-ID header" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
          <button type="submit">Explain</button>
        </label>
      </form>
      {found?.problem && <p class="problem" role="alert"><span>{found.problem}</span></p>}
      {decision && (found?.decisions.length ?? 0) > 1 && (
        <div class="segments" role="group" aria-label="Attempt">
          {found?.decisions.map((_, at) => (
            <button type="button" key={at} aria-pressed={at === attempt} onClick={() => setAttempt(at)}>{`Attempt ${found.decisions.length - at}`}</button>
          ))}
        </div>
      )}
      {decision && <DecisionPanel decision={decision} theme={theme} onClose={() => open(null)} />}
    </>
  );
}

function Rates({ live, theme }: { live: Live; theme: string }) {
  const second = Math.floor(live.now / 1000);
  const data = useMemo(() => ratesOf(live.receipts, live.now), [second, live.receipts.length === 0]);
  const latest = data[1][data[1].length - 1] ?? 0;
  const options = (ink: Ink) => ({
    legend: { live: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (_: uPlot, __: number, top: number): [number, number] => [0, Math.max(5, top * 1.15)] }, share: { range: (): [number, number] => [0, 105] } },
    axes: [
      axis(ink, {}),
      axis(ink, { label: "decisions / s", size: 48 }),
      axis(ink, { label: "% of tokens", scale: "share", side: 1, size: 44, grid: { show: false } }),
    ],
    series: [
      {},
      { label: "decisions a second", stroke: ink.muted, fill: `${ink.muted}22`, width: 1.5, points: { show: false } },
      { label: "predicted hits", scale: "share", stroke: ink.accent, width: 1.5, points: { show: false }, spanGaps: true },
      { label: "hits the engines confirmed", scale: "share", stroke: ink.warm, dash: [4, 3], width: 1.5, points: { show: false }, spanGaps: true },
    ],
    padding: [8, 4, 0, 0] as [number, number, number, number],
  });
  return (
    <section class="panel" aria-labelledby="rates-title">
      <h2 id="rates-title">Decisions and hits</h2>
      <Chart label={`The last 90 seconds; ${latest} decisions in the last one`} height={170} theme={theme} data={data as uPlot.AlignedData} version="rates" options={options} />
    </section>
  );
}

function Stream(props: { receipts: Brief[]; paused: boolean; pause: () => void; selected: string | null; open: (request: string) => void }) {
  const { receipts, paused, pause, selected, open } = props;
  const [words, setWords] = useState("");
  const [outcome, setOutcome] = useState("");
  const [only, setOnly] = useState("");
  const rows: Brief[] = [];
  for (const one of receipts) {
    if (rows.length === STREAM_ROWS) break;
    if (words !== "" && !one.id.includes(words) && !(one.target ?? "").includes(words)) continue;
    if (outcome !== "" && one.outcome !== outcome) continue;
    if (only === "failed" && one.failure === null) continue;
    if (only === "regret" && !one.shadows.some((shadow) => shadow.regret > 0)) continue;
    if (only === "tie" && (one.tie === null || one.tie === "none")) continue;
    rows.push(one);
  }
  return (
    <section class="panel" aria-labelledby="stream-title">
      <header class="row">
        <h2 id="stream-title">Receipts</h2>
        <div class="row push">
          <input type="search" aria-label="Request id or worker" placeholder="Request id or worker" value={words} onInput={(event) => setWords(event.currentTarget.value)} />
          <select aria-label="Outcome" value={outcome} onChange={(event) => setOutcome(event.currentTarget.value)}>
            <option value="">every outcome</option>
            {Object.entries(OUTCOMES).map(([key, name]) => <option key={key} value={key}>{name}</option>)}
          </select>
          <select aria-label="Kind" value={only} onChange={(event) => setOnly(event.currentTarget.value)}>
            <option value="">all</option>
            <option value="failed">failed</option>
            <option value="regret">a shadow would reuse more</option>
            <option value="tie">decided by a tie</option>
          </select>
          <button type="button" aria-pressed={paused} onClick={pause}>{paused ? "Resume" : "Pause"}</button>
        </div>
      </header>
      <div class="scroll stream-box" role="region" aria-label="Receipts, newest first" tabIndex={0}>
        <table class="stream">
          <thead>
            <tr>
              <th scope="col">Request</th>
              <th scope="col">Decided</th>
              <th scope="col">Went to</th>
              <th scope="col">Outcome</th>
              <th scope="col" class="num">Prompt<small>tokens</small></th>
              <th scope="col" class="num">Predicted hits<small>tokens</small></th>
              <th scope="col" class="num">Engine's hits<small>tokens</small></th>
              <th scope="col" class="num">First byte<small>after</small></th>
              <th scope="col">Answer</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((one) => (
              <tr key={`${one.at} ${one.attempt} ${one.id}`} class={one.id === selected ? "selected" : ""} onClick={() => open(one.id)}>
                <th scope="row"><button type="button" class="open mono" onClick={() => open(one.id)}>{one.id}</button></th>
                <td>{new Date(one.at).toLocaleTimeString()}</td>
                <td class="mono name">{one.target === null ? "–" : nameOf(one.target)}</td>
                <td><OutcomeBadge outcome={one.outcome} /></td>
                <td class="num">{count(one.prompt)}</td>
                <td class="num">{count(one.predicted)}</td>
                <td class="num">{one.engineCached === null ? "–" : count(one.engineCached)}</td>
                <td class="num">{one.firstByte === null ? "–" : time(one.firstByte)}</td>
                <td>{one.failure !== null ? <span class="bad">{one.failure.replaceAll("_", " ")}</span> : (one.status ?? "under way")}</td>
              </tr>
            ))}
            {rows.length === 0 && <tr><td colSpan={9} class="note">No receipt matches.</td></tr>}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Shadows({ receipts }: { receipts: Brief[] }) {
  const all = useMemo(() => shadowsOf(receipts), [receipts]);
  return (
    <section class="panel" aria-labelledby="shadows-title">
      <h2 id="shadows-title">Shadow policies</h2>
      {all.length === 0 ? (
        <p class="note">None are evaluated. <span class="mono">shadowPolicies</span> in the live settings names some; they book nothing.</p>
      ) : (
        <div class="scroll" role="region" aria-label="Shadow policies" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">Policy</th>
                <th scope="col" class="num">Decisions</th>
                <th scope="col" class="num">Agrees<small>of decisions</small></th>
                <th scope="col" class="num">Regret<small>blocks per decision; above 0 it would reuse more</small></th>
              </tr>
            </thead>
            <tbody>
              {all.map((one) => (
                <tr key={one.policy}>
                  <th scope="row" class="mono">{one.policy}</th>
                  <td class="num">{count(one.decisions)}</td>
                  <td class="num">{share(one.agreed / one.decisions)}</td>
                  <td class="num">{number(one.regret / one.decisions)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
