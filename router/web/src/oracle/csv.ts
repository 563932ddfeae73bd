// The ledger as a table: a row for every candidate, the ledger's digest in each, so that a row never loses its proof.
// RFC 4180. A cell that a spreadsheet would take for a formula gets an apostrophe in front.

import type { Ledger } from "./replay.ts";

const COLUMNS = [
  "policy",
  "request_id",
  "tick_ms",
  "namespace",
  "outcome",
  "chosen",
  "tie",
  "first_byte_tick_ms",
  "stale_claim",
  "target",
  "claimed_blocks",
  "hit_blocks",
  "rejected_other_namespace_blocks",
  "active_blocks",
  "queued_tokens",
  "context_tokens",
  "requests",
  "shared_active_blocks",
  "trust",
  "trust_reason",
  "credited",
  "epoch",
  "seq",
  "age_ms",
  "cost",
  "cost_uncached",
  "cost_load",
  "rejection",
  "dominated_by",
  "ledger_sha256",
] as const;

export function toCsv(ledger: Ledger): string {
  const rows: unknown[][] = ledger.runs.flatMap((run) =>
    run.receipts.flatMap((receipt) =>
      receipt.candidates.map((one) => [
        run.policy,
        receipt.request_id,
        receipt.tick,
        receipt.namespace,
        receipt.outcome,
        receipt.chosen,
        receipt.tie,
        receipt.first_byte_tick,
        receipt.stale_claim,
        one.target,
        one.claimed,
        one.hits,
        one.rejected_other_namespace,
        one.load.active_blocks,
        one.load.queued,
        one.load.context,
        one.load.requests,
        one.shared_active,
        one.trust.state,
        one.trust.reason,
        one.trust.credited,
        one.trust.epoch,
        one.trust.seq,
        one.trust.age,
        one.terms.cost,
        one.terms.uncached,
        one.terms.load,
        one.terms.rejection,
        one.dominated_by,
        ledger.digest,
      ]),
    ),
  );
  return [COLUMNS as readonly unknown[], ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

export function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
