"""References to items of responses and conversations, in all stores."""

from collections.abc import Callable
from typing import Protocol

import msgspec
import pytest

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.store.base import TOKEN_LENGTH, Store, StoredResponse

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]


class Clock(Protocol):
    time: int


@pytest.fixture
def make_with_input(make_stored: MakeStored) -> MakeStored:
    """Make a response with these input items."""

    def make(response_id: str, *items: Item | Unknown, **options: object) -> StoredResponse:
        return msgspec.structs.replace(make_stored(response_id, **options), input=list(items))

    return make


def make_message(text: str) -> Message:
    return Message("user", text, "msg_1")


async def test_item_of_input_or_output_is_found(store: Store, make_with_input: MakeStored) -> None:
    stored = make_with_input("resp_T", make_message("hello"))
    stored.response.output.append(Unknown(b'{"type":"hologram_call","id":"holo_9","n":1.50}'))
    await store.save("p", stored)
    assert await store.find_item("p", "msg_1") == make_message("hello")
    assert await store.find_item("p", "holo_9") == stored.response.output[-1]
    assert await store.find_item("p", "msg_2") is None
    assert await store.find_item("q", "msg_1") is None


async def test_item_is_found_while_its_response_is_queued_and_after_its_end(
    store: Store, make_with_input: MakeStored
) -> None:
    await store.enqueue("p", make_with_input("resp_T", make_message("hello"), status="queued"), b"{}")
    assert await store.find_item("p", "msg_1") == make_message("hello")
    await store.claim("us", as_of=0, lease=10, limit=1)
    await store.save("p", make_with_input("resp_T", make_message("hello"), status="in_progress"), owner="us")
    await store.save("p", make_with_input("resp_T", make_message("hello")), owner="us", events=(0, [b"{}"]))
    assert await store.find_item("p", "msg_1") == make_message("hello")


async def test_item_in_several_responses_is_found_in_the_newest(store: Store, make_with_input: MakeStored) -> None:
    for number, text in enumerate(("one", "two", "three")):
        await store.save("p", make_with_input(f"resp_{'cab'[number]}", make_message(text)))
    found = []
    for response_id in ("resp_b", "resp_a", "resp_c"):
        found.append(await store.find_item("p", "msg_1"))
        await store.delete("p", response_id)
    assert found == [make_message("three"), make_message("two"), make_message("one")]
    assert await store.find_item("p", "msg_1") is None


async def test_item_is_found_in_a_response_before_a_conversation(store: Store, make_with_input: MakeStored) -> None:
    await store.save("p", make_with_input("resp_T", make_message("input")))
    await store.create_conversation("p", Conversation("conv_1", 1), [make_message("appended")])
    assert await store.find_item("p", "msg_1") == make_message("input")
    await store.delete("p", "resp_T")
    assert await store.find_item("p", "msg_1") == make_message("appended")


async def test_later_save_replaces_the_indexed_items(
    store: Store, make_with_input: MakeStored, make_items: MakeItems
) -> None:
    await store.save("p", make_with_input("resp_T", *make_items("msg_1", "msg_2"), status="in_progress"))
    await store.save("p", make_with_input("resp_T", *make_items("msg_2", "msg_3"), status="in_progress"))
    found = [await store.find_item("p", f"msg_{number}") for number in (1, 2, 3)]
    assert found == [None, *make_items("msg_2", "msg_3")]
    await store.save("p", make_with_input("resp_T"))
    assert [await store.find_item("p", f"msg_{number}") for number in (1, 2, 3)] == [None] * 3


async def test_ignored_save_does_not_change_the_indexed_items(store: Store, make_with_input: MakeStored) -> None:
    await store.save("p", make_with_input("resp_T", make_message("final")))
    await store.save(
        "p", make_with_input("resp_T", make_message("late"), Message("user", "late", "msg_2"), status="queued")
    )
    assert await store.find_item("p", "msg_1") == make_message("final")
    assert await store.find_item("p", "msg_2") is None


async def test_items_of_an_expired_response_are_not_found(
    store: Store, make_with_input: MakeStored, clock: Clock
) -> None:
    await store.save("p", make_with_input("resp_a", make_message("lasting")))
    await store.save("p", make_with_input("resp_b", make_message("expiring"), expires_at=clock.time + 10))
    assert await store.find_item("p", "msg_1") == make_message("expiring")
    clock.time += 10
    assert await store.find_item("p", "msg_1") == make_message("lasting")
    assert await store.expire(clock.time) == 1
    assert await store.find_item("p", "msg_1") == make_message("lasting")


async def test_same_item_id_in_two_projects_is_independent(store: Store, make_with_input: MakeStored) -> None:
    for project in ("ours", "theirs"):
        await store.save(project, make_with_input("resp_T", make_message(project)))
    assert await store.delete("theirs", "resp_T") is True
    assert await store.find_item("ours", "msg_1") == make_message("ours")
    assert await store.find_item("theirs", "msg_1") is None


async def test_load_outputs_returns_items_in_the_requested_order(
    store: Store, make_stored: MakeStored, clock: Clock
) -> None:
    for number in range(3):
        await store.save("p", make_stored(f"resp_{number}", expires_at=clock.time + 10 * number if number else None))
    wanted = ["resp_2", "resp_none", "resp_1", "resp_0"]
    outputs = {each: make_stored(each).response.output for each in wanted}
    assert await store.load_outputs("p", wanted) == [*outputs["resp_2"], *outputs["resp_1"], *outputs["resp_0"]]
    clock.time += 10
    assert await store.load_outputs("p", wanted) == [*outputs["resp_2"], *outputs["resp_0"]]
    assert await store.load_outputs("q", wanted) == []


async def test_item_of_a_stored_response_is_not_found_in_others(store: Store, make_with_input: MakeStored) -> None:
    source, item = f"resp_{'0' * 44}", Message("user", "produced there", f"msg_{'0' * 44}0000")
    await store.save("p", make_with_input("resp_T", item))
    assert await store.find_item("p", str(item.id)) == item
    await store.delete("p", "resp_T")
    await store.save("p", make_with_input(source, item))
    await store.save("p", make_with_input("resp_T", item))
    assert await store.find_item("p", str(item.id)) is None


async def test_items_are_loaded_from_responses_and_conversations(
    store: Store, make_stored: MakeStored, make_with_input: MakeStored, make_items: MakeItems
) -> None:
    token = "t" * TOKEN_LENGTH
    own = Message("user", "own", f"msg_{token}0000")
    produced = Message("assistant", "produced", f"msg_{token}0001")
    stored = make_with_input(f"resp_{token}", own, Message("user", "older", "msg_1"))
    stored.response.output[:] = [produced]
    await store.save("p", stored)
    await store.save("p", make_with_input("resp_newer", Message("user", "newer", "msg_1")))
    await store.create_conversation("p", Conversation("conv_1", 1), make_items("msg_2"))
    wanted = [own.id, produced.id, "msg_1", "msg_2", "msg_3", f"msg_{token}0002"]
    assert await store.load_items("p", [each for each in wanted if each]) == {
        own.id: own,
        produced.id: produced,
        "msg_1": Message("user", "newer", "msg_1"),
        "msg_2": make_items("msg_2")[0],
    }
    assert await store.load_items("q", ["msg_1", "msg_2"]) == {}
    assert await store.load_items("p", []) == {}


async def test_many_items_of_one_response_are_loaded(store: Store, make_with_input: MakeStored) -> None:
    items = [Message("user", str(number), f"msg_{number}") for number in range(500)]
    await store.save("p", make_with_input("resp_T", *items))
    assert await store.load_items("p", [f"msg_{number}" for number in range(600)]) == {item.id: item for item in items}
