"""Approvals of calls: each request for approval is answered once. An approved call is run by one response."""

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
    requests = _find_answered(context, server_label, approve=True)
    done = {item.approval_request_id for item in context.items if isinstance(item, McpCall)} if requests else ()
    return [Approval(each.id, each.name, each.arguments) for each in requests if each.id not in done]


def find_denials(context: HostedContext, server_label: str) -> list[str]:
    """Return the ids of the requests for approval of a server that the input of the request denies."""
    return [each.id for each in _find_answered(context, server_label, approve=False)]


def _find_answered(context: HostedContext, server_label: str, *, approve: bool) -> list[McpApprovalRequest]:
    """Return the requests for approval that the input answers so, in the order of the answers."""
    sent = context.request.input if isinstance(context.request.input, list) else ()
    answers = [item for item in sent if isinstance(item, McpApprovalResponse) and item.approve == approve]
    if not answers:
        return []
    requests = {item.id: item for item in context.items if isinstance(item, McpApprovalRequest)}
    found = (requests.get(each) for each in dict.fromkeys(item.approval_request_id for item in answers))
    return [each for each in found if each is not None and each.server_label == server_label]


def _make_key(request_id: str) -> str:
    """Return the key of a request. An id that is not of this server may be any text, so its digest is used."""
    if len(request_id) > _MAX_KEY_LENGTH or "/" in request_id:
        request_id = f"#{hashlib.sha256(request_id.encode()).hexdigest()}"
    return f"mcp_approval/{request_id}"


async def claim_denials(request_ids: Sequence[str], context: HostedContext) -> None:
    """Record that calls were denied, so that they cannot be approved afterwards. A denial can be repeated."""
    claim = context.services.claim
    assert claim is not None
    for request_id in request_ids:
        await claim(context.project, _make_key(request_id))


async def claim_approvals(approvals: Sequence[Approval], context: HostedContext) -> None:
    """Claim the approvals for the response. Raises InvalidRequest if a request was denied, or approved in another one.

    A second key with the id of the response tells a later attempt at this response that the approval is its own.
    """
    claim = context.services.claim
    assert claim is not None
    for approval in approvals:
        key = _make_key(approval.request_id)
        own_key = f"{key}/{context.response_id}"
        if await claim(context.project, key):
            await claim(context.project, own_key)
        elif await claim(context.project, own_key):
            raise InvalidRequest(
                f"The approval request '{approval.request_id}' was answered already. Its call is not executed.",
                param="input",
                code="approval_already_used",
            )
