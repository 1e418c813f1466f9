"""The server as a process: the socket, the signals and the way out."""

import asyncio
import contextlib
import errno
import gc
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import ConfigError, ServerError
from antiphon.server.app import App
from antiphon.server.connection import Connection
from antiphon.server.websocket.transport import Transport

# How long runs that were told to stop may take for their last words, before they are cut off.
_LAST_WORDS_SECONDS = 5
# Longer than the usual clients keep an idle connection: who sends the next request should be the one to close.
_KEEP_ALIVE_SECONDS = 75


def serve(engine: Engine, settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until a signal says to stop. `on_ready` is called with the server's URL once it answers.

    Raises ConfigError when the address cannot be had, and whatever keeps the engine from starting.
    """
    with bind(settings) as listener:
        Server(engine, settings, on_ready=on_ready).run(sockets=[listener])


def bind(settings: Settings) -> socket.socket:
    """Take the address. Done before the models are loaded, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        if os.name == "posix":  # elsewhere this would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(_explain(error, settings)) from None
    return listener


class Server(uvicorn.Server):
    """uvicorn, with a shutdown that the engine knows about."""

    def __init__(self, engine: Engine, settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._app = App(engine, settings)
        self._settings = settings
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                self._app,
                http=Connection,
                ws=Transport,
                ws_max_size=settings.max_body_bytes,
                ws_per_message_deflate=False,  # it would take 40 KiB for each connection, and most are near
                # A client that is slow to answer a ping is slow to read, no more: the socket tells if it is gone.
                ws_ping_interval=settings.keepalive_seconds or None,
                ws_ping_timeout=None,
                interface="asgi3",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                workers=1,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.shutdown_grace_seconds) + _LAST_WORDS_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit:
            raise self._app.startup_error or ServerError("The server could not start.") from None
        except OSError as error:  # another server took the port while the models were loaded
            raise ConfigError(_explain(error, self._settings)) from None
        # What has been loaded by now stays to the end: the collector need not go through it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        if self._on_ready is not None and sockets:
            self._on_ready(_url(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = self._settings.shutdown_grace_seconds
        end = asyncio.get_running_loop().call_later(grace, self._engine.stop_runs)
        self._app.retire()
        try:
            await super().shutdown(sockets=sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn, do not raise the signal again at the end: a wanted stop is a success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for an end. The second one takes it: whatever was acknowledged is on disk."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, settings: Settings) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {settings.port} on {settings.host} is in use. Stop what listens there, or choose another port."
    return f"Cannot listen on port {settings.port} of {settings.host}: {error.strerror or error}."
