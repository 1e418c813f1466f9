"""What every store promises of references: an item is found in responses it was not made in, and in conversations."""

from collections.abc import Callable
from typing import Protocol

import msgspec
import pytest

from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store, StoredResponse

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]


class Clock(Protocol):
    time: int


@pytest.fixture
def make_holder(make_stored: MakeStored) -> MakeStored:
    """A response that was asked with these items."""

    def make(response_id: str, *items: Item | Unknown, **options: object) -> StoredResponse:
        return msgspec.structs.replace(make_stored(response_id, **options), input=list(items))

    return make


def say(text: str) -> Message:
    """What the client calls msg_1."""
    return Message("user", text, "msg_1")


async def test_an_item_of_a_responses_input_or_output_is_found(store: Store, make_holder: MakeStored) -> None:
    stored = make_holder("resp_T", say("hello"))
    stored.response.output.append(Unknown(b'{"type":"hologram_call","id":"holo_9","n":1.50}'))
    await store.save("p", stored)
    assert await store.find_item("p", "msg_1") == say("hello")
    assert await store.find_item("p", "holo_9") == stored.response.output[-1]
    assert await store.find_item("p", "msg_2") is None
    assert await store.find_item("q", "msg_1") is None


async def test_an_item_is_found_while_its_response_waits_and_after_it_has_ended(
    store: Store, make_holder: MakeStored
) -> None:
    await store.enqueue("p", make_holder("resp_T", say("hello"), status="queued"), b"{}")
    assert await store.find_item("p", "msg_1") == say("hello")
    await store.claim("us", as_of=0, lease=10, limit=1)
    await store.save("p", make_holder("resp_T", say("hello"), status="in_progress"), owner="us")
    await store.save("p", make_holder("resp_T", say("hello")), owner="us", events=(0, [b"{}"]))
    assert await store.find_item("p", "msg_1") == say("hello")


async def test_of_several_responses_with_the_item_the_newest_counts(store: Store, make_holder: MakeStored) -> None:
    for number, text in enumerate(("one", "two", "three")):
        await store.save("p", make_holder(f"resp_{'cab'[number]}", say(text)))
    found = []
    for response_id in ("resp_b", "resp_a", "resp_c"):
        found.append(await store.find_item("p", "msg_1"))
        await store.delete("p", response_id)
    assert found == [say("three"), say("two"), say("one")]
    assert await store.find_item("p", "msg_1") is None


async def test_a_response_comes_before_a_conversation(store: Store, make_holder: MakeStored) -> None:
    await store.save("p", make_holder("resp_T", say("asked")))
    await store.create_conversation("p", Conversation("conv_1", 1), [say("added")])
    assert await store.find_item("p", "msg_1") == say("asked")
    await store.delete("p", "resp_T")
    assert await store.find_item("p", "msg_1") == say("added")


async def test_a_later_save_takes_the_place_of_the_items_before(
    store: Store, make_holder: MakeStored, make_items: MakeItems
) -> None:
    await store.save("p", make_holder("resp_T", *make_items("msg_1", "msg_2"), status="in_progress"))
    await store.save("p", make_holder("resp_T", *make_items("msg_2", "msg_3"), status="in_progress"))
    found = [await store.find_item("p", f"msg_{number}") for number in (1, 2, 3)]
    assert found == [None, *make_items("msg_2", "msg_3")]
    await store.save("p", make_holder("resp_T"))
    assert [await store.find_item("p", f"msg_{number}") for number in (1, 2, 3)] == [None] * 3


async def test_a_save_that_changes_nothing_leaves_the_items_as_they_are(store: Store, make_holder: MakeStored) -> None:
    await store.save("p", make_holder("resp_T", say("final")))
    await store.save("p", make_holder("resp_T", say("late"), Message("user", "late", "msg_2"), status="queued"))
    assert await store.find_item("p", "msg_1") == say("final")
    assert await store.find_item("p", "msg_2") is None


async def test_items_of_an_expired_response_are_not_found(store: Store, make_holder: MakeStored, clock: Clock) -> None:
    await store.save("p", make_holder("resp_a", say("lasting")))
    await store.save("p", make_holder("resp_b", say("expiring"), expires_at=clock.time + 10))
    assert await store.find_item("p", "msg_1") == say("expiring")
    clock.time += 10
    assert await store.find_item("p", "msg_1") == say("lasting")
    assert await store.expire(clock.time) == 1
    assert await store.find_item("p", "msg_1") == say("lasting")


async def test_projects_keep_the_same_item_apart(store: Store, make_holder: MakeStored) -> None:
    for project in ("ours", "theirs"):
        await store.save(project, make_holder("resp_T", say(project)))
    assert await store.delete("theirs", "resp_T") is True
    assert await store.find_item("ours", "msg_1") == say("ours")
    assert await store.find_item("theirs", "msg_1") is None


async def test_the_outputs_of_several_responses_come_in_one_go(
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


async def test_an_item_that_a_kept_response_has_made_is_found_by_its_id_alone(
    store: Store, make_holder: MakeStored
) -> None:
    owner, item = f"resp_{'0' * 44}", Message("user", "made there", f"msg_{'0' * 44}0000")
    await store.save("p", make_holder("resp_T", item))
    assert await store.find_item("p", str(item.id)) == item
    await store.delete("p", "resp_T")
    await store.save("p", make_holder(owner, item))
    await store.save("p", make_holder("resp_T", item))
    assert await store.find_item("p", str(item.id)) is None
