"""The hosted tool file_search: search in the vector stores that a request names."""

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from antiphon.errors import AntiphonError, InvalidRequest, UnsupportedTool
from antiphon.protocol.filters import Filter, parse_filter
from antiphon.protocol.hosted import FileSearchCall, FileSearchResult
from antiphon.protocol.items import Item
from antiphon.protocol.json_text import read_json
from antiphon.protocol.tools import FileSearchTool, RankingOptions, Tool
from antiphon.protocol.unions import Unknown
from antiphon.protocol.vector_stores import MAX_QUERY_LENGTH
from antiphon.retrieval.process import check_packages
from antiphon.stream.deltas import CloseItem, Delta, OpenItem
from antiphon.tools.hosted.base import (
    FileSearchService,
    FoundText,
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
    HostedUnavailable,
    OpeningCall,
    TextFilter,
)
from antiphon.tools.hosted.events import make_item_event
from antiphon.tools.hosted.file_search.citations import CitationFilter, Source, make_marker

logger = logging.getLogger(__name__)

TYPE = "file_search"
_DEFAULT_RESULTS = 20
_MAX_RESULTS = 50
_MAX_QUERIES = 10
_DEFAULT_WEIGHTS = (0.8, 0.2)
_RANKERS = ("none", "auto", "default-2024-11-15")
_FUNCTION = HostedFunction(
    name=TYPE,
    description="Search the files of the user. Returns passages of the files that match the queries, best first.",
    parameters={
        "type": "object",
        "properties": {
            "queries": {
                "type": "array",
                # A small model that is held to this schema would never end without the limits.
                "items": {"type": "string", "maxLength": 200},
                "minItems": 1,
                "maxItems": 3,
                "description": "One or more search queries: questions or key words about the same topic.",
            }
        },
        "required": ["queries"],
        "additionalProperties": False,
    },
)
_INSTRUCTIONS = (
    "Each result of file_search has a citation marker such as "
    f"{make_marker(1)}. When a statement of your answer is based on a result, write its marker right after the "
    "statement. Use only markers of results that you have received."
)


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a search: those of the tool, with defaults."""

    store_ids: Sequence[str]
    limit: int
    filter: Filter | None
    threshold: float
    weights: tuple[float, float]


def create(setup: HostedSetup) -> HostedTool:
    """Create the tool. Raises HostedUnavailable if packages are missing."""
    try:
        check_packages(embed=setup.settings.embeddings is None)
    except InvalidRequest as error:
        raise HostedUnavailable(frozenset({TYPE}), error.message) from None
    return FileSearchHostedTool()


class FileSearchHostedTool(HostedTool):
    """Searches vector stores of the project of a request."""

    types = frozenset({TYPE})

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        path = context.find_param(tool)
        service = context.services.file_search
        if service is None or not isinstance(tool, FileSearchTool):
            raise UnsupportedTool("This server has no vector stores.", param=path)
        options = read_options(tool, path)
        for index, store_id in enumerate(options.store_ids):
            await service.check_store(context.project, store_id, param=f"{path}.vector_store_ids[{index}]")
        return FileSearchSession(service, options, context.project)

    def echo(self, tool: Tool | Unknown) -> Tool | Unknown:
        if not isinstance(tool, FileSearchTool):
            return tool
        ranking = tool.ranking_options or RankingOptions()
        return msgspec.structs.replace(
            tool,
            max_num_results=tool.max_num_results or _DEFAULT_RESULTS,
            ranking_options=msgspec.structs.replace(
                ranking, ranker=ranking.ranker or "auto", score_threshold=ranking.score_threshold or 0.0
            ),
        )


class FileSearchSession(HostedSession):
    """The searches of one response. The results of all searches in the context can be cited."""

    functions = (_FUNCTION,)
    label = TYPE
    instructions = _INSTRUCTIONS

    def __init__(self, service: FileSearchService, options: SearchOptions, project: str) -> None:
        self._service = service
        self._options = options
        self._project = project
        # In the order of the numbers of their markers.
        self._sources: list[Source] = []

    def observe(self, item: Item | Unknown) -> None:
        if isinstance(item, FileSearchCall) and item.status != "failed":
            self._sources += [Source(each.file_id or "", each.filename or "") for each in item.results or ()]

    def begin(self, name: str, key: str) -> HostedCall:
        return _FileSearchRun(self, key)

    def open_text(self) -> TextFilter | None:
        return CitationFilter(self._sources)

    async def search(self, queries: Sequence[str]) -> list[FileSearchResult]:
        options = self._options
        found = await self._service.search(
            self._project,
            options.store_ids,
            queries,
            limit=options.limit,
            condition=options.filter,
            threshold=options.threshold,
            weights=options.weights,
        )
        return [_make_result(each) for each in found]


class _FileSearchRun(OpeningCall):
    """One search. It has no effects, so it can be repeated."""

    def __init__(self, session: FileSearchSession, key: str) -> None:
        super().__init__(key)
        self._session = session
        self._queries: list[str] = []

    @property
    def is_repeatable(self) -> bool:
        return True

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        yield [*self.open(), self._make_event("in_progress")]
        self._queries = read_queries(arguments)
        yield [self._make_event("searching")]
        try:
            results = await self._session.search(self._queries)
        except AntiphonError as error:
            logger.warning("a file search failed: %s", error.message)
            yield self.fail(error.message)
            return
        yield [self._make_event("completed"), self._close("completed", results)]

    def fail(self, message: str) -> Sequence[Delta]:
        # The model reads the reason.
        return [*self.open(), self._close("failed", [FileSearchResult(text=message)])]

    def make_opening(self) -> list[Delta]:
        return [OpenItem(self.key, FileSearchCall(id="", queries=[], status="in_progress"), "fs")]

    def _close(self, status: Any, results: list[FileSearchResult]) -> CloseItem:
        item = FileSearchCall(id="", queries=self._queries, status=status, results=results)
        return CloseItem(self.key, item)

    def _make_event(self, name: str) -> Delta:
        return make_item_event(self.key, f"file_search_call.{name}")


def read_queries(arguments: str) -> list[str]:
    """Return the queries that a model wrote. Raises InvalidRequest if there are none."""
    try:
        given = read_json(arguments)
    except msgspec.DecodeError:
        given = None
    found = (given.get("queries") or given.get("query")) if isinstance(given, dict) else None
    queries = [found] if isinstance(found, str) else found
    if not isinstance(queries, list):
        raise InvalidRequest("The arguments of file_search need an array 'queries'.", param="queries")
    texts = [query[:MAX_QUERY_LENGTH] for query in queries if isinstance(query, str) and query.strip()]
    if not texts:
        raise InvalidRequest("file_search needs at least one query that is not empty.", param="queries")
    return texts[:_MAX_QUERIES]


def read_options(tool: FileSearchTool, path: str) -> SearchOptions:
    """Return the options of a tool. Raises InvalidRequest with the param path of the first invalid one."""
    if not tool.vector_store_ids:
        raise _invalid(f"{path}.vector_store_ids", "at least one vector store is required")
    limit = _DEFAULT_RESULTS if tool.max_num_results is None else tool.max_num_results
    if not 1 <= limit <= _MAX_RESULTS:
        raise _invalid(f"{path}.max_num_results", f"it must be from 1 to {_MAX_RESULTS}")
    ranking = tool.ranking_options or RankingOptions()
    where = f"{path}.ranking_options"
    if ranking.ranker is not None and ranking.ranker not in _RANKERS:
        raise _invalid(f"{where}.ranker", f"it must be one of {', '.join(_RANKERS)}")
    threshold = ranking.score_threshold or 0.0
    if not 0 <= threshold <= 1:
        raise _invalid(f"{where}.score_threshold", "it must be from 0 to 1")
    return SearchOptions(
        store_ids=list(dict.fromkeys(tool.vector_store_ids)),
        limit=limit,
        filter=None if tool.filters is None else parse_filter(tool.filters, f"{path}.filters"),
        threshold=threshold,
        weights=_read_weights(ranking.hybrid_search, f"{where}.hybrid_search"),
    )


def _read_weights(hybrid: dict[str, Any] | None, path: str) -> tuple[float, float]:
    if hybrid is None:
        return _DEFAULT_WEIGHTS
    weights: list[float] = []
    for name in ("embedding_weight", "text_weight"):
        value = hybrid.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise _invalid(f"{path}.{name}", "a number that is not negative is required")
        weights.append(float(value))
    if not sum(weights):
        raise _invalid(path, "one of the weights must be greater than 0")
    return weights[0], weights[1]


def _invalid(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{path}': {reason}.", param=path, code="invalid_value")


def _make_result(found: FoundText) -> FileSearchResult:
    return FileSearchResult(
        attributes=found.attributes or {},
        file_id=found.file_id,
        filename=found.filename,
        score=round(found.score, 4),
        text=found.text,
    )
