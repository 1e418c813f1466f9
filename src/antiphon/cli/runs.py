"""`antiphon runs`: list, show and resume the agent runs on this machine."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime

from antiphon.agent.history import join_text
from antiphon.agent.journal import Journal, load
from antiphon.agent.ownership import is_executed
from antiphon.cli import run as run_command
from antiphon.cli.run_options import LEDGER_FILE
from antiphon.cli.run_report import as_text, describe_call, shorten
from antiphon.cli.settings import load_settings
from antiphon.ledger import RunSummary
from antiphon.protocol.json_text import JsonObject
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import ToolInvocation

MAX_LISTED = 100


def run(arguments: Namespace) -> int:
    if arguments.action == "resume":
        return run_command.run(Namespace(**vars(arguments) | {"resume": arguments.id}))
    path = load_settings(arguments).data_dir / LEDGER_FILE
    if arguments.action == "show":
        journal, status = asyncio.run(_load(SqliteLedger(path), arguments.id))
        print("\n".join(describe_run(journal, status)))
        return 0
    runs = asyncio.run(_list(SqliteLedger(path))) if path.exists() else []
    for line in describe_list(runs):
        print(line)
    if any(find_status(each) == "interrupted" for each in runs):
        print("To continue an interrupted run: antiphon runs resume RUN_ID", file=sys.stderr)
    if not runs:
        print("There are no runs. 'antiphon run' starts one.", file=sys.stderr)
    return 0


async def _list(ledger: SqliteLedger) -> list[RunSummary]:
    """Return the newest runs without those of subagents, which belong to the run of their parent."""
    limit = MAX_LISTED
    try:
        while True:
            runs = await ledger.runs(limit=limit)
            # The ids of subagents' runs contain a colon.
            own = [each for each in runs if ":" not in each.run_id][:MAX_LISTED]
            if len(own) == MAX_LISTED or len(runs) < limit:
                return own
            limit *= 4
    finally:
        await ledger.close()


async def _load(ledger: SqliteLedger, run_id: str) -> tuple[Journal, str]:
    """Return a run and its status."""
    try:
        journal, lease = await load(run_id, ledger), await ledger.find_lease(run_id)
    finally:
        await ledger.close()
    ended = journal.state.ended
    if ended is not None:
        return journal, ended.kind
    return journal, "running" if is_executed(lease) else "interrupted"


def describe_list(runs: Sequence[RunSummary]) -> list[str]:
    statuses = [find_status(each) for each in runs]
    width = max(map(len, statuses), default=0)
    return [
        f"{each.run_id}  {status:{width}}  {_format_time(each.updated_at)}  {shorten(each.title)}"
        for each, status in zip(runs, statuses, strict=True)
    ]


def find_status(run: RunSummary) -> str:
    """Return the status of a run. One that no process executes any more is "interrupted"."""
    if run.status != "running":
        return run.status
    return "running" if is_executed(run.lease) else "interrupted"


def describe_run(journal: Journal, status: str) -> list[str]:
    """Return the status, the totals, the messages and the tool calls of a run, as lines."""
    state = journal.state
    lines = [
        f"{journal.run_id}  {status}",
        f"{state.turns} turns, {state.tool_calls} calls, {state.usage.total_tokens:,} tokens",
        "",
    ]
    for item in state.history:
        lines += _describe_item(item)
    if state.open_calls:
        lines += [
            "",
            "calls without a result:",
            *(f"  {call.call_id}  {describe_call(call)}" for call in state.open_calls),
        ]
    return lines


def _describe_item(item: JsonObject) -> list[str]:
    match item.get("type", "message"):
        case "message":
            text = join_text([item])
            return [f"{item.get('role', 'assistant')}: {text}"] if text else []
        case "function_call":
            return [
                f"> {describe_call(ToolInvocation(item['call_id'], item['name'], as_text(item.get('arguments', ''))))}"
            ]
        case "function_call_output":
            return [f"< {shorten(as_text(item.get('output')))}"]
    return []


def _format_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")
