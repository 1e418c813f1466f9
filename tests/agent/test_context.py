"""The context of a run: deps, dynamic instructions and tools, hooks, and options of one run."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon import Agent, ConfigError, InvalidRequest, Limits, Prices, RunContext, Tool, ToolContext, tool
from antiphon.agent.outcome import RunEvent, TurnStarted
from antiphon.agent.run_stream import RunStream
from antiphon.ledger import Ledger
from support.scripted_model import ScriptedModel, call, outputs_of


class Shop:
    def __init__(self, name: str = "Bern") -> None:
        self.name = name
        self.sold: list[str] = []


@tool
def sell(context: RunContext[Shop], product: str) -> str:
    """Sell a product."""
    context.deps.sold.append(product)
    return f"{product} of {context.deps.name}"


@tool
def describe_call(context: ToolContext[Shop]) -> list[object]:
    """Describe the call."""
    return [context.deps.name, context.agent, context.turn, context.call_id, len(context.history)]


SELL = call("sell", {"product": "chair"})


# Deps


async def test_deps_reach_tools(scripted: ScriptedModel) -> None:
    scripted.set_answers([SELL], "Sold.")
    shop = Shop()
    agent: Agent[Shop, str] = scripted.agent(tools=[sell])
    assert (await agent.run("Go.", deps=shop)).text == "Sold."
    assert shop.sold == ["chair"]
    assert outputs_of(scripted.sent[1]) == [("call_1", "chair of Bern")]
    assert "context" not in scripted.sent[0]["tools"][0]["parameters"]["properties"]


async def test_tool_context_describes_the_run(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("describe_call")], [call("describe_call", call_id="call_2")], "Done.")
    await in_process.agent(tools=[describe_call], name="clerk").run("Go.", deps=Shop())
    assert outputs_of(in_process.sent[2]) == [
        ("call_1", '["Bern","clerk",1,"call_1",2]'),
        ("call_2", '["Bern","clerk",2,"call_2",4]'),
    ]


async def test_two_runs_at_once_have_their_own_deps(in_process: ScriptedModel) -> None:
    in_process.set_answers([SELL], [SELL], "Sold.")
    agent: Agent[Shop, str] = in_process.agent(tools=[sell])
    first, second = agent.run_stream("Go.", deps=Shop("Bern")), agent.run_stream("Go.", deps=Shop("Thun"))
    async for _ in first:
        await anext(second, None)
    async for _ in second:
        pass
    outputs = [item["output"] for stream in (first, second) for item in stream.outcome.history if "output" in item]
    assert outputs == ["chair of Bern", "chair of Thun"]


async def test_deps_reach_the_tools_of_a_subagent(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("ask", {"input": "Sell it."}, "outer")], [SELL], "Inner.", "Outer.")
    clerk = in_process.agent(name="clerk", tools=[sell])
    shop = Shop()
    await in_process.agent(tools=[clerk.as_tool("ask", "Ask the clerk.")]).run("Go.", deps=shop)
    assert shop.sold == ["chair"]


@pytest.mark.parametrize(
    ("deps", "message"),
    [
        (None, "deps: the agent requires a Shop. Pass it as deps=."),
        ("Bern", "deps: expected Shop, got str."),
    ],
)
def test_deps_of_another_type_are_refused(deps: Any, message: str) -> None:
    agent = Agent(model="scripted", base_url="http://127.0.0.1:1/v1", deps_type=Shop)
    with pytest.raises(InvalidRequest) as refusal:
        agent.run_stream("Go.", deps=deps)
    assert (refusal.value.message, refusal.value.param) == (message, "deps")


@pytest.mark.parametrize("kind", [Any, dict[str, int] | None, Shop | None])
async def test_deps_that_may_be_missing_are_not_required(in_process: ScriptedModel, kind: Any) -> None:
    in_process.set_answers("Done.")
    assert (await in_process.agent(deps_type=kind).run("Go.")).kind == "final"


async def test_resumed_run_gets_the_deps_that_are_passed_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    def order(context: RunContext[Shop], product: str) -> str:
        """Order a product."""
        return f"{product} for {context.deps.name}"

    in_process.set_answers([call("order", {"product": "desk"})], "Ordered.")
    agent: Agent[Shop, str] = in_process.agent(tools=[order])
    paused = await agent.run("Go.", deps=Shop("Bern"), ledger=ledger, run_id="run_1")
    assert paused.kind == "needs_approval"
    done = await agent.resume("run_1", deps=Shop("Thun"), approvals={"call_1": True}, ledger=ledger)
    assert done.kind == "final"
    assert outputs_of(in_process.sent[1]) == [("call_1", "desk for Thun")]


# Dynamic instructions


async def test_instructions_are_made_for_every_turn(scripted: ScriptedModel) -> None:
    def instruct(context: RunContext[Shop]) -> str:
        return f"{context.deps.name}, turn {context.turn}, {len(context.history)} items"

    scripted.set_answers([SELL], "Sold.")
    agent: Agent[Shop, str] = scripted.agent(tools=[sell], instructions=instruct)
    await agent.run("Go.", deps=Shop())
    assert [request["instructions"] for request in scripted.sent] == ["Bern, turn 1, 1 items", "Bern, turn 2, 3 items"]


async def test_instructions_can_be_made_by_a_coroutine_and_be_none(in_process: ScriptedModel) -> None:
    async def instruct(context: RunContext[Any]) -> str | None:
        return "Be brief." if context.turn == 1 else None

    in_process.set_answers([SELL], "Sold.")
    await in_process.agent(tools=[sell], instructions=instruct).run("Go.", deps=Shop())
    assert [request.get("instructions") for request in in_process.sent] == ["Be brief.", None]


@pytest.mark.parametrize(
    ("result", "reason"), [(ValueError("no shop"), "ValueError: no shop"), (5, "int, not a string")]
)
async def test_failing_instructions_end_the_run(in_process: ScriptedModel, result: Any, reason: str) -> None:
    def instruct(_: RunContext[Any]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    outcome = await in_process.agent(instructions=instruct, name="clerk").run("Go.")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert outcome.error.code == "instructions_failed"
    assert "The instructions of the agent 'clerk' cannot be made: " in outcome.error.message
    assert reason in outcome.error.message
    assert in_process.sent == []


# Dynamic tools


async def test_tools_are_chosen_for_every_turn(scripted: ScriptedModel) -> None:
    async def choose(context: RunContext[Shop]) -> Sequence[Tool]:
        return [describe_call] if context.deps.sold else [sell]

    scripted.set_answers([SELL], "Sold.")
    agent: Agent[Shop, str] = scripted.agent(tools=choose)
    await agent.run("Go.", deps=Shop())
    names = [[each["name"] for each in request["tools"]] for request in scripted.sent]
    assert names == [["sell"], ["describe_call"]]


async def test_call_of_a_tool_that_is_not_offered_any_more_is_an_error(in_process: ScriptedModel) -> None:
    def choose(context: RunContext[Any]) -> list[Tool]:
        return [sell] if context.turn == 1 else []

    in_process.set_answers([SELL], [call("sell", {"product": "desk"}, "call_2")], "Done.")
    await in_process.agent(tools=choose).run("Go.", deps=Shop())
    assert outputs_of(in_process.sent[2])[1] == (
        "call_2",
        '{"error":"There is no tool \'sell\'. There are: none."}',
    )


async def test_resumed_run_makes_its_tools_before_open_calls(in_process: ScriptedModel) -> None:
    @tool(needs_approval=True)
    def order(product: str) -> str:
        """Order a product."""
        return f"{product} ordered"

    in_process.set_answers([call("order", {"product": "desk"})], "Ordered.")
    agent = in_process.agent(tools=lambda _: [order])
    paused = await agent.run("Go.")
    assert paused.state is not None
    await agent.resume(paused.state, approvals={"call_1": True})
    assert outputs_of(in_process.sent[1]) == [("call_1", "desk ordered")]


@pytest.mark.parametrize(
    ("tools", "reason"),
    [([sell, sell], "There are two tools called 'sell'."), ([len], "len is not a tool"), (7, "got int")],
)
async def test_invalid_dynamic_tools_end_the_run(in_process: ScriptedModel, tools: Any, reason: str) -> None:
    outcome = await in_process.agent(tools=lambda _: tools).run("Go.")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert outcome.error.code == "tools_failed"
    assert reason in outcome.error.message


# Hooks


async def test_hook_with_two_parameters_gets_the_context(in_process: ScriptedModel) -> None:
    seen: list[tuple[str, str, int]] = []

    async def note(event: RunEvent, context: RunContext[Shop]) -> None:
        if isinstance(event, TurnStarted):
            seen.append((context.deps.name, context.run_id, len(context.history)))

    in_process.set_answers([SELL], "Sold.")
    agent: Agent[Shop, str] = in_process.agent(tools=[sell], hooks=[note])
    await agent.run("Go.", deps=Shop(), run_id="run_1")
    assert seen == [("Bern", "run_1", 1), ("Bern", "run_1", 3)]


# Options of one run


async def test_options_of_a_run_do_not_change_the_agent(scripted: ScriptedModel) -> None:
    scripted.set_answers("Hello.")
    agent = scripted.agent(settings={"temperature": 0.5, "top_p": 0.9}, tools=[sell])

    @tool
    def wait() -> str:
        """Wait."""
        return "waited"

    await agent.run("Go.", settings={"temperature": 0.1}, tools=[wait])
    await agent.run("Go.")
    first, second = scripted.sent
    assert (first["temperature"], first["top_p"], second["temperature"]) == (0.1, 0.9, 0.5)
    assert [each["name"] for each in first["tools"]] == ["sell", "wait"]
    assert [each["name"] for each in second["tools"]] == ["sell"]


async def test_model_of_a_run_replaces_that_of_the_agent(in_process: ScriptedModel) -> None:
    outcome = await in_process.agent().run("Go.", model="unknown")
    assert outcome.kind == "failed"
    assert in_process.sent[0]["model"] == "unknown"


async def test_tool_of_a_run_replaces_the_tool_of_the_same_name(in_process: ScriptedModel) -> None:
    @tool(name="sell")
    def refuse(product: str) -> str:
        """Refuse to sell."""
        return f"no {product}"

    in_process.set_answers([SELL], "Done.")
    await in_process.agent(tools=[sell]).run("Go.", tools=[refuse])
    assert outputs_of(in_process.sent[1]) == [("call_1", "no chair")]


async def test_settings_of_a_run_do_not_remove_the_output_format(in_process: ScriptedModel) -> None:
    in_process.set_answers("[1]")
    outcome = await in_process.agent(output_type=list[int]).run("Go.", settings={"text": {"verbosity": "low"}})
    text = in_process.sent[0]["text"]
    assert (text["verbosity"], text["format"]["type"]) == ("low", "json_schema")
    assert outcome.error is not None  # the scripted model does not answer in this format


async def test_limits_of_a_run_replace_those_of_the_agent(in_process: ScriptedModel) -> None:
    in_process.set_answers([SELL])
    agent: Agent[Shop, str] = in_process.agent(tools=[sell], limits=Limits(turns=9))
    outcome = await agent.run("Go.", deps=Shop(), limits=Limits(turns=1, wrap_up=False))
    assert (outcome.kind, outcome.turns) == ("max_turns", 1)


async def test_resumed_run_uses_its_options_again(in_process: ScriptedModel, ledger: Ledger) -> None:
    @tool(needs_approval=True)
    def order(product: str) -> str:
        """Order a product."""
        return product

    in_process.set_answers([call("order", {"product": "desk"})])
    agent = in_process.agent(tools=[order])
    limits = Limits(turns=2, wrap_up=False)
    await agent.run("Go.", settings={"temperature": 0.1}, limits=limits, ledger=ledger, run_id="run_1")
    ended = await agent.resume("run_1", approvals={"call_1": True}, ledger=ledger)
    assert (ended.kind, ended.turns) == ("max_turns", 2)
    again = await agent.resume("run_1", limits=Limits(turns=4, wrap_up=False), ledger=ledger)
    assert (again.kind, again.turns) == ("needs_approval", 3)
    # The new limit is in the journal too.
    last = await agent.resume("run_1", approvals={"call_1": False}, ledger=ledger)
    assert (last.kind, last.turns) == ("max_turns", 4)
    assert [request["temperature"] for request in in_process.sent] == [0.1] * 4


def test_cost_limit_of_a_run_requires_prices() -> None:
    agent = Agent(model="scripted", base_url="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="The limit 'cost' requires 'prices'"):
        agent.run_sync("Go.", limits=Limits(cost=1.0))
    priced = Agent(model="scripted", base_url="http://127.0.0.1:1/v1", prices=Prices(input=1.0, output=1.0))
    assert isinstance(priced.run_stream("Go.", limits=Limits(cost=1.0)), RunStream)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"limits": {"turns": 1}}, ConfigError, "limits: expected Limits, got dict."),
        ({"tools": [len]}, ConfigError, "len is not a tool"),
        (
            {"settings": {"metadata": object()}},
            ConfigError,
            "settings.metadata: a value of type object cannot be encoded",
        ),
        ({"ledger": "runs.db"}, ConfigError, "ledger: expected a ledger such as"),
        ({"cancel": True}, ConfigError, "cancel: expected an asyncio.Event, got bool."),
        (
            {"cancel": SimpleNamespace(is_set=bool)},
            ConfigError,
            "cancel: expected an asyncio.Event, got SimpleNamespace.",
        ),
        ({"cancel": threading.Event()}, ConfigError, "cancel: expected an asyncio.Event, got Event."),
        ({"history": "Go."}, InvalidRequest, "history: expected a list of items"),
        ({"modle": "x"}, TypeError, "unexpected keyword argument 'modle'"),
    ],
)
def test_invalid_options_of_a_run_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    agent = Agent(model="scripted", base_url="http://127.0.0.1:1/v1")
    with pytest.raises(error, match=message):
        agent.run_stream("Go.", **options)


@pytest.mark.parametrize(
    ("run", "message"), [(None, "got NoneType. It is None for a run that has an answer."), (5, "got int.")]
)
def test_value_that_is_no_run_is_not_resumed(run: Any, message: str) -> None:
    agent = Agent(model="scripted", base_url="http://127.0.0.1:1/v1")
    with pytest.raises(InvalidRequest, match=f"run: expected the id of a run or the state of its outcome, {message}"):
        agent.resume_stream(run)


# Former names


async def test_durable_is_the_former_name_of_ledger(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers("Hello.")
    with pytest.warns(DeprecationWarning, match="'durable' is called 'ledger' now") as warned:
        outcome = await in_process.agent().run("Go.", durable=ledger, run_id="run_1")
    assert [warning.filename for warning in warned] == [__file__]
    assert outcome.kind == "final"
    with pytest.warns(DeprecationWarning, match="'durable' is called 'ledger' now"):
        again = await in_process.agent().resume("run_1", durable=ledger)
    assert again.text == "Hello."
    with pytest.raises(ConfigError, match="'durable' is its former name"):
        in_process.agent().run_stream("Go.", durable=ledger, ledger=ledger)


async def test_state_is_the_former_name_of_conversation_state(in_process: ScriptedModel) -> None:
    in_process.set_answers("Hello.")
    with pytest.warns(DeprecationWarning, match="'state' is called 'conversation_state' now") as warned:
        agent = in_process.agent(state="server")
    assert len(warned) == 1
    await agent.run("Go.")
    assert in_process.sent[0]["store"] is True
