"""`antiphon runs`: list, show, resume and delete the agent runs on this machine."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
from msgspec import Struct

from antiphon.agent.history import join_text
from antiphon.agent.outcome import OutcomeKind
from antiphon.agent.resume import FINISHED
from antiphon.agent.run_records import (
    INTERRUPTED,
    RUNNING,
    RunRecord,
    delete_run,
    list_runs,
    prune_runs,
    read_run,
)
from antiphon.cli import run as run_command
from antiphon.cli.run_options import LEDGER_FILE, delete_run_options, find_run_options
from antiphon.cli.run_report import describe_call, describe_pending, format_cost, shorten
from antiphon.cli.settings import load_settings
from antiphon.config.settings import Settings
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.ledger import Ledger, RunSummary
from antiphon.protocol.json_text import JsonObject, to_text
from antiphon.store.location import is_postgres, locate_ledger
from antiphon.text_table import format_table
from antiphon.tools.base import ToolInvocation

T = TypeVar("T")

MAX_LISTED = 100
_DAY_SECONDS = 86400.0
_HEADER = ("RUN", "STATE", "MODEL", "COST", "UPDATED", "TASK")


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run in the list. `model` and `cost` are None if its entries cannot be read."""

    run_id: str
    state: str
    model: str | None
    cost: float | None
    currency: str | None
    updated_at: int
    task: str


def run(arguments: Namespace) -> int:
    if arguments.action == "resume":
        return run_command.run(Namespace(**vars(arguments) | {"resume": arguments.id}))
    settings = load_settings(arguments)
    actions = {"show": _show, "delete": _delete, "prune": _prune}
    return actions.get(arguments.action, _list)(arguments, settings)


def _list(arguments: Namespace, settings: Settings) -> int:
    limit = getattr(arguments, "limit", None) or MAX_LISTED
    wanted = getattr(arguments, "state", None)
    if wanted is not None:
        _check_states(arguments, [wanted])

    async def read(ledger: Ledger) -> list[ListedRun]:
        runs = await list_runs(ledger, limit=limit)
        return [await _read_listed(ledger, settings, each) for each in runs if wanted in (None, each.status)]

    runs = _use_ledger(settings, read) or []
    if getattr(arguments, "json", False):
        for each in runs:
            print(msgspec.json.encode(each).decode())
        return 0
    for line in describe_list(runs):
        print(line)
    if any(each.state == INTERRUPTED for each in runs):
        print("To continue an interrupted run: antiphon runs resume RUN_ID", file=sys.stderr)
    if not runs:
        print("There are no runs. 'antiphon run' starts one.", file=sys.stderr)
    return 0


def _show(arguments: Namespace, settings: Settings) -> int:
    async def read(ledger: Ledger) -> RunRecord:
        prices = find_run_options(settings, arguments.id).make_prices(settings)
        return await read_run(ledger, arguments.id, prices=prices)

    record = _use_ledger(settings, read)
    if record is None:
        raise _make_not_found(arguments.id)
    if arguments.json:
        print(msgspec.json.encode(record).decode())
    else:
        print("\n".join(describe_run(record)))
    return 0


def _delete(arguments: Namespace, settings: Settings) -> int:
    async def delete(ledger: Ledger) -> bool:
        for run_id in arguments.ids:
            await delete_run(ledger, run_id, force=arguments.force)
            delete_run_options(settings, run_id)
            print(f"deleted {run_id}")
        return True

    if _use_ledger(settings, delete) is None:
        raise _make_not_found(arguments.ids[0])
    return 0


def _prune(arguments: Namespace, settings: Settings) -> int:
    _check_states(arguments, arguments.state or [])
    statuses = arguments.state or (None if arguments.all else FINISHED)

    async def prune(ledger: Ledger) -> list[str]:
        seconds = arguments.older_than * _DAY_SECONDS
        return await prune_runs(ledger, older_than=seconds, statuses=statuses, dry_run=arguments.dry_run)

    pruned = _use_ledger(settings, prune) or []
    for run_id in pruned:
        if not arguments.dry_run:
            delete_run_options(settings, run_id)
        print(f"{'would delete' if arguments.dry_run else 'deleted'} {run_id}")
    print(f"{len(pruned)} runs", file=sys.stderr)
    return 0


def _check_states(arguments: Namespace, states: Sequence[str]) -> None:
    known = (*get_args(OutcomeKind), RUNNING, INTERRUPTED)
    for state in states:
        if state not in known:
            arguments.report_usage_error(f"argument --state: {state!r} is not one of {', '.join(known)}")


def _use_ledger(settings: Settings, work: Callable[[Ledger], Awaitable[T]]) -> T | None:
    """Return the result of the work; None if there is no ledger yet."""
    path = settings.data_dir / LEDGER_FILE
    if not is_postgres(settings.store) and not path.exists():
        return None
    return asyncio.run(_open_ledger(settings.store, path, work))


async def _open_ledger(url: str, path: Path, work: Callable[[Ledger], Awaitable[T]]) -> T:
    ledger = locate_ledger(url, path)
    try:
        return await work(ledger)
    finally:
        await ledger.close()


def _make_not_found(run_id: str) -> AntiphonError:
    return InvalidRequest(f"There is no run with id '{run_id}'.", param="run_id", code="run_not_found")


async def _read_listed(ledger: Ledger, settings: Settings, run: RunSummary) -> ListedRun:
    try:
        prices = find_run_options(settings, run.run_id).make_prices(settings)
        record = await read_run(ledger, run.run_id, prices=prices)
    except AntiphonError:
        # The list still shows the others. `antiphon runs show` reports the error.
        record = None
    return ListedRun(
        run_id=run.run_id,
        state=run.status,
        model=None if record is None else record.model or None,
        cost=None if record is None else record.cost,
        currency=None if record is None else record.currency,
        updated_at=run.updated_at,
        task=run.title,
    )


def describe_list(runs: Sequence[ListedRun]) -> list[str]:
    """Return the table of the runs as lines, with a header; none without runs."""
    if not runs:
        return []
    return format_table([_HEADER, *map(_make_row, runs)])


def _make_row(run: ListedRun) -> tuple[str, ...]:
    cost = "-" if run.cost is None else format_cost(run.cost, run.currency)
    return run.run_id, run.state, run.model or "-", cost, _format_time(run.updated_at), shorten(run.task)


def describe_run(record: RunRecord) -> list[str]:
    """Return the status, the totals, the messages and the tool calls of a run, as lines."""
    cost = "" if record.cost is None else f", {format_cost(record.cost, record.currency)}"
    tokens = f"{record.usage.total_tokens:,} tokens"
    lines = [
        f"{record.run_id}  {record.status}  {record.model or 'unknown model'}",
        f"{record.turns} turns, {record.tool_calls} calls, {tokens}{cost}",
        "",
    ]
    for item in record.history:
        lines += _describe_item(item)
    if record.error is not None:
        lines += ["", f"{record.error.code}: {record.error.message}"]
    if record.pending:
        lines += ["", "calls that wait for a decision:", *describe_pending(record.pending)]
    if record.status not in (*FINISHED, RUNNING):
        lines += ["", f"To continue: antiphon runs resume {record.run_id}"]
    return lines


def _describe_item(item: JsonObject) -> list[str]:
    match item.get("type", "message"):
        case "message":
            text = join_text([item])
            return [f"{item.get('role', 'assistant')}: {text}"] if text else []
        case "function_call":
            return [
                f"> {describe_call(ToolInvocation(item['call_id'], item['name'], to_text(item.get('arguments', ''))))}"
            ]
        case "function_call_output":
            return [f"< {shorten(to_text(item.get('output')))}"]
    return []


def _format_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")
