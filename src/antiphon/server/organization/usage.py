"""The handlers of /v1/organization/usage/completions and /v1/organization/costs, in OpenAI's shapes."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import InvalidRequest
from antiphon.server.http import HttpRequest
from antiphon.server.query import read_query
from antiphon.server.router import Operation
from antiphon.store.usage import DAY, HOUR, MINUTE, UsageRow

# The seconds of a bucket, the default and the maximum of `limit`.
_WIDTHS = {"1m": (MINUTE, 60, 1440), "1h": (HOUR, 24, 168), "1d": (DAY, 7, 31)}
_MAX_COST_BUCKETS = 180
_MAX_TIME = 2**40
_COLUMNS = {"project_id": "project", "api_key_id": "key_id", "model": "model", "line_item": "model"}
# Fields that have the same value in all usage: there are no users, no batches and no other tiers.
_CONSTANTS = {"user_id": None, "batch": False, "service_tier": "default"}

Time = Annotated[int, Meta(ge=0, le=_MAX_TIME)]


class UsageQuery(Struct, kw_only=True):
    """Parameters of the usage. `end_time` is now by default, and the lists select some of the usage.

    No usage belongs to a user or a batch, so `user_ids` and `batch` select nothing.
    """

    start_time: Time
    end_time: Time | None = None
    bucket_width: Literal["1m", "1h", "1d"] = "1d"
    group_by: list[Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier"]] = []
    project_ids: list[str] = []
    user_ids: list[str] = []
    api_key_ids: list[str] = []
    models: list[str] = []
    batch: bool | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None
    page: str | None = None


class CostQuery(Struct, kw_only=True):
    """Parameters of the costs. A `line_item` is a model."""

    start_time: Time
    end_time: Time | None = None
    bucket_width: Literal["1d"] = "1d"
    group_by: list[Literal["project_id", "api_key_id", "line_item"]] = []
    project_ids: list[str] = []
    api_key_ids: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=_MAX_COST_BUCKETS)] = 7
    page: str | None = None


class UsageResult(Struct, kw_only=True):
    """The usage of one group in a bucket. Fields that are not grouped by are null."""

    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    num_model_requests: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"


class Amount(Struct):
    value: float
    currency: str


class CostResult(Struct, kw_only=True):
    """The cost of one group in a bucket. Fields that are not grouped by are null."""

    amount: Amount
    line_item: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    object: Literal["organization.costs.result"] = "organization.costs.result"


class UsageBucket(Struct, kw_only=True):
    start_time: int
    end_time: int
    results: list[UsageResult]
    object: Literal["bucket"] = "bucket"


class CostBucket(Struct, kw_only=True):
    start_time: int
    end_time: int
    results: list[CostResult]
    object: Literal["bucket"] = "bucket"


class UsagePage(Struct, kw_only=True):
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"


class CostPage(Struct, kw_only=True):
    data: list[CostBucket]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"


class _Range(Struct):
    """The buckets of a page: the first second, the end, the width in seconds, and the start of the next page."""

    start: int
    end: int
    width: int
    next_start: int | None

    @property
    def next_page(self) -> str | None:
        return None if self.next_start is None else f"page_{self.next_start}"


class UsageHandlers:
    """The usage of all projects, or of its own project for a key that is not organization-wide."""

    operations: ClassVar[dict[str, Operation]] = {
        "list_usage": Operation(
            id="listUsage",
            summary="Get the requests and tokens of models in time buckets.",
            query_type=UsageQuery,
            response_type=UsagePage,
        ),
        "list_costs": Operation(
            id="listCosts",
            summary="Get the costs by the configured prices, in buckets of a day.",
            query_type=CostQuery,
            response_type=CostPage,
        ),
    }

    def __init__(self, engine: Engine, get_settings: Callable[[], Settings]) -> None:
        self._engine = engine
        self._get_settings = get_settings

    async def list_usage(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, UsageQuery)
        width, default, most = _WIDTHS[query.bucket_width]
        if query.limit is not None and query.limit > most:
            raise InvalidRequest(
                f"'limit' must be at most {most} with the bucket width '{query.bucket_width}'.",
                param="limit",
                code="integer_above_max_value",
            )
        found = _find_range(query, width, query.limit or default)
        rows = await self._load(http_request, found, query)
        if query.user_ids or query.batch:
            rows = []
        if query.models:
            rows = [row for row in rows if row.model in query.models]
        by_start = _split_buckets(rows)
        buckets = [
            UsageBucket(
                start_time=start,
                end_time=min(start + width, query.end_time or start + width),
                results=[
                    UsageResult(
                        **group,
                        input_tokens=sum(row.input_tokens for row in members),
                        output_tokens=sum(row.output_tokens for row in members),
                        input_cached_tokens=sum(row.cached_tokens for row in members),
                        num_model_requests=sum(row.requests for row in members),
                    )
                    for group, members in _group(by_start.get(start, ()), query.group_by)
                ],
            )
            for start in range(found.start, found.end, width)
        ]
        page = UsagePage(data=buckets, has_more=found.next_start is not None, next_page=found.next_page)
        await http_request.respond_with(page)

    async def list_costs(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, CostQuery)
        found = _find_range(query, DAY, query.limit)
        rows = await self._load(http_request, found, query)
        by_start = _split_buckets(rows)
        currency = self._get_settings().run_currency.lower()
        buckets = [
            CostBucket(
                start_time=start,
                end_time=min(start + DAY, query.end_time or start + DAY),
                results=[
                    CostResult(**group, amount=Amount(sum(row.cost for row in members), currency))
                    for group, members in _group(by_start.get(start, ()), query.group_by)
                ],
            )
            for start in range(found.start, found.end, DAY)
        ]
        page = CostPage(data=buckets, has_more=found.next_start is not None, next_page=found.next_page)
        await http_request.respond_with(page)

    async def _load(self, http_request: HttpRequest, found: _Range, query: UsageQuery | CostQuery) -> list[UsageRow]:
        """Return the usage that the key may see, with the usage of this process up to now."""
        await self._engine.usage.flush()
        rows = await self._engine.admin_store.list_usage(found.start, found.end, width=found.width)
        grant = http_request.grant
        if grant is None or not grant.is_organization_wide:
            rows = [row for row in rows if row.project == http_request.project]
        if query.project_ids:
            rows = [row for row in rows if row.project in query.project_ids]
        if query.api_key_ids:
            rows = [row for row in rows if row.key_id in query.api_key_ids]
        return rows


def _find_range(query: UsageQuery | CostQuery, width: int, limit: int) -> _Range:
    """Return the buckets of a page. The first one starts at a multiple of the width, at or before `start_time`."""
    now = int(time.time())
    end = now + 1 if query.end_time is None else query.end_time
    if query.end_time is not None and end <= query.start_time:
        raise InvalidRequest("'end_time' must be after 'start_time'.", param="end_time", code="invalid_value")
    start = query.start_time - query.start_time % width
    if query.page is not None:
        cursor = re.fullmatch(r"page_(\d{1,13})", query.page)
        if cursor is None or int(cursor[1]) % width or not start < int(cursor[1]) < end:
            raise InvalidRequest(
                "'page' must be the 'next_page' of an answer to the same query.", param="page", code="invalid_value"
            )
        start = int(cursor[1])
    last = start + limit * width
    return _Range(start, max(start, min(end, last)), width, last if last < end else None)


def _split_buckets(rows: Iterable[UsageRow]) -> dict[int, list[UsageRow]]:
    """Return the rows of each bucket by its start. A search in all rows for each bucket would take too long."""
    buckets: dict[int, list[UsageRow]] = {}
    for row in rows:
        buckets.setdefault(row.started_at, []).append(row)
    return buckets


def _group(rows: Sequence[UsageRow], group_by: Sequence[str]) -> Iterable[tuple[dict[str, Any], list[UsageRow]]]:
    """Yield the groups of a bucket: the fields that identify one, and its rows."""
    columns = [name for name in group_by if name in _COLUMNS]
    constants: dict[str, Any] = {name: _CONSTANTS[name] for name in group_by if name in _CONSTANTS}
    groups: dict[tuple[str, ...], list[UsageRow]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, _COLUMNS[name]) for name in columns), []).append(row)
    for values, members in sorted(groups.items()):
        yield constants | {name: value or None for name, value in zip(columns, values, strict=True)}, members
