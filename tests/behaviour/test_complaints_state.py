"""Complaints B16 to B29: state that is lost, late or ignored."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from behaviour.samples import FUNCTION
from behaviour.wire import SCRIPT, ask, get, list_input, refuse, say, stream, text_of

STREAMS = 24


@pytest.mark.parametrize("model", ["scripted", "another"])
def test_pain_b_16_every_model_gets_the_context(server: Any, model: str) -> None:
    """BerriAI/litellm#11204"""
    first = ask(server, "my name is ada", model=model)
    assert text_of(ask(server, "recall", model=model, previous_response_id=first["id"])) == "Your name is ada."


def test_pain_b_17_response_is_continued_at_once(serve: Callable[..., Any]) -> None:
    """BerriAI/litellm#28587"""
    running = serve({"default": "{history}"})
    response: dict[str, Any] = {"id": None}
    for turn in range(5):
        response = ask(running, "hi", previous_response_id=response["id"])
        assert text_of(response) == str(2 * turn + 1)


def test_pain_b_18_streamed_response_is_found_with_its_whole_input(server: Any) -> None:
    """BerriAI/litellm#37956"""
    sent = [say("developer", "be brief"), say("user", "my name is ada"), say("assistant", "hello"), say("user", "hm")]
    events = stream(server, sent)
    first = get(server, f"/responses/{events[0]['response']['id']}")
    assert [item["role"] for item in list_input(server, first)] == ["developer", "user", "assistant", "user"]
    assert text_of(ask(server, "recall", previous_response_id=first["id"])) == "Your name is ada."


def test_pain_b_19_response_id_does_not_change(server: Any) -> None:
    """BerriAI/litellm#17204"""
    made = ask(server, "hi")
    assert [get(server, f"/responses/{made['id']}") for _ in range(2)] == [made, made]


def test_pain_b_20_responses_are_stored_by_default(server: Any) -> None:
    """BerriAI/litellm#26147"""
    made = ask(server, "hi")
    assert (made["store"], get(server, f"/responses/{made['id']}")) == (True, made)


def test_pain_b_21_streamed_response_is_continued(server: Any) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1188"""
    events = stream(server, "my name is ada")
    again = stream(server, "recall", previous_response_id=events[-1]["response"]["id"])
    assert text_of(again[-1]["response"]) == "Your name is ada."


def test_pain_b_22_previous_response_is_used_or_rejected(server: Any) -> None:
    """Blaizzy/mlx-vlm#1046"""
    first = ask(server, "my name is ada")
    assert text_of(ask(server, "recall")) == "I do not know."
    assert text_of(ask(server, "recall", previous_response_id=first["id"])) == "Your name is ada."
    assert refuse(server, {"previous_response_id": "resp_unknown"}) == (
        400,
        "previous_response_id",
        "previous_response_not_found",
    )


def test_pain_b_23_chain_grows_without_resending_it(server: Any) -> None:
    """ollama/ollama#15954, ollama/ollama#15404"""
    first = ask(server, "count")
    second = ask(server, "count", previous_response_id=first["id"])
    third = ask(server, "count", previous_response_id=second["id"])
    assert [text_of(each) for each in (first, second, third)] == ["1", "3", "5"]


def test_pain_b_24_calls_and_outputs_stay_in_the_context(server: Any) -> None:
    """vllm-project/vllm#43244"""
    called = ask(server, "call", tools=[FUNCTION])
    output = {"type": "function_call_output", "call_id": called["output"][0]["call_id"], "output": "found"}
    answered = ask(server, [output], previous_response_id=called["id"])
    counted = ask(server, "count", previous_response_id=answered["id"])
    # The question, the call, its output, the answer and the new question.
    assert (text_of(answered), text_of(counted)) == ("It was found.", "5")


def test_pain_b_25_state_survives_a_restart(serve: Callable[..., Any]) -> None:
    """vllm-project/vllm#22137, vllm-project/vllm#48454"""
    before = serve(SCRIPT)
    conversation = before.ask("POST", "/v1/conversations", {"items": [say("user", "my name is ada")]}).json["id"]
    first = ask(before, "my name is ada")
    before.stop()
    after = serve(SCRIPT)
    assert get(after, f"/responses/{first['id']}") == first
    assert text_of(ask(after, "recall", previous_response_id=first["id"])) == "Your name is ada."
    assert text_of(ask(after, "recall", conversation=conversation)) == "Your name is ada."


def test_pain_b_26_every_store_keeps_the_same_data(server: Any, serve: Callable[..., Any]) -> None:
    """ogx-ai/ogx#4115"""
    for running in (server, serve(SCRIPT)):  # in memory, and on SQLite
        first = ask(running, "my name is ada")
        assert get(running, f"/responses/{first['id']}") == first
        assert [item["role"] for item in list_input(running, first)] == ["user"]
        assert text_of(ask(running, "recall", previous_response_id=first["id"])) == "Your name is ada."


def test_pain_b_27_concurrent_streams_are_all_stored(serve: Callable[..., Any]) -> None:
    """ogx-ai/ogx#4048, ogx-ai/ogx#5344"""
    running = serve()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(lambda number: stream(running, f"hi {number}"), range(STREAMS)))
        ended = [events[-1]["response"] for events in streams]
        stored = list(pool.map(lambda response: get(running, f"/responses/{response['id']}"), ended))
    assert (stored, {response["status"] for response in ended}) == (ended, {"completed"})


def test_pain_b_28_unstored_session_continues_with_its_history(server: Any) -> None:
    """maximhq/bifrost#2441"""
    first = ask(server, "my name is ada", store=False)
    history = [say("user", "my name is ada"), *first["output"], say("user", "recall")]
    assert text_of(ask(server, history, store=False)) == "Your name is ada."
    body = {"model": "scripted", "input": "recall", "previous_response_id": first["id"]}
    answer = server.ask("POST", "/v1/responses", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "previous_response_not_found")
    assert "was not stored: send the whole history in 'input' instead" in answer.json["error"]["message"]


def test_pain_b_29_continuation_is_served_or_rejected_with_advice(server: Any, serve: Callable[..., Any]) -> None:
    """microsoft/vscode#317158"""
    first = ask(server, "my name is ada")
    assert text_of(ask(server, "recall", previous_response_id=first["id"])) == "Your name is ada."
    body = {"model": "scripted", "input": "recall", "previous_response_id": first["id"]}
    answer = serve(stateless=True).ask("POST", "/v1/responses", body)
    assert answer.status == 400
    assert "send full conversation history in the input array" in answer.json["error"]["message"]
