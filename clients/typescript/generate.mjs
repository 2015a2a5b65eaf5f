// Makes src/gen, the messages and services of proto/gateway, and of the details that errors have. It is not checked in: the package has
// what is compiled from it. Made anew where the protos, this file or the compiler are others than last time.
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const proto = join(here, "../../proto");
const gen = join(here, "src/gen");

const files = (folder) =>
  readdirSync(folder, { recursive: true })
    .filter((name) => name.endsWith(".proto"))
    .sort()
    .map((name) => join(folder, name));

const made = createHash("sha256");
for (const file of ["generate.mjs", "package-lock.json"].map((name) => join(here, name))) made.update(readFileSync(file));
for (const file of [...files(join(proto, "gateway")), ...files(join(here, "proto"))]) made.update(readFileSync(file));
const digest = made.digest("hex");

if (!existsSync(join(gen, ".made")) || readFileSync(join(gen, ".made"), "utf8") !== digest) {
  rmSync(gen, { recursive: true, force: true });
  const bin = join(here, "node_modules/.bin");
  const template = JSON.stringify({
    version: "v2",
    plugins: [{ local: join(bin, "protoc-gen-es"), out: gen, opt: ["target=ts", "import_extension=js"] }],
  });
  const buf = (...input) => execFileSync(join(bin, "buf"), ["generate", ...input, "--template", template], { stdio: "inherit" });
  buf(proto, "--path", join(proto, "gateway"));
  buf(join(here, "proto"));
  writeFileSync(join(gen, ".made"), digest);
}
