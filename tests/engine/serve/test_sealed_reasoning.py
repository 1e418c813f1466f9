"""Reasoning that clients carry: sealed, opened, and never a reason to end a conversation."""

from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.engine.items import make_page
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.sealed_reasoning import SealedReasoning, StoredReasoningSealer, drop_unreadable_seals
from antiphon.protocol import codec, events
from antiphon.protocol.content import ReasoningText, SummaryText
from antiphon.protocol.items import Item, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.store import MemoryStore
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Finish, ReasoningSeal, Text, TokenUsage
from support.engine_harness import Bench

SEALER = Sealer([b"k" * 32])
WANTED = ["reasoning.encrypted_content"]


class Recorder(ScriptedBackend):
    """Keeps what it was given to read."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__("recorder", msgspec.convert({"default": script["default"]}, Script))
        self.read: list[Item | Unknown] = []

    async def stream(self, turn: Turn) -> Any:
        self.read = turn.items
        return await super().stream(turn)


def make_recorder(*said: dict[str, Any]) -> Recorder:
    return Recorder({"default": list(said)})


async def say(
    backend: Recorder, items: list[Item | Unknown] | None = None, *, name: str = "one", include: Any = None
) -> list[Delta]:
    turn = Turn(request=CreateRequest(model="scripted", include=include), items=items or [], project="p")
    answer = await SealedReasoning(backend, name=name, sealer=SEALER).stream(turn)
    return [delta for batch in [each async for each in answer] for delta in batch if not isinstance(delta, TokenUsage)]


async def seal_of(*said: dict[str, Any], name: str = "one") -> str:
    told = await say(make_recorder(*said, {"text": "So."}), name=name, include=WANTED)
    return next(delta.encrypted_content for delta in told if isinstance(delta, ReasoningSeal))


async def test_reasoning_is_sealed_when_it_is_asked_for_right_where_it_ends() -> None:
    told = await say(make_recorder({"reasoning": "Hm. Well."}, {"text": "So."}), include=WANTED)
    kinds = [type(delta) for delta in told]
    assert kinds.index(ReasoningSeal) == kinds.index(Text) - 1
    assert kinds.count(ReasoningSeal) == 1


async def test_reasoning_is_not_sealed_when_nobody_asks_and_nothing_needs_it() -> None:
    told = await say(make_recorder({"reasoning": "Hm."}, {"text": "So."}))
    assert not [delta for delta in told if isinstance(delta, ReasoningSeal)]


async def test_what_only_the_backend_understands_is_sealed_in_any_case_and_given_back_to_it_alone() -> None:
    told = await say(make_recorder({"reasoning": "Hm."}, {"seal": "signature"}, {"text": "So."}))
    sealed = next(delta.encrypted_content for delta in told if isinstance(delta, ReasoningSeal))
    assert "signature" not in sealed
    item = Reasoning(id="rs_1", encrypted_content=sealed)
    same, other = make_recorder({"text": "x"}), make_recorder({"text": "x"})
    await say(same, [item], name="one")
    await say(other, [item], name="two")
    assert same.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm.")], encrypted_content="signature")]
    assert other.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm.")])]


async def test_reasoning_that_another_backend_cannot_use_at_all_is_not_shown_to_it() -> None:
    backend = make_recorder({"text": "x"})
    await say(backend, [Reasoning(id="rs_1", encrypted_content=await seal_of({"seal": "opaque"}))], name="two")
    assert backend.read == []


async def test_two_stretches_of_reasoning_have_a_seal_each() -> None:
    script = ({"reasoning": "One."}, {"seal": "a"}, {"reasoning": "Two."}, {"seal": "b"}, {"text": "So."})
    told = await say(make_recorder(*script))
    seals = [delta.encrypted_content for delta in told if isinstance(delta, ReasoningSeal)]
    backend = make_recorder({"text": "x"})
    await say(backend, [Reasoning(id=f"rs_{index}", encrypted_content=seal) for index, seal in enumerate(seals)])
    assert backend.read == [
        Reasoning(id="rs_0", content=[ReasoningText("One.")], encrypted_content="a"),
        Reasoning(id="rs_1", content=[ReasoningText("Two.")], encrypted_content="b"),
    ]


async def test_reasoning_that_was_cut_off_is_sealed_before_the_end() -> None:
    backend = make_recorder({"reasoning": "Hm."})
    told = await say(backend, include=WANTED)
    assert isinstance(told[-2], ReasoningSeal)
    assert isinstance(told[-1], Finish)
    assert isinstance(told[0], deltas.Reasoning)


KEPT = Reasoning(id="rs_1", content=[ReasoningText("Hm. "), ReasoningText("Well.")])
LATE = StoredReasoningSealer(SEALER)


async def test_what_was_kept_without_a_seal_gets_one_later_and_any_model_reads_it() -> None:
    sealed = LATE.seal_item(KEPT, project="p")
    assert isinstance(sealed, Reasoning)
    assert msgspec.structs.replace(sealed, encrypted_content=None) == KEPT
    backend = make_recorder({"text": "x"})
    await say(backend, [msgspec.structs.replace(sealed, content=None)], name="two")
    assert backend.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm. Well.")])]


def test_what_has_a_seal_and_what_is_no_reasoning_stays_as_it_is() -> None:
    others = [
        Reasoning(id="rs_2", encrypted_content="sealed"),
        Message("user", "hi", "msg_1"),
        Unknown(b'{"type":"x"}'),
    ]
    page = make_page([KEPT, *others], has_more=True)
    sealed = LATE.seal_item(KEPT, project="p")
    assert LATE.seal_page(page, project="p") == msgspec.structs.replace(page, data=[sealed, *others])


def test_what_tells_whole_items_has_their_seals_whether_it_comes_from_the_run_or_from_the_log() -> None:
    response = Response(id="resp_1", created_at=1, model="m", output=[KEPT])
    told = [
        events.OutputItemAdded(3, 0, KEPT),
        events.OutputItemDone(4, 0, KEPT),
        events.Completed(5, response),
        Unknown(b'{"type":"response.completed"}'),
    ]
    logged = [Unknown(codec.encode(event)) for event in told]
    sealed = [
        told[0],
        events.OutputItemDone(4, 0, LATE.seal_item(KEPT, project="p")),
        events.Completed(5, LATE.seal_response(response, project="p")),
        told[3],
    ]
    assert LATE.seal_events(told, project="p") == sealed
    assert list(map(codec.encode, LATE.seal_events(logged, project="p"))) == list(map(codec.encode, sealed))
    assert LATE.seal_response(response, project="p").output == [LATE.seal_item(KEPT, project="p")]


@pytest.mark.parametrize("sealed", ["ant1.AAAA", "gAAAA-of-another-server"])
def test_a_seal_that_does_not_open_is_left_out_with_a_warning(sealed: str) -> None:
    message = Message("user", "hi", id="msg_1")
    bare = Reasoning(id="rs_1", encrypted_content=sealed)
    told = Reasoning([SummaryText("Thinking.")], "rs_2", encrypted_content=sealed)
    assert drop_unreadable_seals([message, bare, told], SEALER, project="p") == (
        [message, Reasoning([SummaryText("Thinking.")], "rs_2")],
        [
            "reasoning rs_1: its encrypted_content cannot be opened here and was left out",
            "reasoning rs_2: its encrypted_content cannot be opened here and was left out",
        ],
    )


async def test_a_seal_of_another_project_does_not_open() -> None:
    item = Reasoning(id="rs_1", encrypted_content=await seal_of({"reasoning": "Hm."}))
    assert drop_unreadable_seals([item], SEALER, project="p") == ([item], [])
    assert drop_unreadable_seals([item], SEALER, project="q")[0] == []


async def test_a_client_that_keeps_the_state_itself_continues_with_what_it_was_given() -> None:
    script = {"rules": [{"user": "hi", "answers": [[{"reasoning": "Hm."}, {"text": "Hello."}]]}], "default": "Again."}
    bench = Bench(script, MemoryStore())
    await bench.engine.start()
    first = await bench.answer("hi", store=False, include=WANTED)
    thought, said = first.output
    assert isinstance(thought, Reasoning)
    assert thought.encrypted_content
    carried = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
    run = await bench.ask(carried, store=False)
    assert (await run.drain()).output_text == "Again."
    assert run.warnings == []
    forged = [msgspec.structs.replace(thought, encrypted_content=f"{thought.encrypted_content}x", content=None), said]
    run = await bench.ask(
        [{"role": "user", "content": "hi"}, *forged, {"role": "user", "content": "more"}], store=False
    )
    assert (await run.drain()).output_text == "Again."
    assert [warning for warning in run.warnings if "cannot be opened" in warning]
    await bench.engine.close()
