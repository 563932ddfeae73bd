// The built `kv-router`, and where the repository is.

import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

/** Tests run in router/web. */
export const REPOSITORY = resolve(process.cwd(), "../..");
const target = process.env["CARGO_TARGET_DIR"] ?? join(REPOSITORY, "target");

/** A program of the workspace. */
export function program(name: string): string {
  const path = join(target, "debug", name);
  if (!existsSync(path)) throw new Error(`no ${path}: run \`cargo build --workspace --bins\` first`);
  return path;
}

export const scratch = mkdtempSync(join(tmpdir(), "kvrouter-web-"));

export const LAB = readFileSync(join(REPOSITORY, "tests/fixtures/traces/lab.json"), "utf8");

/** What `kv-router replay --json` writes for a trace. Throws with its words where it refuses. */
export function cli(trace: string, flags: string[] = []): string {
  const [input, output] = [join(scratch, "trace.json"), join(scratch, "ledger.json")];
  writeFileSync(input, trace);
  const all = ["replay", "--trace", input, "--json", output, ...flags];
  execFileSync(program("kv-router"), all, { stdio: ["ignore", "ignore", "pipe"] });
  return readFileSync(output, "utf8");
}
