"""Continuous requests to a server from several threads, over connections that stay open."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from antiphon.server.process import _LINGER_SECONDS
from support.crashing_server import TIMEOUT


class RequestLoad:
    """Sends requests until `stop`. `ids` are the responses that were acknowledged, `refused` counts failed connects.

    `choose_address` returns the address of the next connection. Any other failure is an error, except on a connection
    that was perhaps idle for as long as a server that stops leaves it open: a busy machine may delay a client.
    """

    def __init__(self, choose_address: Callable[[], str], *, clients: int, body: dict[str, Any]) -> None:
        self.ids: list[str] = []
        self.refused = 0
        self.errors: list[str] = []
        self._choose_address = choose_address
        self._body = json.dumps(body)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            connection = http.client.HTTPConnection(self._choose_address(), timeout=TIMEOUT)
            with contextlib.closing(connection):
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    self.refused += 1
                    continue
                self._use(connection)

    def _use(self, connection: http.client.HTTPConnection) -> None:
        """Send requests until the server closes the connection."""
        sent_at = time.monotonic()
        while not self._stopped.is_set():
            earlier = sent_at
            try:
                try:
                    connection.request("POST", "/v1/responses", self._body)
                finally:
                    sent_at = time.monotonic()
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                if sent_at - earlier < _LINGER_SECONDS:
                    self.errors.append(repr(error))
                return
            if response.status != 200:
                self.errors.append(f"{response.status} {body!r}")
            else:
                self.ids.append(json.loads(body)["id"])
            if response.will_close:
                return
