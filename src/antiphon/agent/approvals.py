"""Approval of tool calls by people: which calls need it, and the verdicts on them."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.agent.entries import Verdict
from antiphon.errors import InvalidRequest
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import Tool, ToolInvocation
from antiphon.tools.executor import replace_surrogates

logger = logging.getLogger(__name__)

DENIED = "The call was not approved."

Approval = bool | str
"""A value of the `approvals` of a resumed run. A string denies the call and is the reason for the model."""


def needs_approval(tool: Tool, call: ToolInvocation) -> bool:
    """Return True if a person must approve this call, or if the tool's function that decides it fails."""
    if not callable(tool.needs_approval):
        return tool.needs_approval
    arguments = read_arguments(call)
    if arguments is None:
        # The tool will reject them.
        return False
    try:
        return bool(tool.needs_approval(arguments))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:
        logger.exception("needs_approval of the tool %s failed: approval is required", tool.name)
        return True


def make_verdicts(approvals: Mapping[str, Approval] | None) -> list[Verdict]:
    """Return the verdicts on calls. Raises InvalidRequest if the approvals have other types."""
    given: Any = {} if approvals is None else approvals
    if not isinstance(given, Mapping):
        message = f"approvals: expected a mapping from call ids to approvals, got {type(given).__name__}."
        raise InvalidRequest(message, param="approvals")
    for call_id, approval in given.items():
        if not isinstance(approval, bool | str):
            message = f"The approval of the call '{call_id}' must be True, False or a reason to decline it."
            raise InvalidRequest(message, param="approvals")
    return [
        Verdict(call_id, approval is True, replace_surrogates(approval) if isinstance(approval, str) else "")
        for call_id, approval in given.items()
    ]


def read_arguments(call: ToolInvocation) -> Mapping[str, Any] | None:
    """Return the arguments of a call if they are a JSON object."""
    try:
        arguments = read_json(call.arguments or "{}")
    except msgspec.DecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
