"""Translation of items to Chat Completions messages.

Consecutive items of the model (reasoning, text, calls) become one assistant message. The outputs of its calls must
follow directly, in the order of the calls, so they are looked up. Content that a role does not allow (an image in a
tool's output, for example) follows in a labelled user message.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from antiphon.backends.base import Turn
from antiphon.backends.chat_completions.parts import (
    TEXT_TYPES,
    ChatPart,
    Content,
    find_plain_text,
    make_text_part,
    parse_parts,
)
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.wire import parse_opaque_state
from antiphon.protocol import codec, content, items
from antiphon.protocol.content import ReasoningText
from antiphon.protocol.unions import Unknown
from antiphon.upstream.fields import normalize_arguments

ChatMessage = dict[str, Any]

_MAX_ID_LENGTH = 40
_SEPARATOR = "Understood."
_CALLS_AND_REASONING = frozenset({items.FunctionCall, items.Reasoning})


def make_messages(turn: Turn, quirks: Quirks) -> list[ChatMessage]:
    """Return the messages of a turn."""
    builder = _MessageBuilder(turn.items, quirks)
    builder.build(turn.request.instructions)
    return builder.messages


class _MessageBuilder:
    def __init__(self, conversation: "Sequence[items.Item | Unknown]", quirks: Quirks) -> None:
        self.messages: list[ChatMessage] = []
        self._items = conversation
        self._quirks = quirks
        self._system: list[str] = []
        self._ids: dict[str, int] = {}  # the ids sent so far, each with the number of calls that had it
        self._outputs: dict[int, int] | None = None  # the index of each call, with that of its output
        self._output_indexes: set[int] = set()

    def _find_outputs(self) -> dict[int, int]:
        """Return the index of the output of each call, and set `_output_indexes`. They are found at the first use."""
        if self._outputs is None:
            self._outputs = _match_outputs(self._items)
            self._output_indexes = set(self._outputs.values())
        return self._outputs

    @functools.cached_property
    def _last_user_index(self) -> int:
        """The index of the last user message. Reasoning before that message belongs to a finished loop of calls."""
        return max((i for i, item in enumerate(self._items) if _is_user_message(item)), default=-1)

    @functools.cached_property
    def _follow_outputs(self) -> list[bool]:
        """For each item, True if an output of a call is between the item and the user message before it."""
        follow: list[bool] = []
        has_output = False
        for item in self._items:
            follow.append(has_output)
            if type(item) is items.FunctionCallOutput:
                has_output = True
            elif _is_user_message(item):
                has_output = False
        return follow

    def build(self, instructions: str | None) -> None:
        if instructions:
            self._add_system(instructions)
        conversation, messages = self._items, self.messages
        may_need_reasoning = self._quirks.replay_reasoning == "calls"
        index, count = 0, len(conversation)
        while index < count:
            item = conversation[index]
            if type(item) is items.Message:
                parts = item.content
                # The common case, without a call for each message: text in one part.
                is_text = type(parts) is list and len(parts) == 1 and type(parts[0]) in TEXT_TYPES
                if is_text and (
                    item.role == "user"
                    or (
                        item.role == "assistant"
                        and not may_need_reasoning
                        # No other item of the model follows.
                        and (index + 1 == count or not _is_model_item(conversation[index + 1]))
                    )
                ):
                    messages.append({"role": item.role, "content": parts[0].text})  # type: ignore[union-attr]
                elif item.role != "assistant":
                    self._add_message(index, item)
                else:
                    index = self._add_model_items(index) - 1
                index += 1
            elif type(item) is items.FunctionCall and self._add_answered_call(index, item):
                index += 2
            elif _is_model_item(item):
                index = self._add_model_items(index)
            else:
                self._add_other(index, item)
                index += 1
        self._complete()

    def _complete(self) -> None:
        """Add the system message, and adapt the order of roles to the server."""
        if self._system:
            self.messages.insert(0, {"role": self._quirks.system_role, "content": "\n\n".join(self._system)})
        if self._quirks.alternate:
            self.messages = _alternate(self.messages)
        if self._quirks.separate_outputs:
            self.messages = _separate_outputs(self.messages)

    # Input

    def _add_message(self, index: int, item: items.Message) -> None:
        text = find_plain_text(item.content)
        if item.role == "user":
            if text is None:
                self._add("user", parse_parts(item.content, self._quirks, f"input[{index}].content").as_user_content())
            else:
                self.messages.append({"role": "user", "content": text})
        elif text is not None:
            self._add_system(text)
        else:
            read = parse_parts(item.content, self._quirks, f"input[{index}].content")
            self._add_system("\n".join(read.texts))
            self._attach(f"[Attached to the {item.role} message]", read.media)

    def _add_other(self, index: int, item: "items.Item | Unknown") -> None:
        if type(item) is not items.FunctionCallOutput:
            self._add("user", codec.encode(item).decode())
            return
        self._find_outputs()
        if index not in self._output_indexes:  # else it follows its call
            self._add_unmatched_output(item, f"input[{index}]")

    def _add_system(self, text: str) -> None:
        if self._quirks.merge_system:
            self._system.append(text)
        else:
            self._add(self._quirks.system_role, text)

    def _add(self, role: str, content: str | list[ChatPart]) -> None:
        self.messages.append({"role": role, "content": content})

    def _attach(self, label: str, media: list[ChatPart]) -> None:
        if media:
            self._add("user", [make_text_part(label), *media])

    def _add_unmatched_output(self, item: items.FunctionCallOutput, path: str) -> None:
        """Add an output without a call: some agents report events this way."""
        read = parse_parts(item.output, self._quirks, f"{path}.output")
        label = f"[Output of {item.name or item.call_id or 'a tool'}]"
        self._add("user", Content([label, *read.parts]).as_user_content())

    # Model output

    def _add_model_items(self, start: int) -> int:
        """Add one assistant message for consecutive model items. Return the index after them."""
        group = _ModelItems(self._items, start)
        message: ChatMessage = {"role": "assistant", "content": None}
        contents: list[Content] = []
        if group.messages:  # often there is a call and nothing else
            contents = [
                parse_parts(item.content, self._quirks, f"input[{index}].content") for index, item in group.messages
            ]
            if texts := ["".join(parsed.texts) for parsed in contents if parsed.texts]:
                message["content"] = "\n\n".join(filter(None, texts))
        calls = [(self._make_call_id(call.call_id), index, call) for index, call in group.calls]
        self._add_reasoning(message, group, start)
        if calls:
            message["tool_calls"] = [self._make_call(call_id, call, group) for call_id, _, call in calls]
            if self._quirks.placeholder_signature:
                _sign(message["tool_calls"], self._quirks.placeholder_signature)
        elif message["content"] is None and len(message) > 2:
            message["content"] = ""
        if calls or message["content"] is not None:
            self.messages.append(message)
        self._add_outputs(calls)
        for parsed in contents:
            self._attach("[Attached to the assistant message]", parsed.media)
        return group.end

    def _add_answered_call(self, index: int, call: items.FunctionCall) -> bool:
        """Add a call and its output if the output is a text and follows at once, as it does after most single calls.

        `_add_model_items` adds the same messages. Return False if the call has to be added there.
        """
        conversation, quirks, call_id = self._items, self._quirks, call.call_id
        if index + 1 == len(conversation) or quirks.replay_reasoning != "never" or quirks.call_ids != "any":
            return False
        if quirks.placeholder_signature:
            return False
        answer = conversation[index + 1]
        if type(answer) is not items.FunctionCallOutput or type(answer.output) is not str:
            return False
        if answer.call_id != call_id or not call_id or call_id in self._ids:
            return False
        self._ids[call_id] = 1
        function = {"name": call.name, "arguments": normalize_arguments(call.arguments)}
        calls = [{"id": call_id, "type": "function", "function": function}]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": answer.output})
        return True

    def _make_call(self, call_id: str, call: items.FunctionCall, group: "_ModelItems") -> ChatMessage:
        function = {"name": call.name, "arguments": normalize_arguments(call.arguments)}
        written: ChatMessage = {"id": call_id, "type": "function", "function": function}
        if self._quirks.keep_call_extras and call.call_id in group.extras:
            written["extra_content"] = group.extras[call.call_id]
        return written

    def _add_reasoning(self, message: ChatMessage, group: "_ModelItems", start: int) -> None:
        rule, field = self._quirks.replay_reasoning, self._quirks.reasoning_field
        if rule == "never" or (rule == "calls" and not group.calls and not self._follow_outputs[start]):
            return
        if rule == "loop" and start <= self._last_user_index:
            return
        if field == "reasoning_details":
            details = group.details or [{"type": "reasoning.text", "text": text} for text in group.reasoning]
            if details:
                message[field] = details
        elif group.reasoning or rule == "calls":
            message[field] = "\n\n".join(group.reasoning) or self._quirks.empty_reasoning

    def _add_outputs(self, calls: list[tuple[str, int, items.FunctionCall]]) -> None:
        attachments: list[tuple[str, list[ChatPart]]] = []
        for call_id, index, call in calls:
            answer = self._find_outputs().get(index)
            output = self._get_output(answer)
            text = find_plain_text(output)
            if text is not None:
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
                continue
            read = parse_parts(output, self._quirks, f"input[{answer}].output")
            written: str | list[ChatPart] = "\n".join(read.texts)
            if read.media and self._quirks.tool_images:
                written = read.as_user_content()
            elif read.media:
                written = written or "The output follows in the next message."
                attachments.append((f"[Output of the call {call_id} to {call.name}]", read.media))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": written})
        for label, media in attachments:
            self._attach(label, media)

    def _get_output(self, index: int | None) -> "str | Sequence[content.Part | Unknown]":
        if index is None:
            return items.LOST_OUTPUT
        item = self._items[index]
        assert type(item) is items.FunctionCallOutput
        return item.output

    def _make_call_id(self, call_id: str) -> str:
        """Return the call id, changed if it was used before or has the wrong form for the server."""
        call_id = call_id or "call"  # servers reject an empty id
        name, times = call_id, self._ids.get(call_id, 0)
        while name in self._ids:
            times += 1
            name = f"{call_id}_{times}"
        if times:
            self._ids[call_id] = times
        self._ids[name] = 1
        if self._quirks.call_ids == "nine" and not (len(name) == 9 and name.isascii() and name.isalnum()):
            return hashlib.sha256(name.encode()).hexdigest()[:9]
        if self._quirks.call_ids == "short" and len(name) > _MAX_ID_LENGTH:
            return f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        return name


class _ModelItems:
    """Consecutive items of the model, from `start` on."""

    def __init__(self, conversation: "Sequence[items.Item | Unknown]", start: int) -> None:
        self.messages: list[tuple[int, items.Message]] = []
        self.calls: list[tuple[int, items.FunctionCall]] = []
        self.reasoning: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.extras: dict[str, Any] = {}
        self.end = start
        for index in range(start, len(conversation)):
            item = conversation[index]
            if type(item) is items.FunctionCall:
                self.calls.append((index, item))
            elif type(item) is items.Message and item.role == "assistant":
                self.messages.append((index, item))
            elif type(item) is items.Reasoning:
                self._take_reasoning(item)
            else:
                break
            self.end = index + 1

    def _take_reasoning(self, item: items.Reasoning) -> None:
        text = "".join(part.text for part in item.content or () if isinstance(part, ReasoningText))
        text = text or "\n\n".join(part.text for part in item.summary)
        if text:
            self.reasoning.append(text)
        state = parse_opaque_state(item)
        self.details += state.details
        self.extras |= state.calls


def _sign(calls: list[ChatMessage], signature: str) -> None:
    """Add a signature to calls without any. Gemini requires one with the first of parallel calls only."""
    if not any("extra_content" in call for call in calls):
        calls[0]["extra_content"] = {"google": {"thought_signature": signature}}


def _alternate(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive user messages, for templates that require alternating roles."""
    merged: list[ChatMessage] = []
    for message in messages:
        if merged and message["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {"role": "user", "content": _join(merged[-1]["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _separate_outputs(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Insert an assistant message wherever a user message directly follows a tool output."""
    separated: list[ChatMessage] = []
    for message in messages:
        if separated and message["role"] == "user" and separated[-1]["role"] == "tool":
            separated.append({"role": "assistant", "content": _SEPARATOR})
        separated.append(message)
    return separated


def _join(first: str | list[ChatPart], second: str | list[ChatPart]) -> str | list[ChatPart]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [
        part
        for content in (first, second)
        for part in ([make_text_part(content)] if isinstance(content, str) else content)
    ]


def _is_model_item(item: "items.Item | Unknown") -> bool:
    if type(item) is items.Message:
        return item.role == "assistant"
    return type(item) in _CALLS_AND_REASONING


def _is_user_message(item: "items.Item | Unknown") -> bool:
    return isinstance(item, items.Message) and item.role == "user"


def _match_outputs(conversation: "Sequence[items.Item | Unknown]") -> dict[int, int]:
    """Map the index of each call to the index of its output. An id may be reused after its call has an output."""
    waiting: dict[str, list[int]] = {}
    pairs: dict[int, int] = {}
    for index, item in enumerate(conversation):
        if type(item) is items.Message:
            continue
        if type(item) is items.FunctionCall:
            waiting.setdefault(item.call_id, []).append(index)
        elif type(item) is items.FunctionCallOutput and item.call_id is not None:
            calls = waiting.get(item.call_id)
            if calls:
                pairs[calls.pop(0)] = index
    return pairs
