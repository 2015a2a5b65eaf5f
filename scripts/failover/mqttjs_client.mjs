// MQTT.js over takeovers: node mqttjs_client.mjs pub|sub PORT DIRECTORY. QoS 1 over TLS, MQTT 5, a persistent session.
//
// Writes `TIME acknowledged N` or `TIME arrived N`. The publisher ends once DIRECTORY has a file `end` and all is acknowledged.
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const mqtt = createRequire(new URL('../../tests/interop/package.json', import.meta.url))('mqtt');
const [role, port, directory] = process.argv.slice(2);
const topic = 'failover/mqttjs';
// Messages under way at most, so that an outage ends with a bounded queue.
const most = 100;

const log = (what, number = '') => console.log(`${(Date.now() / 1000).toFixed(3)} ${what} ${number}`.trimEnd());
const client = mqtt.connect(`mqtts://localhost:${port}`, {
  protocolVersion: 5,
  clientId: `failover-mqttjs-${role}`,
  clean: false,
  properties: { sessionExpiryInterval: 3600 },
  keepalive: 10,
  reconnectPeriod: 500,
  connectTimeout: 3000,
  ca: readFileSync(`${directory}/certs/ca.crt`),
});
client.on('error', (error) => console.error(String(error)));
client.on('close', () => console.error('disconnected'));

if (role === 'sub') {
  client.on('message', (_topic, payload) => log('arrived', payload));
  await client.subscribeAsync(topic, { qos: 1 });
  log('subscribed');
} else {
  let [number, underWay] = [0, 0];
  const timer = setInterval(() => {
    if (existsSync(`${directory}/end`)) {
      if (underWay > 0) return;
      clearInterval(timer);
      client.end();
      return;
    }
    if (underWay >= most) return;
    const sent = ++number;
    underWay += 1;
    client.publish(topic, String(sent), { qos: 1 }, (error) => {
      underWay -= 1;
      if (error) console.error(`${sent}: ${error}`);
      else log('acknowledged', sent);
    });
  }, 50);
}
