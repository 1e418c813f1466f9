"""Processes of their own that do what they are told: a line goes in, a line comes out."""

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.servers import DidNotStart, make_environment

_SECONDS = 60.0


class Driver:
    """A started process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._log = log

    async def ask(self, *message: Any) -> Any:
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
            raise DidNotStart(f"{self.name} fell silent:\n{self._log.read()[-4000:].decode(errors='replace')}")
        return line

    async def kill(self) -> None:
        """As kill -9: it gets no chance to put anything away."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def halt(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def drive(name: str, python: Path, driver: str, arguments: Sequence[str], folder: Path) -> AsyncIterator[Driver]:
    """Start a driver that works in this folder; stop it on the way out, whatever happens."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-m", f"benchmarks.drivers.{driver}", *arguments),
            cwd=folder,
            env=make_environment(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        driven = Driver(name, process, log)
        try:
            await driven.read()
            yield driven
        finally:
            # It holds nothing that it would have to put away.
            await driven.kill()
