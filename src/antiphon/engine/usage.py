"""Usage: the requests, tokens and costs of all responses, by project, key and model.

Usage is counted in memory when a response ends and written to the store in batches. If the process is killed, it loses
at most the usage of the last `FLUSH_SECONDS`.

A write that fails may have been stored, if only the answer was lost. It is repeated with its id, before any newer
usage, so that the store adds its rows only once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from antiphon import offload
from antiphon.backends.base import Turn, TurnProgress
from antiphon.config.limits import ANY_MODEL, ModelPrice
from antiphon.engine.prepare.prepare import Items, Prepared
from antiphon.engine.respond.run import Run
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import expand_compactions
from antiphon.errors import AntiphonError, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Compaction
from antiphon.protocol.response import Response, Usage
from antiphon.store.usage import HOUR, MINUTE, UsageRow, UsageStore
from antiphon.upstream.usage import estimate_output_usage

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_SECONDS = 5.0
"""Time between the end of a response and the write of its usage."""

MAX_MODELS = 1000
"""Number of model names of a project with rows of their own. A client can choose any name if an upstream takes any.

Models with a price always have rows of their own."""

OTHER_MODEL = "other"
"""The model of usage beyond `MAX_MODELS`."""

_MAX_MODEL_LENGTH = 256
_MAX_NAMES = 100_000
# With this number of rows, they are written at once.
_MAX_ROWS = 1000
# While the store fails, the rows wait for the next attempt. With more of them, the minutes of an hour are joined, then
# the models of a key. The rest is bounded by the number of keys. The rows of the unconfirmed write do not count.
_MAX_HELD_ROWS = 100_000
# If the store has refused this number of single rows and accepted none, it would refuse the others, too.
_MAX_REFUSED = 10


class Charge(NamedTuple):
    """The tokens and the cost of a model call, for the limits of its key and project."""

    project: str
    key_id: str
    tokens: int
    cost: float


class _Batch:
    """Rows that are written in one transaction, and the id by which the store recognises a repetition."""

    def __init__(self, rows: Sequence[UsageRow]) -> None:
        self.rows = rows
        self.write_id = secrets.token_hex(16)


class UsageRecorder:
    """Counts usage and writes it to the store.

    `on_charge` is called for each response that has ended. Compactions are read with `sealer`. `now` is the clock, for
    tests.
    """

    def __init__(
        self,
        store: UsageStore,
        prices: Mapping[str, ModelPrice],
        *,
        sealer: Sealer | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self.prices = prices
        self._sealer = sealer
        self._now = now
        self._rows: dict[tuple[int, str, str, str], UsageRow] = {}
        self._unconfirmed: _Batch | None = None  # the last write, if it may or may not have been stored
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._models: dict[str, set[str]] = {}
        self._name_count = 0  # over all projects
        self._rolled_up_at = 0.0
        self._is_closed = False
        self._is_refused = False
        self.on_charge: Callable[[Charge], None] | None = None

    def record(self, project: str, key_id: str, model: str, usage: Usage) -> None:
        """Count a response or another model call."""
        cached = usage.input_tokens_details.cached_tokens
        prices = self.prices
        price = prices.get(model) or prices.get(ANY_MODEL) if prices else None
        cost = 0.0 if price is None else price.compute_cost(usage.input_tokens, cached, usage.output_tokens)
        models = self._models.get(project)
        if models is None or model not in models:
            model = self._add_model(project, model)
        key = int(self._now()) // MINUTE * MINUTE, project, key_id, model
        before = self._rows.get(key)
        if before is None:
            self._rows[key] = UsageRow(*key, 1, usage.input_tokens, cached, usage.output_tokens, cost)
        else:
            self._rows[key] = UsageRow(
                *key,
                before.requests + 1,
                before.input_tokens + usage.input_tokens,
                before.cached_tokens + cached,
                before.output_tokens + usage.output_tokens,
                before.cost + cost,
            )
        if self.on_charge is not None:
            self.on_charge(Charge(project, key_id, usage.input_tokens + usage.output_tokens, cost))
        if self._timer is None and not self._is_closed:
            seconds = 0.0 if len(self._rows) >= _MAX_ROWS else FLUSH_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._start_flush)

    def _add_model(self, project: str, model: str) -> str:
        """Return the name under which the usage of a new model of a project is recorded."""
        if model in self.prices:
            return model
        models = self._models.setdefault(project, set())
        if len(models) >= MAX_MODELS or len(model) > _MAX_MODEL_LENGTH or not model.isprintable():
            return OTHER_MODEL  # PostgreSQL would refuse a null character
        self._name_count += 1
        if self._name_count > _MAX_NAMES:
            self._models, self._name_count = {project: models}, len(models) + 1
        models.add(model)
        return model

    def record_run(self, project: str, key_id: str, run: Run, prepared: Prepared | None) -> None:
        """Count a response that has ended. `prepared` is None if no model was called.

        If it was interrupted before its last model call reported the usage, the tokens of this call are estimated. A
        call that failed without output, or was interrupted before it began, is not counted.
        """
        progress = TurnProgress() if prepared is None else prepared.turn.progress
        parts = run.split_output(progress.item_count) if progress.is_sent else None
        if prepared is not None and parts is not None and (parts[1] or run.response.status != "failed"):
            self.start(self._record_estimate(project, key_id, run, prepared, *parts))
        elif run.usage is not None:
            self.record(project, key_id, find_model(run.response, prepared), run.usage)

    def record_unanswered(self, project: str, key_id: str, prepared: Prepared) -> None:
        """Count a request that was cancelled before an answer began, if an upstream has been sent a request for it."""
        if prepared.turn.progress.is_sent:
            self.start(self._record_estimate(project, key_id, None, prepared, [], []))

    async def _record_estimate(
        self, project: str, key_id: str, run: Run | None, prepared: Prepared, earlier: Items, output: Items
    ) -> None:
        usage = await offload.run(self._estimate_usage, prepared.turn, earlier, output)
        model = prepared.route.first.model.id
        if run is not None:
            usage = usage if run.usage is None else run.usage + usage
            model = find_model(run.response, prepared)
        self.record(project, key_id, model, usage)

    def _estimate_usage(self, turn: Turn, earlier: Items, output: Items) -> Usage:
        """Estimate the usage of the last model call of a turn, which has read the `earlier` output."""
        items = [*turn.items, *earlier]
        if self._sealer is not None and Compaction in map(type, earlier):
            items = expand_compactions(items, self._sealer, project=turn.project).items
        decoded = (msgspec.json.decode(codec.encode(item)) for item in output)
        return estimate_output_usage(turn.request, items, decoded)

    async def flush(self, *, on_taken: Callable[[], None] | None = None) -> bool:
        """Write all counted usage. Return False if the store failed: the rows are written later.

        `on_taken` is called at the moment after which usage is not part of this write. Cancelling the await does not
        stop the write: its rows would be lost.
        """
        return await asyncio.shield(self.start(self._flush(on_taken)))

    async def _flush(self, on_taken: Callable[[], None] | None) -> bool:
        async with self._lock:
            rows, self._rows = self._rows, {}
            if on_taken is not None:
                on_taken()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            waiting = [_Batch(list(rows.values()))] if rows else []
            if self._unconfirmed is not None:
                waiting.append(self._unconfirmed)
            if not waiting:
                return True
            is_written = await self._write(waiting)
        if is_written:
            await self._roll_up()
        return is_written

    async def _write(self, waiting: list[_Batch]) -> bool:
        """Write batches, the last one first. Return False if a row was not written.

        All rows are written later if the store fails, or refuses all of them. If it refuses only some, these are lost.
        """
        refused, has_written = list[tuple[UsageRow, Exception]](), False
        self._unconfirmed = None
        while waiting and (has_written or len(refused) < _MAX_REFUSED):
            batch = waiting.pop()
            try:
                await self._store.add_usage(batch.rows, write_id=batch.write_id)
            except Unavailable as error:  # the store logs its failures
                logger.debug("the usage was not written yet: %s", error)
                self._unconfirmed = batch
                break
            except Exception as error:  # nothing of the batch is stored
                middle = len(batch.rows) // 2
                if middle:
                    waiting += [_Batch(batch.rows[middle:]), _Batch(batch.rows[:middle])]
                else:
                    refused.append((batch.rows[0], error))
            else:
                has_written = True
        self._log_refused(refused, is_lost=has_written)
        unwritten = [row for batch in waiting for row in batch.rows]
        if not has_written:
            unwritten += [row for row, _ in refused]
        if unwritten or self._unconfirmed is not None:
            self._put_back(unwritten)
        return not unwritten and not refused and self._unconfirmed is None

    def _log_refused(self, refused: Sequence[tuple[UsageRow, Exception]], *, is_lost: bool) -> None:
        """Log each lost row, or once that the store refuses all usage."""
        if is_lost:
            for row, reason in refused:
                logger.error("the store refuses a row of usage, which is lost: %r", row, exc_info=reason)
        elif refused and not self._is_refused:
            logger.error("the store refuses all usage, which is written later", exc_info=refused[0][1])
        self._is_refused = bool(refused) and not is_lost

    async def close(self) -> None:
        """Write the last usage. Nothing is counted after this."""
        self._is_closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.flush()
        unwritten = len(self._rows) + (0 if self._unconfirmed is None else len(self._unconfirmed.rows))
        if unwritten:
            logger.error("the usage of %d minutes and models could not be stored", unwritten)

    def _put_back(self, rows: Sequence[UsageRow]) -> None:
        self._rows = _join_rows([*rows, *self._rows.values()], lambda row: row)
        if len(self._rows) > _MAX_HELD_ROWS:
            self._rows = _join_rows(self._rows.values(), _begin_hour)
        if len(self._rows) > _MAX_HELD_ROWS:
            logger.error("the store fails for too long: usage is recorded without its models")
            self._rows = _join_rows(self._rows.values(), lambda row: row._replace(model=OTHER_MODEL))
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._start_flush)

    async def _roll_up(self) -> None:
        """Join the minutes of old usage once in an hour."""
        if self._now() - self._rolled_up_at < HOUR:
            return
        self._rolled_up_at = self._now()
        try:
            await self._store.roll_up_usage(int(self._now()))
        except AntiphonError as error:  # the next hour tries again
            logger.debug("old usage was not joined: %s", error)

    def _start_flush(self) -> None:
        self._timer = None
        self.start(self._flush_in_background())

    async def _flush_in_background(self) -> None:
        try:
            await self.flush()
        except Exception:
            logger.exception("the usage could not be written")

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start to count or write usage. `close` waits for the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _join_rows(
    rows: Iterable[UsageRow], group: Callable[[UsageRow], UsageRow]
) -> dict[tuple[int, str, str, str], UsageRow]:
    """Add up the rows with the same period, project, key and model. `group` changes these fields of a row first."""
    joined: dict[tuple[int, str, str, str], UsageRow] = {}
    for row in map(group, rows):
        key = row[:4]
        before = joined.get(key)
        sums = row[4:] if before is None else [a + b for a, b in zip(before[4:], row[4:], strict=True)]
        joined[key] = UsageRow(*key, *sums)
    return joined


def _begin_hour(row: UsageRow) -> UsageRow:
    return row._replace(started_at=row.started_at // HOUR * HOUR)


def find_model(response: Response, prepared: Prepared | None) -> str:
    """Return the backend's name of the model of a response: prices have this name.

    A response that ended before its model was known counts for the first candidate.
    """
    if response.served_by is not None or prepared is None:
        return response.model
    return prepared.route.first.model.id
