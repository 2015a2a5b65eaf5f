/** Streams against a gateway that is played here. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as after } from "node:timers/promises";
import { Stream, type Streaming } from "../src/calls.js";

const SILENCE_MS = 50;
const WORK_MS = 150;

// Rules out that a healthy stream is cancelled as silent, and what it had buffered lost, because the application took longer over what
// came than the stream may be silent; and that a stream is no longer given up once it is silent after such a pause.
test("only waiting for the gateway is silence", async () => {
  let streams = 0;
  const method: Streaming<number> = async function* ({ signal, onHeader }) {
    streams++;
    onHeader(new Headers());
    for (const number of [1, 2]) {
      signal.throwIfAborted();
      yield number;
    }
    await after(2_000, undefined, { signal });
  };
  const reconnected = () => "reconnected";
  const stream = await Stream.open<number, number | string>(method, (number) => [number], reconnected, false, SILENCE_MS);
  const items = stream[Symbol.asyncIterator]();
  for (const number of [1, 2]) {
    // Before the first as well: the stream is open, and the application comes to it later.
    await after(WORK_MS);
    assert.equal((await items.next()).value, number);
  }
  await after(WORK_MS);
  assert.equal(streams, 1);
  assert.equal((await items.next()).value, "reconnected");
  assert.equal(streams, 2);
  stream.close();
});
