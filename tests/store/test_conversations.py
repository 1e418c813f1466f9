"""Conversations, in all stores."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import pytest

from antiphon.errors import InvalidRequest, ServerError
from antiphon.protocol.codec import encode
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.store import record
from antiphon.store.base import ItemRows, Order, Store, StoredResponse

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]

CONVERSATION = Conversation(id="conv_1", created_at=1_700_000_000, metadata={"topic": "demo"})


class Clock(Protocol):
    time: int


async def read_ids(store: Store, conversation_id: str = "conv_1") -> list[str | None]:
    items = await store.load_conversation_items("p", conversation_id)
    assert items is not None
    return [item.id for item in items]


async def test_conversation_is_loaded_with_its_items(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    assert await store.load_conversation("p", "conv_1") == CONVERSATION
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_1", "msg_2")


async def test_conversation_without_metadata_and_items_is_stored(store: Store) -> None:
    bare = Conversation(id="conv_1", created_at=1)
    await store.create_conversation("p", bare, [])
    assert await store.load_conversation("p", "conv_1") == bare
    assert await store.load_conversation_items("p", "conv_1") == []


async def test_unknown_items_are_loaded_byte_for_byte(store: Store) -> None:
    item = Unknown(b'{ "type" : "hologram_call",\n\t"id": "holo_1", "n": 1.50, "text": "\\u00e9 \\/" }')
    await store.create_conversation("p", CONVERSATION, [item])
    assert await store.load_conversation_items("p", "conv_1") == [item]
    assert await store.load_item("p", "conv_1", "holo_1") == item
    assert await store.find_item("p", "holo_1") == item


async def test_existing_conversation_is_not_created_again(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    with pytest.raises(ServerError):
        await store.create_conversation("p", Conversation(id="conv_1", created_at=2), make_items("msg_2"))
    assert await store.load_conversation("p", "conv_1") == CONVERSATION
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_1")


async def test_conversation_with_a_duplicate_item_is_not_created(store: Store, make_items: MakeItems) -> None:
    with pytest.raises(InvalidRequest, match="msg_1") as refusal:
        await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_1"))
    assert (refusal.value.param, refusal.value.code, refusal.value.__cause__) == ("items", "invalid_value", None)
    assert await store.load_conversation("p", "conv_1") is None


@pytest.mark.parametrize("metadata", [{"other": "x"}, {}, None])
async def test_update_replaces_the_metadata(store: Store, metadata: dict[str, str] | None) -> None:
    await store.create_conversation("p", CONVERSATION, [])
    updated = Conversation(id="conv_1", created_at=1_700_000_000, metadata=metadata)
    assert await store.update_conversation("p", "conv_1", metadata) == updated
    assert await store.load_conversation("p", "conv_1") == updated


async def test_unknown_conversation_has_no_items(store: Store, make_items: MakeItems) -> None:
    assert await store.load_conversation("p", "conv_1") is None
    assert await store.update_conversation("p", "conv_1", None) is None
    assert await store.delete_conversation("p", "conv_1") is False
    assert await store.append_items("p", "conv_1", make_items("msg_1")) is False
    assert await store.list_items("p", "conv_1", after=None, limit=10, order="asc") is None
    assert await store.list_items("p", "conv_1", after="msg_1", limit=10, order="asc") is None
    assert await store.load_conversation_items("p", "conv_1") is None
    assert await store.load_item("p", "conv_1", "msg_1") is None
    assert await store.delete_item("p", "conv_1", "msg_1") is False
    assert await store.find_item("p", "msg_1") is None


async def test_deleting_a_conversation_deletes_its_items(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    assert await store.delete_conversation("p", "conv_1") is True
    assert await store.find_item("p", "msg_1") is None
    await store.create_conversation("p", CONVERSATION, [])
    assert await store.load_conversation_items("p", "conv_1") == []


async def test_expired_conversation_is_not_returned(store: Store, make_items: MakeItems, clock: Clock) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"), expires_at=clock.time + 1)
    assert await store.find_item("p", "msg_1") == make_items("msg_1")[0]
    clock.time += 1
    await test_unknown_conversation_has_no_items(store, make_items)


async def test_appending_extends_the_expiry_of_a_conversation(
    store: Store, make_items: MakeItems, clock: Clock
) -> None:
    await store.create_conversation("p", CONVERSATION, [], expires_at=clock.time + 2)
    clock.time += 1
    await store.append_items("p", "conv_1", make_items("msg_1"), expires_at=clock.time + 2)
    clock.time += 1
    await store.append_items("p", "conv_1", make_items("msg_2"), expires_at=clock.time)
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_1", "msg_2")
    clock.time += 1
    assert await store.load_conversation_items("p", "conv_1") is None


async def test_conversation_without_expiry_never_expires(store: Store, make_items: MakeItems, clock: Clock) -> None:
    await store.create_conversation("p", CONVERSATION, [])
    await store.append_items("p", "conv_1", make_items("msg_1"), expires_at=clock.time + 1)
    clock.time += 1
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_1")


async def test_appended_items_come_last(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_9"))
    assert await store.append_items("p", "conv_1", make_items("msg_5", "msg_7")) is True
    assert await store.append_items("p", "conv_1", []) is True
    assert await store.append_items("p", "conv_1", make_items("msg_1")) is True
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_9", "msg_5", "msg_7", "msg_1")


@pytest.mark.parametrize("block", [("msg_2", "msg_1"), ("msg_2", "msg_3", "msg_2")])
async def test_block_with_a_known_item_id_is_not_appended(
    store: Store, make_items: MakeItems, block: tuple[str, ...]
) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    with pytest.raises(InvalidRequest, match=f"'conv_1' already has an item with id '{block[-1]}'") as refusal:
        await store.append_items("p", "conv_1", make_items(*block))
    assert (refusal.value.param, refusal.value.code) == ("items", "invalid_value")
    assert await read_ids(store) == ["msg_1"]


async def test_input_items_already_in_the_conversation_are_skipped(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    for answer in ("msg_a", "msg_b"):
        input_items = make_items("msg_1", "msg_2")
        assert await store.append_items("p", "conv_1", input_items, answer=make_items(answer)) is True
    expected = make_items("msg_1", "msg_2", "msg_a", "msg_b")
    assert await store.load_conversation_items("p", "conv_1") == expected


async def test_items_with_taken_ids_are_appended_under_new_ids(store: Store, make_items: MakeItems) -> None:
    there = make_items("msg_1", "msg_2", "msg_2_2")
    await store.create_conversation("p", CONVERSATION, there)
    other = Message("user", "I am another.", "msg_1")
    twice = Unknown(b'{"type":"hologram_call","id":"msg_2","n":1.50}')
    assert await store.append_items("p", "conv_1", [other], answer=[*make_items("msg_2"), twice, twice]) is True
    assert await store.load_conversation_items("p", "conv_1") == [
        *there,
        Message("user", "I am another.", "msg_1_2"),
        Message("user", "I am msg_2.", "msg_2_3"),
        Unknown(b'{"type":"hologram_call","id":"msg_2_4","n":1.50}'),
        Unknown(b'{"type":"hologram_call","id":"msg_2_5","n":1.50}'),
    ]


async def test_items_with_unusual_ids_are_found_by_them(store: Store) -> None:
    ids = ["msg", "msg\x00", "msg\x000", "msg\x01", "msg\x010", "msg\U0001f642", "m" * 2000, "m" * 1999 + "n"]
    items: list[Item | Unknown] = [Message("user", str(number), item_id) for number, item_id in enumerate(ids)]
    await store.create_conversation("p", CONVERSATION, items[:2])
    assert await store.append_items("p", "conv_1", items[2:]) is True
    # Items that the conversation has are skipped, so each of them was found.
    assert await store.append_items("p", "conv_1", items, answer=[Message("assistant", "!", "msg\x00")]) is True
    answer = Message("assistant", "!", "msg\x00_2")
    assert await store.load_conversation_items("p", "conv_1") == [*items, answer]
    expected = dict(zip(ids, items, strict=True))
    assert await store.load_items("p", ids) == expected
    assert {item_id: await store.find_item("p", item_id) for item_id in ids} == expected
    assert {item_id: await store.load_item("p", "conv_1", item_id) for item_id in ids} == expected


async def test_items_without_an_id_are_stored(store: Store, make_stored: MakeStored) -> None:
    items = make_stored("resp_1").input * 2
    await store.create_conversation("p", CONVERSATION, items)
    assert await store.append_items("p", "conv_1", items) is True
    assert await store.load_conversation_items("p", "conv_1") == items * 2


async def test_changing_appended_or_loaded_items_does_not_change_the_store(store: Store, make_items: MakeItems) -> None:
    items = make_items("msg_1", "msg_2")
    creating = asyncio.ensure_future(store.create_conversation("p", CONVERSATION, items))
    await asyncio.sleep(0)
    items.clear()
    await creating
    for loaded in (await store.load_conversation_items("p", "conv_1"), await store.load_conversation("p", "conv_1")):
        if isinstance(loaded, Conversation):
            loaded.metadata = None
        elif loaded is not None:
            loaded.clear()
    assert await store.load_conversation_items("p", "conv_1") == make_items("msg_1", "msg_2")
    assert await store.load_conversation("p", "conv_1") == CONVERSATION


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_add_up_to_the_whole_list(store: Store, make_items: MakeItems, limit: int, order: Order) -> None:
    # The items of another conversation are between them.
    await store.create_conversation("p", CONVERSATION, [])
    await store.create_conversation("p", Conversation("conv_2", 1), [])
    ids = [f"msg_{letter}" for letter in "daecbgf"]
    for item_id in ids:
        await store.append_items("p", "conv_1", make_items(item_id))
        await store.append_items("p", "conv_2", make_items(item_id))

    expected = make_items(*(ids if order == "asc" else reversed(ids)))
    pages: list[ItemRows] = []
    while not pages or pages[-1].has_more:
        after = pages[-1].items[-1].id if pages else None
        page = await store.list_items("p", "conv_1", after=after, limit=limit, order=order)
        assert page is not None
        pages.append(page)
    starts = range(0, 7, limit)
    assert pages == [ItemRows(items=expected[start : start + limit], has_more=start + limit < 7) for start in starts]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_page_of_large_items_is_shorter(
    store: Store, make_items: MakeItems, monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    ids = ["msg_1", "msg_2", "msg_3", "msg_4"]
    await store.create_conversation("p", CONVERSATION, make_items(*ids))
    size = len(encode(make_items("msg_1")[0]))
    sorted_ids = ids if order == "asc" else ids[::-1]

    lengths = {}
    for maximum in (1, 2 * size, 2 * size + 1, 4 * size - 1, 4 * size):
        monkeypatch.setattr(record, "PAGE_BYTES", maximum)
        page = await store.list_items("p", "conv_1", after=None, limit=100, order=order)
        assert page is not None
        lengths[maximum] = len(page.items)
        assert page == ItemRows(items=make_items(*sorted_ids[: len(page.items)]), has_more=len(page.items) < 4)
    assert list(lengths.values()) == [1, 2, 2, 3, 4]


async def test_large_items_are_listed_and_retrieved_whole(store: Store) -> None:
    items: list[Item | Unknown] = [Message("user", f"{number}" * 150_000, f"msg_{number}") for number in range(4)]
    await store.create_conversation("p", CONVERSATION, items)
    page = await store.list_items("p", "conv_1", after=None, limit=3, order="asc")
    assert page == ItemRows(items=items[:3], has_more=True)
    page = await store.list_items("p", "conv_1", after="msg_0", limit=3, order="asc")
    assert page == ItemRows(items=items[1:], has_more=False)
    await store.append_items("p", "conv_1", [large := Message("user", "x" * 300_000, "msg_large")])
    assert await store.list_items("p", "conv_1", after="msg_3", limit=1, order="asc") == ItemRows(
        items=[large], has_more=False
    )
    assert await store.load_item("p", "conv_1", "msg_large") == large
    assert await store.load_item("p", "conv_1", "msg_2") == items[2]
    assert await store.load_item("q", "conv_1", "msg_large") is None


async def test_page_after_the_last_item_is_empty(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    for order, last in (("asc", "msg_2"), ("desc", "msg_1")):
        page = await store.list_items("p", "conv_1", after=last, limit=5, order=order)
        assert page == ItemRows(items=[], has_more=False)


async def test_page_after_an_unknown_item_is_rejected(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    await store.create_conversation("p", Conversation("conv_2", 1), make_items("msg_2"))
    with pytest.raises(InvalidRequest, match="no item with id 'msg_2'") as refusal:
        await store.list_items("p", "conv_1", after="msg_2", limit=5, order="asc")
    assert (refusal.value.param, refusal.value.code) == ("after", "invalid_value")


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_list_is_read_to_its_end_while_items_are_deleted(
    store: Store, make_items: MakeItems, order: Order
) -> None:
    ids = [f"msg_{letter}" for letter in "daecb"]
    await store.create_conversation("p", CONVERSATION, make_items(*ids))
    seen: list[str | None] = []
    more = True
    while more:
        after = seen[-1] if seen else None
        page = await store.list_items("p", "conv_1", after=after, limit=2, order=order)
        assert page is not None
        more = page.has_more
        for item in page.items:
            seen.append(item.id)
            assert await store.delete_item("p", "conv_1", str(item.id)) is True
    assert seen == (ids if order == "asc" else ids[::-1])
    assert await read_ids(store) == []


async def test_page_after_a_deleted_item_has_later_items(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    for item_id in ("msg_1", "msg_2"):
        await store.delete_item("p", "conv_1", item_id)
    await store.append_items("p", "conv_1", make_items("msg_3"))
    page = await store.list_items("p", "conv_1", after="msg_2", limit=5, order="asc")
    assert page == ItemRows(items=make_items("msg_3"), has_more=False)


async def test_item_appended_again_has_its_new_position(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    for _ in range(2):
        await store.delete_item("p", "conv_1", "msg_1")
        await store.append_items("p", "conv_1", make_items("msg_1"))
    await store.append_items("p", "conv_1", make_items("msg_3"))
    page = await store.list_items("p", "conv_1", after="msg_1", limit=5, order="asc")
    assert page == ItemRows(items=make_items("msg_3"), has_more=False)
    await store.delete_item("p", "conv_1", "msg_1")
    assert await store.list_items("p", "conv_1", after="msg_1", limit=5, order="asc") == page


async def test_items_before_a_response_exclude_later_ones(
    store: Store, make_items: MakeItems, make_stored: MakeStored
) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    await store.create_conversation("p", Conversation("conv_2", 1), make_items("msg_1"))
    empty = make_stored("resp_2")
    empty.input.clear()
    empty.response.output.clear()
    for stored in (make_stored("resp_1"), empty):
        await store.save("p", stored, conversation="conv_1")
    # The positions of deleted items are not used again.
    for item_id in ("msg_2", "msg_resp_1"):
        await store.delete_item("p", "conv_1", item_id)
    await store.delete_conversation("p", "conv_2")
    await store.append_items("p", "conv_1", make_items("msg_3"))
    await store.save("p", make_stored("resp_3", status="failed"))
    input_items = make_stored("resp_1").input
    before = {name: await store.load_conversation_items("p", "conv_1", before=name) for name in ("resp_1", "resp_2")}
    assert before == {"resp_1": make_items("msg_1"), "resp_2": [*make_items("msg_1"), *input_items]}
    all_items = [*make_items("msg_1"), *input_items, *make_items("msg_3")]
    for never_appended in ("resp_3", "resp_unknown"):
        assert await store.load_conversation_items("p", "conv_1", before=never_appended) == all_items
    assert await store.load_conversation_items("p", "conv_2", before="resp_1") is None


async def test_deleted_item_stays_in_other_conversations(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2", "msg_3"))
    await store.create_conversation("p", Conversation("conv_2", 1), make_items("msg_2"))
    assert await store.delete_item("p", "conv_1", "msg_2") is True
    assert await store.delete_item("p", "conv_1", "msg_2") is False
    assert await store.load_item("p", "conv_1", "msg_2") is None
    assert await store.load_item("p", "conv_2", "msg_2") == make_items("msg_2")[0]
    assert await store.find_item("p", "msg_2") == make_items("msg_2")[0]
    await store.append_items("p", "conv_1", make_items("msg_2"))
    assert await read_ids(store) == ["msg_1", "msg_3", "msg_2"]


async def test_items_appended_after_a_deleted_last_item_come_last(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, make_items("msg_1", "msg_2"))
    await store.delete_item("p", "conv_1", "msg_2")
    await store.append_items("p", "conv_1", make_items("msg_3"))
    await store.append_items("p", "conv_1", make_items("msg_4"))
    assert await read_ids(store) == ["msg_1", "msg_3", "msg_4"]


async def test_newest_of_several_items_with_one_id_is_found(store: Store) -> None:
    older, newer = (Unknown(b'{"type":"hologram_call","id":"holo_1","n":%d}' % number) for number in (1, 2))
    await store.create_conversation("p", Conversation("conv_b", 1), [])
    await store.create_conversation("p", Conversation("conv_a", 1), [older])
    await store.append_items("p", "conv_b", [newer])
    assert await store.find_item("p", "holo_1") == newer
    await store.delete_conversation("p", "conv_b")
    assert await store.find_item("p", "holo_1") == older


async def test_project_cannot_read_or_change_another_projects_conversation(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("theirs", CONVERSATION, make_items("msg_1"))
    await test_unknown_conversation_has_no_items(store, make_items)
    await store.create_conversation("p", CONVERSATION, make_items("msg_1"))
    assert await store.delete_item("p", "conv_1", "msg_1") is True
    assert await store.delete_conversation("p", "conv_1") is True
    assert await store.load_conversation_items("theirs", "conv_1") == make_items("msg_1")


async def test_blocks_appended_concurrently_stay_contiguous(store: Store, make_items: MakeItems) -> None:
    await store.create_conversation("p", CONVERSATION, [])
    blocks = [[f"msg_{writer}_{number}" for number in range(5)] for writer in range(40)]
    await asyncio.gather(*(store.append_items("p", "conv_1", make_items(*block)) for block in blocks))
    ids = await read_ids(store)
    assert sorted(ids[start : start + 5] for start in range(0, 200, 5)) == sorted(blocks)
