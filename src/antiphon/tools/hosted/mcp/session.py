"""An `mcp` tool during one response: the list of its tools, their functions, and approved calls."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec

from antiphon.protocol.hosted import McpListTools, McpToolInfo
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import McpTool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.tools.hosted.base import ApprovedCall, HostedCall, HostedFunction, HostedSession
from antiphon.tools.hosted.events import make_item_event
from antiphon.tools.hosted.mcp.approvals import Approval
from antiphon.tools.hosted.mcp.calls import McpApproval, McpCallRun, McpServerCalls
from antiphon.tools.hosted.mcp.filters import is_allowed, needs_approval

ListTools = Callable[[], Awaitable[tuple[Sequence[McpToolInfo], JsonObject | None]]]


class McpSession(HostedSession):
    """One server during one response.

    `listed` is the list of the server's tools. `is_known` is True if the context already has the list. `error` is the
    reason if the tools could not be listed. If `listed` is None, an earlier attempt at the response has listed them, or
    `list_tools` does before the first search.
    """

    def __init__(
        self,
        entry: McpTool,
        server: McpServerCalls,
        listed: Sequence[McpToolInfo] | None,
        *,
        is_known: bool,
        error: JsonObject | None = None,
        approvals: Sequence[Approval] = (),
        list_tools: ListTools | None = None,
    ) -> None:
        self._entry = entry
        self._server = server
        self._is_known = is_known
        self._error = error
        self._list_tools = list_tools
        self.is_listed = listed is not None
        self.label = entry.server_label
        self._set_tools(listed or ())
        self.pending = [
            ApprovedCall(name=each.name, arguments=each.arguments, begin=self._begin_approved(each))
            for each in approvals
        ]

    def _set_tools(self, listed: Sequence[McpToolInfo]) -> None:
        self._tools = {tool.name: tool for tool in listed if is_allowed(tool, self._entry)}
        self.functions = [_make_function(tool) for tool in self._tools.values()]
        description = self._server.target.description if self._tools else None
        self.instructions = f"The tools of the MCP server '{self.label}': {description}" if description else ""

    @property
    def is_deferred(self) -> bool:
        return not self.is_listed

    async def load(self) -> Sequence[Delta]:
        assert self._list_tools is not None
        listed, self._error = await self._list_tools()
        self.is_listed = True
        self._set_tools(listed)
        return self._make_list()

    def observe(self, item: Item | Unknown) -> None:
        """Take the list that an earlier attempt at this response has loaded."""
        if self.is_listed or not isinstance(item, McpListTools):
            return
        if item.server_label == self.label and item.error is None:
            self.is_listed = True
            self._set_tools(item.tools)

    async def introduce(self) -> AsyncGenerator[Sequence[Delta], None]:
        if self.is_listed and not self._is_known:
            yield self._make_list()

    def _make_list(self) -> Sequence[Delta]:
        key = f"mcp_list_tools/{self.label}"
        listed = McpListTools(self.label, list(self._tools.values()), error=self._error)
        ending = "completed" if self._error is None else "failed"
        return [
            OpenItem(key, msgspec.structs.replace(listed, tools=[], error=None), "mcpl"),
            make_item_event(key, "mcp_list_tools.in_progress"),
            make_item_event(key, f"mcp_list_tools.{ending}"),
            CloseItem(key, listed),
        ]

    def begin(self, name: str, key: str) -> HostedCall:
        tool = self._tools[name]
        if needs_approval(tool, self._entry):
            return McpApproval(self._server, tool, key)
        return McpCallRun(self._server, tool, key, None)

    def _begin_approved(self, approval: Approval) -> Callable[[str], HostedCall]:
        def begin(key: str) -> HostedCall:
            tool = self._tools.get(approval.name) or McpToolInfo(approval.name, {})
            return McpCallRun(self._server, tool, key, approval.request_id)

        return begin


def _make_function(tool: McpToolInfo) -> HostedFunction:
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    # Some upstreams reject an object schema without `properties`.
    parameters = {"type": "object", "properties": {}} | schema
    return HostedFunction(name=tool.name, description=tool.description or tool.name, parameters=parameters)
