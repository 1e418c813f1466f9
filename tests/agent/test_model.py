"""Turns of a model behind a server that does not take what it is asked, or not any more."""

import json
from typing import Any

import pytest

from antiphon import Agent, tool
from antiphon.agent.history import ENCRYPTED_REASONING, REASONING_LOST
from antiphon.agent.outcome import Notice, RunEnded, RunEvent
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol import codec
from support.agent_stage import Stage, TheirStage, call, open_stage, outputs_of

SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
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


def includes_of(stage: Stage) -> list[Any]:
    return [request.get("include") for request in stage.sent]


def seals_of(request: dict[str, Any]) -> list[str]:
    return [item["encrypted_content"] for item in request["input"] if "encrypted_content" in item]


async def watch(events: Any) -> tuple[list[str], Any]:
    """The notices of a run, and how it ended."""
    told: list[RunEvent] = [event async for event in events]
    assert isinstance(told[-1], RunEnded)
    return [event.message for event in told if isinstance(event, Notice)], told[-1].outcome


# Models that do not seal their reasoning


async def test_a_model_that_seals_nothing_is_asked_again_without_and_not_asked_to_again(stage: Stage) -> None:
    stage.play(UNSEALABLE, [LOOK], "Mild.", "Still mild.")
    agent = stage.agent(tools=[look_up])
    assert (await agent.run("How is it?")).text == "Mild."
    assert (await agent.run("And now?")).text == "Still mild."
    assert includes_of(stage) == [[ENCRYPTED_REASONING], None, None, None]
    assert stage.sent[0] == stage.sent[1] | {"include": [ENCRYPTED_REASONING]}


async def test_what_else_is_included_stays(stage: Stage) -> None:
    stage.play(UNSEALABLE, "Mild.")
    other = "message.output_text.logprobs"
    assert (await stage.agent(settings={"include": [other]}).run("How is it?")).text == "Mild."
    assert includes_of(stage) == [[other, ENCRYPTED_REASONING], [other]]


async def test_a_refusal_that_was_about_something_else_is_told_and_nothing_is_learnt_from_it(here: Stage) -> None:
    wrong = refuse("Invalid value: 'x'.", param="include[0]")
    here.play(wrong, wrong, "Mild.")
    agent = here.agent()
    outcome = await agent.run("How is it?")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.message) == ("failed", "Invalid value: 'x'.")
    assert (await agent.run("How is it?")).text == "Mild."
    assert includes_of(here) == [[ENCRYPTED_REASONING], None, [ENCRYPTED_REASONING]]


@pytest.mark.parametrize("include", [[], None])
async def test_settings_that_include_nothing_ask_for_no_seals(here: Stage, include: Any) -> None:
    here.play("Mild.")
    assert (await here.agent(settings={"include": include}).run("How is it?")).text == "Mild."
    assert includes_of(here) == [None]


# Seals that do not open any more


async def test_reasoning_that_the_server_cannot_read_any_more_is_left_out_and_that_is_told(stage: Stage) -> None:
    stage.play(UNREADABLE, [LOOK], "Mild.", "Still mild.")
    agent = stage.agent(tools=[look_up])
    notices, outcome = await watch(agent.run_stream("How is it?", history=[USER, THOUGHT, SAID]))
    assert (outcome.kind, outcome.text, notices) == ("final", "Mild.", [REASONING_LOST])
    refused, *others = stage.sent
    assert seals_of(refused) == ["old"]
    assert [seals_of(request) for request in others] == [[], []]
    # Whoever goes on from there does not stumble over it again.
    assert THOUGHT not in outcome.history
    assert (await agent.run("And now?", history=outcome.history)).text == "Still mild."
    assert seals_of(stage.sent[-1]) == []


async def test_what_is_sealed_anew_is_sent_back(here: Stage) -> None:
    here.play(UNREADABLE, [{"reasoning": "Look."}, {"seal": "new"}, LOOK], "Mild.")
    outcome = await here.agent(tools=[look_up]).run("How is it?", history=[USER, THOUGHT, SAID])
    assert outcome.text == "Mild."
    assert len(seals_of(here.sent[2])) == 1
    assert sum("encrypted_content" in item for item in outcome.history) == 1


async def test_a_run_that_was_resumed_knows_that_it_was_left_out(stage: Stage, ledger: Ledger) -> None:
    stage.play(UNREADABLE, [LOOK], "Mild.")
    agent = stage.agent(tools=[look_up])
    await agent.run("How is it?", history=[USER, THOUGHT, SAID], durable=ledger, run_id="run_1")
    assert THOUGHT not in (await agent.resume("run_1", durable=ledger)).history


async def test_without_anything_sealed_to_leave_out_the_error_is_told(stage: Stage) -> None:
    stage.play(UNREADABLE)
    outcome = await stage.agent().run("How is it?")
    assert outcome.error is not None
    assert (outcome.error.code, len(stage.sent)) == ("invalid_encrypted_content", 1)


async def test_a_server_that_cannot_read_what_it_has_stored_is_sent_the_rest_of_it(here: Stage) -> None:
    here.play([{"reasoning": "Look."}, {"seal": "old"}, LOOK], "Mild.")
    unreadable = InvalidRequest("It could not be verified.", code="invalid_encrypted_content")
    told, agent = list[RunEvent](), here.agent(tools=[look_up], state="server")
    async for event in agent.run_stream("How is it?"):
        if len(here.sent) == 1 and not here.transport.refusals:
            here.transport.refusals += [unreadable, unreadable]
        told.append(event)
    assert isinstance(told[-1], RunEnded)
    assert told[-1].outcome.text == "Mild."
    _, continued, whole, rest = here.sent
    assert "previous_response_id" in continued
    assert "previous_response_id" not in whole | rest
    assert (len(seals_of(whole)), seals_of(rest)) == (1, [])
    assert outputs_of(rest) == [("call_1", "Bern: mild")]


# Calls that are nobody's to make here


@pytest.mark.parametrize("state", ["client", "server"])
async def test_a_call_that_nobody_makes_is_told_and_the_run_goes_on(state: str) -> None:
    async with open_stage("upstream") as stage:
        assert isinstance(stage, TheirStage)
        stage.play([{"item": SHELL}, LOOK], "Mild.")
        outcome = await stage.agent(tools=[look_up], state=state).run("How is it?")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    asked = stage.sent[1]
    assert "previous_response_id" not in asked
    assert [item.get("type", item.get("role")) for item in asked["input"]] == [
        "user",
        "user",
        "function_call",
        "function_call_output",
    ]
    # Whoever can make it may still do so, and go on from there.
    assert SHELL in outcome.history


async def test_what_the_server_has_looked_up_goes_back_as_it_came(here: Stage) -> None:
    here.play([{"item": SEARCH}, LOOK], "Mild.", "Still mild.")
    agent = here.agent(tools=[look_up])
    outcome = await agent.run("How is it?")
    assert (outcome.text, SEARCH in outcome.history) == ("Mild.", True)
    assert (await agent.run("And now?", history=outcome.history)).text == "Still mild."


# Transports that do not do what they should


class Broken:
    """A transport that does not do what it should."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    async def stream(self, request: dict[str, Any]) -> Any:
        return self._tell()

    async def _tell(self) -> Any:
        for batch in self._batches:
            if isinstance(batch, Exception):
                raise batch
            yield [codec.decode_event(json.dumps(event).encode()) for event in batch]

    async def close(self) -> None:
        """There is nothing to release."""


@pytest.mark.parametrize("batches", [[KeyError("x")], [[], RecursionError()], [["text"]], [[7]]])
async def test_whatever_a_transport_does_is_how_the_run_ends_and_not_an_exception(batches: Any, ledger: Ledger) -> None:
    agent = Agent(model="m", transport=Broken(*batches))
    outcome = await agent.run("Go.", durable=ledger)
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns) == ("failed", 0)
    assert [run.status for run in await ledger.runs()] == ["failed"]


@pytest.mark.parametrize("content", [5, {"text": "a"}, ["a", None, 7], [{"type": "output_text", "text": 5}]])
async def test_content_that_makes_no_sense_leaves_a_run_that_can_be_read(content: Any, ledger: Ledger) -> None:
    said = {"type": "message", "role": "assistant", "content": content}
    ended = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [said]}}
    agent = Agent(model="m", transport=Broken([ended]))
    outcome = await agent.run("Go.", durable=ledger, run_id="run_1")
    assert outcome.kind in ("final", "no_progress")
    assert (await agent.resume("run_1", durable=ledger)).kind == outcome.kind
