"""The cache of decoded links: validity, and its limit in bytes."""

import gc
import tracemalloc
from typing import Any

import msgspec
import pytest

from antiphon.protocol.codec import decode_items
from antiphon.protocol.items import Message
from antiphon.store.base import Link
from antiphon.store.chain_cache import ChainCache
from antiphon.store.memory_size import measure_items


def make_link(number: int, *, final: bool = True) -> Link:
    return Link(id=f"resp_{number}", previous_response_id=None, final=final, items=(Message("user", "Hello"),))


def add_links(cache: ChainCache, count: int) -> None:
    for number in range(count):
        cache.add("p", make_link(number), 1)


def find_ids(cache: ChainCache, count: int) -> list[int]:
    return [number for number in range(count) if cache.find("p", f"resp_{number}", 1) is not None]


def test_link_is_found_at_its_revision() -> None:
    cache = ChainCache()
    link = make_link(1)
    cache.add("p", link, 7)
    assert cache.find("p", "resp_1", 7) is link


@pytest.mark.parametrize(
    ("project", "response_id", "revision"), [("q", "resp_1", 7), ("p", "resp_2", 7), ("p", "resp_1", 8)]
)
def test_link_of_another_project_id_or_revision_is_not_found(project: str, response_id: str, revision: int) -> None:
    cache = ChainCache()
    cache.add("p", make_link(1), 7)
    assert cache.find(project, response_id, revision) is None


def test_newer_revision_replaces_the_link() -> None:
    cache = ChainCache()
    newer = make_link(1)
    for revision, link in enumerate((make_link(1), newer)):
        cache.add("p", link, revision)
    size = cache.size
    assert (cache.find("p", "resp_1", 0), cache.find("p", "resp_1", 1)) == (None, newer)
    cache.clear()
    cache.add("p", newer, 1)
    assert cache.size == size


def test_unfinished_response_is_not_cached() -> None:
    cache = ChainCache()
    cache.add("p", make_link(1, final=False), 1)
    assert (cache.find("p", "resp_1", 1), cache.size) == (None, 0)


def test_least_recently_used_links_are_evicted() -> None:
    cache = ChainCache()
    add_links(cache, 4)
    limited = ChainCache(max_bytes=cache.size)
    add_links(limited, 4)
    assert find_ids(limited, 1) == [0]
    limited.add("p", make_link(4), 1)
    assert (find_ids(limited, 5), limited.size) == ([0, 2, 3, 4], cache.size)


def test_link_larger_than_the_limit_evicts_no_other_links() -> None:
    cache = ChainCache(max_bytes=5000)
    add_links(cache, 2)
    size = cache.size
    large = Link(id="resp_2", previous_response_id=None, final=True, items=(Message("user", "x" * 5000),))
    cache.add("p", large, 1)
    assert (find_ids(cache, 3), cache.size) == ([0, 1], size)


ITEMS: dict[str, Any] = {
    "short messages": {"type": "message", "role": "user", "content": "Hello"},
    "long messages": {"type": "message", "role": "user", "content": "x" * 5000},
    "one emoji": {"type": "message", "role": "user", "content": "x" * 5000 + "\U0001f3bc"},
    "escaped text": {"type": "message", "role": "user", "content": '\n"\\' * 1000},
    "many parts": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 50},
    "output": {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a" * 99}],
    },
    "annotations": {
        "type": "message",
        "role": "assistant",
        "content": [
            {
                "type": "output_text",
                "text": "t",
                "annotations": [{"type": "url_citation", "start_index": 1, "end_index": 2, "url": "u", "title": "t"}]
                * 20,
            }
        ],
    },
    "calls": {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
    "queries": {"type": "file_search_call", "id": "f", "status": "completed", "queries": ["a", "b"] * 50},
    "unknown items": {"type": "hologram_call", "data": {"a": [1, 2, 3] * 20}},
    "dictionaries": {
        "type": "mcp_list_tools",
        "id": "m",
        "server_label": "s",
        "tools": [{"name": "t", "input_schema": {f"key {number}": number for number in range(100)}}],
    },
}


def measure_decoding(raw: bytes) -> int:
    """Return the memory in use after decoding items, less that before."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        items = tuple(decode_items(raw))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert items
    return used


@pytest.mark.parametrize("name", ITEMS)
def test_counted_size_is_near_the_memory_in_use(name: str) -> None:
    raw = msgspec.json.encode([ITEMS[name]] * 50)
    items = tuple(decode_items(raw))  # fills the caches of the decoder
    # Threads of other tests may allocate memory at the same time, so the smallest of several figures is right.
    used = min(measure_decoding(raw) for _ in range(5))
    # The decoder shares short keys of dictionaries, which are counted each time.
    assert 0.3 < used / measure_items(items) < 1.15
