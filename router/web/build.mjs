// Builds the page into dist/: one script, one style sheet, one document. cargo embeds what it finds there.

import { cp, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const dist = new URL("dist/", import.meta.url);
// The folder stays: cargo looks at it, and a folder that comes and goes would make it build anew.
for (const name of await readdir(dist)) if (name !== ".gitignore") await rm(new URL(name, dist), { recursive: true });

await build({
  entryPoints: [{ in: "src/page/main.tsx", out: "page" }],
  outdir: "dist",
  bundle: true,
  jsx: "automatic",
  jsxImportSource: "preact",
  minify: true,
  charset: "utf8",
  target: ["es2022"],
  legalComments: "none",
  absWorkingDir: new URL(".", import.meta.url).pathname,
});
const licences = await Promise.all(
  ["preact", "uplot", "@noble/hashes", "xxh3-ts", "buffer", "base64-js", "ieee754"].map(async (name) => {
    const folder = new URL(`node_modules/${name}/`, import.meta.url);
    const { version } = JSON.parse(await readFile(new URL("package.json", folder), "utf8"));
    return `${name} ${version}\n\n${await readFile(new URL("LICENSE", folder), "utf8")}`;
  }),
);
await writeFile(new URL("licences.txt", dist), licences.join("\n----\n\n"));
await cp(new URL("src/page/index.html", import.meta.url), new URL("index.html", dist));
for (const name of ["index.html", "page.js", "page.css"]) {
  const bytes = await readFile(new URL(name, dist));
  console.log(`dist/${name}: ${bytes.length} bytes, ${gzipSync(bytes).length} compressed`);
}
