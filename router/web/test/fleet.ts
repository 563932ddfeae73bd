// A router in front of simulated engines, and somebody who talks to it.

import { spawn, type ChildProcess } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { program, REPOSITORY, scratch } from "./router.ts";

const TOKENIZER = join(REPOSITORY, "tests/fixtures/tokenizer");

export interface Fleet {
  http: string;
  admin: string;
  engines: string[];
  /** Ends one engine at once. */
  kill: (engine: string) => void;
  /** Sends one chat and says its request id. */
  chat: (id: string, words: string, salt?: string) => Promise<number>;
  stop: () => void;
}

/** Starts a program and waits for a line in which `find` finds something. */
export function start<T>(name: string, args: string[], find: (line: string) => T | null, env = {}): Promise<[ChildProcess, T]> {
  const child = spawn(program(name), args, { stdio: ["ignore", "pipe", "pipe"], env: { ...process.env, ...env } });
  return new Promise((resolve, reject) => {
    let said = "";
    let rest = "";
    const timer = setTimeout(() => reject(new Error(`${name} does not come up:\n${said}`)), 30_000);
    const read = (part: Buffer) => {
      said = (said + part).slice(-20_000);
      const lines = (rest + part).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        const found = find(line);
        if (found === null) continue;
        clearTimeout(timer);
        resolve([child, found]);
      }
    };
    child.stdout.on("data", read);
    child.stderr.on("data", read);
    child.once("exit", (code) => reject(new Error(`${name} ended with ${code}:\n${said}`)));
  });
}

export async function lab(args: string[] = []): Promise<{ url: string; stop: () => void }> {
  const [child, url] = await start("kv-router", ["lab", "--listen", "127.0.0.1:0", ...args], (line) => /^lab: (http:\S+)/.exec(line)?.[1] ?? null);
  return { url, stop: () => void child.kill() };
}

export async function fleet(count: number, token: string | null): Promise<Fleet> {
  const args = ["--wire", "vllm-0.33", "--model", "sim", "--tokenizer", TOKENIZER, "--prefill-tokens-per-second", "20000"];
  const address = (line: string) => {
    try {
      const said = JSON.parse(line) as { http: string; kv_events: string[]; replay: string[] };
      return said.http ? said : null;
    } catch {
      return null;
    }
  };
  const engines = await Promise.all(Array.from({ length: count }, () => start("engine-sim", args, address)));
  const tokenFile = join(scratch, "token");
  if (token !== null) writeFileSync(tokenFile, token);
  const config = join(scratch, "router.yaml");
  writeFileSync(
    config,
    JSON.stringify({
      schemaVersion: 1,
      pool: { name: "web" },
      model: { name: "sim", tokenizer: { path: TOKENIZER } },
      blockSize: 16,
      policy: "CachePlusLoad",
      shadowPolicies: ["KvAware", "RoundRobin"],
      listen: { http: "127.0.0.1:0", metrics: "127.0.0.1:0", admin: "127.0.0.1:0" },
      ...(token === null ? {} : { adminTokenFile: tokenFile }),
      kvEvents: { transport: "ZMQ" },
      discovery: {
        backend: "Static",
        workers: engines.map(([, said]) => ({
          url: `http://${said.http}`,
          kvEvents: { endpoint: said.kv_events[0], replayEndpoint: said.replay[0] },
        })),
      },
    }),
  );
  const serving = (line: string) => {
    const field = (name: string) => new RegExp(` ${name}=(\\S+)`).exec(line)?.[1] ?? "";
    return line.includes(" serving ") ? { http: field("http"), admin: field("admin") } : null;
  };
  const [router, { http, admin }] = await start("kv-router", ["serve", "--config", config], serving);
  const until = Date.now() + 30_000;
  for (;;) {
    const ready = await fetch(`http://${http}/readyz`).then((answer) => answer.ok, () => false);
    if (ready) break;
    if (Date.now() > until) throw new Error("the router does not get ready");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const chat = async (id: string, words: string, salt?: string) => {
    const answer = await fetch(`http://${http}/v1/chat/completions`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": id },
      body: JSON.stringify({ model: "sim", max_tokens: 8, messages: [{ role: "user", content: words }], ...(salt ? { cache_salt: salt } : {}) }),
    });
    await answer.arrayBuffer();
    return answer.status;
  };
  const stop = () => [router, ...engines.map(([child]) => child)].forEach((child) => child.kill("SIGKILL"));
  const kill = (engine: string) => void engines.find(([, said]) => said.http === engine)?.[0].kill("SIGKILL");
  return { http, admin: `http://${admin}`, engines: engines.map(([, said]) => said.http), kill, chat, stop };
}
