"""A process of ours that exchanges messages over its stdin and stdout.

A frame is msgpack with a length of four bytes. The process ends with its stdin. It gets no secrets: only a few
environment variables are passed on.
"""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from antiphon.config.loading import environment
from antiphon.errors import ServerError

T = TypeVar("T")

# Variables that an interpreter may need. The process gets no others, since they may be secrets.
_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")

# The largest length of four bytes.
_MAX_FRAME_BYTES = 2**32 - 1


class FramedProcess:
    """A running process and its frames."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, variables: Mapping[str, str]) -> "FramedProcess":
        """Start the module in a new interpreter, with these variables. Raises ServerError if that is not possible."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        given = environment()
        chosen = {name: given[name] for name in _VARIABLES if name in given} | dict(variables)
        # -P: modules in the working directory must not be imported.
        command = (sys.executable, "-P", "-m", module)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=null, env=chosen, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"The process {module} cannot start: {error}") from error
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def send(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        data = msgspec.msgpack.encode(message)
        self._process.stdin.write(len(data).to_bytes(4) + data)
        with suppress(ConnectionError):  # `receive` notices the end of the process
            await self._process.stdin.drain()

    async def receive(self, kind: type[T], *, max_bytes: int = _MAX_FRAME_BYTES) -> T | None:
        """Return the next message; None if the process has ended. One that sends a larger message is killed."""
        assert self._process.stdout is not None
        try:
            size = int.from_bytes(await self._process.stdout.readexactly(4))
            if size > max_bytes:
                with suppress(ProcessLookupError):
                    self._process.kill()
                return None
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._process.wait()
            return None

    async def end(self) -> None:
        """Kill the process and wait for its end."""
        with suppress(ProcessLookupError):
            self._process.kill()
        # This closes the pipes. A running call of `receive` may still read, and then sees the end itself.
        with suppress(RuntimeError):
            await self._process.communicate()
        await self._process.wait()
