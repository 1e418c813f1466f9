"""Complaints G62 to G70: long runs that are cut off, hang or cannot be cancelled."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from behaviour.wire import ask, get, of_type, read_stream, stream

SILENT = {"default": [{"wait": "gate"}, {"text": ["at last"]}]}
GATED = {"default": [{"text": ["first"]}, {"wait": "gate"}, {"text": [" last"]}]}


def follow(running: Any, response_id: str, after: int) -> list[dict[str, Any]]:
    answer = running.ask("GET", f"/v1/responses/{response_id}?stream=true&starting_after={after}")
    return read_stream(answer.body)


def release(running: Any) -> None:
    running.do(lambda: running.backend.release("gate"))


def test_pain_g_62_and_g_63_keepalive_events_are_sent_while_waiting(serve: Callable[..., Any]) -> None:
    """Menci/Floway#498, openai/codex#31539, raullenchai/Rapid-MLX#1057; mudler/LocalAI#11076, antirez/ds4#151,
    vllm-project/vllm#54424"""
    running = serve(SILENT, keepalive_seconds=0.01)
    with running.client() as client:
        kinds = []
        for event in client.responses.create(model="scripted", input="hi", stream=True):
            kinds.append(event.type)
            if kinds.count("keepalive") == 2 and event.type == "keepalive":
                release(running)
    assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert kinds[-1] == "response.completed"


def test_pain_g_64_background_stream_is_resumed_without_a_gap(serve: Callable[..., Any]) -> None:
    """BerriAI/litellm#26762"""
    running = serve(GATED)
    with running.client() as client:
        seen = []
        for event in client.responses.create(model="scripted", input="hi", stream=True, background=True):
            seen.append(event.model_dump(mode="json", exclude_unset=True))
            if event.type == "response.output_text.delta":
                break
    release(running)
    response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    whole = seen + follow(running, response_id, last)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert "".join(event["delta"] for event in of_type(whole, "response.output_text.delta")) == "first last"
    assert whole[-1]["response"] == get(running, f"/responses/{response_id}")


def test_pain_g_65_background_response_is_followed_and_cancelled(serve: Callable[..., Any]) -> None:
    """exo-explore/exo#1356, smg-project/smg#1214"""
    running = serve(GATED)
    queued = ask(running, "hi", background=True)
    running.wait_for(lambda: running.backend.reached("gate"))
    cancelled = running.ask("POST", f"/v1/responses/{queued['id']}/cancel").json
    again = running.ask("POST", f"/v1/responses/{queued['id']}/cancel").json
    assert (queued["status"], cancelled["status"], again) == ("queued", "cancelled", cancelled)
    assert follow(running, queued["id"], 2)[-1]["response"] == cancelled


def test_pain_g_66_background_response_is_streamed(server: Any) -> None:
    """praxis-proxy/ai#461"""
    events = stream(server, "hi", background=True)
    assert [events[1]["type"], events[-1]["type"]] == ["response.queued", "response.completed"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_pain_g_67_model_stops_when_the_client_disconnects(serve: Callable[..., Any], streamed: bool) -> None:
    """ggml-org/llama.cpp#24496, vllm-project/vllm#54947, cubist38/mlx-openai-server#269"""
    running = serve(GATED)
    body = json.dumps({"model": "scripted", "input": "hi", "stream": streamed}).encode()
    with running.connect() as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        running.wait_for(lambda: running.backend.reached("gate"))
        client.shutdown(socket.SHUT_RDWR)
        running.wait_for(running.backend.cancellation.wait)
    assert running.backend.cancelled == 1


def test_pain_g_68_error_in_a_stream_is_sent_and_stored(server: Any) -> None:
    """vllm-project/semantic-router#3063, Wei-Shaw/sub2api#5289"""
    error, failed = stream(server, "fail")[-2:]
    assert (error["type"], error["error"]["code"], failed["type"]) == ("error", "overloaded", "response.failed")
    assert get(server, f"/responses/{failed['response']['id']}") == failed["response"]


def test_pain_g_69_truncated_answer_fails(server: Any) -> None:
    """BerriAI/litellm#33222"""
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "break at once"})
    assert (answer.status, answer.json["error"]["code"]) == (500, "model_error")
    assert ask(server, "break off")["status"] == "failed"
    assert stream(server, "break at once")[-1]["type"] == "response.failed"


def test_pain_g_70_foreground_stream_is_cancelled(serve: Callable[..., Any]) -> None:
    """openai/openai-python#2643"""
    running = serve(GATED)
    with running.client() as client:
        events = iter(client.responses.create(model="scripted", input="hi", stream=True))
        response_id = next(events).response.id
        running.wait_for(lambda: running.backend.reached("gate"))
        cancelled = client.responses.cancel(response_id)
        *_, last = events
    assert (cancelled.status, cancelled.output_text, last.type) == ("cancelled", "first", "response.incomplete")
    assert get(running, f"/responses/{response_id}")["status"] == "cancelled"
