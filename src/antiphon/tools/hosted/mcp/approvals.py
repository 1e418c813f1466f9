"""Approved calls: each approval is used once, by one response."""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import McpApprovalRequest, McpApprovalResponse, McpCall
from antiphon.tools.hosted.base import HostedContext

# Longer ids do not fit an index of PostgreSQL.
_MAX_KEY_LENGTH = 200


class Approval(Struct, frozen=True):
    """A call that the client has approved, with the id of the request for approval."""

    request_id: str
    name: str
    arguments: str


def find_approvals(context: HostedContext, server_label: str) -> list[Approval]:
    """Return the calls of a server that the input of the request approves, and that have no result yet."""
    sent = context.request.input if isinstance(context.request.input, list) else ()
    approved = [item.approval_request_id for item in sent if isinstance(item, McpApprovalResponse) and item.approve]
    if not approved:
        return []
    requests = {item.id: item for item in context.items if isinstance(item, McpApprovalRequest)}
    done = {item.approval_request_id for item in context.items if isinstance(item, McpCall)}
    return [
        Approval(each, requests[each].name, requests[each].arguments)
        for each in dict.fromkeys(approved)
        if each not in done and each in requests and requests[each].server_label == server_label
    ]


def _make_key(request_id: str) -> str:
    """Return the id of a request, or a digest of an id that is not of this server: clients may send any text."""
    if len(request_id) <= _MAX_KEY_LENGTH and "/" not in request_id:
        return request_id
    return f"#{hashlib.sha256(request_id.encode()).hexdigest()}"


async def claim_approvals(approvals: Sequence[Approval], context: HostedContext) -> None:
    """Claim the approvals for the response. Raises InvalidRequest if another response has used one of them.

    A second key with the id of the response tells a later attempt at this response that the approval is its own.
    """
    claim = context.services.claim
    assert claim is not None
    for approval in approvals:
        key = f"mcp_approval/{_make_key(approval.request_id)}"
        own_key = f"{key}/{context.response_id}"
        if await claim(context.project, key):
            await claim(context.project, own_key)
        elif await claim(context.project, own_key):
            raise InvalidRequest(
                f"The approval request '{approval.request_id}' was answered already. Its call is not repeated.",
                param="input",
                code="approval_already_used",
            )
