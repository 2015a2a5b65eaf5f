"""Strangers whose names a hook answers with a status, and that hook."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class OddLogins:
    """A hook that answers odd user names with a status and lets all others in, and `rate` odd logins a second from many addresses."""

    STATUSES = (400, 422, 500)

    def __init__(self, rate=50):
        self.rate = rate
        self.sent = 0
        self.stopped = threading.Event()
        self.hook = ThreadingHTTPServer(("127.0.0.1", 0), _Hook)
        self.threads = [threading.Thread(target=self.hook.serve_forever, daemon=True)]

    def settings(self):
        return (
            "[auth.http]", f'url = "http://127.0.0.1:{self.hook.server_port}/"',
            "[auth.http.limits]", 'cache_ttl = "0s"', 'cache_negative_ttl = "0s"', 'stale_if_error = "0s"',
        )

    def start(self, ports):
        self.threads.append(threading.Thread(target=self._attack, args=(ports["tcp"],), daemon=True))
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopped.set()
        self.hook.shutdown()

    def _attack(self, port):
        while not self.stopped.wait(1 / self.rate):
            self.sent += 1
            status = self.STATUSES[self.sent % len(self.STATUSES)]
            try:
                with socket.socket() as raw:
                    raw.bind((f"127.0.1.{self.sent % 250 + 1}", 0))
                    raw.settimeout(5)
                    raw.connect(("127.0.0.1", port))
                    raw.sendall(_connect(f"odd-{self.sent}", f"odd-{status}"))
                    raw.recv(64)
            except OSError:
                pass


class _Hook(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        user = question.get("username") or ""
        status = int(user[4:]) if user.startswith("odd-") else 200
        body = b'{"result": "allow"}' if status == 200 else b""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def _connect(client_id, user):
    """A CONNECT of 3.1.1 with a user name and a password."""
    text = lambda value: len(value).to_bytes(2, "big") + value.encode()
    body = text("MQTT") + b"\4\xc2\0\x3c" + text(client_id) + text(user) + text("pw")
    return bytes([0x10, len(body)]) + body

