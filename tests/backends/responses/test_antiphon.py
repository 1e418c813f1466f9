"""Antiphon in front of Antiphon, over real sockets: what the inner model says, the outer client hears."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI

from antiphon.backends.responses.backend import create
from antiphon.protocol import codec
from support.live_server import Running, make_settings

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


def rule(words: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"user": words, "answers": [list(steps)]}


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
    """A server, one in front of it, and what the inner one was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.inner = Running(SCRIPT, make_settings())
        self._spy()
        self._outer = self._put_in_front()
        self._stateless = self._put_in_front(state="upstream")
        self.client = self._outer.client()
        self.client_with_state_upstream = self._stateless.client()

    def _spy(self) -> None:
        engine = self.inner.engine
        answer = engine.create

        async def note(request: Any, **others: Any) -> Any:
            self.asked.append(json.loads(codec.encode(request)))
            return await answer(request, **others)

        engine.create = note  # type: ignore[method-assign]

    def _put_in_front(self, **options: Any) -> Running:
        address = {"base_url": f"{self.inner.url}/v1", "request_retries": 0, "stream_retries": 0}
        backend: Any = create("inner", address | options, Path("unused"))
        return Running({}, make_settings(), backend=backend)

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
    shared_chain.asked.clear()
    return shared_chain


@pytest.fixture
def client(chain: Chain) -> OpenAI:
    return chain.client


def test_its_models_are_the_inner_ones(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m", "n"]


def test_text_goes_through_with_its_usage(client: OpenAI) -> None:
    response = client.responses.create(model="m", input="count")
    assert (response.status, response.output_text) == ("completed", "Hello there")
    assert response.usage is not None
    assert response.usage.to_dict() == USAGE


def test_a_conversation_goes_on_with_the_whole_context(chain: Chain) -> None:
    first = chain.client.responses.create(model="m", input="how many?")
    second = chain.client.responses.create(model="m", input="how many now?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("1 items", "3 items")
    assert [("previous_response_id" in asked, asked["store"]) for asked in chain.asked] == [(False, False)] * 2


def test_the_official_stream_helper_reads_everything(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {}, "strict": False}, {"type": "custom", "name": "g"}]
    with client.responses.stream(model="m", input="everything", tools=tools) as stream:
        told = [event.type for event in stream]
        response = stream.get_final_response()
    assert told[-1] == "response.completed"
    thought, search, message, call, custom, refusal = (item.to_dict() for item in response.output)
    assert thought["summary"] == [{"type": "summary_text", "text": text} for text in ("First.", "Second.")]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, let me see."}]
    assert search == SEARCH | {"id": search["id"]}
    assert [(part["text"], part["annotations"]) for part in message["content"]] == [("Found:", [CITATION])]  # type: ignore[attr-defined]
    assert (call["type"], call["call_id"], call["arguments"]) == ("function_call", "call_1", '{"x":1}')
    assert (custom["type"], custom["call_id"], custom["input"]) == ("custom_tool_call", "call_2", "free text")
    assert refusal["content"] == [{"type": "refusal", "refusal": "No more."}]


def test_sealed_reasoning_returns_to_the_model_that_made_it(client: OpenAI) -> None:
    asked: Any = {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    }
    first = client.responses.create(input="think", **asked)
    history: Any = [{"role": "user", "content": "think"}, *[item.to_dict() for item in first.output]]
    assert history[1].pop("content") == [{"type": "reasoning_text", "text": "Private thought"}]
    second = client.responses.create(input=[*history, {"role": "user", "content": "go on"}], **asked)
    assert second.output_text == "I remember."


@pytest.mark.parametrize("item", WHOLE_ITEMS, ids=lambda item: item["type"])
def test_an_item_that_comes_whole_goes_through_under_an_id_of_ours(client: OpenAI, item: dict[str, Any]) -> None:
    carried, message = (each.to_dict() for each in client.responses.create(model="m", input=item["type"]).output)
    assert str(carried["id"]).startswith(item["id"].partition("_")[0] + "_")
    assert carried["id"] != item["id"]
    assert carried | {"id": item["id"]} == carried | item
    assert message["type"] == "message"


def test_an_event_nobody_knows_goes_through(client: OpenAI) -> None:
    with client.responses.create(model="m", input="tick", stream=True) as stream:
        told = [event.to_dict() for event in stream]
    assert [event for event in told if event["type"] == "acme.tick"] == [
        {"type": "acme.tick", "at": 1.5, "sequence_number": 2}
    ]


def test_hosted_tools_and_wishes_reach_the_inner_server(chain: Chain) -> None:
    tools: Any = [
        {"type": "web_search"},
        {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "custom", "name": "h"}]},
        {"type": "shell"},
        {"type": "acme", "power": 1.5},
    ]
    wishes: Any = {"tool_choice": "required", "temperature": 0.5, "metadata": {"a": "b"}, "parallel_tool_calls": True}
    chain.client.responses.create(model="m", input="hi", tools=tools, **wishes)
    [asked] = chain.asked
    assert asked == asked | wishes | {"tools": tools}


def test_a_refusal_of_the_inner_server_keeps_its_status_and_words(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="m", input="refuse")
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_image")
    assert "That picture is broken." in caught.value.message


def test_g_68_a_failure_in_the_middle_ends_the_response(chain: Chain) -> None:
    told: list[Any] = []
    with (
        chain.client.responses.create(model="m", input="break", stream=True) as stream,
        pytest.raises(APIError) as caught,
    ):
        for event in stream:
            told.append(event.type)
            if event.type == "response.output_text.delta":
                chain.inner.do(lambda: chain.inner.backend.release("break"))
    assert told[-1] == "response.output_item.done"
    assert caught.value.message == "The upstream failed: It broke."


def test_an_answer_cut_off_by_its_length_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="m", input="cut")
    assert (response.status, response.output_text) == ("incomplete", "Half")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_g_67_a_client_that_leaves_stops_the_inner_model(chain: Chain) -> None:
    model = chain.inner.backend
    model.cancellation.clear()
    with chain.client.responses.create(model="m", input="hold", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    chain.inner.wait_for(model.cancellation.wait)


def test_cancelling_a_background_response_stops_the_inner_model(chain: Chain) -> None:
    model = chain.inner.backend
    model.cancellation.clear()
    response = chain.client.responses.create(model="m", input="hang", background=True)
    chain.inner.wait_for(lambda: model.reached("other gate"))
    assert chain.client.responses.cancel(response.id).status == "cancelled"
    chain.inner.wait_for(model.cancellation.wait)


def test_tokens_are_counted_by_the_inner_server(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="m", input="one two three", instructions="four five")
    assert counted.input_tokens == 5


def test_with_the_state_upstream_only_what_is_new_is_sent(chain: Chain) -> None:
    ask = chain.client_with_state_upstream.responses.create
    first = ask(model="m", input="how many?")
    second = ask(model="m", input="how many now?", previous_response_id=first.id)
    third = ask(model="m", input="how many in the end?", previous_response_id=second.id)
    branch = ask(model="m", input="how many else?", previous_response_id=first.id)
    texts = [each.output_text for each in (first, second, third, branch)]
    assert texts == ["1 items", "3 items", "5 items", "3 items"]
    assert [len(asked["input"]) for asked in chain.asked] == [1, 1, 1, 1]
    names = [asked.get("previous_response_id") for asked in chain.asked]
    assert names[0] is None
    assert names[1] == names[3]
    assert first.id not in names


def test_a_state_that_the_upstream_has_lost_is_sent_whole_again(chain: Chain) -> None:
    client = chain.client_with_state_upstream
    first = client.responses.create(model="m", input="how many are lost?")
    [kept] = chain.asked
    second = client.responses.create(model="m", input="how many so far?", previous_response_id=first.id)
    with chain.inner.client() as inner:
        inner.responses.delete(chain.asked[1]["previous_response_id"])
    again = client.responses.create(model="m", input="how many again?", previous_response_id=first.id)
    assert (kept["store"], second.output_text, again.output_text) == (True, "3 items", "3 items")
    assert [len(asked["input"]) for asked in chain.asked] == [1, 1, 1, 3]


def test_many_turns_at_once_stay_apart(client: OpenAI) -> None:
    heard: dict[int, str] = {}

    def ask(number: int) -> None:
        heard[number] = client.responses.create(model="m", input=f"number {number}").output_text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {number: f"You said: number {number}" for number in range(8)}
