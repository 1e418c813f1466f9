"""From a result of the Responses API to the envelope: whatever the API looks like, clients see the same.

It reads what real servers send: OpenAI's shape, and the older ones in which a finish reason stands on each piece of
output, a call within `tool_call`, and usage is spelled `prompt_tokens`.
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
from antiphon.protocol.json_text import JsonObject, read_json

# What the model says to people, and where it stands: a refusal is something to say too.
_TEXTS = {"output_text": "text", "text": "text", "refusal": "refusal"}
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
    """The envelope of a response. One that is no response, or that failed, is mapped to an error."""
    text, response = _read(raw)
    fault = _find_fault(response)
    envelope = _begin(request, context, text)
    envelope.warnings = list(warnings)
    if fault is not None:
        envelope.kind, envelope.finish_reason = "error", "error"
        envelope.error_code, envelope.error_message = fault
    assert isinstance(response, dict) or fault is not None
    if not isinstance(response, dict) or not response.get("id"):
        return envelope
    output = _items(response)
    envelope.response_continuation_id = response["id"]
    envelope.turn_id = envelope.turn_id or response["id"]
    envelope.model_id = response.get("model")
    envelope.text = _BLANK_LINE.join(_texts(output)) or None
    envelope.tool_calls = [_call(item) for item in _calls(output)]
    envelope.usage = _usage(response.get("usage"))
    envelope.sources = list(sources)
    envelope.file_bundle = file_bundle
    if fault is None:
        envelope.kind = _classify(envelope)
        envelope.finish_reason = _finish_reason(response, output)
    return envelope


def map_error(
    error: Exception | None,
    request: AgentExecuteRequest,
    context: ExecutionContext | None = None,
    *,
    status: int | None = None,
    body: bytes | str | None = None,
) -> AgentExecuteResponse:
    """The envelope of a call that failed: with an HTTP status and a body, with an error of ours, or on the way."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    envelope = _begin(request, context, text)
    envelope.kind, envelope.finish_reason = "error", "error"
    told = _error_of(_parse(text)) if text else None
    if told is not None:
        envelope.error_code, envelope.error_message = told
    elif isinstance(error, AntiphonError):
        envelope.error_code, envelope.error_message = error.type, error.message
    elif error is not None:
        envelope.error_code, envelope.error_message = type(error).__name__, str(error) or type(error).__name__
    envelope.error_code = envelope.error_code or (str(status) if status is not None else "error")
    envelope.error_message = envelope.error_message or text or f"The call failed with status {status}."
    return envelope


def _begin(request: AgentExecuteRequest, context: ExecutionContext | None, raw: str | None) -> AgentExecuteResponse:
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


def _read(raw: bytes | str | Mapping[str, Any]) -> tuple[str, Any]:
    """The response as the text that came, and as what it says."""
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
    """The code and the message of what is wrong with the whole response, if something is."""
    if not isinstance(response, dict):
        return "invalid_response", "The response is not a JSON object."
    told = _error_of(response)
    if told is not None:
        return told
    if response.get("status") == "failed":
        return "failed", "The response failed and does not say why."
    for field in ("id", "output"):
        if not response.get(field) and response.get(field) != []:
            return "invalid_response", f"The response has no '{field}'."
    return None


def _error_of(payload: Any) -> tuple[str, str] | None:
    error = payload.get("error") if isinstance(payload, dict) else None
    if isinstance(error, str) and error:
        return "error", error
    if not isinstance(error, dict):
        return None
    code = error.get("type") or error.get("code") or "error"
    return str(code), str(error.get("message") or code)


def _items(response: JsonObject) -> list[JsonObject]:
    output = response.get("output")
    items = output if isinstance(output, list) else [output]
    return [item for item in items if isinstance(item, dict)]


def _pieces(items: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """What the output is made of: its items, and in the place of a message what that holds."""
    for item in items:
        content = item.get("content")
        if item.get("type") not in ("message", None) or content is None:
            yield item
        elif isinstance(content, str):
            yield {"type": "output_text", "text": content}
        elif isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def _texts(items: Sequence[JsonObject]) -> list[str]:
    texts = (piece.get(_TEXTS[piece["type"]]) for piece in _pieces(items) if piece.get("type") in _TEXTS)
    return [text for text in texts if text and isinstance(text, str)]


def _calls(items: Sequence[JsonObject]) -> list[JsonObject]:
    return [piece for piece in _pieces(items) if piece.get("type") in _CALLS]


def _call(piece: JsonObject) -> AgentToolCall:
    inner = piece.get("tool_call")
    call = piece | inner if isinstance(inner, dict) else piece
    arguments = call.get("arguments", call.get("input", ""))
    return AgentToolCall(
        call_id=str(call.get("call_id") or call.get("id") or ""),
        name=str(call.get("name") or ""),
        arguments_json=arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
    )


def _usage(usage: Any) -> LlmUsage:
    if not isinstance(usage, dict):
        return LlmUsage()
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    completion = _count(usage, "completion_tokens", "output_tokens")
    return LlmUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=_count(usage, "total_tokens") or prompt + completion,
        cached_tokens=_count(_details(usage, "prompt", "input"), "cached_tokens"),
        reasoning_tokens=_count(_details(usage, "completion", "output"), "reasoning_tokens"),
    )


def _details(usage: JsonObject, *sides: str) -> JsonObject:
    found = (usage.get(f"{side}_tokens_details") for side in sides)
    return next((details for details in found if isinstance(details, dict)), {})


def _count(usage: JsonObject, *names: str) -> int:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)


def _classify(envelope: AgentExecuteResponse) -> str:
    if envelope.text:
        return "ok"
    return "tool-only" if envelope.tool_calls else "empty"


def _finish_reason(response: JsonObject, items: Sequence[JsonObject]) -> str:
    """The last one that is told, or what the response's end amounts to."""
    told = [
        piece["finish_reason"] for item in items for piece in (*_pieces([item]), item) if piece.get("finish_reason")
    ]
    if told:
        return str(told[-1])
    if response.get("status") == "incomplete":
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        return "length" if reason in (None, "max_output_tokens") else str(reason)
    return "tool_use" if _calls(items) else "stop"
