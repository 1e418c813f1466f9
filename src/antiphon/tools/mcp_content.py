"""What an MCP tool gives, as a model reads it: text, and images where there are any. Nothing is left out in silence."""

from typing import Any

import msgspec
from msgspec import Struct, field

from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ToolResult

JsonObject = dict[str, Any]


class _Resource(Struct, rename="camel"):
    uri: str = ""
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class _Block(Struct, rename="camel"):
    """Any block of content. What it has depends on its type, and types are added from time to time."""

    type: str
    text: str = ""
    data: str = ""
    mime_type: str = ""
    resource: _Resource = field(default_factory=_Resource)


class _Result(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Any = None
    is_error: bool = False


def read_result(result: JsonObject) -> ToolResult:
    """The result of `tools/call`, as JSON has it."""
    read = msgspec.convert(result, _Result)
    parts = [_read_block(block) for block in read.content]
    structured = read.structured_content
    if structured is not None and not _is_told(structured, parts):
        parts.append(_say(structured))
    if any(part["type"] != "input_text" for part in parts):
        return ToolResult(parts, is_error=read.is_error)
    return ToolResult("\n".join(part["text"] for part in parts), is_error=read.is_error)


def _read_block(raw: JsonObject) -> JsonObject:
    block = msgspec.convert(raw, _Block)
    match block.type:
        case "text":
            return _text(block.text)
        case "image":
            return _image(block.mime_type, block.data)
        case "audio":
            return _say({"audio": block.mime_type, "base64_characters": len(block.data), "note": "cannot be shown"})
        case "resource":
            return _read_resource(block.resource)
        case _:
            return _say({name: value for name, value in raw.items() if name != "_meta"})


def _read_resource(resource: _Resource) -> JsonObject:
    if resource.text is not None:
        return _text(resource.text)
    kind, blob = resource.mime_type or "", resource.blob or ""
    if kind.startswith("image/"):
        return _image(kind, blob)
    return _say(
        {"resource": resource.uri, "mime_type": kind, "base64_characters": len(blob), "note": "cannot be shown"}
    )


def _is_told(structured: Any, parts: list[JsonObject]) -> bool:
    """Whether the texts say the same already: servers repeat structured content for those who do not know it.

    A value that is no object they say as it is, and have it under `result` in the structured content; a list as one
    text for each of its elements.
    """
    texts = [part["text"] for part in parts if part["type"] == "input_text"]
    said = [_parse(text) for text in texts]
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    values = [structured, structured["result"]] if wrapped else [structured]
    return any(value in said or value in texts or (bool(said) and value == said) for value in values)


def _parse(text: str) -> Any:
    try:
        return read_json(text)
    except msgspec.DecodeError:
        return text


def _say(value: Any) -> JsonObject:
    return _text(msgspec.json.encode(value).decode())


def _text(text: str) -> JsonObject:
    return {"type": "input_text", "text": text}


def _image(kind: str, data: str) -> JsonObject:
    return {"type": "input_image", "image_url": f"data:{kind};base64,{data}"}
