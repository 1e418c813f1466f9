"""Complaints J78 to J81: access to data of other tenants, and wrong costs."""

from collections.abc import Callable
from typing import Any

from behaviour.wire import ask, get, say

ADA = {"Authorization": "Bearer sk-ada"}
BOB = {"Authorization": "Bearer sk-bob"}


def test_pain_j_78_project_cannot_access_data_of_another(guarded: Any) -> None:
    """BerriAI/litellm#15757, BerriAI/litellm#35536, BerriAI/litellm#38320, BerriAI/litellm#39548"""
    made = ask(guarded, "hi", key="sk-ada", background=True)["id"]
    conversation = guarded.ask("POST", "/v1/conversations", {"items": [say("user", "hi")]}, headers=ADA).json["id"]
    item = guarded.ask("GET", f"/v1/conversations/{conversation}/items", headers=ADA).json["data"][0]["id"]
    requests = [
        ("GET", f"/v1/responses/{made}", None),
        ("GET", f"/v1/responses/{made}?stream=true", None),
        ("GET", f"/v1/responses/{made}/input_items", None),
        ("POST", f"/v1/responses/{made}/cancel", None),
        ("DELETE", f"/v1/responses/{made}", None),
        ("GET", f"/v1/conversations/{conversation}", None),
        ("POST", f"/v1/conversations/{conversation}", {"metadata": {}}),
        ("GET", f"/v1/conversations/{conversation}/items", None),
        ("POST", f"/v1/conversations/{conversation}/items", {"items": [say("user", "hi")]}),
        ("GET", f"/v1/conversations/{conversation}/items/{item}", None),
        ("DELETE", f"/v1/conversations/{conversation}/items/{item}", None),
        ("DELETE", f"/v1/conversations/{conversation}", None),
        ("POST", "/v1/responses", {"model": "scripted", "input": "hi", "conversation": conversation}),
        ("POST", "/v1/responses", {"model": "scripted", "input": [{"type": "item_reference", "id": item}]}),
    ]
    statuses = [guarded.ask(method, path, body, headers=BOB).status for method, path, body in requests]
    assert statuses == [404] * len(requests)
    continuing = {"model": "scripted", "input": "hi", "previous_response_id": made}
    answer = guarded.ask("POST", "/v1/responses", continuing, headers=BOB)
    assert (answer.status, answer.json["error"]["code"]) == (400, "previous_response_not_found")
    assert guarded.ask("GET", f"/v1/responses/{made}", headers=ADA).status == 200


def test_pain_j_79_request_without_a_valid_key_is_rejected(guarded: Any) -> None:
    """praxis-proxy/ai#489"""
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer sk-eve"}, {"OpenAI-Project": "a"}):
        answer = guarded.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers=headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")


def test_pain_j_80_cached_tokens_are_reported(serve: Callable[..., Any]) -> None:
    """BerriAI/litellm#35127"""
    usage = {
        "input_tokens": 100,
        "output_tokens": 1,
        "total_tokens": 101,
        "input_tokens_details": {"cached_tokens": 90, "cache_write_tokens": 5},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    running = serve({"default": [{"text": "ok"}, {"usage": usage}]})
    response = ask(running, "hi")
    assert response["usage"] == get(running, f"/responses/{response['id']}")["usage"] == usage


def test_pain_j_81_response_names_its_model(server: Any) -> None:
    """BerriAI/litellm#25503"""
    first = ask(server, "hi", model="another")
    second = ask(server, "hi", model="scripted", previous_response_id=first["id"])
    assert [get(server, f"/responses/{each['id']}")["model"] for each in (first, second)] == ["another", "scripted"]
