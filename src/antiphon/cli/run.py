"""`antiphon run`: run an agent on a task. Every step is stored, so that an interrupted run can be resumed."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.agent.agent import Agent
from antiphon.agent.journal import load
from antiphon.agent.outcome import Outcome, RunEvents
from antiphon.agent.ownership import is_executed
from antiphon.agent.run_records import prune_runs
from antiphon.agent.run_stream import read_outcome
from antiphon.agent.tracing import flush_traces
from antiphon.agent.transports.base import Transport
from antiphon.agent.transports.engine import LocalTransport
from antiphon.agent.transports.http import HttpTransport
from antiphon.cli.main import INTERRUPTED
from antiphon.cli.run_options import (
    LEDGER_FILE,
    RunOptions,
    delete_run_options,
    load_run_options,
    parse_run_options,
    save_run_options,
)
from antiphon.cli.run_report import JsonReport, RunReport, TerminalReport, describe_call, describe_end
from antiphon.cli.server_client import ServerClient, find_running_server
from antiphon.cli.settings import load_settings, read_secret
from antiphon.config.settings import DEFAULT_PROJECT, Settings
from antiphon.engine.assembly import build_engine
from antiphon.errors import AntiphonError
from antiphon.ledger import Ledger, RunTaken
from antiphon.store.location import locate_ledger
from antiphon.tools.base import PendingToolCall
from antiphon.tools.loading import load_tools

NEEDS_APPROVAL, LIMIT_REACHED = 3, 4
_DAY_SECONDS = 86400.0
_EXIT_STATUSES = {"final": 0, "decision": 0, "failed": 1, "needs_approval": NEEDS_APPROVAL, "cancelled": INTERRUPTED}


def run(arguments: Namespace) -> int:
    """Return 0 for an answer, 1 for a failure, 3 if calls wait for approval, 4 for a limit, 130 for an interrupt."""
    # Errors of tools are part of the run's output. Their tracebacks are not shown.
    logging.getLogger("antiphon").addHandler(logging.NullHandler())
    settings = load_settings(arguments, store="memory:")
    if arguments.resume is not None:
        options = load_run_options(settings, arguments.resume, arguments)
    else:
        options = parse_run_options(arguments)
    outcome = asyncio.run(_RunSession(arguments, settings, options).execute())
    config = None if arguments.config is None else str(arguments.config)
    for line in describe_end(outcome, config=config):
        print(f"antiphon: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    status = _EXIT_STATUSES.get(outcome.kind, LIMIT_REACHED)
    if status == INTERRUPTED:
        # A tool in a thread cannot be stopped. Skip the clean-up at exit, which may wait; the run is stored.
        sys.stdout.flush()
        sys.stderr.flush()
        flush_traces()
        os._exit(status)
    return status


class _RunSession:
    """Executes or resumes one run until it ends or needs approval."""

    def __init__(self, arguments: Namespace, settings: Settings, options: RunOptions) -> None:
        self._settings = settings
        self._options = options
        self._resumed_id: str | None = arguments.resume
        self._run_id = self._resumed_id or f"run_{int(time.time() * 1000):x}{secrets.token_hex(4)}"
        self._force: bool = arguments.force
        self._approves: bool = arguments.yes
        self._repeats_interrupted: bool = arguments.repeat_interrupted
        self._prices = options.make_prices(settings)
        self._report: RunReport = JsonReport() if arguments.json else TerminalReport(prices=self._prices)
        # With JSON output, standard output is read by a program.
        self._can_ask = sys.stdin.isatty() and not arguments.json
        self._cancel = asyncio.Event()

    async def execute(self) -> Outcome:
        ledger = locate_ledger(self._settings.store, self._settings.data_dir / LEDGER_FILE)
        try:
            await self._prune(ledger)
            if self._resumed_id is not None:
                self._report.set_usage((await load(self._run_id, ledger)).state.usage)
            tools = load_tools(self._options.tools, directory=Path(self._options.directory))
            async with _open_transport(self._settings, self._options, self._report) as (transport, model):
                agent = Agent(
                    model=model,
                    transport=transport,
                    instructions=self._options.instructions,
                    tools=tools,
                    limits=self._options.make_limits(),
                    prices=self._prices,
                )
                outcome = await self._run_agent(agent, ledger)
        finally:
            await ledger.close()
        self._report.finish(outcome)
        return outcome

    async def _run_agent(self, agent: Agent, ledger: Ledger) -> Outcome:
        if self._resumed_id is None:
            task = _read_task(self._options.task)
            save_run_options(self._settings, self._run_id, self._options)
            events = agent.run_stream(task, ledger=ledger, run_id=self._run_id, cancel=self._cancel)
        else:
            await self._refuse_live_run(ledger)
            save_run_options(self._settings, self._run_id, self._options)
            events = agent.resume_stream(self._run_id, ledger=ledger, force=self._force, cancel=self._cancel)
        outcome = await self._show_events(events)
        while outcome.kind == "needs_approval":
            approvals = self._decide(outcome.pending)
            if approvals is None:
                break
            events = agent.resume_stream(self._run_id, approvals=approvals, ledger=ledger, cancel=self._cancel)
            outcome = await self._show_events(events)
        return outcome

    async def _prune(self, ledger: Ledger) -> None:
        """Delete the runs that are older than the setting permits, but never the run to resume."""
        days = self._settings.run_retention_days
        if days and self._resumed_id is None:
            for run_id in await prune_runs(ledger, older_than=days * _DAY_SECONDS, statuses=None):
                delete_run_options(self._settings, run_id)

    async def _refuse_live_run(self, ledger: Ledger) -> None:
        """Raise RunTaken if a process executes the run. Its options must not be replaced."""
        if not self._force and is_executed(await ledger.find_lease(self._run_id)):
            raise RunTaken(
                self._run_id,
                f"Another process is executing the run '{self._run_id}'. To take it over: "
                f"antiphon runs resume {self._run_id} --force",
            )

    async def _show_events(self, events: RunEvents) -> Outcome:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await read_outcome(events, self._report.show)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """Cancel the run on the first signal, which stores its state. Exit at once on the second."""
        if self._cancel.is_set():
            os._exit(INTERRUPTED)
        self._cancel.set()

    def _decide(self, pending: Sequence[PendingToolCall]) -> dict[str, bool] | None:
        """Return the decisions by the ids of the calls, or None if there are none.

        The options decide on the calls that they apply to, and the person at the terminal on the others.
        """
        decisions = {call.call_id: True for call in pending if self._is_approved(call)}
        if self._can_ask:
            try:
                for call in pending:
                    if call.call_id not in decisions:
                        decisions[call.call_id] = _ask(call)
            except (EOFError, KeyboardInterrupt):
                print()
                return None
        return decisions or None

    def _is_approved(self, call: PendingToolCall) -> bool:
        """Return True if an option of the command approves this call."""
        return self._repeats_interrupted if call.reason == "may_have_happened" else self._approves


def _ask(call: PendingToolCall) -> bool:
    if call.reason == "may_have_happened":
        print("This call was running when the process ended. It may have taken effect.")
        print(f"Its idempotency key is {call.idempotency_key}.")
    while True:
        answer = input(f"{describe_call(call)}: make this call? [y/n] ").strip().lower()
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")


def _read_task(task: str) -> str:
    text = sys.stdin.read() if task == "-" else task
    if not text.strip():
        raise AntiphonError("The task is empty.")
    return text


@asynccontextmanager
async def _open_transport(
    settings: Settings, options: RunOptions, report: RunReport
) -> AsyncIterator[tuple[Transport, str]]:
    """Yield a transport and the name of the model, on a server or in this process."""
    client = await asyncio.to_thread(_find_server, settings, options)
    if client is not None:
        model = options.model or _first_model(await asyncio.to_thread(client.models))
        report.note(f"{model} in {client.shown_url}")
        transport = HttpTransport(f"{client.url}/v1", api_key=client.key)
        try:
            yield transport, model
        finally:
            await transport.close()
        return
    report.note("loading the model into this process ...")
    engine = build_engine(settings)
    await engine.start()
    try:
        model = options.model or _first_model([model.id for model in engine.models()])
        yield LocalTransport(engine, project=DEFAULT_PROJECT), model
    finally:
        await engine.close()


def _find_server(settings: Settings, options: RunOptions) -> ServerClient | None:
    """Return the server that `--url` names, else the configured server if it runs and `--local` is not set."""
    key = read_secret(options.key_env, option="--key-env") if options.key_env else None
    if options.url is not None:
        return ServerClient(options.url, key=key)
    return None if options.local else find_running_server(settings, key=key)


def _first_model(models: list[str]) -> str:
    if not models:
        raise AntiphonError("The server lists no models: name one with --model.")
    return models[0]
