"""A deterministic backend for tests, demos and benchmarks, with answers from a script.

The option `script` is a script or the path of a JSON file. Without it, every answer is an echo.
`antiphon.backends.scripted.script` describes the format.
"""

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, ValidationError

from antiphon import offload
from antiphon.backends.base import (
    ALL_CAPABILITIES,
    Capabilities,
    Model,
    SlotDeltas,
    Turn,
    locate_config_error,
    read_options,
)
from antiphon.backends.scripted.script import (
    CompiledAnswer,
    Delay,
    Pattern,
    RaiseError,
    Rule,
    Script,
    ScriptedAnswer,
    Template,
    Wait,
    count_words,
)
from antiphon.errors import ConfigError
from antiphon.protocol import items
from antiphon.protocol.content import extract_text
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Deltas
from antiphon.turn_queue import TurnQueue

# The number of deltas after which a long answer lets other tasks run.
_PAUSE = 200


class ScriptedOptions(Struct):
    script: str | dict[str, Any] = {}


class TurnContext:
    """The context of a turn, as rules match it."""

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
    def placeholders(self) -> dict[str, str]:
        return {"input": self.user, "history": str(len(self.items))}

    def count_words(self) -> int:
        return sum(len(text.split()) for text in self.texts)


class RuleState:
    """A rule with its compiled answers, and the number of its matches so far."""

    def __init__(self, rule: Rule, answers: list[CompiledAnswer]) -> None:
        self.answers = answers
        self._rule = rule
        self._match_count = 0

    def matches(self, context: TurnContext) -> bool:
        rule = self._rule
        return (
            (rule.model is None or rule.model == context.model)
            and (rule.last_item is None or rule.last_item == context.last_item)
            and (rule.user is None or _contains(context.user, rule.user))
            and (rule.text is None or any(_contains(text, rule.text) for text in context.texts))
        )

    def take_answer(self) -> CompiledAnswer:
        answer = self.answers[min(self._match_count, len(self.answers) - 1)]
        self._match_count += 1
        return answer


class TurnGate:
    """A point where turns wait until a test releases them, one at a time."""

    def __init__(self) -> None:
        self.arrivals = asyncio.Semaphore(0)
        self.passes = asyncio.Semaphore(0)

    async def wait_for_release(self) -> None:
        self.arrivals.release()
        await self.passes.acquire()


class ScriptedBackend:
    """Answers from a script. `cancelled` is the number of turns that were cancelled; each sets `cancellation`."""

    def __init__(self, name: str, script: Script) -> None:
        self.capabilities = _read_capabilities(script)
        self.cancelled = 0
        self.cancellation = asyncio.Event()
        self.queue = None if script.slots is None else TurnQueue(script.slots)
        self._models = [Model(id=model, created=0, owned_by=name) for model in script.models]
        self._rules = [
            RuleState(rule, [_compile_answer(each, f"rules[{i}].answers[{j}]") for j, each in enumerate(rule.answers)])
            for i, rule in enumerate(script.rules)
        ]
        self._rules.append(RuleState(Rule(answers=[script.default]), [_compile_answer(script.default, "default")]))
        actions = [action for state in self._rules for answer in state.answers for action in answer.actions]
        self._gates = {action.gate: TurnGate() for action in actions if isinstance(action, Wait)}

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def models(self) -> Sequence[Model]:
        return self._models

    async def stream(self, turn: Turn) -> Deltas:
        if self.queue is None:
            return await self._begin_answer(turn)
        slot = await self.queue.acquire(turn.project, background=turn.background)
        try:
            return SlotDeltas(await self._begin_answer(turn), slot)
        except BaseException:
            slot.release()
            raise

    async def _begin_answer(self, turn: Turn) -> Deltas:
        context = TurnContext(turn)
        is_large = offload.is_large()
        rule = await offload.run(self._find_rule, context) if is_large else self._find_rule(context)
        answer = rule.take_answer()
        stream = self._stream_answer(answer, context)
        if answer.fails_at_start:
            await anext(stream)
        return stream

    def _find_rule(self, context: TurnContext) -> RuleState:
        return next(state for state in self._rules if state.matches(context))

    async def count_tokens(self, turn: Turn) -> int:
        return await offload.run(TurnContext(turn).count_words)

    def release(self, gate: str) -> None:
        """Let one turn pass a gate: the one that waits there, or the next one."""
        self._gates[gate].passes.release()

    async def reached(self, gate: str) -> None:
        """Wait until a turn has reached a gate. Each arrival ends one wait."""
        await self._gates[gate].arrivals.acquire()

    async def _stream_answer(self, answer: CompiledAnswer, context: TurnContext) -> Deltas:
        filled_words = 0
        try:
            for index, action in enumerate(answer.actions, 1):
                if isinstance(action, tuple):
                    yield action
                    if not index % _PAUSE:
                        await asyncio.sleep(0)
                elif isinstance(action, Template):
                    output = await offload.run(_fill, action, context)
                    filled_words += await offload.run(count_words, output)
                    for number, delta in enumerate(output):
                        yield (delta,)
                        if number % _PAUSE == _PAUSE - 1:
                            await asyncio.sleep(0)
                else:
                    await self._run_action(action)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            self.cancellation.set()
            raise
        if offload.is_large():
            last = await offload.run(answer.make_last_batch, context.count_words, filled_words)
        else:
            last = answer.make_last_batch(context.count_words, filled_words)
        if last:
            yield last

    async def _run_action(self, action: Delay | Wait | RaiseError) -> None:
        match action:
            case Delay():
                await asyncio.sleep(action.seconds)
            case Wait():
                await self._gates[action.gate].wait_for_release()
            case RaiseError():
                raise action.make_error()


def _fill(template: Template, context: TurnContext) -> list[Delta]:
    return template.fill(context.placeholders)


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ScriptedBackend:
    """Create the backend from its configuration. The registry calls this.

    Raises ConfigError with the path of the field if the script is invalid.
    """
    script = read_options(options, ScriptedOptions, name=name).script
    where = f"backends.{name}.script"
    if isinstance(script, str):
        where = f"{where} ({script})"
        source = _read_file(script, where)
    else:
        source = msgspec.json.encode(script)
    try:
        return ScriptedBackend(name, read_json(source, Script))
    except ValidationError as error:
        raise locate_config_error(error, where) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _read_file(path: str, where: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None


def _read_capabilities(script: Script) -> Capabilities:
    """Return all capabilities, except those that the script lists as missing."""
    lacking: dict[str, Any] = dict.fromkeys(script.lacks, False)
    if script.native_tools is not None:
        lacking |= {"tools": frozenset(script.native_tools), "any_tool": False}
    return msgspec.structs.replace(ALL_CAPABILITIES, **lacking)


def _compile_answer(answer: ScriptedAnswer, path: str) -> CompiledAnswer:
    try:
        return CompiledAnswer(answer)
    except ValidationError as error:
        raise ValidationError(f"{error} - at `$.{path}`") from None


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


def _contains(text: str, wanted: str | Pattern) -> bool:
    return wanted in text if isinstance(wanted, str) else re.search(wanted.regex, text) is not None
