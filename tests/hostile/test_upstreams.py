"""Upstreams that never end, fail for some requests, leak keys, or fetch URLs for clients."""

import asyncio
import base64
import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.loop_blocks import MAX_BLOCK
from support.raw_server import Peer, serve_raw
from support.upstream_server import Reply
from support.upstream_thread import ThreadedServer
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
LIMITS = {
    "max_answer_bytes": 1_200_000,
    "max_answer_text_bytes": 200_000,
    "max_answer_items": 50,
    "max_answer_events": 1000,
}
KINDS = {"chat": "chat_completions", "responses": "responses", "anthropic": "anthropic_messages"}
LONG = "x" * 4000


def chat(**delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}


def call(index: int, arguments: str = "{}", name: str | None = "f") -> dict[str, Any]:
    return chat(tool_calls=[{"index": index, "id": f"c{index}", "function": {"name": name, "arguments": arguments}}])


def logprobs() -> dict[str, Any]:
    top = [{"token": "b", "logprob": -1, "bytes": [98]}] * 20
    chunk = chat(content="a")
    chunk["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": 0, "bytes": [97], "top_logprobs": top}]}
    return chunk


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{name}"} | fields


def block(kind: str, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index} | delta


# Answers without end: the events of each, and the setting that ends it.
ANSWERS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "chat/text": ("max_answer_text_bytes", lambda n: chat(content=LONG)),
    "chat/tokens": ("max_answer_events", lambda n: chat(content="x")),
    "chat/reasoning": ("max_answer_text_bytes", lambda n: chat(reasoning_content=LONG)),
    "chat/arguments": ("max_answer_text_bytes", lambda n: call(0, LONG, "f" if n == 0 else None)),
    "chat/calls": ("max_answer_items", call),
    "chat/nameless": ("max_answer_items", lambda n: call(n, name=None)),
    "chat/empty-calls": ("max_answer_events", lambda n: chat(tool_calls=[{"index": n}])),
    "chat/usage": ("max_answer_events", lambda n: {"choices": [], "usage": {"prompt_tokens": n}}),
    "chat/logprobs": ("max_answer_bytes", lambda n: logprobs()),
    "chat/annotations": (
        "max_answer_events",
        lambda n: chat(annotations=[{"type": "url_citation", "url_citation": {"url": "https://a.example"}}]),
    ),
    "chat/blank": ("max_answer_text_bytes", lambda n: chat(content=" " * 4000)),
    "responses/text": ("max_answer_text_bytes", lambda n: event("output_text.delta", output_index=0, delta=LONG)),
    "responses/summaries": (
        "max_answer_events",
        lambda n: event("reasoning_summary_text.delta", output_index=0, summary_index=n, delta="x"),
    ),
    "responses/unknown": ("max_answer_events", lambda n: event("novelty", text="x")),
    "responses/unmatched": ("max_answer_events", lambda n: event("novelty", item_id=f"i{n}", text="x")),
    "responses/items": (
        "max_answer_items",
        lambda n: event("output_item.added", output_index=n, item={"type": "message", "id": f"m{n}"}),
    ),
    "responses/hosted": (
        "max_answer_items",
        lambda n: event("output_item.added", output_index=n, item={"type": "web_search_call", "id": f"w{n}"}),
    ),
    "responses/created": ("max_answer_events", lambda n: event("in_progress", response={"id": "r"})),
    "anthropic/text": ("max_answer_text_bytes", lambda n: block("delta", delta={"type": "text_delta", "text": LONG})),
    "anthropic/thinking": (
        "max_answer_text_bytes",
        lambda n: block("delta", delta={"type": "thinking_delta", "thinking": LONG}),
    ),
    "anthropic/signature": (
        "max_answer_bytes",
        lambda n: block("delta", delta={"type": "signature_delta", "signature": LONG}),
    ),
    "anthropic/blocks": (
        "max_answer_items",
        lambda n: block("start", n, content_block={"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}}),
    ),
    "anthropic/pings": ("max_answer_events", lambda n: {"type": "ping"}),
}


async def answer_without_end(peer: Peer) -> None:
    """Send the events of the requested model until the client closes the connection."""
    request = await peer.read_request()
    model = json.loads(request.partition(b"\r\n\r\n")[2])["model"]
    make = ANSWERS[model][1]
    peer.writer.write(HEAD)
    for start in itertools.count(step=20):
        lines = (f"data: {json.dumps(make(number))}\n\n" for number in range(start, start + 20))
        written = "".join(lines).encode()
        for _ in range(100 if model == "chat/text" else 1):
            peer.writer.write(written)
            await peer.writer.drain()


def start_victim(victim: Callable[..., Victim], url: str, **settings: Any) -> Victim:
    options = {"base_url": url, "request_retries": 0, "stream_retries": 0}
    backends = {
        name: {"kind": kind, "models": [model for model in ANSWERS if model.startswith(name)]} | options
        for name, kind in KINDS.items()
    }
    return victim(backends=backends, **settings)


def ask_streamed(server: Victim, body: dict[str, Any]) -> dict[str, Any]:
    """Return the last response of a stream, after checking that its events are complete."""
    reply = server.ask("POST", "/v1/responses", body | {"stream": True})
    if reply.status != 200:
        return {"status": "failed"} | reply.json
    lines = [line for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line[6:]) for line in lines]
    numbers = [each["sequence_number"] for each in events if each["type"] != "keepalive"]
    assert numbers == list(range(len(numbers)))
    opened = sum(each["type"] == "response.output_item.added" for each in events)
    assert opened == sum(each["type"] == "response.output_item.done" for each in events)
    response: dict[str, Any] = events[-1]["response"]
    assert len(response["output"]) == opened
    return response


def ask_whole(server: Victim, body: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = server.ask("POST", "/v1/responses", body).json
    return {"status": "failed"} | response


def ask_background(server: Victim, body: dict[str, Any]) -> dict[str, Any]:
    accepted = server.ask("POST", "/v1/responses", body | {"background": True}).json
    server.ask("GET", f"/v1/responses/{accepted['id']}?stream=true")  # read to its end
    response: dict[str, Any] = server.ask("GET", f"/v1/responses/{accepted['id']}").json
    return response


ASK = {"streamed": ask_streamed, "whole": ask_whole, "background": ask_background}


@pytest.mark.parametrize("form", ASK)
def test_answer_without_end_fails_at_a_limit(
    form: str, victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    server = start_victim(victim, upstream(serve_raw(answer_without_end)).url, **LIMITS)
    before = server.peak_mb()
    ended: dict[str, Any] = {}
    for model in ANSWERS:
        response = ASK[form](server, {"model": model, "input": "Hello."})
        error = response["error"]
        limit = error["message"].partition("setting '")[2].partition("'")[0]
        ended[model] = (response["status"], error["code"], limit)
    expected = {model: ("failed", "answer_too_large", limit) for model, (limit, _) in ANSWERS.items()}
    assert ended == expected
    assert server.peak_mb() < before + 120
    assert server.longest_block() < MAX_BLOCK


def test_text_before_the_limit_is_stored(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    fake = upstream(serve_raw(answer_without_end))
    server = start_victim(victim, fake.url, max_answer_text_bytes=1_000_000)
    for ask in (ask_streamed, ask_background):
        response = ask(server, {"model": "chat/text", "input": "Hello."})
        text = response["output"][0]["content"][0]["text"]
        assert 500_000 < len(text) < 1_500_000
        assert server.ask("GET", f"/v1/responses/{response['id']}").json == response
    fake.wait_for(lambda raw: raw.until_closed(2))  # the upstream was stopped


def test_endless_text_is_bounded_by_the_default_limits(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    server = start_victim(victim, upstream(serve_raw(answer_without_end)).url, store="memory:")
    response = ask_streamed(server, {"model": "chat/text", "input": "Hello.", "store": False})
    assert response["error"]["code"] == "answer_too_large"
    assert server.peak_mb() < 500


MANY = 30_000
TEXT_PART = {"type": "output_text", "text": "x"}
# Messages with very many parts.
LARGE_MESSAGES: dict[str, dict[str, Any]] = {
    "chat/text": chat(content=[{"type": "text", "text": "x"}] * MANY),
    "chat/annotations": chat(
        content="x", annotations=[{"type": "url_citation", "url_citation": {"url": "https://a.example"}}] * MANY
    ),
    "chat/reasoning": chat(reasoning_details=[{"type": "reasoning.text", "text": "x"}] * MANY),
    "chat/calls": chat(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "x"}}] * MANY),
    "chat/tokens": {"choices": chat(content="x")["choices"] * MANY},
    "responses/text": event("output_item.done", item={"type": "message", "id": "m", "content": [TEXT_PART] * MANY}),
    "responses/summaries": event(
        "output_item.done",
        item={"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}] * MANY},
    ),
    "anthropic/text": block(
        "start",
        content_block={
            "type": "text",
            "text": "x",
            "citations": [{"type": "web_search_result_location", "url": "https://a.example"}] * MANY,
        },
    ),
}


async def send_large_message(peer: Peer) -> None:
    model = json.loads((await peer.read_request()).partition(b"\r\n\r\n")[2])["model"]
    peer.writer.write(HEAD + f"data: {json.dumps(LARGE_MESSAGES[model])}\n\n".encode())
    await peer.writer.drain()


@pytest.mark.parametrize("form", ["streamed", "whole"])
def test_message_with_very_many_parts_is_refused_without_a_block(
    form: str, victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    server = start_victim(victim, upstream(serve_raw(send_large_message)).url)
    for model in LARGE_MESSAGES:
        response = ASK[form](server, {"model": model, "input": "Hello."})
        assert (response["status"], response["error"]["code"]) == ("failed", "answer_too_large")
    assert server.longest_block() < MAX_BLOCK


TOP = [{"token": "b", "logprob": -1, "bytes": [98]}] * 20
TOKENS = [{"token": "a", "logprob": 0, "bytes": [97], "top_logprobs": TOP}] * 12_000
LETTERS = "a" * 12_000
# One message with the log probabilities of a long answer, and the end of the answer.
LOGPROBS: dict[str, list[dict[str, Any]]] = {
    "chat/logprobs": [
        {"choices": [{"delta": {"content": LETTERS}, "logprobs": {"content": TOKENS}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ],
    "responses/text": [
        event("output_text.delta", output_index=0, delta=LETTERS, logprobs=TOKENS),
        event("completed", response={"id": "r", "status": "completed"}),
    ],
}


@pytest.mark.parametrize("form", ["streamed", "whole"])
def test_message_full_of_logprobs_is_read_without_a_block(
    form: str, victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    async def send_logprobs(peer: Peer) -> None:
        model = json.loads((await peer.read_request()).partition(b"\r\n\r\n")[2])["model"]
        lines = (f"data: {json.dumps(each, separators=(',', ':'))}\n\n" for each in LOGPROBS[model])
        peer.writer.write(HEAD + "".join(lines).encode())
        await peer.writer.drain()

    server = start_victim(victim, upstream(serve_raw(send_logprobs)).url)
    for model in LOGPROBS:
        response = ASK[form](server, {"model": model, "input": "Hello."})
        part = response["output"][0]["content"][0]
        assert (response["status"], part["text"], part["logprobs"]) == ("completed", LETTERS, TOKENS)
    assert server.longest_block() < MAX_BLOCK


async def send_keepalives(peer: Peer) -> None:
    """Send a token, and then keepalives without end."""
    model = json.loads((await peer.read_request()).partition(b"\r\n\r\n")[2])["model"]
    fillers = {
        "comments": b": still here\n\n",
        "empty": b'data: {"choices": [{"delta": {"content": ""}}]}\n\n',
        "bytes": b"data",
        "blank": b"\n",
        "events": b"event: ping\n\n",
    }
    peer.writer.write(HEAD + f"data: {json.dumps(chat(content='Hello'))}\n\n".encode())
    while True:
        peer.writer.write(fillers[model])
        await peer.writer.drain()
        await asyncio.sleep(0.01)


def test_upstream_that_only_sends_keepalives_times_out(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    models = ["comments", "empty", "bytes", "blank", "events"]
    url = upstream(serve_raw(send_keepalives)).url
    options = {"kind": "chat_completions", "base_url": url, "models": models, "idle_timeout": 0.2}
    server = victim(backends={"up": options}, store="memory:")
    for model in models:
        response = ask_streamed(server, {"model": model, "input": "Hello."})
        assert (response["status"], response["error"]["code"]) == ("failed", "upstream_timeout")
        assert response["output"][0]["content"][0]["text"] == "Hello"


def test_whole_answers_without_end_are_refused(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    starts = (b'{"choices": [{"message": {"content": "', b'{"choices": [{"logprobs": [', b"[")

    async def send_body(start: bytes, peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(HEAD + start)
        while True:
            peer.writer.write(b"{}," * 20_000)
            await peer.writer.drain()

    fake = upstream(serve_raw(*(functools.partial(send_body, start) for start in starts)))
    server = start_victim(victim, fake.url, max_answer_bytes=5_000_000)
    before = server.peak_mb()
    for _ in starts:
        reply = server.ask("POST", "/v1/responses", {"model": "chat/text", "input": "Hello."})
        assert (reply.status, reply.json["error"]["code"]) == (502, "answer_too_large")
    assert server.peak_mb() < before + 60


def test_summary_without_end_is_replaced_by_extracts(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    fake = upstream(serve_raw(answer_without_end))
    server = start_victim(victim, fake.url, **LIMITS)
    before = server.peak_mb()
    items = [{"role": "user", "content": f"Question {number}. " + "x" * 20_000} for number in range(20)]
    reply = server.ask("POST", "/v1/responses/compact", {"model": "chat/text", "input": items})
    assert (reply.status, "setting 'max_answer_bytes'" in server.log()) == (200, True)
    fake.wait_for(lambda raw: raw.until_closed(1))
    assert server.peak_mb() < before + 120


def test_failing_prompts_of_one_project_do_not_stop_others(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    hello = {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}
    fake = upstream(*[Reply(status=500)] * 6, Reply(body=json.dumps(hello).encode()))
    keys = [{"key": "key-of-a", "project": "a"}, {"key": "key-of-b", "project": "b"}]
    backend = {"kind": "chat_completions", "base_url": fake.url, "models": ["m"], "request_retries": 0}
    server = victim(backends={"up": backend}, api_keys=keys, store="memory:")

    def ask(key: str, text: str) -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {key}"}
        reply = server.ask("POST", "/v1/responses", {"model": "m", "input": text}, headers=headers)
        return reply.status, reply.json["error"] and reply.json["error"]["code"]

    assert [ask("key-of-a", f"bad {number}") for number in range(5)] == [(502, "upstream_error")] * 5
    assert ask("key-of-a", "another") == (503, "upstream_unavailable")
    assert ask("key-of-b", "unlucky") == (502, "upstream_error")
    assert ask("key-of-b", "good") == (200, None)


SECRET = "sk-very-secret-0123456789"
LEAKS = {
    "base64": base64.b64encode(f"Bearer {SECRET}".encode()).decode(),
    "hex": SECRET.encode().hex(),
    "escaped": "".join(f"%{ord(each):02x}" for each in SECRET),
    "reversed": SECRET[::-1],
}


def test_key_in_an_error_of_the_upstream_reaches_neither_client_nor_log(
    victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]
) -> None:
    errors = [json.dumps({"error": {"message": f"Bad key {leak}, sorry."}}).encode() for leak in LEAKS.values()]
    fake = upstream(*(Reply(status=400, body=body) for body in errors))
    options = {"kind": "chat_completions", "base_url": fake.url, "models": ["m"], "api_key": SECRET}
    server = victim(backends={"up": options}, store="memory:", log_level="debug")
    shown = [server.ask("POST", "/v1/responses", {"model": "m", "input": name}).body.decode() for name in LEAKS]
    for text in (*shown, server.log()):
        assert "Bad key ***, sorry." in text
        assert not [leak for leak in LEAKS.values() if leak in text]


URLS = [
    "file:///etc/passwd",
    "http://127.1:8000/",
    "http://169.254.169.254/",
    "http://localhost/",
    "http://[::1]/a.png",
]


def test_private_urls_are_not_forwarded(victim: Callable[..., Victim], upstream: Callable[..., ThreadedServer]) -> None:
    fake = upstream(*[Reply(status=400, body=b'{"error": {"message": "seen"}}')] * 3)
    backends = {name: {"kind": kind, "base_url": fake.url, "models": [name]} for name, kind in KINDS.items()}
    server = victim(backends=backends, store="memory:", outbound_allow=["10.0.0.0/8"])
    for model in KINDS:
        check_urls(server, model)
    assert len([each for each in fake.server.requests if each.method == "POST"]) == 3


def check_urls(server: Victim, model: str) -> None:
    for url, background in itertools.product(URLS, (False, True)):
        parts = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": url}]
        body = {"model": model, "input": [{"role": "user", "content": parts}], "background": background}
        reply = server.ask("POST", "/v1/responses", body)
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (
            400,
            "invalid_image_url",
            "input[0].content[1].image_url",
        )
    document = [{"type": "input_file", "file_url": "http://192.168.0.1/a.pdf", "filename": "a.pdf"}]
    reply = server.ask("POST", "/v1/responses", {"model": model, "input": [{"role": "user", "content": document}]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input[0].content[0].file_url")
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URLS[0]}]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    reply = server.ask("POST", "/v1/responses", {"model": model, "input": [called, output]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input[1].output[0].image_url")
    # In a conversation, an item is not checked before a model reads it.
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/a.png"}]}]
    stored = server.ask("POST", "/v1/conversations", {"items": items}).json["id"]
    reply = server.ask("POST", "/v1/responses", {"model": model, "input": "Hello.", "conversation": stored})
    assert (reply.status, reply.json["error"]["message"]) == (400, "seen")  # allowed
    items[0]["content"][0]["image_url"] = URLS[1]  # type: ignore[index]
    stored = server.ask("POST", "/v1/conversations", {"items": items}).json["id"]
    reply = server.ask("POST", "/v1/responses", {"model": model, "input": "Hello.", "conversation": stored})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_image_url")
