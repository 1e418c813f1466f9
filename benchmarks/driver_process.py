"""Driver processes, controlled over pipes: one JSON line per request and per result."""

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.servers import ProcessFailed, make_environment

_SECONDS = 60.0


class DriverProcess:
    """A running driver."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._log = log

    async def send(self, *message: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return json.loads(await self.read())

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            self._log.seek(0)
            raise ProcessFailed(f"{self.name} does not answer:\n{self._log.read()[-4000:].decode(errors='replace')}")
        return line

    async def kill(self) -> None:
        """Send SIGKILL and wait. The process cannot clean up."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def start_driver(
    name: str, python: Path, driver: str, arguments: Sequence[str], folder: Path
) -> AsyncIterator[DriverProcess]:
    """Start a driver in this folder, and kill it on exit."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-m", f"benchmarks.drivers.{driver}", *arguments),
            cwd=folder,
            env=make_environment(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        driven = DriverProcess(name, process, log)
        try:
            await driven.read()
            yield driven
        finally:
            # A driver has nothing to clean up.
            await driven.kill()
