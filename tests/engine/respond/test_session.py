from typing import Any

import pytest

from antiphon.engine.respond.session import Session
from antiphon.protocol import codec
from antiphon.protocol.content import OutputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown


def say(text: str, role: Any = "user") -> Message:
    return Message(role, [OutputText(text)] if role == "assistant" else text)


def end(session: Session, name: str, previous: str | None = None, **options: Any) -> list[Item | Unknown]:
    """Let a response end on the connection, and give what can be read of it."""
    before = session.find(previous)
    asked: list[Item | Unknown] = [say(options.pop("text", name))]
    read = [*(before.items if before is not None else ()), *asked]
    lane = options.pop("lane", None)
    response = Response(
        id=name,
        created_at=0,
        model="m",
        previous_response_id=previous,
        output=[say(name, "assistant")],
        **{"store": False, **options},
    )
    session.remember(response, read, input_items=asked, lane=lane)
    return [*read, *response.output]


def kept(session: Session, names: str) -> str:
    return "".join(name for name in names if session.find(name) is not None)


def test_a_response_is_remembered_with_everything_before_it() -> None:
    session = Session()
    end(session, "a")
    items = end(session, "b", "a")
    found = session.find("b")
    assert found is not None
    assert (list(found.items), found.previous, found.stored) == (items, "a", False)
    assert found.size >= sum(len(codec.encode(item)) for item in items)
    assert session.find(None) is None


def test_what_the_store_has_whole_is_not_kept_twice() -> None:
    session = Session()
    end(session, "a", store=True)
    end(session, "b", "a", store=True)
    assert kept(session, "ab") == ""
    end(session, "c")
    end(session, "d", "c", store=True)
    assert kept(session, "cd") == "cd"


def test_the_oldest_are_forgotten_first() -> None:
    session = Session(max_responses=3)
    for name in "abcde":
        end(session, name)
    assert kept(session, "abcde") == "cde"


def test_the_latest_of_a_lane_outlives_newer_ones_of_others() -> None:
    session = Session(max_responses=3)
    end(session, "a", lane="quiet")
    for name in "bcde":
        end(session, name, lane="busy")
    assert kept(session, "abcde") == "ade"


def test_there_is_an_end_to_lanes_too() -> None:
    session = Session(max_responses=3)
    for name in "abcde":
        end(session, name, lane=name)
    assert kept(session, "abcde") == "cde"


def test_a_long_chain_counts_once() -> None:
    session = Session(max_bytes=12_000)
    previous = None
    for name in "abcdefgh":
        end(session, name, previous, text="x" * 1000)
        previous = name
    assert kept(session, "abcdefgh") == "abcdefgh"


def test_separate_chains_share_the_room() -> None:
    session = Session(max_bytes=3000)
    for name in "abcd":
        end(session, name, text="x" * 1000)
    assert kept(session, "abcd") == "cd"


def test_what_is_too_large_alone_is_not_kept() -> None:
    session = Session(max_bytes=3000)
    end(session, "a")
    end(session, "b", text="x" * 4000, lane="b")
    assert kept(session, "ab") == "a"


@pytest.mark.parametrize("unknown", [None, "never"])
def test_forgetting_is_final_and_forgetting_nothing_is_nothing(unknown: str | None) -> None:
    session = Session()
    end(session, "a")
    end(session, "b", "a")
    session.forget("a")
    session.forget(unknown)
    assert kept(session, "ab") == "b"
