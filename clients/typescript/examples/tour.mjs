// Publishes, asks a device, and reads what devices have sent: node examples/tour.mjs
import { connect } from "mqtt-gateway-client";
import { Outcome } from "mqtt-gateway-client/v1";

const gateway = connect(process.env.GATEWAY_ADDRESS ?? "localhost:10000", {
  ca: process.env.GATEWAY_CA ?? "certs/ca.crt",
  token: process.env.GATEWAY_TOKEN,
});

// Published once, whatever the network does, and waited for until every subscriber has acknowledged it.
const answer = await gateway.publishAndWait({ topic: "lamp/switch", payload: "on" });
console.log(Outcome[answer.outcome]);

try {
  const reply = await gateway.commands.send({ deviceId: "lamp", name: "blink", payload: "3" });
  console.log("the lamp answers", reply.deviceStatus, new TextDecoder().decode(reply.payload));
} catch (error) {
  if (error.reason !== "DEVICE_OFFLINE") throw error;
  console.log("the lamp is away");
}

for await (const value of gateway.latest.list()) {
  console.log(value.deviceId, value.topic, new TextDecoder().decode(value.payload));
}
gateway.close();
