"""Reload of the settings at SIGHUP, for a server process or a supervisor of workers."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from antiphon.config.changes import SettingChanges
from antiphon.config.settings import Settings
from antiphon.errors import AntiphonError
from antiphon.server.running_servers import ReloadResult, ServerFile

logger = logging.getLogger(__name__)

ApplySettings = Callable[[Settings], Awaitable[SettingChanges]]


@contextmanager
def hold_signal() -> Iterator[None]:
    """Hold SIGHUP back until a reloader starts. Without a handler, it would end a server that is loading its models."""
    earlier = signal.getsignal(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # drops a signal that is held back: the error must be reported
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGHUP, earlier)
        raise


class Reloader:
    """Reads the settings again at SIGHUP and applies them. The result is logged, and written for `antiphon reload`.

    The kernel sends SIGHUP too if the terminal of the server is closed. Then `on_hangup` is called.
    """

    def __init__(
        self,
        load: Callable[[], Settings],
        apply: ApplySettings,
        *,
        file: ServerFile,
        on_hangup: Callable[[], None],
    ) -> None:
        self._load = load
        self._apply = apply
        self._file = file
        self._on_hangup = on_hangup
        self._has_terminal = _is_terminal()
        self._task: asyncio.Task[None] | None = None
        self._is_requested = False

    def start(self) -> None:
        """Handle SIGHUP on the running event loop, including one that arrived during the start (`hold_signal`)."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._handle_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        # A second SIGHUP of a closed terminal must not end the shutdown.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if self._task is not None:
            self._task.cancel()
        self._file.remove()

    def _handle_signal(self) -> None:
        if self._has_terminal and not _is_terminal():
            self._on_hangup()
            return
        self._is_requested = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        # A signal during a reload requests another one: the file may have changed after it was read.
        while self._is_requested:
            self._is_requested = False
            self._file.report(await self.reload())

    async def reload(self) -> ReloadResult:
        """Read and apply the settings. An error leaves the old ones in effect."""
        try:
            settings = self._load()
            for warning in settings.warnings:
                logger.warning("%s", warning)
            changes = await self._apply(settings)
        except Exception as error:
            message = describe_failure(error)
            logger.error("the settings were not reloaded, the old ones stay in effect: %s", message)
            return ReloadResult(error=message)
        result = describe_changes(changes)
        logger.info("%s", result.changes)
        if result.restart_needed:
            logger.warning("%s", result.restart_needed)
        return result


def describe_failure(error: Exception) -> str:
    """Return the error of a reload in one line. An unexpected error is logged with its traceback."""
    if isinstance(error, (AntiphonError, OSError)):
        return " ".join(str(error).split())
    logger.error("the settings were not reloaded", exc_info=error)
    return f"{type(error).__name__}: see the log of the server."


def describe_changes(changes: SettingChanges) -> ReloadResult:
    changed = f"reloaded: {', '.join(changes.changed)}" if changes.changed else "reloaded: no setting has changed"
    restart_needed = f"a restart is needed to change: {', '.join(changes.ignored)}" if changes.ignored else ""
    return ReloadResult(changed, restart_needed)


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
