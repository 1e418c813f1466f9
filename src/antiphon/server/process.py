"""The server process: its socket, signals and shutdown."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from antiphon.config.changes import SettingChanges, compare_settings
from antiphon.config.settings import Settings
from antiphon.engine.assembly import reconfigure
from antiphon.engine.engine import Engine
from antiphon.errors import ConfigError, ServerError
from antiphon.server.app import App
from antiphon.server.connections import ServerLimits
from antiphon.server.exposure import check_exposure
from antiphon.server.listener import accept_waiting, bind_socket, explain_bind_error, format_url
from antiphon.server.log import configure_logging
from antiphon.server.reload import Reloader
from antiphon.server.running_servers import FOLDER, ServerFile
from antiphon.server.store_users import register_store_user
from antiphon.server.uvicorn_protocol import HttpProtocol
from antiphon.server.watchdog import Watchdog
from antiphon.server.write_timeout import WriteTimeout

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Time for stopped runs to send their final events before their connections are closed.
_FINAL_EVENTS_SECONDS = 5
# A server that is stopped by SIGTERM leaves idle connections open for this time. A request that arrives gets an answer
# with `Connection: close`.
_LINGER_SECONDS = 1.0
# At most this part of the file descriptors is for connections of clients. The store and the upstreams need some too.
_DESCRIPTORS_FOR_CONNECTIONS = 0.75
_MACOS_MAX_DESCRIPTORS = 10240
# Parameters of glibc's mallopt, and their values.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 1024 * 1024
_RETAINED_BYTES = 8 * 1024 * 1024


def serve(
    engine: Engine,
    settings: Settings,
    *,
    on_ready: Callable[[str], None] | None = None,
    load_settings: Callable[[], Settings] | None = None,
) -> None:
    """Serve until a signal stops the process. Call `on_ready` with the server's URL once it accepts requests.

    With `load_settings`, SIGHUP and `antiphon reload` read the settings again.
    Raises ConfigError if the address is not available, or other machines could use the server without a key, and any
    error of the engine's start.
    """
    settings = prepare_process(engine, settings)
    with bind_socket(settings) as listener:
        server = Server(engine, settings, on_ready=on_ready)
        server.load_settings = load_settings
        server.run(sockets=[listener])


def prepare_process(engine: Engine, settings: Settings) -> Settings:
    """Set the limits of the process, and let the engine check at its start that the server is not open to others.

    Return the settings with as many connections as the process can have.
    """

    def check_keys() -> None:
        warning = check_exposure(settings, has_stored_keys=engine.has_stored_keys)
        if warning is not None:
            logger.warning("%s", warning)

    engine.on_store_open = check_keys
    return_large_memory()
    return fit_connections(settings, raise_descriptor_limit())


def return_large_memory() -> None:
    """Let the C library return the memory of large bodies to the system when it is freed.

    By default glibc adapts to large blocks: after the first one it retains up to 64 MB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of file descriptors to the hard limit. Return the limit, or None if there is none."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _MACOS_MAX_DESCRIPTORS):  # macOS does not accept its own hard limit
        if soft == resource.RLIM_INFINITY or (wanted != resource.RLIM_INFINITY and wanted <= soft):
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            continue
        soft = wanted
        break
    return None if soft == resource.RLIM_INFINITY else soft


def fit_connections(settings: Settings, descriptors: int | None) -> Settings:
    """Return the settings with as many connections as the limit of file descriptors allows, with a warning."""
    if descriptors is None or settings.max_connections <= descriptors * _DESCRIPTORS_FOR_CONNECTIONS:
        return settings
    allowed = max(1, int(descriptors * _DESCRIPTORS_FOR_CONNECTIONS))
    logger.warning(
        "max_connections is %d, but this process may open only %d files: at most %d connections are accepted. "
        "Raise the limit with 'ulimit -n'.",
        settings.max_connections,
        descriptors,
        allowed,
    )
    return msgspec.structs.replace(settings, max_connections=allowed)


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the limits that all connections share."""

    def __init__(self, app: App, limits: ServerLimits, **options: Any) -> None:
        super().__init__(app, **options)
        self.limits = limits


class Server(uvicorn.Server):
    """uvicorn with a shutdown that first lets running responses finish, then stops them."""

    stop_signals: tuple[signal.Signals, ...] = HANDLED_SIGNALS
    shares_listeners = False
    load_settings: Callable[[], Settings] | None = None
    _reloader: Reloader | None = None
    _store_user: ServerFile | None = None
    _stop_signal = 0

    def __init__(self, engine: Engine, settings: Settings, *, on_ready: Callable[[str], None] | None = None) -> None:
        self._engine = engine
        self._app = App(engine, settings)
        self._limits = ServerLimits(settings, self._app.body_budget)
        self._app.authenticator.on_keys_required = self._limits.connections.require_keys
        self.settings = settings
        self._reloading = asyncio.Lock()
        self._on_ready = on_ready
        self._watchdog = Watchdog(settings.log_block_ms / 1000)
        super().__init__(
            ServerConfig(
                self._app,
                self._limits,
                http=HttpProtocol,
                ws="none",  # HttpProtocol chooses the protocol of WebSockets
                ws_max_size=settings.max_body_bytes,
                ws_per_message_deflate=False,  # compression would take 40 KiB for each connection
                # A late pong means a slow reader. A client that has disconnected is noticed by its closed socket.
                ws_ping_interval=settings.keepalive_seconds or None,
                ws_ping_timeout=None,
                interface="asgi3",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                workers=1,
                timeout_graceful_shutdown=math.ceil(settings.shutdown_grace_seconds) + _FINAL_EVENTS_SECONDS,
            )
        )
        self._write_timeout = WriteTimeout(
            self.server_state.connections,
            seconds=settings.write_timeout_seconds,
            min_rate=settings.min_bytes_per_second,
        )

    @property
    def metrics(self) -> "ServerMetrics | None":
        return self._app.metrics

    async def apply_settings(self, settings: Settings) -> SettingChanges:
        """Change the settings of the running server, without dropping a connection or a response.

        Settings that need a restart are left as they are. Raises AntiphonError if the settings cannot be used; the
        server then continues with the old ones.
        """
        async with self._reloading:
            changes = compare_settings(self.settings, fit_connections(settings, raise_descriptor_limit()))
            settings = changes.settings
            authenticator = self._app.authenticator
            if not settings.api_keys and not authenticator.has_stored_keys:
                await authenticator.search_store()  # a key may have been created since the start
            has_stored_keys = authenticator.has_stored_keys
            warning = check_exposure(settings, has_stored_keys=has_stored_keys)
            if self.settings.api_keys and not (settings.api_keys or has_stored_keys or warning):
                warning = f"api_keys: the server has no key any more: anyone who can reach {settings.host} can use it"
            await reconfigure(self._engine, self.settings, settings)
            self._app.apply_settings(settings)
            self._limits.apply_settings(settings)
            if {"log_level", "log_format"} & set(changes.changed):
                configure_logging(settings)
            self.settings = settings
        if warning is not None:
            logger.warning("%s", warning)
        return changes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        except SystemExit:
            raise self._app.startup_error or ServerError("The server could not start.") from None
        except OSError as error:  # another process took the port while the models were loaded
            raise ConfigError(explain_bind_error(error, self.settings)) from None
        # Everything loaded so far lives until the end: exclude it from garbage collection. There is little garbage
        # among it, and a collection would take longer than the start of the store.
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        self._watchdog.start()
        self._write_timeout.start()
        if self._engine.containers is not None:
            self._engine.containers.start_compilation()
        if sockets:
            url = format_url(sockets[0])
            if self.load_settings is not None:
                self._store_user = register_store_user(self.settings, url)
                file = ServerFile.create(self.settings.data_dir / FOLDER, url)
                self._reloader = Reloader(
                    self.load_settings, self.apply_settings, file=file, on_hangup=self.request_stop
                )
                self._reloader.start()
            if self._on_ready is not None:
                self._on_ready(url)

    def request_stop(self) -> None:
        """Start a graceful shutdown."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish or hand over all work within the bounds of the settings, and close.

        First the server only reports that it is not ready, so that a load balancer uses others. Then it accepts no
        connections, and responses have the grace period to end. After it, foreground responses fail and background
        responses are released: another process continues them at once. If the engine cannot be closed in time, the
        process exits with 1.
        """
        if self._reloader is not None:
            self._reloader.close()
        self._engine.start_draining()
        if self._stop_signal == signal.SIGTERM:
            self._limits.linger_seconds = _LINGER_SECONDS
            if self.settings.shutdown_drain_seconds:
                await self.drain(self.settings.shutdown_drain_seconds)
        self._announce_stop()
        grace = self.settings.shutdown_grace_seconds
        self.config.timeout_graceful_shutdown = math.ceil(grace) + _FINAL_EVENTS_SECONDS
        stop_timer = asyncio.get_running_loop().call_later(grace, self._stop_runs)
        self._limits.is_stopping = True
        self._app.start_shutdown()
        await accept_waiting(sockets or (), are_shared=self.shares_listeners)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            stop_timer.cancel()
            self._watchdog.stop()
            self._write_timeout.stop()
            if self._store_user is not None:
                self._store_user.remove()
        if not self._app.has_closed:
            # The end of the event loop would wait for the same tasks and threads.
            logger.error("stopped with an error; acknowledged data is stored")
            logging.shutdown()
            os._exit(1)
        logger.info("stopped")

    async def drain(self, seconds: float) -> None:
        """Accept requests for this time, although the server is not ready."""
        logger.info("stopping: not ready, and accepts requests for %g s", seconds)
        await asyncio.sleep(seconds)

    def _announce_stop(self) -> None:
        foreground, background = self._engine.foreground_count, self._engine.background_count
        logger.info("stopping: accepts no more connections")
        if foreground or background:
            logger.info(
                "stopping: %d foreground and %d background responses have %g s to end",
                foreground,
                background,
                self.settings.shutdown_grace_seconds,
            )

    def _stop_runs(self) -> None:
        foreground, background = self._engine.foreground_count, self._engine.background_count
        if foreground or background:
            logger.info(
                "stopping: the time is over, %d foreground responses fail and %d background responses are released",
                foreground,
                background,
            )
        self._engine.stop_runs()

    async def _wait_tasks_to_complete(self) -> None:
        await super()._wait_tasks_to_complete()
        await self._engine.wait_for_background()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers. Unlike uvicorn, do not raise the signal again: a requested stop exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in self.stop_signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a graceful shutdown; on a second signal exit at once. Acknowledged data is on disk already."""
        if self.should_exit:
            os._exit(128 + sig)
        self._stop_signal = sig
        self.should_exit = True
