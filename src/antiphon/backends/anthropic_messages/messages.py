"""A turn's items as the messages of the Messages API.

User and assistant take turns there, each call is answered in the very next message, and all instructions stand in
front. What comes in another order is put in that one, and nothing is left out but reasoning of other backends.
"""

import base64
import hashlib
import itertools
import mimetypes
import re
from collections.abc import Container, Iterable
from typing import Any, Literal

import msgspec
from msgspec import Raw

from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content, items
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import write_arguments

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}", re.ASCII)
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)
_LONGEST_STEM = 100


def name_tool(name: str) -> str:
    """The name a tool goes by upstream. It depends on nothing else, so that a conversation always reads the same."""
    return name if _TOOL_NAME.fullmatch(name) else _substitute(name)


def name_call(call_id: str, *, taken: Container[str]) -> str:
    """The id a call goes by upstream, where no two calls may share one: some models count theirs anew each time."""
    wire = call_id if _CALL_ID.fullmatch(call_id) else _substitute(call_id)
    numbered = (f"{wire}_{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([wire], numbered) if each not in taken)


def _substitute(name: str) -> str:
    return f"{_OTHERS.sub('_', name)[:_LONGEST_STEM]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


Block = dict[str, Any]
Part = content.Part | Unknown

_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*?;base64,(.*)", re.DOTALL | re.IGNORECASE)
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_TEXTS = {"application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml"}
_TEXT_PARTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)


def write_text(text: str) -> list[Block]:
    """A block of text. The API refuses one with nothing to read in it."""
    return [{"type": "text", "text": text}] if text.strip() else []


def write_json(thing: Any) -> list[Block]:
    """What this API has no block for, as the JSON that it came as."""
    return write_text(codec.encode(thing).decode())


def write_parts(parts: str | Iterable[Part], place: str) -> list[Block]:
    """What a user, or a tool, says. `place` is for the error about a part that cannot be said."""
    if isinstance(parts, str):
        return write_text(parts)
    return [block for index, part in enumerate(parts) for block in write_part(part, f"{place}[{index}]")]


def write_speech(parts: str | Iterable[Part]) -> list[Block]:
    """What the assistant has said: text, and nothing else is allowed."""
    if isinstance(parts, str):
        return write_text(parts)
    said = (_read_text(part) for part in parts)
    return [block for text in said for block in write_text(text)]


def is_text(part: Part) -> bool:
    return isinstance(part, (*_TEXT_PARTS, content.Refusal))


def _read_text(part: Part) -> str:
    if isinstance(part, _TEXT_PARTS):
        return part.text
    if isinstance(part, content.Refusal):
        return part.refusal
    return codec.encode(part).decode()


def write_part(part: Part, place: str) -> list[Block]:
    match part:
        case content.InputImage() | content.ComputerScreenshot():
            blocks = [_write_image(part.image_url, part.file_id, place)]
        case content.InputFile():
            blocks = [_write_file(part, place)]
        case content.InputAudio() | content.InputVideo():
            raise InvalidRequest(f"This model does not take '{part.type}'.", param=place, code="unsupported_content")
        case _:
            blocks = write_text(_read_text(part))
    mark = getattr(part, "prompt_cache_breakpoint", None)
    if mark is not None and blocks:
        blocks[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h" if mark.ttl == "12h" else "5m"}
    return blocks


def _write_image(url: str | None, file_id: str | None, place: str) -> Block:
    if url is None:
        if file_id is None:
            raise InvalidRequest("An image needs an 'image_url' or a 'file_id'.", param=place, code="invalid_value")
        return {"type": "image", "source": {"type": "file", "file_id": file_id}}
    embedded = _DATA_URL.fullmatch(url)
    if embedded is not None:
        return _write_image_data(embedded[1], embedded[2], f"{place}.image_url")
    if url.startswith(("https://", "http://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    raise InvalidRequest(
        "An image is a https:// address or a data: address in base64.",
        param=f"{place}.image_url",
        code="invalid_image_url",
    )


def _write_image_data(media_type: str, data: str, place: str) -> Block:
    kind = media_type.lower().replace("image/jpg", "image/jpeg")
    if kind not in _IMAGES:
        raise InvalidRequest(
            f"This model reads images of these types: {', '.join(sorted(_IMAGES))}; not '{media_type}'.",
            param=place,
            code="unsupported_image_media_type",
        )
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _write_file(part: content.InputFile, place: str) -> Block:
    if part.file_data is not None:
        block = _write_file_data(part.file_data, part.filename or "", f"{place}.file_data")
    elif part.file_url is not None:
        block = {"type": "document", "source": {"type": "url", "url": part.file_url}}
    elif part.file_id is not None:
        block = {"type": "document", "source": {"type": "file", "file_id": part.file_id}}
    else:
        raise InvalidRequest(
            "A file needs 'file_data', a 'file_url' or a 'file_id'.", param=place, code="invalid_value"
        )
    if part.filename and block["type"] == "document":
        block["title"] = part.filename
    return block


def _write_file_data(file_data: str, filename: str, place: str) -> Block:
    embedded = _DATA_URL.fullmatch(file_data)
    media_type, data = (embedded[1], embedded[2]) if embedded is not None else ("", file_data)
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # not the right letters, or not as many as there must be
        raise InvalidRequest("The file is not in base64.", param=place, code="invalid_value") from None
    media_type = media_type.lower() or mimetypes.guess_type(filename)[0] or ""
    if media_type == "application/pdf" or raw.startswith(b"%PDF-"):
        return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}}
    if media_type.startswith("image/"):
        return _write_image_data(media_type, data, place)
    text = _decode_text(raw) if not media_type or media_type.startswith("text/") or media_type in _TEXTS else None
    if text is None:
        named = f" of type '{media_type}'" if media_type else ""
        raise InvalidRequest(
            f"This model reads PDF, text and images, not a file{named}.", param=place, code="unsupported_file"
        )
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}


def _decode_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


_OPENING = "(The conversation begins with your own words.)"
_GO_ON = "Continue."

Role = Literal["user", "assistant"]
Content = list[Block | Raw]


class Dialogue:
    """What is told so far. `thoughts` says whether the assistant's own thinking is given back to it."""

    def __init__(self, *, thoughts: bool = True) -> None:
        self.system: list[Block] = []
        self.messages: list[dict[str, Any]] = []
        self.called: dict[str, None] = {}
        self._thoughts = thoughts
        self._ids: set[str] = set()
        self._open: dict[str, list[tuple[str, int]]] = {}  # calls without a result: their wire id and message

    def tell(self, told: Iterable[items.Item | Unknown]) -> None:
        for index, item in enumerate(told):
            self._tell_item(item, f"input[{index}]")
        self._close()

    @property
    def thinks_first(self) -> bool:
        """Whether the calls that are being answered, if any are, began with thinking."""
        first = None
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                first = message["content"][0]
            elif not any(_is_result(block) for block in message["content"]):
                break
        return first is None or isinstance(first, Raw)

    @property
    def has_thoughts(self) -> bool:
        return any(isinstance(block, Raw) for each in self.messages for block in each["content"])

    def _tell_item(self, item: items.Item | Unknown, place: str) -> None:
        match item:
            case items.Message():
                self._tell_message(item, f"{place}.content")
            case items.FunctionCall():
                self._tell_call(item)
            case items.FunctionCallOutput():
                self._tell_result(item, f"{place}.output")
            case items.Reasoning():
                if self._thoughts:
                    self._say("assistant", _restore(item))
            case _:
                self._say("user", write_json(item))

    def _tell_message(self, message: items.Message, place: str) -> None:
        if message.role == "assistant":
            self._say("assistant", write_speech(message.content))
        elif message.role == "user":
            self._say("user", write_parts(message.content, place))
        elif isinstance(message.content, str):
            self.system += write_text(message.content)
        else:
            # Instructions are text; a picture that came with them is shown where they stood.
            for index, part in enumerate(message.content):
                blocks = write_part(part, f"{place}[{index}]")
                if is_text(part) or isinstance(part, Unknown):
                    self.system += blocks
                else:
                    self._say("user", blocks)

    def _tell_call(self, call: items.FunctionCall) -> None:
        wire = name_call(call.call_id, taken=self._ids)
        self._ids.add(wire)
        self.called[call.name] = None
        arguments = Raw(write_arguments(call.arguments).encode())
        self._say("assistant", [{"type": "tool_use", "id": wire, "name": name_tool(call.name), "input": arguments}])
        self._open.setdefault(call.call_id, []).append((wire, len(self.messages) - 1))

    def _tell_result(self, output: items.FunctionCallOutput, place: str) -> None:
        calls = self._open.get(output.call_id or "")
        if calls:
            self._answer(*calls.pop(0), write_parts(output.output, place))
        else:
            self._say("user", write_json(output))

    def _answer(self, wire: str, asked: int, content: list[Block]) -> None:
        """Results stand at the start of the message after the call's, in the order they came."""
        if asked == len(self.messages) - 1:
            self.messages.append({"role": "user", "content": []})
        answers: Content = self.messages[asked + 1]["content"]
        place = next((at for at, block in enumerate(answers) if not _is_result(block)), len(answers))
        marks = [part.pop("cache_control") for part in content if "cache_control" in part]
        block: Block = {"type": "tool_result", "tool_use_id": wire}
        if content:
            block["content"] = content
        if marks:
            block["cache_control"] = marks[-1]
        answers.insert(place, block)

    def _say(self, role: Role, blocks: Iterable[Block | Raw]) -> None:
        added = list(blocks)
        if not added:
            return
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += added
        else:
            self.messages.append({"role": role, "content": added})

    def _close(self) -> None:
        for calls in self._open.values():
            for wire, asked in calls:
                self._answer(wire, asked, write_text(items.LOST_OUTPUT))
        if self.messages and self.messages[0]["role"] == "assistant":
            self.messages.insert(0, {"role": "user", "content": write_text(_OPENING)})
        if not self.messages or self.messages[-1]["role"] == "assistant":
            # An answer that is to be gone on with: newer models do not do it unasked.
            self.messages.append({"role": "user", "content": write_text(_GO_ON)})


def _restore(reasoning: items.Reasoning) -> list[Raw]:
    """The blocks that this backend has put into the seal, as they were."""
    if not reasoning.encrypted_content:
        return []
    try:
        return msgspec.json.decode(reasoning.encrypted_content, type=list[Raw])
    except msgspec.DecodeError:
        return []


def _is_result(block: Block | Raw) -> bool:
    return isinstance(block, dict) and block["type"] == "tool_result"
