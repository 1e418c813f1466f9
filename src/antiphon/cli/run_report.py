"""What is told of a run while it goes on: to a person who watches, or as a line of JSON for each event."""

import re
import shlex
import sys

import msgspec

from antiphon.agent.limits import Prices
from antiphon.agent.outcome import (
    Notice,
    Outcome,
    ReasoningDelta,
    RunEnded,
    RunEvent,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnFinished,
    TurnRestarted,
)
from antiphon.cli.chat import AnswerWriter
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolInvocation

_LONGEST_LINE = 160


class JsonReport:
    """Every event on a line of its own, on the standard output."""

    def show(self, event: RunEvent) -> None:
        if isinstance(event, RunEnded):
            # Everything in it is in the ledger too.
            event = RunEnded(event.run_id, msgspec.structs.replace(event.outcome, state=None))
        print(msgspec.json.encode(event).decode(), flush=True)

    def begin(self, usage: Usage) -> None:
        """Each event tells of itself alone."""

    def finish(self, outcome: Outcome) -> None:
        """The last event has told it."""


class TerminalReport:
    """The answer on the standard output, as it comes if that is a terminal; the rest for whoever watches."""

    def __init__(self, *, prices: Prices | None) -> None:
        self._streams = sys.stdout.isatty()
        # One screen for both: only it knows where a line is open.
        out = sys.stdout if self._streams else sys.stderr
        self._screen = AnswerWriter(out, live=out.isatty())
        self._prices = prices
        self._usage = Usage(0, 0, 0)

    def begin(self, usage: Usage) -> None:
        """The run has used this before it was resumed."""
        self._usage = usage

    def show(self, event: RunEvent) -> None:
        match event:
            case TextDelta() if self._streams:
                self._screen.show(event.text)
            case ReasoningDelta():
                self._screen.show(event.text, dim=True)
            case TurnFinished():
                self._usage += event.usage
                self._screen.remark(f"turn {event.number}: {self._price(self._usage)} so far")
            case TurnRestarted():
                self._screen.remark(f"turn {event.number} broke off and is taken again: {event.reason}")
            case Notice():
                self._screen.remark(event.message)
            case _:
                self._show_tool(event)

    def _show_tool(self, event: RunEvent) -> None:
        match event:
            case ToolStarted():
                self._screen.remark(f"> {describe_call(event.call)}")
            case ToolProgress():
                self._screen.remark(f"  {shorten(event.message)}")
            case ToolFinished():
                self._screen.remark(f"< {event.call.name}: {shorten(as_text(event.output))}")

    def finish(self, outcome: Outcome) -> None:
        self._screen.end_line()
        if not self._streams and outcome.text:
            print(outcome.text, flush=True)
        count = f"{outcome.turns} turns, {outcome.tool_calls} calls, {self._price(outcome.usage)}"
        self._screen.remark(f"{outcome.run_id}: {count}")

    def _price(self, usage: Usage) -> str:
        cost = "" if self._prices is None else f", {self._prices.of(usage):.4f}"
        return f"{usage.total_tokens:,} tokens{cost}"


Report = JsonReport | TerminalReport


def describe_call(call: ToolInvocation) -> str:
    return f"{call.name}({shorten(call.arguments)})"


def shorten(text: str) -> str:
    """The text on one line that is not too long."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 4]} ..."


def as_text(output: object) -> str:
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


def advise(outcome: Outcome, *, config: str | None) -> list[str]:
    """What to say of a run that did not come to its end, a line each."""
    again = f"antiphon runs resume {outcome.run_id}"
    if config is not None:
        again += f" --config {shlex.quote(config)}"
    match outcome.kind:
        case "needs_approval":
            waiting = [f"  {call.call_id}  {describe_call(call)}" for call in outcome.pending]
            return [
                "the run waits for your approval of:",
                *waiting,
                f"To decide on each: {again}",
                f"To approve all:    {again} --yes",
            ]
        case "cancelled":
            return [f"stopped. To go on: {again}"]
        case "failed":
            reason = outcome.error.message if outcome.error is not None else "it does not say why"
            return [f"the run failed: {reason}", f"To go on: {again}"]
        case "final" | "decision":
            return []
        case _:
            return [f"the run reached a limit: {outcome.kind}"]
