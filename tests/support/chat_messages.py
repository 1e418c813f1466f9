"""Short constructors for turns and for Chat Completions messages."""

import json
from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from antiphon.backends.base import Turn
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.request import make_body
from antiphon.protocol import codec
from support.typed_dicts import find_type_errors

PLAIN = Quirks()
PICTURE = "data:image/png;base64,aGk="


def make_turn(items: Any = "hi", **fields: Any) -> Turn:
    """Return the turn that the engine makes of a request."""
    if isinstance(items, str):
        items = [say("user", items)]
    request = codec.decode_request(json.dumps({"model": "m", "input": items} | fields).encode()).body
    assert isinstance(request.input, list)
    return Turn(request=request, items=request.input)


def write(items: Any = "hi", quirks: Quirks = PLAIN, **fields: Any) -> dict[str, Any]:
    """Return the request body, validated against the types of the SDK."""
    body: dict[str, Any] = json.loads(codec.encode(make_body(make_turn(items, **fields), quirks)))
    assert find_type_errors(body, CompletionCreateParamsStreaming) == []
    return body


def messages(items: Any, quirks: Quirks = PLAIN, **fields: Any) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = write(items, quirks, **fields)["messages"]
    return written


def say(role: str, *parts: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": p} if isinstance(p, str) else p for p in parts]}


def call(call_id: str, arguments: str = "{}", name: str = "look_up") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str | None, value: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value} | fields


def think(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def chat_call(call_id: str, arguments: str = "{}", name: str = "look_up") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str | None, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content} | fields
    return message | {"tool_calls": list(calls)} if calls else message


def tool(call_id: str, content: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def picture(url: str = PICTURE, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}
