/** A member of a group keeps what it promises, whatever becomes of the gateway. */
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { type Client, type Delivery, GiveBack } from "../src/index.js";
import { until, World } from "./world.js";

let world: World;
before(async () => {
  world = await World.start();
});
after(() => world.close());

async function makeGroup(client: Client, name: string, others: object = {}): Promise<void> {
  const group = { name, filter: { topicFilters: [`${name}/#`] }, minBackoff: durationFromMs(20), ...others };
  await client.stubs.groups.createGroup({ group });
}

/** What handlers have seen. */
class Judge {
  readonly seen = new Map<string, number>();
  readonly numbers = new Map<string, number[]>();
  readonly #running = new Set<string>();

  readonly handle = async (delivery: Delivery): Promise<void> => {
    const device = delivery.deviceId;
    assert.ok(!this.#running.has(device), `two messages of ${device} at once`);
    this.#running.add(device);
    await sleep(1);
    this.#running.delete(device);
    this.seen.set(delivery.messageId, (this.seen.get(delivery.messageId) ?? 0) + 1);
    this.numbers.set(device, [...(this.numbers.get(device) ?? []), Number(delivery.text)]);
  };

  /** Each number at its first sight. A device that was unsure sent a number twice, in two messages. */
  first(device: string): number[] {
    return [...new Set(this.numbers.get(device))];
  }

  complete(devices: string[], count: number): boolean {
    return devices.every((device) => this.first(device).length >= count);
  }

  /** Each message once, none missing, and in order. */
  check(devices: string[], count: number): void {
    assert.deepEqual([...this.seen].filter(([, times]) => times > 1), []);
    const all = Array.from({ length: count }, (_, at) => at + 1);
    for (const device of devices) assert.deepEqual(this.first(device), all, device);
  }
}

test("a killed gateway loses, repeats and reorders nothing", async () => {
  const [judge, count] = [new Judge(), 600];
  const devices = [1, 2, 3, 4].map((number) => `killed-${number}`);
  const client = world.connect();
  await makeGroup(client, "killed");
  const consumer = client.consume("killed", judge.handle, { concurrency: 3 });
  const run = consumer.run();
  for (const id of devices) {
    await world.do("device", { id });
    await world.do("publish", { id, topic: `killed/${id}`, count, pace: 0.002 });
  }
  for (const share of [0.2, 0.5, 0.8]) {
    await until("some are handled", () => judge.seen.size >= share * count * devices.length);
    await world.do("kill");
    await world.do("start");
  }
  await until("all are handled", () => judge.complete(devices, count));
  for (const id of devices) await world.do("published", { id });
  await consumer.drain();
  await run;
  judge.check(devices, count);
  assert.ok(consumer.reconnects >= 3);
  const { group } = await client.stubs.groups.getGroup({ name: "killed" });
  assert.equal(group?.status?.lagMessages, 0n);
});

test("what fails comes again before what came later", async () => {
  const client = world.connect();
  await makeGroup(client, "failing");
  const failed = new Set<string>();
  const order: string[] = [];
  const consumer = client.consume("failing", ({ text }) => {
    if (Number(text) % 5 === 0 && !failed.has(text)) {
      failed.add(text);
      throw new GiveBack("not now");
    }
    order.push(text);
  });
  const run = consumer.run();
  await world.do("device", { id: "failing" });
  await world.do("publish", { id: "failing", topic: "failing/x", count: 60 });
  await until("all are handled", () => order.length >= 60);
  await consumer.drain();
  await run;
  assert.deepEqual(order, Array.from({ length: 60 }, (_, at) => String(at + 1)));
  assert.equal(failed.size, 12);
});

test("what fails for good is a dead letter with its reason", async () => {
  const client = world.connect();
  await makeGroup(client, "poison", { maxAttempts: 2 });
  const attempts: number[] = [];
  const consumer = client.consume("poison", ({ text, attempt }) => {
    if (text !== "1") return;
    attempts.push(attempt);
    throw new TypeError("no number");
  });
  const run = consumer.run();
  await world.do("device", { id: "poison" });
  await world.do("publish", { id: "poison", topic: "poison/x", count: 3 });
  await until("the others are handled", () => consumer.handled >= 2);
  await consumer.drain();
  await run;
  const { deadLetters } = await client.stubs.groups.listDeadLetters({ name: "poison" });
  assert.deepEqual(deadLetters.map(({ reason }) => reason), ["TypeError: no number"]);
  assert.deepEqual(attempts, [1, 2]);
});

test("a member that drains leaves nothing undone", async () => {
  const [judge, count] = [new Judge(), 300];
  const devices = [1, 2, 3, 4, 5, 6].map((number) => `drained-${number}`);
  const client = world.connect();
  await makeGroup(client, "drained");
  const stop = new AbortController();
  const leaving = client.consume("drained", judge.handle, { maxOutstanding: 50, signal: stop.signal });
  const leaves = leaving.run();
  await leaving.joined;
  const staying = client.consume("drained", judge.handle);
  const stays = staying.run();
  await staying.joined;
  for (const id of devices) {
    await world.do("device", { id });
    await world.do("publish", { id, topic: `drained/${id}`, count, pace: 0.001 });
  }
  await until("the first has some", () => leaving.handled > 100);
  stop.abort();
  await leaves;
  const gone = leaving.handled;
  assert.equal(leaving.confirmed, gone, "what was handled is acknowledged, on disk");
  await until("all are handled", () => judge.complete(devices, count));
  await staying.drain();
  await stays;
  judge.check(devices, count);
});

test("work that outlives its stream is not begun twice", async () => {
  const client = world.connect({ token: world.at.token }, await world.proxy());
  await makeGroup(client, "outlives");
  const begun: string[] = [];
  let goOn: () => void = () => {};
  const gate = new Promise<void>((resolve) => (goOn = resolve));
  const consumer = client.consume("outlives", async ({ text }) => {
    begun.push(text);
    await gate;
  });
  const run = consumer.run();
  await world.do("device", { id: "outlives" });
  await world.do("publish", { id: "outlives", topic: "outlives/x", count: 2 });
  await until("it has begun", () => begun.length === 1);
  await world.do("cut");
  await world.do("publish", { id: "outlives", topic: "outlives/x", count: 1 });
  // The new stream has brought what the old one had, and more.
  await until("all have come again", () => consumer.reconnects === 1 && consumer.held === 3);
  assert.deepEqual(begun, ["1"]);
  goOn();
  await until("all are acknowledged", () => consumer.confirmed === 3);
  await consumer.drain();
  await run;
  assert.deepEqual(begun, ["1", "2", "3"]);
});

for (const ended of ["stop", "kill"]) {
  test(`what two members work on is begun once over a restart by ${ended}`, async () => {
    const [client, group] = [world.connect(), `restart-${ended}`];
    await makeGroup(client, group);
    const begun: string[] = [];
    let goOn: () => void = () => {};
    const gate = new Promise<void>((resolve) => (goOn = resolve));
    const handle = async ({ deviceId }: Delivery): Promise<void> => {
      begun.push(deviceId);
      await gate;
    };
    const members = [1, 2].map(() => client.consume(group, handle, { leaseMs: 20_000 }));
    const runs = members.map((member) => member.run());
    await Promise.all(members.map((member) => member.joined));
    const devices = Array.from({ length: 10 }, (_, number) => `${group}-${number}`);
    for (const id of devices) {
      await world.do("device", { id });
      await world.do("publish", { id, topic: `${group}/x`, count: 1 });
    }
    await until("all have begun", () => begun.length === 10 && members.every((member) => member.held > 0));
    await world.do(ended);
    await world.do("start");
    await until("both are back", () => members.every((member) => member.reconnects > 0));
    // What is published now is behind whatever would come again.
    for (const id of devices) {
      await world.do("publish", { id, topic: `${group}/x`, count: 1 });
      await world.do("published", { id });
    }
    await until("all have come", () => members.reduce((sum, member) => sum + member.held, 0) === 20);
    assert.equal(begun.length, 10, "begun twice");
    goOn();
    await until("all are acknowledged", () => members.reduce((sum, member) => sum + member.confirmed, 0) === 20);
    assert.equal(begun.length, 20);
    for (const member of members) await member.drain();
    await Promise.all(runs);
  });
}

test("work longer than the lease is done once", async () => {
  const client = world.connect();
  await makeGroup(client, "slow", { ackDeadline: durationFromMs(1_000) });
  const attempts: number[] = [];
  const consumer = client.consume("slow", async ({ attempt }) => {
    attempts.push(attempt);
    if (attempts.length > 1) return;
    // Three leases: this is what the test is about, not how it waits.
    await sleep(3_000);
    throw new GiveBack("once more, to see the attempt");
  });
  const run = consumer.run();
  await world.do("device", { id: "slow" });
  await world.do("publish", { id: "slow", topic: "slow/x", count: 1 });
  await until("it is acknowledged", () => consumer.confirmed === 1);
  await consumer.drain();
  await run;
  assert.deepEqual(attempts, [1, 2]);
});
