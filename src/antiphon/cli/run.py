"""`antiphon run`: a task for an agent with tools. Each step is written down, so that the run can always go on."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.agent.agent import Agent
from antiphon.agent.journal import load
from antiphon.agent.outcome import Outcome, RunEvents, read_outcome
from antiphon.agent.transports.base import Transport
from antiphon.agent.transports.engine import LocalTransport
from antiphon.agent.transports.http import HttpTransport
from antiphon.cli.main import INTERRUPTED
from antiphon.cli.run_options import LEDGER_FILE, RunOptions, load_run_options, parse_run_options, save_run_options
from antiphon.cli.run_report import JsonReport, Report, TerminalReport, advise, describe_call
from antiphon.cli.server_client import ServerClient
from antiphon.cli.settings import load_settings, read_secret
from antiphon.config import DEFAULT_PROJECT, Settings
from antiphon.engine.assembly import build_engine
from antiphon.errors import AntiphonError
from antiphon.ledger import Ledger
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import ToolInvocation
from antiphon.tools.loading import load_tools

AWAITING, LIMITED = 3, 4
_STATUSES = {"final": 0, "decision": 0, "failed": 1, "needs_approval": AWAITING, "cancelled": INTERRUPTED}


def run(arguments: Namespace) -> int:
    """0 for an answer, 1 for a failure, 3 for calls that wait for approval, 4 for a limit, 130 for an interrupt."""
    # What goes wrong in a tool is told with the rest: its traceback is not for whoever watches.
    logging.getLogger("antiphon").addHandler(logging.NullHandler())
    settings = load_settings(arguments, store="memory:")
    if arguments.resume is not None:
        assignment = load_run_options(settings, arguments.resume, arguments)
    else:
        assignment = parse_run_options(arguments)
    outcome = asyncio.run(_Session(arguments, settings, assignment).work())
    config = None if arguments.config is None else str(arguments.config)
    for line in advise(outcome, config=config):
        print(f"antiphon: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    status = _STATUSES.get(outcome.kind, LIMITED)
    if status == INTERRUPTED:
        # A tool in a thread of its own cannot be stopped, and Python would wait for it. What counts is on disk.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


class _Session:
    """One run, from its beginning or from where it was left, until it ends or has to wait."""

    def __init__(self, arguments: Namespace, settings: Settings, assignment: RunOptions) -> None:
        self._settings = settings
        self._assignment = assignment
        self._resumed: str | None = arguments.resume
        self._run_id = self._resumed or f"run_{int(time.time() * 1000):x}{secrets.token_hex(4)}"
        self._approves_all: bool = arguments.yes
        self._report: Report = JsonReport() if arguments.json else TerminalReport(prices=assignment.make_prices())
        # Who reads lines of JSON answers no questions.
        self._asks = sys.stdin.isatty() and not arguments.json
        self._cancel = asyncio.Event()

    async def work(self) -> Outcome:
        ledger = SqliteLedger(self._settings.data_dir / LEDGER_FILE)
        try:
            if self._resumed is not None:
                self._report.begin((await load(self._run_id, ledger)).state.usage)
            tools = load_tools(self._assignment.tools, directory=Path(self._assignment.directory))
            async with _reach_model(self._settings, self._assignment) as (transport, model):
                agent = Agent(
                    model=model,
                    transport=transport,
                    instructions=self._assignment.instructions,
                    tools=tools,
                    limits=self._assignment.make_limits(),
                    prices=self._assignment.make_prices(),
                )
                outcome = await self._go_on(agent, ledger)
        finally:
            await ledger.close()
        self._report.finish(outcome)
        return outcome

    async def _go_on(self, agent: Agent, ledger: Ledger) -> Outcome:
        task = _read_task(self._assignment.task) if self._resumed is None else ""
        save_run_options(self._settings, self._run_id, self._assignment)
        if self._resumed is None:
            events = agent.run_stream(task, durable=ledger, run_id=self._run_id, cancel=self._cancel)
        else:
            events = agent.resume_stream(self._run_id, durable=ledger, cancel=self._cancel)
        outcome = await self._watch(events)
        while outcome.kind == "needs_approval":
            begun = (await load(self._run_id, ledger)).state.started_calls
            approvals = self._judge(outcome.pending, begun)
            if approvals is None:
                break
            events = agent.resume_stream(self._run_id, approvals=approvals, durable=ledger, cancel=self._cancel)
            outcome = await self._watch(events)
        return outcome

    async def _watch(self, events: RunEvents) -> Outcome:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await read_outcome(events, self._report.show)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """The first signal asks for an end, with everything written down. The second one takes it."""
        if self._cancel.is_set():
            os._exit(INTERRUPTED)
        self._cancel.set()

    def _judge(self, pending: Iterable[ToolInvocation], begun: set[str]) -> dict[str, bool] | None:
        """Whether each call may be made; None if nobody is there to say."""
        if self._approves_all:
            return {call.call_id: True for call in pending}
        if not self._asks:
            return None
        try:
            return {call.call_id: _ask(call, begun=call.call_id in begun) for call in pending}
        except (EOFError, KeyboardInterrupt):
            print()
            return None


def _ask(call: ToolInvocation, *, begun: bool) -> bool:
    if begun:
        print("This call was under way when the process ended. It may have had its effect already.")
    while True:
        answer = input(f"{describe_call(call)}: make this call? [y/n] ").strip().lower()
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")


def _read_task(task: str) -> str:
    text = sys.stdin.read() if task == "-" else task
    if not text.strip():
        raise AntiphonError("There is no task: say what is to be done.")
    return text


@asynccontextmanager
async def _reach_model(settings: Settings, assignment: RunOptions) -> AsyncIterator[tuple[Transport, str]]:
    """The way to the model, and its name: at the server that was named, or in this process."""
    if assignment.url is not None:
        key = read_secret(assignment.key_env, option="--key-env") if assignment.key_env else None
        remote = ServerClient(assignment.url, key=key)
        model = assignment.model or _first(remote.models())
        transport = HttpTransport(f"{remote.url}/v1", api_key=key)
        try:
            yield transport, model
        finally:
            await transport.close()
        return
    engine = build_engine(settings)
    await engine.start()
    try:
        model = assignment.model or _first([model.id for model in engine.models()])
        yield LocalTransport(engine, project=DEFAULT_PROJECT), model
    finally:
        await engine.close()


def _first(models: list[str]) -> str:
    if not models:
        raise AntiphonError("The server lists no model: name one with --model.")
    return models[0]
