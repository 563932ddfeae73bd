// One decision opened: what happened in plain words, every candidate with its facts and costs, the plane.

import { useEffect, useRef, useState } from "preact/hooks";
import { fate, isStale, story, trim, workAfter, type Candidate, type Decision, type Tiers } from "./decision_model.ts";
import { count, digestOf, number, OUTCOME_HELP, OUTCOMES, plural, REASONS, TIES, time, worker } from "./format.ts";
import { Plane } from "./plane.tsx";

/** More rows than anybody reads; the cheapest and the chosen one are among them. */
const MAX_ROWS = 40;

export function DecisionPanel({ decision, theme, onClose }: { decision: Decision; theme: string; onClose: () => void }) {
  const heading = useRef<HTMLHeadingElement>(null);
  const [filter, setFilter] = useState("");
  useEffect(() => heading.current?.focus(), [decision.id, decision.at]);
  const cheapestFirst = [...decision.candidates].sort(
    (a, b) => Number(b.target === decision.chosen) - Number(a.target === decision.chosen) || a.cost - b.cost,
  );
  const many = decision.candidates.length > MAX_ROWS;
  const wanted = many ? cheapestFirst : decision.candidates;
  const rows = wanted.filter((one) => one.target.includes(filter)).slice(0, MAX_ROWS);
  return (
    <section class="panel decision" aria-labelledby="decision-title" onKeyDown={(event) => event.key === "Escape" && onClose()}>
      <header class="row">
        <h2 id="decision-title" ref={heading} tabIndex={-1}>
          <span class="mono">{decision.id}</span>{" "}
          <span aria-hidden="true">→</span> <span class="visually-hidden">went to</span>{" "}
          <span class="mono">{decision.chosen === null ? "nobody" : worker(decision.chosen)}</span>
        </h2>
        <OutcomeBadge outcome={decision.outcome} />
        <button type="button" class="quiet push" onClick={onClose}>
          Close
        </button>
      </header>
      <p class="story">{story(decision).join(" ")}</p>
      <dl class="facts">
        <Fact name="Prompt">{`${decision.prompts > 1 ? `${plural(decision.prompts, "prompt")}: ` : ""}${plural(decision.prompt, "token")}, ${plural(decision.blocks, "block")} of ${decision.blockSize}`}</Fact>
        <Fact name="Policy">{decision.policy}</Fact>
        <Fact name="Tie">{decision.tie === null ? "nobody chosen" : (TIES[decision.tie] ?? decision.tie)}</Fact>
        <Fact name="Namespace">
          <span class="mono" title={decision.namespace}>
            {digestOf(decision.namespace)}
          </span>
        </Fact>
        <Fact name={decision.live ? "Decided" : "Arrived"}>
          {decision.live ? new Date(decision.at).toLocaleTimeString() : `${count(decision.at)} ms`}
        </Fact>
        {decision.firstByte !== null && (
          <Fact name="First byte, modelled">{`${count(decision.firstByte)} ms, after ${time(decision.firstByte - decision.at)}`}</Fact>
        )}
        {decision.result !== null && <Fact name="Answer">{answer(decision.result)}</Fact>}
      </dl>
      {many && (
        <label class="row">
          <span>{`${count(decision.candidates.length)} candidates; the chosen one and the cheapest are listed.`}</span>
          <input type="search" placeholder="Find a worker" aria-label="Find a worker among the candidates" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        </label>
      )}
      {decision.missing > 0 && <p class="note">{`${plural(decision.missing, "further candidate")} did not fit into the receipt.`}</p>}
      <Candidates decision={decision} rows={rows} />
      <h3>Reuse against work</h3>
      <p class="note">Up and left is better. The line joins candidates that no other one dominates.</p>
      <div class="plane"><Plane decision={decision} theme={theme} /></div>
      <ul class="keys" aria-label="Marks">
        <li><span class="mark chosen" /> chosen</li>
        <li><span class="mark open" /> not dominated</li>
        <li><span class="mark dominated" /> dominated</li>
        <li><span class="mark rejected">×</span> rejected</li>
        <li><span class="mark claim" /> claimed by a stale view</li>
      </ul>
      {decision.shadows.length > 0 && <Shadows decision={decision} />}
    </section>
  );
}

export function OutcomeBadge({ outcome }: { outcome: string }) {
  return (
    <span class={`badge outcome-${outcome}`} title={OUTCOME_HELP[outcome]}>
      {OUTCOMES[outcome] ?? outcome}
    </span>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function answer(result: Record<string, unknown>): string {
  const parts: string[] = [];
  if (typeof result["failure"] === "string") parts.push(`failed: ${result["failure"]}`);
  else if (typeof result["status"] === "number") parts.push(`status ${result["status"]}`);
  if (typeof result["first_byte_ms"] === "number") parts.push(`first byte after ${time(result["first_byte_ms"])}`);
  if (typeof result["engine_cached_tokens"] === "number") {
    parts.push(`${plural(result["engine_cached_tokens"], "token")} cached by the engine's count`);
  }
  return parts.join(", ");
}

function tiers(value: Tiers): string {
  const slow = [value.host > 0 ? `${value.host} host` : "", value.disk > 0 ? `${value.disk} disk` : ""].filter(Boolean);
  return slow.length === 0 ? count(value.device) : `${value.device} device, ${slow.join(", ")}`;
}

function Candidates({ decision, rows }: { decision: Decision; rows: Candidate[] }) {
  return (
    <div class="scroll" role="region" aria-label="Candidates" tabIndex={0}>
      <table class="candidates">
        <caption class="visually-hidden">{`Candidates for ${decision.id}`}</caption>
        <thead>
          <tr>
            <th scope="col">Worker</th>
            <th scope="col" class="num">Hits<small>blocks</small></th>
            <th scope="col" class="num">Claimed<small>blocks</small></th>
            <th scope="col" class="num">Queued<small>tokens</small></th>
            <th scope="col" class="num">Context<small>tokens</small></th>
            <th scope="col" class="num">Active<small>blocks</small></th>
            <th scope="col">View<small>age, epoch, seq</small></th>
            <th scope="col" class="num">Uncached<small>{decision.unit}</small></th>
            <th scope="col" class="num">Load<small>{decision.unit}</small></th>
            <th scope="col" class="num">Cost<small>{decision.unit}</small></th>
            <th scope="col">Verdict</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((one) => (
            <tr key={one.target} class={one.target === decision.chosen ? "chosen" : ""}>
              <th scope="row" class="mono name" title={one.target}>{worker(one.target)}</th>
              <td class="num">
                {tiers(one.hits)}
                {(one.predicted ?? 0) > 0 && <small title="Blocks that prompts in flight will leave behind">{`${one.predicted} in flight`}</small>}
              </td>
              <td class="num">
                <span class={isStale(one) ? "stale" : ""}>{tiers(one.claimed)}</span>
                {(one.elsewhere ?? 0) > 0 && <small class="warn">{`${one.elsewhere} for another tenant`}</small>}
              </td>
              <td class="num">{count(one.load.queued)}</td>
              <td class="num">{count(one.load.context)}<small>{plural(one.load.requests, "request")}</small></td>
              <td class="num">{count(one.load.active_blocks)}{one.sharedActive > 0 && <small>{`${one.sharedActive} shared`}</small>}</td>
              <td>
                <span class={one.trust.credited ? "" : "warn"}>{`${one.trust.state}${one.trust.reason === "ok" ? "" : `: ${REASONS[one.trust.reason] ?? one.trust.reason}`}`}</span>
                <small>{`${one.trust.age === null ? "never" : time(one.trust.age)}, ${one.trust.epoch}, ${one.trust.seq}`}</small>
              </td>
              <td class="num">{trim(one.uncached)}</td>
              <td class="num">{trim(one.loadCost)}</td>
              <td class="num strong">{trim(one.cost)}</td>
              <td>{fate(decision, one)}<small title="Tokens queued and in contexts once this prompt is on it">{`work after: ${number(workAfter(decision, one))}`}</small></td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Shadows({ decision }: { decision: Decision }) {
  return (
    <>
      <h3>Shadow policies</h3>
      <ul class="plain">
        {decision.shadows.map((one) => (
          <li key={one.policy}>
            <span class="mono">{one.policy}</span>{" "}
            {one.target === decision.chosen ? "agrees" : `would have chosen ${worker(one.target)}: ${regret(one.regret)}`}
          </li>
        ))}
      </ul>
    </>
  );
}

export function regret(blocks: number): string {
  if (blocks === 0) return "as much reuse";
  return blocks > 0 ? `${plural(blocks, "block")} more reuse` : `${plural(-blocks, "block")} less reuse`;
}
