"""Programs in isolates of this process: a process for each would take most of the time of a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from antiphon.tools.hosted.base import HostedContext, HostedSession, HostedSetup
from antiphon.tools.hosted.program.messages import CallResult, CallResults, ProgramSetup, ProgramStep
from antiphon.tools.hosted.program.runner import MAX_ARGUMENTS_CHARS, ProgramRunner
from antiphon.tools.hosted.program.tool import ProgramHostedTool, ProgramSession
from antiphon.tools.hosted.program.worker import IsolatedProgram


class LocalProgram:
    """A program with the interface of `RunningProgram`."""

    def __init__(self, setup: ProgramSetup) -> None:
        self._program = IsolatedProgram(setup)

    async def start(self) -> ProgramStep:
        return self._program.start()

    async def resume(self, results: list[CallResult]) -> ProgramStep:
        return self._program.resume(CallResults(results))

    def close(self) -> None:
        self._program.close()


class LocalRunner(ProgramRunner):
    @asynccontextmanager
    async def open(self, project: str, **fields: Any) -> AsyncIterator[Any]:
        limits = self.settings
        program = LocalProgram(
            ProgramSetup(
                memory_bytes=limits.memory_bytes,
                output_chars=limits.output_chars,
                calls=limits.calls,
                arguments_chars=MAX_ARGUMENTS_CHARS,
                **fields,
            )
        )
        try:
            yield program
        finally:
            program.close()


class LocalPrograms(ProgramHostedTool):
    """The tool with programs in this process."""

    def __init__(self, setup: HostedSetup) -> None:
        super().__init__(setup)
        self._local = LocalRunner(setup.settings.programs)

    async def open(self, tool: Any, context: HostedContext) -> HostedSession:
        return ProgramSession(self._local, context)
