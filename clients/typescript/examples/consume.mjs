// Consumes what meters send, until Ctrl-C or SIGTERM; what it has taken is finished and acknowledged first: node examples/consume.mjs
//
// Run several: they share the work. Kill one, or the gateway: nothing is lost.
import { connect, GiveBack } from "mqtt-gateway-client";

const gateway = connect(process.env.GATEWAY_ADDRESS ?? "localhost:10000", {
  ca: process.env.GATEWAY_CA ?? "certs/ca.crt",
  token: process.env.GATEWAY_TOKEN,
});

// The same group again is no error.
await gateway.stubs.groups.createGroup({ group: { name: "billing", filter: { topicFilters: ["meter/#"] } } });

// Called for one message of a meter after the other; for those of different meters beside each other.
const consumer = gateway.consume(
  "billing",
  async (delivery) => {
    console.log(delivery.deviceId, delivery.topic, delivery.text);
    if (delivery.payload.length === 0) throw new GiveBack("no reading", { delayMs: 60_000 });
  },
  { concurrency: 8, onError: (error) => console.error(error) },
);
for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => consumer.stop());
console.log("consuming");
await consumer.run();
console.log(consumer.confirmed, "acknowledged");
gateway.close();
