"""paho-mqtt over takeovers: paho_client.py pub|sub PORT DIRECTORY. QoS 2 over TLS, MQTT 3.1.1, a persistent session.

paho-mqtt 2.1.0 has a fault that is mended here: a message whose PUBREL was sent is sent once more as a new PUBLISH when the second attempt to
connect succeeds, and not the first, against [MQTT-4.3.3-6]. A broker that has had the PUBREL takes it for another message.

Writes `TIME acknowledged N` or `TIME arrived N`. The publisher ends once DIRECTORY has a file `end` and all is acknowledged.
"""
import collections
import os
import sys
import time

import paho.mqtt.client as paho
from paho.mqtt.enums import MessageState

TOPIC = "failover/paho"

# Messages under way at most, so that an outage ends with a bounded queue.
UNDER_WAY = 100


def log(what, number="", at=None):
    print(f"{at or time.time():.6f} {what} {number}".rstrip(), flush=True)


class Client(paho.Client):
    def _messages_reconnect_reset_out(self):
        released = [message for message in self._out_messages.values() if message.state == MessageState.MQTT_MS_RESEND_PUBREL]
        super()._messages_reconnect_reset_out()
        for message in released:
            message.state = MessageState.MQTT_MS_RESEND_PUBREL


def main():
    role, port, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    client = Client(paho.CallbackAPIVersion.VERSION2, client_id=f"failover-paho-{role}", clean_session=False)
    client.tls_set(os.path.join(directory, "certs", "ca.crt"))
    client.reconnect_delay_set(1, 1)
    # Each packet, for whoever looks for the cause of a duplicate.
    client.on_log = lambda _client, _data, _level, text: print(f"{time.time():.6f} {text}", file=sys.stderr, flush=True)
    if role == "sub":
        client.on_connect = lambda client, *_: client.subscribe(TOPIC, 2)
        client.on_subscribe = lambda *_: log("subscribed")
        client.on_message = lambda _client, _data, message: log("arrived", int(message.payload))
    client.connect("localhost", port, keepalive=10)
    if role == "sub":
        client.loop_forever()
    publish(client, os.path.join(directory, "end"))


def publish(client, end):
    # Filled by the client's thread: times and packet ids of what is acknowledged, perhaps before publish() has returned the id.
    acknowledged, numbers, number = collections.deque(), {}, 0
    client.on_publish = lambda _client, _data, mid, *_: acknowledged.append((time.time(), mid))
    client.loop_start()
    while numbers or not os.path.exists(end):
        while acknowledged:
            at, mid = acknowledged.popleft()
            log("acknowledged", numbers.pop(mid), at)
        if len(numbers) < UNDER_WAY and not os.path.exists(end):
            number += 1
            # Queued while there is no connection.
            numbers[client.publish(TOPIC, str(number), qos=2).mid] = number
        time.sleep(0.05)
    client.disconnect()
    client.loop_stop()


main()
