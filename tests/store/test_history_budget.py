"""The budget for histories: waiting, shares of projects, and large responses that requests share."""

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec
import pytest

from antiphon.errors import InvalidRequest, Unavailable
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Link, Store, StoredResponse
from antiphon.store.history_budget import FREE_BYTES, UNRESERVED_BYTES, HistoryBudget

MB = 1024 * 1024
LARGE = UNRESERVED_BYTES * 2
MakeStored = Callable[..., StoredResponse]


def make_link(link_id: str = "resp_1") -> Link:
    return Link(id=link_id, previous_response_id=None, final=True, items=())


def with_items(
    stored: StoredResponse, *, input_items: Sequence[Item | Unknown], output: Sequence[Item | Unknown] = ()
) -> StoredResponse:
    response = msgspec.structs.replace(stored.response, output=list(output))
    return msgspec.structs.replace(stored, response=response, input=list(input_items))


def make_messages(count: int = 8) -> list[Message]:
    return [Message("user", "x" * (LARGE // count), f"msg_x{number}") for number in range(count)]


async def test_small_histories_are_free() -> None:
    budget = HistoryBudget(1)
    for _ in range(100):
        await budget.open("p").reserve(FREE_BYTES // 4)
    assert budget.used == 0


async def test_closed_share_returns_its_memory() -> None:
    budget = HistoryBudget(100 * MB)
    with budget.open("p") as share:
        await share.reserve(MB)
        assert budget.used == 4 * MB - FREE_BYTES
        share.settle(MB, 3 * MB)
        assert budget.used == 5 * MB - FREE_BYTES
    share.close()
    assert budget.used == 0


async def test_history_larger_than_the_budget_is_refused_with_the_setting() -> None:
    share = HistoryBudget(4 * MB).open("p")
    share.param = "previous_response_id"
    with pytest.raises(InvalidRequest, match=r"4194304 for all requests \(setting history_budget_bytes\)") as caught:
        await share.reserve(2 * MB)
    assert (caught.value.code, caught.value.param) == ("history_too_large", "previous_response_id")


async def test_accepted_request_is_never_too_large() -> None:
    budget = HistoryBudget(4 * MB)
    await budget.open("p").reserve_request(100 * MB)
    assert budget.used == 4 * MB - FREE_BYTES


async def test_full_budget_is_refused_after_the_wait() -> None:
    budget = HistoryBudget(10 * MB, 0.01)
    await budget.open("p").reserve(2 * MB)
    with pytest.raises(Unavailable, match="history_budget_bytes") as caught:
        await budget.open("q").reserve(MB)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "server_overloaded", 5.0)
    assert budget.used == 8 * MB - FREE_BYTES


async def test_waiting_requests_continue_in_order() -> None:
    budget = HistoryBudget(10 * MB, math.inf)
    first = budget.open("p")
    await first.reserve(2 * MB)
    done: list[str] = []

    async def wait(project: str) -> None:
        await budget.open(project).reserve(MB)
        done.append(project)

    tasks = [asyncio.create_task(wait(project)) for project in ("q", "r", "s")]
    await asyncio.sleep(0)
    assert done == []
    first.close()
    await asyncio.wait(tasks[:2])
    assert done == ["q", "r"]
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.used == 2 * (4 * MB - FREE_BYTES)


async def test_cancelled_wait_takes_no_memory() -> None:
    budget = HistoryBudget(10 * MB, math.inf)
    first = budget.open("p")
    await first.reserve(2 * MB)
    task = asyncio.create_task(budget.open("q").reserve(2 * MB))
    await asyncio.sleep(0)
    first.close()  # grants the memory, before the task is cancelled
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert budget.used == 0


async def test_one_project_leaves_a_quarter_to_others() -> None:
    budget = HistoryBudget(16 * MB, 0)
    await budget.open("p").reserve(2 * MB)
    await budget.open("p").reserve(MB)
    with pytest.raises(Unavailable):
        await budget.open("p").reserve(MB)
    await budget.open("q").reserve(MB)


async def test_request_reserves_most_of_the_budget_in_parts() -> None:
    budget = HistoryBudget(16 * MB, 0)
    share = budget.open("p")
    await share.reserve(2 * MB)
    share.add_link(("p", "resp_1", 1), make_link(), MB, 2 * MB)
    await share.reserve(int(1.5 * MB))
    assert budget.used == 14 * MB - FREE_BYTES
    with pytest.raises(InvalidRequest, match="takes about 18874368 bytes"):
        await share.reserve(MB)


async def test_project_at_its_limit_does_not_delay_others() -> None:
    budget = HistoryBudget(16 * MB, math.inf)
    await budget.open("p").reserve(3 * MB)
    task = asyncio.create_task(budget.open("p").reserve(MB))
    await asyncio.sleep(0)
    other = asyncio.create_task(budget.open("q").reserve(MB // 2))
    await asyncio.sleep(0)
    assert (other.done(), task.done()) == (True, False)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_request_continues_when_the_one_before_it_gives_up() -> None:
    budget = HistoryBudget(16 * MB, math.inf)
    await budget.open("p").reserve(2 * MB)
    large = asyncio.create_task(budget.open("q").reserve(3 * MB))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.open("r").reserve(MB))
    await asyncio.sleep(0)
    assert (large.done(), small.done()) == (False, False)
    large.cancel()
    await asyncio.wait_for(small, 30)
    assert budget.used == 12 * MB - 2 * FREE_BYTES


async def test_larger_budget_is_granted_to_waiting_requests() -> None:
    budget = HistoryBudget(8 * MB, math.inf)
    await budget.open("p").reserve(MB)
    task = asyncio.create_task(budget.open("p").reserve(2 * MB))
    await asyncio.sleep(0)
    budget.reconfigure(100 * MB, wait_seconds=1)
    await task


async def test_shared_link_counts_once_until_its_last_user_ends() -> None:
    budget = HistoryBudget(100 * MB)
    first, second = budget.open("p"), budget.open("p")
    link, key = make_link(), ("p", "resp_1", 1)
    await first.reserve(2 * MB)
    first.add_link(key, link, 2 * MB, 3 * MB)
    assert second.find_link(key) is link
    assert second.find_link(("p", "resp_1", 2)) is None
    assert budget.used == 7 * MB - FREE_BYTES
    first.close()
    assert budget.used == 3 * MB
    second.close()
    assert (budget.used, budget.open("p").find_link(key)) == (0, None)


# Stores


async def test_large_chain_is_loaded_within_the_budget(store: Store, make_stored: MakeStored) -> None:
    messages = make_messages()
    await store.save("p", with_items(make_stored("resp_1"), input_items=messages))
    await store.save("p", make_stored("resp_2", previous="resp_1"))
    expected = await store.load_chain("p", "resp_2", with_tools=True)
    assert expected[0].items[: len(messages)] == tuple(messages)
    budget = HistoryBudget(64 * MB, 0)
    with budget.open("p") as share, budget.open("p") as other:
        assert await store.load_chain("p", "resp_2", with_tools=True, share=share) == expected
        assert budget.used > LARGE
        assert await store.load_chain("p", "resp_2", with_tools=True, share=other) == expected
    assert budget.used == 0
    with HistoryBudget(MB).open("p") as share, pytest.raises(InvalidRequest):
        await store.load_chain("p", "resp_2", share=share)


async def test_requests_at_the_same_time_share_a_large_response(store: Store, make_stored: MakeStored) -> None:
    await store.save("p", with_items(make_stored("resp_1"), input_items=make_messages()))
    budget = HistoryBudget(100 * MB, 30)
    shares = [budget.open("p") for _ in range(4)]
    chains = await asyncio.gather(*(store.load_chain("p", "resp_1", share=share) for share in shares))
    assert all(chain == chains[0] for chain in chains)
    for share in shares:
        share.close()
    assert budget.used == 0


async def test_large_conversation_is_loaded_within_the_budget(store: Store) -> None:
    messages = make_messages()
    await store.create_conversation("p", Conversation("conv_1", 1, {}), messages)
    budget = HistoryBudget(16 * MB, 0)
    with budget.open("p") as share:
        assert await store.load_conversation_items("p", "conv_1", share=share) == messages
        assert budget.used >= LARGE
        assert await store.load_conversation_items("p", "conv_other", share=share) is None
    assert budget.used == 0
    with HistoryBudget(MB).open("p") as share, pytest.raises(InvalidRequest):
        await store.load_conversation_items("p", "conv_1", share=share)


async def test_references_to_large_items_are_loaded_within_the_budget(store: Store, make_stored: MakeStored) -> None:
    messages = make_messages(2)
    for number, message in enumerate(messages):
        await store.save("p", with_items(make_stored(f"resp_{number}"), input_items=[message], output=[message]))
    ids = [message.id for message in messages if message.id is not None]
    responses = [f"resp_{number}" for number in range(2)]
    budget = HistoryBudget(100 * MB, 0)
    with budget.open("p") as share:
        assert await store.load_items("p", ids, share=share) == dict(zip(ids, messages, strict=True))
        before = budget.used
        assert before >= LARGE
        assert await store.load_outputs("p", responses, share=share) == messages
        assert budget.used > before
    assert budget.used == 0
    for load in (store.load_items, store.load_outputs):
        with HistoryBudget(MB).open("p") as share, pytest.raises(InvalidRequest):
            await load("p", ids if load == store.load_items else responses, share=share)
