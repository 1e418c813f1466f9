"""The content of compaction items, and fingerprints of items."""

import pytest

from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compaction_item import (
    CompactionContent,
    fingerprint_item,
    join_fingerprints,
    make_summary_message,
    seal_content,
    unseal_content,
)
from antiphon.protocol import items
from antiphon.protocol.content import InputImage, InputText, OutputText, SummaryText
from antiphon.protocol.items import Compaction, Item
from antiphon.protocol.unions import Unknown
from support.compaction import SEALER, call, output, user

MEMORY = CompactionContent(
    summary="A bridge.",
    first=[user("build")],
    last=[call("c"), output("c", "ok"), Unknown(b'{"type":"acme:x","id":"x"}')],
    covered=join_fingerprints([fingerprint_item(user("build")), fingerprint_item(call("c"))]),
)


def test_sealed_content_round_trips() -> None:
    assert unseal_content(seal_content(MEMORY, SEALER, project="a"), SEALER, project="a") == MEMORY


def test_another_project_cannot_unseal_content() -> None:
    assert unseal_content(seal_content(MEMORY, SEALER, project="a"), SEALER, project="b") is None


def test_another_server_cannot_unseal_content() -> None:
    assert unseal_content(seal_content(MEMORY, SEALER, project="a"), Sealer([b"x" * 32]), project="a") is None


@pytest.mark.parametrize("payload", [b"[]", b'{"summary":"","first":[],"last":[],"covered":"","version":2}'])
def test_content_of_another_version_is_not_unsealed(payload: bytes) -> None:
    text = SEALER.seal(payload, project="a", purpose="compaction")
    assert unseal_content(Compaction(text), SEALER, project="a") is None


def test_summary_comes_between_first_and_last_items() -> None:
    assert MEMORY.list_items() == [*MEMORY.first, make_summary_message("A bridge."), *MEMORY.last]


def test_empty_summary_adds_no_message() -> None:
    assert CompactionContent(summary="", first=[user("a")], last=[user("b")], covered=b"").list_items() == [
        user("a"),
        user("b"),
    ]


def test_fingerprints_are_stored_once_each() -> None:
    marks = [fingerprint_item(user("a")), fingerprint_item(user("b"))]
    memory = CompactionContent(summary="", first=[], last=[], covered=join_fingerprints([*marks, *marks]))
    assert list(memory.list_fingerprints()) == marks


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (user("hi"), items.Message("user", [InputText("hi")], "msg_1", "completed")),
        (items.Message("assistant", "ho"), items.Message("assistant", [OutputText("ho")], "m", phase="final_answer")),
        (items.FunctionCallOutput("x", "c"), items.FunctionCallOutput([InputText("x")], "c", "fco_1", "completed")),
        (call("c"), items.FunctionCall("c", "look", "{}", "fc_1", "completed", created_by="me")),
        (
            items.Reasoning([], None, None, "sealed"),
            items.Reasoning([SummaryText("Hm.")], "rs_1", None, "sealed", "completed"),
        ),
        (Unknown(b'{"type":"acme:x","a":1}'), Unknown(b'{"id":"x_1","a":1,"type":"acme:x","status":"completed"}')),
    ],
)
def test_fingerprint_ignores_changes_by_clients(sent: Item | Unknown, stored: Item | Unknown) -> None:
    assert fingerprint_item(sent) == fingerprint_item(stored)


def test_different_items_have_different_fingerprints() -> None:
    different: list[Item | Unknown] = [
        user("a"),
        user("b"),
        items.Message("assistant", "a"),
        items.Message("user", [InputText("a"), InputText("b")]),
        items.Message("user", [InputText("a"), InputImage(image_url="data:,")]),
        call("a"),
        call("b"),
        call("a", '{"x":1}'),
        output("a", "a"),
        output("a", "b"),
        items.Reasoning([], None, None, "one"),
        items.Reasoning([], None, None, "two"),
    ]
    assert len({fingerprint_item(item) for item in different}) == len(different)
