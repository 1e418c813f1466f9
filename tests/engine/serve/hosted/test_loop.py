"""The loop of hosted tools, with a real engine, the scripted model and a tool that records its effects."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Turn
from antiphon.engine.policy import Policy
from antiphon.errors import AntiphonError, InvalidRequest, UnsupportedTool
from antiphon.protocol import codec
from antiphon.protocol.hosted import McpCall
from antiphon.protocol.response import Response
from antiphon.protocol.tools import McpTool, Tool
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.stream.fold import fold
from antiphon.stream.limits import AnswerLimits
from antiphon.tools.hosted.base import HostedCall, HostedContext, HostedFunction, HostedSession, HostedTool
from antiphon.tools.hosted.registry import HostedTools
from support.engine_harness import EngineHarness
from support.hosted_tool import RecordingTool
from support.recording_backend import RecordingBackend

FILE_SEARCH = {"type": "file_search", "vector_store_ids": ["vs_1"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def call(*queries: str, name: str = "file_search", call_id: str = "call_1") -> dict[str, Any]:
    return {"tool_call": {"name": name, "arguments": {"queries": list(queries)}, "call_id": call_id}}


def script(*answers: Any, **options: Any) -> dict[str, Any]:
    """Return a script whose model answers the n-th model call with the n-th answer, and supports only functions."""
    return {"native_tools": ["function"], "rules": [{"answers": list(answers)}]} | options


class HostedHarness(EngineHarness):
    """An engine with hosted tools, whose backend records its turns."""

    def __init__(self, answers: dict[str, Any], tools: HostedTools, policy: Policy | None = None) -> None:
        self.recorder = RecordingBackend(answers)
        super().__init__(answers, MemoryStore(), policy, tools, self.recorder)

    async def answer(self, input_items: Any = "hi", *, project: str = "default", **fields: Any) -> Response:
        """Return the final response, after checking its stream. Open Responses has no schema for hosted tools."""
        run = await self.ask(input_items, project=project, **fields)
        return fold([event async for batch in run.events() for event in batch])

    @property
    def turns(self) -> list[Turn]:
        return self.recorder.turns


@asynccontextmanager
async def engine(answers: dict[str, Any], *tools: HostedTool, **policy: Any) -> AsyncIterator[HostedHarness]:
    harness = HostedHarness(answers, HostedTools(tools), Policy(**policy))
    await harness.engine.start()
    try:
        yield harness
    finally:
        await harness.engine.close()


def show(output: Any) -> list[Any]:
    """Return the items of a response as JSON, without their ids."""
    items = json.loads(codec.encode(output))
    for item in items:
        item.pop("id", None)
    return items


def text(message: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": message, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part], "status": "completed"}


def found(*queries: str) -> dict[str, Any]:
    results = [{"file_id": "file-1", "score": 0.5, "text": f"Text about {query}."} for query in queries]
    return {"type": "file_search_call", "queries": list(queries), "status": "completed", "results": results}


async def test_response_runs_hosted_calls_between_model_calls() -> None:
    tool = RecordingTool()
    async with engine(script([call("cats")], [call("dogs", call_id="call_2")], "Both."), tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.status == "completed"
    assert show(response.output) == [found("cats"), found("dogs"), text("Both.")]
    assert tool.effects == ["cats", "dogs"]
    assert tool.closed == 1


async def test_model_reads_hosted_calls_as_function_calls() -> None:
    answers = script([{"reasoning": "Look."}, {"text": "Wait."}, call("cats")], "Done.")
    async with engine(answers, RecordingTool()) as harness:
        await harness.answer("find cats", tools=[FILE_SEARCH], instructions="Be brief.")
        first, second = harness.turns
    assert [tool.name for tool in first.request.tools] == ["file_search"]
    assert first.request.instructions == "Be brief."
    found = {"citation": "【1】", "file_id": "file-1", "score": 0.5, "text": "Text about cats."}
    result = {"status": "completed", "results": [found]}
    question, reasoning, message, called, output = json.loads(codec.encode(second.items))
    assert question["content"][0]["text"] == "find cats"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Look."}]
    assert message["content"][0]["text"] == "Wait."
    assert called == {
        "type": "function_call",
        "call_id": "call_1",
        "name": "file_search",
        "arguments": json.dumps({"queries": ["cats"]}, separators=(",", ":")),
        "status": "completed",
    }
    assert output.pop("output")
    assert output == {
        "type": "function_call_output",
        "call_id": "call_1",
        "status": "completed",
    }
    assert json.loads(second.items[-1].output) == result


async def test_stream_has_one_lifecycle_over_all_rounds() -> None:
    async with engine(script([call("cats")], "Done."), RecordingTool()) as harness:
        run = await harness.ask(tools=[FILE_SEARCH], stream=True)
        stream = [event async for batch in run.events() for event in batch]
    assert [event.type for event in stream] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    encoded = [json.loads(codec.encode(event)) for event in stream]
    assert [event["sequence_number"] for event in encoded] == list(range(len(stream)))
    assert [event["output_index"] for event in encoded if "output_index" in event] == [0] * 5 + [1] * 6
    ids = {event["item_id"] for event in encoded[3:6]}
    assert ids == {encoded[2]["item"]["id"]} == {encoded[6]["item"]["id"]}


async def test_usage_sums_all_rounds() -> None:
    usage = {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14}
    async with engine(
        script([call("cats"), {"usage": usage}], [{"text": "Done."}, {"usage": usage}]), RecordingTool()
    ) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (20, 8, 28)


async def test_output_token_limit_spans_all_rounds() -> None:
    usage = {"input_tokens": 10, "output_tokens": 20, "total_tokens": 30}
    answers = script([call("cats"), {"usage": usage}], [call("dogs"), {"usage": usage}], "Never.")
    async with engine(answers, RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], max_output_tokens=40)
        limits = [turn.request.max_output_tokens for turn in harness.turns]
    assert limits == [40, 20]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_answer_cut_off_in_a_call_runs_nothing() -> None:
    tool = RecordingTool()
    async with engine(script([call("cats"), {"finish": "length"}]), tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert tool.effects == []
    assert response.status == "incomplete"
    assert show(response.output) == [{"type": "file_search_call", "queries": [], "status": "incomplete"}]


async def test_calls_beyond_max_tool_calls_are_not_run_but_answered() -> None:
    tool = RecordingTool()
    answers = script([call("cats"), call("dogs", call_id="call_2")], "Only cats.")
    async with engine(answers, tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], max_tool_calls=1)
        last = harness.turns[-1]
    assert tool.effects == ["cats"]
    assert show(response.output) == [found("cats"), text("Only cats.")]
    assert response.status == "completed"
    assert last.items[-1].output == (
        "The call was not carried out: the limit of 1 tool calls is reached. Answer now, without it."
    )


async def test_model_that_never_stops_calling_ends_at_the_limit() -> None:
    tool = RecordingTool()
    async with engine(script([call("again")]), tool, max_hosted_calls=3) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
        rounds = len(harness.turns)
    assert tool.effects == ["again"] * 3
    assert response.status == "completed"
    assert rounds == 6


async def test_function_call_ends_the_response_after_the_hosted_call() -> None:
    tool = RecordingTool()
    weather = {"tool_call": {"name": "get_weather", "arguments": {}, "call_id": "call_w", "key": "w"}}
    answers = {
        "native_tools": ["function"],
        "rules": [
            {"last_item": "function_call_output", "answers": ["Sunny, and cats."]},
            {"answers": [[weather, call("cats")]]},
        ],
    }
    async with engine(answers, tool) as harness:
        response = await harness.answer("hi", tools=[FILE_SEARCH, WEATHER])
        output = {"type": "function_call_output", "call_id": "call_w", "output": "sunny"}
        final = await harness.answer([output], tools=[FILE_SEARCH, WEATHER], previous_response_id=response.id)
        items = harness.turns[-1].items
    assert [item.type for item in response.output] == ["function_call", "file_search_call"]
    assert tool.effects == ["cats"]
    assert final.output_text == "Sunny, and cats."
    assert [item.type for item in items] == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
    ]


@pytest.mark.parametrize(
    ("choice", "translated"),
    [
        ("required", "required"),
        ({"type": "file_search"}, {"type": "function", "name": "file_search"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]},
            "required",
        ),
    ],
)
async def test_forced_call_is_forced_in_the_first_round_only(choice: Any, translated: Any) -> None:
    async with engine(script([call("cats")], "Done."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, WEATHER], tool_choice=choice)
        first, second = harness.turns
    assert response.status == "completed"
    sent = first.request.tool_choice
    assert (sent if isinstance(sent, str) else json.loads(codec.encode(sent))) == translated
    assert second.request.tool_choice in (None, "auto")


async def test_failing_tool_becomes_a_failed_item_and_the_model_goes_on() -> None:
    async with engine(script([call("explode")], "It failed."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    results = [{"file_id": "file-1", "score": 0.5, "text": "The tool failed unexpectedly. See the server's log."}]
    failed = {"type": "file_search_call", "queries": [], "status": "failed", "results": results}
    assert show(response.output) == [failed, text("It failed.")]


async def test_invalid_arguments_become_a_failed_item() -> None:
    broken = {"tool_call": {"name": "file_search", "arguments": "{not json"}}
    async with engine(script([broken], "Sorry."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert [(item.type, item.status) for item in response.output] == [
        ("file_search_call", "failed"),
        ("message", "completed"),
    ]


async def test_error_of_open_is_raised_before_the_stream_begins() -> None:
    tool = RecordingTool()
    async with engine(script("Never."), tool) as harness:
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask(tools=[{"type": "file_search", "vector_store_ids": ["vs_unknown"]}], stream=True)
        assert harness.turns == []
    assert caught.value.param == "tools[0].vector_store_ids[0]"


async def test_error_of_the_first_model_call_closes_the_session() -> None:
    tool = RecordingTool()
    async with engine(script([{"raise": {"message": "no", "status": 400}}]), tool) as harness:
        with pytest.raises(AntiphonError, match="no"):
            await harness.answer(tools=[FILE_SEARCH])
    assert tool.closed == 1


async def test_type_without_hosted_tool_is_refused() -> None:
    async with engine(script("Hello.")) as harness:
        with pytest.raises(UnsupportedTool) as caught:
            await harness.ask(tools=[FILE_SEARCH])
    assert caught.value.param == "tools[0]"


async def test_unavailable_tool_is_refused_with_its_reason() -> None:
    tools = HostedTools((), {"file_search": "Install it with: pip install 'antiphon[search]'."})
    harness = HostedHarness(script("Hello."), tools)
    await harness.engine.start()
    with pytest.raises(UnsupportedTool, match="pip install 'antiphon"):
        await harness.ask(tools=[FILE_SEARCH])
    await harness.engine.close()


async def test_backend_with_its_own_tools_gets_them_unless_local() -> None:
    tool = RecordingTool()
    native = {"rules": [{"answers": ["Mine."]}]}
    async with engine(native, tool) as harness:
        await harness.answer(tools=[FILE_SEARCH])
        assert [each.type for each in harness.turns[0].request.tools] == ["file_search"]
    assert tool.opened == []
    async with engine({"rules": [{"answers": [[call("cats")], "Ours."]}]}, tool, run_hosted_locally=True) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
        assert [item.type for item in harness.turns[1].items] == ["message", "function_call", "function_call_output"]
    assert show(response.output) == [found("cats"), text("Ours.")]


async def test_cancel_during_a_hosted_call_stops_it() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with engine(script([call("cats")], "Never."), tool) as harness:
        run = await harness.ask(tools=[FILE_SEARCH])
        drained = asyncio.create_task(run.drain())
        await tool.reached.wait()
        await run.cancel_and_wait()
        response = await drained
    assert (response.status, tool.effects, tool.closed) == ("cancelled", [], 1)
    assert show(response.output) == [{"type": "file_search_call", "queries": [], "status": "incomplete"}]


async def test_closing_the_stream_during_a_hosted_call_stops_it() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with engine(script([call("cats")], "Never."), tool) as harness:
        run = await harness.ask(tools=[FILE_SEARCH], stream=True)
        reader = asyncio.create_task(_read_all(run.events()))
        await tool.reached.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stored = await harness.engine.retrieve("default", run.response.id)
    assert (stored.status, tool.effects, tool.closed) == ("cancelled", [], 1)


async def _read_all(events: Any) -> None:
    async for _ in events:
        pass


async def test_clashing_function_name_gets_the_label_as_prefix() -> None:
    own = WEATHER | {"name": "file_search"}
    async with engine(script([call("cats", name="hosted__file_search")], "Done."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, own])
        assert [tool.name for tool in harness.turns[0].request.tools] == ["file_search", "hosted__file_search"]
    assert show(response.output) == [found("cats"), text("Done.")]


async def test_third_party_item_reaches_client_and_model() -> None:
    tool = RecordingTool("record")
    async with engine(script([call("cats", name="record")], "Done."), tool) as harness:
        run = await harness.ask(tools=[{"type": "record"}])
        response = await run.drain()
        items = harness.turns[-1].items
    assert show(response.output) == [
        {"type": "record_call", "status": "completed", "queries": ["cats"], "texts": ["Text about cats."]},
        text("Done."),
    ]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert json.loads(items[-1].output)["texts"] == ["Text about cats."]


async def test_answer_limits_count_all_rounds() -> None:
    limits = AnswerLimits(max_answer_items=4)
    async with engine(script([call("again")]), RecordingTool(), answer_limits=limits) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "answer_too_large"


async def test_conversation_gets_hosted_items_and_continues_with_them() -> None:
    async with engine(script([call("cats")], "Done.", "Again."), RecordingTool()) as harness:
        conversation = await harness.engine.conversations.create("default", items=[], metadata=None)
        await harness.answer(tools=[FILE_SEARCH], conversation=conversation.id)
        final = await harness.answer("more", tools=[FILE_SEARCH], conversation=conversation.id)
        items = harness.turns[-1].items
    assert final.output_text == "Again."
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message", "message"]
    assert items[1].name == "file_search"


class NotesTool(HostedTool):
    """An MCP server in the process, with two functions."""

    types = frozenset({"mcp"})

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        assert isinstance(tool, McpTool)
        return NotesSession(tool.server_label)


class NotesSession(HostedSession):
    functions = tuple(
        HostedFunction(name=name, description=description, parameters={"type": "object", "properties": {}})
        for name, description in (("read_note", "Read one note."), ("send_mail", "Send a letter to somebody."))
    )

    def __init__(self, label: str) -> None:
        self.label = label

    def begin(self, name: str, key: str) -> HostedCall:
        return NotesCall(self.label, name, key)


class NotesCall(HostedCall):
    def __init__(self, label: str, name: str, key: str) -> None:
        self._item = McpCall("", "{}", name, label, output=f"{name} done", status="completed")
        self._key = key

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        started = msgspec.structs.replace(self._item, output=None, status="in_progress")
        yield [OpenItem(self._key, started, "mcp"), CloseItem(self._key, self._item)]


async def test_tool_search_loads_deferred_mcp_tools() -> None:
    mcp = {"type": "mcp", "server_label": "notes", "defer_loading": True, "server_description": "The notes."}
    search = {"tool_call": {"name": "tool_search", "arguments": {"query": "letter"}}}
    answers = script(
        [search], [{"tool_call": {"name": "notes__send_mail", "arguments": {}, "call_id": "call_m"}}], "Sent."
    )
    async with engine(answers, NotesTool()) as harness:
        response = await harness.answer(tools=[{"type": "tool_search"}, mcp])
        first, second, third = harness.turns
    assert [item.type for item in response.output] == ["tool_search_call", "tool_search_output", "mcp_call", "message"]
    searched, loaded, called = json.loads(codec.encode(response.output[:3]))
    assert (searched["call_id"], searched["execution"], loaded["call_id"]) == (None, "server", None)
    assert [(each["type"], each["name"], [tool["name"] for tool in each["tools"]]) for each in loaded["tools"]] == [
        ("namespace", "notes", ["send_mail"])
    ]
    assert (called["server_label"], called["name"], called["output"]) == ("notes", "send_mail", "send_mail done")
    assert [tool.name for tool in first.request.tools] == ["tool_search"]
    assert [tool.name for tool in second.request.tools] == ["tool_search", "notes__send_mail"]
    assert [(item.type, getattr(item, "name", None)) for item in third.items[-2:]] == [
        ("function_call", "notes__send_mail"),
        ("function_call_output", None),
    ]


async def test_two_servers_with_one_tool_name_get_their_labels_as_prefix() -> None:
    servers = [{"type": "mcp", "server_label": label} for label in ("a", "b")]
    answers = script([{"tool_call": {"name": "b__read_note", "arguments": {}}}], "Read.")
    async with engine(answers, NotesTool()) as harness:
        response = await harness.answer(tools=servers)
        names = [tool.name for tool in harness.turns[0].request.tools]
        await harness.answer("more", tools=servers[1:], previous_response_id=response.id)
        continued = harness.turns[-1].items
    assert names == ["a__read_note", "a__send_mail", "b__read_note", "b__send_mail"]
    assert (response.output[0].server_label, response.output[0].name) == ("b", "read_note")
    assert continued[1].name == "read_note"


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ({"type": "mcp", "server_label": "b"}, ["b__read_note", "b__send_mail"]),
        ({"type": "mcp", "server_label": "b", "name": "read_note"}, ["b__read_note"]),
    ],
)
async def test_choice_of_an_mcp_server_allows_its_functions(choice: dict[str, Any], allowed: list[str]) -> None:
    servers = [{"type": "mcp", "server_label": label} for label in ("a", "b")]
    denied = {"tool_call": {"name": "a__read_note", "arguments": {}, "key": 1}}
    wanted = {"tool_call": {"name": "b__read_note", "arguments": {}, "key": 2}}
    async with engine(script([denied, wanted], "Read."), NotesTool()) as harness:
        response = await harness.answer(tools=servers, tool_choice=choice)
    assert [getattr(item, "server_label", None) for item in response.output] == ["b", None]
    assert {tool.name for tool in harness.turns[0].request.tools} >= set(allowed)


async def test_choice_of_an_absent_mcp_server_is_refused() -> None:
    async with engine(script("Never."), NotesTool()) as harness:
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask(
                tools=[{"type": "mcp", "server_label": "a"}], tool_choice={"type": "mcp", "server_label": "b"}
            )
    assert caught.value.param == "tool_choice.server_label"
