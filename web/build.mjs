// Bundle the page into the package: `node build.mjs [FOLDER]` writes the same bytes everywhere.
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { build } from "esbuild";

const out = path.resolve(process.argv[2] ?? "../python/entropykv/server/page/static");
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });

const result = await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  metafile: true,
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`src/${name}`, path.join(out, name));
await writeFile(path.join(out, "licenses.txt"), await licenses(result.metafile));

// The license of every package of which something is in the bundle.
async function licenses(metafile) {
  const folders = new Set();
  for (const input of Object.keys(metafile.inputs)) {
    const found = input.match(/^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//);
    if (found) folders.add(found[1]);
  }
  const parts = ["The page contains these packages, each under its own license."];
  for (const folder of [...folders].sort()) {
    const about = JSON.parse(await readFile(`${folder}/package.json`, "utf8"));
    const file = (await readdir(folder)).find((name) => /^licen[sc]e/i.test(name));
    if (!file) throw new Error(`${about.name} has no license file; look for its license`);
    const text = (await readFile(`${folder}/${file}`, "utf8")).trim();
    parts.push(`${about.name} ${about.version} (${about.license})\n\n${text}`);
  }
  return `${parts.join(`\n\n${"-".repeat(80)}\n\n`)}\n`;
}
