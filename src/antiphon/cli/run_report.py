"""Output of `antiphon run`: progress and the answer for a person, or the events as lines of JSON."""

import re
import shlex
import sys
from collections.abc import Sequence

import msgspec

from antiphon.agent.limits import Prices
from antiphon.agent.outcome import (
    Notice,
    Outcome,
    ReasoningDelta,
    RunEnded,
    RunEvent,
    SubagentEvent,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnFinished,
    TurnRestarted,
    TurnStarted,
)
from antiphon.cli.answer_writer import AnswerWriter
from antiphon.protocol.json_text import to_text
from antiphon.protocol.response import Usage
from antiphon.tools.base import PendingToolCall, ToolInvocation

_MAX_LINE_LENGTH = 160

# The options that raise a limit.
_LIMIT_OPTIONS = {"max_turns": " --max-turns N", "budget": " --max-tokens N", "deadline": " --deadline SECONDS"}


class JsonReport:
    """Prints every event as a line of JSON to standard output."""

    def show(self, event: RunEvent) -> None:
        print(msgspec.json.encode(_drop_state(event)).decode(), flush=True)

    def note(self, text: str) -> None:
        """Do nothing: standard output has only the events."""

    def set_usage(self, usage: Usage) -> None:
        """Do nothing: the events contain no totals."""

    def finish(self, outcome: Outcome) -> None:
        """Do nothing: the last event contains the outcome."""


def _drop_state(event: RunEvent) -> RunEvent:
    """Return the event without the state of the run, which the ledger has anyway."""
    if isinstance(event, RunEnded):
        return msgspec.structs.replace(event, outcome=msgspec.structs.replace(event.outcome, state=None))
    if isinstance(event, SubagentEvent):
        return msgspec.structs.replace(event, event=_drop_state(event.event))
    return event


class TerminalReport:
    """Writes the answer to standard output, streamed if that is a terminal, and progress for a person."""

    def __init__(self, *, prices: Prices | None) -> None:
        self._is_live = sys.stdout.isatty()
        # One writer for answer and progress, because it keeps track of unfinished lines.
        out = sys.stdout if self._is_live else sys.stderr
        self._writer = AnswerWriter(out, live=out.isatty())
        self._prices = prices
        self._usage = Usage(0, 0, 0)
        self._is_reasoning = False

    def note(self, text: str) -> None:
        self._writer.note(text)

    def set_usage(self, usage: Usage) -> None:
        """Set the usage of a resumed run so far."""
        self._usage = usage

    def show(self, event: RunEvent) -> None:
        if isinstance(event, ReasoningDelta) and not self._is_reasoning:
            self._writer.end_line()
            self._writer.write("reasoning: ", dim=True)
        self._is_reasoning = isinstance(event, ReasoningDelta)
        match event:
            case TurnStarted():
                self._writer.show_status("reading ...")
            case TextDelta() if self._is_live:
                self._writer.write(event.text)
            case ReasoningDelta():
                self._writer.write(event.text, dim=True)
            case TurnFinished():
                self._usage += event.usage
                self._writer.note(f"turn {event.number}: {self._format_usage(self._usage)} so far")
            case TurnRestarted():
                self._writer.note(f"turn {event.number} was interrupted and is repeated: {event.reason}")
            case Notice():
                self._writer.note(event.message)
            case _:
                self._show_tool(event)

    def _show_tool(self, event: RunEvent) -> None:
        match event:
            case ToolStarted():
                self._writer.note(f"> {describe_call(event.call)}")
            case ToolProgress():
                self._writer.note(f"  {shorten(event.message)}")
            case ToolFinished():
                self._writer.note(f"< {event.call.name}: {shorten(to_text(event.output))}")

    def finish(self, outcome: Outcome) -> None:
        self._writer.end_line()
        if not self._is_live and outcome.text:
            print(outcome.text, flush=True)
        count = f"{outcome.turns} turns, {outcome.tool_calls} calls, {self._format_usage(outcome.usage)}"
        self._writer.note(f"{outcome.run_id}: {count}")

    def _format_usage(self, usage: Usage) -> str:
        cost = (
            "" if self._prices is None else f", {format_cost(self._prices.compute_cost(usage), self._prices.currency)}"
        )
        return f"{usage.total_tokens:,} tokens{cost}"


RunReport = JsonReport | TerminalReport


def format_cost(cost: float, currency: str | None) -> str:
    return f"{cost:,.4f} {currency or ''}".rstrip()


def describe_pending(pending: Sequence[PendingToolCall]) -> list[str]:
    """Return two lines for each call: the call, and why it waits with its idempotency key."""
    reasons = {
        "needs_approval": "needs approval",
        "may_have_happened": "may have happened: it was running when the run was interrupted",
    }
    lines = []
    for call in pending:
        lines += [f"  {call.call_id}  {describe_call(call)}", f"    {reasons[call.reason]}"]
        lines[-1] += f"; key {call.idempotency_key}" if call.idempotency_key else ""
    return lines


def describe_call(call: ToolInvocation) -> str:
    return f"{call.name}({shorten(call.arguments)})"


def shorten(text: str) -> str:
    """Return the text as one line, cut to a maximum length."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= _MAX_LINE_LENGTH else f"{line[: _MAX_LINE_LENGTH - 4]} ..."


def describe_end(outcome: Outcome, *, config: str | None) -> list[str]:
    """Return the lines to print about a run without an answer: the reason and how to continue."""
    resume = f"antiphon runs resume {outcome.run_id}"
    if config is not None:
        resume += f" --config {shlex.quote(config)}"
    raised = resume.replace("runs resume", "run --resume") + _LIMIT_OPTIONS.get(outcome.kind, "")
    match outcome.kind:
        case "needs_approval":
            reasons = {call.reason for call in outcome.pending}
            lines = ["these calls wait for a decision:", *describe_pending(outcome.pending)]
            lines.append(f"To decide on each call: {resume}")
            if "needs_approval" in reasons:
                lines.append(f"To approve the calls that need approval: {resume} --yes")
            if "may_have_happened" in reasons:
                lines.append(f"To make the calls again that may have happened: {resume} --repeat-interrupted")
            return lines
        case "cancelled":
            return [f"stopped. To continue: {resume}"]
        case "failed":
            reason = outcome.error.message if outcome.error is not None else "unknown reason"
            return [f"the run failed: {reason}", f"To continue: {resume}"]
        case "final" | "decision":
            return []
        case "incomplete":
            return ["the answer was cut off by a limit of its length"]
        case "no_progress":
            return ["the run was stopped because the model repeated a call or gave no answer"]
        case _:
            return [f"the run reached a limit: {outcome.kind}", f"To continue with a higher limit: {raised}"]
