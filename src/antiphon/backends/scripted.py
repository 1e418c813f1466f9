"""A deterministic backend for tests, demos and benchmarks: it answers from a JSON script.

The option `script` is the script itself or the path of a file that holds it. Without one, every answer is an echo.

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
    finish                    "stop" (when nothing else ends the answer), "length", "content_filter"; or null: the answer
                              breaks off without an end
    failure                   `{"message", "code", "type", "param"}`: the model reports that it failed
    raise                     `{"message", "status", "code", "type", "param"}`: an error is raised; by `stream` itself
                              if nothing was said before
    crash                     a message: an exception nobody has foreseen is raised
    delay                     seconds to sleep
    wait                      the name of a gate: the turn goes on when `release` is called
"""

import asyncio
import functools
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError

from antiphon.backends.base import Capabilities, Deltas, Model, Turn, locate, read_options
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol import items
from antiphon.protocol.content import ANNOTATIONS, LogProb, text_of
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import OutputTokensDetails, Usage
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

# The script, as it is written


class _Part(Struct, forbid_unknown_fields=True, kw_only=True):
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


class Raised(_Part):
    message: str
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


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
    finish: Literal["stop", "length", "content_filter"] | None | UnsetType = UNSET
    failure: deltas.Failure | UnsetType = UNSET
    raise_: Raised | UnsetType = msgspec.field(default=UNSET, name="raise")
    crash: str | UnsetType = UNSET
    delay: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    wait: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            raise ValueError(f"A step has exactly one key, got {', '.join(self._given()) or 'none'}")

    def _given(self) -> dict[str, Any]:
        values = ((name, getattr(self, field)) for field, name in zip(self.__struct_fields__, _STEP_KEYS, strict=True))
        return {name: value for name, value in values if value is not UNSET}

    def read(self) -> tuple[str, Any]:
        """Its key and its value."""
        (given,) = self._given().items()
        return given


_STEP_KEYS = Step.__struct_encode_fields__
_ENDS = {"finish", "failure", "raise", "crash"}

Answer = str | list[Step]


class Rule(_Part):
    model: str | None = None
    user: str | Pattern | None = None
    text: str | Pattern | None = None
    last_item: str | None = None
    answers: Annotated[list[Answer], Meta(min_length=1)]


class Script(_Part):
    models: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["scripted"])
    rules: list[Rule] = []
    default: Answer = "You said: {input}"


class Options(_Part):
    script: str | dict[str, Any] = {}


# The script, ready to be played

Batch = tuple[Delta, ...]
Act = Callable[[], Awaitable[object]]

_WORD = re.compile(r"\s*\S+|\s+")
_BLANK = re.compile(r"\{(input|history)\}")


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
    item = items.ITEMS.one(raw)
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
    "annotation": lambda raw: [deltas.Annotate(ANNOTATIONS.one(raw))],
    "tool_call": _call_function,
    "custom_tool_call": lambda call: _call(deltas.CustomToolCall, call, call.input),
    "item": _give_item,
    "event": _pass_event,
    "usage": lambda usage: [deltas.Tokens(usage)],
}
_SPOKEN = {
    deltas.Text: "text",
    deltas.Reasoning: "text",
    deltas.Refusal: "text",
    deltas.ReasoningSummary: "text",
    deltas.ToolCall: "arguments",
    deltas.CustomToolCall: "input",
}


def _count_words(said: list[Delta]) -> int:
    return len("".join(getattr(delta, _SPOKEN[type(delta)]) for delta in said if type(delta) in _SPOKEN).split())


def _make_error(raised: Raised) -> AntiphonError:
    class ScriptedError(AntiphonError):
        status = raised.status
        type = raised.type

    return ScriptedError(raised.message, param=raised.param, code=raised.code)


class Gate:
    """Where turns wait until a test lets them go on, one at a time."""

    def __init__(self) -> None:
        self.arrivals = asyncio.Semaphore(0)
        self.passes = asyncio.Semaphore(0)

    async def go_through(self) -> None:
        self.arrivals.release()
        await self.passes.acquire()


class Template(Struct, frozen=True):
    """Text with blanks, that depends on what was asked."""

    text: Chunks

    def fill(self, reading: "Reading") -> list[Delta]:
        blanks = {"input": reading.user, "history": str(len(reading.items))}
        chunks = [self.text] if isinstance(self.text, str) else self.text
        filled = [_BLANK.sub(lambda blank: blanks[blank[1]], chunk) for chunk in chunks]
        return [deltas.Text(chunk) for chunk in (_split(filled[0]) if isinstance(self.text, str) else filled)]


class Reading:
    """What the model reads in a turn."""

    def __init__(self, turn: Turn) -> None:
        self.model = turn.request.model
        self.instructions = turn.request.instructions
        self.items = turn.items

    @functools.cached_property
    def user(self) -> str:
        """The last user message."""
        for item in reversed(self.items):
            if isinstance(item, items.Message) and item.role == "user":
                return text_of(item.content)
        return ""

    @functools.cached_property
    def texts(self) -> list[str]:
        return [self.instructions or "", *map(_read_item, self.items)]

    @property
    def last_item(self) -> str:
        return self.items[-1].type if self.items else ""

    def count_words(self) -> int:
        return sum(len(text.split()) for text in self.texts)


def _read_item(item: items.Item | Unknown) -> str:
    match item:
        case items.Message():
            return text_of(item.content)
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            return text_of(item.output)
        case items.FunctionCall():
            return item.arguments
        case items.CustomToolCall():
            return item.input
        case items.Reasoning():
            return text_of([*item.summary, *(item.content or ())])
        case _:
            return ""


class Plan:
    """An answer: what is said and done, one after the other, and how it ends. `where` is its place in the script."""

    def __init__(self, answer: Answer, gates: dict[str, Gate], where: str) -> None:
        self.moves: list[Batch | Act | Template] = []
        self.refuses = False
        self._ending: deltas.Finish | deltas.Failure | None = deltas.Finish()
        self._words = 0
        self._reasoning_words = 0
        self._counts = True
        self._speaks = False
        self._calls: set[Key] = set()
        self._gates = gates
        steps = [Step(text=answer)] if isinstance(answer, str) else answer
        for index, step in enumerate(steps):
            key, value = step.read()
            if key in _ENDS and index + 1 < len(steps):
                raise ConfigError(f"{where}[{index + 1}]: nothing may follow {key}")
            try:
                self._add(key, value, index)
            except ValidationError as error:
                raise locate(error, f"{where}[{index}].{key}") from None

    def _add(self, key: str, value: Any, index: int) -> None:
        if key in _SPEECH:
            self._say(key, value, index)
        elif key == "delay":
            self.moves.append(functools.partial(asyncio.sleep, value))
        elif key == "wait":
            self.moves.append(self._gates[value].go_through)
        elif key == "finish":
            self._ending = deltas.Finish(value) if value is not None else None
        elif key == "failure":
            self._ending = value
        else:
            self._break_off(functools.partial(_make_error if key == "raise" else RuntimeError, value))

    def _say(self, key: str, value: Any, index: int) -> None:
        self._speaks = True
        if isinstance(value, Call):
            self._identify(value, index)
        if key == "text" and any(map(_BLANK.search, [value] if isinstance(value, str) else value)):
            self.moves.append(Template(value))
            return
        said = _SPEECH[key](value)
        self.moves += [(delta,) for delta in said]
        self._words += _count_words(said)
        self._reasoning_words += _count_words(said) if key in {"reasoning", "summary"} else 0
        self._counts = self._counts and key != "usage"

    def _identify(self, call: Call, index: int) -> None:
        if call.key is None:
            call.key = f"step {index}"
        if not call.name and call.key not in self._calls:
            raise ValidationError("Object missing required field `name`")
        self._calls.add(call.key)

    def _break_off(self, make_error: Callable[[], Exception]) -> None:
        def act() -> NoReturn:
            raise make_error()

        self.moves.append(act)
        self.refuses = not self._speaks
        self._ending = None

    def close(self, reading: Reading, filled_words: int) -> Batch:
        """The last batch; empty when the answer just breaks off."""
        if self._ending is None:
            return ()
        if not self._counts or isinstance(self._ending, deltas.Failure):
            return (self._ending,)
        read, said = reading.count_words(), self._words + filled_words
        details = OutputTokensDetails(self._reasoning_words)
        return deltas.Tokens(Usage(read, said, read + said, output_tokens_details=details)), self._ending


class Cue:
    """A rule with its answers planned, and how often it has answered."""

    def __init__(self, rule: Rule, plans: list[Plan]) -> None:
        self._rule = rule
        self._plans = plans
        self._calls = 0

    def fits(self, reading: Reading) -> bool:
        rule = self._rule
        return (
            rule.model in {None, reading.model}
            and rule.last_item in {None, reading.last_item}
            and (rule.user is None or _contains(reading.user, rule.user))
            and (rule.text is None or any(_contains(text, rule.text) for text in reading.texts))
        )

    def take(self) -> Plan:
        plan = self._plans[min(self._calls, len(self._plans) - 1)]
        self._calls += 1
        return plan


def _contains(text: str, words: str | Pattern) -> bool:
    return words in text if isinstance(words, str) else re.search(words.regex, text) is not None


class ScriptedBackend:
    """Plays a script. `cancelled` counts the turns that were stopped before their end; the first sets `cancellation`."""

    # It can be told to say anything, so it lacks nothing.
    capabilities = Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, True))

    def __init__(self, name: str, script: Script, where: str) -> None:
        self.cancelled = 0
        self.cancellation = asyncio.Event()
        self._models = [Model(id=model, created=0, owned_by=name) for model in script.models]
        gates: dict[str, Gate] = defaultdict(Gate)
        self._cues = [
            Cue(
                rule,
                [
                    Plan(answer, gates, f"{where}.rules[{number}].answers[{index}]")
                    for index, answer in enumerate(rule.answers)
                ],
            )
            for number, rule in enumerate(script.rules)
        ]
        self._cues.append(Cue(Rule(answers=[script.default]), [Plan(script.default, gates, f"{where}.default")]))
        self._gates = dict(gates)

    async def start(self) -> None:
        """There is nothing to get ready."""

    async def close(self) -> None:
        """There is nothing to release."""

    def models(self) -> Sequence[Model]:
        return self._models

    async def stream(self, turn: Turn) -> Deltas:
        reading = Reading(turn)
        plan = next(cue for cue in self._cues if cue.fits(reading)).take()
        answer = self._play(plan, reading)
        if plan.refuses:
            await anext(answer)
        return answer

    async def count_tokens(self, turn: Turn) -> int:
        return Reading(turn).count_words()

    def release(self, gate: str) -> None:
        """Let one turn through a gate: the one that waits there, or the next to come."""
        self._gates[gate].passes.release()

    async def reached(self, gate: str) -> None:
        """Wait until a turn has come to a gate. Each arrival is told once."""
        await self._gates[gate].arrivals.acquire()

    async def _play(self, plan: Plan, reading: Reading) -> Deltas:
        filled_words = 0
        try:
            for move in plan.moves:
                if isinstance(move, tuple):
                    yield move
                elif isinstance(move, Template):
                    said = move.fill(reading)
                    filled_words += _count_words(said)
                    for delta in said:
                        yield (delta,)
                else:
                    await move()
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            self.cancellation.set()
            raise
        if last := plan.close(reading, filled_words):
            yield last


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ScriptedBackend:
    """What the registry calls. A script's mistakes are ConfigErrors that name their place."""
    script = read_options(options, Options, name=name).script
    where = f"backends.{name}.script"
    if isinstance(script, str):
        where = f"{where} ({script})"
        try:
            source = Path(script).read_bytes()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from None
    else:
        source = msgspec.json.encode(script)
    try:
        return ScriptedBackend(name, msgspec.json.decode(source, type=Script), where)
    except ValidationError as error:
        raise locate(error, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
