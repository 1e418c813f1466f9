"""Responses and their chains, in all stores."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
import pytest

from antiphon import offload
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol.codec import decode_response
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.request import ConversationRef
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.protocol.unions import Unknown
from antiphon.store.base import ItemRows, LeaseLost, Link, Order, Store, StoredResponse

MakeStored = Callable[..., StoredResponse]
MakeItems = Callable[..., list[Item | Unknown]]


class Clock(Protocol):
    time: int


def link(stored: StoredResponse) -> Link:
    response = stored.response
    return Link(
        id=response.id,
        previous_response_id=response.previous_response_id,
        final=response.status in FINAL_STATUSES,
        items=(*stored.input, *response.output),
    )


async def test_saved_response_is_loaded_unchanged(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    assert await store.load("p", "resp_1") == make_stored("resp_1")


async def test_load_returns_none_for_an_unknown_response(store: Store) -> None:
    assert await store.load("p", "resp_1") is None


async def test_response_is_loaded_without_input_or_without_items(store: Store, make_stored: MakeStored) -> None:
    stored = make_stored("resp_1")
    await store.save("p", stored)
    bare = msgspec.structs.replace(stored.response, output=[])
    assert await store.load_response("p", "resp_1") == stored.response
    assert await store.load_bare_response("p", "resp_1") == bare
    assert (await store.load_response("q", "resp_1"), await store.load_bare_response("q", "resp_1")) == (None, None)


@pytest.mark.parametrize(
    ("order", "after", "limit", "expected", "has_more"),
    [
        ("asc", None, 2, [0, 1], True),
        ("asc", "msg_1", 2, [2, 3], True),
        ("asc", "msg_2", 5, [3, 4], False),
        ("asc", "msg_4", 1, [], False),
        ("desc", None, 2, [4, 3], True),
        ("desc", "msg_1", 2, [0], False),
        ("asc", None, 5, [0, 1, 2, 3, 4], False),
    ],
)
async def test_input_items_are_listed_in_pages(
    store: Store,
    make_stored: MakeStored,
    order: Order,
    after: str | None,
    limit: int,
    expected: list[int],
    has_more: bool,
) -> None:
    items: list[Item | Unknown] = [Message("user", f'text of "{n}" \\', f"msg_{n}") for n in range(4)]
    items.append(Unknown(b'{"type":"hologram_call", "id":"msg\\u005f4", "n":1.50}'))
    await store.save("p", msgspec.structs.replace(make_stored("resp_1"), input=items))
    page = await store.list_input_items("p", "resp_1", after=after, limit=limit, order=order)
    assert page == ItemRows(items=[items[index] for index in expected], has_more=has_more)


async def test_page_of_unknown_response_or_item_is_not_found(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    assert await store.list_input_items("q", "resp_1", after=None, limit=1, order="asc") is None
    with pytest.raises(InvalidRequest) as raised:
        await store.list_input_items("p", "resp_1", after="msg_9", limit=1, order="asc")
    assert raised.value.param == "after"


async def test_large_response_is_saved_even_if_its_caller_is_cancelled(store: Store, make_stored: MakeStored) -> None:
    async def save() -> None:
        offload.mark_large()
        await store.save("p", make_stored("resp_1"))

    task = asyncio.create_task(save())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while await store.load("p", "resp_1") is None:  # noqa: ASYNC110 - no event shows the end of the save
            await asyncio.sleep(0)


async def test_every_field_of_a_response_is_loaded(store: Store) -> None:
    response = decode_response(
        b'{"id":"resp_1","object":"response","created_at":1700000000.25,"completed_at":1700000001,"status":"incomplete",'
        b'"incomplete_details":{"reason":"max_output_tokens"},"instructions":"Be \\u00e9l\\u00e9gant \\ud83c\\udfbc",'
        b'"model":"m","metadata":{"output":"[]"},"temperature":0.2,"conversation":{"id":"conv_1"},'
        b'"usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3},'
        b'"tools":[{"type":"function","name":"f","parameters":{"type":"object"},"strict":false}],'
        b'"output":[{"type":"function_call","id":"fc_1","call_id":"c","name":"f","arguments":"{\\"a\\": 1}"}]}'
    )
    await store.save("p", StoredResponse(response=response, input=[]))
    assert await store.load("p", "resp_1") == StoredResponse(response=response, input=[])


async def test_unknown_items_are_loaded_byte_for_byte(store: Store, make_stored: MakeStored) -> None:
    raw = b'{ "type" : "hologram_call",\n\t"n": 1.50, "text": "\\u00e9 \\/" }'
    stored = make_stored("resp_1")
    stored.input.insert(0, Unknown(raw))
    stored.response.output.append(Unknown(raw))
    await store.save("p", stored)

    loaded = await store.load("p", "resp_1")
    assert loaded is not None
    assert (loaded.input[0], loaded.response.output[-1]) == (Unknown(raw), Unknown(raw))
    assert await store.load_chain("p", "resp_1") == [link(stored)]


async def test_second_save_replaces_the_first(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_0"))
    await store.save("p", make_stored("resp_1"))
    newer = make_stored("resp_1", previous="resp_0", text="Goodbye")
    await store.save("p", newer)
    assert await store.load("p", "resp_1") == newer
    assert await store.load_chain("p", "resp_1") == [link(make_stored("resp_0")), link(newer)]


async def test_changing_a_saved_or_loaded_response_does_not_change_the_store(
    store: Store, make_stored: MakeStored
) -> None:
    stored = make_stored("resp_1")
    saving = asyncio.ensure_future(store.save("p", stored))
    await asyncio.sleep(0)
    stored.response.status = "failed"
    stored.response.output.clear()
    stored.input.clear()
    await saving

    first = await store.load("p", "resp_1")
    assert first == make_stored("resp_1")
    first.response.output.clear()
    first.input.clear()
    (taken,) = await store.load_chain("p", "resp_1")
    assert isinstance(taken.items, tuple)  # a list could be changed
    assert await store.load("p", "resp_1") == make_stored("resp_1")
    assert await store.load_chain("p", "resp_1") == [link(make_stored("resp_1"))]


async def test_deleted_response_cannot_be_loaded(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", make_stored("resp_1"))
    assert await store.delete("p", "resp_1") is True
    assert await store.load("p", "resp_1") is None
    assert await store.load_chain("p", "resp_1") == []
    assert await store.delete("p", "resp_1") is False


async def test_chain_runs_from_the_oldest_to_the_requested_response(store: Store, make_stored: MakeStored) -> None:
    # The ids and the order of saving are the reverse of the order of the chain.
    chain = [
        make_stored(f"resp_{9 - turn}", previous=f"resp_{10 - turn}" if turn else None, text=f"turn {turn}")
        for turn in range(6)
    ]
    for stored in reversed(chain):
        await store.save("p", stored)
    assert await store.load_chain("p", "resp_5") == [link(stored) for stored in chain[:5]]


async def test_forks_share_their_ancestors(store: Store, make_stored: MakeStored) -> None:
    root = make_stored("resp_root")
    left, right = make_stored("resp_l", previous="resp_root"), make_stored("resp_r", previous="resp_root")
    for stored in (root, left, right):
        await store.save("p", stored)
    assert await store.load_chain("p", "resp_l") == [link(root), link(left)]
    assert await store.load_chain("p", "resp_r") == [link(root), link(right)]


async def test_chain_of_an_unknown_response_is_empty(store: Store) -> None:
    assert await store.load_chain("p", "resp_1") == []


async def test_chain_with_a_deleted_ancestor_starts_after_the_gap(store: Store, make_stored: MakeStored) -> None:
    chain = [make_stored(f"resp_{turn}", previous=f"resp_{turn - 1}" if turn else None) for turn in range(4)]
    for stored in chain:
        await store.save("p", stored)
    await store.delete("p", "resp_1")
    assert await store.load_chain("p", "resp_3") == [link(chain[2]), link(chain[3])]


async def test_first_link_of_a_chain_has_its_conversation(store: Store, make_stored: MakeStored) -> None:
    root, newer = make_stored("resp_0"), make_stored("resp_1", previous="resp_0")
    root.response.conversation = ConversationRef("conv_1")
    for stored in (root, newer):
        await store.save("p", stored)
    named = msgspec.structs.replace(link(root), conversation="conv_1")
    assert await store.load_chain("p", "resp_0") == [named]
    assert await store.load_chain("p", "resp_1") == [named, link(newer)]


async def test_chain_with_a_cycle_ends(store: Store, make_stored: MakeStored) -> None:
    chain = [make_stored("resp_0", previous="resp_1"), make_stored("resp_1", previous="resp_0")]
    for stored in chain:
        await store.save("p", stored)
    assert await store.load_chain("p", "resp_1") == [link(stored) for stored in chain]


async def test_chain_of_a_thousand_turns_is_complete(store: Store, make_stored: MakeStored) -> None:
    chain = [make_stored(f"resp_{turn:04}", previous=f"resp_{turn - 1:04}" if turn else None) for turn in range(1000)]
    await asyncio.gather(*(store.save("p", stored) for stored in chain))
    assert await store.load_chain("p", "resp_0999") == [link(stored) for stored in chain]


async def test_project_cannot_read_continue_or_delete_another_projects_response(
    store: Store, make_stored: MakeStored
) -> None:
    await store.save("ours", make_stored("resp_1"))
    await store.save("theirs", make_stored("resp_2", previous="resp_1"))
    assert await store.load("theirs", "resp_1") is None
    assert await store.load_chain("theirs", "resp_1") == []
    assert await store.load_chain("theirs", "resp_2") == [link(make_stored("resp_2", previous="resp_1"))]
    assert await store.delete("theirs", "resp_1") is False
    assert await store.load("ours", "resp_1") == make_stored("resp_1")


async def test_same_response_id_in_two_projects_is_independent(store: Store, make_stored: MakeStored) -> None:
    await store.save("ours", make_stored("resp_1", text="ours"))
    await store.save("theirs", make_stored("resp_1", text="theirs"))
    assert await store.delete("theirs", "resp_1") is True
    assert await store.load("ours", "resp_1") == make_stored("resp_1", text="ours")


async def test_concurrent_saves_are_all_stored(store: Store, make_stored: MakeStored) -> None:
    await asyncio.gather(*(store.save("p", make_stored(f"resp_{number}")) for number in range(300)))
    loaded = await asyncio.gather(*(store.load("p", f"resp_{number}") for number in range(300)))
    assert loaded == [make_stored(f"resp_{number}") for number in range(300)]


async def test_store_works_after_a_cancelled_save(store: Store, make_stored: MakeStored) -> None:
    saves = [asyncio.ensure_future(store.save("p", make_stored(f"resp_{number}"))) for number in range(20)]
    await asyncio.sleep(0)
    for save in saves[::2]:
        save.cancel()
    await asyncio.gather(*saves, return_exceptions=True)
    assert await store.load("p", "resp_1") == make_stored("resp_1")
    await store.save("p", make_stored("resp_again"))
    assert await store.load("p", "resp_again") == make_stored("resp_again")


async def test_lone_surrogate_fails_only_its_own_save(store: Store, make_stored: MakeStored) -> None:
    saves = [store.save("p", make_stored(f"resp_{number}")) for number in range(20)]
    bad = make_stored("resp_bad")
    bad.response.model = "\ud800"
    outcomes = await asyncio.gather(*saves, store.save("p", bad), return_exceptions=True)
    assert outcomes[:-1] == [None] * 20
    assert isinstance(outcomes[-1], Exception)


@pytest.mark.parametrize("status", ["completed", "failed", "incomplete", "cancelled"])
async def test_final_response_is_not_overwritten_by_an_unfinished_one(
    store: Store, make_stored: MakeStored, status: str
) -> None:
    await store.save("p", make_stored("resp_1", status="in_progress"))
    final = make_stored("resp_1", status=status, text="The end")
    await store.save("p", final)
    for late in ("queued", "in_progress"):
        await store.save("p", make_stored("resp_1", status=late))
    assert await store.load("p", "resp_1") == final


async def test_save_appends_input_and_then_output_to_the_conversation(
    store: Store, make_stored: MakeStored, make_items: MakeItems
) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), make_items("msg_first"))
    stored = make_stored("resp_1")
    await store.save("p", stored, conversation="conv_1")
    assert await store.load("p", "resp_1") == stored
    expected = [*make_items("msg_first"), *stored.input, *stored.response.output]
    assert await store.load_conversation_items("p", "conv_1") == expected


async def test_save_fails_if_the_conversation_is_unknown(store: Store, make_stored: MakeStored) -> None:
    await store.create_conversation("theirs", Conversation("conv_1", 1), [])
    with pytest.raises(NotFound, match="Conversation with id 'conv_1' not found") as refusal:
        await store.save("p", make_stored("resp_1"), conversation="conv_1")
    assert refusal.value.param == "conversation"
    assert await store.load("p", "resp_1") is None


async def test_output_with_a_taken_id_is_appended_under_a_new_id(
    store: Store, make_stored: MakeStored, make_items: MakeItems
) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), make_items("msg_resp_1"))
    stored = make_stored("resp_1")
    await store.save("p", stored, conversation="conv_1")
    assert await store.load("p", "resp_1") == stored
    (answer,) = make_stored("resp_1").response.output
    answer.id = "msg_resp_1_2"
    expected = [*make_items("msg_resp_1"), *stored.input, answer]
    assert await store.load_conversation_items("p", "conv_1") == expected
    assert await store.load_item("p", "conv_1", "msg_resp_1_2") == answer


async def test_response_saved_twice_is_appended_once(store: Store, make_stored: MakeStored) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    stored = make_stored("resp_1")
    for _ in range(2):
        await store.save("p", stored, conversation="conv_1")
    assert await store.load_conversation_items("p", "conv_1") == [*stored.input, *stored.response.output]


async def test_late_unfinished_save_appends_nothing_to_the_conversation(store: Store, make_stored: MakeStored) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    await store.save("p", make_stored("resp_1"))
    await store.save("p", make_stored("resp_1", status="in_progress"), conversation="conv_1")
    assert await store.load_conversation_items("p", "conv_1") == []


async def test_save_without_the_lease_writes_nothing(store: Store, make_stored: MakeStored) -> None:
    await store.create_conversation("p", Conversation("conv_1", 1), [])
    await store.enqueue("p", make_stored("resp_1", status="queued"), b"{}")
    for owner in ("us", "them"):
        with pytest.raises(LeaseLost, match=f"{owner} does not own the run of resp_1"):
            await store.save("p", make_stored("resp_1"), conversation="conv_1", owner=owner)
    assert await store.load("p", "resp_1") == make_stored("resp_1", status="queued")
    assert await store.load_conversation_items("p", "conv_1") == []


async def test_expired_response_is_not_returned(store: Store, make_stored: MakeStored, clock: Clock) -> None:
    stored = make_stored("resp_1", expires_at=clock.time + 10)
    await store.save("p", stored)
    clock.time += 9
    assert await store.load("p", "resp_1") == stored
    assert await store.load_chain("p", "resp_1") == [link(stored)]
    clock.time += 1
    assert await store.load("p", "resp_1") is None
    assert await store.load_chain("p", "resp_1") == []
    assert await store.delete("p", "resp_1") is False


async def test_chain_includes_expired_ancestors(store: Store, make_stored: MakeStored, clock: Clock) -> None:
    chain = [
        make_stored(f"resp_{turn}", previous=f"resp_{turn - 1}" if turn else None, expires_at=clock.time + turn)
        for turn in range(4)
    ]
    for stored in chain:
        await store.save("p", stored)
    clock.time += 2
    await store.expire(clock.time)
    assert await store.load_chain("p", "resp_3") == [link(stored) for stored in chain]
    assert [await store.load("p", f"resp_{turn}") for turn in range(4)] == [None, None, None, chain[3]]
    assert [await store.load_chain("p", f"resp_{turn}") for turn in range(3)] == [[], [], []]


async def test_later_save_changes_the_expiry(store: Store, make_stored: MakeStored, clock: Clock) -> None:
    await store.save("p", make_stored("resp_1", expires_at=clock.time))
    await store.save("p", make_stored("resp_1", expires_at=clock.time + 1))
    assert await store.load("p", "resp_1") == make_stored("resp_1", expires_at=clock.time + 1)
