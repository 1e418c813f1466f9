"""A deterministic backend for tests, demos and benchmarks: it answers from a script.

The option `script` is the script itself or the path of a JSON file; without it, every answer is an echo. What a script
may hold is told in `antiphon.backends.scripted.script`.
"""

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, ValidationError

from antiphon.backends.base import ALL_CAPABILITIES, Capabilities, Model, Turn, locate_config_error, read_options
from antiphon.backends.scripted.script import (
    Answer,
    Break,
    Delay,
    Pattern,
    Plan,
    Rule,
    Script,
    Template,
    Wait,
    count_words,
)
from antiphon.errors import ConfigError
from antiphon.protocol import items
from antiphon.protocol.content import extract_text
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Deltas


class Options(Struct):
    script: str | dict[str, Any] = {}


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
                return extract_text(item.content)
        return ""

    @functools.cached_property
    def texts(self) -> list[str]:
        return [self.instructions or "", *map(_read_item, self.items)]

    @property
    def last_item(self) -> str:
        return self.items[-1].type if self.items else ""

    @property
    def blanks(self) -> dict[str, str]:
        return {"input": self.user, "history": str(len(self.items))}

    def count_words(self) -> int:
        return sum(len(text.split()) for text in self.texts)


def _read_item(item: items.Item | Unknown) -> str:
    match item:
        case items.Message():
            return extract_text(item.content)
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            return extract_text(item.output)
        case items.FunctionCall():
            return item.arguments
        case items.CustomToolCall():
            return item.input
        case items.Reasoning():
            return extract_text([*item.summary, *(item.content or ())])
        case _:
            return ""


class Cue:
    """A rule with its answers planned, and how often it has answered."""

    def __init__(self, rule: Rule, plans: list[Plan]) -> None:
        self.plans = plans
        self._rule = rule
        self._calls = 0

    def fits(self, reading: Reading) -> bool:
        rule = self._rule
        return (
            (rule.model is None or rule.model == reading.model)
            and (rule.last_item is None or rule.last_item == reading.last_item)
            and (rule.user is None or _contains(reading.user, rule.user))
            and (rule.text is None or any(_contains(text, rule.text) for text in reading.texts))
        )

    def take(self) -> Plan:
        plan = self.plans[min(self._calls, len(self.plans) - 1)]
        self._calls += 1
        return plan


def _read_capabilities(script: Script) -> Capabilities:
    """It can be told to say anything, so it lacks nothing, unless the script says so."""
    lacking: dict[str, Any] = dict.fromkeys(script.lacks, False)
    if script.native_tools is not None:
        lacking |= {"tools": frozenset(script.native_tools), "any_tool": False}
    return msgspec.structs.replace(ALL_CAPABILITIES, **lacking)


def _contains(text: str, words: str | Pattern) -> bool:
    return words in text if isinstance(words, str) else re.search(words.regex, text) is not None


def _plan(answer: Answer, place: str) -> Plan:
    try:
        return Plan(answer)
    except ValidationError as error:
        raise ValidationError(f"{error} - at `$.{place}`") from None


class Gate:
    """Where turns wait until a test lets them go on, one at a time."""

    def __init__(self) -> None:
        self.arrivals = asyncio.Semaphore(0)
        self.passes = asyncio.Semaphore(0)

    async def go_through(self) -> None:
        self.arrivals.release()
        await self.passes.acquire()


class ScriptedBackend:
    """Plays a script. `cancelled` counts the turns that were stopped before their end; each sets `cancellation`."""

    def __init__(self, name: str, script: Script) -> None:
        self.capabilities = _read_capabilities(script)
        self.cancelled = 0
        self.cancellation = asyncio.Event()
        self._models = [Model(id=model, created=0, owned_by=name) for model in script.models]
        self._cues = [
            Cue(rule, [_plan(answer, f"rules[{i}].answers[{j}]") for j, answer in enumerate(rule.answers)])
            for i, rule in enumerate(script.rules)
        ]
        self._cues.append(Cue(Rule(answers=[script.default]), [_plan(script.default, "default")]))
        moves = [move for cue in self._cues for plan in cue.plans for move in plan.moves]
        self._gates = {move.gate: Gate() for move in moves if isinstance(move, Wait)}

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
                    said = move.fill(reading.blanks)
                    filled_words += count_words(said)
                    for delta in said:
                        yield (delta,)
                else:
                    await self._act(move)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            self.cancellation.set()
            raise
        if last := plan.close(reading.count_words, filled_words):
            yield last

    async def _act(self, move: Delay | Wait | Break) -> None:
        match move:
            case Delay():
                await asyncio.sleep(move.seconds)
            case Wait():
                await self._gates[move.gate].go_through()
            case Break():
                raise move.make_error()


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ScriptedBackend:
    """What the registry calls. A mistake in the script is a ConfigError that names its place."""
    script = read_options(options, Options, name=name).script
    where = f"backends.{name}.script"
    if isinstance(script, str):
        where = f"{where} ({script})"
        source = _read_file(script, where)
    else:
        source = msgspec.json.encode(script)
    try:
        return ScriptedBackend(name, msgspec.json.decode(source, type=Script))
    except ValidationError as error:
        raise locate_config_error(error, where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _read_file(path: str, where: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
