"""The hosted tool `mcp`: tools of MCP servers."""

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from antiphon import offload
from antiphon.errors import AntiphonError, ConnectorError
from antiphon.protocol.hosted import McpListTools, McpToolInfo
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import McpTool, Tool, hide_credentials
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.base import HostedContext, HostedSession, HostedSetup, HostedTool, HostedUnavailable
from antiphon.tools.hosted.mcp.approvals import claim_approvals, claim_denials, find_approvals, find_denials
from antiphon.tools.hosted.mcp.calls import McpServerCalls
from antiphon.tools.hosted.mcp.connections import McpConnections
from antiphon.tools.hosted.mcp.session import McpSession
from antiphon.tools.hosted.mcp.targets import McpTarget, find_target
from antiphon.tools.mcp_connection import McpFailure, load_package
from antiphon.upstream.redaction import mask_secrets

if TYPE_CHECKING:
    from mcp.types import Tool as ListedTool

TYPES = frozenset({"mcp"})
MAX_TOOLS = 1024
MAX_LIST_BYTES = 2 * 1024 * 1024
CALL_SECONDS = 300.0


class McpHostedTool(HostedTool):
    """Calls tools of the MCP servers that requests name, or that the settings define."""

    types = TYPES

    def __init__(self, setup: HostedSetup) -> None:
        self._servers = setup.settings.mcp_servers
        self._connections = McpConnections()
        self._is_loaded = False

    async def close(self) -> None:
        await self._connections.close()

    def echo(self, tool: Tool | Unknown) -> Tool | Unknown:
        """Return the tool without credentials."""
        assert isinstance(tool, McpTool)
        shown = msgspec.structs.replace(tool, require_approval=tool.require_approval or "always")
        return hide_credentials(shown)

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        assert isinstance(tool, McpTool)
        if not self._is_loaded:
            await offload.run_in_thread(load_package)
            self._is_loaded = True
        path = context.find_param(tool)
        target = find_target(
            tool,
            path,
            servers=self._servers,
            rules=context.outbound,
            project=context.project,
            timeout=CALL_SECONDS,
        )
        approvals = find_approvals(context, tool.server_label)
        known = find_known_list(tool, context)
        error: JsonObject | None = None
        listed: Sequence[McpToolInfo] | None = known
        is_deferred = bool(tool.defer_loading) and context.can_defer and not approvals
        # The steps of an earlier attempt have its list. The server may be unreachable now.
        if listed is None and not is_deferred and not context.resumed:
            listed, error = await self._try_to_list(target, has_begun=context.has_begun)
        if approvals:
            await claim_approvals(approvals, context)
        if denied := find_denials(context, tool.server_label):
            await claim_denials(denied, context)
        server = McpServerCalls(target, self._connections, context.response_id)
        return McpSession(
            tool,
            server,
            listed,
            is_known=known is not None,
            error=error,
            approvals=approvals,
            list_tools=partial(self._try_to_list, target, has_begun=lambda: True),
        )

    async def _try_to_list(
        self, target: McpTarget, *, has_begun: Callable[[], bool]
    ) -> tuple[Sequence[McpToolInfo], JsonObject | None]:
        """Return the tools of a server, or no tools and the reason.

        Raises ConnectorError if the response has not begun.
        """
        try:
            return await self._list_tools(target), None
        except AntiphonError as failure:
            if not has_begun():
                # Without the failure as cause, which would be logged with the secrets that the message masks.
                raise make_list_error(target, failure) from None
            return [], describe_failure(target, failure)

    async def _list_tools(self, target: McpTarget) -> list[McpToolInfo]:
        async with self._connections.use(target) as client:
            listed = [describe_tool(tool) for tool in await client.list_tools()]
        if len(listed) > MAX_TOOLS or len(msgspec.json.encode(listed)) > MAX_LIST_BYTES:
            raise McpFailure(f"The server lists more than {MAX_TOOLS} tools, or more than {MAX_LIST_BYTES} bytes.")
        return listed


def create(setup: HostedSetup) -> HostedTool:
    """Create the tool. Raises HostedUnavailable if the package is missing."""
    if find_spec("mcp") is None:  # importing it takes long, and most servers may never need it
        raise HostedUnavailable(TYPES, "MCP needs the package 'mcp': pip install 'antiphon[mcp]'.")
    return McpHostedTool(setup)


def find_known_list(tool: McpTool, context: HostedContext) -> list[McpToolInfo] | None:
    """Return the tools of the last list of the server in the context, or None."""
    for item in reversed(context.items):
        if isinstance(item, McpListTools) and item.server_label == tool.server_label and item.error is None:
            return item.tools
    return None


def describe_tool(tool: "ListedTool") -> McpToolInfo:
    """Return a tool as an item lists it. `idempotent` is set only if the server declares it."""
    hints = tool.annotations
    annotations = {"read_only": bool(hints is not None and hints.read_only_hint)}
    if hints is not None and hints.idempotent_hint:
        annotations["idempotent"] = True
    return McpToolInfo(tool.name, tool.input_schema, annotations, tool.description or tool.title)


def make_list_error(target: McpTarget, failure: AntiphonError) -> AntiphonError:
    """Return the error for a request whose server cannot list its tools."""
    message = f"Error retrieving tool list from MCP server: '{target.label}'."
    status = failure.http_status if isinstance(failure, McpFailure) else None
    if status is not None:
        message += f" Http status code: {status} ({_get_phrase(status)})"
    else:
        message += f" {mask_secrets(_get_reason(failure), target.secrets)}"
    return ConnectorError(message, param="tools")


def describe_failure(target: McpTarget, failure: AntiphonError) -> JsonObject:
    """Return the error object of a list that failed."""
    message = mask_secrets(_get_reason(failure), target.secrets)
    if isinstance(failure, McpFailure) and failure.number is not None:
        return {"type": "mcp_protocol_error", "code": failure.number, "message": message}
    status = failure.http_status if isinstance(failure, McpFailure) else None
    return {"type": "http_error", "code": status or failure.status, "message": message}


def _get_reason(failure: AntiphonError) -> str:
    return failure.reason if isinstance(failure, McpFailure) else failure.message


def _get_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
