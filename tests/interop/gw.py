"""A small blocking face over paho-mqtt for the interop tests.

Addresses come from the environment (GW_*), set by tests/gateway/interop.rs for each started server.
Nothing here sleeps to synchronise: every wait is for an event, with a deadline.
"""
import os
import queue
import ssl
import threading
import uuid

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

HOST = os.environ.get("GW_HOST", "localhost")
CA = os.environ.get("GW_CA", "certs/ca.crt")
PORTS = {name: int(os.environ.get("GW_" + name.upper(), "0")) for name in ("tcp", "tls", "ws", "wss", "quic", "grpc", "http")}
WAIT = 60.0

V31, V311, V5 = paho.MQTTv31, paho.MQTTv311, paho.MQTTv5
VERSIONS = {"v31": V31, "v311": V311, "v5": V5}


def unique(prefix="t"):
    """A name no other test uses; short enough for 3.1 client ids (23 bytes)."""
    return f"{prefix}{uuid.uuid4().hex[:12]}"


def publish_properties(**fields):
    properties = Properties(PacketTypes.PUBLISH)
    for name, value in fields.items():
        setattr(properties, name, value)
    return properties


def connect_properties(**fields):
    properties = Properties(PacketTypes.CONNECT)
    for name, value in fields.items():
        setattr(properties, name, value)
    return properties


class Client:
    """One connection at a time; messages, acknowledgements and the end of the link are waited for."""

    def __init__(self, version=V5, transport="tcp", client_id=None, clean=True, tls_max=None):
        self.client_id = unique("c") if client_id is None else client_id
        self.version, self.transport, self.clean = version, transport, clean
        self.messages = queue.Queue()
        self.connected = queue.Queue()
        self.disconnected = queue.Queue()
        self.acks = queue.Queue()
        arguments = {} if version == V5 else {"clean_session": clean}
        self.paho = paho.Client(
            paho.CallbackAPIVersion.VERSION2,
            client_id=self.client_id,
            protocol=version,
            transport="websockets" if transport in ("ws", "wss") else "tcp",
            reconnect_on_failure=False,
            **arguments,
        )
        if transport in ("tls", "wss"):
            context = ssl.create_default_context(cafile=CA)
            if tls_max:
                context.maximum_version = tls_max
            self.paho.tls_set_context(context)
        if transport in ("ws", "wss"):
            self.paho.ws_set_options(path="/mqtt")
        if transport == "quic":
            import quic
            self.paho._create_socket = quic.sock
        self.paho.on_message = lambda _c, _u, message: self.messages.put(message)
        self.paho.on_connect = lambda _c, _u, flags, code, props: self.connected.put((flags, code, props))
        self.paho.on_disconnect = lambda _c, _u, _f, code, props: self.disconnected.put((code, props))
        # paho 2.1 reads the reason of a server's DISCONNECT only when properties with content follow it.
        self.server_reason = None
        handle = self.paho._handle_disconnect

        def handle_disconnect():
            packet = self.paho._in_packet["packet"]
            self.server_reason = packet[0] if len(packet) else 0
            handle()

        self.paho._handle_disconnect = handle_disconnect
        self.paho.on_subscribe = lambda _c, _u, mid, codes, props: self.acks.put((mid, codes))
        self.paho.on_unsubscribe = lambda _c, _u, mid, codes, props: self.acks.put((mid, codes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def connect(self, keepalive=60, properties=None):
        """Connects and returns (session present, reason code, properties)."""
        arguments = {"clean_start": self.clean, "properties": properties} if self.version == V5 else {}
        self.paho.connect(HOST, PORTS[self.transport], keepalive=keepalive, **arguments)
        self.paho.loop_start()
        flags, code, props = self.connected.get(timeout=WAIT)
        return flags.session_present, code, props

    def ok(self, **arguments):
        """Connects, fails when refused, returns self."""
        _, code, _ = self.connect(**arguments)
        assert not code.is_failure, f"{self.client_id}: connection refused: {code}"
        return self

    def subscribe(self, topic, qos=0, properties=None, **options):
        """Subscribes and waits for SUBACK; the reason codes as numbers."""
        if self.version == V5:
            _, mid = self.paho.subscribe(topic, options=SubscribeOptions(qos=qos, **options), properties=properties)
        else:
            _, mid = self.paho.subscribe(topic, qos)
        return self._ack(mid)

    def subscribe_many(self, pairs):
        _, mid = self.paho.subscribe([
            (topic, SubscribeOptions(qos=qos) if self.version == V5 else qos) for topic, qos in pairs])
        return self._ack(mid)

    def unsubscribe(self, topic):
        _, mid = self.paho.unsubscribe(topic)
        return self._ack(mid)

    def _ack(self, mid):
        got, codes = self.acks.get(timeout=WAIT)
        assert got == mid, f"acknowledgement of packet {got}, not {mid}"
        return [code.value for code in codes]

    def publish(self, topic, payload=b"", qos=0, retain=False, properties=None):
        """Publishes and waits until the handshake of its QoS is over."""
        info = self.paho.publish(topic, payload, qos=qos, retain=retain, properties=properties)
        info.wait_for_publish(WAIT)
        assert info.is_published(), f"no acknowledgement for {topic} at QoS {qos}"

    def message(self, timeout=WAIT):
        return self.messages.get(timeout=timeout)

    def payloads(self, count):
        return [self.message().payload for _ in range(count)]

    def nothing_before(self, topic, sender=None):
        """Shows that no message is waiting: publishes a mark to `topic` (subscribed) and sees it come first."""
        mark = uuid.uuid4().bytes
        (sender or self).publish(topic, mark, qos=1)
        message = self.message()
        assert message.payload == mark, f"unexpected message on {message.topic}: {message.payload[:40]!r}"

    def ended(self):
        """Waits for the end of the connection; the reason code of the server's DISCONNECT, if one came."""
        self.disconnected.get(timeout=WAIT)
        return self.server_reason

    def will(self, topic, payload, qos=0, retain=False, delay=None, **fields):
        properties = None
        if self.version == V5:
            properties = Properties(PacketTypes.WILLMESSAGE)
            if delay is not None:
                properties.WillDelayInterval = delay
            for name, value in fields.items():
                setattr(properties, name, value)
        self.paho.will_set(topic, payload, qos, retain, properties)

    def drop(self):
        """Ends the connection as a failing network would: without DISCONNECT."""
        socket = self.paho.socket()
        # shutdown, not close: paho's thread still polls the descriptor.
        getattr(socket, "_socket", socket).shutdown(2)
        self.disconnected.get(timeout=WAIT)
        self.paho.loop_stop()

    def close(self, reason=None):
        """Ends the connection with DISCONNECT; never fails."""
        try:
            if self.paho.is_connected():
                self.paho.disconnect(**({"reasoncode": reason} if reason else {}))
                self.disconnected.get(timeout=WAIT)
        except (queue.Empty, OSError):
            pass
        if threading.current_thread() is not getattr(self.paho, "_thread", None):
            self.paho.loop_stop()
