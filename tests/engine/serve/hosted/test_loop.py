"""The loop of hosted tools, with a real engine, the scripted model and a tool that records its effects."""

import asyncio
import json
from typing import Any

import pytest

from antiphon.errors import AntiphonError, InvalidRequest, NotFound, UnsupportedTool
from antiphon.protocol import codec
from antiphon.protocol.prompt import PromptDefinition
from antiphon.stream.limits import AnswerLimits
from antiphon.tools.hosted.registry import HostedTools
from support.hosted_harness import (
    FILE_SEARCH,
    WEATHER,
    HostedHarness,
    make_call,
    make_script,
    make_search,
    make_text,
    run_engine,
    show_items,
)
from support.hosted_tool import RecordingTool


async def test_response_runs_hosted_calls_between_model_calls() -> None:
    tool = RecordingTool()
    async with run_engine(
        make_script([make_call("cats")], [make_call("dogs", call_id="call_2")], "Both."), tool
    ) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.status == "completed"
    assert show_items(response.output) == [make_search("cats"), make_search("dogs"), make_text("Both.")]
    assert tool.effects == ["cats", "dogs"]
    assert tool.closed == 1


async def test_model_reads_hosted_calls_as_function_calls() -> None:
    answers = make_script([{"reasoning": "Look."}, {"text": "Wait."}, make_call("cats")], "Done.")
    async with run_engine(answers, RecordingTool()) as harness:
        await harness.answer("find cats", tools=[FILE_SEARCH], instructions="Be brief.")
        first, second = harness.turns
    assert [tool.name for tool in first.request.tools] == ["file_search"]
    assert first.request.instructions == "Be brief."
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
    assert output == {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": "【1】 a.txt\nText about cats.",
        "status": "completed",
    }


async def test_stream_has_one_lifecycle_over_all_rounds() -> None:
    async with run_engine(make_script([make_call("cats")], "Done."), RecordingTool()) as harness:
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


async def test_stream_and_plain_response_have_the_same_items() -> None:
    shown = []
    for stream in (True, False):
        async with run_engine(make_script([make_call("cats")], "Done."), RecordingTool()) as harness:
            shown.append(show_items((await harness.answer(tools=[FILE_SEARCH], stream=stream)).output))
    assert shown[0] == shown[1] == [make_search("cats"), make_text("Done.")]


async def test_usage_sums_all_rounds() -> None:
    usage = {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14}
    async with run_engine(
        make_script([make_call("cats"), {"usage": usage}], [{"text": "Done."}, {"usage": usage}]), RecordingTool()
    ) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (20, 8, 28)


async def test_output_token_limit_spans_all_rounds() -> None:
    usage = {"input_tokens": 10, "output_tokens": 20, "total_tokens": 30}
    answers = make_script([make_call("cats"), {"usage": usage}], [make_call("dogs"), {"usage": usage}], "Never.")
    async with run_engine(answers, RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], max_output_tokens=40)
        limits = [turn.request.max_output_tokens for turn in harness.turns]
    assert limits == [40, 20]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_answer_cut_off_in_a_call_runs_nothing() -> None:
    tool = RecordingTool()
    async with run_engine(make_script([make_call("cats"), {"finish": "length"}]), tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert tool.effects == []
    assert response.status == "incomplete"
    assert show_items(response.output) == [
        {"type": "file_search_call", "queries": [], "status": "incomplete", "results": None}
    ]


async def test_calls_beyond_max_tool_calls_are_not_run_but_answered() -> None:
    tool = RecordingTool()
    answers = make_script([make_call("cats"), make_call("dogs", call_id="call_2")], "Only cats.")
    async with run_engine(answers, tool) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], max_tool_calls=1)
        last = harness.turns[-1]
    assert tool.effects == ["cats"]
    assert show_items(response.output) == [make_search("cats"), make_text("Only cats.")]
    assert response.status == "completed"
    assert last.items[-1].output == (
        "The call was not carried out: the limit of 1 tool calls is reached. Answer now, without it."
    )


async def test_model_reads_parallel_calls_before_their_outputs() -> None:
    calls = [make_call(query, call_id=query) for query in ("cats", "dogs", "birds")]
    async with run_engine(make_script(calls, [make_call("fish", call_id="fish")], "Done."), RecordingTool()) as harness:
        await harness.answer(tools=[FILE_SEARCH], max_tool_calls=2)
        last = harness.turns[-1]
    called, answered = "function_call", "function_call_output"
    assert [(item.type, item.call_id) for item in last.items[1:]] == [
        *((called, query) for query in ("cats", "dogs", "birds")),
        *((answered, query) for query in ("cats", "dogs", "birds")),
        *((called, "fish"), (answered, "fish")),
    ]


async def test_hosted_calls_of_the_upstream_have_different_call_ids() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}, "status": "completed"}
    rounds = [[{"item": search}, make_call(query, call_id=query)] for query in ("cats", "dogs")]
    history = [search | {"id": "ws_0"}, {"role": "user", "content": "And now?"}]
    async with run_engine(make_script(*rounds, "Done."), RecordingTool()) as harness:
        await harness.answer(history, tools=[FILE_SEARCH])
        last = harness.turns[-1]
    call_ids = ["call_hosted_1", "call_hosted_2", "cats", "call_hosted_3", "dogs"]
    assert [item.call_id for item in last.items if item.type == "function_call"] == call_ids
    assert [item.call_id for item in last.items if item.type == "function_call_output"] == call_ids


async def test_model_that_never_stops_calling_ends_at_the_limit() -> None:
    tool = RecordingTool()
    async with run_engine(make_script([make_call("again")]), tool, max_hosted_calls=3) as harness:
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
            {"answers": [[weather, make_call("cats")]]},
        ],
    }
    async with run_engine(answers, tool) as harness:
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
    async with run_engine(make_script([make_call("cats")], "Done."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, WEATHER], tool_choice=choice)
        first, second = harness.turns
    assert response.status == "completed"
    sent = first.request.tool_choice
    assert (sent if isinstance(sent, str) else json.loads(codec.encode(sent))) == translated
    assert second.request.tool_choice in (None, "auto")


async def test_failing_tool_becomes_a_failed_item_and_the_model_goes_on() -> None:
    async with run_engine(make_script([make_call("explode")], "It failed."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    results = [
        {
            "file_id": "file-1",
            "filename": "a.txt",
            "score": 0.5,
            "text": "The tool failed unexpectedly. See the server's log.",
        }
    ]
    failed = {"type": "file_search_call", "queries": [], "status": "failed", "results": results}
    assert show_items(response.output) == [failed, make_text("It failed.")]


async def test_invalid_arguments_become_a_failed_item() -> None:
    broken = {"tool_call": {"name": "file_search", "arguments": "{not json"}}
    async with run_engine(make_script([broken], "Sorry."), RecordingTool()) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert [(item.type, item.status) for item in response.output] == [
        ("file_search_call", "failed"),
        ("message", "completed"),
    ]


async def test_error_of_open_is_raised_before_the_stream_begins() -> None:
    tool = RecordingTool()
    async with run_engine(make_script("Never."), tool) as harness:
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask(tools=[{"type": "file_search", "vector_store_ids": ["vs_unknown"]}], stream=True)
        assert harness.turns == []
    assert caught.value.param == "tools[0].vector_store_ids[0]"


async def test_error_of_an_inherited_tool_names_the_previous_response(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = RecordingTool()
    async with run_engine(make_script("Hello.", "Hello."), tool) as harness:
        first = await harness.answer(tools=[FILE_SEARCH])

        async def refuse(*_: Any) -> Any:
            raise NotFound("Vector store with id 'vs_1' not found.", param="tools[0].vector_store_ids[0]")

        monkeypatch.setattr(tool, "open", refuse)
        with pytest.raises(NotFound) as caught:
            await harness.ask(previous_response_id=first.id)
        assert (await harness.answer(previous_response_id=first.id, tools=[])).output_text == "Hello."
    remedy = "The tool is inherited from the previous response: send 'tools' to use others, or [] for none."
    message = f"Vector store with id 'vs_1' not found. {remedy}"
    assert (caught.value.param, caught.value.message) == ("previous_response_id", message)


async def test_error_of_a_tool_of_the_prompt_does_not_name_the_previous_response() -> None:
    template = {"tools": [{"type": "file_search", "vector_store_ids": ["vs_unknown"]}]}
    async with run_engine(make_script("Hello."), RecordingTool()) as harness:
        prompt = await harness.engine.prompts.define("default", PromptDefinition(template=template))
        first = await harness.answer()
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask(previous_response_id=first.id, prompt={"id": prompt.id})
    assert caught.value.param == "tools[0].vector_store_ids[0]"
    assert "inherited" not in caught.value.message


@pytest.mark.parametrize("inherit_tools", [False, True])
async def test_error_of_a_missing_tool_does_not_name_the_previous_response(*, inherit_tools: bool) -> None:
    requested = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "m", "name": "pay", "arguments": "{}"}
    approved = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    async with run_engine(make_script("Hello."), RecordingTool(), inherit_tools=inherit_tools) as harness:
        first = await harness.answer([requested, {"role": "user", "content": "hi"}], tools=[FILE_SEARCH])
        with pytest.raises(InvalidRequest) as caught:
            await harness.ask([approved], previous_response_id=first.id)
    message = "There is no MCP server labelled 'm' in 'tools', which the approved call needs."
    assert (caught.value.param, caught.value.message) == ("tools", message)


async def test_error_of_the_first_model_call_closes_the_session() -> None:
    tool = RecordingTool()
    async with run_engine(make_script([{"raise": {"message": "no", "status": 400}}]), tool) as harness:
        with pytest.raises(AntiphonError, match="no"):
            await harness.answer(tools=[FILE_SEARCH])
    assert tool.closed == 1


async def test_type_without_hosted_tool_is_refused() -> None:
    async with run_engine(make_script("Hello.")) as harness:
        with pytest.raises(UnsupportedTool) as caught:
            await harness.ask(tools=[FILE_SEARCH])
    assert caught.value.param == "tools[0]"


async def test_unavailable_tool_is_refused_with_its_reason() -> None:
    tools = HostedTools((), {"file_search": "Install it with: pip install 'antiphon[search]'."})
    harness = HostedHarness(make_script("Hello."), tools)
    await harness.engine.start()
    with pytest.raises(UnsupportedTool, match="pip install 'antiphon"):
        await harness.ask(tools=[FILE_SEARCH])
    await harness.engine.close()


async def test_backend_with_its_own_tools_gets_them_unless_local() -> None:
    tool = RecordingTool()
    native = {"rules": [{"answers": ["Mine."]}]}
    async with run_engine(native, tool) as harness:
        await harness.answer(tools=[FILE_SEARCH])
        assert [each.type for each in harness.turns[0].request.tools] == ["file_search"]
    assert tool.opened == []
    async with run_engine(
        {"rules": [{"answers": [[make_call("cats")], "Ours."]}]}, tool, run_hosted_locally=True
    ) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
        assert [item.type for item in harness.turns[1].items] == ["message", "function_call", "function_call_output"]
    assert show_items(response.output) == [make_search("cats"), make_text("Ours.")]


async def test_cancel_during_a_hosted_call_stops_it() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with run_engine(make_script([make_call("cats")], "Never."), tool) as harness:
        run = await harness.ask(tools=[FILE_SEARCH])
        drained = asyncio.create_task(run.drain())
        await tool.reached.wait()
        await run.cancel_and_wait()
        response = await drained
    assert (response.status, tool.effects, tool.closed) == ("cancelled", [], 1)
    assert show_items(response.output) == [
        {"type": "file_search_call", "queries": [], "status": "incomplete", "results": None}
    ]


async def test_closing_the_stream_during_a_hosted_call_stops_it() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with run_engine(make_script([make_call("cats")], "Never."), tool) as harness:
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
    async with run_engine(
        make_script([make_call("cats", name="hosted__file_search")], "Done."), RecordingTool()
    ) as harness:
        response = await harness.answer(tools=[FILE_SEARCH, own])
        assert [tool.name for tool in harness.turns[0].request.tools] == ["file_search", "hosted__file_search"]
    assert show_items(response.output) == [make_search("cats"), make_text("Done.")]


async def test_third_party_item_reaches_client_and_model() -> None:
    tool = RecordingTool("record")
    async with run_engine(make_script([make_call("cats", name="record")], "Done."), tool) as harness:
        run = await harness.ask(tools=[{"type": "record"}])
        response = await run.drain()
        items = harness.turns[-1].items
    assert show_items(response.output) == [
        {"type": "record_call", "status": "completed", "queries": ["cats"], "texts": ["Text about cats."]},
        make_text("Done."),
    ]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert json.loads(items[-1].output)["texts"] == ["Text about cats."]


async def test_answer_limits_count_all_rounds() -> None:
    limits = AnswerLimits(max_answer_items=4)
    async with run_engine(make_script([make_call("again")]), RecordingTool(), answer_limits=limits) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "answer_too_large"


async def test_conversation_gets_hosted_items_and_continues_with_them() -> None:
    async with run_engine(make_script([make_call("cats")], "Done.", "Again."), RecordingTool()) as harness:
        conversation = await harness.engine.conversations.create("default", items=[], metadata=None)
        await harness.answer(tools=[FILE_SEARCH], conversation=conversation.id)
        final = await harness.answer("more", tools=[FILE_SEARCH], conversation=conversation.id)
        items = harness.turns[-1].items
    assert final.output_text == "Again."
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message", "message"]
    assert items[1].name == "file_search"
