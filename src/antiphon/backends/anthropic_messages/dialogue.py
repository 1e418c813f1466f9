"""A turn's items as the messages of the Messages API.

User and assistant take turns there, each call is answered in the very next message, and all instructions stand in
front. What comes in another order is put in that one, and nothing is left out but reasoning of other backends.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.anthropic_messages.blocks import (
    Block,
    is_text,
    write_json,
    write_part,
    write_parts,
    write_speech,
    write_text,
)
from antiphon.backends.anthropic_messages.names import name_call, name_tool
from antiphon.backends.upstream.arguments import write_arguments
from antiphon.protocol import items
from antiphon.protocol.open import Unknown

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
