"""Antiphon as the upstream of Antiphon, over real sockets."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI

from antiphon.backends.responses.backend import create
from antiphon.protocol import codec
from support.live_server import LiveServer, make_settings

USAGE = {
    "input_tokens": 5,
    "output_tokens": 2,
    "total_tokens": 7,
    "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 1},
}
SEARCH = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}
CITATION = {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 1}
BROKEN = {"message": "That picture is broken.", "status": 400, "code": "invalid_image", "type": "invalid_request_error"}
WHOLE_ITEMS: list[dict[str, Any]] = [
    {"id": "fs_1", "type": "file_search_call", "status": "completed", "queries": ["q"]},
    {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": "aGk="},
    {
        "id": "ci_1",
        "type": "code_interpreter_call",
        "status": "completed",
        "container_id": "c",
        "code": "1",
        "outputs": [],
    },
    {"id": "mcp_1", "type": "mcp_call", "name": "f", "server_label": "s", "arguments": "{}", "output": "7"},
    {"id": "mcpr_1", "type": "mcp_approval_request", "name": "f", "server_label": "s", "arguments": "{}"},
    {
        "id": "cu_1",
        "type": "computer_call",
        "call_id": "c",
        "status": "completed",
        "pending_safety_checks": [],
        "action": {},
    },
    {"id": "holo_1", "type": "hologram_call", "beams": [1.5]},
]


def rule(user: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"user": user, "answers": [list(steps)]}


SCRIPT: dict[str, Any] = {
    "models": ["m", "n"],
    "rules": [
        {"text": "Private thought", "answers": ["I remember."]},
        rule("think", {"reasoning": "Private thought"}, {"text": "Hi"}),
        rule("count", {"text": "Hello there"}, {"usage": USAGE}),
        rule("tick", {"event": {"type": "acme.tick", "at": 1.5}}, {"text": "Hi"}),
        rule("refuse", {"raise": BROKEN}),
        rule(
            "break", {"text": "Half"}, {"wait": "break"}, {"failure": {"message": "It broke.", "code": "server_error"}}
        ),
        rule("cut", {"text": "Half"}, {"finish": "length"}),
        rule("hold", {"text": "Wait"}, {"wait": "gate"}, {"text": "never"}),
        rule("hang", {"text": "Wait"}, {"wait": "other gate"}, {"text": "never"}),
        rule("how many", {"text": "{history} items"}),
        rule(
            "everything",
            {"reasoning": "Hm, let me see."},
            {"summary": ["First.", "Second."]},
            {"item": SEARCH},
            {"text": "Found:"},
            {"annotation": CITATION},
            {"tool_call": {"name": "f", "arguments": ['{"x"', ":1}"], "call_id": "call_1"}},
            {"custom_tool_call": {"name": "g", "input": "free text", "call_id": "call_2"}},
            {"refusal": "No more."},
        ),
        *(rule(item["type"], {"item": item}, {"text": "Done."}) for item in WHOLE_ITEMS),
    ],
}


class Chain:
    """An inner server, outer servers that use it as upstream, and the requests that the inner one got."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.inner = LiveServer(SCRIPT, make_settings())
        self._record_requests()
        self._outer = self._start_outer()
        self._stateless = self._start_outer(state="upstream")
        self.client = self._outer.client()
        self.client_with_state_upstream = self._stateless.client()

    def _record_requests(self) -> None:
        engine = self.inner.engine
        create_response = engine.create

        async def record(request: Any, **others: Any) -> Any:
            self.requests.append(json.loads(codec.encode(request)))
            return await create_response(request, **others)

        engine.create = record  # type: ignore[method-assign]

    def _start_outer(self, **options: Any) -> LiveServer:
        address = {"base_url": f"{self.inner.url}/v1", "request_retries": 0, "stream_retries": 0}
        backend: Any = create("inner", address | options, Path("unused"))
        return LiveServer({}, make_settings(), backend=backend)

    def stop(self) -> None:
        self.client.close()
        self.client_with_state_upstream.close()
        for server in (self._stateless, self._outer, self.inner):
            server.stop()


@pytest.fixture(scope="module")
def shared_chain() -> Iterator[Chain]:
    chain = Chain()
    yield chain
    chain.stop()


@pytest.fixture
def chain(shared_chain: Chain) -> Chain:
    shared_chain.requests.clear()
    return shared_chain


@pytest.fixture
def client(chain: Chain) -> OpenAI:
    return chain.client


def test_models_of_the_upstream_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m", "n"]


def test_text_and_usage_are_forwarded(client: OpenAI) -> None:
    response = client.responses.create(model="m", input="count")
    assert (response.status, response.output_text) == ("completed", "Hello there")
    assert response.usage is not None
    assert response.usage.to_dict() == USAGE


def test_local_state_sends_the_whole_context(chain: Chain) -> None:
    first = chain.client.responses.create(model="m", input="how many?")
    second = chain.client.responses.create(model="m", input="how many now?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("1 items", "3 items")
    assert [("previous_response_id" in request, request["store"]) for request in chain.requests] == [(False, False)] * 2


def test_official_stream_helper_reads_every_item_type(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {}, "strict": False}, {"type": "custom", "name": "g"}]
    with client.responses.stream(model="m", input="everything", tools=tools) as stream:
        events = [event.type for event in stream]
        response = stream.get_final_response()
    assert events[-1] == "response.completed"
    thought, search, message, call, custom, refusal = (item.to_dict() for item in response.output)
    assert thought["summary"] == [{"type": "summary_text", "text": text} for text in ("First.", "Second.")]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, let me see."}]
    assert search == SEARCH | {"id": search["id"]}
    assert [(part["text"], part["annotations"]) for part in message["content"]] == [("Found:", [CITATION])]  # type: ignore[attr-defined]
    assert (call["type"], call["call_id"], call["arguments"]) == ("function_call", "call_1", '{"x":1}')
    assert (custom["type"], custom["call_id"], custom["input"]) == ("custom_tool_call", "call_2", "free text")
    assert refusal["content"] == [{"type": "refusal", "refusal": "No more."}]


def test_sealed_reasoning_returns_to_its_model(client: OpenAI) -> None:
    parameters: Any = {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    }
    first = client.responses.create(input="think", **parameters)
    history: Any = [{"role": "user", "content": "think"}, *[item.to_dict() for item in first.output]]
    assert history[1].pop("content") == [{"type": "reasoning_text", "text": "Private thought"}]
    second = client.responses.create(input=[*history, {"role": "user", "content": "go on"}], **parameters)
    assert second.output_text == "I remember."


@pytest.mark.usefixtures("unchecked_wire")
@pytest.mark.parametrize("item", WHOLE_ITEMS, ids=lambda item: item["type"])
def test_whole_item_is_forwarded_with_new_id(client: OpenAI, item: dict[str, Any]) -> None:
    whole, message = (each.to_dict() for each in client.responses.create(model="m", input=item["type"]).output)
    assert str(whole["id"]).startswith(item["id"].partition("_")[0] + "_")
    assert whole["id"] != item["id"]
    assert whole | {"id": item["id"]} == whole | item
    assert message["type"] == "message"


def test_unknown_event_is_forwarded(client: OpenAI) -> None:
    with client.responses.create(model="m", input="tick", stream=True) as stream:
        events = [event.to_dict() for event in stream]
    assert [event for event in events if event["type"] == "acme.tick"] == [
        {"type": "acme.tick", "at": 1.5, "sequence_number": 2}
    ]


@pytest.mark.usefixtures("unchecked_wire")
def test_hosted_tools_and_parameters_are_forwarded(chain: Chain) -> None:
    tools: Any = [
        {"type": "web_search"},
        {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "custom", "name": "h"}]},
        {"type": "shell"},
        {"type": "acme", "power": 1.5},
    ]
    parameters: Any = {
        "tool_choice": "required",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
    }
    chain.client.responses.create(model="m", input="hi", tools=tools, **parameters)
    [request] = chain.requests
    assert request == request | parameters | {"tools": tools}


def test_upstream_rejection_keeps_status_and_message(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="m", input="refuse")
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_image")
    assert "That picture is broken." in caught.value.message


def test_g_68_failure_midway_ends_the_response(chain: Chain) -> None:
    events: list[Any] = []
    with (
        chain.client.responses.create(model="m", input="break", stream=True) as stream,
        pytest.raises(APIError) as caught,
    ):
        for event in stream:
            events.append(event.type)
            if event.type == "response.output_text.delta":
                chain.inner.do(lambda: chain.inner.backend.release("break"))
    assert events[-1] == "response.output_item.done"
    assert caught.value.message == "The upstream failed: It broke."


def test_answer_cut_at_max_tokens_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="m", input="cut")
    assert (response.status, response.output_text) == ("incomplete", "Half")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_g_67_client_disconnect_stops_the_upstream_model(chain: Chain) -> None:
    model = chain.inner.backend
    model.cancellation.clear()
    with chain.client.responses.create(model="m", input="hold", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    chain.inner.wait_for(model.cancellation.wait)


def test_background_cancel_stops_the_upstream_model(chain: Chain) -> None:
    model = chain.inner.backend
    model.cancellation.clear()
    response = chain.client.responses.create(model="m", input="hang", background=True)
    chain.inner.wait_for(lambda: model.reached("other gate"))
    assert chain.client.responses.cancel(response.id).status == "cancelled"
    chain.inner.wait_for(model.cancellation.wait)


def test_tokens_are_counted_by_the_upstream(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="m", input="one two three", instructions="four five")
    assert counted.input_tokens == 5


def test_upstream_state_sends_only_new_items(chain: Chain) -> None:
    respond = chain.client_with_state_upstream.responses.create
    first = respond(model="m", input="how many?")
    second = respond(model="m", input="how many now?", previous_response_id=first.id)
    third = respond(model="m", input="how many in the end?", previous_response_id=second.id)
    branch = respond(model="m", input="how many else?", previous_response_id=first.id)
    texts = [each.output_text for each in (first, second, third, branch)]
    assert texts == ["1 items", "3 items", "5 items", "3 items"]
    assert [len(request["input"]) for request in chain.requests] == [1, 1, 1, 1]
    names = [request.get("previous_response_id") for request in chain.requests]
    assert names[0] is None
    assert names[1] == names[3]
    assert first.id not in names


def test_lost_upstream_state_is_sent_whole_again(chain: Chain) -> None:
    client = chain.client_with_state_upstream
    first = client.responses.create(model="m", input="how many are lost?")
    [stored] = chain.requests
    second = client.responses.create(model="m", input="how many so far?", previous_response_id=first.id)
    with chain.inner.client() as inner:
        inner.responses.delete(chain.requests[1]["previous_response_id"])
    again = client.responses.create(model="m", input="how many again?", previous_response_id=first.id)
    assert (stored["store"], second.output_text, again.output_text) == (True, "3 items", "3 items")
    assert [len(request["input"]) for request in chain.requests] == [1, 1, 1, 3]


def test_concurrent_turns_stay_separate(client: OpenAI) -> None:
    outputs: dict[int, str] = {}

    def respond(number: int) -> None:
        outputs[number] = client.responses.create(model="m", input=f"number {number}").output_text

    threads = [threading.Thread(target=respond, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"You said: number {number}" for number in range(8)}
