"""Hosted tools of a request: the types that this server runs, their sessions, and the start of the rounds."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.hosted.answer import CallBudget
from antiphon.engine.serve.hosted.journal import HostedJournal, NoJournal
from antiphon.engine.serve.hosted.rounds import HostedRun, StartModel
from antiphon.engine.serve.hosted.toolset import HostedToolset, OpenSession
from antiphon.engine.serve.routing import Serving
from antiphon.engine.serve.tool_emulation.translate_history import has_hosted_items
from antiphon.errors import UnsupportedTool
from antiphon.protocol.items import Item
from antiphon.protocol.tool_lists import SharedTools
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import NO_SERVICES, HostedContext, HostedServices
from antiphon.tools.hosted.registry import HostedTools

if TYPE_CHECKING:
    from antiphon.engine.telemetry import EngineTelemetry


class HostedLoop:
    """Serves requests with hosted tools. `max_calls` is the maximum number of hosted calls in one response.

    With `run_locally`, the tools are run here even if the backend could run them itself.
    """

    def __init__(
        self,
        tools: HostedTools,
        sealer: Sealer,
        *,
        services: HostedServices = NO_SERVICES,
        max_calls: int,
        run_locally: bool,
    ) -> None:
        self.tools = tools
        self._services = services
        self._sealer = sealer
        self._max_calls = max_calls
        self.run_locally = run_locally
        self.telemetry: EngineTelemetry | None = None

    def select_types(self, capabilities: Capabilities) -> frozenset[str]:
        """Return the tool types that this server runs itself for a backend."""
        if "function" not in capabilities.tools and not capabilities.any_tool:
            return frozenset()
        return frozenset() if capabilities.any_tool and not self.run_locally else self.tools.types

    def applies_to(self, tools: list[Tool | Unknown] | None, capabilities: Capabilities) -> bool:
        """Return True if one of the tools is run by this server."""
        if not tools or not self.tools.types or type(tools) is SharedTools:  # shared lists have no hosted tools
            return False
        types = self.select_types(capabilities)
        return any(tool.type in types for tool in tools)

    def replaces_items(self, items: Sequence[Item | Unknown], capabilities: Capabilities) -> bool:
        """Return True if the backend has tools of its own, and the items have calls of this server's tools."""
        return capabilities.any_tool and has_hosted_items(items)

    def echo_tools(self, tools: list[Tool | Unknown]) -> list[Tool | Unknown]:
        """Return the tools as the response shows them."""
        return [self._echo(tool) for tool in tools]

    def _echo(self, tool: Tool | Unknown) -> Tool | Unknown:
        hosted = self.tools.find(tool.type)
        return tool if hosted is None else hosted.echo(tool)

    async def start(
        self,
        start_model: StartModel,
        turn: Turn,
        *,
        response_id: str,
        capabilities: Capabilities,
        journal: HostedJournal | None = None,
        replayed: Sequence[Delta] = (),
        has_begun: Callable[[], bool] = lambda: False,
    ) -> Serving:
        """Open the sessions and start the first model call. Errors before the first delta are raised here.

        `has_begun` returns True if the stream of the response has begun meanwhile.
        """
        types = self.select_types(capabilities)
        journal = journal or NoJournal()
        client_tools = [tool for tool in turn.request.tools or () if tool.type not in types]
        toolset = HostedToolset(turn.request, client_tools, turn.items)
        limit = min(turn.request.max_tool_calls or self._max_calls, self._max_calls)
        async with AsyncExitStack() as stack:
            for tool in turn.request.tools or ():
                if tool.type in types:
                    opened = await self._open(
                        tool,
                        turn,
                        response_id,
                        resumed=bool(journal.recorded),
                        has_begun=has_begun,
                        can_defer=toolset.can_defer(tool) and not capabilities.any_tool,
                    )
                    stack.push_async_callback(opened.session.close)
                    toolset.add(opened)
            run = HostedRun(
                turn,
                toolset,
                start_model,
                journal,
                sealer=self._sealer,
                budget=CallBudget(limit, f"the limit of {limit} tool calls is reached"),
                images=capabilities.images,
                replayed=replayed,
                telemetry=self.telemetry,
            )
            serving = await run.start()
            sessions = stack.pop_all()
        return msgspec.structs.replace(serving, deltas=HostedDeltas(run.stream(), run, sessions))

    async def _open(
        self,
        tool: Tool | Unknown,
        turn: Turn,
        response_id: str,
        *,
        resumed: bool,
        has_begun: Callable[[], bool],
        can_defer: bool,
    ) -> OpenSession:
        hosted = self.tools.find(tool.type)
        if hosted is None:
            raise UnsupportedTool(f"Tools of type '{tool.type}' are not supported by this server.", param="tools")
        context = HostedContext(
            project=turn.project,
            response_id=response_id,
            request=turn.request,
            items=turn.items,
            outbound=turn.outbound,
            warn=turn.warnings.append,
            services=self._services,
            resumed=resumed,
            has_begun=has_begun,
            can_defer=can_defer,
        )
        return OpenSession(tool, hosted, await hosted.open(tool, context))


class HostedDeltas:
    """The deltas of a run. Closing them stops the model or the tool, and closes the sessions."""

    def __init__(self, stream: AsyncGenerator[Sequence[Delta], None], run: HostedRun, sessions: AsyncExitStack) -> None:
        self._stream = stream
        self._run = run
        self._sessions = sessions

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            return await anext(self._stream)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        sessions, self._sessions = self._sessions, AsyncExitStack()
        async with sessions:
            try:
                await self._stream.aclose()
            finally:
                await self._run.close()
