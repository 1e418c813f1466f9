"""Sealed reasoning: sealing, opening, and unreadable seals."""

from collections.abc import AsyncIterator
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
from support.engine_harness import EngineHarness

SEALER = Sealer([b"k" * 32])
WANTED = ["reasoning.encrypted_content"]


class Recorder(ScriptedBackend):
    """A backend that records the items it gets."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__("recorder", msgspec.convert({"default": script["default"]}, Script))
        self.read: list[Item | Unknown] = []

    async def stream(self, turn: Turn) -> Any:
        self.read = turn.items
        return await super().stream(turn)


def make_recorder(*produced: dict[str, Any]) -> Recorder:
    return Recorder({"default": list(produced)})


async def say(
    backend: Recorder, items: list[Item | Unknown] | None = None, *, name: str = "one", include: Any = None
) -> list[Delta]:
    turn = Turn(request=CreateRequest(model="scripted", include=include), items=items or [], project="p")
    answer = await SealedReasoning(backend, name=name, sealer=SEALER).stream(turn)
    return [delta for batch in [each async for each in answer] for delta in batch if not isinstance(delta, TokenUsage)]


async def seal_of(*produced: dict[str, Any], name: str = "one") -> str:
    emitted = await say(make_recorder(*produced, {"text": "So."}), name=name, include=WANTED)
    return next(delta.encrypted_content for delta in emitted if isinstance(delta, ReasoningSeal))


async def test_requested_reasoning_is_sealed_where_it_ends() -> None:
    emitted = await say(make_recorder({"reasoning": "Hm. Well."}, {"text": "So."}), include=WANTED)
    kinds = [type(delta) for delta in emitted]
    assert kinds.index(ReasoningSeal) == kinds.index(Text) - 1
    assert kinds.count(ReasoningSeal) == 1


async def test_reasoning_is_not_sealed_unless_requested_or_needed() -> None:
    emitted = await say(make_recorder({"reasoning": "Hm."}, {"text": "So."}))
    assert not [delta for delta in emitted if isinstance(delta, ReasoningSeal)]


async def test_opaque_state_is_always_sealed_and_returned_to_its_backend_only() -> None:
    emitted = await say(make_recorder({"reasoning": "Hm."}, {"seal": "signature"}, {"text": "So."}))
    sealed = next(delta.encrypted_content for delta in emitted if isinstance(delta, ReasoningSeal))
    assert "signature" not in sealed
    item = Reasoning(id="rs_1", encrypted_content=sealed)
    same, other = make_recorder({"text": "x"}), make_recorder({"text": "x"})
    await say(same, [item], name="one")
    await say(other, [item], name="two")
    assert same.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm.")], encrypted_content="signature")]
    assert other.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm.")])]


class SealingUpstream(Recorder):
    """A backend whose upstream seals its reasoning under an id of its own."""

    async def stream(self, turn: Turn) -> Any:
        self.read = turn.items

        async def answer() -> AsyncIterator[list[Delta]]:
            yield [ReasoningSeal("opaque", "rs_upstream"), Text("So.")]

        return answer()


async def test_upstream_gets_back_the_id_that_it_gave() -> None:
    backend, other = SealingUpstream({"default": []}), make_recorder({"text": "x"})
    emitted = await say(backend, include=WANTED)
    sealed = next(delta.encrypted_content for delta in emitted if isinstance(delta, ReasoningSeal))
    item = Reasoning(id="rs_ours", summary=[SummaryText("Hm.")], encrypted_content=sealed)
    await say(backend, [item])
    await say(other, [item], name="two")
    assert backend.read == [Reasoning(id="rs_upstream", summary=[SummaryText("Hm.")], encrypted_content="opaque")]
    assert other.read == [Reasoning(id="rs_ours", summary=[SummaryText("Hm.")])]


async def test_opaque_only_reasoning_is_not_sent_to_other_backend() -> None:
    backend = make_recorder({"text": "x"})
    await say(backend, [Reasoning(id="rs_1", encrypted_content=await seal_of({"seal": "opaque"}))], name="two")
    assert backend.read == []


async def test_each_stretch_of_reasoning_has_own_seal() -> None:
    script = ({"reasoning": "One."}, {"seal": "a"}, {"reasoning": "Two."}, {"seal": "b"}, {"text": "So."})
    emitted = await say(make_recorder(*script))
    seals = [delta.encrypted_content for delta in emitted if isinstance(delta, ReasoningSeal)]
    backend = make_recorder({"text": "x"})
    await say(backend, [Reasoning(id=f"rs_{index}", encrypted_content=seal) for index, seal in enumerate(seals)])
    assert backend.read == [
        Reasoning(id="rs_0", content=[ReasoningText("One.")], encrypted_content="a"),
        Reasoning(id="rs_1", content=[ReasoningText("Two.")], encrypted_content="b"),
    ]


async def test_interrupted_reasoning_is_sealed_before_end() -> None:
    backend = make_recorder({"reasoning": "Hm."})
    emitted = await say(backend, include=WANTED)
    assert isinstance(emitted[-2], ReasoningSeal)
    assert isinstance(emitted[-1], Finish)
    assert isinstance(emitted[0], deltas.Reasoning)


STORED = Reasoning(id="rs_1", content=[ReasoningText("Hm. "), ReasoningText("Well.")])
LATE = StoredReasoningSealer(SEALER)


async def test_stored_reasoning_is_sealed_later_and_readable_by_any_model() -> None:
    sealed = LATE.seal_item(STORED, project="p")
    assert isinstance(sealed, Reasoning)
    assert msgspec.structs.replace(sealed, encrypted_content=None) == STORED
    backend = make_recorder({"text": "x"})
    await say(backend, [msgspec.structs.replace(sealed, content=None)], name="two")
    assert backend.read == [Reasoning(id="rs_1", content=[ReasoningText("Hm. Well.")])]


def test_sealed_and_other_items_stay_unchanged() -> None:
    others = [
        Reasoning(id="rs_2", encrypted_content="sealed"),
        Message("user", "hi", "msg_1"),
        Unknown(b'{"type":"x"}'),
    ]
    page = make_page([STORED, *others], has_more=True)
    sealed = LATE.seal_item(STORED, project="p")
    assert LATE.seal_page(page, project="p") == msgspec.structs.replace(page, data=[sealed, *others])


def test_events_with_items_are_sealed_live_and_from_log() -> None:
    response = Response(id="resp_1", created_at=1, model="m", output=[STORED])
    emitted = [
        events.OutputItemAdded(3, 0, STORED),
        events.OutputItemDone(4, 0, STORED),
        events.Completed(5, response),
        Unknown(b'{"type":"response.completed"}'),
    ]
    logged = [Unknown(codec.encode(event)) for event in emitted]
    sealed = [
        emitted[0],
        events.OutputItemDone(4, 0, LATE.seal_item(STORED, project="p")),
        events.Completed(5, LATE.seal_response(response, project="p")),
        emitted[3],
    ]
    assert LATE.seal_events(emitted, project="p") == sealed
    assert list(map(codec.encode, LATE.seal_events(logged, project="p"))) == list(map(codec.encode, sealed))
    assert LATE.seal_response(response, project="p").output == [LATE.seal_item(STORED, project="p")]


@pytest.mark.parametrize("sealed", ["ant1.AAAA", "gAAAA-of-another-server"])
def test_unreadable_seal_is_left_out_with_warning(sealed: str) -> None:
    message = Message("user", "hi", id="msg_1")
    bare = Reasoning(id="rs_1", encrypted_content=sealed)
    emitted = Reasoning([SummaryText("Thinking.")], "rs_2", encrypted_content=sealed)
    assert drop_unreadable_seals([message, bare, emitted], SEALER, project="p") == (
        [message, Reasoning([SummaryText("Thinking.")], "rs_2")],
        [
            "reasoning rs_1: its encrypted_content cannot be opened here and was left out",
            "reasoning rs_2: its encrypted_content cannot be opened here and was left out",
        ],
    )


async def test_seal_of_other_project_is_unreadable() -> None:
    item = Reasoning(id="rs_1", encrypted_content=await seal_of({"reasoning": "Hm."}))
    assert drop_unreadable_seals([item], SEALER, project="p") == ([item], [])
    assert drop_unreadable_seals([item], SEALER, project="q")[0] == []


async def test_stateless_client_continues_with_sealed_reasoning() -> None:
    script = {"rules": [{"user": "hi", "answers": [[{"reasoning": "Hm."}, {"text": "Hello."}]]}], "default": "Again."}
    harness = EngineHarness(script, MemoryStore())
    await harness.engine.start()
    first = await harness.answer("hi", store=False, include=WANTED)
    thought, produced = first.output
    assert isinstance(thought, Reasoning)
    assert thought.encrypted_content
    carried = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
    run = await harness.ask(carried, store=False)
    assert (await run.drain()).output_text == "Again."
    assert run.warnings == []
    forged = [
        msgspec.structs.replace(thought, encrypted_content=f"{thought.encrypted_content}x", content=None),
        produced,
    ]
    run = await harness.ask(
        [{"role": "user", "content": "hi"}, *forged, {"role": "user", "content": "more"}], store=False
    )
    assert (await run.drain()).output_text == "Again."
    assert [warning for warning in run.warnings if "cannot be opened" in warning]
    await harness.engine.close()
