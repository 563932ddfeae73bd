// JSON with places. Reads text into nodes that remember their offset, so that every complaint names a line and
// a field, and keeps numbers as they stand, so that a 64-bit count loses nothing. Writes canonical JSON
// (RFC 8785): keys in the order of UTF-16 code units, numbers as ECMAScript prints them, no spaces.

/** A value and where it stands. */
export type Node =
  | { kind: "object"; at: number; entries: [string, Node][] }
  | { kind: "list"; at: number; items: Node[] }
  | { kind: "text"; at: number; text: string; broken: boolean }
  | { kind: "number"; at: number; raw: string }
  | { kind: "flag"; at: number; value: boolean }
  | { kind: "null"; at: number };

/** A plain value, as canonical JSON writes it. */
export type Value = null | boolean | number | bigint | string | Value[] | { [key: string]: Value };

/** Why text is no JSON. */
export class JsonError extends Error {
  constructor(
    readonly at: number,
    message: string,
  ) {
    super(message);
  }
}

/** Nesting beyond this is no trace of ours, and recursion must end. */
const MAX_DEPTH = 64;

export function parse(text: string): Node {
  const reader = new Reader(text);
  reader.space();
  const node = reader.value(0);
  reader.space();
  if (reader.at < text.length) throw new JsonError(reader.at, "more text follows the value");
  return node;
}

class Reader {
  at = 0;
  constructor(private readonly text: string) {}

  space(): void {
    for (;;) {
      const c = this.text.charCodeAt(this.at);
      if (c !== 32 && c !== 10 && c !== 13 && c !== 9) return;
      this.at += 1;
    }
  }

  fail(what: string): never {
    const found = this.at >= this.text.length ? "the text ends early" : what;
    throw new JsonError(Math.min(this.at, Math.max(0, this.text.length - 1)), found);
  }

  value(depth: number): Node {
    if (depth > MAX_DEPTH) this.fail(`more than ${MAX_DEPTH} levels deep`);
    const at = this.at;
    switch (this.text[at]) {
      case "{":
        return this.object(depth);
      case "[":
        return this.list(depth);
      case '"':
        return this.string();
      case "t":
        return this.word("true", { kind: "flag", at, value: true });
      case "f":
        return this.word("false", { kind: "flag", at, value: false });
      case "n":
        return this.word("null", { kind: "null", at });
      default:
        return this.number();
    }
  }

  private word(word: string, node: Node): Node {
    if (!this.text.startsWith(word, this.at)) this.fail("a value was expected");
    this.at += word.length;
    return node;
  }

  private number(): Node {
    const at = this.at;
    const pattern = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
    pattern.lastIndex = at;
    const found = pattern.exec(this.text);
    if (!found) this.fail("a value was expected");
    this.at += found[0].length;
    return { kind: "number", at, raw: found[0] };
  }

  private string(): Node & { kind: "text" } {
    const at = this.at;
    let end = at + 1;
    for (;;) {
      const c = this.text.charCodeAt(end);
      if (Number.isNaN(c)) {
        this.at = this.text.length;
        this.fail("");
      }
      if (c === 34) break;
      if (c < 32) {
        this.at = end;
        this.fail("a control character inside a string");
      }
      end += c === 92 ? 2 : 1;
    }
    const raw = this.text.slice(at, end + 1);
    this.at = end + 1;
    let text: string;
    try {
      text = raw.includes("\\") ? (JSON.parse(raw) as string) : raw.slice(1, -1);
    } catch {
      throw new JsonError(at, "an escape that JSON does not have");
    }
    return { kind: "text", at, text, broken: !isWellFormed(text) };
  }

  private object(depth: number): Node {
    const at = this.at;
    const entries: [string, Node][] = [];
    this.at += 1;
    this.space();
    if (this.text[this.at] === "}") {
      this.at += 1;
      return { kind: "object", at, entries };
    }
    for (;;) {
      this.space();
      if (this.text[this.at] !== '"') this.fail("a field's name was expected");
      const name = this.string().text;
      this.space();
      if (this.text[this.at] !== ":") this.fail("a colon was expected");
      this.at += 1;
      this.space();
      entries.push([name, this.value(depth + 1)]);
      this.space();
      const next = this.text[this.at];
      if (next !== "," && next !== "}") this.fail("a comma or a closing brace was expected");
      this.at += 1;
      if (next === "}") return { kind: "object", at, entries };
    }
  }

  private list(depth: number): Node {
    const at = this.at;
    const items: Node[] = [];
    this.at += 1;
    this.space();
    if (this.text[this.at] === "]") {
      this.at += 1;
      return { kind: "list", at, items };
    }
    for (;;) {
      this.space();
      items.push(this.value(depth + 1));
      this.space();
      const next = this.text[this.at];
      if (next !== "," && next !== "]") this.fail("a comma or a closing bracket was expected");
      this.at += 1;
      if (next === "]") return { kind: "list", at, items };
    }
  }
}

function isWellFormed(text: string): boolean {
  return !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text);
}

/** Line of the offset, from 1. */
export function lineOf(text: string, at: number): number {
  let line = 1;
  for (let from = text.indexOf("\n"); from >= 0 && from < at; from = text.indexOf("\n", from + 1)) line += 1;
  return line;
}

/** Equal values, equal text. */
export function canonical(value: Value): string {
  if (typeof value === "bigint") return canonical(Number(value));
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  // The default order of strings is that of their code units.
  const keys = Object.keys(value).sort();
  return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value[key] ?? null)}`).join(",")}}`;
}

/** The order of UTF-8 bytes, which is that of code points. */
export function byBytes(a: string, b: string): number {
  const left = [...a];
  const right = [...b];
  for (let i = 0; i < left.length && i < right.length; i += 1) {
    const order = (left[i]?.codePointAt(0) ?? 0) - (right[i]?.codePointAt(0) ?? 0);
    if (order !== 0) return order;
  }
  return left.length - right.length;
}
