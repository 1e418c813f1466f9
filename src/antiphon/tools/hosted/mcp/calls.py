"""Calls of MCP tools, as output items."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from antiphon.errors import AntiphonError
from antiphon.protocol.hosted import McpApprovalRequest, McpCall, McpToolInfo
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.stream.deltas import CloseItem, Delta, OpenItem, WholeItem
from antiphon.tools.hosted.base import HostedCall, OpeningCall
from antiphon.tools.hosted.events import make_item_event
from antiphon.tools.hosted.mcp.connections import McpConnections
from antiphon.tools.hosted.mcp.filters import is_repeatable
from antiphon.tools.hosted.mcp.targets import McpTarget
from antiphon.tools.mcp import translate_result
from antiphon.tools.mcp_connection import IDEMPOTENCY_KEY, McpFailure
from antiphon.upstream.redaction import mask_secrets

MAX_RESULT_BYTES = 4 * 1024 * 1024
_INVALID_PARAMS = -32602
_INTERNAL_ERROR = -32603
_CALL_LOST = "The call may or may not have taken effect."


class McpServerCalls:
    """Calls tools of one server. `response_id` makes the idempotency keys unique."""

    def __init__(self, target: McpTarget, connections: McpConnections, response_id: str) -> None:
        self.target = target
        self._connections = connections
        self._response_id = response_id

    async def call(self, name: str, arguments: JsonObject, key: str) -> JsonObject:
        """Return the result of `tools/call`. Raises AntiphonError if there is none."""
        meta = {IDEMPOTENCY_KEY: f"{self._response_id}/{key}"}
        limit = asyncio.timeout(self.target.timeout)
        try:
            async with limit, self._connections.use(self.target) as client:
                return await client.call(name, arguments, meta=meta, report=lambda _: None)
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = f"{self.target.timeout:g}"
            raise McpFailure(f"The server did not answer in {seconds} s. {_CALL_LOST}", http_status=504) from None


class McpCallRun(OpeningCall):
    """A call of a tool that needs no approval, or has one."""

    def __init__(self, server: McpServerCalls, tool: McpToolInfo, key: str, approval_request_id: str | None) -> None:
        super().__init__(key)
        self._server = server
        self._tool = tool
        self._item = McpCall(
            "", tool.name, server.target.label, approval_request_id=approval_request_id, status="in_progress"
        )
        self._written = ""

    @property
    def is_repeatable(self) -> bool:
        return is_repeatable(self._tool)

    def write(self, fragment: str) -> Sequence[Delta]:
        opening = self.open()
        if not fragment:
            return opening
        self._written += fragment
        return [*opening, make_item_event(self.key, "mcp_call_arguments.delta", delta=fragment)]

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        arguments = arguments.strip() or "{}"
        self._item = msgspec.structs.replace(self._item, arguments=arguments)
        rest = arguments.removeprefix(self._written) if arguments.startswith(self._written) else ""
        yield [
            *self.write(rest),
            make_item_event(self.key, "mcp_call_arguments.done", arguments=arguments),
        ]
        yield await self._execute(arguments)

    def fail(self, message: str) -> Sequence[Delta]:
        return [*self.open(), *self._close_failed(_make_protocol_error(_INTERNAL_ERROR, message))]

    async def _execute(self, arguments: str) -> Sequence[Delta]:
        try:
            decoded = read_json(arguments, JsonObject)
        except msgspec.DecodeError:
            return self._close_failed(_make_protocol_error(_INVALID_PARAMS, "The arguments are not a JSON object."))
        try:
            payload = await self._server.call(self._tool.name, decoded, self.key)
        except AntiphonError as error:
            return self._close_failed(self._describe(error))
        return self._close_with(payload)

    def _close_with(self, payload: JsonObject) -> Sequence[Delta]:
        try:
            result = translate_result(payload)
        except msgspec.ValidationError as error:
            message = f"The server's result is invalid: {error}"
            return self._close_failed(_make_protocol_error(_INTERNAL_ERROR, message))
        if result.is_error:
            content = payload.get("content") or []
            encoded = self._mask(msgspec.json.encode(content).decode())
            return self._close_failed({"type": "mcp_tool_execution_error", "content": read_json(encoded)})
        output = self._mask(_write_output(result.output))
        if len(output) > MAX_RESULT_BYTES:
            message = f"The result is larger than {MAX_RESULT_BYTES} bytes."
            return self._close_failed(_make_protocol_error(_INTERNAL_ERROR, message))
        item = msgspec.structs.replace(self._item, output=output, status="completed")
        return [make_item_event(self.key, "mcp_call.completed"), CloseItem(self.key, item)]

    def _close_failed(self, error: JsonObject) -> Sequence[Delta]:
        arguments = self._item.arguments or self._written  # a call that was interrupted is not run
        item = msgspec.structs.replace(self._item, arguments=arguments, error=error, status="failed")
        return [make_item_event(self.key, "mcp_call.failed"), CloseItem(self.key, item)]

    def _describe(self, error: AntiphonError) -> JsonObject:
        message = self._mask(error.reason if isinstance(error, McpFailure) else error.message)
        if isinstance(error, McpFailure) and error.number is not None:
            return _make_protocol_error(error.number, message)
        status = error.http_status if isinstance(error, McpFailure) else None
        return {"type": "http_error", "code": status or error.status, "message": message}

    def _mask(self, text: str) -> str:
        return mask_secrets(text, self._server.target.secrets)

    def make_opening(self) -> list[Delta]:
        item = msgspec.structs.replace(self._item, arguments="")
        return [OpenItem(self.key, item, "mcp"), make_item_event(self.key, "mcp_call.in_progress")]


class McpApproval(HostedCall):
    """A call that needs an approval. Its item is the request for it."""

    def __init__(self, server: McpServerCalls, tool: McpToolInfo, key: str) -> None:
        self._server = server
        self._tool = tool
        self._key = key

    @property
    def is_repeatable(self) -> bool:
        return True  # nothing is executed

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        arguments = arguments.strip() or "{}"
        try:
            read_json(arguments, JsonObject)
        except msgspec.DecodeError:
            async for batch in McpCallRun(self._server, self._tool, self._key, None).run(arguments):
                yield batch
            return
        self.needs_client = True
        item = McpApprovalRequest("", arguments, self._tool.name, self._server.target.label)
        yield [WholeItem(item)]

    def fail(self, message: str) -> Sequence[Delta]:
        return McpCallRun(self._server, self._tool, self._key, None).fail(message)


def _make_protocol_error(code: int, message: str) -> JsonObject:
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def _write_output(output: str | list[dict[str, Any]]) -> str:
    """Return a result as text. An image is described only, because the output of a call has no place for it."""
    if isinstance(output, str):
        return output
    return "\n".join(_write_part(part) for part in output)


def _write_part(part: dict[str, Any]) -> str:
    if part["type"] == "input_text":
        return str(part["text"])
    head, _, data = str(part["image_url"]).partition(",")
    kind = head.removeprefix("data:").partition(";")[0]
    note = {"image": kind, "base64_characters": len(data), "note": "cannot be shown"}
    return msgspec.json.encode(note).decode()
