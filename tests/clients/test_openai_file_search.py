"""The hosted tool file_search, and files as input, with the OpenAI SDK against a real server."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("onnxruntime")

from antiphon.protocol import codec
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.file_search.tool import create
from antiphon.tools.hosted.registry import HostedTools
from support.live_server import LiveServer, make_settings
from support.recording_backend import RecordingBackend

RIVERS = "The Danube flows through Vienna and Budapest into the Black Sea."
SEARCH = {"tool_call": {"name": "file_search", "arguments": {"queries": ["river in Vienna"]}}}
SCRIPT = {
    "models": ["scripted"],
    "native_tools": ["function"],
    "rules": [
        {
            "user": "river",
            "last_item": "function_call_output",
            "answers": [[{"text": ["It is the Dan", "ube【", "1】【7】", "."]}]],
        },
        {"user": "river", "answers": [[SEARCH]]},
        {"user": "again", "answers": ["As I said: the Danube【1】."]},
        {"user": "twice", "answers": [[SEARCH], [SEARCH], "Found【2】."]},
    ],
}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = make_settings()
    tools = HostedTools([create(HostedSetup(settings=settings))])
    running = LiveServer(SCRIPT, settings, backend=RecordingBackend(SCRIPT), hosted_tools=tools)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    return server.client()


@pytest.fixture(scope="module")
def store(client: Any) -> Any:
    made = client.vector_stores.create(name="facts")
    made.file = client.vector_stores.files.upload_and_poll(
        vector_store_id=made.id, file=("rivers.txt", RIVERS.encode()), attributes={"topic": "geography"}
    )
    return made


def make_tool(store: Any, **options: Any) -> Any:
    return {"type": "file_search", "vector_store_ids": [store.id], **options}


def read_last_turn(server: LiveServer) -> list[Any]:
    items: list[Any] = json.loads(codec.encode(server.backend.turns[-1].items))  # type: ignore[attr-defined]
    return items


def test_answer_has_the_search_and_cites_the_file(client: Any, store: Any, server: LiveServer) -> None:
    answer = client.responses.create(model="scripted", input="Which river?", tools=[make_tool(store)])
    search, message = answer.output
    assert (search.type, search.status, search.queries) == ("file_search_call", "completed", ["river in Vienna"])
    assert search.results is None
    assert answer.output_text == "It is the Danube."
    assert [each.to_dict() for each in message.content[0].annotations] == [
        {"type": "file_citation", "file_id": store.file.id, "filename": "rivers.txt", "index": 16}
    ]
    assert read_last_turn(server)[-1]["output"].startswith("【1】 rivers.txt")
    assert read_last_turn(server)[-1]["output"].endswith(RIVERS)


def test_stream_has_the_events_in_order(client: Any, store: Any) -> None:
    include = ["file_search_call.results"]
    with client.responses.stream(
        model="scripted", input="Which river?", tools=[make_tool(store)], include=include
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:7] == [
        "output_item.added",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "output_item.done",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is the Danube."
    assert kinds.count("output_text.annotation.added") == 1
    found = final.output[0].results[0]
    assert (found.file_id, found.text, found.attributes) == (store.file.id, RIVERS, {"topic": "geography"})
    assert final.tools[0].max_num_results == 20


def test_later_response_can_cite_an_earlier_result(client: Any, store: Any) -> None:
    first = client.responses.create(model="scripted", input="Which river?", tools=[make_tool(store)])
    then = client.responses.create(
        model="scripted", input="Say it again.", previous_response_id=first.id, tools=[make_tool(store)]
    )
    assert [each.file_id for each in then.output[0].content[0].annotations] == [store.file.id]


def test_markers_count_on_over_several_searches(client: Any, store: Any) -> None:
    answer = client.responses.create(model="scripted", input="Search twice.", tools=[make_tool(store)])
    assert [item.type for item in answer.output] == ["file_search_call", "file_search_call", "message"]
    assert len(answer.output[2].content[0].annotations) == 1


def test_filter_without_a_match_finds_nothing(client: Any, store: Any) -> None:
    nothing = {"type": "eq", "key": "topic", "value": "music"}
    answer = client.responses.create(
        model="scripted",
        input="Which river?",
        tools=[make_tool(store, filters=nothing)],
        include=["file_search_call.results"],
    )
    assert (answer.output[0].status, answer.output[0].results) == ("completed", [])
    assert answer.output[1].content[0].annotations == []


def test_unknown_store_is_refused_before_the_response(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(
            model="scripted", input="river", tools=[{"type": "file_search", "vector_store_ids": ["vs_unknown"]}]
        )
    assert caught.value.param == "tools[0].vector_store_ids[0]"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_deleted_store_of_an_inherited_tool_names_the_previous_response(client: Any, *, is_streamed: bool) -> None:
    deleted = client.vector_stores.create(name="soon deleted")
    tool = {"type": "file_search", "vector_store_ids": [deleted.id]}
    first = client.responses.create(model="scripted", input="again", tools=[tool])
    client.vector_stores.delete(deleted.id)
    continued = {"model": "scripted", "input": "again", "previous_response_id": first.id}
    with pytest.raises(openai.NotFoundError, match="send 'tools' to use others, or \\[\\] for none") as caught:
        client.responses.create(**continued, stream=is_streamed)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "not_found")
    assert client.responses.create(**continued, tools=[]).status == "completed"


# Files as input


def ask_with(client: Any, *parts: Any) -> Any:
    content = [{"type": "input_text", "text": "Read this."}, *parts]
    return client.responses.create(model="scripted", input=[{"role": "user", "content": content}])


def test_file_by_id_is_inlined_and_stored_by_id(client: Any, server: LiveServer) -> None:
    file = client.files.create(file=("note.txt", b"Hello."), purpose="user_data")
    answer = ask_with(client, {"type": "input_file", "file_id": file.id})
    part = read_last_turn(server)[0]["content"][1]
    assert part == {
        "type": "input_file",
        "filename": "note.txt",
        "file_data": "data:text/plain;base64," + base64.b64encode(b"Hello.").decode(),
    }
    stored = client.responses.input_items.list(answer.id).data[0].content[1]
    assert (stored.file_id, getattr(stored, "file_data", None)) == (file.id, None)
    client.responses.create(model="scripted", input="Go on.", previous_response_id=answer.id)
    assert read_last_turn(server)[0]["content"][1] == part


def test_image_by_id_is_inlined(client: Any, server: LiveServer) -> None:
    file = client.files.create(file=("pixel.png", PIXEL), purpose="vision")
    ask_with(client, {"type": "input_image", "file_id": file.id, "detail": "low"})
    assert read_last_turn(server)[0]["content"][1] == {
        "type": "input_image",
        "detail": "low",
        "image_url": "data:image/png;base64," + base64.b64encode(PIXEL).decode(),
    }


@pytest.mark.parametrize("kind", ["input_file", "input_image"])
def test_unknown_file_id_is_refused_with_its_path(client: Any, kind: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask_with(client, {"type": kind, "file_id": "file-unknown"})
    assert caught.value.body == {
        "message": "No such File object: file-unknown",
        "type": "invalid_request_error",
        "param": "input[0].content[1].file_id",
        "code": None,
    }


def test_text_file_as_an_image_is_refused(client: Any) -> None:
    file = client.files.create(file=("note.txt", b"Hello."), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        ask_with(client, {"type": "input_image", "file_id": file.id})
    assert (caught.value.code, caught.value.param) == ("unsupported_image_media_type", "input[0].content[1].file_id")
