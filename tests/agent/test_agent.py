"""The agent: options, state, usage, hooks, resumption and rejected input."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from antiphon import Agent, ConfigError, FileSearch, Handoff, InvalidRequest, Limits, Prices, tool
from antiphon.agent.agent import Agent as BareAgent
from antiphon.agent.outcome import RunEnded, RunEvent, TextDelta, ToolProgress, ToolStarted, TurnRestarted
from antiphon.agent.tool_calls import CANCELLED
from antiphon.errors import PreviousResponseNotFound, RateLimited, UnsupportedParameter
from antiphon.ledger import Ledger
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.testing.scripted import ScriptedTransport
from antiphon.tools.base import RunContext, ToolContext
from support.scripted_model import DROP, ScriptedModel, UpstreamModel, call, open_scripted, outputs_of, usage


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


LOOK = call("look_up", {"city": "Bern"})


# Conversation state


async def test_server_state_sends_only_new_items(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], "Mild.")
    outcome = await scripted.agent(tools=[look_up], conversation_state="server", instructions="Be brief.").run("Go.")
    assert outcome.text == "Mild."
    first, second = scripted.sent
    assert (first["store"], second["store"], second["instructions"]) == (True, True, "Be brief.")
    assert second["previous_response_id"].startswith("resp_")
    assert second["input"] == [{"type": "function_call_output", "call_id": "call_1", "output": "Bern: mild"}]
    # Servers do not store the tools.
    assert second["tools"] == [look_up.describe()]


@pytest.mark.parametrize(
    "error",
    [
        PreviousResponseNotFound("gone", param="previous_response_id"),
        UnsupportedParameter("no state", param="previous_response_id"),
    ],
    ids=["forgotten", "not supported"],
)
async def test_server_that_lost_a_response_gets_the_whole_history(scripted: ScriptedModel, error: Exception) -> None:
    scripted.set_answers([LOOK], "Mild.")
    events = scripted.agent(tools=[look_up], conversation_state="server").run_stream("Go.")
    async for event in events:
        if len(scripted.sent) == 1 and not scripted.transport.refusals:
            scripted.transport.refusals.append(error)
        last = event
    assert isinstance(last, RunEnded)
    assert (last.outcome.kind, last.outcome.text) == ("final", "Mild.")
    _, refused, whole = scripted.sent
    assert "previous_response_id" in refused
    assert "previous_response_id" not in whole
    assert [item.get("type", "message") for item in whole["input"]] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert whole["store"] is False


async def test_server_that_ignores_the_previous_response_is_detected() -> None:
    async with open_scripted("upstream") as scripted:
        assert isinstance(scripted, UpstreamModel)
        scripted.set_answers([LOOK])
        events = []
        async for event in scripted.agent(tools=[look_up], conversation_state="server").run_stream("Go."):
            if isinstance(event, ToolStarted):
                # The scripted server starts again: its first response continues no other.
                scripted.set_answers("What?", "Mild.")
            events.append(event)
    assert [type(event) for event in events].count(TurnRestarted) == 1
    assert "previous_response_id" in scripted.sent[1]
    assert outputs_of(scripted.sent[2]) == [("call_1", "Bern: mild")]
    assert len(scripted.sent[2]["input"]) == 3


async def test_history_of_an_earlier_run_is_continued(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], "Mild.", "As I said.")
    agent = scripted.agent(tools=[look_up])
    first = await agent.run("How is it?")
    second = await agent.run("What?", history=first.history)
    assert second.text == "As I said."
    assert scripted.sent[2]["input"] == [*first.history, {"role": "user", "content": "What?"}]


async def test_input_can_be_items(scripted: ScriptedModel) -> None:
    scripted.set_answers("Nice.")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Look."}]}]
    assert (await scripted.agent().run(items)).text == "Nice."
    assert scripted.sent[0]["input"] == items


async def test_settings_are_sent_with_every_request(scripted: ScriptedModel) -> None:
    scripted.set_answers("Nice.")
    hosted = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}, "strict": False}
    settings = {"temperature": 0.5, "tools": [hosted], "include": ["message.output_text.logprobs"]}
    await scripted.agent(tools=[look_up], settings=settings).run("Go.")
    request = scripted.sent[0]
    assert request["temperature"] == 0.5
    assert request["tools"] == [hosted, look_up.describe()]
    assert request["include"] == ["message.output_text.logprobs", "reasoning.encrypted_content"]


async def test_stored_responses_can_be_requested(in_process: ScriptedModel) -> None:
    in_process.set_answers("One.", "Two.")
    agent = in_process.agent(settings={"store": True})
    await agent.run("Go.")
    await agent.run("Go.", settings={"store": False})
    assert [request["store"] for request in in_process.sent] == [True, False]


async def test_null_in_settings_means_the_default(in_process: ScriptedModel) -> None:
    in_process.set_answers("One.")
    agent = in_process.agent(settings={"store": None, "stream": None}, conversation_state="server")
    assert (await agent.run("Go.")).text == "One."


# Usage and cost


async def test_usage_and_cost_sum_all_turns(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK, usage(10, 2)], [{"text": "Mild."}, usage(20, 3)])
    outcome = await scripted.agent(tools=[look_up], prices=Prices(input=1.0, output=10.0)).run("Go.")
    counted = outcome.usage
    assert (counted.input_tokens, counted.output_tokens, counted.total_tokens) == (30, 5, 35)
    assert outcome.cost == pytest.approx(80e-6)


def test_cached_tokens_have_their_own_price() -> None:
    used = Usage(100, 0, 100, InputTokensDetails(90))
    assert Prices(input=1_000_000, output=0, cached=100_000).compute_cost(used) == 19


# Hooks and progress


async def test_hooks_get_all_events_and_failures_are_ignored(in_process: ScriptedModel) -> None:
    received: list[RunEvent] = []
    awaited: list[RunEvent] = []

    def fail(_: RunEvent) -> None:
        raise ValueError("no")

    async def listen(event: RunEvent) -> None:
        awaited.append(event)

    in_process.set_answers([LOOK], "Mild.")
    agent = in_process.agent(tools=[look_up], hooks=iter([fail, received.append, listen]))
    events = [event async for event in agent.run_stream("Go.")]
    assert received == awaited == events


async def test_tool_in_a_thread_reports_progress(in_process: ScriptedModel) -> None:
    release = threading.Event()

    @tool
    def work(context: ToolContext) -> str:
        """Work."""
        context.report("half way")
        assert release.wait(20)
        return "done"

    in_process.set_answers([call("work")], "Done.")
    async for event in in_process.agent(tools=[work]).run_stream("Go."):
        if isinstance(event, ToolProgress):
            assert event.message == "half way"
            release.set()
    assert release.is_set()


# Cancelling a tool in a thread


async def test_tool_in_a_thread_does_not_delay_the_end(in_process: ScriptedModel) -> None:
    begun, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @tool
    def hang() -> str:
        """Hang."""
        loop.call_soon_threadsafe(begun.set)
        let_go.wait(20)
        return "too late"

    in_process.set_answers([call("hang")], "Well.")
    cancel = asyncio.Event()
    agent = in_process.agent(tools=[hang])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.wait()
    cancel.set()
    outcome = await running
    let_go.set()
    assert outcome.kind == "cancelled"
    assert CANCELLED in outcome.history[-1]["output"]
    assert (await agent.run("And?", history=outcome.history)).text == "Well."


# Resuming


@pytest.mark.parametrize("references", [["Mild."], [[LOOK], "Mild."]])
async def test_resuming_a_finished_run_repeats_its_outcome(
    in_process: ScriptedModel, ledger: Ledger, references: list[Any]
) -> None:
    in_process.set_answers(*references)
    agent = in_process.agent(tools=[look_up])
    first = await agent.run("Go.", ledger=ledger, run_id="run_1")
    request, written = len(in_process.sent), len(await ledger.read("run_1"))
    assert await agent.resume("run_1", ledger=ledger) == first
    assert (len(in_process.sent), len(await ledger.read("run_1"))) == (request, written)


async def test_run_that_ended_at_a_limit_resumes_with_a_higher_one(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK], "Mild.")
    outcome = await in_process.agent(tools=[look_up], limits=Limits(turns=1, wrap_up=False)).run("Go.")
    assert (outcome.kind, outcome.turns) == ("max_turns", 1)
    assert outcome.state is not None
    resumed = await in_process.agent(tools=[look_up]).resume(outcome.state)
    assert (resumed.kind, resumed.text, resumed.turns) == ("final", "Mild.", 2)


async def test_unknown_run_cannot_be_resumed(in_process: ScriptedModel, ledger: Ledger) -> None:
    with pytest.raises(InvalidRequest, match="There is no run with id 'run_x'") as raised:
        await in_process.agent().resume("run_x", ledger=ledger)
    assert (raised.value.param, raised.value.code) == ("run_id", "run_not_found")


async def test_resume_by_id_requires_a_ledger(in_process: ScriptedModel) -> None:
    with pytest.raises(InvalidRequest, match="To resume a run by its id, pass its ledger") as raised:
        await in_process.agent().resume("run_x")
    assert raised.value.param == "ledger"


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
async def test_invalid_state_is_rejected(in_process: ScriptedModel, state: bytes) -> None:
    with pytest.raises(InvalidRequest, match="This is not the state of a run: ") as raised:
        await in_process.agent().resume(state)
    assert raised.value.code == "invalid_state"


async def test_unreadable_entries_are_rejected(in_process: ScriptedModel, ledger: Ledger) -> None:
    await ledger.append("run_1", 0, b'{"entry": "Dreamt"}')
    with pytest.raises(InvalidRequest, match="The entries of the run 'run_1' cannot be read: ") as raised:
        await in_process.agent().resume("run_1", ledger=ledger)
    assert raised.value.code == "invalid_state"


async def test_run_id_cannot_be_reused(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers("Mild.")
    await in_process.agent().run("Go.", ledger=ledger, run_id="run_1")
    with pytest.raises(InvalidRequest, match="A run with id 'run_1' exists already: resume it") as raised:
        await in_process.agent().run("Go.", ledger=ledger, run_id="run_1")
    assert (raised.value.param, raised.value.code) == ("run_id", "run_exists")


@pytest.mark.parametrize("run_id", ["order:1:0", "2026-11-19T10:30:15", "a:1:0:2:1"])
async def test_run_id_of_the_form_of_a_subagents_run_is_refused_with_a_ledger(
    in_process: ScriptedModel, ledger: Ledger, run_id: str
) -> None:
    agent = in_process.agent()
    with pytest.raises(
        InvalidRequest, match=f"run_id: '{run_id}' has the form of the ids that the subagents"
    ) as raised:
        await agent.run("Go.", ledger=ledger, run_id=run_id)
    assert (raised.value.param, raised.value.code) == ("run_id", "invalid_run_id")
    assert await ledger.runs() == []
    in_process.set_answers("Mild.", "Mild.")
    assert (await agent.run("Go.", run_id=run_id)).run_id == run_id
    assert (await agent.run("Go.", ledger=ledger, run_id="order:1")).kind == "final"


# Invalid options


def plain(city: str) -> str:
    """Look up."""
    return city


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Agent(model="m", tools=[look_up, look_up]), "There are two tools called 'look_up'."),
        (lambda: Agent(model="m", tools=[plain]), "plain is not a tool: decorate it with @tool."),  # type: ignore[list-item]
        (lambda: Agent(model="m", tools=[Agent(model="m")]), "tools: an agent is not a tool. Use its as_tool"),  # type: ignore[list-item]
        (lambda: Agent(model="m", hooks=print), "hooks: expected a list of functions, got builtin_function_or_method."),  # type: ignore[arg-type]
        (lambda: Agent(model="m", hooks=["log"]), "hooks: expected functions, got str."),  # type: ignore[list-item]
        (lambda: Agent(model="m", limits=Limits(cost=1.0)), "The limit 'cost' requires 'prices'."),
        (
            lambda: Agent(model="m", conversation_state="cloud"),
            "conversation_state: 'cloud' is not one of client, server.",
        ),  # type: ignore[arg-type]
        (lambda: Agent(model="m", name="a", output_type=dict[str, int]), "a.output_type: strict mode cannot express"),
        (lambda: Agent(model="m", limits={"turns": 3}), "limits: expected Limits, got dict."),  # type: ignore[arg-type]
        (
            lambda: Agent(model="m").as_tool("a", "A.", limits=[3]),  # type: ignore[arg-type]
            "limits: expected Limits, got list.",
        ),
        (lambda: Agent(model="m", prices=2.5), "prices: expected Prices, got float."),  # type: ignore[arg-type]
        (lambda: Agent(model="m", instructions=5), "instructions: expected a text or a function, got int."),  # type: ignore[arg-type]
        (
            lambda: BareAgent(model="m", transport=ScriptedTransport({}), base_url="http://127.0.0.1/v1"),
            "transport: it has its own address and key.",
        ),
        (lambda: BareAgent(model="m"), "An agent requires a base_url or a transport."),
        (lambda: Limits(turns=0), "The limit 'turns' must be at least 1."),
        (lambda: Limits(seconds=-1), "The limit 'seconds' must be at least 0."),
        (lambda: Limits(cost=float("nan")), "The limit 'cost' must be at least 0."),
        (lambda: Limits(cost="1"), "The limit 'cost' must be a number or None, not str."),  # type: ignore[arg-type]
        (lambda: Limits(turns=True), "The limit 'turns' must be a number or None, not bool."),
        (lambda: Limits(tokens=1e6), "The limit 'tokens' must be an integer or None, not 1000000.0."),  # type: ignore[arg-type]
        (lambda: Agent(model=5), "model: expected a text, got int."),  # type: ignore[arg-type]
        (lambda: Agent(model="m", name=None), "name: expected a text, got NoneType."),  # type: ignore[arg-type]
        (lambda: Agent(model="m").run_stream("Hi.", model=b""), "model: expected a text, got bytes."),  # type: ignore[arg-type]
        (lambda: Agent(model="m").run_stream("Hi.", run_id=5), "run_id: expected a text, got int."),  # type: ignore[arg-type]
        (lambda: Prices(input="1", output=2), "prices: 'input' must be a number, at least 0, not '1'."),  # type: ignore[arg-type]
        (lambda: Prices(input=1, output=-2), "prices: 'output' must be a number, at least 0, not -2."),
        (lambda: Prices(input=1, output=2, cached=float("nan")), "prices: 'cached' must be a number"),
        (lambda: Agent(model="m", settings={"input": "Hi."}), "settings: 'input' is the task of a run."),
        (
            lambda: Agent(model="m", settings=cast(Any, ["temperature"])),
            "settings: expected a dictionary .*, got list.",
        ),
        (
            lambda: Agent(model="m", settings={"tools": [{"type": "mcp", "filter": {"names": len}}]}),
            r"settings.tools\[0\].filter.names: a value of type builtin_function_or_method cannot be encoded as JSON",
        ),
        (
            lambda: Agent(model="m", settings={"user": "caf\udce9"}),
            "settings.user: a value of type str cannot be encoded",
        ),
        (
            lambda: Agent(model="caf\udce9"),
            "model: a value of type str cannot be encoded as JSON: .* surrogates not allowed",
        ),
        (
            lambda: Agent(model="m", instructions="caf\udce9"),
            "instructions: a value of type str cannot be encoded as JSON",
        ),
        (
            lambda: Agent(model="m", tools=[structs.replace(look_up, parameters={"default": object()})]),
            "tools.look_up.parameters.default: a value of type object cannot be encoded as JSON",
        ),
        (
            lambda: Agent(model="m", tools=[FileSearch(vector_store_ids=["vs"], filters={"key": object()})]),
            "tools.file_search.filters.key: a value of type object cannot be encoded as JSON",
        ),
        (lambda: Agent(model="m", turn_retries=-1), "turn_retries: expected an integer, at least 0, got -1."),
        (
            lambda: Agent(model="m", output_retries=cast(Any, None)),
            "output_retries: expected an integer, .*, got None.",
        ),
        (lambda: Agent(model="m", history_filter=cast(Any, 5)), "history_filter: expected a function, got int."),
        (lambda: Agent(model="m").as_tool("a", "A.", read_output=cast(Any, "x")), "read_output: expected a function"),
        (
            lambda: Agent(model="m", handoffs=cast(Any, Agent(model="m"))),
            "handoffs: expected a list of agents and handoffs",
        ),
        (lambda: Handoff(Agent(model="m"), on_handoff=cast(Any, "x")), "on_handoff: expected a function, got str."),
        (lambda: Handoff(Agent(model="m"), input_filter=cast(Any, "x")), "input_filter: expected a function, got str."),
        (lambda: Agent(model="m", settings={"stream": False}), "settings: 'stream' must be true."),
        (
            lambda: Agent(model="m", settings={"store": False}, conversation_state="server"),
            "settings: 'store' must be true, because conversation_state is 'server'.",
        ),
        (lambda: Agent(model="m").run_stream("Hi.", settings={"input": "Hi."}), "settings: 'input' is the task"),
        (lambda: Agent(model="m", base_url="http://host/v1/responses"), "must not include /responses."),
        (
            lambda: Agent(model="m", base_url=cast(Any, Path("host"))),
            "base_url: expected a text, got (Posix|Windows)Path.",
        ),
    ],
)
def test_invalid_agent_options_are_rejected(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


class Markup(str):
    """A text, as template engines return it."""


@pytest.mark.parametrize("is_dynamic", [False, True])
async def test_subclasses_of_texts_are_texts(in_process: ScriptedModel, ledger: Ledger, is_dynamic: bool) -> None:
    def instruct(_: RunContext) -> str:
        return Markup("Be brief.")

    instructions = instruct if is_dynamic else Markup("Be brief.")
    in_process.set_answers("Mild.", "Wet.")
    agent = in_process.agent(name=Markup("a"), instructions=instructions)
    outcome = await agent.run(Markup("Go."), ledger=ledger, run_id=Markup("r"), model=Markup("scripted"))
    assert (outcome.kind, outcome.run_id, outcome.agent) == ("final", "r", "a")
    assert (await agent.run([Markup("Go."), "On."])).text == "Wet."
    assert [each["instructions"] for each in in_process.sent] == ["Be brief."] * 2


# Synchronous runs and retries


def test_run_sync_works_repeatedly() -> None:
    async def set_answers() -> None:
        async with open_scripted("upstream") as scripted:
            assert isinstance(scripted, UpstreamModel)
            scripted.set_answers([LOOK], "Mild.", [LOOK], "Mild again.")
            texts = await asyncio.to_thread(ask, scripted.upstream.url)
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

    asyncio.run(set_answers())


def test_run_sync_within_an_event_loop_raises() -> None:
    async def run() -> None:
        Agent(model="m", base_url="http://127.0.0.1:1/v1").run_sync("Go.")

    with pytest.raises(RuntimeError, match="await the run instead"):
        asyncio.run(run())


async def test_turn_is_retried_after_a_rate_limit(in_process: ScriptedModel) -> None:
    in_process.set_answers("Mild.")
    in_process.transport.refusals.append(RateLimited("slow down", retry_after=0.01))
    events = [event async for event in in_process.agent().run_stream("Go.")]
    assert [event.reason for event in events if isinstance(event, TurnRestarted)] == ["slow down"]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Mild."


@pytest.mark.parametrize(
    "error", [RateLimited("used up", code="insufficient_quota"), RateLimited("tomorrow", retry_after=86400)]
)
async def test_permanent_error_is_not_retried(in_process: ScriptedModel, error: RateLimited) -> None:
    in_process.set_answers([{"text": "never"}, DROP])
    in_process.transport.refusals.append(error)
    outcome = await in_process.agent().run("Go.")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert (outcome.error.message, len(in_process.sent)) == (error.message, 1)


@pytest.mark.parametrize("task", [None, 7, [b"Go."], {"role": "user"}])
async def test_task_of_another_type_is_rejected(in_process: ScriptedModel, task: Any) -> None:
    with pytest.raises(
        InvalidRequest, match="A task must be a string, a list of strings, images and files, or"
    ) as refused:
        await in_process.agent().run(task)
    assert (refused.value.param, in_process.sent) == ("task", [])


@pytest.mark.parametrize("content", ["caf\udce9", object()])
async def test_task_that_is_not_json_is_rejected(in_process: ScriptedModel, ledger: Ledger, content: Any) -> None:
    for used in (None, ledger):
        with pytest.raises(InvalidRequest, match="The task cannot be encoded as JSON: ") as raised:
            await in_process.agent().run([{"role": "user", "content": content}], ledger=used)
        assert raised.value.param == "task"
    assert await ledger.runs() == []


async def test_value_that_is_no_ledger_is_rejected(scripted: ScriptedModel) -> None:
    path: Any = "runs.db"
    with pytest.raises(ConfigError, match=r"ledger: expected a ledger such as SqliteLedger\(path\), got str"):
        await scripted.agent(tools=[look_up]).run("Go.", ledger=path)
    assert scripted.sent == []
