// Bundles the tests that need no browser and runs them. They compare with the built `kv-router`, so build it first.

import { spawnSync } from "node:child_process";
import { build } from "esbuild";

const root = new URL("..", import.meta.url).pathname;
const names = process.argv.slice(2);
const all = names.length > 0 ? names : ["oracle"];
await build({
  entryPoints: all.map((name) => `test/${name}.test.ts`),
  outdir: "out/test",
  bundle: true,
  platform: "node",
  format: "esm",
  external: ["playwright-core", "axe-core"],
  sourcemap: "inline",
  absWorkingDir: root,
  outExtension: { ".js": ".mjs" },
});
const files = all.map((name) => `out/test/${name}.test.mjs`);
const done = spawnSync(process.execPath, ["--test", "--test-reporter=spec", "--enable-source-maps", ...files], {
  cwd: root,
  stdio: "inherit",
});
process.exit(done.status ?? 1);
