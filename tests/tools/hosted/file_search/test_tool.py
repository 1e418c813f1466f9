"""The options and the calls of the hosted tool file_search."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from antiphon.engine.serve.tool_emulation.translate_history import translate_hosted_items
from antiphon.errors import InvalidRequest, NotFound, UpstreamError
from antiphon.protocol.filters import Comparison
from antiphon.protocol.hosted import FileSearchCall, FileSearchResult
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import FileSearchTool, RankingOptions
from antiphon.protocol.vector_stores import MAX_QUERY_LENGTH
from antiphon.stream.deltas import CloseItem, ItemPassthrough, OpenItem
from antiphon.tools.hosted.base import FoundText, HostedContext, HostedServices
from antiphon.tools.hosted.file_search.tool import FileSearchHostedTool, read_options, read_queries
from antiphon.upstream.addresses import OutboundRules

FOUND = FoundText(file_id="file-a", filename="a.txt", text="A.", score=0.51239, attributes={"k": 1})


class FakeStores:
    """Vector stores `vs_a` and `vs_b`. `searched` has the arguments of each search."""

    def __init__(self, error: Exception | None = None) -> None:
        self.searched: list[Any] = []
        self._error = error

    async def check_store(self, project: str, store_id: str, *, param: str) -> None:
        if store_id not in ("vs_a", "vs_b"):
            raise NotFound(f"Vector store with id '{store_id}' not found.", param=param)

    async def search(self, project: str, store_ids: Sequence[str], queries: Sequence[str], **options: Any) -> Any:
        self.searched.append((project, store_ids, queries, options))
        if self._error is not None:
            raise self._error
        return [FOUND]


def make_context(tool: FileSearchTool, stores: FakeStores | None = None) -> HostedContext:
    return HostedContext(
        project="p",
        response_id="resp_1",
        request=CreateRequest(tools=[tool]),
        items=[],
        outbound=OutboundRules(),
        warn=lambda _: None,
        services=HostedServices(file_search=stores or FakeStores()),
    )


async def run_call(tool: FileSearchTool, stores: FakeStores, arguments: str) -> list[Any]:
    session = await FileSearchHostedTool().open(tool, make_context(tool, stores))
    call = session.begin("file_search", "k")
    assert call.is_repeatable
    return [delta async for batch in call.run(arguments) for delta in batch]


async def test_call_opens_its_item_searches_and_closes_it() -> None:
    stores = FakeStores()
    tool = FileSearchTool(
        ["vs_a", "vs_b", "vs_a"],
        filters={"type": "eq", "key": "k", "value": 1},
        max_num_results=3,
        ranking_options=RankingOptions({"embedding_weight": 1, "text_weight": 0}, "auto", 0.25),
    )
    opened, *events, closed = await run_call(tool, stores, '{"queries": ["one", "two"]}')
    assert opened == OpenItem("k", FileSearchCall([], "", "in_progress"), "fs")
    assert [msgspec.json.decode(event.event.raw)["type"] for event in events if isinstance(event, ItemPassthrough)] == [
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
    ]
    result = FileSearchResult({"k": 1}, "file-a", "a.txt", 0.5124, "A.")
    assert closed == CloseItem("k", FileSearchCall(["one", "two"], "", "completed", [result]))
    options = {"limit": 3, "condition": Comparison("eq", "k", 1), "threshold": 0.25, "weights": (1.0, 0.0)}
    assert stores.searched == [("p", ["vs_a", "vs_b"], ["one", "two"], options)]


async def test_failed_search_is_a_failed_item_with_the_reason() -> None:
    *_, closed = await run_call(FileSearchTool(["vs_a"]), FakeStores(UpstreamError("down")), '{"queries": ["x"]}')
    failed = FileSearchCall(["x"], "", "failed", [FileSearchResult(text="down")])
    assert closed == CloseItem("k", failed)
    citations = itertools.count(1)
    _, output = translate_hosted_items(
        [failed], lambda _: "file_search", numbers=itertools.count(1), images=False, citations=citations
    )
    assert output.output == '{"status":"failed","results":[{"text":"down"}]}'  # type: ignore[union-attr]
    assert next(citations) == 1  # the reason cannot be cited


async def test_stores_in_the_arguments_are_not_searched() -> None:
    stores = FakeStores()
    await run_call(FileSearchTool(["vs_a"]), stores, '{"queries": ["x"], "vector_store_ids": ["vs_b"]}')
    assert stores.searched[0][1] == ["vs_a"]


@pytest.mark.parametrize("arguments", ["", "no json", "[]", "{}", '{"queries": []}', '{"queries": [" "]}', "[" * 5000])
def test_arguments_without_a_query_are_invalid(arguments: str) -> None:
    with pytest.raises(InvalidRequest):
        read_queries(arguments)


def test_single_query_is_accepted() -> None:
    assert read_queries('{"query": "x"}') == read_queries('{"queries": "x"}') == ["x"]
    assert read_queries(f'{{"query": "{"x" * 20_000}"}}') == ["x" * MAX_QUERY_LENGTH]


async def test_unknown_store_is_refused_with_its_path() -> None:
    tool = FileSearchTool(["vs_a", "vs_z"])
    with pytest.raises(NotFound) as caught:
        await FileSearchHostedTool().open(tool, make_context(tool))
    assert caught.value.param == "tools[0].vector_store_ids[1]"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (FileSearchTool([]), "tools[0].vector_store_ids"),
        (FileSearchTool(["vs_a"], max_num_results=0), "tools[0].max_num_results"),
        (FileSearchTool(["vs_a"], max_num_results=51), "tools[0].max_num_results"),
        (FileSearchTool(["vs_a"], filters={"type": "eq", "key": "k"}), "tools[0].filters.value"),
        (
            FileSearchTool(["vs_a"], ranking_options=RankingOptions(ranker="best")),
            "tools[0].ranking_options.ranker",
        ),
        (
            FileSearchTool(["vs_a"], ranking_options=RankingOptions(score_threshold=2)),
            "tools[0].ranking_options.score_threshold",
        ),
        (
            FileSearchTool(["vs_a"], ranking_options=RankingOptions({"embedding_weight": 1})),
            "tools[0].ranking_options.hybrid_search.text_weight",
        ),
        (
            FileSearchTool(["vs_a"], ranking_options=RankingOptions({"embedding_weight": 0, "text_weight": 0})),
            "tools[0].ranking_options.hybrid_search",
        ),
    ],
)
def test_invalid_option_is_refused_with_its_path(tool: FileSearchTool, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_options(tool, "tools[0]")
    assert caught.value.param == param


def test_echo_has_the_defaults() -> None:
    assert FileSearchHostedTool().echo(FileSearchTool(["vs_a"])) == FileSearchTool(
        ["vs_a"], max_num_results=20, ranking_options=RankingOptions(ranker="auto", score_threshold=0.0)
    )
