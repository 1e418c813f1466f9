"""Scripts: answers in JSON, and their translation into deltas.

    {
      "models": ["scripted"],
      "rules": [
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]]},
        {"last_item": "function_call_output", "answers": ["It is mild."]}
      ],
      "default": "You said: {input}"
    }

The first matching rule answers. A rule can require a `model`, a text in the last `user` message, a `text` in any part
of the context, and the type of the `last_item`. A required text is a substring or `{"regex": "…"}`. The n-th match of a
rule gives the n-th of its `answers`; when they are used up, the last one repeats.

The model supports every tool type, unless `native_tools` lists the supported ones, and every feature that `lacks` does
not list: json_schema, images, files, audio, video, logprobs, penalties, reasoning.

`slots` is the number of turns that run at once. Others wait in a queue. Without it there is no limit.

An answer is a text or a list of steps. Each step is an object with one of these keys:

    text, reasoning, refusal  a string, sent word by word, or a list of chunks; in `text`, `{input}` is replaced by the
                              last user message and `{history}` by the number of items in the context
    tokens                    text with logprobs: a list of `{"token", "logprob", "bytes", "top_logprobs"}`
    summary                   a reasoning summary: a string, or a list with a string for each part
    seal                      the encrypted form of the reasoning
    annotation                a citation on the text so far
    tool_call                 `{"name", "arguments", "call_id", "namespace", "key"}`; arguments are an object, a string,
                              or a list of fragments; steps with the same `key` continue one call
    custom_tool_call          the same, with `input` (a string or fragments) instead of `arguments`
    item, event               a complete output item; an event of an unknown type: any JSON object
    usage                     the token usage; without it, the words of input and output are counted
    finish                    "stop" (the default), "length" or "content_filter"; null: the answer ends without one
    failure                   `{"message", "code", "type", "param"}`: the model reports a failure
    raise                     `{"message", "status", "code", "type", "param"}`: an error is raised, before the
                              stream starts if there is no output yet
    crash                     a message: an unexpected exception is raised
    delay                     seconds to sleep
    wait                      the name of a gate: the answer continues when a test releases it
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError

from antiphon.errors import AntiphonError
from antiphon.protocol import items
from antiphon.protocol.content import ANNOTATIONS, LogProb
from antiphon.protocol.response import OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

Batch = tuple[Delta, ...]
Chunks = str | list[str]
Key = int | str

# No step may follow one with these keys.
_LAST_KEYS = {"finish", "failure", "raise", "crash"}
_WORD = re.compile(r"\s*\S+|\s+")
_PLACEHOLDER = re.compile(r"\{(input|history)\}")


class _ScriptPart(Struct, forbid_unknown_fields=True):
    pass


class Pattern(_ScriptPart):
    regex: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"Invalid regex: {error} - at `$.regex`") from None


class CallStep(_ScriptPart):
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None
    key: Key | None = None


class FunctionCallStep(CallStep):
    arguments: Chunks | dict[str, Any] = ""


class CustomCallStep(CallStep):
    input: Chunks = ""


class FailureStep(_ScriptPart):
    message: str
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


class RaiseStep(FailureStep):
    status: Annotated[int, Meta(ge=400, le=599)] = 500


class Step(_ScriptPart):
    """A step with exactly one key. The module docstring describes them."""

    text: Chunks | UnsetType = UNSET
    reasoning: Chunks | UnsetType = UNSET
    refusal: Chunks | UnsetType = UNSET
    tokens: list[LogProb] | UnsetType = UNSET
    summary: Chunks | UnsetType = UNSET
    seal: str | UnsetType = UNSET
    annotation: Raw | UnsetType = UNSET
    tool_call: FunctionCallStep | UnsetType = UNSET
    custom_tool_call: CustomCallStep | UnsetType = UNSET
    item: Raw | UnsetType = UNSET
    event: Raw | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    finish: Literal["stop", "length", "content_filter"] | UnsetType | None = UNSET
    failure: FailureStep | UnsetType = UNSET
    raise_: RaiseStep | UnsetType = msgspec.field(default=UNSET, name="raise")
    crash: str | UnsetType = UNSET
    delay: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    wait: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise ValueError(f"Expected one key in a step, got {', '.join(name for name, _ in given) or 'none'}")

    def _given(self) -> list[tuple[str, Any]]:
        names = zip(self.__struct_encode_fields__, self.__struct_fields__, strict=True)
        return [(name, value) for name, field in names if (value := getattr(self, field)) is not UNSET]

    def read(self) -> tuple[str, Any]:
        """Return the key and the value."""
        return self._given()[0]


ScriptedAnswer = str | list[Step]


class Rule(_ScriptPart):
    """Answers, and the conditions for them."""

    answers: Annotated[list[ScriptedAnswer], Meta(min_length=1)]
    model: str | None = None
    user: str | Pattern | None = None
    text: str | Pattern | None = None
    last_item: str | None = None


Feature = Literal["json_schema", "images", "files", "audio", "video", "logprobs", "penalties", "reasoning"]


class Script(_ScriptPart):
    models: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["scripted"])
    native_tools: list[str] | None = None
    lacks: list[Feature] = []
    slots: Annotated[int, Meta(ge=1)] | None = None
    rules: list[Rule] = []
    default: ScriptedAnswer = "You said: {input}"


class Template(Struct, frozen=True):
    """Text with placeholders."""

    text: Chunks

    def fill(self, values: Mapping[str, str]) -> list[Delta]:
        if isinstance(self.text, str):
            return _DELTA_BUILDERS["text"](_fill_placeholders(self.text, values))
        return _DELTA_BUILDERS["text"]([_fill_placeholders(chunk, values) for chunk in self.text])


class Delay(Struct, frozen=True):
    seconds: float


class Wait(Struct, frozen=True):
    gate: str


class RaiseError(Struct, frozen=True):
    """Raises an error, a new one each time."""

    make_error: Callable[[], Exception]


Action = Batch | Template | Delay | Wait | RaiseError


class CompiledAnswer:
    """An answer as a list of actions and an end. `fails_at_start`: it raises an error before any output."""

    def __init__(self, answer: ScriptedAnswer) -> None:
        self.actions: list[Action] = []
        self.fails_at_start = False
        self._ending: deltas.Finish | deltas.Failure | None = deltas.Finish()
        self._words = 0
        self._reasoning_words = 0
        self._counts_words = True
        self._has_output = False
        self._call_keys: set[Key] = set()
        steps = [Step(text=answer)] if isinstance(answer, str) else answer
        for index, step in enumerate(steps):
            key, value = step.read()
            if key in _LAST_KEYS and index + 1 < len(steps):
                raise ValidationError(f"Nothing may follow {key} - at `$[{index + 1}]`")
            try:
                self._add(key, value, index)
            except ValidationError as error:
                raise ValidationError(f"{error} - at `$[{index}].{key}`") from None

    def make_last_batch(self, count_input: Callable[[], int], filled_words: int) -> Batch:
        """Return the last batch; empty if the answer has no end. The arguments are for the counted usage."""
        if self._ending is None:
            return ()
        if not self._counts_words or isinstance(self._ending, deltas.Failure):
            return (self._ending,)
        input_words, output_words = count_input(), self._words + filled_words
        details = OutputTokensDetails(self._reasoning_words)
        usage = Usage(input_words, output_words, input_words + output_words, output_tokens_details=details)
        return (deltas.TokenUsage(usage), self._ending)

    def _add(self, key: str, value: Any, index: int) -> None:
        if key in _DELTA_BUILDERS:
            self._add_output(key, value, index)
        elif key == "delay":
            self.actions.append(Delay(value))
        elif key == "wait":
            self.actions.append(Wait(value))
        elif key == "finish":
            self._ending = deltas.Finish(value) if value is not None else None
        elif key == "failure":
            self._ending = deltas.Failure(value.message, value.code, value.type, value.param)
        else:
            self.actions.append(RaiseError(functools.partial(_make_error if key == "raise" else RuntimeError, value)))
            self.fails_at_start = not self._has_output
            self._ending = None

    def _add_output(self, key: str, value: Any, index: int) -> None:
        self._has_output = True
        self._counts_words = self._counts_words and key != "usage"
        if isinstance(value, CallStep):
            self._assign_key(value, index)
        if key == "text" and any(map(_PLACEHOLDER.search, [value] if isinstance(value, str) else value)):
            self.actions.append(Template(value))
            return
        output = _DELTA_BUILDERS[key](value)
        self.actions += [(delta,) for delta in output]
        self._words += count_words(output)
        if key in {"reasoning", "summary"}:
            self._reasoning_words += count_words(output)

    def _assign_key(self, call: CallStep, index: int) -> None:
        if call.key is None:
            call.key = f"step {index}"
        if not call.name and call.key not in self._call_keys:
            raise ValidationError("Object missing required field `name`")
        self._call_keys.add(call.key)


def count_words(output: list[Delta]) -> int:
    """Count the words of the output. A word may span several deltas."""
    return len("".join(map(_get_text, output)).split())


def _fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda placeholder: values[placeholder[1]], text)


def _split_words(text: Chunks) -> list[str]:
    return _WORD.findall(text) if isinstance(text, str) else text


def _build_summary(parts: Chunks) -> list[Delta]:
    texts = [parts] if isinstance(parts, str) else parts
    return [deltas.ReasoningSummary(word, index) for index, text in enumerate(texts) for word in _split_words(text)]


def _build_function_call(call: FunctionCallStep) -> list[Delta]:
    arguments = call.arguments
    text = msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments
    return _build_call(deltas.ToolCall, call, text)


def _build_call(kind: type[deltas.ToolCall | deltas.CustomToolCall], call: CallStep, text: Chunks) -> list[Delta]:
    assert call.key is not None  # `_assign_key` has set it
    first, *rest = ([text] if isinstance(text, str) else text) or [""]
    head = kind(call.key, first, call.name, call.call_id, call.namespace)
    return [head, *(kind(call.key, piece) for piece in rest)]


def _build_item(raw: Raw) -> list[Delta]:
    item = items.ITEMS.decode(raw)
    if isinstance(item, items.CompactionTrigger | items.ItemReference | items.ConfigurationUpdate):
        raise ValidationError(f"Expected an output item, got {item.type}")
    return [deltas.WholeItem(item)]


def _build_event(raw: Raw) -> list[Delta]:
    event = Unknown(bytes(raw))
    if not event.type:
        raise ValidationError("Object missing required field `type`")
    return [deltas.Passthrough(event)]


_DELTA_BUILDERS: dict[str, Callable[[Any], list[Delta]]] = {
    "text": lambda text: [deltas.Text(chunk) for chunk in _split_words(text)],
    "reasoning": lambda text: [deltas.Reasoning(chunk) for chunk in _split_words(text)],
    "refusal": lambda text: [deltas.Refusal(chunk) for chunk in _split_words(text)],
    "tokens": lambda tokens: [deltas.Text(token.token, (token,)) for token in tokens],
    "summary": _build_summary,
    "seal": lambda sealed: [deltas.ReasoningSeal(sealed)],
    "annotation": lambda raw: [deltas.Annotate(ANNOTATIONS.decode(raw))],
    "tool_call": _build_function_call,
    "custom_tool_call": lambda call: _build_call(deltas.CustomToolCall, call, call.input),
    "item": _build_item,
    "event": _build_event,
    "usage": lambda usage: [deltas.TokenUsage(usage)],
}


def _get_text(delta: Delta) -> str:
    match delta:
        case deltas.Text() | deltas.Reasoning() | deltas.ReasoningSummary() | deltas.Refusal():
            return delta.text
        case deltas.ToolCall():
            return delta.arguments
        case deltas.CustomToolCall():
            return delta.input
        case _:
            return ""


def _make_error(step: RaiseStep) -> AntiphonError:
    class ScriptedError(AntiphonError):
        status = step.status
        type = step.type

    return ScriptedError(step.message, param=step.param, code=step.code)
