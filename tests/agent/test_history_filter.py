"""A function that selects the items of each request."""

from typing import Any

import pytest

from antiphon import ConfigError, RunError
from antiphon.agent.history import JsonObject
from support.scripted_model import ScriptedModel, call, look_up

LOOK = call("look_up", {"city": "Bern"})


@pytest.mark.parametrize("is_async", [False, True])
async def test_filter_selects_the_items_of_each_request(scripted: ScriptedModel, is_async: bool) -> None:
    lengths: list[int] = []

    def redact(items: list[JsonObject]) -> list[JsonObject]:
        lengths.append(len(items))
        return [item | {"output": "****"} if "output" in item else item for item in items]

    async def redact_later(items: list[JsonObject]) -> list[JsonObject]:
        return redact(items)

    scripted.set_answers([LOOK], "Done.")
    agent = scripted.agent(tools=[look_up], history_filter=redact_later if is_async else redact)
    outcome = await agent.run("Go.")
    assert (outcome.kind, lengths) == ("final", [1, 3])
    assert scripted.sent[1]["input"][-1]["output"] == "****"
    # The run itself has the whole history.
    assert outcome.history[2]["output"] == "Bern: mild"


async def test_history_without_an_output_is_repaired(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK], "Done.")
    agent = in_process.agent(
        tools=[look_up], history_filter=lambda items: [item for item in items if "output" not in item]
    )
    assert (await agent.run("Go.")).kind == "final"
    assert [item.get("type") for item in in_process.sent[1]["input"]] == [None, "function_call", "function_call_output"]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("too long"), "ValueError: too long"),
        ("text", "TypeError: history_filter must return a list of items"),
    ],
)
async def test_failure_of_the_filter_ends_the_run(in_process: ScriptedModel, result: Any, reason: str) -> None:
    def select(_: list[JsonObject]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    in_process.set_answers("Done.")
    outcome = await in_process.agent(history_filter=select).run("Go.")
    expected = RunError("history_filter_failed", f"The history_filter failed: {reason}")
    assert (outcome.kind, outcome.error, in_process.sent) == ("failed", expected, [])


def test_filter_requires_the_history_of_the_client(in_process: ScriptedModel) -> None:
    with pytest.raises(ConfigError, match="history_filter"):
        in_process.agent(history_filter=lambda items: items, conversation_state="server")
