"""A conversation in the words of Chat Completions.

What the model said in one go (reasoning, text, calls) is one assistant message there, and the outputs of its calls must
come right after it, in the order of the calls. Items may stand otherwise: so the outputs are looked up. What a role
cannot carry (a picture in a tool's output, for one) follows in a user message that says where it belongs.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.base import Turn
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.wire import parse_opaque_state
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec, content, items
from antiphon.protocol.content import ReasoningText
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import normalize_arguments

ChatPart = dict[str, Any]

_TEXTS = (content.InputText, content.OutputText, content.Text, content.SummaryText, content.ReasoningText)
_MEDIA = (content.InputImage, content.InputFile, content.InputAudio)
_TEXT_FILE = re.compile(r"data:(?:text/[^;,]+|application/json)(?:;charset=[^;,]+)?;base64,", re.IGNORECASE)


class Read(msgspec.Struct):
    """The parts of a message in order, texts as they are and media as Chat Completions has them."""

    parts: list[str | ChatPart]

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def media(self) -> list[ChatPart]:
        return [part for part in self.parts if not isinstance(part, str)]

    def as_user_content(self) -> str | list[ChatPart]:
        """Plain text where that is all: every server takes it."""
        if not self.media:
            return "\n".join(self.texts)
        return [write_text(part) if isinstance(part, str) else part for part in self.parts]


def write_text(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def read_parts(parts: "str | Sequence[content.Part | Unknown]", quirks: Quirks, place: str) -> Read:
    """`place` is where they stand, for errors."""
    if isinstance(parts, str):
        return Read([parts])
    return Read([_read_part(part, quirks, f"{place}[{index}]") for index, part in enumerate(parts)])


def _read_part(part: "content.Part | Unknown", quirks: Quirks, place: str) -> str | ChatPart:
    if isinstance(part, _TEXTS):
        return part.text
    match part:
        case content.Refusal():
            return part.refusal
        case content.InputImage():
            return _read_image(part, place)
        case content.InputFile():
            return _read_file(part, quirks, place)
        case content.InputAudio():
            return {
                "type": "input_audio",
                "input_audio": {"data": part.input_audio.data, "format": part.input_audio.format},
            }
        case _:  # what nobody here knows, the model may
            return codec.encode(part).decode()


def _read_image(part: content.InputImage, place: str) -> ChatPart:
    if part.image_url is None:
        raise _refuse("An image by 'file_id'", "image_url", f"{place}.file_id")
    image = {"url": part.image_url}
    if part.detail is not None:
        image["detail"] = "high" if part.detail == "original" else part.detail
    return {"type": "image_url", "image_url": image}


def _read_file(part: content.InputFile, quirks: Quirks, place: str) -> str | ChatPart:
    name = part.filename or "file"
    if part.file_data is not None:
        text = _read_text_file(part.file_data)
        if text is not None:  # every model can read it so, while few servers take files
            return f"[File: {name}]\n{text}"
        return {"type": "file", "file": {"filename": name, "file_data": part.file_data}}
    if part.file_id is not None:
        if not quirks.file_ids:
            raise _refuse("A file by 'file_id'", "file_data", f"{place}.file_id")
        return {"type": "file", "file": {"file_id": part.file_id}}
    if not quirks.file_urls or part.file_url is None:
        raise _refuse("A file by 'file_url'", "file_data", f"{place}.file_url")
    return {"type": "file", "file": {"filename": name, "file_data": part.file_url}}


def _read_text_file(data: str) -> str | None:
    found = _TEXT_FILE.match(data)
    if found is None:
        return None
    try:
        return base64.b64decode(data[found.end() :], validate=True).decode()
    except ValueError:  # neither base64 nor text
        return None


def _refuse(what: str, instead: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} cannot be sent to this model's server; use '{instead}'.",
        param=place,
        code="unsupported_parameter",
    )


ChatMessage = dict[str, Any]

_LONGEST_ID = 40


def lay_out(turn: Turn, quirks: Quirks) -> list[ChatMessage]:
    """The messages that tell this turn."""
    layout = _Layout(turn.items, quirks)
    layout.write(turn.request.instructions)
    return layout.messages


class _Layout:
    def __init__(self, conversation: "Sequence[items.Item | Unknown]", quirks: Quirks) -> None:
        self.messages: list[ChatMessage] = []
        self._items = conversation
        self._quirks = quirks
        self._outputs = _pair(conversation)
        self._answers = set(self._outputs.values())
        self._system: list[str] = []
        self._ids: set[str] = set()
        # Reasoning before this belongs to a question that has been answered.
        self._loop = max((i for i, item in enumerate(conversation) if _is_asked(item)), default=-1)

    def write(self, instructions: str | None) -> None:
        if instructions:
            self._say_system(instructions)
        index = 0
        while index < len(self._items):
            if _is_spoken(self._items[index]):
                index = self._write_spoken(index)
            else:
                self._write_other(index)
                index += 1
        if self._system:
            self.messages.insert(0, {"role": self._quirks.system_role, "content": "\n\n".join(self._system)})
        if self._quirks.alternate:
            self.messages = _alternate(self.messages)

    # What the model reads

    def _write_other(self, index: int) -> None:
        item, place = self._items[index], f"input[{index}]"
        if index in self._answers:  # it stands behind its call
            return
        if isinstance(item, items.Message):
            read = read_parts(item.content, self._quirks, f"{place}.content")
            if item.role == "user":
                self._say("user", read.as_user_content())
            else:
                self._say_system("\n".join(read.texts))
                self._attach(f"[Attached to the {item.role} message]", read.media)
        elif isinstance(item, items.FunctionCallOutput):
            self._write_lone_output(item, place)
        else:
            self._say("user", codec.encode(item).decode())

    def _say_system(self, text: str) -> None:
        if self._quirks.merge_system:
            self._system.append(text)
        else:
            self._say(self._quirks.system_role, text)

    def _say(self, role: str, content: str | list[ChatPart]) -> None:
        self.messages.append({"role": role, "content": content})

    def _attach(self, label: str, media: list[ChatPart]) -> None:
        if media:
            self._say("user", [write_text(label), *media])

    def _write_lone_output(self, item: items.FunctionCallOutput, place: str) -> None:
        """An output that answers no call, as some agents report what happened on its own."""
        read = read_parts(item.output, self._quirks, f"{place}.output")
        label = f"[Output of {item.name or item.call_id or 'a tool'}]"
        self._say("user", Read([label, *read.parts]).as_user_content())

    # What the model said

    def _write_spoken(self, start: int) -> int:
        """One assistant message from the items that follow one another here. Returns where they end."""
        said = _Said(self._items, start)
        message: ChatMessage = {"role": "assistant", "content": None}
        read = [read_parts(each.content, self._quirks, f"input[{place}].content") for place, each in said.messages]
        if texts := ["".join(each.texts) for each in read if each.texts]:
            message["content"] = "\n\n".join(texts)
        calls = [(self._name_call(call.call_id), place, call) for place, call in said.calls]
        self._add_reasoning(message, said, start)
        if calls:
            message["tool_calls"] = [self._write_call(call_id, call, said) for call_id, _, call in calls]
        elif message["content"] is None and len(message) > 2:
            message["content"] = ""
        if calls or message["content"] is not None:
            self.messages.append(message)
        self._write_outputs(calls)
        for each in read:
            self._attach("[Attached to the assistant message]", each.media)
        return said.end

    def _write_call(self, call_id: str, call: items.FunctionCall, said: "_Said") -> ChatMessage:
        function = {"name": call.name, "arguments": normalize_arguments(call.arguments)}
        written: ChatMessage = {"id": call_id, "type": "function", "function": function}
        if self._quirks.keep_call_extras and call.call_id in said.extras:
            written["extra_content"] = said.extras[call.call_id]
        return written

    def _add_reasoning(self, message: ChatMessage, said: "_Said", start: int) -> None:
        rule, field = self._quirks.replay_reasoning, self._quirks.reasoning_field
        wanted = {"never": False, "loop": start > self._loop, "calls": bool(said.calls), "always": True}[rule]
        if not wanted:
            return
        if field == "reasoning_details":
            details = said.details or [{"type": "reasoning.text", "text": text} for text in said.reasoning]
            if details:
                message[field] = details
        elif said.reasoning or rule == "calls":
            message[field] = "\n\n".join(said.reasoning)

    def _write_outputs(self, calls: list[tuple[str, int, items.FunctionCall]]) -> None:
        attachments: list[tuple[str, list[ChatPart]]] = []
        for call_id, place, call in calls:
            read = self._find_output(place)
            written: str | list[ChatPart] = "\n".join(read.texts)
            if read.media and self._quirks.tool_images:
                written = read.as_user_content()
            elif read.media:
                written = written or "The output follows in the next message."
                attachments.append((f"[Output of the call {call_id} to {call.name}]", read.media))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": written})
        for label, media in attachments:
            self._attach(label, media)

    def _find_output(self, place: int) -> Read:
        answer = self._outputs.get(place)
        if answer is None:
            return Read([items.LOST_OUTPUT])
        output = self._items[answer]
        assert isinstance(output, items.FunctionCallOutput)
        return read_parts(output.output, self._quirks, f"input[{answer}].output")

    def _name_call(self, call_id: str) -> str:
        """The id of a call for the server: as it is, unless it was used before or has not the right form."""
        name, times = call_id, 1
        while name in self._ids:
            times += 1
            name = f"{call_id}_{times}"
        self._ids.add(name)
        if self._quirks.call_ids == "nine" and not (len(name) == 9 and name.isascii() and name.isalnum()):
            return hashlib.sha256(name.encode()).hexdigest()[:9]
        if self._quirks.call_ids == "short" and len(name) > _LONGEST_ID:
            return f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        return name


class _Said:
    """What the model said in one go: the items from `start` on, up to the first that is not its own."""

    def __init__(self, conversation: "Sequence[items.Item | Unknown]", start: int) -> None:
        self.messages: list[tuple[int, items.Message]] = []
        self.calls: list[tuple[int, items.FunctionCall]] = []
        self.reasoning: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.extras: dict[str, Any] = {}
        self.end = start
        for place in range(start, len(conversation)):
            item = conversation[place]
            if not _is_spoken(item):
                break
            self._take(place, item)
            self.end = place + 1

    def _take(self, place: int, item: "items.Item | Unknown") -> None:
        if isinstance(item, items.FunctionCall):
            self.calls.append((place, item))
        elif isinstance(item, items.Message):
            self.messages.append((place, item))
        elif isinstance(item, items.Reasoning):
            text = "".join(part.text for part in item.content or () if isinstance(part, ReasoningText))
            text = text or "\n\n".join(part.text for part in item.summary)
            if text:
                self.reasoning.append(text)
            kept = parse_opaque_state(item)
            self.details += kept.details
            self.extras |= kept.calls


def _alternate(messages: list[ChatMessage]) -> list[ChatMessage]:
    """What the user says in a row becomes one message, for templates that insist on user and assistant by turns."""
    merged: list[ChatMessage] = []
    for message in messages:
        if merged and message["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {"role": "user", "content": _join(merged[-1]["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _join(first: str | list[ChatPart], second: str | list[ChatPart]) -> str | list[ChatPart]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [part for each in (first, second) for part in ([write_text(each)] if isinstance(each, str) else each)]


def _is_spoken(item: "items.Item | Unknown") -> bool:
    if isinstance(item, items.Message):
        return item.role == "assistant"
    return isinstance(item, (items.FunctionCall, items.Reasoning))


def _is_asked(item: "items.Item | Unknown") -> bool:
    return isinstance(item, items.Message) and item.role == "user"


def _pair(conversation: "Sequence[items.Item | Unknown]") -> dict[int, int]:
    """Where the output of each call is, by the call's place. An id may come again once its call has been answered."""
    waiting: dict[str, list[int]] = {}
    pairs: dict[int, int] = {}
    for place, item in enumerate(conversation):
        if isinstance(item, items.FunctionCall):
            waiting.setdefault(item.call_id, []).append(place)
        elif isinstance(item, items.FunctionCallOutput) and item.call_id is not None and waiting.get(item.call_id):
            pairs[waiting[item.call_id].pop(0)] = place
    return pairs
