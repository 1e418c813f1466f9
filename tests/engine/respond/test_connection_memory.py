from typing import Any

import pytest

from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.protocol import codec
from antiphon.protocol.content import OutputText
from antiphon.protocol.items import Item, Message
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown


def say(text: str, role: Any = "user") -> Message:
    return Message(role, [OutputText(text)] if role == "assistant" else text)


def end(memory: ConnectionMemory, name: str, previous: str | None = None, **options: Any) -> list[Item | Unknown]:
    """End a response on the connection and return the items of its context and output."""
    before = memory.find(previous)
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
    memory.remember(response, read, input_items=requested, lane=lane)
    return [*read, *response.output]


def retained(memory: ConnectionMemory, names: str) -> str:
    return "".join(name for name in names if memory.find(name) is not None)


def test_response_is_remembered_with_its_context() -> None:
    memory = ConnectionMemory()
    end(memory, "a")
    items = end(memory, "b", "a")
    found = memory.find("b")
    assert found is not None
    assert (list(found.items), found.previous, found.stored) == (items, "a", False)
    assert found.size >= sum(len(codec.encode(item)) for item in items)
    assert memory.find(None) is None


def test_stored_chain_is_not_remembered() -> None:
    memory = ConnectionMemory()
    end(memory, "a", store=True)
    end(memory, "b", "a", store=True)
    assert retained(memory, "ab") == ""
    end(memory, "c")
    end(memory, "d", "c", store=True)
    assert retained(memory, "cd") == "cd"


def test_oldest_responses_are_evicted_first() -> None:
    memory = ConnectionMemory(max_responses=3)
    for name in "abcde":
        end(memory, name)
    assert retained(memory, "abcde") == "cde"


def test_latest_of_lane_outlives_newer_ones_of_others() -> None:
    memory = ConnectionMemory(max_responses=3)
    end(memory, "a", lane="quiet")
    for name in "bcde":
        end(memory, name, lane="busy")
    assert retained(memory, "abcde") == "ade"


def test_lanes_are_evicted_at_limit() -> None:
    memory = ConnectionMemory(max_responses=3)
    for name in "abcde":
        end(memory, name, lane=name)
    assert retained(memory, "abcde") == "cde"


def test_long_chain_is_measured_once() -> None:
    memory = ConnectionMemory(max_bytes=12_000)
    previous = None
    for name in "abcdefgh":
        end(memory, name, previous, text="x" * 1000)
        previous = name
    assert retained(memory, "abcdefgh") == "abcdefgh"


def test_separate_chains_share_size_limit() -> None:
    memory = ConnectionMemory(max_bytes=3000)
    for name in "abcd":
        end(memory, name, text="x" * 1000)
    assert retained(memory, "abcd") == "cd"


def test_response_over_size_limit_is_not_remembered() -> None:
    memory = ConnectionMemory(max_bytes=3000)
    end(memory, "a")
    end(memory, "b", text="x" * 4000, lane="b")
    assert retained(memory, "ab") == "a"


@pytest.mark.parametrize("unknown", [None, "never"])
def test_forget_is_final_and_accepts_none(unknown: str | None) -> None:
    memory = ConnectionMemory()
    end(memory, "a")
    end(memory, "b", "a")
    memory.forget("a")
    memory.forget(unknown)
    assert retained(memory, "ab") == "b"
