"""The cache of decoded links: validity, and its limit in bytes."""

import pytest

from antiphon.protocol.items import Message
from antiphon.store.base import Link
from antiphon.store.chain_cache import ChainCache


def make_link(number: int, *, final: bool = True) -> Link:
    return Link(id=f"resp_{number}", previous_response_id=None, final=final, items=(Message("user", "Hello"),))


def add_links(cache: ChainCache, count: int) -> None:
    for number in range(count):
        cache.add("p", make_link(number), 1, text_size=100)


def find_ids(cache: ChainCache, count: int) -> list[int]:
    return [number for number in range(count) if cache.find("p", f"resp_{number}", 1) is not None]


def test_link_is_found_at_its_revision() -> None:
    cache = ChainCache()
    link = make_link(1)
    cache.add("p", link, 7, text_size=100)
    assert cache.find("p", "resp_1", 7) is link


@pytest.mark.parametrize(
    ("project", "response_id", "revision"), [("q", "resp_1", 7), ("p", "resp_2", 7), ("p", "resp_1", 8)]
)
def test_link_of_another_project_id_or_revision_is_not_found(project: str, response_id: str, revision: int) -> None:
    cache = ChainCache()
    cache.add("p", make_link(1), 7, text_size=100)
    assert cache.find(project, response_id, revision) is None


def test_newer_revision_replaces_the_link() -> None:
    cache = ChainCache()
    newer = make_link(1)
    for revision, link in enumerate((make_link(1), newer)):
        cache.add("p", link, revision, text_size=100)
    size = cache.size
    assert (cache.find("p", "resp_1", 0), cache.find("p", "resp_1", 1)) == (None, newer)
    cache.clear()
    cache.add("p", newer, 1, text_size=100)
    assert cache.size == size


def test_unfinished_response_is_not_cached() -> None:
    cache = ChainCache()
    cache.add("p", make_link(1, final=False), 1, text_size=100)
    assert (cache.find("p", "resp_1", 1), cache.size) == (None, 0)


def test_least_recently_used_links_are_evicted() -> None:
    cache = ChainCache()
    add_links(cache, 4)
    limited = ChainCache(max_bytes=cache.size)
    add_links(limited, 4)
    assert find_ids(limited, 1) == [0]
    limited.add("p", make_link(4), 1, text_size=100)
    assert (find_ids(limited, 5), limited.size) == ([0, 2, 3, 4], cache.size)


def test_link_larger_than_the_limit_is_not_cached() -> None:
    cache = ChainCache(max_bytes=1000)
    cache.add("p", make_link(1), 1, text_size=1001)
    assert (cache.find("p", "resp_1", 1), cache.size) == (None, 0)
