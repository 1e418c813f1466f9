"""Translate a turn's items into the messages of the Messages API.

That API wants user and assistant messages to alternate, every tool result in the message right after its call, and all
instructions in `system`. Items in another order are rearranged. Only reasoning of other backends is dropped.
"""

import base64
import hashlib
import mimetypes
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Raw

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content, items
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import normalize_arguments

Block = dict[str, Any]
Content = list[Block | Raw]
Part = content.Part | Unknown
Role = Literal["user", "assistant"]

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}", re.ASCII)
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)
_MAX_STEM_LENGTH = 100

_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?;base64,(.*)", re.DOTALL | re.IGNORECASE)
_IMAGE_TYPES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_TEXT_TYPES = {"application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml"}
_TEXT_PARTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)

_MEDIA_PARTS = (
    content.InputImage,
    content.InputFile,
    content.InputAudio,
    content.InputVideo,
    content.ComputerScreenshot,
)

_ATTACHED = "[Attached to the assistant message]"
# User messages for a history that begins or ends with the assistant.
_FIRST_USER_TEXT = "(The conversation begins with your own words.)"
_LAST_USER_TEXT = "Continue."


class MessagesBuilder:
    """The messages and instructions of one request.

    Without `include_thinking`, the model's earlier thinking is left out. `called_tools` are the names of all tools that
    the history has calls of.
    """

    def __init__(self, *, include_thinking: bool = True) -> None:
        self.system: list[Block] = []
        self.messages: list[dict[str, Any]] = []
        self.called_tools: dict[str, None] = {}
        self.has_thinking = False
        self._include_thinking = include_thinking
        self._call_ids: dict[str, int] = {}  # the upstream ids so far, each with the number of calls that had it
        self._result_counts: dict[int, int] = {}  # by the index of their message
        # Calls without a result, by call id: their upstream ids and the indexes of their messages.
        self._open_calls: dict[str, list[tuple[str, int]]] = {}

    def add_history(self, history: Iterable[items.Item | Unknown]) -> None:
        """Add all items of a turn. Call it once."""
        for index, item in enumerate(history):
            self._add_item(item, index)
        self._complete()

    @property
    def resumes_with_thinking(self) -> bool:
        """False if the turn answers tool calls whose first message began without thinking."""
        first = None
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                first = message["content"][0]
            elif not any(_is_result(block) for block in message["content"]):
                break
        return first is None or isinstance(first, Raw)

    def _add_item(self, item: items.Item | Unknown, index: int) -> None:
        match item:
            case items.Message():
                self._add_message(item, index)
            case items.FunctionCall():
                self._add_call(item)
            case items.FunctionCallOutput():
                self._add_call_output(item, f"input[{index}].output")
            case items.Reasoning():
                if self._include_thinking and (blocks := _restore_thinking(item)):
                    self.has_thinking = True
                    self._append("assistant", blocks)
            case _:
                self._append("user", write_json(item))

    def _add_message(self, message: items.Message, index: int) -> None:
        path = f"input[{index}].content"
        if message.role == "assistant":
            self._add_assistant_message(message.content, path)
        elif message.role == "user":
            self._append("user", write_parts(message.content, path))
        elif isinstance(message.content, str):
            self.system += write_text(message.content)
        else:
            # Instructions can only be text, so an image among them becomes part of a user message.
            for index, part in enumerate(message.content):
                blocks = write_part(part, f"{path}[{index}]")
                if _is_text(part) or isinstance(part, Unknown):
                    self.system += blocks
                else:
                    self._append("user", blocks)

    def _add_assistant_message(self, parts: str | Iterable[Part], path: str) -> None:
        """Add an assistant message. The API allows only text there, so media follow in a user message."""
        if isinstance(parts, str):
            self._append("assistant", write_text(parts))
            return
        media: list[Block] = []
        for index, part in enumerate(parts):
            if isinstance(part, _MEDIA_PARTS):
                media += write_part(part, f"{path}[{index}]")
            else:
                self._append("assistant", write_text(_read_text(part)))
        if media:
            self._append("user", [*write_text(_ATTACHED), *media])

    def _add_call(self, call: items.FunctionCall) -> None:
        call_id = encode_call_id(call.call_id, taken=self._call_ids)
        self.called_tools[call.name] = None
        arguments = Raw(normalize_arguments(call.arguments).encode())
        name = encode_tool_name(call.name)
        self._append("assistant", [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}])
        self._open_calls.setdefault(call.call_id, []).append((call_id, len(self.messages) - 1))

    def _add_call_output(self, output: items.FunctionCallOutput, path: str) -> None:
        calls = self._open_calls.get(output.call_id or "")
        if calls:
            self._insert_result(*calls.pop(0), write_parts(output.output, path))
        else:
            # Without the id, which may be new in every request: the upstream caches the beginning of the prompt.
            self._append("user", write_json(msgspec.structs.replace(output, id=None)))

    def _insert_result(self, call_id: str, call_index: int, blocks: list[Block]) -> None:
        """Insert a result into the message after its call's, behind the results that are already there."""
        if call_index == len(self.messages) - 1:
            self.messages.append({"role": "user", "content": []})
        following: Content = self.messages[call_index + 1]["content"]
        position = self._result_counts.get(call_index + 1, 0)
        self._result_counts[call_index + 1] = position + 1
        cache_controls = [block.pop("cache_control") for block in blocks if "cache_control" in block]
        result: Block = {"type": "tool_result", "tool_use_id": call_id}
        if blocks:
            result["content"] = blocks
        if cache_controls:
            result["cache_control"] = cache_controls[-1]
        following.insert(position, result)

    def _append(self, role: Role, blocks: Iterable[Block | Raw]) -> None:
        """Append blocks to the last message, or to a new one if the last is of the other role."""
        added = list(blocks)
        if not added:
            return
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += added
        else:
            self.messages.append({"role": role, "content": added})

    def _complete(self) -> None:
        """Add a result for each unanswered call, and user messages at both ends if they are missing."""
        for calls in self._open_calls.values():
            for call_id, call_index in calls:
                self._insert_result(call_id, call_index, write_text(items.LOST_OUTPUT))
        if self.messages and self.messages[0]["role"] == "assistant":
            self.messages.insert(0, {"role": "user", "content": write_text(_FIRST_USER_TEXT)})
        if not self.messages or self.messages[-1]["role"] == "assistant":
            # Newer models do not continue an assistant message without a request to do so.
            self.messages.append({"role": "user", "content": write_text(_LAST_USER_TEXT)})


def _restore_thinking(reasoning: items.Reasoning) -> list[Raw]:
    """Return the thinking blocks that this backend has stored in a reasoning item, unchanged."""
    if not reasoning.encrypted_content:
        return []
    try:
        return msgspec.json.decode(reasoning.encrypted_content, type=list[Raw])
    except msgspec.DecodeError:
        return []


def _is_result(block: Block | Raw) -> bool:
    return isinstance(block, dict) and block["type"] == "tool_result"


# Names and ids


def encode_tool_name(name: str) -> str:
    """Return the tool's upstream name. It depends on `name` alone, so it is stable across turns."""
    return name if _TOOL_NAME.fullmatch(name) else _make_substitute(name)


def encode_call_id(call_id: str, *, taken: dict[str, int]) -> str:
    """Return the call's upstream id, and add it to `taken`.

    The API wants unique ids, and some models reuse theirs in every turn. `taken` has the number of calls by id.
    """
    encoded = call_id if _CALL_ID.fullmatch(call_id) else _make_substitute(call_id)
    unique, number = encoded, taken.get(encoded, 0)
    while unique in taken:
        number += 1
        unique = f"{encoded}_{number}"
    if number:
        taken[encoded] = number
    taken[unique] = 1
    return unique


def _make_substitute(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{_INVALID_CHARACTERS.sub('_', name)[:_MAX_STEM_LENGTH]}_{digest}"


# Content blocks


def write_text(text: str) -> list[Block]:
    """Return a text block, or none for blank text: the API rejects blank blocks."""
    return [{"type": "text", "text": text}] if text.strip() else []


def write_json(value: Any) -> list[Block]:
    """Return an item or part without an equivalent in this API as JSON in a text block."""
    return write_text(codec.encode(value).decode())


def write_parts(parts: str | Iterable[Part], path: str) -> list[Block]:
    """Translate the content of a user message or a tool output. Errors name the part below `path`."""
    if isinstance(parts, str):
        return write_text(parts)
    return [block for index, part in enumerate(parts) for block in write_part(part, f"{path}[{index}]")]


def write_part(part: Part, path: str) -> list[Block]:
    if type(part) is content.InputText and part.prompt_cache_breakpoint is None:  # the common case
        return write_text(part.text)
    match part:
        case content.InputImage() | content.ComputerScreenshot():
            blocks = [_write_image(part.image_url, part.file_id, path)]
        case content.InputFile():
            blocks = [_write_file(part, path)]
        case content.InputAudio() | content.InputVideo():
            raise InvalidRequest(
                f"This model does not accept '{part.type}' content.", param=path, code="unsupported_content"
            )
        case _:
            blocks = write_text(_read_text(part))
    marker = getattr(part, "prompt_cache_breakpoint", None)
    if marker is not None and blocks:
        blocks[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h" if marker.ttl == "12h" else "5m"}
    return blocks


def _is_text(part: Part) -> bool:
    return isinstance(part, (*_TEXT_PARTS, content.Refusal))


def _read_text(part: Part) -> str:
    if isinstance(part, _TEXT_PARTS):
        return part.text
    if isinstance(part, content.Refusal):
        return part.refusal
    return codec.encode(part).decode()


def _write_image(url: str | None, file_id: str | None, path: str) -> Block:
    if url is None:
        if file_id is None:
            raise InvalidRequest("An image needs an 'image_url' or a 'file_id'.", param=path, code="invalid_value")
        return {"type": "image", "source": {"type": "file", "file_id": file_id}}
    data_url = _DATA_URL.fullmatch(url)
    if data_url is not None:
        return _write_image_data(data_url[1], data_url[2], f"{path}.image_url")
    if url.startswith(("https://", "http://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    raise InvalidRequest(
        "An image URL must be an https:// URL or a base64 data: URL.",
        param=f"{path}.image_url",
        code="invalid_image_url",
    )


def _write_image_data(media_type: str, data: str, path: str) -> Block:
    image_type = media_type.lower().replace("image/jpg", "image/jpeg")
    if image_type not in _IMAGE_TYPES:
        raise InvalidRequest(
            f"This model does not accept '{media_type}' images. Supported types: {', '.join(sorted(_IMAGE_TYPES))}.",
            param=path,
            code="unsupported_image_media_type",
        )
    return {"type": "image", "source": {"type": "base64", "media_type": image_type, "data": data}}


def _write_file(part: content.InputFile, path: str) -> Block:
    if part.file_data is not None:
        block = _write_file_data(part.file_data, part.filename or "", f"{path}.file_data")
    elif part.file_url is not None:
        block = {"type": "document", "source": {"type": "url", "url": part.file_url}}
    elif part.file_id is not None:
        block = {"type": "document", "source": {"type": "file", "file_id": part.file_id}}
    else:
        raise InvalidRequest("A file needs 'file_data', a 'file_url' or a 'file_id'.", param=path, code="invalid_value")
    if part.filename and block["type"] == "document":
        block["title"] = part.filename
    return block


def _write_file_data(file_data: str, filename: str, path: str) -> Block:
    data_url = _DATA_URL.fullmatch(file_data)
    media_type, data = (data_url[1], data_url[2]) if data_url is not None else ("", file_data)
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # invalid characters or length
        raise InvalidRequest("The file is not valid base64.", param=path, code="invalid_value") from None
    media_type = media_type.lower() or mimetypes.guess_type(filename)[0] or ""
    if media_type == "application/pdf" or raw.startswith(b"%PDF-"):
        return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}}
    if media_type.startswith("image/"):
        return _write_image_data(media_type, data, path)
    can_be_text = not media_type or media_type.startswith("text/") or media_type in _TEXT_TYPES
    text = _decode_text(raw) if can_be_text else None
    if text is None:
        described = f" of type '{media_type}'" if media_type else ""
        raise InvalidRequest(
            f"This model does not accept files{described}. Supported are PDF, text and images.",
            param=path,
            code="unsupported_file",
        )
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}


def _decode_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
