from typing import Any

import pytest

from antiphon.engine.respond.session import ConnectionMemory
from antiphon.protocol import codec
from antiphon.protocol.content import OutputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown


def say(text: str, role: Any = "user") -> Message:
    return Message(role, [OutputText(text)] if role == "assistant" else text)


def end(session: ConnectionMemory, name: str, previous: str | None = None, **options: Any) -> list[Item | Unknown]:
    """End a response on the connection and return the items of its context and output."""
    before = session.find(previous)
    requested: list[Item | Unknown] = [say(options.pop("text", name))]
    read = [*(before.items if before is not None else ()), *requested]
    lane = options.pop("lane", None)
    response = Response(
        id=name,
        created_at=0,
        model="m",
        previous_response_id=previous,
        output=[say(name, "assistant")],
        **{"store": False, **options},
    )
    session.remember(response, read, input_items=requested, lane=lane)
    return [*read, *response.output]


def retained(session: ConnectionMemory, names: str) -> str:
    return "".join(name for name in names if session.find(name) is not None)


def test_response_is_remembered_with_its_context() -> None:
    session = ConnectionMemory()
    end(session, "a")
    items = end(session, "b", "a")
    found = session.find("b")
    assert found is not None
    assert (list(found.items), found.previous, found.stored) == (items, "a", False)
    assert found.size >= sum(len(codec.encode(item)) for item in items)
    assert session.find(None) is None


def test_stored_chain_is_not_remembered() -> None:
    session = ConnectionMemory()
    end(session, "a", store=True)
    end(session, "b", "a", store=True)
    assert retained(session, "ab") == ""
    end(session, "c")
    end(session, "d", "c", store=True)
    assert retained(session, "cd") == "cd"


def test_oldest_responses_are_evicted_first() -> None:
    session = ConnectionMemory(max_responses=3)
    for name in "abcde":
        end(session, name)
    assert retained(session, "abcde") == "cde"


def test_latest_of_lane_outlives_newer_ones_of_others() -> None:
    session = ConnectionMemory(max_responses=3)
    end(session, "a", lane="quiet")
    for name in "bcde":
        end(session, name, lane="busy")
    assert retained(session, "abcde") == "ade"


def test_lanes_are_evicted_at_limit() -> None:
    session = ConnectionMemory(max_responses=3)
    for name in "abcde":
        end(session, name, lane=name)
    assert retained(session, "abcde") == "cde"


def test_long_chain_is_measured_once() -> None:
    session = ConnectionMemory(max_bytes=12_000)
    previous = None
    for name in "abcdefgh":
        end(session, name, previous, text="x" * 1000)
        previous = name
    assert retained(session, "abcdefgh") == "abcdefgh"


def test_separate_chains_share_size_limit() -> None:
    session = ConnectionMemory(max_bytes=3000)
    for name in "abcd":
        end(session, name, text="x" * 1000)
    assert retained(session, "abcd") == "cd"


def test_response_over_size_limit_is_not_remembered() -> None:
    session = ConnectionMemory(max_bytes=3000)
    end(session, "a")
    end(session, "b", text="x" * 4000, lane="b")
    assert retained(session, "ab") == "a"


@pytest.mark.parametrize("unknown", [None, "never"])
def test_forget_is_final_and_accepts_none(unknown: str | None) -> None:
    session = ConnectionMemory()
    end(session, "a")
    end(session, "b", "a")
    session.forget("a")
    session.forget(unknown)
    assert retained(session, "ab") == "b"
