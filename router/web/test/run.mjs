// Bundles the tests and runs them: `oracle` with Node alone, `page` in Chromium where there is one. Both compare with
// the built `kv-router`, so build it first. Names as arguments select.

import { spawnSync } from "node:child_process";
import { appendFileSync, existsSync, mkdirSync } from "node:fs";
import { dirname } from "node:path";
import { build } from "esbuild";

const root = new URL("..", import.meta.url).pathname;
const chromium = process.env.CHROMIUM ?? "/usr/bin/chromium";
let names = process.argv.slice(2);
if (names.length === 0) {
  names = ["oracle", "page"];
  if (!existsSync(chromium)) {
    names.pop();
    console.log(`no ${chromium}: the tests in the browser do not run (apt-get install chromium, or set CHROMIUM)`);
    // `make check` tells at its end what did not run.
    const skipped = process.env.KVROUTER_SKIPPED;
    if (skipped) {
      mkdirSync(dirname(skipped), { recursive: true });
      appendFileSync(skipped, "web-test in the browser (no Chromium)\n");
    }
  }
}
await build({
  entryPoints: names.map((name) => `test/${name}.test.ts`),
  outdir: "out/test",
  bundle: true,
  platform: "node",
  format: "esm",
  external: ["playwright-core", "axe-core"],
  sourcemap: "inline",
  absWorkingDir: root,
  outExtension: { ".js": ".mjs" },
});
const files = names.map((name) => `out/test/${name}.test.mjs`);
const only = process.env.ONLY ? [`--test-name-pattern=${process.env.ONLY}`] : [];
const flags = ["--test", ...only, "--test-concurrency=1", "--test-reporter=spec", "--enable-source-maps"];
const done = spawnSync(process.execPath, [...flags, ...files], { cwd: root, stdio: "inherit" });
process.exit(done.status ?? 1);
