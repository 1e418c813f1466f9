"""The agent: what it takes, what it gives, and what it refuses."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from antiphon import Agent, ConfigError, InvalidRequest, Limits, Prices, tool
from antiphon.agent.agent import Agent as BareAgent
from antiphon.agent.outcome import RunEnded, RunEvent, TextDelta, ToolProgress, ToolStarted, TurnRestarted
from antiphon.agent.tool_calls import CANCELLED
from antiphon.errors import PreviousResponseNotFound, RateLimited, UnsupportedParameter
from antiphon.ledger import Ledger
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.tools.base import ToolContext
from support.agent_stage import DROP, Stage, TheirStage, call, open_stage, outputs_of, usage


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


# Where the conversation is kept


async def test_with_state_on_the_server_only_what_is_new_is_sent(stage: Stage) -> None:
    stage.play([LOOK], "Mild.")
    outcome = await stage.agent(tools=[look_up], state="server", instructions="Be brief.").run("Go.")
    assert outcome.text == "Mild."
    first, second = stage.sent
    assert (first["store"], second["store"], second["instructions"]) == (True, True, "Be brief.")
    assert second["previous_response_id"].startswith("resp_")
    assert second["input"] == [{"type": "function_call_output", "call_id": "call_1", "output": "Bern: mild"}]
    # Servers do not remember the tools.
    assert second["tools"] == [look_up.describe()]


@pytest.mark.parametrize(
    "error",
    [
        PreviousResponseNotFound("gone", param="previous_response_id"),
        UnsupportedParameter("no state", param="previous_response_id"),
    ],
    ids=["forgotten", "not supported"],
)
async def test_a_server_that_forgets_is_sent_the_whole_conversation(stage: Stage, error: Exception) -> None:
    stage.play([LOOK], "Mild.")
    events = stage.agent(tools=[look_up], state="server").run_stream("Go.")
    async for event in events:
        if len(stage.sent) == 1 and not stage.transport.refusals:
            stage.transport.refusals.append(error)
        last = event
    assert isinstance(last, RunEnded)
    assert (last.outcome.kind, last.outcome.text) == ("final", "Mild.")
    _, refused, whole = stage.sent
    assert "previous_response_id" in refused
    assert "previous_response_id" not in whole
    assert [item.get("type", "message") for item in whole["input"]] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert whole["store"] is False


async def test_a_server_that_ignores_what_it_should_continue_is_found_out() -> None:
    async with open_stage("upstream") as stage:
        assert isinstance(stage, TheirStage)
        stage.play([LOOK])
        events = []
        async for event in stage.agent(tools=[look_up], state="server").run_stream("Go."):
            if isinstance(event, ToolStarted):
                # From here on it begins anew: its first answer continues nothing.
                stage.play("What?", "Mild.")
            events.append(event)
    assert [type(event) for event in events].count(TurnRestarted) == 1
    assert "previous_response_id" in stage.sent[1]
    assert outputs_of(stage.sent[2]) == [("call_1", "Bern: mild")]
    assert len(stage.sent[2]["input"]) == 3


async def test_an_earlier_run_is_gone_on_from_with_its_history(stage: Stage) -> None:
    stage.play([LOOK], "Mild.", "As I said.")
    agent = stage.agent(tools=[look_up])
    first = await agent.run("How is it?")
    second = await agent.run("What?", history=first.history)
    assert second.text == "As I said."
    assert stage.sent[2]["input"] == [*first.history, {"role": "user", "content": "What?"}]


async def test_input_may_be_items(stage: Stage) -> None:
    stage.play("Nice.")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Look."}]}]
    assert (await stage.agent().run(items)).text == "Nice."
    assert stage.sent[0]["input"] == items


async def test_settings_go_with_every_request(stage: Stage) -> None:
    stage.play("Nice.")
    hosted = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}, "strict": False}
    settings = {"temperature": 0.5, "tools": [hosted], "include": ["message.output_text.logprobs"]}
    await stage.agent(tools=[look_up], settings=settings).run("Go.")
    asked = stage.sent[0]
    assert asked["temperature"] == 0.5
    assert asked["tools"] == [hosted, look_up.describe()]
    assert asked["include"] == ["message.output_text.logprobs", "reasoning.encrypted_content"]


# What is counted


async def test_usage_and_cost_are_those_of_all_turns(stage: Stage) -> None:
    stage.play([LOOK, usage(10, 2)], [{"text": "Mild."}, usage(20, 3)])
    outcome = await stage.agent(tools=[look_up], prices=Prices(input=1.0, output=10.0)).run("Go.")
    counted = outcome.usage
    assert (counted.input_tokens, counted.output_tokens, counted.total_tokens) == (30, 5, 35)
    assert outcome.cost == pytest.approx(80e-6)


def test_cached_tokens_have_a_price_of_their_own() -> None:
    used = Usage(100, 0, 100, InputTokensDetails(90))
    assert Prices(input=1_000_000, output=0, cached=100_000).of(used) == 19


# Those who watch


async def test_hooks_hear_of_everything_and_one_that_fails_harms_nobody(here: Stage) -> None:
    heard: list[RunEvent] = []
    awaited: list[RunEvent] = []

    def fail(_: RunEvent) -> None:
        raise ValueError("no")

    async def listen(event: RunEvent) -> None:
        awaited.append(event)

    here.play([LOOK], "Mild.")
    agent = here.agent(tools=[look_up], hooks=[fail, heard.append, listen])
    told = [event async for event in agent.run_stream("Go.")]
    assert heard == awaited == told


async def test_a_tool_in_a_thread_tells_how_far_it_is(here: Stage) -> None:
    go_on = threading.Event()

    @tool
    def work(context: ToolContext) -> str:
        """Work."""
        context.report("half way")
        assert go_on.wait(20)
        return "done"

    here.play([call("work")], "Done.")
    async for event in here.agent(tools=[work]).run_stream("Go."):
        if isinstance(event, ToolProgress):
            assert event.message == "half way"
            go_on.set()
    assert go_on.is_set()


# Cancelling what runs in a thread


async def test_a_tool_in_a_thread_does_not_hold_up_the_end(here: Stage) -> None:
    begun, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @tool
    def hang() -> str:
        """Hang."""
        loop.call_soon_threadsafe(begun.set)
        let_go.wait(20)
        return "too late"

    here.play([call("hang")], "Well.")
    cancel = asyncio.Event()
    agent = here.agent(tools=[hang])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.wait()
    cancel.set()
    outcome = await running
    let_go.set()
    assert outcome.kind == "cancelled"
    assert CANCELLED in outcome.history[-1]["output"]
    assert (await agent.run("And?", history=outcome.history)).text == "Well."


# Resuming


@pytest.mark.parametrize("ways_there", [["Mild."], [[LOOK], "Mild."]])
async def test_a_run_that_has_ended_is_told_again_and_nothing_is_done(
    here: Stage, ledger: Ledger, ways_there: list[Any]
) -> None:
    here.play(*ways_there)
    agent = here.agent(tools=[look_up])
    first = await agent.run("Go.", durable=ledger, run_id="run_1")
    asked, written = len(here.sent), len(await ledger.read("run_1"))
    assert await agent.resume("run_1", durable=ledger) == first
    assert (len(here.sent), len(await ledger.read("run_1"))) == (asked, written)


async def test_a_run_that_ended_at_a_limit_goes_on_with_a_higher_one(here: Stage) -> None:
    here.play([LOOK], "Mild.")
    outcome = await here.agent(tools=[look_up], limits=Limits(turns=1, wrap_up=False)).run("Go.")
    assert (outcome.kind, outcome.turns) == ("max_turns", 1)
    assert outcome.state is not None
    resumed = await here.agent(tools=[look_up]).resume(outcome.state)
    assert (resumed.kind, resumed.text, resumed.turns) == ("final", "Mild.", 2)


async def test_a_run_that_is_not_there_cannot_be_resumed(here: Stage, ledger: Ledger) -> None:
    with pytest.raises(InvalidRequest, match="There is no run with id 'run_x'") as raised:
        await here.agent().resume("run_x", durable=ledger)
    assert (raised.value.param, raised.value.code) == ("run_id", "run_not_found")


async def test_an_id_alone_does_not_say_where_the_run_is(here: Stage) -> None:
    with pytest.raises(InvalidRequest, match="To resume a run by its id, pass its ledger") as raised:
        await here.agent().resume("run_x")
    assert raised.value.param == "durable"


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"{}",
        b'["run_1", []]',
        b'["run_1", [{"entry": "Ended", "kind": "final", "at": 1}]]',
        b'["run_1", [{"entry": "Began", "agent": "a", "input": [], "at": 1}, {"entry": "Intended", "call_id": "x"}]]',
        b'["run_1", [{"entry": "Dreamt"}]]',
    ],
)
async def test_a_state_that_is_none_is_refused(here: Stage, state: bytes) -> None:
    with pytest.raises(InvalidRequest, match="This is not the state of a run: ") as raised:
        await here.agent().resume(state)
    assert raised.value.code == "invalid_state"


async def test_entries_that_cannot_be_read_are_refused(here: Stage, ledger: Ledger) -> None:
    await ledger.append("run_1", 0, b'{"entry": "Dreamt"}')
    with pytest.raises(InvalidRequest, match="The entries of the run 'run_1' cannot be read: ") as raised:
        await here.agent().resume("run_1", durable=ledger)
    assert raised.value.code == "invalid_state"


async def test_an_id_is_used_once(here: Stage, ledger: Ledger) -> None:
    here.play("Mild.")
    await here.agent().run("Go.", durable=ledger, run_id="run_1")
    with pytest.raises(InvalidRequest, match="A run with id 'run_1' exists already: resume it") as raised:
        await here.agent().run("Go.", durable=ledger, run_id="run_1")
    assert (raised.value.param, raised.value.code) == ("run_id", "run_exists")


# What makes no agent


def plain(city: str) -> str:
    """Look up."""
    return city


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Agent(model="m", tools=[look_up, look_up]), "There are two tools called 'look_up'."),
        (lambda: Agent(model="m", tools=[plain]), "plain is not a tool: decorate it with @tool."),  # type: ignore[list-item]
        (lambda: Agent(model="m", limits=Limits(cost=1.0)), "The limit 'cost' requires 'prices'."),
        (lambda: Agent(model="m", state="cloud"), "state: 'cloud' is not one of client, server."),  # type: ignore[arg-type]
        (lambda: Agent(model="m", name="a", output_type=dict[str, int]), "a.output_type: strict mode cannot express"),
        (lambda: BareAgent(model="m"), "An agent requires a base_url or a transport."),
        (lambda: Limits(turns=0), "The limit 'turns' must be at least 1."),
        (lambda: Limits(seconds=-1), "The limit 'seconds' must be at least 0."),
    ],
)
def test_what_makes_no_agent_is_refused_with_the_reason(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


# Other ways to run


def test_code_that_is_not_asynchronous_runs_it_too_and_again() -> None:
    async def play() -> None:
        async with open_stage("upstream") as stage:
            assert isinstance(stage, TheirStage)
            stage.play([LOOK], "Mild.", [LOOK], "Mild again.")
            texts = await asyncio.to_thread(ask, stage.upstream.url)
            assert texts == ["Mild.", "Mild again."]

    def ask(url: str) -> list[str]:
        agent = Agent(model="scripted", base_url=url, tools=[make_lookup()])
        return [agent.run_sync("Go.").text for _ in range(2)]

    def make_lookup() -> Any:
        @tool(name="look_up", concurrency=1)
        def look(city: str) -> str:
            """Look up."""
            return city

        return look

    asyncio.run(play())


def test_within_a_loop_it_says_to_await_it() -> None:
    async def run() -> None:
        Agent(model="m", base_url="http://127.0.0.1:1/v1").run_sync("Go.")

    with pytest.raises(RuntimeError, match="await the run instead"):
        asyncio.run(run())


async def test_a_rate_limit_is_waited_out(here: Stage) -> None:
    here.play("Mild.")
    here.transport.refusals.append(RateLimited("slow down", retry_after=0.01))
    told = [event async for event in here.agent().run_stream("Go.")]
    assert [event.reason for event in told if isinstance(event, TurnRestarted)] == ["slow down"]
    assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "Mild."


@pytest.mark.parametrize(
    "error", [RateLimited("used up", code="insufficient_quota"), RateLimited("tomorrow", retry_after=86400)]
)
async def test_what_will_not_pass_is_not_waited_out(here: Stage, error: RateLimited) -> None:
    here.play([{"text": "never"}, DROP])
    here.transport.refusals.append(error)
    outcome = await here.agent().run("Go.")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert (outcome.error.message, len(here.sent)) == (error.message, 1)


@pytest.mark.parametrize("task", [None, 7, ["Go."], {"role": "user"}])
async def test_a_task_that_is_none_is_refused(here: Stage, task: Any) -> None:
    with pytest.raises(InvalidRequest, match="A task must be a string or a list of items") as refused:
        await here.agent().run(task)
    assert (refused.value.param, here.sent) == ("task", [])


@pytest.mark.parametrize("content", ["caf\udce9", object()])
async def test_a_task_that_no_request_can_carry_is_refused(here: Stage, ledger: Ledger, content: Any) -> None:
    for durable in (None, ledger):
        with pytest.raises(InvalidRequest, match="The task cannot be encoded as JSON: ") as raised:
            await here.agent().run([{"role": "user", "content": content}], durable=durable)
        assert raised.value.param == "task"
    assert await ledger.runs() == []


async def test_what_is_no_ledger_is_refused_with_what_is_one(stage: Stage) -> None:
    path: Any = "runs.db"
    with pytest.raises(ConfigError, match=r"durable: expected a ledger such as SqliteLedger\(path\), got str"):
        await stage.agent(tools=[look_up]).run("Go.", durable=path)
    assert stage.sent == []
