"""Items of the Responses API as the messages of OpenTelemetry's semantic conventions, for spans with content."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from antiphon.protocol.json_text import JsonObject, read_json

Message = dict[str, Any]
Part = dict[str, Any]

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CALL_TYPES = ("function_call", "custom_tool_call")
_LENGTH = "max_output_tokens"


def make_input_messages(items: object) -> list[Message]:
    """Return the input of a request as messages. Items of one role that follow each other are one message."""
    if isinstance(items, str):
        return [{"role": "user", "parts": [_make_text(items)]}]
    messages: list[Message] = []
    for item in items if isinstance(items, list | tuple) else []:
        role, parts = _convert_item(item)
        if messages and messages[-1]["role"] == role and item.get("type", "message") != "message":
            messages[-1]["parts"] += parts
        else:
            messages.append({"role": role, "parts": parts})
    return messages


def make_output_messages(items: Iterable[JsonObject], finish_reason: str) -> list[Message]:
    """Return the output of a response as one message."""
    parts = [part for item in items for part in _convert_item(item)[1]]
    return [{"role": "assistant", "parts": parts, "finish_reason": finish_reason}]


def find_finish_reason(response: JsonObject) -> str:
    """Return the reason why the model stopped, as the conventions name it."""
    if response.get("status") == "failed":
        return "error"
    if response.get("status") == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        return "length" if reason == _LENGTH else str(reason or "incomplete")
    types = [item.get("type") for item in response.get("output") or [] if isinstance(item, dict)]
    return "tool_call" if any(kind in _CALL_TYPES for kind in types) else "stop"


def _convert_item(item: JsonObject) -> tuple[str, list[Part]]:
    """Return the role and the parts of an item."""
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role", "assistant"))
        return ("system" if role == "developer" else role), _convert_content(item.get("content"))
    if kind in _CALL_TYPES:
        arguments = item.get("arguments") if kind == "function_call" else item.get("input")
        call = {"type": "tool_call", "id": item.get("call_id"), "name": item.get("name", "")}
        return "assistant", [call | {"arguments": _parse_arguments(arguments)}]
    if str(kind).endswith("_output") and "call_id" in item:
        return "tool", [{"type": "tool_call_response", "id": item["call_id"], "response": item.get("output")}]
    if kind == "reasoning":
        texts = _convert_content([*(item.get("summary") or []), *(item.get("content") or [])])
        return "assistant", [{"type": "reasoning", "content": part.get("content", "")} for part in texts]
    return "assistant", [{"type": str(kind), "id": item.get("id")}]


def _convert_content(content: object) -> list[Part]:
    if isinstance(content, str):
        return [_make_text(content)]
    if not isinstance(content, Sequence):
        return []
    return [_convert_part(part) for part in content if isinstance(part, dict)]


def _convert_part(part: JsonObject) -> Part:
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        return _make_text(part.get("text", ""))
    if kind == "refusal":
        return _make_text(part.get("refusal", ""))
    if kind == "input_image":
        return _make_reference("image", part.get("image_url"), part.get("file_id"))
    if kind == "input_file":
        return _make_reference("document", part.get("file_url") or part.get("file_data"), part.get("file_id"))
    return {"type": str(kind)}


def _make_reference(modality: str, url: object, file_id: object) -> Part:
    """Return a part for an image or a file. The data itself is not recorded: it may be larger than the whole trace."""
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        return {"type": "uri", "modality": modality, "uri": url}
    if isinstance(file_id, str):
        return {"type": "file", "modality": modality, "file_id": file_id}
    data = url if isinstance(url, str) else ""
    mime_type = data.removeprefix("data:").partition(";")[0] if data.startswith("data:") else None
    return {"type": "blob", "modality": modality, "mime_type": mime_type, "content": "", "size": len(data)}


def _make_text(text: object) -> Part:
    return {"type": "text", "content": text}


def _parse_arguments(arguments: object) -> Any:
    try:
        return read_json(arguments) if isinstance(arguments, str) else arguments
    except msgspec.DecodeError:
        return arguments
