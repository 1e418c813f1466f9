"""Calls that wait for a client's results, and the results that come for them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.agent.execute.envelope import Envelope, decode_all
from antiphon.agent.history import make_output
from antiphon.errors import InvalidRequest
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.executor import make_error_result

_FIELD = "ToolResultsJson"


class ToolOutcome(Envelope):
    """What a client says of one call: its result, or why there is none."""

    call_id: str
    result_json: Any = None
    error_message: str | None = None


def answer_calls(calls: Sequence[JsonObject], tool_results_json: str | None) -> list[JsonObject]:
    """The items that answer these calls. Raises InvalidRequest unless there is one result for each, in their order."""
    if not calls:
        return []
    outcomes = _read(tool_results_json)
    waiting, given = [str(call["call_id"]) for call in calls], [outcome.call_id for outcome in outcomes]
    if waiting != given:
        raise InvalidRequest(
            f"{_FIELD} must have one result for each call of the response that is continued, in their order: "
            f"{', '.join(waiting)}; it has {', '.join(given) or 'none'}. A call without a result has an ErrorMessage.",
            param=_FIELD,
            code="tool_results_mismatch",
        )
    return [
        make_output(call, _read_output(outcome, index))
        for index, (call, outcome) in enumerate(zip(calls, outcomes, strict=True))
    ]


def _read(text: str | None) -> list[ToolOutcome]:
    if text is None or not text.strip():
        return []
    try:
        return decode_all(text, ToolOutcome)
    except InvalidRequest as error:
        param = f"{_FIELD}{error.param or ''}"
        raise InvalidRequest(f"{_FIELD}: {error.message}", param=param, code=error.code) from None


def _read_output(outcome: ToolOutcome, index: int) -> str:
    message, result = outcome.error_message or "", outcome.result_json
    failed = bool(message.strip())
    if failed == (result is not None and not (failed and result == "")):
        raise InvalidRequest(
            f"{_FIELD}[{index}] must have a ResultJson or an ErrorMessage, and not both.",
            param=f"{_FIELD}[{index}]",
            code="invalid_tool_result",
        )
    if failed:
        return str(make_error_result(message).output)
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()
