"""The loop guard of the execute endpoint: a warning, then a synthetic success."""

from antiphon.agent.execute.execution import SUPPRESSED, SuppressingExecutor
from antiphon.agent.loop_guard import WARNING
from antiphon.tools.base import ToolContext, ToolInvocation
from antiphon.tools.function import tool

CONTEXT = ToolContext(run_id="run", call_id="call", idempotency_key="key")


async def test_second_identical_call_is_warned_and_the_third_suppressed() -> None:
    made: list[int] = []

    @tool
    def look(at: int) -> str:
        """Look."""
        made.append(at)
        return "seen"

    executor = SuppressingExecutor([look])
    written = ['{"at":1}', '{"at": 1}', '{"at":2}', '{ "at":1}']
    outputs = [
        (await executor.execute(ToolInvocation(f"call_{index}", "look", text), CONTEXT)).output
        for index, text in enumerate(written)
    ]
    assert outputs == ["seen", f"seen\n\n{WARNING}", "seen", SUPPRESSED]
    assert made == [1, 1, 2]
    assert [executor.executed[f"call_{index}"].milliseconds is None for index in range(4)] == [
        False,
        False,
        False,
        True,
    ]


async def test_unknown_tool_has_no_execution_time() -> None:
    executor = SuppressingExecutor([], client_tools=["open file"])
    result = await executor.execute(ToolInvocation("call_1", "nobody", "{}"), CONTEXT)
    assert (result.is_error, executor.executed["call_1"].milliseconds) == (True, None)
    assert executor.tools["open file"].needs_approval is True
