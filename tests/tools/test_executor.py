"""The executor: whatever happens in a tool is its result, within the tool's own limits."""

import asyncio
import contextlib
import json
import logging
import sys
import threading
from typing import Any

import msgspec
import pytest

from antiphon.errors import ConfigError
from antiphon.tools.base import ApprovalRequired, Tool, ToolContext, ToolInvocation, ToolResult
from antiphon.tools.executor import Executor, make_error_result
from antiphon.tools.function import tool

CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")


async def execute(made: Tool, arguments: str = "{}") -> ToolResult:
    return await Executor([made]).execute(ToolInvocation("call_1", made.name, arguments), CONTEXT)


def error_of(result: ToolResult) -> str:
    assert result.is_error
    message: str = json.loads(str(result.output))["error"]
    return message


async def test_a_tool_that_takes_too_long_is_stopped() -> None:
    stopped = asyncio.Event()

    @tool(timeout=0.01)
    async def wait() -> None:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    assert error_of(await execute(wait)) == "The tool took longer than 0.01 seconds and was stopped."
    assert stopped.is_set()


async def test_one_in_a_thread_is_left_alone() -> None:
    let_go = threading.Event()

    @tool(timeout=0.01)
    def hang() -> None:
        """Hang."""
        let_go.wait(20)

    assert error_of(await execute(hang)) == "The tool took longer than 0.01 seconds and was stopped."
    let_go.set()


async def test_a_timeout_of_the_tools_own_is_an_error_as_any_other() -> None:
    @tool(timeout=20)
    async def give_up() -> None:
        """Give up."""
        raise TimeoutError("no answer")

    assert error_of(await execute(give_up)) == "TimeoutError: no answer"


@pytest.mark.parametrize(("retries", "attempts", "output"), [(0, 1, "no"), (1, 2, "no"), (2, 3, "yes"), (5, 3, "yes")])
async def test_one_that_raises_is_tried_again_as_often_as_it_says(retries: int, attempts: int, output: str) -> None:
    keys = []

    @tool(retries=retries)
    async def flicker(context: ToolContext) -> str:
        """Work the third time."""
        keys.append(context.idempotency_key)
        if len(keys) < 3:
            raise ValueError("no")
        return "yes"

    result = await execute(flicker)
    assert (keys, output in str(result.output)) == (["key_1"] * attempts, True)


async def test_what_the_model_got_wrong_is_not_tried_again() -> None:
    tried = []

    async def invoke(arguments: str, _: ToolContext) -> ToolResult:
        tried.append(arguments)
        msgspec.json.decode(arguments, type=dict[str, int])
        return make_error_result("the tool says no")

    made = Tool(name="t", description="d", parameters={}, invoke=invoke, retries=3)
    assert error_of(await execute(made, "[]")).startswith("The arguments do not fit the schema: ")
    assert error_of(await execute(made, "{")).startswith("The arguments are not valid JSON: ")
    # Nor is what the tool says itself.
    assert error_of(await execute(made)) == "the tool says no"
    assert tried == ["[]", "{", "{}"]


async def test_only_so_many_of_a_tool_run_at_once() -> None:
    running, most, gate = 0, 0, asyncio.Event()

    @tool(concurrency=2)
    async def work() -> None:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            gate.set()
        await gate.wait()
        running -= 1

    executor = Executor([work])
    await asyncio.gather(*(executor.execute(ToolInvocation(f"call_{n}", "work", ""), CONTEXT) for n in range(6)))
    assert (most, running) == (2, 0)


def test_that_holds_in_one_event_loop_after_the_other() -> None:
    @tool(concurrency=1)
    async def work() -> str:
        """Work."""
        await asyncio.sleep(0)
        return "done"

    executor = Executor([work])

    async def make_two() -> list[ToolResult]:
        calls = [ToolInvocation(f"call_{n}", "work", "") for n in range(2)]
        return await asyncio.gather(*(executor.execute(call, CONTEXT) for call in calls))

    assert asyncio.run(make_two()) == asyncio.run(make_two()) == [ToolResult("done")] * 2


async def test_what_is_cancelled_within_a_tool_is_its_own_affair() -> None:
    @tool
    async def give_up() -> None:
        """Cancel something."""
        raise asyncio.CancelledError

    assert error_of(await execute(give_up)) == "The tool was cancelled from within."


async def test_cancelling_the_call_gets_through() -> None:
    begun = asyncio.Event()

    @tool(timeout=20, retries=3)
    async def wait() -> None:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()

    calling = asyncio.ensure_future(execute(wait))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_waiting_for_approval_gets_through() -> None:
    async def invoke(_: str, __: ToolContext) -> ToolResult:
        raise ApprovalRequired((), None)

    with pytest.raises(ApprovalRequired):
        await execute(Tool(name="t", description="d", parameters={}, invoke=invoke, retries=1))


def stop_process() -> None:
    """Leave."""
    sys.exit(3)


def iterate() -> None:
    """Take one too many."""
    next(iter(()))


def read_data() -> None:
    """Read something that is none."""
    msgspec.json.decode("[", type=int)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (stop_process, "SystemExit: 3"),
        (iterate, "RuntimeError: StopIteration: "),
        (read_data, "RuntimeError: ValidationError: "),
    ],
)
async def test_whatever_it_raises_is_told(function: Any, reason: str) -> None:
    assert error_of(await execute(tool(function))).startswith(reason)


async def test_an_asynchronous_one_cannot_end_the_process_either() -> None:
    @tool
    async def leave() -> None:
        """Leave."""
        sys.exit(3)

    assert error_of(await execute(leave)) == "SystemExit: 3"


async def test_a_tool_of_somebody_elses_making_must_give_a_result() -> None:
    async def invoke(_: str, __: ToolContext) -> Any:
        return "text"

    made = Tool(name="t", description="d", parameters={}, invoke=invoke)
    assert error_of(await execute(made)) == "TypeError: the tool gave a str and not a ToolResult"


@pytest.mark.parametrize("fields", [{"output": 5}, {"output": ["text"]}, {"output": "x", "spent": "much"}])
async def test_a_result_that_could_not_be_read_again_is_none(fields: dict[str, Any]) -> None:
    @tool
    async def give() -> ToolResult:
        """Give."""
        return ToolResult(**fields)

    assert error_of(await execute(give)).startswith("TypeError: the tool gave a ToolResult that is none: Expected")


async def test_half_a_character_is_no_reason_to_fail(caplog: pytest.LogCaptureFixture) -> None:
    # The log of a test may have to go to another process, as text.
    caplog.set_level(logging.CRITICAL, logger="antiphon.tools.executor")

    @tool
    async def list_files() -> str:
        """List files."""
        return "caf\udce9"

    @tool
    async def open_file() -> str:
        """Open a file."""
        raise ValueError("no file caf\udce9")

    assert await execute(list_files) == ToolResult("caf?")
    assert error_of(await execute(open_file)) == "ValueError: no file caf?"


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_an_error_that_cannot_say_what_it_is_has_its_name_at_least() -> None:
    @tool
    async def fail_silently() -> str:
        """Fail."""
        raise Speechless

    assert error_of(await execute(fail_silently)) == "Speechless: it cannot be said why"


async def test_a_thread_that_is_done_after_its_loop_harms_nobody() -> None:
    let_go, done = threading.Event(), threading.Event()

    @tool
    def hang() -> None:
        """Hang."""
        let_go.wait(20)
        done.set()

    def run_alone() -> None:
        async def abandon() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(execute(hang), 0.01)

        asyncio.run(abandon())

    await asyncio.to_thread(run_alone)
    let_go.set()
    assert await asyncio.to_thread(done.wait, 20)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "two words"}, "Invalid tool name 'two words'"),
        ({"timeout": 0}, "The timeout of the tool 't' must be more than 0 seconds."),
        ({"retries": -1}, "The retries of the tool 't' must be at least 0."),
        ({"concurrency": 0}, "The concurrency of the tool 't' must be at least 1."),
        ({"on_interrupt": "hope"}, "The on_interrupt of the tool 't' must be one of: ask, retry, tell."),
    ],
)
def test_what_makes_no_tool_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    async def invoke(_: str, __: ToolContext) -> ToolResult:
        return ToolResult("")

    with pytest.raises(ConfigError, match=reason):
        Tool(**{"name": "t", "description": "d", "parameters": {}, "invoke": invoke} | options)


class Panic(BaseException):
    """What extensions raise that are not written in Python."""


async def test_what_is_no_exception_is_a_result_too() -> None:
    @tool
    async def fall() -> None:
        """Fall."""
        raise Panic("at line 7")

    @tool
    def trip() -> None:
        """Trip, in a thread."""
        raise Panic("at line 8")

    assert [error_of(await execute(each)) for each in (fall, trip)] == ["Panic: at line 7", "Panic: at line 8"]


async def test_an_interrupt_is_not_the_tools_to_keep() -> None:
    @tool
    async def stop() -> None:
        """Stop."""
        raise GeneratorExit

    with pytest.raises(GeneratorExit):
        await execute(stop)
