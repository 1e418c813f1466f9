"""Turns with servers that reject parts of a request, and malformed responses."""

import json
from typing import Any

import pytest

from antiphon import Agent, tool
from antiphon.agent.history import ENCRYPTED_REASONING, REASONING_LOST
from antiphon.agent.model_answer import ModelAnswer, ModelDelta, make_answer, read_delta
from antiphon.agent.outcome import Notice, RunEnded, RunEvent
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol import codec
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from support.scripted_model import ScriptedModel, UpstreamModel, call, open_scripted, outputs_of

ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "old"}
SHELL = {"type": "shell_call", "call_id": "call_s", "status": "completed", "action": {"commands": ["ls"]}}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
USER = {"role": "user", "content": "Go."}

LOOK = call("look_up", {"city": "Bern"})


@tool
async def look_up(city: str) -> str:
    """The weather of a city."""
    return f"{city}: mild"


def refuse(message: str, **details: str) -> list[dict[str, Any]]:
    return [{"raise": {"message": message, "status": 400, "type": "invalid_request_error"} | details}]


UNSEALABLE = refuse("Encrypted content is not supported with this model.", param="include")
UNREADABLE = refuse("The encrypted content gAAA could not be verified.", code="invalid_encrypted_content")


def includes_of(scripted: ScriptedModel) -> list[Any]:
    return [request.get("include") for request in scripted.sent]


def seals_of(request: dict[str, Any]) -> list[str]:
    return [item["encrypted_content"] for item in request["input"] if "encrypted_content" in item]


async def watch(events: Any) -> tuple[list[str], Any]:
    """Return the notices and the outcome of a run."""
    events: list[RunEvent] = [event async for event in events]
    assert isinstance(events[-1], RunEnded)
    return [event.message for event in events if isinstance(event, Notice)], events[-1].outcome


# Models that refuse to encrypt reasoning


async def test_encryption_refusal_repeats_the_request_and_is_remembered(scripted: ScriptedModel) -> None:
    scripted.set_answers(UNSEALABLE, [LOOK], "Mild.", "Still mild.")
    agent = scripted.agent(tools=[look_up])
    assert (await agent.run("How is it?")).text == "Mild."
    assert (await agent.run("And now?")).text == "Still mild."
    assert includes_of(scripted) == [[ENCRYPTED_REASONING], None, None, None]
    assert scripted.sent[0] == scripted.sent[1] | {"include": [ENCRYPTED_REASONING]}


async def test_other_includes_stay_after_an_encryption_refusal(scripted: ScriptedModel) -> None:
    scripted.set_answers(UNSEALABLE, "Mild.")
    other = "message.output_text.logprobs"
    assert (await scripted.agent(settings={"include": [other]}).run("How is it?")).text == "Mild."
    assert includes_of(scripted) == [[other, ENCRYPTED_REASONING], [other]]


async def test_other_rejection_fails_the_run_and_does_not_disable_encryption(in_process: ScriptedModel) -> None:
    wrong = refuse("Invalid value: 'x'.", param="include[0]")
    in_process.set_answers(wrong, wrong, "Mild.")
    agent = in_process.agent()
    outcome = await agent.run("How is it?")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.message) == ("failed", "Invalid value: 'x'.")
    assert (await agent.run("How is it?")).text == "Mild."
    assert includes_of(in_process) == [[ENCRYPTED_REASONING], None, [ENCRYPTED_REASONING]]


@pytest.mark.parametrize("include", [[], None])
async def test_empty_include_requests_no_encrypted_reasoning(in_process: ScriptedModel, include: Any) -> None:
    in_process.set_answers("Mild.")
    assert (await in_process.agent(settings={"include": include}).run("How is it?")).text == "Mild."
    assert includes_of(in_process) == [None]


# Reasoning that cannot be decrypted


async def test_undecryptable_reasoning_is_dropped_with_a_notice(scripted: ScriptedModel) -> None:
    scripted.set_answers(UNREADABLE, [LOOK], "Mild.", "Still mild.")
    agent = scripted.agent(tools=[look_up])
    notices, outcome = await watch(agent.run_stream("How is it?", history=[USER, THOUGHT, ANSWER]))
    assert (outcome.kind, outcome.text, notices) == ("final", "Mild.", [REASONING_LOST])
    refused, *others = scripted.sent
    assert seals_of(refused) == ["old"]
    assert [seals_of(request) for request in others] == [[], []]
    # A run that continues this history does not send it either.
    assert THOUGHT not in outcome.history
    assert (await agent.run("And now?", history=outcome.history)).text == "Still mild."
    assert seals_of(scripted.sent[-1]) == []


async def test_newly_encrypted_reasoning_is_sent_back(in_process: ScriptedModel) -> None:
    in_process.set_answers(UNREADABLE, [{"reasoning": "Look."}, {"seal": "new"}, LOOK], "Mild.")
    outcome = await in_process.agent(tools=[look_up]).run("How is it?", history=[USER, THOUGHT, ANSWER])
    assert outcome.text == "Mild."
    assert len(seals_of(in_process.sent[2])) == 1
    assert sum("encrypted_content" in item for item in outcome.history) == 1


async def test_resumed_run_does_not_send_dropped_reasoning(scripted: ScriptedModel, ledger: Ledger) -> None:
    scripted.set_answers(UNREADABLE, [LOOK], "Mild.")
    agent = scripted.agent(tools=[look_up])
    await agent.run("How is it?", history=[USER, THOUGHT, ANSWER], ledger=ledger, run_id="run_1")
    assert THOUGHT not in (await agent.resume("run_1", ledger=ledger)).history


async def test_decryption_error_without_encrypted_items_fails_the_run(scripted: ScriptedModel) -> None:
    scripted.set_answers(UNREADABLE)
    outcome = await scripted.agent().run("How is it?")
    assert outcome.error is not None
    assert (outcome.error.code, len(scripted.sent)) == ("invalid_encrypted_content", 1)


async def test_server_that_cannot_decrypt_its_store_gets_the_readable_history(in_process: ScriptedModel) -> None:
    in_process.set_answers([{"reasoning": "Look."}, {"seal": "old"}, LOOK], "Mild.")
    unreadable = InvalidRequest("It could not be verified.", code="invalid_encrypted_content")
    events, agent = list[RunEvent](), in_process.agent(tools=[look_up], conversation_state="server")
    async for event in agent.run_stream("How is it?"):
        if len(in_process.sent) == 1 and not in_process.transport.refusals:
            in_process.transport.refusals += [unreadable, unreadable]
        events.append(event)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome.text == "Mild."
    _, continued, whole, rest = in_process.sent
    assert "previous_response_id" in continued
    assert "previous_response_id" not in whole | rest
    assert (len(seals_of(whole)), seals_of(rest)) == (1, [])
    assert outputs_of(rest) == [("call_1", "Bern: mild")]


# Unsupported calls


@pytest.mark.parametrize("state", ["client", "server"])
async def test_unsupported_call_becomes_a_message_and_the_run_continues(state: str) -> None:
    async with open_scripted("upstream") as scripted:
        assert isinstance(scripted, UpstreamModel)
        scripted.set_answers([{"item": SHELL}, LOOK], "Mild.")
        outcome = await scripted.agent(tools=[look_up], conversation_state=state).run("How is it?")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    request = scripted.sent[1]
    assert "previous_response_id" not in request
    assert [item.get("type", item.get("role")) for item in request["input"]] == [
        "user",
        "user",
        "function_call",
        "function_call_output",
    ]
    # A client that can run the call may continue with its output.
    assert SHELL in outcome.history


async def test_server_tool_search_is_sent_back_unchanged(in_process: ScriptedModel) -> None:
    in_process.set_answers([{"item": SEARCH}, LOOK], "Mild.", "Still mild.")
    agent = in_process.agent(tools=[look_up])
    outcome = await agent.run("How is it?")
    assert (outcome.text, SEARCH in outcome.history) == ("Mild.", True)
    assert (await agent.run("And now?", history=outcome.history)).text == "Still mild."


# Broken transports


class Broken:
    """A transport that fails in a given way."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    async def stream(self, request: dict[str, Any]) -> Any:
        return self._stream()

    async def _stream(self) -> Any:
        for batch in self._batches:
            if isinstance(batch, Exception):
                raise batch
            yield [codec.decode_event(json.dumps(event).encode()) for event in batch]

    async def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.parametrize("batches", [[KeyError("x")], [[], RecursionError()], [["text"]], [[7]]])
async def test_transport_exception_fails_the_run(batches: Any, ledger: Ledger) -> None:
    agent = Agent(model="m", transport=Broken(*batches))
    outcome = await agent.run("Go.", ledger=ledger)
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns) == ("failed", 0)
    assert [run.status for run in await ledger.runs()] == ["failed"]


@pytest.mark.parametrize("content", [5, {"text": "a"}, ["a", None, 7], [{"type": "output_text", "text": 5}]])
async def test_malformed_content_leaves_a_readable_run(content: Any, ledger: Ledger) -> None:
    message = {"type": "message", "role": "assistant", "content": content}
    ended = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [message]}}
    agent = Agent(model="m", transport=Broken([ended]))
    outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
    assert outcome.kind in ("final", "no_progress")
    assert (await agent.resume("run_1", ledger=ledger)).kind == outcome.kind


# Reading responses


NONE = Usage(0, 0, 0)
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THINKING = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
SEARCHED = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "x"},
}
RAN = {
    "type": "shell_call",
    "id": "sh_1",
    "call_id": "call_s",
    "status": "completed",
    "action": {"commands": ["ls"]},
}
PRINTED = {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
SHOWN = {"type": "shell_call_output", "id": "sho_1", "call_id": "call_s", "status": "completed", "output": [PRINTED]}


WHOLE_DELTA = (
    b'{"type":"response.output_text.delta","delta":"a","item_id":"i","output_index":0,"content_index":0,'
    b'"sequence_number":1,"logprobs":[]}'
)


def call(call_id: str | None = "call_1", **fields: Any) -> dict[str, Any]:
    named = {"call_id": call_id} if call_id is not None else {}
    return {"type": "function_call", "name": "look_up", "arguments": "{}"} | named | fields


def cut(*output: Any) -> dict[str, Any]:
    return {"id": "r", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": output}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ({"id": "r", "output": [{"id": "m", "status": "completed"} | TEXT]}, ModelAnswer("r", [TEXT], NONE)),
        ({"output": [TEXT]}, ModelAnswer("", [TEXT], NONE)),
        (cut(TEXT), ModelAnswer("r", [TEXT], NONE, "max_output_tokens")),
        ({"id": "r", "status": "incomplete", "output": [TEXT]}, ModelAnswer("r", [TEXT], NONE, "incomplete")),
        # The output differs from the stored response, so the server cannot continue it.
        (cut(TEXT, call(arguments='{"ci')), ModelAnswer("r", [TEXT], NONE, "max_output_tokens", False)),
        (
            cut(TEXT, THINKING, call(status="incomplete")),
            ModelAnswer("r", [TEXT], NONE, "max_output_tokens", False),
        ),
        (cut(call(), THINKING), ModelAnswer("r", [call()], NONE, "max_output_tokens", False)),
        ({"id": "r", "output": [call(), call()]}, ModelAnswer("r", [call(), call("call_1_2")], NONE, "", False)),
        ({"id": "r", "output": [call(None)]}, ModelAnswer("r", [call("call_1")], NONE, "", False)),
        ({"id": "r", "output": ["nonsense", TEXT]}, ModelAnswer("r", [TEXT], NONE)),
        # Calls of the server itself keep their ids.
        ({"id": "r", "output": [SEARCHED, TEXT]}, ModelAnswer("r", [SEARCHED, TEXT], NONE)),
        ({"id": "r", "output": [RAN, SHOWN, TEXT]}, ModelAnswer("r", [RAN, SHOWN, TEXT], NONE)),
        # An agent cannot run such a call, so the stored response cannot be continued.
        ({"id": "r", "output": [RAN, call()]}, ModelAnswer("r", [RAN, call()], NONE, "", False)),
        (
            cut(TEXT, RAN | {"status": "in_progress"}),
            ModelAnswer("r", [TEXT], NONE, "max_output_tokens", False),
        ),
    ],
)
def test_answer_can_be_sent_back(response: dict[str, Any], answer: ModelAnswer) -> None:
    assert make_answer(response) == answer


def test_invalid_arguments_are_dropped_only_if_incomplete() -> None:
    assert make_answer({"id": "r", "output": [call(arguments="{")]}).output == [call(arguments="{")]


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (None, NONE),
        ("many", NONE),
        ({"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}, Usage(3, 2, 5)),
        ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2, 5)),
        ({"input_tokens": 3, "output_tokens": 2, "estimated": True}, Usage(3, 2, 5, estimated=True)),
        ({"input_tokens": 3, "output_tokens": None, "input_tokens_details": None}, Usage(3, 0, 3)),
        (
            {
                "input_tokens": 3,
                "output_tokens": 2,
                "total_tokens": 9,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(3, 2, 9, InputTokensDetails(1), OutputTokensDetails(2)),
        ),
    ],
)
def test_usage_with_missing_fields_is_parsed(usage: Any, read: Usage) -> None:
    assert make_answer({"output": [], "usage": usage}).usage == read


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (b'{"type":"response.output_text.delta","delta":"a"}', ModelDelta("text", "a")),
        (WHOLE_DELTA, ModelDelta("text", "a")),
        (b'{"type":"response.reasoning_summary_text.delta","delta":"a"}', ModelDelta("reasoning", "a")),
        (b'{"type":"response.function_call_arguments.delta","delta":"a"}', None),
        (b'{"type":"keepalive"}', None),
    ],
)
def test_text_and_reasoning_deltas_are_read_in_any_form(event: bytes, delta: ModelDelta | None) -> None:
    assert read_delta(codec.decode_event(event)) == delta


def test_call_ids_of_a_turn_are_unique() -> None:
    ids = ["a", "a_3", "a", "a_3", ""]
    output = [{"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in ids]
    answer = make_answer({"status": "completed", "output": output})
    assert len({item["call_id"] for item in answer.output}) == 5
