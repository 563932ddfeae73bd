// Lab traces, read strictly: small enough to follow by hand, strict enough to trust. Every complaint names a line
// and a field. The limits and the fields are those of the trace format in docs/lab.md.

import { namespaceDigest } from "./digest.ts";
import { byBytes, JsonError, lineOf, parse, type Node } from "./json.ts";

export const LIMITS = {
  /** Bytes: the longest names of 64 requests with 8,192 blocks each, and room. */
  bytes: 16 << 20,
  requests: 64,
  workers: 8,
  events: 256,
  tokens: 8192,
  background: 65_536,
  tick: 3_600_000,
} as const;

const MAX_U64 = (1n << 64n) - 1n;

export interface Entry {
  namespace: string;
  blocks: string[];
}

export interface TraceWorker {
  name: string;
  epoch: bigint;
  observed: number;
  queued: number;
  context: number;
  entries: Entry[];
}

export type EventKind = "stored" | "removed" | "cleared";

export interface TraceEvent {
  tick: number;
  seq: bigint;
  /** Place in the sorted workers. */
  worker: number;
  epoch: bigint;
  kind: EventKind;
  entry: Entry;
}

export interface TraceRequest {
  id: string;
  tick: number;
  seq: bigint;
  namespace: string;
  blocks: string[];
  prompt: number;
  decode: number;
}

export interface Trace {
  blockSize: number;
  workers: TraceWorker[];
  events: TraceEvent[];
  requests: TraceRequest[];
}

/** What is wrong with a trace, and where. */
export class TraceError extends Error {
  constructor(
    readonly line: number,
    readonly field: string,
    readonly problem: string,
  ) {
    super(`line ${line}: ${field}: ${problem}`);
  }
}

/** Reads a whole file, or says which line and field of it is wrong. */
export function readTrace(text: string): Trace {
  if (text.length > LIMITS.bytes) {
    const found = text.length.toLocaleString("en");
    throw new TraceError(1, "file", `has ${found} characters, and the limit is ${LIMITS.bytes.toLocaleString("en")}`);
  }
  let node: Node;
  try {
    node = parse(text);
  } catch (error) {
    if (!(error instanceof JsonError)) throw error;
    throw new TraceError(lineOf(text, error.at), "object", `is not JSON: ${error.message}`);
  }
  const root = new Fields(text, node, "");
  root.only(["schema_version", "block_size", "workers", "events", "requests"]);
  root.whole("schema_version", 1);
  const blockSize = root.whole("block_size", LIMITS.tokens);
  if (blockSize === 0) throw root.wrong("block_size", "must be a whole number, 1 or more");
  const workers = distinct(root.objects("workers", LIMITS.workers), "worker", readWorker, (one) => one.name);
  if (workers.length === 0) throw root.wrong("workers", "must be a list of at least one worker");
  workers.sort((a, b) => byBytes(a.name, b.name));
  const events = readEvents(root, workers);
  const read = (fields: Fields) => readRequest(fields, blockSize);
  const requests = distinct(root.objects("requests", LIMITS.requests), "id", read, (one) => one.id);
  requests.sort((a, b) => a.tick - b.tick || bySize(a.seq, b.seq) || byBytes(a.id, b.id));
  return { blockSize, workers, events, requests };
}

export function bySize(a: bigint, b: bigint): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

function distinct<T>(all: Fields[], field: string, read: (fields: Fields) => T, name: (one: T) => string): T[] {
  const names = new Set<string>();
  return all.map((fields) => {
    const one = read(fields);
    if (names.has(name(one))) throw fields.wrong(field, `${JSON.stringify(name(one))} is used twice`);
    names.add(name(one));
    return one;
  });
}

function readWorker(fields: Fields): TraceWorker {
  fields.only(["worker", "epoch", "tick", "queued_prefill_tokens", "active_decode_tokens", "entries"]);
  const entries = fields.objects("entries", LIMITS.requests).map((entry) => {
    entry.only(["tenant", "model", "adapter_digest", "blocks"]);
    return { namespace: entry.namespace(), blocks: entry.blocks("blocks") };
  });
  return {
    name: fields.text("worker"),
    epoch: fields.big("epoch"),
    observed: fields.whole("tick", LIMITS.tick),
    queued: fields.whole("queued_prefill_tokens", LIMITS.background),
    context: fields.whole("active_decode_tokens", LIMITS.background),
    entries,
  };
}

function readEvents(root: Fields, workers: TraceWorker[]): TraceEvent[] {
  const known = ["tick", "seq", "worker", "epoch", "kind", "tenant", "model", "adapter_digest", "blocks"];
  const places = new Set<string>();
  const events = root.objects("events", LIMITS.events).map((fields) => {
    fields.only(known);
    const name = fields.text("worker");
    const kind = fields.text("kind");
    if (kind !== "stored" && kind !== "removed" && kind !== "cleared") {
      throw fields.wrong("kind", "must be stored, removed or cleared");
    }
    const blocks = kind === "cleared" ? [] : fields.blocks("blocks");
    const tick = fields.whole("tick", LIMITS.tick);
    const seq = fields.big("seq");
    const worker = workers.findIndex((one) => one.name === name);
    if (worker < 0) throw fields.wrong("worker", `names ${JSON.stringify(name)}, which the trace does not list`);
    const event = { tick, seq, worker, epoch: fields.big("epoch"), kind: kind as EventKind };
    const entry = { namespace: fields.namespace(), blocks };
    // Two of one place would have no order but that of the file.
    const place = `${tick} ${seq} ${worker} ${event.epoch}`;
    if (places.has(place)) throw fields.wrong("seq", `"${seq}" is used twice`);
    places.add(place);
    return { ...event, entry };
  });
  return events.sort(
    (a, b) => a.tick - b.tick || bySize(a.seq, b.seq) || a.worker - b.worker || bySize(a.epoch, b.epoch),
  );
}

function readRequest(fields: Fields, blockSize: number): TraceRequest {
  fields.only([
    "id",
    "tick",
    "seq",
    "tenant",
    "model",
    "adapter_digest",
    "template_digest",
    "prefix_blocks",
    "prompt_tokens",
    "expected_decode_tokens",
  ]);
  fields.text("template_digest");
  const prompt = fields.whole("prompt_tokens", LIMITS.tokens);
  const blocks = fields.blocks("prefix_blocks");
  const full = Math.floor(prompt / blockSize);
  if (blocks.length !== full) {
    throw fields.wrong("prefix_blocks", `holds ${blocks.length} blocks, and the prompt has ${full}`);
  }
  return {
    id: fields.text("id"),
    tick: fields.whole("tick", LIMITS.tick),
    seq: fields.big("seq"),
    namespace: fields.namespace(),
    blocks,
    prompt,
    decode: fields.whole("expected_decode_tokens", LIMITS.tokens),
  };
}

/** One object of a file. */
class Fields {
  private readonly entries: [string, Node][];
  private readonly at: number;

  constructor(
    private readonly base: string,
    node: Node,
    private readonly path: string,
  ) {
    this.at = node.at;
    if (node.kind !== "object") {
      throw new TraceError(lineOf(base, node.at), path === "" ? "object" : path, "must be an object");
    }
    this.entries = node.entries;
    const seen = new Set<string>();
    for (const [name] of node.entries) {
      if (seen.has(name)) throw this.wrong(name, "is given twice");
      seen.add(name);
    }
  }

  wrong(name: string, problem: string): TraceError {
    const found = this.entries.findLast(([known]) => known === name);
    const line = lineOf(this.base, found ? found[1].at : this.at);
    return new TraceError(line, this.path === "" ? name : `${this.path}.${name}`, problem);
  }

  only(known: string[]): void {
    const other = this.entries.find(([name]) => !known.includes(name));
    if (other) throw this.wrong(other[0], "is not a known field");
  }

  private required(name: string): Node {
    const found = this.entries.find(([known]) => known === name);
    if (!found || found[1].kind === "null") throw this.wrong(name, "is missing");
    return found[1];
  }

  big(name: string): bigint {
    const node = this.required(name);
    const value = node.kind === "number" && /^[0-9]+$/.test(node.raw) ? BigInt(node.raw) : -1n;
    if (value < 0n || value > MAX_U64) throw this.wrong(name, "must be a whole number, 0 or more");
    return value;
  }

  whole(name: string, limit: number): number {
    const value = this.big(name);
    if (value > BigInt(limit)) throw this.wrong(name, `is ${value}, and the limit is ${limit}`);
    return Number(value);
  }

  private string(node: Node): string | undefined {
    return node.kind === "text" && !node.broken && node.text !== "" ? node.text : undefined;
  }

  text(name: string): string {
    const found = this.string(this.required(name));
    if (found === undefined) throw this.wrong(name, "must be a string that is not empty");
    return found;
  }

  private list(name: string, limit: number, what: string): Node[] {
    const node = this.required(name);
    if (node.kind !== "list") throw this.wrong(name, `must be ${what}`);
    if (node.items.length > limit) {
      throw this.wrong(name, `is ${node.items.length}, and the limit is ${limit}`);
    }
    return node.items;
  }

  objects(name: string, limit: number): Fields[] {
    const items = this.list(name, limit, "a list of objects");
    const path = this.path === "" ? name : `${this.path}.${name}`;
    return items.map((item, at) => new Fields(this.base, item, `${path}[${at}]`));
  }

  /** What may share a cache. The template shapes a prompt and so its blocks; it is no part of this. */
  namespace(): string {
    const parts = ["tenant", "model", "adapter_digest"].map((name) => this.text(name));
    return cached(parts);
  }

  /** Names of blocks, `a/1..4` short for `a/1`, `a/2`, `a/3`, `a/4`. */
  blocks(name: string): string[] {
    const wrong = () => this.wrong(name, "must be names, or ranges like `a/1..4`");
    const names: string[] = [];
    for (const item of this.list(name, LIMITS.tokens, "a list of strings")) {
      // Ranges are short to write and long to hold.
      if (names.length > LIMITS.tokens) break;
      const text = this.string(item);
      if (text === undefined) throw wrong();
      const dots = text.indexOf("..");
      if (dots < 0) {
        names.push(text);
        continue;
      }
      const slash = text.lastIndexOf("/", dots - 1);
      if (dots === 0 || slash < 0) throw wrong();
      const bounds = [text.slice(slash + 1, dots), text.slice(dots + 2)];
      const numbers = bounds.map((bound) => (/^\+?[0-9]+$/.test(bound) ? Number(bound) : Infinity));
      const [first = Infinity, last = Infinity] = numbers;
      if (first > LIMITS.tokens || last > LIMITS.tokens) throw wrong();
      for (let n = first; n <= last; n += 1) names.push(`${text.slice(0, slash)}/${n}`);
    }
    if (names.length > LIMITS.tokens) throw this.wrong(name, `is ${names.length}, and the limit is ${LIMITS.tokens}`);
    return names;
  }
}

const namespaces = new Map<string, string>();

/** Requests share few namespaces; each is digested once. */
function cached(parts: string[]): string {
  const key = JSON.stringify(parts);
  const found = namespaces.get(key) ?? namespaceDigest(parts);
  if (namespaces.size > 4096) namespaces.clear();
  namespaces.set(key, found);
  return found;
}
