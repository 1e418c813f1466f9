"""Complaints A1 to A13 with a malformed stream from the upstream: clients get a valid stream without lost output."""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.responses.backend import create
from antiphon.protocol.codec import decode_event, encode
from antiphon.stream.fold import fold
from behaviour.wire import Json, of_type, read_stream, say
from support.live_server import LiveServer, make_settings
from support.upstream_server import Reply, serve, stream_of

LOOK_UP = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
REASONING = {"type": "reasoning", "id": "rs_u", "summary": [{"type": "summary_text", "text": "Think hard."}]}
TEXT = [{"type": "output_text", "text": "Hello you.", "annotations": [], "logprobs": []}]
MESSAGE = {"type": "message", "id": "msg_u", "role": "assistant", "status": "completed", "content": TEXT}
CALL = {"type": "function_call", "id": "fc_u", "call_id": "call_u", "name": "look_up", "status": "completed"}
OUTPUT: list[Json] = [REASONING, MESSAGE, CALL | {"arguments": '{"q":1}'}]
USAGE = {
    "input_tokens": 5,
    "input_tokens_details": {"cached_tokens": 2},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 8,
}


def make_item_events(index: int, begun: Json, name: str, pieces: Iterable[str], **part_index: int) -> Iterator[Json]:
    """Yield the events of an output item as a correct server sends them."""
    common = {"item_id": begun["id"], "output_index": index} | part_index
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    part = name.removesuffix("_text").replace("output", "content")
    if part_index:
        yield common | {"type": f"response.{part}_part.added", "part": {"type": name.removeprefix("reasoning_")}}
    yield from (common | {"type": f"response.{name}.delta", "delta": piece} for piece in pieces)
    yield common | {"type": f"response.{name}.done", "arguments" if not part_index else "text": "".join(pieces)}
    if part_index:
        yield common | {"type": f"response.{part}_part.done", "part": {}}
    yield {"type": "response.output_item.done", "output_index": index, "item": OUTPUT[index]}


def make_stream() -> list[Json]:
    begun = {"id": "resp_u", "object": "response", "model": "m", "status": "in_progress", "output": []}
    ended = begun | {"status": "completed", "output": OUTPUT, "usage": USAGE, "text": {"format": {"type": "text"}}}
    events = [
        {"type": "response.created", "response": begun},
        *make_item_events(
            0, REASONING | {"summary": []}, "reasoning_summary_text", ["Think ", "hard."], summary_index=0
        ),
        *make_item_events(1, MESSAGE | {"content": []}, "output_text", ["Hello ", "you."], content_index=0),
        *make_item_events(2, CALL | {"arguments": ""}, "function_call_arguments", ['{"q":', "1}"]),
        {"type": "response.completed", "response": ended},
    ]
    return copy.deepcopy([event | {"sequence_number": number} for number, event in enumerate(events)])


Mangling = Callable[[list[Json]], list[Json]]


def without(*kinds: str) -> Mangling:
    """Drop the events whose type ends with one of these."""
    return lambda events: [event for event in events if not event["type"].endswith(kinds)]


def without_the_message(events: list[Json]) -> list[Json]:
    return [event for event in events if event["type"] != "response.output_item.added" or event["output_index"] != 1]


def rename(name: Callable[[str], str]) -> Mangling:
    """Change the ids in every event and in the final response."""

    def mangle(events: list[Json]) -> list[Json]:
        for event in events:
            if "item_id" in event:
                event["item_id"] = name(event["item_id"])
            for item in [event["item"]] if "item" in event else event.get("response", {}).get("output", []):
                item["id"] = name(item["id"])
        return events

    return mangle


def change_every_id() -> Mangling:
    numbers = itertools.count()
    return rename(lambda _: f"gibberish{next(numbers)}")


def use_one_index(events: list[Json]) -> list[Json]:
    return [event | {"output_index": 0} if "output_index" in event else event for event in events]


def forget_the_reasoning(events: list[Json]) -> list[Json]:
    """Use indexes that do not count the reasoning item."""
    return [
        event | {"output_index": max(0, event["output_index"] - 1)} if "output_index" in event else event
        for event in events
    ]


def change_the_end(**fields: Any) -> Mangling:
    def mangle(events: list[Json]) -> list[Json]:
        events[-1]["response"] = {
            name: value for name, value in (events[-1]["response"] | fields).items() if value is not None
        }
        return events

    return mangle


def leave_out_numbers(events: list[Json]) -> list[Json]:
    bare = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
    mangled = change_the_end(usage=bare, text=None)(events)
    return [{name: event[name] for name in event if name != "sequence_number"} for event in mangled]


def end_with_other_ids(events: list[Json]) -> list[Json]:
    other = [item | {"id": f"final_{item['id']}"} for item in events[-1]["response"]["output"]]
    return change_the_end(output=other)(events)


MANGLED: dict[str, Mangling] = {
    "A1": without("_text.done", "content_part.done", "summary_part.done"),
    "A2": without("output_item.added", "_part.added"),
    "A3": without_the_message,
    "A4": change_every_id(),
    "A5": without("reasoning_summary_part.added"),
    "A6": use_one_index,
    "A7": leave_out_numbers,
    "A8": rename(lambda name: f"chatcmpl-{name}"),
    "A9": end_with_other_ids,
    "A10": without("output_item.done", "_text.done", "arguments.done"),
    "A11": change_the_end(id=None, output=[]),
    "A12": forget_the_reasoning,
    "A13": change_the_end(output=OUTPUT[::-1]),
}


def write(events: list[Json]) -> Reply:
    return stream_of(*(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events))


def check(events: list[Json]) -> list[Json]:
    """Check that the stream is valid and that its events agree. Return its output."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert fold([decode_event(encode(event)) for event in events]).status == "completed"
    announced = of_type(events, "response.output_item.added")
    ids = [event["item"]["id"] for event in announced]
    assert [event["output_index"] for event in announced] == list(range(len(ids)))
    for event in events:
        if "output_index" in event:
            assert (event.get("item_id") or event["item"]["id"]) == ids[event["output_index"]]
    output: list[Json] = events[-1]["response"]["output"]
    assert [event["item"] for event in of_type(events, "response.output_item.done")] == output
    assert [item["id"] for item in output] == ids
    assert [name.partition("_")[0] for name in ids] == ["rs", "msg", "fc"]
    return output


@pytest.mark.parametrize("name", MANGLED)
async def test_pain_a_1_to_a_13_malformed_upstream_stream_is_repaired(name: str) -> None:
    mangled = write(MANGLED[name](make_stream()))
    async with serve([mangled, mangled, write(make_stream())]) as upstream:
        backend = create("up", {"base_url": upstream.url, "models": ["m"], "stream_retries": 0}, Path("unused"))
        running = await asyncio.to_thread(LiveServer, {}, make_settings(), others={"up": backend})
        try:
            body = {"model": "m", "input": "hi", "tools": [LOOK_UP]}
            answer = await asyncio.to_thread(running.ask, "POST", "/v1/responses", body | {"stream": True})
            output = check(read_stream(answer.body))
            async with running.async_client() as client, client.responses.stream(**body) as read:
                final = await read.get_final_response()
            replayed = [
                say("user", "hi"),
                *output,
                {"type": "function_call_output", "call_id": "call_u", "output": "7"},
            ]
            again = await asyncio.to_thread(running.ask, "POST", "/v1/responses", body | {"input": replayed})
        finally:
            await asyncio.to_thread(running.stop)
    reasoning, message, call = output
    assert [part["text"] for part in reasoning["summary"]] == ["Think hard."]
    assert [part["text"] for part in message["content"]] == ["Hello you."]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_u", "look_up", '{"q":1}')
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (final.output_text, again.status) == ("Hello you.", 200)
