"""Map a result of the Responses API to the response envelope.

Supports OpenAI's format and older ones: a finish reason on each part of the output, a call within `tool_call`, usage in
`prompt_tokens`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from antiphon.agent.execute.envelope import (
    AgentExecuteRequest,
    AgentExecuteResponse,
    AgentToolCall,
    ExecutionContext,
    FileBundle,
    LlmUsage,
    SourceRef,
)
from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import JsonObject, read_json, to_text
from antiphon.upstream.usage import parse_usage

# The types of text parts, and the field with the text. A refusal is text too.
_TEXT_FIELDS = {"output_text": "text", "text": "text", "refusal": "refusal"}
_CALLS = ("function_call", "custom_tool_call", "tool_call")
_BLANK_LINE = "\n\n"


def map_response(
    raw: bytes | str | Mapping[str, Any],
    request: AgentExecuteRequest,
    context: ExecutionContext | None = None,
    *,
    sources: Sequence[SourceRef] = (),
    file_bundle: FileBundle | None = None,
    warnings: Sequence[str] = (),
) -> AgentExecuteResponse:
    """Return the envelope of a response. A failed response, or other data, becomes an error envelope."""
    text, response = _decode(raw)
    fault = _find_fault(response)
    envelope = _make_envelope(request, context, text)
    envelope.warnings = list(warnings)
    if fault is not None:
        envelope.kind, envelope.finish_reason = "error", "error"
        envelope.error_code, envelope.error_message = fault
    assert isinstance(response, dict) or fault is not None
    if not isinstance(response, dict) or not _find_id(response):
        return envelope
    output = _list_items(response)
    envelope.response_continuation_id = _find_id(response)
    envelope.turn_id = envelope.turn_id or _find_id(response)
    envelope.model_id = response["model"] if isinstance(response.get("model"), str) else None
    envelope.text = _BLANK_LINE.join(_find_texts(output)) or None
    envelope.tool_calls = [_map_call(item) for item in _find_calls(output)]
    envelope.usage = _map_usage(response.get("usage"))
    envelope.sources = list(sources)
    envelope.file_bundle = file_bundle
    if fault is None:
        envelope.kind = _find_kind(envelope)
        envelope.finish_reason = _find_finish_reason(response, output)
    return envelope


def map_error(
    error: Exception | None,
    request: AgentExecuteRequest,
    context: ExecutionContext | None = None,
    *,
    status: int | None = None,
    body: bytes | str | None = None,
) -> AgentExecuteResponse:
    """Return the envelope of a failed request: from an HTTP status and body, or from an exception."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    envelope = _make_envelope(request, context, text)
    envelope.kind, envelope.finish_reason = "error", "error"
    reported = _find_error(_parse(text)) if text else None
    if reported is not None:
        envelope.error_code, envelope.error_message = reported
    elif isinstance(error, AntiphonError):
        envelope.error_code, envelope.error_message = error.type, error.message
    elif error is not None:
        envelope.error_code, envelope.error_message = type(error).__name__, str(error) or type(error).__name__
    envelope.error_code = envelope.error_code or (str(status) if status is not None else "error")
    envelope.error_message = envelope.error_message or text or f"The request failed with status {status}."
    return envelope


def _make_envelope(
    request: AgentExecuteRequest, context: ExecutionContext | None, raw: str | None
) -> AgentExecuteResponse:
    context = context or ExecutionContext()
    return AgentExecuteResponse(
        kind="empty",
        conversation_id=request.conversation_id,
        mode=request.mode,
        conversation_context_id=context.conversation_context_id,
        agent_context_id=context.agent_context_id,
        turn_id=context.turn_id,
        raw_response_json=raw,
    )


def _decode(raw: bytes | str | Mapping[str, Any]) -> tuple[str, Any]:
    """Return the response as text and decoded."""
    if isinstance(raw, Mapping):
        return msgspec.json.encode(dict(raw)).decode(), dict(raw)
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    return text, _parse(text)


def _parse(text: str) -> Any:
    try:
        return read_json(text)
    except msgspec.DecodeError:
        return None


def _find_fault(response: Any) -> tuple[str, str] | None:
    """Return the error code and message of a failed or malformed response."""
    if not isinstance(response, dict):
        return "invalid_response", "The response is not a JSON object."
    reported = _find_error(response)
    if reported is not None:
        return reported
    if response.get("status") == "failed":
        return "failed", "The response failed without an error message."
    if not _find_id(response):
        return "invalid_response", "The response has no 'id'."
    if not response.get("output") and response.get("output") != []:
        return "invalid_response", "The response has no 'output'."
    return None


def _find_id(response: JsonObject) -> str | None:
    return response["id"] if isinstance(response.get("id"), str) else None


def _find_error(payload: Any) -> tuple[str, str] | None:
    error = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(error, str) and error:
        return "error", error
    if not isinstance(error, dict):
        return None
    code = error.get("type") or error.get("code") or "error"
    return str(code), str(error.get("message") or code)


def _list_items(response: JsonObject) -> list[JsonObject]:
    output = response.get("output")
    items = output if isinstance(output, list) else [output]
    return [item for item in items if isinstance(item, dict)]


def _iterate_parts(items: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield the items of the output, and instead of a message the parts of its content."""
    for item in items:
        content = item.get("content")
        if item.get("type") not in ("message", None) or content is None:
            yield item
        elif isinstance(content, str):
            yield {"type": "output_text", "text": content}
        elif isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def _find_texts(items: Sequence[JsonObject]) -> list[str]:
    parts = list(_iterate_parts(items))
    # The type of a part may be any JSON value.
    fields = (_TEXT_FIELDS.get(str(part.get("type"))) for part in parts)
    texts = (part.get(field) for part, field in zip(parts, fields, strict=True) if field is not None)
    return [text for text in texts if text and isinstance(text, str)]


def _find_calls(items: Sequence[JsonObject]) -> list[JsonObject]:
    return [part for part in _iterate_parts(items) if part.get("type") in _CALLS]


def _map_call(part: JsonObject) -> AgentToolCall:
    inner = part.get("tool_call")
    call = part | inner if isinstance(inner, dict) else part
    return AgentToolCall(
        call_id=str(call.get("call_id") or call.get("id") or ""),
        name=str(call.get("name") or ""),
        arguments_json=to_text(call.get("arguments", call.get("input", ""))),
    )


def _map_usage(payload: Any) -> LlmUsage:
    usage = parse_usage(payload)
    if usage is None:
        return LlmUsage()
    return LlmUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        reasoning_tokens=usage.output_tokens_details.reasoning_tokens,
    )


def _find_kind(envelope: AgentExecuteResponse) -> str:
    if envelope.text:
        return "ok"
    return "tool-only" if envelope.tool_calls else "empty"


def _find_finish_reason(response: JsonObject, items: Sequence[JsonObject]) -> str:
    """Return the last finish reason in the output, or derive it from the status of the response."""
    reasons = [part.get("finish_reason") for item in items for part in (*_iterate_parts([item]), item)]
    reasons = [reason for reason in reasons if reason]
    if reasons:
        return str(reasons[-1])
    if response.get("status") == "incomplete":
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        return "length" if reason in (None, "max_output_tokens") else str(reason)
    return "tool_use" if _find_calls(items) else "stop"
