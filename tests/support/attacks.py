"""A process that attacks a server until its input ends: `python attacks.py PORT`.

It prints a line when each attack has been made once, and the number of rounds at the end. It runs apart from the test,
because it takes CPU time that would delay the test's own requests. Every attack is bounded, and only loopback is used.
"""

import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

KEY = "sk-mallory"
MODEL = "smollm2-135m"
TIMEOUT = 20
UPGRADE = (
    f"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()
PING = b"\x89\x80\0\0\0\0"

BOMBS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000},
    {"type": "integer", "multipleOf": 9_999_991},
    {"type": "string", "pattern": "(a{0,500}){0,500}"},
    {"type": "object", "required": 5},
    {"anyOf": [{"$ref": f"#/{'%61' * (number % 9)}"} for number in range(400)]},
]


class Attacker:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, body: Any, path: str = "/v1/responses", method: str = "POST") -> bytes:
        """Send a request and return the body of the response. The server may refuse it in any way."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        try:
            connection.request(method, path, data, {"Authorization": f"Bearer {KEY}"})
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()

    def connect(self, data: bytes, stack: contextlib.ExitStack) -> socket.socket:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT))
        client.sendall(data)
        return client

    # The attacks

    def send_schema_bombs(self) -> None:
        for schema in BOMBS:
            form = {"type": "json_schema", "name": "x", "schema": schema}
            self.ask({"model": MODEL, "input": "Hi", "max_output_tokens": 16, "text": {"format": form}})

    def send_large_inputs(self) -> None:
        parts = [{"type": "input_text", "text": "x", "unknown": number} for number in range(20_000)]
        self.ask({"model": "scripted", "input": [{"role": "user", "content": parts}]})
        self.ask(b'{"model": "scripted", "input": ' + b"[" * 100_000)
        self.ask(b'{"model": "scripted", "max_output_tokens": ' + b"9" * 1_000_000 + b"}")
        tools = [{"type": "function", "name": f"f{number}", "parameters": {}} for number in range(5_000)]
        self.ask({"model": "scripted", "input": "Hi", "tools": tools})

    def hold_connections(self) -> None:
        head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
        with contextlib.ExitStack() as stack:
            for number in range(100):
                self.connect((b"", head, head + b"Content-Length: 9\r\n\r\n{")[number % 3], stack)

    def send_half_bodies(self) -> None:
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(4):
                self.connect(f"{head}Content-Length: 30000000\r\n\r\n".encode() + b" " * 4_000_000, stack)

    def flood_with_pings(self) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            client = self.connect(UPGRADE, stack)
            client.recv(4096)
            for _ in range(20):
                client.sendall(PING * 5_000)

    def fill_the_queue(self) -> None:
        body = json.dumps({"model": MODEL, "input": "word " * 5_000, "max_output_tokens": 16}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(30):
                self.connect(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, stack)

    def stall_as_a_reader(self) -> None:
        body = {"model": "scripted", "input": "long", "background": True}
        try:
            response_id = json.loads(self.ask(body))["id"]
        except (ValueError, KeyError):
            return
        head = f"GET /v1/responses/{response_id}?stream=true HTTP/1.1\r\nHost: localhost\r\n"
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(10):
                self.connect(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode(), stack).recv(1000)

    def use_a_hostile_upstream(self) -> None:
        self.ask({"model": "endless", "input": "Hi"})
        self.ask({"model": "endless", "input": "Hi", "stream": True})

    def list_attacks(self) -> list[Callable[[], None]]:
        return [
            self.send_schema_bombs,
            self.send_large_inputs,
            self.hold_connections,
            self.send_half_bodies,
            self.flood_with_pings,
            self.fill_the_queue,
            self.stall_as_a_reader,
            self.use_a_hostile_upstream,
        ]


def main() -> None:
    attacker = Attacker(int(sys.argv[1]))
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    rounds = 0
    while not stop.is_set():
        for attack in attacker.list_attacks():
            if not stop.is_set():
                attack()
        rounds += 1
        if rounds == 1:
            sys.stdout.write("once\n")
            sys.stdout.flush()
    sys.stdout.write(f"{rounds}\n")


if __name__ == "__main__":
    main()
