"""Scripts: answers written down in JSON, and the deltas they stand for.

    {
      "models": ["scripted"],
      "rules": [
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]]},
        {"last_item": "function_call_output", "answers": ["It is mild."]}
      ],
      "default": "You said: {input}"
    }

The first rule that fits answers. A rule may ask for a `model`, for words in the last `user` message, for words in any
`text` the model reads, and for the type of the `last_item`; words are a part of the text, or `{"regex": "…"}`. The n-th
time a rule answers, it gives the n-th of its `answers`, and the last one from then on.

The model takes every kind of tool, unless `native_tools` lists those it takes, and can do everything but what `lacks`
lists: json_schema, images, files, audio, video, logprobs, penalties, reasoning.

An answer is a text, or a list of steps; each step is an object with one of these keys:

    text, reasoning, refusal  a string, sent word by word, or a list of strings, sent as they are; in `text`, `{input}`
                              stands for the last user message and `{history}` for the number of items read
    tokens                    text with logprobs: a list of `{"token", "logprob", "bytes", "top_logprobs"}`
    summary                   a reasoning summary: a string, or one string for each of its parts
    seal                      the encrypted form of the reasoning
    annotation                a citation on the text so far
    tool_call                 `{"name", "arguments", "call_id", "namespace", "key"}`; arguments are an object, a string,
                              or a list of fragments; calls are interleaved by continuing one under the same `key`
    custom_tool_call          the same, with `input` (a string or fragments) for `arguments`
    item, event               an output item that comes whole, an event of an unknown type: any JSON object
    usage                     the token usage; if there is none, the words read and said are counted
    finish                    "stop" (which may be left out), "length" or "content_filter"; null: the answer just ends
    failure                   `{"message", "code", "type", "param"}`: the model reports that it failed
    raise                     `{"message", "status", "code", "type", "param"}`: an error is raised, before the
                              stream starts if nothing was said yet
    crash                     a message: an exception nobody has foreseen is raised
    delay                     seconds to sleep
    wait                      the name of a gate: the answer goes on when somebody opens it
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


class _Part(Struct, forbid_unknown_fields=True):
    pass


Chunks = str | list[str]
Key = int | str


class Pattern(_Part):
    regex: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"Invalid regex: {error} - at `$.regex`") from None


class Call(_Part):
    name: str = ""
    call_id: str | None = None
    namespace: str | None = None
    key: Key | None = None


class FunctionCall(Call):
    arguments: Chunks | dict[str, Any] = ""


class CustomCall(Call):
    input: Chunks = ""


class Failed(_Part):
    message: str
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


class Raised(Failed):
    status: Annotated[int, Meta(ge=400, le=599)] = 500


class Step(_Part):
    """One of these; the module's docstring says what they do."""

    text: Chunks | UnsetType = UNSET
    reasoning: Chunks | UnsetType = UNSET
    refusal: Chunks | UnsetType = UNSET
    tokens: list[LogProb] | UnsetType = UNSET
    summary: Chunks | UnsetType = UNSET
    seal: str | UnsetType = UNSET
    annotation: Raw | UnsetType = UNSET
    tool_call: FunctionCall | UnsetType = UNSET
    custom_tool_call: CustomCall | UnsetType = UNSET
    item: Raw | UnsetType = UNSET
    event: Raw | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    finish: Literal["stop", "length", "content_filter"] | UnsetType | None = UNSET
    failure: Failed | UnsetType = UNSET
    raise_: Raised | UnsetType = msgspec.field(default=UNSET, name="raise")
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
        """Its key and its value."""
        return self._given()[0]


Answer = str | list[Step]


class Rule(_Part):
    """What to answer, and when."""

    answers: Annotated[list[Answer], Meta(min_length=1)]
    model: str | None = None
    user: str | Pattern | None = None
    text: str | Pattern | None = None
    last_item: str | None = None


Feature = Literal["json_schema", "images", "files", "audio", "video", "logprobs", "penalties", "reasoning"]


class Script(_Part):
    models: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["scripted"])
    native_tools: list[str] | None = None
    lacks: list[Feature] = []
    rules: list[Rule] = []
    default: Answer = "You said: {input}"


Batch = tuple[Delta, ...]


class Template(Struct, frozen=True):
    """Text with blanks in it."""

    text: Chunks

    def fill(self, blanks: Mapping[str, str]) -> list[Delta]:
        if isinstance(self.text, str):
            return _SPEECH["text"](_fill(self.text, blanks))
        return _SPEECH["text"]([_fill(chunk, blanks) for chunk in self.text])


class Delay(Struct, frozen=True):
    seconds: float


class Wait(Struct, frozen=True):
    gate: str


class Break(Struct, frozen=True):
    """The answer ends in an error, made anew each time."""

    make_error: Callable[[], Exception]


Move = Batch | Template | Delay | Wait | Break

_WORD = re.compile(r"\s*\S+|\s+")
_BLANK = re.compile(r"\{(input|history)\}")


def _fill(text: str, blanks: Mapping[str, str]) -> str:
    return _BLANK.sub(lambda blank: blanks[blank[1]], text)


def _split(text: Chunks) -> list[str]:
    return _WORD.findall(text) if isinstance(text, str) else text


def _summarise(parts: Chunks) -> list[Delta]:
    texts = [parts] if isinstance(parts, str) else parts
    return [deltas.ReasoningSummary(word, index) for index, text in enumerate(texts) for word in _split(text)]


def _call_function(call: FunctionCall) -> list[Delta]:
    given = call.arguments
    text = msgspec.json.encode(given).decode() if isinstance(given, dict) else given
    return _call(deltas.ToolCall, call, text)


def _call(kind: type[deltas.ToolCall | deltas.CustomToolCall], call: Call, text: Chunks) -> list[Delta]:
    assert call.key is not None  # the plan has seen to it
    first, *rest = ([text] if isinstance(text, str) else text) or [""]
    head = kind(call.key, first, call.name, call.call_id, call.namespace)
    return [head, *(kind(call.key, piece) for piece in rest)]


def _give_item(raw: Raw) -> list[Delta]:
    item = items.ITEMS.decode(raw)
    if isinstance(item, items.CompactionTrigger | items.ItemReference | items.ConfigurationUpdate):
        raise ValidationError(f"Expected an output item, got {item.type}")
    return [deltas.WholeItem(item)]


def _pass_event(raw: Raw) -> list[Delta]:
    event = Unknown(bytes(raw))
    if not event.type:
        raise ValidationError("Object missing required field `type`")
    return [deltas.Passthrough(event)]


_SPEECH: dict[str, Callable[[Any], list[Delta]]] = {
    "text": lambda text: [deltas.Text(chunk) for chunk in _split(text)],
    "reasoning": lambda text: [deltas.Reasoning(chunk) for chunk in _split(text)],
    "refusal": lambda text: [deltas.Refusal(chunk) for chunk in _split(text)],
    "tokens": lambda tokens: [deltas.Text(token.token, (token,)) for token in tokens],
    "summary": _summarise,
    "seal": lambda sealed: [deltas.ReasoningSeal(sealed)],
    "annotation": lambda raw: [deltas.Annotate(ANNOTATIONS.decode(raw))],
    "tool_call": _call_function,
    "custom_tool_call": lambda call: _call(deltas.CustomToolCall, call, call.input),
    "item": _give_item,
    "event": _pass_event,
    "usage": lambda usage: [deltas.TokenUsage(usage)],
}


def count_words(said: list[Delta]) -> int:
    """The words in what was said; a word may come in several deltas."""
    return len("".join(map(_spoken, said)).split())


def _spoken(delta: Delta) -> str:
    match delta:
        case deltas.Text() | deltas.Reasoning() | deltas.ReasoningSummary() | deltas.Refusal():
            return delta.text
        case deltas.ToolCall():
            return delta.arguments
        case deltas.CustomToolCall():
            return delta.input
        case _:
            return ""


def _make_error(raised: Raised) -> AntiphonError:
    class ScriptedError(AntiphonError):
        status = raised.status
        type = raised.type

    return ScriptedError(raised.message, param=raised.param, code=raised.code)


_ENDS = {"finish", "failure", "raise", "crash"}


class Plan:
    """An answer, ready to be played: its moves in order, and its end. It `refuses` if it is just an error."""

    def __init__(self, answer: Answer) -> None:
        self.moves: list[Move] = []
        self.refuses = False
        self._ending: deltas.Finish | deltas.Failure | None = deltas.Finish()
        self._words = 0
        self._reasoning_words = 0
        self._counts = True
        self._speaks = False
        self._calls: set[Key] = set()
        steps = [Step(text=answer)] if isinstance(answer, str) else answer
        for index, step in enumerate(steps):
            key, value = step.read()
            if key in _ENDS and index + 1 < len(steps):
                raise ValidationError(f"Nothing may follow {key} - at `$[{index + 1}]`")
            try:
                self._add(key, value, index)
            except ValidationError as error:
                raise ValidationError(f"{error} - at `$[{index}].{key}`") from None

    def close(self, count_read: Callable[[], int], filled_words: int) -> Batch:
        """The last batch; empty when the answer just ends. The arguments are for the usage, if it is to be counted."""
        if self._ending is None:
            return ()
        if not self._counts or isinstance(self._ending, deltas.Failure):
            return (self._ending,)
        read, said = count_read(), self._words + filled_words
        details = OutputTokensDetails(self._reasoning_words)
        return (deltas.TokenUsage(Usage(read, said, read + said, output_tokens_details=details)), self._ending)

    def _add(self, key: str, value: Any, index: int) -> None:
        if key in _SPEECH:
            self._say(key, value, index)
        elif key == "delay":
            self.moves.append(Delay(value))
        elif key == "wait":
            self.moves.append(Wait(value))
        elif key == "finish":
            self._ending = deltas.Finish(value) if value is not None else None
        elif key == "failure":
            self._ending = deltas.Failure(value.message, value.code, value.type, value.param)
        else:
            self.moves.append(Break(functools.partial(_make_error if key == "raise" else RuntimeError, value)))
            self.refuses = not self._speaks
            self._ending = None

    def _say(self, key: str, value: Any, index: int) -> None:
        self._speaks = True
        self._counts = self._counts and key != "usage"
        if isinstance(value, Call):
            self._identify(value, index)
        if key == "text" and any(map(_BLANK.search, [value] if isinstance(value, str) else value)):
            self.moves.append(Template(value))
            return
        said = _SPEECH[key](value)
        self.moves += [(delta,) for delta in said]
        self._words += count_words(said)
        if key in {"reasoning", "summary"}:
            self._reasoning_words += count_words(said)

    def _identify(self, call: Call, index: int) -> None:
        if call.key is None:
            call.key = f"step {index}"
        if not call.name and call.key not in self._calls:
            raise ValidationError("Object missing required field `name`")
        self._calls.add(call.key)
