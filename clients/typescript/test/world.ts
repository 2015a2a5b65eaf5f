/** clients/testing/world.py: a gateway with devices and a bad network. GATEWAY is the binary; without it, that of `cargo build`. */
import { type ChildProcess, spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as after } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { type Client, connect, type ConnectOptions } from "../src/index.js";

/** The folder of the package; tests run from build/test. */
export const PACKAGE = join(dirname(fileURLToPath(import.meta.url)), "../..");
const SERVER = process.env["GATEWAY"] ?? join(PACKAGE, "../../target/debug/mqtt-server");

export class World {
  readonly #process: ChildProcess;
  readonly #folder: string;
  readonly #answers: AsyncIterator<string>;
  readonly #clients: Client[] = [];
  #last: Promise<unknown> = Promise.resolve();
  at!: { address: string; ca: string; token: string; certificate: string; key: string };

  private constructor() {
    this.#folder = mkdtempSync(join(tmpdir(), "world-"));
    const script = join(PACKAGE, "../testing/world.py");
    this.#process = spawn("python3", [script, SERVER, this.#folder], { stdio: ["pipe", "pipe", "inherit"] });
    this.#answers = createInterface({ input: this.#process.stdout! })[Symbol.asyncIterator]();
  }

  static async start(): Promise<World> {
    const world = new World();
    world.at = (await world.do("start")) as World["at"];
    return world;
  }

  /** Lets world.py do something; its answer. One after the other. */
  do(what: string, others: object = {}): Promise<unknown> {
    const answer = this.#last.then(async () => {
      this.#process.stdin!.write(`${JSON.stringify({ do: what, ...others })}\n`);
      const line = await this.#answers.next();
      if (line.done === true) throw new Error(`world.py has ended at ${what}`);
      return JSON.parse(line.value) as unknown;
    });
    this.#last = answer.catch(() => {});
    return answer;
  }

  async received(id: string, count: number): Promise<string[]> {
    return ((await this.do("received", { id, count })) as [string, string][]).map(([, payload]) => payload);
  }

  async proxy(): Promise<string> {
    return (await this.do("proxy")) as string;
  }

  async token(role: string, topics = "", expires = "1h"): Promise<string> {
    return (await this.do("token", { role, topics, expires })) as string;
  }

  /** A client, as an administrator unless options say who it is. */
  connect(options: ConnectOptions = { token: this.at.token }, address = this.at.address): Client {
    const client = connect(address, { ca: this.at.ca, ...options });
    this.#clients.push(client);
    return client;
  }

  async close(): Promise<void> {
    for (const client of this.#clients) client.close();
    const ended = new Promise((resolve) => this.#process.once("exit", resolve));
    this.#process.stdin!.end();
    await ended;
    rmSync(this.#folder, { recursive: true, force: true });
  }
}

/** Waits for a state, for a long time at most. */
export async function until(what: string, holds: () => boolean): Promise<void> {
  for (const end = Date.now() + 60_000; !holds(); await after(10)) {
    if (Date.now() > end) throw new Error(`not in time: ${what}`);
  }
}
