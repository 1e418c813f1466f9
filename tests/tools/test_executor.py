"""Execution of tool calls: errors, retries, timeouts and concurrency."""

import asyncio
import contextlib
import json
import logging
import math
import sys
import threading
from typing import Any

import msgspec
import pytest

from antiphon.errors import ConfigError
from antiphon.protocol.response import Usage
from antiphon.tools.base import ApprovalRequired, Tool, ToolContext, ToolInvocation, ToolResult, UsageCost
from antiphon.tools.executor import Executor, add_to_error, make_error_result
from antiphon.tools.function import tool

CONTEXT = ToolContext(run_id="run_1", call_id="call_1", idempotency_key="key_1")


async def execute(made: Tool, arguments: str = "{}") -> ToolResult:
    return await Executor([made]).execute(ToolInvocation("call_1", made.name, arguments), CONTEXT)


def error_of(result: ToolResult) -> str:
    assert result.is_error
    message: str = json.loads(str(result.output))["error"]
    return message


async def test_tool_is_stopped_after_its_timeout() -> None:
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


async def test_tool_that_fails_when_it_is_stopped_may_have_had_an_effect() -> None:
    @tool(timeout=0.01)
    async def pay() -> None:
        """Pay."""
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("not paid")

    assert await execute(pay) == ToolResult('{"error":"ValueError: not paid"}', is_error=True, may_have_happened=True)


async def test_exceptions_of_a_group_are_in_the_message(caplog: pytest.LogCaptureFixture) -> None:
    @tool(retries=1)
    async def fetch() -> None:
        """Fetch."""
        raise ExceptionGroup("two failed", [ValueError("no city"), ExceptionGroup("inner", [KeyError("a"), OSError()])])

    caplog.set_level(logging.INFO)
    message = (
        "ExceptionGroup: two failed (2 sub-exceptions) "
        "[ValueError: no city; ExceptionGroup: inner (2 sub-exceptions) [KeyError: 'a'; OSError: ]]"
    )
    assert error_of(await execute(fetch)) == message
    assert f"retrying the tool fetch: {message}" in caplog.messages


async def test_message_of_a_group_is_bounded() -> None:
    @tool
    async def fetch() -> None:
        """Fetch."""
        level = [ExceptionGroup("inner", [ValueError("x" * 9000) for _ in range(30)]) for _ in range(30)]
        raise ExceptionGroup("y" * 9000, level)

    message = error_of(await execute(fetch))
    assert (len(message) < 6000, message.endswith("…; 20 more]")) == (True, True)


async def test_group_with_a_call_that_may_have_happened_may_have_happened() -> None:
    class Lost(Exception):
        may_have_happened = True

    @tool
    async def pay() -> None:
        """Pay."""
        raise ExceptionGroup("one failed", [ValueError("no"), Lost("no answer")])

    assert (await execute(pay)).may_have_happened


async def test_tool_that_cancels_its_task_is_reported_as_an_error() -> None:
    @tool
    async def stop() -> None:
        """Stop."""
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    assert error_of(await execute(stop)) == "The tool cancelled itself."


async def test_tool_in_a_thread_is_left_running_after_its_timeout() -> None:
    release = threading.Event()

    @tool(timeout=0.01)
    def hang() -> None:
        """Hang."""
        release.wait(20)

    expected = "The tool took longer than 0.01 seconds and did not stop. It may still be running."
    assert error_of(await execute(hang)) == expected
    release.set()


async def test_timeout_error_raised_by_the_tool_is_reported() -> None:
    @tool(timeout=20)
    async def give_up() -> None:
        """Give up."""
        raise TimeoutError("no answer")

    assert error_of(await execute(give_up)) == "TimeoutError: no answer"


@pytest.mark.parametrize(("retries", "attempts", "output"), [(0, 1, "no"), (1, 2, "no"), (2, 3, "yes"), (5, 3, "yes")])
async def test_failing_tool_is_retried_up_to_its_limit(retries: int, attempts: int, output: str) -> None:
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


async def test_invalid_arguments_and_error_results_are_not_retried() -> None:
    tried = []

    async def invoke(arguments: str, _: ToolContext) -> ToolResult:
        tried.append(arguments)
        msgspec.json.decode(arguments, type=dict[str, int])
        return make_error_result("the tool says no")

    made = Tool(name="t", description="d", parameters={}, invoke=invoke, retries=3)
    assert error_of(await execute(made, "[]")).startswith("The arguments do not fit the schema: ")
    assert error_of(await execute(made, "{")).startswith("The arguments are not valid JSON: ")
    # An error result of the tool itself is not retried either.
    assert error_of(await execute(made)) == "the tool says no"
    assert tried == ["[]", "{", "{}"]


async def test_concurrency_limits_parallel_calls_of_a_tool() -> None:
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


def test_concurrency_limit_works_in_several_event_loops() -> None:
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


async def test_cancellation_inside_a_tool_is_reported_as_an_error() -> None:
    @tool
    async def give_up() -> None:
        """Cancel something."""
        raise asyncio.CancelledError

    assert error_of(await execute(give_up)) == "The tool cancelled itself."


async def test_cancelling_a_call_raises_cancelled_error() -> None:
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


async def test_approval_required_is_raised_to_the_caller() -> None:
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
    """Decode invalid JSON."""
    msgspec.json.decode("[", type=int)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (stop_process, "SystemExit: 3"),
        (iterate, "RuntimeError: StopIteration: "),
        (read_data, "RuntimeError: ValidationError: "),
    ],
)
async def test_exception_of_a_tool_is_reported_as_its_result(function: Any, reason: str) -> None:
    assert error_of(await execute(tool(function))).startswith(reason)


async def test_sys_exit_in_an_async_tool_is_reported() -> None:
    @tool
    async def leave() -> None:
        """Leave."""
        sys.exit(3)

    assert error_of(await execute(leave)) == "SystemExit: 3"


async def test_return_value_that_is_no_tool_result_is_an_error() -> None:
    async def invoke(_: str, __: ToolContext) -> Any:
        return "text"

    made = Tool(name="t", description="d", parameters={}, invoke=invoke)
    assert error_of(await execute(made)) == "TypeError: the tool returned str, not ToolResult"


@pytest.mark.parametrize("fields", [{"output": 5}, {"output": ["text"]}, {"output": "x", "spent": "much"}])
async def test_tool_result_with_invalid_fields_is_an_error(fields: dict[str, Any]) -> None:
    @tool
    async def give() -> ToolResult:
        """Give."""
        return ToolResult(**fields)

    assert error_of(await execute(give)).startswith("TypeError: the tool returned an invalid ToolResult: Expected")


async def test_lone_surrogates_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    # pytest-xdist sends log records to another process as text, which cannot contain surrogates.
    caplog.set_level(logging.CRITICAL, logger="antiphon.tools.executor")

    @tool
    async def list_files() -> str:
        """List files."""
        return "caf\udce9"

    @tool
    async def open_file() -> str:
        """Open a file."""
        raise ValueError("no file caf\udce9")

    @tool
    async def find_files() -> dict[str, list[str]]:
        """Find files."""
        return {"caf\udce9": ["th\udce9"]}

    @tool
    async def show_file() -> ToolResult:
        """Show a file."""
        return ToolResult([{"type": "input_text", "text": "caf\udce9"}])

    assert await execute(list_files) == ToolResult("caf?")
    assert await execute(show_file) == ToolResult([{"type": "input_text", "text": "caf?"}])
    assert await execute(find_files) == ToolResult('{"caf?":["th?"]}')
    assert error_of(await execute(open_file)) == "ValueError: no file caf?"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


async def test_exception_without_message_is_reported_by_its_type() -> None:
    @tool
    async def fail_silently() -> str:
        """Fail."""
        raise Unprintable

    assert error_of(await execute(fail_silently)) == "Unprintable: the exception has no readable message"


async def test_thread_may_outlive_its_event_loop() -> None:
    release, done = threading.Event(), threading.Event()

    @tool
    def hang() -> None:
        """Hang."""
        release.wait(20)
        done.set()

    def run_alone() -> None:
        async def cancel_waiting() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(execute(hang), 0.01)

        asyncio.run(cancel_waiting())

    await asyncio.to_thread(run_alone)
    release.set()
    assert await asyncio.to_thread(done.wait, 20)


async def decide_later(_: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "two words"}, "Invalid tool name 'two words'"),
        ({"timeout": 0}, "The timeout of the tool 't' must be a number of seconds, more than 0."),
        ({"retries": -1}, "The retries of the tool 't' must be an integer, at least 0."),
        ({"timeout": "5"}, "The timeout of the tool 't' must be a number of seconds, more than 0."),
        ({"timeout": math.nan}, "The timeout of the tool 't' must be a number of seconds, more than 0."),
        ({"retries": 1.5}, "The retries of the tool 't' must be an integer, at least 0."),
        ({"concurrency": 0}, "The concurrency of the tool 't' must be an integer, at least 1."),
        ({"needs_approval": "yes"}, "The needs_approval of the tool 't' must be True, False or a function."),
        ({"needs_approval": decide_later}, "The needs_approval of the tool 't' must not be a coroutine function."),
        ({"on_interrupt": "hope"}, "The on_interrupt of the tool 't' must be one of: ask, retry, tell."),
    ],
)
def test_invalid_tool_options_are_rejected(options: dict[str, Any], reason: str) -> None:
    async def invoke(_: str, __: ToolContext) -> ToolResult:
        return ToolResult("")

    with pytest.raises(ConfigError, match=reason):
        Tool(**{"name": "t", "description": "d", "parameters": {}, "invoke": invoke} | options)


class Panic(BaseException):
    """Like the exceptions of extension modules that are not written in Python."""


async def test_base_exception_of_a_tool_is_reported_as_its_result() -> None:
    @tool
    async def fall() -> None:
        """Fall."""
        raise Panic("at line 7")

    @tool
    def trip() -> None:
        """Trip, in a thread."""
        raise Panic("at line 8")

    assert [error_of(await execute(each)) for each in (fall, trip)] == ["Panic: at line 7", "Panic: at line 8"]


async def test_generator_exit_of_a_tool_is_an_error_result() -> None:
    @tool
    async def stop() -> None:
        """Stop."""
        raise GeneratorExit

    result = await execute(stop)
    assert result.is_error
    assert "GeneratorExit" in str(result.output)


@pytest.mark.parametrize(
    ("value", "output"),
    [(math.nan, '"NaN"'), ({"a": [math.inf, -math.inf, None, 1.5]}, '{"a":["Infinity","-Infinity",null,1.5]}')],
)
async def test_floats_without_a_json_form_are_named(value: Any, output: str) -> None:
    @tool
    def compute() -> Any:
        """Compute."""
        return value

    assert (await execute(compute)).output == output


async def test_content_parts_are_as_the_journal_stores_them() -> None:
    @tool
    def draw() -> ToolResult:
        """Draw."""
        return ToolResult([{"type": "input_text", "text": "a", "score": math.nan}])

    assert (await execute(draw)).output == [{"type": "input_text", "text": "a", "score": None}]


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0])
async def test_invalid_cost_of_a_tool_does_not_disable_the_limits(cost: float) -> None:
    @tool
    def consult() -> ToolResult:
        """Consult."""
        return ToolResult("ok", spent=UsageCost(Usage(1, 1, 2), cost), tool_calls=-7)

    result = await execute(consult)
    assert (result.spent, result.tool_calls) == (UsageCost(Usage(1, 1, 2), None), 0)


async def test_negative_usage_of_a_tool_is_ignored() -> None:
    @tool
    def consult() -> ToolResult:
        """Consult."""
        return ToolResult("ok", spent=UsageCost(Usage(-1000, 1, -999), 1.0))

    assert (await execute(consult)).spent is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (make_error_result("refused").output, make_error_result("refused. Look.").output),
        (make_error_result("Really?").output, make_error_result("Really? Look.").output),
        (make_error_result("").output, make_error_result("Look.").output),
        (f"{make_error_result('no').output}\n\nAgain.", f"{make_error_result('no').output}\n\nAgain.\n\nLook."),
        ('{"error":"busy","retry_after":5}', '{"error":"busy","retry_after":5}\n\nLook.'),
        ('{"error":{"code":3}}', '{"error":{"code":3}}\n\nLook.'),
        ("no route", "no route\n\nLook."),
        ([], [{"type": "input_text", "text": "Look."}]),
    ],
)
def test_sentence_is_added_to_an_error_without_loss(output: Any, expected: Any) -> None:
    assert add_to_error(ToolResult(output, is_error=True), "Look.") == ToolResult(expected, is_error=True)
