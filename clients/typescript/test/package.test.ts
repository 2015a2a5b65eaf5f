/** What people copy runs as it stands, and what would be published is whole. */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { PACKAGE, until, World } from "./world.js";

let world: World;
before(async () => {
  world = await World.start();
});
after(() => world.close());

/** An example, with what it has said so far. */
function example(name: string): { said: string; ended: Promise<number | null>; stop: () => void } {
  const { address, ca, token } = world.at;
  const env = { ...process.env, GATEWAY_ADDRESS: address, GATEWAY_CA: ca, GATEWAY_TOKEN: token };
  const program = spawn(process.execPath, [join(PACKAGE, "examples", name)], { env, stdio: ["ignore", "pipe", "inherit"] });
  const running = {
    said: "",
    ended: new Promise<number | null>((resolve) => program.once("exit", resolve)),
    stop: () => void program.kill("SIGTERM"),
  };
  program.stdout.on("data", (text: Buffer) => (running.said += text.toString()));
  return running;
}

test("the tour runs as it stands, and as the README has it", async () => {
  await world.do("device", { id: "lamp", subscribe: ["lamp/#", "cmd/lamp/#"] });
  await world.do("device", { id: "meter" });
  await world.do("publish", { id: "meter", topic: "meter/power", count: 1 });
  await world.do("published", { id: "meter" });
  const tour = example("tour.mjs");
  assert.equal(await tour.ended, 0);
  assert.equal(tour.said, "ACKED\nthe lamp answers 200 pong 3\nmeter meter/power 1\n");
  const source = readFileSync(join(PACKAGE, "examples/tour.mjs"), "utf8");
  assert.ok(readFileSync(join(PACKAGE, "README.md"), "utf8").includes(source));
});

test("the example that consumes drains when it is told to end", async () => {
  const consume = example("consume.mjs");
  await until("it consumes", () => consume.said.includes("consuming"));
  await world.do("publish", { id: "meter", topic: "meter/power", count: 20 });
  await until("all came", () => consume.said.split("meter meter/power").length === 21);
  consume.stop();
  assert.equal(await consume.ended, 0);
  assert.ok(consume.said.endsWith("\n20 acknowledged\n"), consume.said);
});

test("the package has what is generated, its types and its licence", () => {
  const packed = execFileSync("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"], { cwd: PACKAGE, encoding: "utf8" });
  const files = (JSON.parse(packed) as [{ files: { path: string }[] }])[0].files.map(({ path }) => path);
  for (const wanted of ["dist/index.js", "dist/index.d.ts", "dist/gen/gateway/v1/groups_pb.js", "dist/hooks.d.ts", "LICENSE", "README.md"]) {
    assert.ok(files.includes(wanted), `${wanted} is not in ${files.join(" ")}`);
  }
  const licence = (folder: string) => readFileSync(join(folder, "LICENSE"), "utf8");
  assert.equal(licence(PACKAGE), licence(join(PACKAGE, "../..")));
  const own = (JSON.parse(readFileSync(join(PACKAGE, "package.json"), "utf8")) as { version: string }).version;
  const gateway = /^\[workspace\.package\][^[]*?^version = "([^"]+)"/ms.exec(readFileSync(join(PACKAGE, "../../Cargo.toml"), "utf8"));
  assert.equal(own, gateway?.[1]);
});
