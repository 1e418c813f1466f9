"""The cache of decoded tool lists: results, sharing, and its limits."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.protocol.tool_lists import LIST_BYTES, MAX_BYTES, SharedTools, ToolListCache, derive
from antiphon.protocol.tools import TOOLS, CustomTool, FunctionTool
from support import strategies


def write(*tools: dict[str, Any]) -> Raw:
    return Raw(msgspec.json.encode(tools))


def function(name: str, size: int = 0) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "x" * size}


@given(st.lists(st.lists(strategies.members(TOOLS), max_size=3), max_size=6))
def test_cached_list_equals_decoded_list(lists: list[list[Any]]) -> None:
    cache = ToolListCache(max_bytes=5000)
    for tools in [*lists, *lists, *reversed(lists)]:
        raw = Raw(codec.encode(tools))
        assert cache.decode_field(raw, "tools") == TOOLS.decode_list_field(raw, "tools")


def test_equal_bytes_share_one_list_and_other_bytes_do_not() -> None:
    cache = ToolListCache()
    first, second = cache.decode_field(write(function("f")), "tools"), cache.decode_field(write(function("f")), "tools")
    assert isinstance(first, SharedTools)
    assert first is second
    assert cache.decode_field(Raw(bytes(write(function("f"))) + b" "), "tools") is not first
    assert cache.decode_field(write(function("g")), "tools") == [FunctionTool("g", "")]


@pytest.mark.parametrize("raw", [b"null", b"[]"])
def test_absent_tools_are_not_cached(raw: bytes) -> None:
    cache = ToolListCache()
    assert cache.decode_field(Raw(raw), "tools") == msgspec.json.decode(raw)
    assert len(cache) == 0


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "mcp", "server_label": "s", "server_url": "https://x", "authorization": "secret"},
        {"type": "acme", "key": "secret"},
        {"type": "namespace", "name": "n", "description": "", "tools": []},
    ],
)
def test_tools_that_may_contain_credentials_are_not_cached(tool: dict[str, Any]) -> None:
    cache = ToolListCache()
    cache.decode_field(write(function("f"), tool), "tools")
    assert len(cache) == 0


def test_invalid_list_is_refused_each_time() -> None:
    cache = ToolListCache()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\$\.tools"):
            cache.decode_field(write({"type": "function"}), "tools")
    assert len(cache) == 0


def test_total_size_is_limited_and_the_least_recently_used_list_is_evicted() -> None:
    lists = [write(function(f"f{index}", 100)) for index in range(9)]
    size = len(bytes(lists[0])) + LIST_BYTES
    cache = ToolListCache(max_bytes=8 * size)
    decoded = [cache.decode_field(raw, "tools") for raw in lists[:8]]
    assert cache.decode_field(lists[0], "tools") is decoded[0]
    cache.decode_field(lists[8], "tools")
    assert len(cache) == 8
    assert cache.decode_field(lists[0], "tools") is decoded[0]
    assert cache.decode_field(lists[1], "tools") is not decoded[1]


def test_list_that_is_too_large_is_not_cached() -> None:
    cache = ToolListCache(max_bytes=4000)
    small = write(function("f"))
    cache.decode_field(small, "tools")
    cache.decode_field(write(function("g", 1000)), "tools")
    assert len(cache) == 1


def test_number_of_small_lists_is_limited() -> None:
    cache = ToolListCache()
    for index in range(2000):
        cache.decode_field(write(function(f"f{index}")), "tools")
    assert len(cache) <= MAX_BYTES // LIST_BYTES


def test_value_is_derived_once_for_a_shared_list_and_key() -> None:
    calls: list[str] = []

    def count(tools: list[Any]) -> int:
        calls.append("count")
        return len(tools)

    shared = SharedTools([FunctionTool("f")])
    assert [derive(shared, "a", count), derive(shared, "a", count), derive(shared, "b", count)] == [1, 1, 1]
    assert len(calls) == 2
    assert [derive(list(shared), "a", count), derive(list(shared), "a", count)] == [1, 1]
    assert len(calls) == 4


def test_shared_list_is_encoded_and_compared_like_a_list() -> None:
    tools = [FunctionTool("f", parameters={"type": "object"})]
    assert SharedTools(tools) == tools
    assert codec.encode(SharedTools(tools)) == codec.encode(tools)


@given(st.lists(strategies.instances(FunctionTool) | strategies.instances(CustomTool), min_size=1, max_size=3))
def test_response_with_shared_tools_is_encoded_like_any_other(tools: list[Any]) -> None:
    shared = SharedTools(tools)
    response = Response(id="resp_1", created_at=0, model="m", tools=shared)
    expected = codec.encode(Response(id="resp_1", created_at=0, model="m", tools=tools))
    assert [codec.encode(codec.reuse_tools_json(response)) for _ in range(2)] == [expected] * 2
    assert response.tools is shared


def test_response_without_shared_tools_is_encoded_itself() -> None:
    response = Response(id="resp_1", created_at=0, model="m", tools=[FunctionTool("f", "")])
    assert codec.reuse_tools_json(response) is response
