"""Checks of the answers to approval requests of MCP calls."""

from collections.abc import Sequence

from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import McpApprovalRequest, McpApprovalResponse, McpCall
from antiphon.protocol.items import Item
from antiphon.protocol.tools import McpTool, Tool
from antiphon.protocol.unions import Unknown

Items = Sequence[Item | Unknown]


def check_approvals(sent: Items, history: Items, tools: Sequence[Tool | Unknown] | None) -> None:
    """Raise InvalidRequest for an answer in `sent` that has no request, is repeated, or names an absent server."""
    if McpApprovalResponse not in map(type, sent):
        return
    items = [*history, *sent]
    requests = {item.id: item for item in items if isinstance(item, McpApprovalRequest)}
    executed = {item.approval_request_id for item in items if isinstance(item, McpCall)}
    answered = {item.approval_request_id for item in history if isinstance(item, McpApprovalResponse)}
    labels = {tool.server_label for tool in tools or () if isinstance(tool, McpTool)}
    for index, item in enumerate(sent):
        if not isinstance(item, McpApprovalResponse):
            continue
        path = f"input[{index}].approval_request_id"
        request = requests.get(item.approval_request_id)
        if request is None:
            message = f"No approval request found with id '{item.approval_request_id}'."
            raise InvalidRequest(message, param=path, code="invalid_value")
        if item.approval_request_id in answered:
            message = f"The approval request '{item.approval_request_id}' was answered already."
            raise InvalidRequest(message, param=path, code="approval_already_used")
        answered.add(item.approval_request_id)
        if item.approve and request.server_label not in labels and request.id not in executed:
            message = (
                f"There is no MCP server labelled '{request.server_label}' in 'tools', which the approved call needs."
            )
            raise InvalidRequest(message, param="tools", code="invalid_value")
