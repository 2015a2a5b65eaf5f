/** Each call does what it says, and what fails is told by code and reason. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Code, GatewayError, type Reason, v1 } from "../src/index.js";
import { World } from "./world.js";

let world: World;
before(async () => {
  world = await World.start();
});
after(() => world.close());

/** How it failed. */
async function failure(call: Promise<unknown>, code: Code, reason: Reason): Promise<GatewayError> {
  try {
    await call;
  } catch (thrown) {
    assert.ok(thrown instanceof GatewayError, String(thrown));
    assert.deepEqual([Code[thrown.code], thrown.reason], [Code[code], reason], thrown.message);
    return thrown;
  }
  throw new Error("it did not fail");
}

async function next<T>(items: AsyncGenerator<T>): Promise<T> {
  const result = await items.next();
  assert.ok(!result.done, "the stream has ended");
  return result.value as T;
}

const text = (payload: Uint8Array) => new TextDecoder().decode(payload);

test("publish tells the outcome", async () => {
  await world.do("device", { id: "ear", subscribe: ["told/#"] });
  const client = world.connect();
  assert.equal((await client.publish({ topic: "nobody/here", payload: "x" })).outcome, v1.Outcome.NO_MATCH);
  const acked = await client.publishAndWait({ topic: "told/x", payload: "on" });
  assert.deepEqual([acked.outcome, acked.sent], [v1.Outcome.ACKED, 1]);
  const alone = await client.publishAndWait({ deviceId: "ear", topic: "any", payload: "y", wait: v1.Wait.SENT });
  assert.equal(alone.outcome, v1.Outcome.SENT);
  assert.deepEqual(await world.received("ear", 2), ["on", "y"]);
});

test("a publish over a cut connection is published once", async () => {
  await world.do("device", { id: "once", subscribe: ["once/#"] });
  const client = world.connect({ token: world.at.token }, await world.proxy());
  const topic = "once/x";
  await client.publishAndWait({ topic, payload: "1" });
  await world.do("swallow");
  const waiting = client.publishAndWait({ topic, payload: "2" });
  await world.received("once", 2);
  await world.do("cut");
  assert.equal((await waiting).outcome, v1.Outcome.ACKED);
  // Without a key there is nothing to know it by, and the failure is told.
  await world.do("swallow");
  const sending = failure(client.publish({ topic, payload: "3" }), Code.Unavailable, "UNKNOWN");
  await world.received("once", 3);
  await world.do("cut");
  assert.equal((await sending).idempotencyKey, undefined);
  await client.publishAndWait({ topic, payload: "4" });
  assert.deepEqual(await world.received("once", 4), ["1", "2", "3", "4"]);
});

test("a wait that ends early tells the level and the key", async () => {
  await world.do("device", { id: "deaf", subscribe: ["deaf/#"] });
  const client = world.connect();
  const message = { topic: "deaf/x", payload: "1" };
  const late = await failure(client.publishAndWait(message, { timeoutMs: 3000 }), Code.DeadlineExceeded, "WAIT_INCOMPLETE");
  assert.equal(late.level, "SENT");
  // The same call goes on waiting, and publishes nothing.
  assert.ok(late.idempotencyKey);
  const again = client.publishAndWait({ ...message, idempotencyKey: late.idempotencyKey }, { timeoutMs: 3000 });
  await failure(again, Code.DeadlineExceeded, "WAIT_INCOMPLETE");
  await client.publishAndWait({ topic: "deaf/x", payload: "2", wait: v1.Wait.SENT });
  assert.deepEqual(await world.received("deaf", 2), ["1", "2"]);
});

test("a subscription tells of the gap when it reconnects", async () => {
  const [client, other] = [world.connect({ token: world.at.token }, await world.proxy()), world.connect()];
  const stream = await client.subscribe({ topicFilters: ["followed/#"] });
  const items = stream[Symbol.asyncIterator]();
  await other.publish({ topic: "followed/x", payload: "1" });
  const first = await next(items);
  assert.ok(first.case === "message" && text(first.message.payload) === "1");
  await world.do("cut");
  assert.deepEqual(await next(items), { case: "gap", count: undefined, reason: "RECONNECTED" });
  await other.publish({ topic: "followed/x", payload: "2" });
  const third = await next(items);
  assert.ok(third.case === "message" && text(third.message.payload) === "2");
  stream.close();
  assert.equal((await items.next()).done, true);
});

test("commands are answered, watched and cancelled", async () => {
  await world.do("device", { id: "servant", subscribe: ["cmd/servant/#"] });
  const { commands } = world.connect();
  const reply = await commands.send({ deviceId: "servant", name: "ping", payload: "1" });
  assert.deepEqual([text(reply.payload), reply.deviceStatus], ["pong 1", 200]);
  const offline = await failure(commands.send({ deviceId: "absent", name: "ping" }), Code.FailedPrecondition, "DEVICE_OFFLINE");
  assert.equal(offline.stage, "QUEUED");
  const mute = commands.send({ deviceId: "servant", name: "mute" }, { timeoutMs: 1_000 });
  await failure(mute, Code.DeadlineExceeded, "COMMAND_TIMED_OUT");

  const started = await commands.start({ deviceId: "servant", name: "ping", payload: "2" });
  let last: v1.Command | undefined;
  for await (const command of await commands.watch(started.commandId)) last = command;
  assert.equal(last?.state, v1.CommandState.REPLIED);
  assert.equal(text((await commands.get(started.commandId)).reply!.payload), "pong 2");
  const waits = await commands.start({ deviceId: "absent", name: "ping" });
  const listed: string[] = [];
  for await (const command of commands.list({ deviceId: "absent" })) listed.push(command.commandId);
  assert.deepEqual(listed, [waits.commandId]);
  assert.equal((await commands.cancel(waits.commandId)).state, v1.CommandState.CANCELLED);
  await failure(commands.cancel(waits.commandId), Code.FailedPrecondition, "COMMAND_ENDED");
});

test("latest values are read, listed and watched", async () => {
  const { latest } = world.connect();
  await failure(latest.get("no/value"), Code.NotFound, "VALUE_NOT_FOUND");
  await world.do("device", { id: "meter" });
  await world.do("publish", { id: "meter", topic: "meter/power", count: 3 });
  await world.do("published", { id: "meter" });
  assert.equal(text((await latest.get("meter/power", "meter")).payload), "3");
  const listed: string[] = [];
  for await (const value of latest.list({ deviceIds: ["meter"] })) listed.push(text(value.payload));
  assert.deepEqual(listed, ["3"]);
  const stream = await latest.watch({ deviceIds: ["meter"] });
  const items = stream[Symbol.asyncIterator]();
  const current = await next(items);
  assert.ok(current.case === "value" && text(current.value.payload) === "3");
  assert.deepEqual(await next(items), { case: "snapshotEnd" });
  await world.do("publish", { id: "meter", topic: "meter/power", count: 1 });
  const change = await next(items);
  assert.ok(change.case === "value" && text(change.value.payload) === "4");
  stream.close();
});

test("shadows are merged, guarded and watched", async () => {
  const { shadows } = world.connect();
  await failure(shadows.get("shadowed"), Code.NotFound, "SHADOW_NOT_FOUND");
  const first = await shadows.update("shadowed", { desired: { on: true, level: 3 } });
  const second = await shadows.update("shadowed", { reported: '{"on": true}' });
  assert.deepEqual(JSON.parse(second.delta), { level: 3 });
  const update = shadows.update("shadowed", { desired: {}, expectedVersion: first.version });
  assert.equal((await failure(update, Code.Aborted, "VERSION_CONFLICT")).version, second.version);
  const stream = await shadows.watch({ deviceIds: ["shadowed"] });
  const items = stream[Symbol.asyncIterator]();
  assert.equal((await next(items)).case, "shadow");
  assert.equal((await next(items)).case, "snapshotEnd");
  await shadows.update("shadowed", { desired: { level: null } });
  const change = await next(items);
  assert.ok(change.case === "shadow" && change.shadow.desired === '{"on":true}');
  stream.close();
});

test("devices are found and listed", async () => {
  for (const number of [1, 2, 3]) await world.do("device", { id: `listed-${number}` });
  const { devices } = world.connect();
  assert.equal((await devices.get("listed-1")).online, true);
  const listed: string[] = [];
  for await (const { deviceId } of devices.list({ deviceIdPrefix: "listed-", pageSize: 2 })) listed.push(deviceId);
  assert.deepEqual(listed.sort(), ["listed-1", "listed-2", "listed-3"]);
});

test("who may not is told by code and reason", async () => {
  await world.connect().stubs.groups.createGroup({ group: { name: "guarded" } });
  const message = { topic: "door/open" };
  await failure(world.connect({}).publish(message), Code.Unauthenticated, "CREDENTIALS_MISSING");
  await failure(world.connect({ token: "mqs_wrong" }).subscribe({}), Code.Unauthenticated, "CREDENTIALS_UNKNOWN");
  const reader = world.connect({ token: await world.token("reader") });
  assert.equal((await failure(reader.publish(message), Code.PermissionDenied, "ROLE_DENIED")).role, "reader");
  await failure(reader.consume("guarded", () => {}).run(), Code.PermissionDenied, "ROLE_DENIED");
  await failure(reader.consume("none", () => {}).run(), Code.NotFound, "GROUP_NOT_FOUND");
  const lamps = world.connect({ token: await world.token("publisher", "lamp/#") });
  assert.equal((await failure(lamps.publish(message), Code.PermissionDenied, "OUT_OF_SCOPE")).field, "topic");
  assert.equal((await failure(lamps.publish({ topic: "lamp/+" }), Code.InvalidArgument, "INVALID_FIELD")).field, "topic");
  await failure(reader.stubs.devices.getDevice({ deviceId: "nobody" }), Code.NotFound, "DEVICE_NOT_FOUND");
  const certified = world.connect({ certificate: { cert: world.at.certificate, key: world.at.key } });
  assert.equal((await failure(certified.publish(message), Code.PermissionDenied, "ROLE_DENIED")).role, "reader");
});

test("an expired token ends a stream, and a new one goes on", async () => {
  // It may have expired before the stream was there, where the machine is busy.
  const short = world.connect({ token: await world.token("reader", "", "1s") });
  const first = short.subscribe({ topicFilters: ["quiet"] }).then((stream) => stream[Symbol.asyncIterator]().next());
  await failure(first, Code.Unauthenticated, "CREDENTIALS_EXPIRED");
  // Who gives tokens by a function is asked again.
  const tokens = [await world.token("reader", "", "4s")];
  const renewing = await world.connect({ token: () => tokens.pop() ?? world.at.token }).subscribe({ topicFilters: ["quiet"] });
  assert.deepEqual(await next(renewing[Symbol.asyncIterator]()), { case: "gap", count: undefined, reason: "RECONNECTED" });
  renewing.close();
});
