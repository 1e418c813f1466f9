"""The agent: what it takes, what it gives, and what it refuses."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest

from agent_stage import DROP, HOLD, Stage, TheirStage, call, open_stage, outputs_of, usage
from antiphon import Agent, ConfigError, InvalidRequest, Limits, Prices, tool
from antiphon.agent.agent import Agent as BareAgent
from antiphon.agent.calls import CANCELLED
from antiphon.agent.outcome import RunEnded, RunEvent, TextDelta, ToolProgress, ToolStarted, TurnRestarted
from antiphon.errors import PreviousResponseNotFound, RateLimited, UnsupportedParameter
from antiphon.ledger import Ledger
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.tools.base import ToolContext


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


# The form of the answer


@dataclasses.dataclass
class Weather:
    city: str
    celsius: int
    note: str | None = None


class Forecast(msgspec.Struct):
    days: list[Weather]


class Report(pydantic.BaseModel):
    title: str
    stars: int = pydantic.Field(ge=1, le=5)


@pytest.mark.parametrize(
    ("kind", "said", "output"),
    [
        (Weather, '{"city": "Bern", "celsius": 4, "note": null}', Weather("Bern", 4)),
        (Forecast, '{"days": [{"city": "Bern", "celsius": 4, "note": "x"}]}', Forecast([Weather("Bern", 4, "x")])),
        (Report, '{"title": "Good", "stars": 4}', Report(title="Good", stars=4)),
        (list[int], '{"value": [1, 2]}', [1, 2]),
        (int, '{"value": 7}', 7),
        (list[Report], '{"value": [{"title": "Good", "stars": 4}]}', [Report(title="Good", stars=4)]),
        (Weather | None, '{"value": null}', None),
        (int, 'Here it is:\n```json\n{"value": 7}\n```', 7),
    ],
)
async def test_the_answer_is_read_into_its_type(stage: Stage, kind: Any, said: str, output: Any) -> None:
    stage.play(said)
    outcome = await stage.agent(output_type=kind).run("Go.")
    assert (outcome.kind, outcome.output, outcome.text) == ("final", output, said)
    asked = stage.sent[0]["text"]["format"]
    assert (asked["type"], asked["strict"], asked["schema"]["type"]) == ("json_schema", True, "object")
    assert asked["schema"]["additionalProperties"] is False


async def test_an_answer_that_does_not_fit_may_be_given_once_more(stage: Stage) -> None:
    stage.play('{"city": "Bern", "celsius": "mild"}', '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output, outcome.turns) == ("final", Weather("Bern", 4), 2)
    told = stage.sent[1]["input"][-1]
    assert told == {
        "role": "user",
        "content": "Your answer does not fit: Expected `int`, got `str` - at `$.celsius`. Answer again, with nothing but "
        "the JSON.",
    }


async def test_if_it_does_not_fit_again_the_run_fails_with_the_text(stage: Stage) -> None:
    stage.play("It is mild.", "It really is.", '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.output) == ("failed", 2, None)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.raw) == ("invalid_output", "It really is.")
    assert outcome.error.message.startswith("The answer does not fit its type: ")


async def test_an_answer_that_was_cut_off_may_be_given_once_more_too(stage: Stage) -> None:
    stage.play([{"text": '{"city": "Be'}, {"finish": "length"}], '{"city": "Bern", "celsius": 4, "note": null}')
    outcome = await stage.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.output) == ("final", Weather("Bern", 4))
    assert "it was cut off (max_output_tokens)" in stage.sent[1]["input"][-1]["content"]


async def test_the_last_word_of_a_run_that_had_to_end_is_read_too(stage: Stage) -> None:
    stage.play([LOOK], '{"value": 7}')
    outcome = await stage.agent(tools=[look_up], output_type=int, limits=Limits(turns=2)).run("Go.")
    assert (outcome.kind, outcome.output) == ("max_turns", 7)


async def test_a_refusal_fails_the_run_with_its_words(here: Stage) -> None:
    here.play([{"refusal": "I will not."}])
    outcome = await here.agent(output_type=Weather).run("Go.")
    assert (outcome.kind, outcome.text) == ("failed", "I will not.")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("refusal", "I will not.")


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


# Agents that work for others


async def test_an_agent_is_a_tool_of_another(stage: Stage) -> None:
    stage.play([call("expert", {"input": "Bern?"}, "call_e")], [LOOK], "Mild in Bern.", "It is mild.")
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=5))
    agent = stage.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    events = [event async for event in agent.run_stream("How is it?")]
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome.text, events[-1].outcome.turns) == ("It is mild.", 2)
    assert [event.message for event in events if isinstance(event, ToolProgress)] == ["calls look_up"]
    # It knows what it was asked, and not what its asker was.
    assert stage.sent[1]["input"] == [{"role": "user", "content": "Bern?"}]
    assert outputs_of(stage.sent[3]) == [("call_e", "Mild in Bern.")]


async def test_its_own_limits_end_it_and_the_asker_reads_how(stage: Stage) -> None:
    stage.play([call("expert", {"input": "Bern?"})], [LOOK], "I got stuck.", "No idea.")
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=2))
    agent = stage.agent(tools=[expert.as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.text) == ("final", "No idea.")
    assert "The agent ended with max_turns: I got stuck." in outputs_of(stage.sent[3])[0][1]


async def test_its_run_is_in_the_same_ledger_under_a_name_of_its_call(here: Stage, ledger: Ledger) -> None:
    ask = [call("expert", {"input": "Bern?"})]
    here.play(ask, "Mild.", [call("expert", {"input": "Rome?"})], "Hot.", "Mild and hot.")
    agent = here.agent(tools=[here.agent(name="expert").as_tool("expert", "Knows the weather.")])
    outcome = await agent.run("Go.", durable=ledger, run_id="run_1")
    assert outcome.text == "Mild and hot."
    # The model has used the same id for both of its calls. They are two calls nevertheless.
    assert [output for _, output in outputs_of(here.sent[-1])] == ["Mild.", "Hot."]
    listed = {summary.run_id: (summary.status, summary.title) for summary in await ledger.runs()}
    assert listed == {
        "run_1": ("final", "Go."),
        "run_1:1:0": ("final", "Bern?"),
        "run_1:2:0": ("final", "Rome?"),
    }


async def test_cancelling_the_asker_cancels_it(here: Stage, ledger: Ledger) -> None:
    here.play([call("expert", {"input": "Bern?"})], [{"text": "Well"}, HOLD], "Never mind.")
    agent = here.agent(tools=[here.agent(name="expert").as_tool("expert", "Knows the weather.")])
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1"))
    await here.until_held()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {summary.run_id: summary.status for summary in await ledger.runs()} == {
        "run_1": "cancelled",
        "run_1:1:0": "cancelled",
    }
    assert (await agent.resume("run_1", durable=ledger)).text == "Never mind."


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
    with pytest.raises(InvalidRequest, match="with the ledger it is in") as raised:
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
    with pytest.raises(InvalidRequest, match="There is a run with id 'run_1' already: resume it") as raised:
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
        (lambda: Agent(model="m", limits=Limits(cost=1.0)), "A limit of cost needs prices."),
        (lambda: Agent(model="m", state="cloud"), "not by 'cloud'"),  # type: ignore[arg-type]
        (lambda: Agent(model="m", name="a", output_type=dict[str, int]), "a.output_type: strict mode cannot express"),
        (lambda: BareAgent(model="m"), "An agent needs a base_url or a transport."),
        (lambda: Limits(turns=0), "A limit of turns cannot be less than 1."),
        (lambda: Limits(seconds=-1), "A limit of seconds cannot be less than 0."),
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
