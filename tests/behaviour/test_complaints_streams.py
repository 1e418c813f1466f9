"""Complaints A1 to A15: invalid event streams."""

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.protocol.codec import decode_event, encode
from antiphon.stream.fold import fold
from behaviour.wire import ask, get, of_type, stream, text_of

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def events(server: Any) -> Events:
    """A stream with reasoning, text, two interleaved calls, a custom call and a refusal."""
    return stream(server, "everything")


def added(events: Events) -> Events:
    return of_type(events, "response.output_item.added")


def test_pain_a_1_text_ends_with_its_own_done_event(events: Events) -> None:
    """ogx-ai/ogx#5309"""
    (done,) = of_type(events, "response.output_text.done")
    assert done["text"] == "Let me look that up."


def test_pain_a_2_no_delta_comes_before_its_item(events: Events) -> None:
    """BerriAI/litellm#22102"""
    announced: set[str] = set()
    for event in events:
        if event["type"] == "response.output_item.added":
            announced.add(event["item"]["id"])
        assert event.get("item_id", event.get("item", {}).get("id")) in {None, *announced}


def test_pain_a_3_message_after_reasoning_has_an_added_event(events: Events) -> None:
    """BerriAI/litellm#41185"""
    assert [event["item"]["type"] for event in added(events)][:2] == ["reasoning", "message"]
    assert {event["item_id"] for event in of_type(events, "response.output_text.delta")} == {
        added(events)[1]["item"]["id"]
    }


def test_pain_a_4_every_event_of_an_item_has_its_id(events: Events) -> None:
    """BerriAI/litellm#30071"""
    ids = {event["output_index"]: event["item"]["id"] for event in added(events)}
    of_items = [event for event in events if "output_index" in event]
    assert all(
        event.get("item_id", event.get("item", {}).get("id")) == ids[event["output_index"]] for event in of_items
    )


def test_pain_a_5_summary_part_is_added_before_its_deltas(events: Events) -> None:
    """BerriAI/litellm#32777"""
    for index in (0, 1):
        kinds = [event["type"] for event in events if event.get("summary_index") == index]
        assert kinds[0] == "response.reasoning_summary_part.added"
        assert kinds[-1] == "response.reasoning_summary_part.done"
        assert "response.reasoning_summary_text.delta" in kinds


def test_pain_a_6_each_index_belongs_to_one_announced_item(events: Events) -> None:
    """BerriAI/litellm#36375"""
    indexes = [event["output_index"] for event in added(events)]
    assert sorted(indexes) == list(range(len(indexes)))
    announced = {event["item"]["id"] for event in added(events)}
    assert {item["id"] for item in events[-1]["response"]["output"]} == announced


def test_pain_a_7_numbers_format_and_usage_details_are_present(events: Events) -> None:
    """BerriAI/litellm#28899"""
    response = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert response["text"] == {"format": {"type": "text"}}
    assert {"input_tokens_details", "output_tokens_details"} <= set(response["usage"])


def test_pain_a_8_ids_have_the_prefixes_of_the_api(server: Any, events: Events) -> None:
    """BerriAI/litellm#37946"""
    prefixes = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_", "custom_tool_call": "ctc_"}
    output = events[-1]["response"]["output"]
    assert all(item["id"].startswith(prefixes[item["type"]]) for item in output)
    calls = [item for item in output if "call_id" in item]
    answers = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "found"} for call in calls]
    assert ask(server, [*output, *answers])["status"] == "completed"


def test_pain_a_9_streamed_ids_equal_those_of_the_final_output(server: Any, events: Events) -> None:
    """vllm-project/vllm#56285"""
    ended = sorted(of_type(events, "response.output_item.done"), key=lambda event: event["output_index"])
    done = [event["item"] for event in ended]
    assert (
        done == events[-1]["response"]["output"] == get(server, f"/responses/{events[0]['response']['id']}")["output"]
    )


def test_pain_a_10_strict_client_reads_the_stream(server: Any, events: Events) -> None:
    """vllm-project/vllm#42407"""
    assert fold([decode_event(encode(event)) for event in events]).status == "completed"
    with server.client() as client, client.responses.stream(model="scripted", input="everything") as read:
        assert [event.type for event in read][-1] == "response.completed"
        assert [item.type for item in read.get_final_response().output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "custom_tool_call",
            "message",
        ]


def test_pain_a_11_completed_event_has_id_and_output(events: Events) -> None:
    """Oaklight/llm-rosetta#56"""
    last = events[-1]
    assert (last["type"], last["response"]["id"]) == ("response.completed", events[0]["response"]["id"])
    assert last["response"]["output"]


def test_pain_a_12_indexes_include_the_reasoning_item(events: Events) -> None:
    """Oaklight/llm-rosetta#418"""
    deltas = of_type(events, "response.reasoning_text.delta") + of_type(events, "response.output_text.delta")
    assert sorted({event["output_index"] for event in deltas}) == [0, 1]


def test_pain_a_13_output_is_in_the_order_of_its_indexes(events: Events) -> None:
    """invergent-ai/surogate#175"""
    by_index = [event["item"]["id"] for event in sorted(added(events), key=lambda event: event["output_index"])]
    assert [item["id"] for item in events[-1]["response"]["output"]] == by_index


def test_pain_a_14_tokens_are_sent_as_the_model_generates_them(serve: Callable[..., Any]) -> None:
    """langflow-ai/langflow#10295"""
    running = serve({"default": [{"text": ["first"]}, {"wait": "gate"}, {"text": [" last"]}]})
    with running.client() as client:
        events = iter(client.responses.create(model="scripted", input="hi", stream=True))
        assert next(event.delta for event in events if event.type == "response.output_text.delta") == "first"
        running.do(lambda: running.backend.release("gate"))
        assert [event.delta for event in events if event.type == "response.output_text.delta"] == [" last"]


@pytest.mark.parametrize("model", ["scripted", "another"])
def test_pain_a_15_every_model_streams_its_text(server: Any, model: str) -> None:
    """sgl-project/sglang#9963"""
    events = stream(server, "hello there", model=model)
    deltas = "".join(event["delta"] for event in of_type(events, "response.output_text.delta"))
    assert deltas == text_of(events[-1]["response"]) == text_of(ask(server, "hello there", model=model))
