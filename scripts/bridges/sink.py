"""The other side of a bridge that leads out, which writes down what it takes before it says so, for world.py.

    sink.py mqtt|webhook PORT FILE

Each line of FILE is a device, a tab and what it sent. A line that was cut short by a kill has no end, and was not acknowledged.
"""
import http.server
import json
import socket
import struct
import sys
import threading

kind, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
file, lock = open(path, "ab", buffering=0), threading.Lock()
# What was killed may have left half a line.
file.write(b"\n")


def take(rows):
    with lock:
        file.write(b"".join(device + b"\t" + payload + b"\n" for device, payload in rows))


def packets(reader):
    """The packets of a connection: the first byte and the rest."""
    while first := reader.read(1):
        size, shift = 0, 0
        while True:
            byte = reader.read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        yield first[0], reader.read(size)


def serve(link):
    with link, link.makefile("rb") as reader:
        for first, body in packets(reader):
            if first >> 4 == 1:
                link.sendall(b"\x20\x02\x00\x00")
            elif first >> 4 == 3:
                length = struct.unpack(">H", body[:2])[0]
                topic, rest = body[2:2 + length], body[2 + length:]
                take([(topic.rsplit(b"/", 1)[1], rest[2:])])
                link.sendall(b"\x40\x02" + rest[:2])
            elif first >> 4 == 12:
                link.sendall(b"\xd0\x00")


def quietly(link):
    try:
        serve(link)
    except (OSError, IndexError, struct.error):
        pass  # The gateway was killed.


class Hook(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        messages = json.loads(body)["messages"]
        take([(message["client_id"].encode(), message["payload"].encode()) for message in messages])
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


class HookServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # The gateway was killed.


if kind == "webhook":
    HookServer(("127.0.0.1", port), Hook).serve_forever()
server = socket.create_server(("127.0.0.1", port))
while True:
    threading.Thread(target=quietly, args=(server.accept()[0],), daemon=True).start()
