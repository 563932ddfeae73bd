// Whether the ledger of this page equals that of kv-router, and where it does not.

import type { Line } from "../oracle/compare.ts";
import { plural } from "./format.ts";

export type Proof =
  | { kind: "equal"; digest: string; theirs: string; from: string; decisions: number; partial: boolean }
  | { kind: "differs"; digest: string; theirs: string; from: string; lines: Line[] }
  | { kind: "none"; digest: string; command: string }
  | { kind: "asking"; digest: string };

/** More lines than anybody reads. */
const MAX_LINES = 60;

export function ProofStrip({ proof, onShow }: { proof: Proof; onShow: () => void }) {
  return (
    <div class={`proof ${proof.kind}`} role="status" aria-live="polite" data-proof={proof.kind} data-digest={proof.digest}>
      <span class="sign" aria-hidden="true">{{ equal: "✓", differs: "≠", none: "–", asking: "…" }[proof.kind]}</span>
      <span>{sentence(proof)}</span>
      {proof.kind === "differs" && (
        <button type="button" class="quiet" onClick={onShow}>
          Show the lines
        </button>
      )}
      <span class="digest mono" title="SHA-256 of this page's ledger, as `kv-router replay --json` prints it">
        <span class="visually-hidden">SHA-256 of this page's ledger: </span>
        <span aria-hidden="true">SHA-256 </span>
        <span data-own-digest>{proof.digest}</span>
      </span>
    </div>
  );
}

function sentence(proof: Proof): string {
  switch (proof.kind) {
    case "equal":
      return proof.partial
        ? `Equal to ${proof.from} where it has the same policies: ${plural(proof.decisions, "decision")}.`
        : `This page and ${proof.from} agree on every byte: ${plural(proof.decisions, "decision")}.`;
    case "differs":
      return `This page and ${proof.from} differ in ${plural(proof.lines.length, "line")}.`;
    case "none":
      return `Nothing to compare with for these settings. Same ledger: ${proof.command}`;
    case "asking":
      return "Asking kv-router for its ledger.";
  }
}

export function Differences({ proof }: { proof: Proof }) {
  if (proof.kind !== "differs") return null;
  return (
    <section class="panel" aria-labelledby="differences-title">
      <h2 id="differences-title" tabIndex={-1}>Where the ledgers differ</h2>
      <p class="note">
        {`Here: SHA-256 ${proof.digest}. There: ${proof.theirs}. One line is one decision in canonical JSON.`}
      </p>
      <ol class="differences">
        {proof.lines.slice(0, MAX_LINES).map((line) => (
          <li key={`${line.policy} ${line.what}`}>
            <strong class="mono">{`${line.policy} ${line.what}`}</strong>
            <ul>
              {line.fields.map((field) => (
                <li class="mono" key={field}>{field}</li>
              ))}
            </ul>
            <details>
              <summary>Both lines</summary>
              <p class="mono line"><b>here</b> {line.ours ?? "is missing"}</p>
              <p class="mono line"><b>there</b> {line.theirs ?? "is missing"}</p>
            </details>
          </li>
        ))}
      </ol>
      {proof.lines.length > MAX_LINES && <p class="note">{`And ${proof.lines.length - MAX_LINES} more.`}</p>}
    </section>
  );
}
