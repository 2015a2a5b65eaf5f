// A member of a consumer group through the client library, that writes down what it gets, for world.py; as member.py:
// library.mjs ADDRESS GROUP MEMBER_ID FILE
//
// Has lines for deliveries only: the library acknowledges. Of a hundred messages one is given back.
import { appendFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { connect, GiveBack } from "../../clients/typescript/dist/index.js";

const [address, group, memberId, file] = process.argv.slice(2);
// What was killed may have left half a line.
appendFileSync(file, "\n");
const gateway = connect(address, { plaintext: true });

async function handle(delivery) {
  const now = BigInt(Date.now()) * 1_000_000n;
  appendFileSync(file, `D ${now} ${delivery.messageId} ${delivery.attempt} ${delivery.text} .\n`);
  const chance = Math.random();
  if (chance < 0.02) await sleep(2);
  if (chance < 0.01) throw new GiveBack("one in a hundred");
}

for (;;) {
  try {
    await gateway.consume(group, handle, { memberId, onError: (error) => console.error(String(error)) }).run();
  } catch (error) {
    console.error(String(error));
  }
  await sleep(200);
}
