"""Pages of the input items of large responses: they are the same as those of the whole list."""

from collections.abc import Callable

import msgspec
import pytest

from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item, Message
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Order, Store, StoredResponse
from antiphon.store.item_offsets import ItemOffsets, OffsetCache, build_offsets

MakeStored = Callable[..., StoredResponse]
ID = "resp_large"


@pytest.fixture
async def items(store: Store, make_stored: MakeStored) -> list[Item | Unknown]:
    """The input items of a stored response of 400 KB. They have characters of several bytes, and escapes."""
    texts = [f'{number} "é\n"' + "x" * (number * 7919 % 3000) for number in range(250)]
    items: list[Item | Unknown] = [Message("user", text, f"msg_{number}") for number, text in enumerate(texts)]
    await store.save("p", msgspec.structs.replace(make_stored(ID), input=items))
    return items


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_of_a_large_input_are_those_of_the_list(
    store: Store, items: list[Item | Unknown], order: Order
) -> None:
    expected = items if order == "asc" else items[::-1]
    for limit in (100, 7):
        after, found = None, []
        while True:
            page = await store.list_input_items("p", ID, after=after, limit=limit, order=order)
            assert page is not None
            found += page.items
            assert page.has_more == (len(found) < len(expected))
            if not page.has_more:
                break
            after = found[-1].id
        assert [item.id for item in found] == [item.id for item in expected]
        assert found == expected


async def test_unknown_item_and_deleted_response_are_reported_for_a_large_input(
    store: Store, items: list[Item | Unknown]
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            await store.list_input_items("p", ID, after="msg_other", limit=1, order="asc")
        assert (refused.value.param, refused.value.code) == ("after", "invalid_value")
    last = await store.list_input_items("p", ID, after=items[-1].id, limit=5, order="asc")
    assert last is not None
    assert (last.items, last.has_more) == ([], False)
    assert await store.list_input_items("q", ID, after=None, limit=1, order="asc") is None
    await store.delete("p", ID)
    assert await store.list_input_items("p", ID, after=None, limit=1, order="asc") is None


@pytest.mark.parametrize(
    "encoded",
    [b"", b"[]", b"{}", b'[{"id":1}]', b'[{"id":"a"}, {"id":"b"}]', b'[{"id":"a"}', b"[1]", b'["\xff"]'],
)
def test_damaged_or_spaced_array_has_no_offsets(encoded: bytes) -> None:
    assert build_offsets(encoded) is None


def test_first_of_equal_ids_in_the_order_of_the_list_counts() -> None:
    offsets = build_offsets(b'[{"id":"a"},{"id":"b"},{"id":"a"},{"id":"c"}]')
    assert offsets is not None
    assert offsets.find_page(after="a", limit=1, order="asc") == (12, 22, True)
    assert offsets.find_page(after="a", limit=5, order="desc") == (1, 22, False)


def test_cache_of_offsets_is_bounded() -> None:
    cache = OffsetCache()
    offsets = build_offsets(b"[" + b",".join([b'{"id":"a"}'] * 300_000) + b"]")
    assert isinstance(offsets, ItemOffsets)
    for number in range(5):
        cache.add(("p", str(number)), offsets)
    assert [cache.find(("p", str(number))) is offsets for number in range(5)] == [False, False, True, True, True]
    for number in range(300):
        cache.add(("q", str(number)), build_offsets(b"[{}]"))  # type: ignore[arg-type]
    assert cache.find(("q", "43")) is None
    assert cache.find(("q", "44")) is not None
