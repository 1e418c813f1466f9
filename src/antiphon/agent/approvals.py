"""Approval of tool calls by people: which calls need it, and the verdicts on them."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.agent.entries import Verdict
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import Tool, ToolInvocation

logger = logging.getLogger(__name__)

DENIED = "The call was not approved."

Approval = bool | str
"""A value of the `approvals` of a resumed run. A string denies the call and is the reason for the model."""


def needs_approval(tool: Tool, call: ToolInvocation) -> bool:
    """Return True if a person must approve this call. Also if the tool's own function for it fails."""
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


def make_verdict(call_id: str, approval: Approval) -> Verdict:
    return Verdict(call_id, approval is True, approval if isinstance(approval, str) else "")


def to_approval(verdict: Verdict) -> Approval:
    return verdict.approved or verdict.reason


def read_arguments(call: ToolInvocation) -> Mapping[str, Any] | None:
    """Return the arguments of a call if they are a JSON object."""
    try:
        arguments = read_json(call.arguments or "{}")
    except msgspec.DecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
