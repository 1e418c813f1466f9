"""Guardrails: functions that check the input, the output and the tool calls of a run.

A guardrail returns None to accept a value, `Replace` to go on with another one, or `Block` to stop the run. It raises
`ModelRetry` to send a call, a result or an answer back to the model with a message. A guardrail that fails stops the
run, so that nothing passes unchecked.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.approvals import read_arguments
from antiphon.agent.history import join_text
from antiphon.agent.task import Task
from antiphon.callbacks import call_callback
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol.json_text import JsonObject
from antiphon.tasks import cancel_tasks
from antiphon.tools.base import ModelRetry, ToolInvocation, ToolResult
from antiphon.tools.executor import replace_surrogates, validate_result
from antiphon.tools.function import make_result

logger = logging.getLogger(__name__)

Stage = Literal["input", "output", "call", "result"]


class Block(Struct, frozen=True):
    """The action that stops the run. Its outcome is `blocked`, with the reason in `outcome.error`."""

    reason: str


class Replace(Struct, frozen=True):
    """The action that replaces the checked value.

    For an input, the value is a text, which replaces the new messages, or items, which replace the whole input. For the
    arguments of a call it is a mapping or a JSON text, for a result anything that a tool can return.
    """

    value: Any


class _Check(Struct, frozen=True, kw_only=True):
    """Base of the values that guardrails check. `agent` is the name of the active agent, `deps` are of the run."""

    run_id: str
    agent: str
    deps: Any = None


class InputCheck(_Check, frozen=True, kw_only=True):
    """The input of a run, before the first turn: the history and the task."""

    items: Sequence[JsonObject]

    @property
    def text(self) -> str:
        """The text of the new messages."""
        return join_text(self.items[self.new_index :])

    @property
    def new_index(self) -> int:
        """The index of the first new message: of the messages at the end that no answer follows."""
        return max((index + 1 for index, item in enumerate(self.items) if not _is_user_message(item)), default=0)


class OutputCheck(_Check, frozen=True, kw_only=True):
    """The answer of a run. `retries` is the number of answers that were sent back before."""

    output: Any
    text: str
    retries: int = 0


class CallCheck(_Check, frozen=True, kw_only=True):
    """A tool call that is about to be made, before a person is asked to approve it."""

    call: ToolInvocation

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the call. Empty if they are not a JSON object: then the tool rejects them."""
        return read_arguments(self.call) or {}


class ResultCheck(_Check, frozen=True, kw_only=True):
    """The result of a tool call, before it is stored and before the model reads it."""

    call: ToolInvocation
    result: ToolResult


GuardrailAction = Block | Replace | None
"""The value that a guardrail returns. None accepts the checked value."""


class ParallelGuardrail:
    """An input guardrail that runs during the first model call, to save time.

    The model may have read the input before the guardrail has ended. Its answer is not used, and no tool runs, before
    the guardrail has accepted the input. It cannot replace the input.
    """

    def __init__(self, check: "Callable[[InputCheck], Awaitable[GuardrailAction]]") -> None:
        if not callable(check):
            raise ConfigError(f"{check!r} is not a guardrail: it cannot be called.")
        self._check = check
        self.__name__ = getattr(check, "__name__", type(check).__name__)

    def __call__(self, check: InputCheck) -> Awaitable[GuardrailAction]:
        return self._check(check)


InputGuardrail = ParallelGuardrail | Callable[[InputCheck], GuardrailAction | Awaitable[GuardrailAction]]
OutputGuardrail = Callable[[OutputCheck], GuardrailAction | Awaitable[GuardrailAction]]
CallGuardrail = Callable[[CallCheck], GuardrailAction | Awaitable[GuardrailAction]]
ResultGuardrail = Callable[[ResultCheck], GuardrailAction | Awaitable[GuardrailAction]]


class GuardrailFailed(AntiphonError):
    """A guardrail raised an exception, or returned anything but an action."""

    status = 500
    type = "server_error"
    default_code = "guardrail_failed"


class Blocked(Exception):
    """A guardrail stops the run."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage
        self.reason = reason


class Guardrails(Struct, frozen=True, kw_only=True):
    """The guardrails of an agent.

    All methods raise Blocked or GuardrailFailed. All except `check_input` also raise ModelRetry.
    """

    input: Sequence[InputGuardrail] = ()
    output: Sequence[OutputGuardrail] = ()
    calls: Sequence[CallGuardrail] = ()
    results: Sequence[ResultGuardrail] = ()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            guardrails: Any = getattr(self, name)
            if not isinstance(guardrails, Sequence):
                raise ConfigError(
                    f"{name.removesuffix('s')}_guardrails: expected a list of functions, "
                    f"got {type(guardrails).__name__}."
                )
            for each in guardrails:
                if not callable(each):
                    raise ConfigError(f"{each!r} is not a guardrail: it cannot be called.")

    async def check_input(self, check: InputCheck) -> list[JsonObject] | None:
        """Return the items that replace the input; None if it stays."""
        replaced: list[JsonObject] | None = None
        for guardrail in self.input:
            if isinstance(guardrail, ParallelGuardrail):
                continue
            action = await _run_on_input(guardrail, check)
            if action is not None:
                replaced = _read_items(guardrail, action.value, check)
                check = msgspec.structs.replace(check, items=replaced)
        return replaced

    @property
    def has_parallel(self) -> bool:
        return any(isinstance(each, ParallelGuardrail) for each in self.input)

    async def check_input_in_parallel(self, check: InputCheck) -> None:
        """Run the parallel guardrails at the same time. The first one that refuses the input ends the others."""
        running = [
            asyncio.ensure_future(_run_on_input(each, check))
            for each in self.input
            if isinstance(each, ParallelGuardrail)
        ]
        try:
            for done in asyncio.as_completed(running):
                if await done is not None:
                    raise GuardrailFailed("A parallel guardrail cannot replace the input: the model has it already.")
        finally:
            await cancel_tasks(*running)

    async def check_output(self, check: OutputCheck) -> Replace | None:
        """Return the output that replaces the answer; None if it stays."""
        replaced: Replace | None = None
        for guardrail in self.output:
            action = await _run("output", guardrail, check)
            if action is not None:
                replaced = action
                text = action.value if isinstance(action.value, str) else check.text
                check = msgspec.structs.replace(check, output=action.value, text=text)
        return replaced

    async def check_call(self, check: CallCheck) -> ToolInvocation:
        """Return the call to make."""
        for guardrail in self.calls:
            action = await _run("call", guardrail, check)
            if action is not None:
                arguments = _encode_arguments(guardrail, action.value)
                check = msgspec.structs.replace(check, call=msgspec.structs.replace(check.call, arguments=arguments))
        return check.call

    async def check_result(self, check: ResultCheck) -> ToolResult:
        """Return the result for the model."""
        for guardrail in self.results:
            action = await _run("result", guardrail, check)
            if action is not None:
                result = _make_result(guardrail, action.value, check.result)
                check = msgspec.structs.replace(check, result=result)
        return check.result


NO_GUARDRAILS = Guardrails()


def encode_output(task: Task, value: Any) -> str:
    """Return an output as the text of an answer. Raises GuardrailFailed if it does not match the output type."""
    if task.output is None:
        if not isinstance(value, str):
            raise GuardrailFailed(f"An output guardrail has replaced a text by {type(value).__name__}.")
        return replace_surrogates(value)
    try:
        text = task.output.encode(value)
        task.output.parse(text)
    except (msgspec.MsgspecError, TypeError, ValueError, NotImplementedError) as error:
        raise GuardrailFailed(
            f"An output guardrail has returned a value that does not match the output type: {error}"
        ) from None
    return text


async def _run_on_input(guardrail: Callable[[Any], Any], check: InputCheck) -> Replace | None:
    try:
        return await _run("input", guardrail, check)
    except ModelRetry:
        raise _make_failure(guardrail, "an input cannot be sent back to the model") from None


async def _run(stage: Stage, guardrail: Callable[[Any], Any], check: _Check) -> Replace | None:
    try:
        action = await call_callback(guardrail, check)
    except ModelRetry:
        raise
    except Exception as error:
        logger.exception("a guardrail failed")
        raise _make_failure(guardrail, f"{type(error).__name__}: {error}") from error
    if isinstance(action, Block):
        raise Blocked(
            stage,
            replace_surrogates(str(action.reason or f"The guardrail '{_find_name(guardrail)}' has stopped the run.")),
        )
    if isinstance(action, ModelRetry):
        raise action
    if action is None or isinstance(action, Replace):
        return action
    raise _make_failure(guardrail, f"it returned {type(action).__name__}, not None, Replace or Block")


def _make_failure(guardrail: Callable[[Any], Any], reason: str) -> GuardrailFailed:
    return GuardrailFailed(f"The guardrail '{_find_name(guardrail)}' failed: {reason.removesuffix('.')}.")


def _find_name(guardrail: Callable[[Any], Any]) -> str:
    return str(getattr(guardrail, "__name__", type(guardrail).__name__))


def _read_items(guardrail: Callable[[Any], Any], value: Any, check: InputCheck) -> list[JsonObject]:
    """Return the items of the new input. A text replaces the new messages only."""
    if isinstance(value, str):
        return [*check.items[: check.new_index], {"role": "user", "content": replace_surrogates(value)}]
    if not isinstance(value, Sequence) or not all(isinstance(item, dict) for item in value):
        raise _make_failure(guardrail, "an input is replaced by a string or a list of items")
    try:
        items: list[JsonObject] = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise _make_failure(guardrail, f"the items cannot be encoded as JSON: {error}") from None
    return items


def _encode_arguments(guardrail: Callable[[Any], Any], value: Any) -> str:
    if isinstance(value, str):
        return replace_surrogates(value)
    if not isinstance(value, Mapping):
        raise _make_failure(guardrail, "arguments are replaced by a mapping or a JSON text")
    try:
        return msgspec.json.encode(dict(value)).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _make_failure(guardrail, f"the arguments cannot be encoded as JSON: {error}") from None


def _make_result(guardrail: Callable[[Any], Any], value: Any, replaced: ToolResult) -> ToolResult:
    """Return the new result. The usage of the tool does not change."""
    try:
        result = validate_result(make_result(value))
    except Exception as error:
        raise _make_failure(guardrail, f"{type(error).__name__}: {error}") from None
    unchanged = {"spent": replaced.spent, "tool_calls": replaced.tool_calls}
    return msgspec.structs.replace(result, **unchanged, may_have_happened=replaced.may_have_happened)


def _is_user_message(item: JsonObject) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"
