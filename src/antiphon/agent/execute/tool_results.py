"""Results of client tools: match them with the pending calls and make output items of them."""

from collections.abc import Sequence
from typing import Any

from antiphon.agent.execute.envelope import Envelope, decode_all
from antiphon.agent.history import make_output_item
from antiphon.errors import InvalidRequest
from antiphon.protocol.json_text import JsonObject, to_text
from antiphon.tools.executor import make_error_result

_FIELD = "ToolResultsJson"


class ToolOutcome(Envelope):
    """The result of one call, from the client: a result or an error message."""

    call_id: str
    result_json: Any = None
    error_message: str | None = None


def make_output_items(calls: Sequence[JsonObject], tool_results_json: str | None) -> list[JsonObject]:
    """Return the output items of the calls. Raises InvalidRequest unless there is one result for each, in order."""
    if not calls:
        return []
    outcomes = _decode(tool_results_json)
    expected, received = [str(call["call_id"]) for call in calls], [outcome.call_id for outcome in outcomes]
    if expected != received:
        raise InvalidRequest(
            f"{_FIELD} must have one result for each call of the continued response, in their order: "
            f"{', '.join(expected)}; it has {', '.join(received) or 'none'}. Give a call without a result an "
            f"ErrorMessage.",
            param=_FIELD,
            code="tool_results_mismatch",
        )
    return [
        make_output_item(call, _find_output(outcome, index))
        for index, (call, outcome) in enumerate(zip(calls, outcomes, strict=True))
    ]


def _decode(text: str | None) -> list[ToolOutcome]:
    if text is None or not text.strip():
        return []
    try:
        return decode_all(text, ToolOutcome)
    except InvalidRequest as error:
        param = f"{_FIELD}{error.param or ''}"
        raise InvalidRequest(f"{_FIELD}: {error.message}", param=param, code=error.code) from None


def _find_output(outcome: ToolOutcome, index: int) -> str:
    message, result = outcome.error_message or "", outcome.result_json
    failed = bool(message.strip())
    if failed == (result is not None and not (failed and result == "")):
        raise InvalidRequest(
            f"{_FIELD}[{index}] must have either a ResultJson or an ErrorMessage.",
            param=f"{_FIELD}[{index}]",
            code="invalid_tool_result",
        )
    if failed:
        return str(make_error_result(message).output)
    return to_text(result)
