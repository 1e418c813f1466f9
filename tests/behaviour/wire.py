"""The script of the shared server, and helpers that send requests and read responses."""

import json
from typing import Any

from antiphon.protocol.codec import EVENTS
from antiphon.stream.sse import SseDecoder
from behaviour.event_samples import make_event
from behaviour.item_samples import ITEMS
from behaviour.samples import ANNOTATIONS, CALLED
from support.live_server import LiveServer

Json = dict[str, Any]

FULL_ANSWER = [
    {"summary": ["First thought.", "Second thought."]},
    {"reasoning": "Let me see."},
    {"seal": "sealed"},
    {"text": "Let me look that up."},
    {"tool_call": {"key": 1, "name": "look_up", "arguments": ['{"a"', ": 1"]}},
    {"tool_call": {"key": 2, "name": "look_up", "arguments": ["{"]}},
    {"tool_call": {"key": 1, "arguments": "}"}},
    {"tool_call": {"key": 2, "arguments": "}"}},
    {"custom_tool_call": {"name": "draw", "input": ["a ", "cat"]}},
    {"refusal": "But I cannot do that."},
]
SCRIPT: Json = {
    "models": ["scripted", "another"],
    "native_tools": ["function"],
    "rules": [
        *(
            {"user": f"item {kind}!", "answers": [[{"item": item}, {"text": "Ok."}]]}
            for kind, item in ITEMS.items()
            if kind not in ("configuration_update", "compaction_trigger")
        ),
        *(
            {"user": f"cite {kind}!", "answers": [[{"text": "So."}, {"annotation": each}]]}
            for kind, each in ANNOTATIONS.items()
        ),
        *(
            {"user": f"event {kind}!", "answers": [[{"event": make_event(kind)}, {"text": "Ok."}]]}
            for kind in EVENTS.members
        ),
        *({"user": f"use {kind}!", "answers": [[{"tool_call": each}]]} for kind, (each, _) in CALLED.items()),
        {"user": "everything", "answers": [FULL_ANSWER]},
        {"user": "think", "answers": [[{"reasoning": "Let me see."}, {"text": "So."}]]},
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "recall", "answers": ["I do not know."]},
        {"user": "count", "answers": ["{history}"]},
        {"last_item": "function_call_output", "text": "found", "answers": ["It was found."]},
        {"user": "call", "answers": [[{"tool_call": {"name": "look_up", "arguments": {}}}]]},
        {"user": "long", "answers": [[{"text": "So much "}, {"finish": "length"}]]},
        {"user": "filter", "answers": [[{"text": "So bad "}, {"finish": "content_filter"}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "overloaded"}}]]},
        {"user": "break off", "answers": [[{"text": "So "}, {"finish": None}]]},
        {"user": "break at once", "answers": [[{"finish": None}]]},
    ],
}


def ask(server: LiveServer, input_items: Any, *, key: str = "any", **fields: Any) -> Json:
    """Return the response to this input. It must succeed."""
    answer = server.ask(
        "POST",
        "/v1/responses",
        {"model": "scripted", "input": input_items} | fields,
        headers={"Authorization": f"Bearer {key}"},
    )
    assert answer.status == 200, answer.body
    response: Json = answer.json
    return response


def refuse(server: LiveServer, fields: Json) -> tuple[int, str | None, str | None]:
    """Return the status, param and code of the error for this request."""
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"} | fields)
    return answer.status, answer.json["error"]["param"], answer.json["error"]["code"]


def get(server: LiveServer, path: str) -> Json:
    answer = server.ask("GET", f"/v1{path}")
    assert answer.status == 200, answer.body
    found: Json = answer.json
    return found


# A query that shows the fields of hosted items that are hidden without it.
HIDDEN_FIELDS = ["file_search_call.results", "code_interpreter_call.outputs", "web_search_call.action.sources"]
INCLUDE_ALL = "&".join(f"include={name}" for name in HIDDEN_FIELDS)


def list_input(server: LiveServer, response: Json) -> list[Json]:
    path = f"/responses/{response['id']}/input_items?order=asc&limit=100&{INCLUDE_ALL}"
    items: list[Json] = get(server, path)["data"]
    return items


def stream(server: LiveServer, input_items: Any, **fields: Any) -> list[Json]:
    """Return the events of the response to this input."""
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": input_items, "stream": True} | fields)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream"), answer.body
    return read_stream(answer.body)


def read_stream(body: bytes) -> list[Json]:
    decoder = SseDecoder()
    messages = decoder.feed(body) + decoder.close()
    assert messages[-1].data == b"[DONE]"
    return [json.loads(message.data) for message in messages[:-1]]


def of_type(events: list[Json], kind: str) -> list[Json]:
    return [event for event in events if event["type"] == kind]


def say(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def text_of(response: Json) -> str:
    messages = (item["content"] for item in response["output"] if item["type"] == "message")
    return "".join(part.get("text", "") for parts in messages for part in parts)
