// The page in a real Chromium: what it shows is what kv-router computes, whatever it is given.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { chromium, type Browser, type BrowserContext, type Page } from "playwright-core";
import { fleet, lab, type Fleet } from "./fleet.ts";
import { generate, shuffle } from "./generate.ts";
import { cli, LAB, program, REPOSITORY, scratch } from "./router.ts";

const CHROMIUM = process.env["CHROMIUM"] ?? "/usr/bin/chromium";
/** Where screenshots go; `UPDATE_SCREENSHOTS=1` renews those of the documentation. */
const PICTURES = process.env["UPDATE_SCREENSHOTS"] ? join(REPOSITORY, "docs/img") : join(process.cwd(), "out/img");
mkdirSync(PICTURES, { recursive: true });

let browser: Browser;
let served: { url: string; stop: () => void };
/** What any page said that it should not have. */
const complaints: string[] = [];

before(async () => {
  assert.ok(existsSync(CHROMIUM), `no ${CHROMIUM}: apt-get install chromium, or set CHROMIUM`);
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--font-render-hinting=none"] });
  served = await lab();
});

after(async () => {
  served?.stop();
  await browser?.close();
  assert.deepEqual(complaints, [], "no page threw, broke its policy or reached for the network");
});

async function open(url: string, options: Parameters<Browser["newContext"]>[0] = {}): Promise<Page> {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, ...options });
  return watch(await context.newPage(), url);
}

async function watch(page: Page, url: string): Promise<Page> {
  // While one works on the page: its files from dist/, without building kv-router again.
  if (process.env["FROM_DIST"]) {
    await page.route(/page\.(js|css)$/, (route) => route.fulfill({ path: `dist/${new URL(route.request().url()).pathname.split("/").pop()}` }));
  }
  page.on("pageerror", (error) => complaints.push(`${error}`));
  page.on("console", (message) => {
    // A missing token is an answer, not a fault.
    if (message.type() === "error" && !message.text().includes("401")) complaints.push(message.text());
  });
  page.on("dialog", (dialog) => {
    complaints.push(`a dialog opened: ${dialog.message()}`);
    void dialog.dismiss();
  });
  await page.goto(url);
  await page.locator("main > *").first().waitFor();
  return page;
}

const digestOf = (ledger: string): string => (JSON.parse(ledger) as { digest: string }).digest;
const shown = (page: Page) => page.locator(".proof").getAttribute("data-digest");

async function openFile(page: Page, picker: "trace" | "ledger", name: string, text: string): Promise<void> {
  await page.setInputFiles(`#pick-${picker}`, { name, mimeType: "application/json", buffer: Buffer.from(text) });
}

/** Waits until kv-router was asked and says the same. */
async function equal(page: Page, digest: string, why: string): Promise<void> {
  await page.waitForFunction((wanted) => document.querySelector<HTMLElement>(".proof")?.dataset["digest"] === wanted, digest, { timeout: 5000 }).catch(async () => {
    assert.equal(await shown(page), digest, why);
  });
  await page.locator('.proof[data-proof="equal"]').waitFor({ timeout: 5000 });
}

async function axe(page: Page, why: string): Promise<void> {
  const source = readFileSync(join(process.cwd(), "node_modules/axe-core/axe.min.js"), "utf8");
  // Evaluated by the debugger, which no policy of the page binds.
  await page.evaluate(source);
  const found = (await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")) as {
    violations: { id: string; impact: string; nodes: { html: string; failureSummary: string }[] }[];
  };
  const serious = found.violations.filter((one) => ["serious", "critical"].includes(one.impact));
  const said = serious.map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.html} ${node.failureSummary}`).join("\n  ")}`);
  assert.deepEqual(said, [], why);
}

test("the lab trace: every policy, and the digest that kv-router prints", async () => {
  const page = await open(served.url);
  await equal(page, digestOf(cli(LAB)), "lab trace");
  const radios = page.locator('input[name="policy"]');
  assert.equal(await radios.count(), 6);
  for (const radio of await radios.all()) {
    await radio.check();
    const name = await radio.getAttribute("value");
    assert.equal(await page.locator(".requests tbody tr").count(), 24);
    await page.locator("#requests-title + .tag", { hasText: name ?? "" }).waitFor();
  }
  assert.match(await page.locator(".proof").innerText(), /agree on every byte: 144 decisions/);
  await page.context().close();
});

test("50 generated traces and their shuffled copies: digests equal to kv-router's", async () => {
  const page = await open(served.url);
  for (let seed = 1; seed <= 50; seed += 1) {
    const value = generate(seed);
    const digest = digestOf(cli(JSON.stringify(value)));
    await openFile(page, "trace", `generated-${seed}.json`, JSON.stringify(shuffle(value, seed)));
    await equal(page, digest, `seed ${seed}`);
  }
  await page.context().close();
});

test("moved settings are replayed at once, equal to kv-router's, and stand in the link", async () => {
  const page = await open(`${served.url}#r=r08&policy=kv-aware`);
  await page.locator("#s-queue").focus();
  for (let n = 0; n < 10; n += 1) await page.keyboard.press("ArrowRight");
  await page.locator("#s-maxQueued").fill("100");
  await page.locator("#s-coldReserve").fill("0.5");
  await page.locator("#s-budget").fill("2000");
  const flags = ["--policies", "cache-plus-load:queue=1,kv-aware,longest-prefix,least-load,round-robin,lmetric"];
  const digest = digestOf(cli(LAB, [...flags, "--max-queued-tokens", "100", "--cold-reserve", "0.5", "--budget-ms", "2000"]));
  await equal(page, digest, "moved settings");
  await page.waitForURL(/budget=2000/);
  await page.reload();
  await equal(page, digest, "after a reload");
  assert.equal(await page.locator("#decision-title .mono").first().innerText(), "r08");
  assert.ok(await page.locator('input[value="kv-aware"]').isChecked());
  await page.context().close();
});

test("what is exported is what kv-router writes", async () => {
  const page = await open(served.url);
  const save = async (name: string) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name }).click()]);
    return readFileSync(await download.path(), "utf8");
  };
  const ledger = cli(LAB);
  assert.equal(await save("Export JSON"), ledger);
  const rows = (await save("Export CSV")).trimEnd().split("\r\n");
  assert.equal(rows.length, 1 + 6 * 24 * 3);
  assert.ok(rows.slice(1).every((row) => row.endsWith(digestOf(ledger))), "each row names its ledger");
  await page.context().close();
});

test("each mutant is seen as a difference, in the fields that it breaks", async () => {
  const page = await open(served.url);
  const expected: [string, RegExp][] = [
    ["tenant-scope-removed", /r21[\s\S]*candidates\[1\]\.claimed: 0 here, 12 there/],
    ["older-epoch-accepted", /r17[\s\S]*candidates\[0\]\.claimed: 8 here, 0 there/],
    ["decode-load-ignored", /r01[\s\S]*candidates\[2\]\.load\.context: 900 here, 0 there/],
    ["state-shared", /r01[\s\S]*first_byte_tick/],
    ["candidates-dropped", /r01[\s\S]*candidates/],
  ];
  for (const [name, field] of expected) {
    const text = readFileSync(join(REPOSITORY, `tests/fixtures/traces/lab-mutants/${name}.json`), "utf8");
    await openFile(page, "ledger", `${name}.json`, text);
    await page.locator('.proof[data-proof="differs"]', { hasText: name }).waitFor();
    assert.match(await page.locator(".differences").innerText(), field, name);
  }
  await openFile(page, "ledger", "mine.json", cli(LAB, ["--policies", "kv-aware"]));
  await page.locator('.proof[data-proof="equal"]', { hasText: "24 decisions" }).waitFor();
  await openFile(page, "ledger", "forged.json", cli(LAB).replace('"hit_count":15', '"hit_count":16'));
  await page.getByRole("alert").filter({ hasText: "forged.json has another digest than it says" }).waitFor();
  await page.context().close();
});

test("bad traces: line and field are named, and the former trace stays", async () => {
  const page = await open(served.url);
  const good = await shown(page);
  const noise = Buffer.alloc(50 << 20, "x");
  const cases: [string, string | Buffer, RegExp][] = [
    ["negative", LAB.replace('"active_decode_tokens": 900', '"active_decode_tokens": -1'), /line 7: workers\[2\]\.active_decode_tokens: must be a whole number/],
    ["unknown", LAB.replace('"seq": 10, "worker": "w1"', '"seq": 10, "worker": "w9"'), /line 10: events\[0\]\.worker: names "w9"/],
    ["duplicate", LAB.replace('"r02"', '"r01"'), /line 24: requests\[1\]\.id: "r01" is used twice/],
    ["epoch", LAB.replace('"epoch": 3', '"epoch": 3.5'), /line 6: workers\[1\]\.epoch: must be a whole number/],
    ["namespace", LAB.replace('"seq": 101, "tenant": "acme",', '"seq": 101,'), /line 24: requests\[1\]\.tenant: is missing/],
    ["long", LAB.replace('"prompt_tokens": 330', '"prompt_tokens": 9000'), /line 31: requests\[8\]\.prompt_tokens: is 9000, and the limit is 8192/],
    ["cut", LAB.slice(0, 4000), /line \d+: object: is not JSON: the text ends early/],
    ["noise", noise, /line 1: file: has 52,428,800 bytes, and the limit is 16,777,216/],
    ["binary", Buffer.from([0xff, 0xfe, 0x00, 0x7b]), /line 1: object: is not JSON/],
    ["empty", "", /line 1: object: is not JSON/],
  ];
  const path = join(scratch, "bad.json");
  for (const [why, content, message] of cases) {
    writeFileSync(path, content);
    await page.setInputFiles("#pick-trace", path);
    await page.getByRole("alert").filter({ hasText: message }).waitFor({ timeout: 5000 });
    assert.equal(await shown(page), good, why);
    assert.equal(await page.locator(".requests tbody tr").count(), 24, why);
  }
  await page.context().close();
});

test("names in a trace never become markup, in the page, in a link and in an exported file", async () => {
  const name = '<img src=x onerror=alert(1)>';
  const evil = LAB.replaceAll('"w1"', JSON.stringify(name)).replaceAll('"r01"', '"</script><script>alert(2)</script>"').replaceAll('"acme"', '"<b>acme</b>"');
  const page = await open(served.url);
  await openFile(page, "trace", "<img src=x onerror=alert(3)>.json", evil);
  await equal(page, digestOf(cli(evil)), "evil");
  await page.locator(".requests button.open").first().click();
  assert.ok((await page.locator(".candidates").innerText()).includes(name), "it is shown as it is");
  assert.equal(await page.locator("main img, main b, main script").count(), 0);
  const file = join(scratch, "evil.json");
  writeFileSync(file, evil);
  const exported = join(scratch, "evil.html");
  execFileSync(program("kv-router"), ["lab", "--trace", file, "--export", exported]);
  const other = await open(`file://${exported}#r=%3Cimg%20src%3Dx%20onerror%3Dalert(4)%3E`, { offline: true });
  await other.getByRole("alert").filter({ hasText: "has no request “<img src=x onerror=alert(4)>”" }).waitFor();
  assert.equal(await other.locator("main img, main b, main script").count(), 0);
  await page.context().close();
  await other.context().close();
});

test("the exported file works from disk without a network, and its digests match", async () => {
  const exported = join(scratch, "lab.html");
  execFileSync(program("kv-router"), ["lab", "--export", exported]);
  const page = await open(`file://${exported}`, { offline: true });
  await equal(page, digestOf(cli(LAB)), "exported");
  await page.locator("#s-queue").fill("2");
  await page.locator('.proof[data-proof="none"]', { hasText: "kv-router replay --trace lab.json --policies cache-plus-load:queue=2," }).waitFor();
  await page.context().close();
  const policy = /http-equiv="Content-Security-Policy" content="([^"]+)"/.exec(readFileSync(exported, "utf8"))?.[1] ?? "";
  assert.match(policy, /default-src 'none'; script-src 'sha256-[^']+'; style-src 'sha256-[^']+';/);
});

test("everything can be done with the keyboard", async () => {
  const page = await open(served.url);
  const tabTo = async (wanted: (element: string) => boolean, limit = 60) => {
    for (let n = 0; n < limit; n += 1) {
      await page.keyboard.press("Tab");
      const at = await page.evaluate(() => {
        const one = document.activeElement;
        return one ? `${one.id}|${one.className}|${one.getAttribute("name") ?? ""}|${one.textContent?.trim().slice(0, 30)}` : "";
      });
      if (wanted(at)) return at;
    }
    return assert.fail("the element cannot be reached");
  };
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement?.className), "skip");
  await tabTo((at) => at.includes("Open a trace"));
  await tabTo((at) => at.startsWith("s-queue|"));
  const digest = await shown(page);
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await shown(page), digest, "a slider moves the replay");
  await tabTo((at) => at.includes("|policy|"));
  await page.keyboard.press("ArrowDown");
  assert.ok(await page.locator('input[value="kv-aware"]').isChecked());
  await tabTo((at) => at.endsWith("Stale eviction"));
  await page.keyboard.press("Enter");
  await page.getByText("An eviction of w1's former life").waitFor();
  await tabTo((at) => at.startsWith("open-r01|"));
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement?.id), "decision-title", "the focus follows what was opened");
  await page.waitForURL(/r=r02/);
  await tabTo((at) => at.endsWith("|Close"));
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => document.activeElement?.id === "open-r02");
  await page.context().close();
});

test("axe finds no serious fault: light and dark, wide and narrow, open and differing", async () => {
  for (const colorScheme of ["light", "dark"] as const) {
    for (const width of [1280, 390]) {
      const page = await open(`${served.url}#r=r21&scene=tenant`, { colorScheme, viewport: { width, height: 860 } });
      await equal(page, digestOf(cli(LAB)), "lab trace");
      await axe(page, `${colorScheme}, ${width}`);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `no sideways scrolling at ${width}`);
      const mutant = readFileSync(join(REPOSITORY, "tests/fixtures/traces/lab-mutants/tenant-scope-removed.json"), "utf8");
      await openFile(page, "ledger", "mutant.json", mutant);
      await page.locator(".differences").waitFor();
      await axe(page, `differences, ${colorScheme}, ${width}`);
      await page.context().close();
    }
  }
});

test("pages of other origins get nothing, and the policy is strict", async () => {
  const answer = await fetch(served.url);
  const policy = answer.headers.get("content-security-policy") ?? "";
  assert.match(policy, /default-src 'none'; script-src 'self'; style-src 'self';/);
  assert.doesNotMatch(policy, /unsafe/);
  const asks = async (headers: Record<string, string>) => (await fetch(`${served.url}lab.json`, { headers })).status;
  assert.equal(await asks({}), 200);
  assert.equal(await asks({ origin: "http://evil.example" }), 403);
  assert.equal(await asks({ "sec-fetch-site": "cross-site" }), 403);
  const other = createServer((_, response) => response.setHeader("content-type", "text/html").end("<main><p>other</p></main>"));
  await new Promise<void>((resolve) => other.listen(0, "localhost", resolve));
  const { port } = other.address() as { port: number };
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.goto(`http://localhost:${port}/`);
  const got = await page.evaluate(async (url) => {
    const read = await fetch(`${url}lab.json`).then((found) => found.text(), () => "refused");
    const posted = await fetch(`${url}replay`, { method: "POST", mode: "no-cors", body: "{}" }).then((found) => found.type, () => "refused");
    return { read, posted };
  }, served.url);
  assert.deepEqual(got, { read: "refused", posted: "opaque" }, "nothing can be read");
  await context.close();
  other.close();
});

const SHOTS: [string, string, string | null, number][] = [
  ["lab", "#scene=cold", null, 1280],
  ["lab-decision", "#r=r08&scene=warm", ".decision", 1280],
  ["lab-stale", "#r=r24&scene=tenant&policy=kv-aware&budget=5000", ".decision", 1280],
  ["lab-tenant", "#r=r21&scene=tenant", ".decision", 1280],
  ["lab-narrow", "#r=r17&scene=stale", null, 390],
];

async function picture(page: Page, name: string, part: string | null): Promise<void> {
  // A moment for charts to draw; the page must not be scrolled to its focus.
  await page.evaluate(() => scrollTo(0, 0));
  await page.waitForTimeout(250);
  const path = join(PICTURES, `${name}.png`);
  if (part === null) await page.screenshot({ path });
  else await page.locator(part).screenshot({ path });
  // Those that are committed should be small; without the program they are merely larger.
  if (process.env["UPDATE_SCREENSHOTS"]) spawnSync("pngquant", ["--force", "--ext", ".png", "--speed", "1", "--strip", "48", path]);
}

test("screenshots of the lab in both themes", async () => {
  for (const colorScheme of ["light", "dark"] as const) {
    for (const [name, hash, part, width] of SHOTS) {
      const page = await open(served.url + hash, { colorScheme, viewport: { width, height: width < 600 ? 1400 : 1000 } });
      await page.locator('.proof[data-proof="equal"]').waitFor();
      await picture(page, `${name}-${colorScheme}`, part);
      await page.context().close();
    }
    const page = await open(served.url, { colorScheme });
    const mutant = readFileSync(join(REPOSITORY, "tests/fixtures/traces/lab-mutants/older-epoch-accepted.json"), "utf8");
    await openFile(page, "ledger", "other-build.json", mutant);
    await page.locator(".differences").waitFor();
    await picture(page, `lab-differs-${colorScheme}`, "section:has(> #differences-title)");
    await page.context().close();
  }
});

/** Talks until it is told to stop: some conversations with a shared beginning. */
function talk(to: Fleet): () => Promise<void> {
  let stopped = false;
  const system = "You are a patient helper who answers in one sentence. ".repeat(12);
  const user = async (number: number) => {
    for (let turn = 0; !stopped; turn += 1) {
      const salt = number % 3 === 0 ? "other-tenant" : undefined;
      await to.chat(`talk-${number}-${turn}`, `${system} zebrafish-${number} ${"more words ".repeat(turn % 9)}`, salt).catch(() => 0);
      await new Promise((resolve) => setTimeout(resolve, 30));
    }
  };
  const users = Array.from({ length: 6 }, (_, number) => user(number));
  return async () => {
    stopped = true;
    await Promise.all(users);
  };
}

test("the explorer on a running router: token, receipts, why, one namespace, a killed worker within 2 s", async () => {
  const running = await fleet(4, "s3cret");
  const quiet = talk(running);
  const heard: string[] = [];
  try {
    const page = await open(`${running.admin}/explorer`, { viewport: { width: 1280, height: 1000 } });
    page.on("response", async (response) => {
      if (response.url().includes("/v1/admin/")) heard.push(await response.text().catch(() => ""));
    });
    await page.getByLabel("Token").fill("wrong");
    await page.getByRole("button", { name: "Connect" }).click();
    await page.getByText("That token was refused").waitFor();
    await page.getByLabel("Token").fill("s3cret");
    await page.getByRole("button", { name: "Connect" }).click();
    await page.locator(".workers tbody tr[data-worker]").nth(3).waitFor();
    await page.locator(".stream tbody button.open").nth(20).waitFor({ timeout: 15_000 });
    await page.waitForTimeout(2500);
    // One namespace at a time.
    const options = page.getByLabel("Namespace").locator("option");
    await options.nth(1).waitFor({ state: "attached", timeout: 10_000 });
    const both = await options.evaluateAll((all) => all.map((one) => (one as HTMLOptionElement).value));
    const ids = (text: string) => new Set([...text.matchAll(/talk-(\d)-/g)].map((found) => Number(found[1]) % 3 === 0));
    for (const namespace of both) {
      await page.getByLabel("Namespace").selectOption(namespace);
      // The former tenant's receipts go at once, this one's come with the next answer.
      await page.waitForTimeout(1200);
      await page.locator(".stream tbody button.open").nth(5).waitFor();
      assert.equal(ids(await page.locator(".stream tbody").innerText()).size, 1, "one tenant's receipts");
    }
    // Why did this request go there?
    const id = await page.locator(".stream tbody button.open").nth(4).innerText();
    await page.getByPlaceholder("Request id, from").fill(id);
    await page.getByRole("button", { name: "Explain" }).click();
    await page.locator(".decision .candidates tbody tr").nth(3).waitFor();
    await page.waitForURL(/r=talk/);
    await page.reload();
    await page.locator("#decision-title", { hasText: id }).waitFor();
    assert.ok(await page.locator(".decision").innerText().then((text) => text.includes("Shadow policies")));
    await axe(page, "explorer");
    await page.getByRole("button", { name: "Close" }).click();
    // What it saves, kv-router repeats.
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Save receipts" }).click()]);
    const saved = join(scratch, "receipts.jsonl");
    writeFileSync(saved, readFileSync(await download.path()));
    const table = execFileSync(program("kv-router"), ["replay", "--trace", saved], { encoding: "utf8" });
    assert.match(table, /cache-plus-load/);
    const replayed = await open(served.url);
    await replayed.setInputFiles("#pick-trace", saved);
    await replayed.locator('[data-repeated="0"]').waitFor();
    const ledgerFile = join(scratch, "recorded.json");
    const ask = async (flags: string[]) => {
      execFileSync(program("kv-router"), ["replay", "--trace", saved, "--json", ledgerFile, ...flags], { stdio: "ignore" });
      await replayed.setInputFiles("#pick-ledger", ledgerFile);
      await equal(replayed, digestOf(readFileSync(ledgerFile, "utf8")), `receipts ${flags.join(" ")}`);
    };
    await ask([]);
    await replayed.locator("#s-queue").fill("2");
    await ask(["--policies", "cache-plus-load:queue=2,kv-aware,longest-prefix,least-load,round-robin,lmetric"]);
    await axe(replayed, "receipts");
    const spoilt = readFileSync(saved, "utf8").replace('"tie":"none"', '"tie":"session"');
    await replayed.setInputFiles("#pick-trace", { name: "spoilt.jsonl", mimeType: "application/json", buffer: Buffer.from(spoilt) });
    await replayed.getByRole("alert").filter({ hasText: /line \d+: digest: is not that of the line/ }).waitFor();
    await replayed.context().close();
    // A worker dies.
    const victim = running.engines[1] ?? "";
    const began = Date.now();
    running.kill(victim);
    await page.locator(".news li.bad", { hasText: victim }).first().waitFor({ timeout: 5000 });
    const took = Date.now() - began;
    console.log(`a killed worker was shown after ${took} ms`);
    assert.ok(took <= 2000, `shown after ${took} ms`);
    await page.locator(`tr[data-worker="${victim}"][data-ready="false"]`).waitFor({ timeout: 8000 });
    await page.waitForTimeout(1500);
    for (const colorScheme of ["light", "dark"] as const) {
      await page.emulateMedia({ colorScheme });
      await picture(page, `lab-explorer-${colorScheme}`, null);
      await picture(page, `lab-workers-${colorScheme}`, "section:has(> .workers-box)");
    }
    assert.ok(!heard.some((text) => text.includes("zebrafish") || text.includes("patient helper")), "no prompt text");
    assert.equal((await fetch(`${running.admin}/v1/admin/live`)).status, 401);
    assert.equal((await fetch(`${running.admin}/v1/admin/live`, { headers: { authorization: "Bearer s3cret", origin: "http://evil.example" } })).status, 403);
    await page.context().close();
  } finally {
    // Pages first: they would go on asking.
    await Promise.all(browser.contexts().map((context) => context.close()));
    await quiet();
    running.stop();
  }
});

test("the explorer stays smooth with 2,000 workers and 200 receipts a second", async () => {
  const running = await fleet(1, null);
  const context: BrowserContext = await browser.newContext({ viewport: { width: 1280, height: 1000 } });
  try {
    const began = Date.now();
    let filed = 0;
    await context.route("**/v1/admin/live?**", async (route) => {
      const now = Date.now();
      const all = Math.floor((now - began) / 5) + 1000;
      const worker = (n: number) => `10.0.${n >> 8}.${n & 255}:8000`;
      const fresh = Math.min(1000, all - filed + 200);
      filed = all;
      const workers = Array.from({ length: 2000 }, (_, n) => [worker(n), "Mixed", n !== 1234, n === 1234 ? "unreachable" : "ok", "vllm", [[0, "exact", "ok", true, 1_795_970_300_559, all + n, (n * 7) % 900, 4000 + n, n % 80, (n * 37) % 4000, (n * 91) % 50_000, n % 30]]]);
      const receipts = Array.from({ length: fresh }, (_, n) => {
        const number = all - n;
        return [`req-${number}`, 1, began + (number - 1000) * 5, "Mixed", "cache-plus-load", 3000, 187, number % 9 ? "hit" : "cold", `${worker((number * 31) % 2000)}#0`, "none", number % 9 ? 2400 : 0, [["kv-aware", worker(3) + "#0", number % 3 ? 0 : 4]], 200, null, 35, 3000, number % 9 ? 2384 : 0];
      });
      const body = { now_unix_ms: now, pool: "default/large", router_version: "0.1.0", policy: "cache-plus-load", block_size: 16, ready: true, filed: all, workers, problems: [], problem_count: 0, namespaces: { ["a".repeat(32)]: fresh }, receipts };
      await route.fulfill({ status: 200, contentType: "application/json", body: JSON.stringify(body) });
    });
    const page = await watch(await context.newPage(), `${running.admin}/explorer`);
    await page.locator(".workers tbody tr[data-worker]").nth(3).waitFor();
    assert.equal(await page.locator(".workers tbody tr[data-worker]").first().getAttribute("data-ready"), "false", "the worst one is on top");
    await page.waitForTimeout(3000);
    const frames = await page.evaluate(async () => {
      const box = document.querySelector(".workers-box") as HTMLElement;
      const times: number[] = [];
      let last = performance.now();
      const end = last + 5000;
      let place = 0;
      while (last < end) {
        await new Promise((resolve) => requestAnimationFrame(resolve));
        const now = performance.now();
        times.push(now - last);
        last = now;
        box.scrollTop = place += 90;
      }
      return times.sort((a, b) => a - b);
    });
    const at = (part: number) => frames[Math.min(frames.length - 1, Math.floor(frames.length * part))] ?? 0;
    const said = `frames while scrolling: p50 ${at(0.5).toFixed(0)} ms, p95 ${at(0.95).toFixed(0)} ms, worst ${at(1).toFixed(0)} ms`;
    console.log(said);
    assert.ok(at(0.5) <= 34 && at(1) <= 500, said);
    assert.ok((await page.locator(".workers tbody tr").count()) < 60, "only rows in sight are drawn");
    await page.context().close();
  } finally {
    running.stop();
  }
});
