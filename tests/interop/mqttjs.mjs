// MQTT.js against the gateway: node mqttjs.mjs TRANSPORT VERSION (tcp|tls|ws|wss, 4|5).
// Addresses come from the environment (GW_*). Exits 0 when every check held.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { once } from 'node:events';
import mqtt from 'mqtt';

const [transport, version] = [process.argv[2], Number(process.argv[3])];
const host = process.env.GW_HOST ?? 'localhost';
const scheme = { tcp: 'mqtt', tls: 'mqtts', ws: 'ws', wss: 'wss' }[transport];
const port = process.env[`GW_${transport.toUpperCase()}`];
const url = `${scheme}://${host}:${port}${transport.startsWith('ws') ? '/mqtt' : ''}`;
const unique = (prefix) => prefix + Math.random().toString(16).slice(2, 14);
const deadline = setTimeout(() => { console.error('no end after 300 s'); process.exit(2); }, 300_000);

async function connect(options = {}) {
  const client = mqtt.connect(url, {
    protocolVersion: version,
    reconnectPeriod: 0,
    clientId: unique('js'),
    ca: transport === 'tls' || transport === 'wss' ? readFileSync(process.env.GW_CA) : undefined,
    ...options,
  });
  client.inbox = [];
  client.waiting = [];
  client.on('message', (topic, payload, packet) => {
    const message = { topic, payload, packet };
    const next = client.waiting.shift();
    if (next) next(message); else client.inbox.push(message);
  });
  client.next = () => client.inbox.length
    ? Promise.resolve(client.inbox.shift())
    : new Promise((resolve) => client.waiting.push(resolve));
  const [connack] = await once(client, 'connect');
  client.connack = connack;
  return client;
}

const checks = {
  async 'every QoS'() {
    const [sub, pub, topic] = [await connect(), await connect(), unique('js/')];
    const granted = await sub.subscribeAsync(topic, { qos: 2 });
    assert.equal(granted[0].qos, 2);
    for (const qos of [0, 1, 2]) {
      await pub.publishAsync(topic, `at ${qos}`, { qos });
      const message = await sub.next();
      assert.deepEqual([message.topic, String(message.payload), message.packet.qos], [topic, `at ${qos}`, qos]);
    }
    await Promise.all([sub.endAsync(), pub.endAsync()]);
  },

  async 'large and binary payloads'() {
    const [client, topic] = [await connect(), unique('js/')];
    await client.subscribeAsync(topic, { qos: 1 });
    const payload = Buffer.alloc(900_000, Uint8Array.from({ length: 256 }, (_, n) => n));
    await client.publishAsync(topic, payload, { qos: 1 });
    assert.ok((await client.next()).payload.equals(payload));
    await client.endAsync();
  },

  async 'many messages in order'() {
    const [client, topic, count] = [await connect(), unique('js/'), 500];
    await client.subscribeAsync(topic, { qos: 1 });
    await Promise.all(Array.from({ length: count }, (_, n) => client.publishAsync(topic, String(n), { qos: 1 })));
    for (let n = 0; n < count; n += 1) assert.equal(String((await client.next()).payload), String(n));
    await client.endAsync();
  },

  async 'retained messages'() {
    const [client, topic] = [await connect(), unique('js/')];
    await client.publishAsync(topic, 'kept', { qos: 1, retain: true });
    await client.subscribeAsync(topic, { qos: 1 });
    const message = await client.next();
    assert.deepEqual([String(message.payload), message.packet.retain], ['kept', true]);
    await client.publishAsync(topic, '', { qos: 1, retain: true });
    await client.endAsync();
  },

  async 'session resume with an offline queue'() {
    const [clientId, topic] = [unique('js'), unique('js/')];
    const options = { clientId, clean: false, properties: version === 5 ? { sessionExpiryInterval: 300 } : undefined };
    const first = await connect(options);
    assert.equal(first.connack.sessionPresent, false);
    await first.subscribeAsync(topic, { qos: 2 });
    await first.endAsync();
    const pub = await connect();
    for (let n = 0; n < 20; n += 1) await pub.publishAsync(topic, String(n), { qos: 2 });
    const again = await connect(options);
    assert.equal(again.connack.sessionPresent, true);
    for (let n = 0; n < 20; n += 1) assert.equal(String((await again.next()).payload), String(n));
    await Promise.all([again.endAsync(), pub.endAsync()]);
  },

  async 'will after a broken connection'() {
    const topic = unique('js/');
    const watch = await connect();
    await watch.subscribeAsync(topic, { qos: 1 });
    const client = await connect({ will: { topic, payload: Buffer.from('gone'), qos: 1, retain: false } });
    client.stream.destroy();
    assert.equal(String((await watch.next()).payload), 'gone');
    await Promise.all([watch.endAsync(), client.endAsync(true)]);
  },

  async 'takeover'() {
    const clientId = unique('js');
    const old = await connect({ clientId });
    const ended = once(old, 'close');
    let reason;
    old.on('disconnect', (packet) => { reason = packet.reasonCode; });
    const fresh = await connect({ clientId });
    await ended;
    if (version === 5) assert.equal(reason, 0x8e);
    await Promise.all([fresh.endAsync(), old.endAsync(true)]);
  },

  async 'properties, aliases and subscription identifiers of 5.0'() {
    if (version !== 5) return;
    const topic = unique('js/');
    const sub = await connect({ properties: { topicAliasMaximum: 5, receiveMaximum: 10 } });
    const pub = await connect({ autoUseTopicAlias: true, autoAssignTopicAlias: true });
    assert.ok(pub.connack.properties.topicAliasMaximum > 0);
    await sub.subscribeAsync(topic, { qos: 1, properties: { subscriptionIdentifier: 77 } });
    for (let n = 0; n < 20; n += 1) {
      await pub.publishAsync(topic, String(n), {
        qos: 1,
        properties: {
          userProperties: { color: ['red', 'blue'] }, contentType: 'text/plain', responseTopic: 'back',
          correlationData: Buffer.from([1, 2, 3]), payloadFormatIndicator: true, messageExpiryInterval: 100,
        },
      });
      const message = await sub.next();
      const properties = message.packet.properties;
      assert.equal(message.topic, topic);
      assert.equal(String(message.payload), String(n));
      assert.equal(properties.subscriptionIdentifier, 77);
      assert.deepEqual({ ...properties.userProperties }, { color: ['red', 'blue'] });
      assert.equal(properties.contentType, 'text/plain');
      assert.equal(properties.responseTopic, 'back');
      assert.deepEqual([...properties.correlationData], [1, 2, 3]);
      assert.equal(properties.payloadFormatIndicator, true);
      assert.ok(properties.messageExpiryInterval <= 100);
    }
    await Promise.all([sub.endAsync(), pub.endAsync()]);
  },

  async 'unsubscribe'() {
    const [client, topic, mark] = [await connect(), unique('js/'), unique('js/')];
    await client.subscribeAsync([topic, mark], { qos: 1 });
    await client.unsubscribeAsync(topic);
    await client.publishAsync(topic, 'no', { qos: 1 });
    await client.publishAsync(mark, 'yes', { qos: 1 });
    assert.equal((await client.next()).topic, mark);
    await client.endAsync();
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok   ${transport} v${version}: ${name}`);
  } catch (error) {
    console.error(`FAIL ${transport} v${version}: ${name}\n`, error);
    process.exit(1);
  }
}
clearTimeout(deadline);
process.exit(0);
