"""The loop of a response with hosted tools: model calls, and hosted calls between them, as one stream of deltas.

A round is one model call and the hosted calls that its answer makes. The calls are run one after the other when the
answer is complete. Then the model is called again with their items in its context. The response ends when the model
stops, when the client has to reply first (a function call, an approval), or when a limit is reached.

A background response writes a journal (`journal.py`). An attempt that takes over sends the deltas of the finished steps
again (`background/attempt.py`), and the loop continues after them.
"""

import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon import offload
from antiphon.backends.base import Turn
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.expansion import expand_compactions
from antiphon.engine.serve.hosted.answer import AnswerCall, AnswerReader, CallBudget
from antiphon.engine.serve.hosted.call_runner import CallRunner
from antiphon.engine.serve.hosted.journal import (
    AnswerStep,
    CallRecord,
    HostedJournal,
    IntentStep,
    IntroductionStep,
    OutcomeStep,
    Step,
    is_nested,
    list_deltas,
)
from antiphon.engine.serve.hosted.programs import Programs, order_calls
from antiphon.engine.serve.hosted.toolset import HostedToolset
from antiphon.engine.serve.routing import Serving
from antiphon.engine.serve.tool_emulation.translate_history import (
    HostedCallText,
    Items,
    has_hosted_items,
    translate_hosted_items,
)
from antiphon.errors import ServerError
from antiphon.protocol.events import OutputItemAdded
from antiphon.protocol.items import Compaction, FunctionCall, FunctionCallOutput
from antiphon.protocol.request import wants_json
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.delta_codec import decode_deltas, encode_deltas, join_text
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import HostedCall
from antiphon.tools.hosted.program.tool import NAME as PROGRAM
from antiphon.tools.hosted.program.tool import ProgramSession

if TYPE_CHECKING:
    from antiphon.engine.telemetry import EngineTelemetry

logger = logging.getLogger(__name__)

# A model that goes on calling hosted tools after the last allowed call gets this many rounds with refusals.
MAX_REFUSED_ROUNDS = 2

StartModel = Callable[[Turn, Sequence[Delta]], Awaitable[Serving]]


class HostedRun:
    """The rounds of one response."""

    def __init__(
        self,
        turn: Turn,
        toolset: HostedToolset,
        start_model: StartModel,
        journal: HostedJournal,
        *,
        sealer: Sealer,
        budget: CallBudget,
        images: bool,
        replayed: Sequence[Delta],
        telemetry: "EngineTelemetry | None" = None,
    ) -> None:
        self._turn = turn
        self._toolset = toolset
        self._start_model = start_model
        self._journal = journal
        self._sealer = sealer
        self._budget = budget
        self._images = images
        self._replayed = replayed
        self._output = OutputRecord()
        self._context: Items = []
        self._round_start = 0  # the index in the context of the first hosted call of the last answer
        self._early: list[Delta] = []
        self._unfinished: list[AnswerCall] = []
        self._awaits_client = False
        self._usage: Usage | None = None
        self._answers = 0
        self._refused_rounds = 0
        self._started: Serving | None = None
        self._served: deltas.Served | None = None
        self._has_run_pending = False
        self._runner = CallRunner(journal, replayed, telemetry)
        self._programs = Programs(turn, toolset, self._runner, budget)
        # A program reads the results of approved calls.
        sessions = [opened.session for opened in toolset]
        sessions.sort(key=lambda session: isinstance(session, ProgramSession))
        self._pending = [
            (f"hosted_pending_{index}", call)
            for index, call in enumerate(call for session in sessions for call in session.pending)
        ]
        self._filters_text = not wants_json(turn.request)
        self._citations = itertools.count(1)
        self._hosted_numbers = itertools.count(1)  # of the hosted calls that no model call of this response made

    async def start(self) -> Serving:
        """Start the first model call, unless calls have to be run before it."""
        self._observe_introduction()
        self._toolset.assign_names()
        items = self._turn.items
        self._base = self._translate(items) if has_hosted_items(items) else items
        if self._journal.recorded:
            self._resume(self._journal.recorded)
            return Serving(_nothing(), None)
        self._early = [
            delta for opened in self._toolset async for batch in opened.session.introduce() for delta in batch
        ]
        self._add_to_context(self._early)
        if self._early:
            await self._journal.append(IntroductionStep(deltas=encode_deltas(self._early)))
        if self._pending:
            return Serving(_nothing(), None)
        self._started = await self._start_answer(self._replayed)
        return self._started

    async def close(self) -> None:
        """Stop a model call that was started and not read."""
        started, self._started = self._started, None
        if started is not None:
            await started.deltas.aclose()

    async def stream(self) -> AsyncGenerator[Sequence[Delta], None]:
        if self._early:
            yield self._early
        if self._pending and not self._has_run_pending:
            await self._begin_pending()
        async with aclosing(self._run_calls(self._unfinished)) as batches:
            async for batch in batches:
                yield batch
        while not self._awaits_client:
            left = self._count_tokens_left()
            if left is not None and left <= 0:
                yield [deltas.Finish("length")]
                return
            reader = self._make_reader()
            emitted: list[Delta] = []
            async with aclosing(self._stream_answer(reader, emitted)) as batches:
                async for batch in batches:
                    yield batch
            if reader.has_failed or reader.finish is None:
                return
            if reader.finish.reason != "stop" or not reader.calls or self._is_refused_too_often(reader):
                yield [reader.finish]
                return
            closing = reader.close_items()
            yield closing
            await self._end_answer(reader, [*emitted, *closing])
            async with aclosing(self._run_calls(reader.calls)) as batches:
                async for batch in batches:
                    yield batch
        yield [deltas.Finish()]

    async def _begin_pending(self) -> None:
        """Begin the calls that the context requests."""
        self._unfinished = [
            AnswerCall(CallRecord(key=key, name=call.name, arguments=call.arguments), call.begin(key))
            for key, call in self._pending
        ]
        step = AnswerStep(deltas=[], calls=[each.record for each in self._unfinished], is_pending=True)
        await self._journal.append(step)
        self._restore_answer(step)

    # Model calls

    def _make_reader(self) -> AnswerReader:
        return AnswerReader(
            self._toolset, self._answers, self._budget, spent=self._usage, filters_text=self._filters_text
        )

    async def _stream_answer(self, reader: AnswerReader, emitted: list[Delta]) -> AsyncGenerator[Sequence[Delta], None]:
        """Yield the deltas of the next model call, and add those of its answer to `emitted`."""
        if self._usage is not None:
            self._turn.progress.is_sent = False
            yield [deltas.TokenUsage(self._usage, is_open=True)]
        serving, self._started = self._started or await self._start_answer(()), None
        async with aclosing(serving.deltas) as answer:
            served = serving.served
            if served is not None and self._answers and served != self._served:
                emitted.append(served)
                yield [served]
            self._served = served or self._served
            async for batch in answer:
                output = reader.feed(batch)
                if output:
                    emitted += output
                    yield output

    async def _start_answer(self, replayed: Sequence[Delta]) -> Serving:
        request = self._toolset.make_request(is_first=self._answers == 0, max_tokens=self._count_tokens_left())
        items = [*self._base, *self._context]
        if Compaction in map(type, self._context):
            expand = partial(expand_compactions, project=self._turn.project)
            items = (await offload.run(expand, items, self._sealer)).items
        known = len(self._turn.warnings)
        turn = msgspec.structs.replace(self._turn, request=request, items=items)
        if self._toolset.list_unloaded():
            turn = msgspec.structs.replace(turn, load_deferred=self._load_deferred)
        serving = await self._start_model(turn, replayed)
        if self._answers:  # too late for the response headers
            for warning in self._turn.warnings[known:]:
                logger.warning("%s", warning)
        return serving

    async def _load_deferred(self) -> tuple[list[Tool | Unknown], list[Delta]]:
        """Load the functions of deferred sessions, and return them with the deltas of the items that list them."""
        tools: list[Tool | Unknown] = []
        output: list[Delta] = []
        for opened in self._toolset.list_unloaded():
            output += await opened.session.load()
            tools += self._toolset.list_loaded(opened)
        return tools, output

    def _count_tokens_left(self) -> int | None:
        limit = self._turn.request.max_output_tokens
        return limit if limit is None or self._usage is None else limit - self._usage.output_tokens

    def _is_refused_too_often(self, reader: AnswerReader) -> bool:
        if any(call.record.refusal is None for call in reader.calls):
            return False
        self._refused_rounds += 1
        return self._refused_rounds > MAX_REFUSED_ROUNDS

    async def _end_answer(self, reader: AnswerReader, emitted: list[Delta]) -> None:
        records = reader.list_records()
        await self._journal.append(
            AnswerStep(
                deltas=encode_deltas(emitted), calls=records, awaits_client=reader.awaits_client, usage=reader.usage
            )
        )
        self._count_answer(records, reader.usage, awaits_client=reader.awaits_client)
        self._begin_round(emitted)

    def _count_answer(self, records: Sequence[CallRecord], usage: Usage | None, *, awaits_client: bool) -> None:
        self._answers += 1
        self._usage = usage
        self._awaits_client |= awaits_client
        self._output.add_calls(records)

    # Hosted calls

    async def _run_calls(self, calls: Sequence[AnswerCall]) -> AsyncGenerator[Sequence[Delta], None]:
        for each in order_calls(calls):
            call = each.call
            if call is None:
                continue
            emitted: list[Delta] = []
            async with aclosing(self._runner.run(each, call)) as batches:
                async for batch in batches:
                    emitted += batch
                    yield batch
            self._add_to_context(emitted)
            self._awaits_client |= call.needs_client
            if call.needs_client:
                self._budget.give_back()
        self._end_round([each.record for each in calls])

    # Context

    def _begin_round(self, emitted: Sequence[Delta]) -> None:
        """Add the items of an answer. Its hosted calls follow."""
        self._add_to_context(emitted)
        self._round_start = len(self._context)

    def _end_round(self, records: Iterable[CallRecord]) -> None:
        """Add the refused calls, and order the calls before their outputs, as parallel calls of one answer."""
        self._context += [item for record in records for item in _make_refusal(record)]
        calls = self._context[self._round_start :]
        self._context[self._round_start :] = sorted(calls, key=lambda item: not isinstance(item, FunctionCall))

    def _add_to_context(self, emitted: Sequence[Delta]) -> None:
        """Add the items of these deltas to the context of the next model call."""
        items = self._output.add(emitted)
        if not self._answers:
            self._turn.progress.item_count += len(items)
        self._programs.observe(items)
        self._context += self._translate(self._programs.select_context(items))

    def _translate(self, items: Items) -> Items:
        for opened in self._toolset:
            for item in items:
                opened.session.observe(item)
        return translate_hosted_items(
            items,
            self._toolset.get_call_name,
            calls=self._output.calls,
            numbers=self._hosted_numbers,
            images=self._images,
            citations=self._citations,
            resumed=self._programs.resumed_id,
        )

    # Continuation after a crash

    def _observe_introduction(self) -> None:
        """Show the sessions the items of an earlier attempt's introduction. Functions get the same names again then."""
        steps = [step for step in self._journal.recorded if isinstance(step, IntroductionStep)]
        for delta in list_deltas(steps):
            if isinstance(delta, deltas.CloseItem) and delta.item is not None:
                for opened in self._toolset:
                    opened.session.observe(delta.item)

    def _resume(self, steps: Sequence[Step]) -> None:
        """Restore the state after the finished steps of an earlier attempt."""
        self._runner.early = list_deltas(steps)
        calls: Mapping[str, CallRecord] = {}
        begun: dict[str, bool] = {}
        ended: set[str] = set()
        nested: list[str | None] = []
        for step in steps:
            if is_nested(step):
                assert isinstance(step, IntentStep | OutcomeStep)
                self._programs.restore(step)
                if isinstance(step, OutcomeStep) and not step.needs_client:
                    nested.append(step.parent)
                continue
            if isinstance(step, IntentStep):
                begun[step.key] = step.is_repeatable
                continue
            if isinstance(step, AnswerStep):
                self._end_round(calls.values())
                calls = {record.key: record for record in step.calls}
                self._restore_answer(step)
                self._begin_round(decode_deltas(step.deltas))
                continue
            if isinstance(step, OutcomeStep):
                ended.add(step.key)
                self._awaits_client |= step.needs_client
                if step.needs_client:
                    self._budget.give_back()
            self._add_to_context(decode_deltas(step.deltas))
        for parent in nested:
            if parent in ended:  # a program that is run again counts its calls itself
                self._budget.take()
        self._toolset.assign_names()  # a search of the earlier attempt may have loaded functions
        self._unfinished = [self._begin_again(record, begun) for record in calls.values() if record.key not in ended]

    def _restore_answer(self, step: AnswerStep) -> None:
        for record in step.calls:
            is_continued = step.is_pending and record.name == PROGRAM  # it was counted when it began
            if record.refusal is None and not is_continued:  # an approved call is run even if none is left
                self._budget.take()
        if step.is_pending:
            self._has_run_pending = True
            self._output.add_calls(step.calls)
        else:
            self._count_answer(step.calls, step.usage, awaits_client=step.awaits_client)

    def _begin_again(self, record: CallRecord, begun: Mapping[str, bool]) -> AnswerCall:
        if record.refusal is not None:
            return AnswerCall(record, None)
        call = self._find_call(record)
        if record.is_open:
            call.write(record.arguments)  # its deltas are part of the stored answer
        return AnswerCall(
            record,
            call,
            is_interrupted=record.key in begun,
            is_repeatable=begun.get(record.key, False),
            has_written=record.is_open,
        )

    def _find_call(self, record: CallRecord) -> HostedCall:
        pending = dict(self._pending).get(record.key)
        if pending is not None:
            return pending.begin(record.key)
        found = self._toolset.find(record.name)
        if found is None:
            raise ServerError(f"The tool '{record.name}' is no longer available.", code="interrupted")
        session, name = found
        return session.begin(name, record.key)


class OutputRecord:
    """The output items of the response so far, composed from its deltas. `calls` has the hosted calls by item id."""

    def __init__(self) -> None:
        self.calls: dict[str, HostedCallText] = {}
        self._by_key: dict[str, HostedCallText] = {}
        self._minted = 0
        self._done = 0
        self._composer = Composer(Response(id="hosted", created_at=0, model=""), new_id=self._new_id, now=int)

    def _new_id(self, prefix: str) -> str:
        self._minted += 1
        return f"{prefix}_{self._minted}"

    def add_calls(self, records: Sequence[CallRecord]) -> None:
        """Add hosted calls, before the deltas of their items."""
        for record in records:
            call_id = record.call_id or record.key
            self._by_key[record.key] = HostedCallText(call_id, record.name, record.arguments or "{}")

    def add(self, emitted: Sequence[Delta]) -> Items:
        """Add deltas and return the items that they complete."""
        for delta in join_text(emitted):
            for event in self._composer.compose([delta]):
                if isinstance(delta, deltas.OpenItem) and isinstance(event, OutputItemAdded):
                    call = self._by_key.get(str(delta.key))
                    if call is not None:
                        self.calls[event.item.id or ""] = call
        done = self._composer.output
        new, self._done = done[self._done :], len(done)
        return new


async def _nothing() -> AsyncGenerator[Sequence[Delta], None]:
    return
    yield


def _make_refusal(record: CallRecord) -> Items:
    """Return a call that was not run, and the reason, as the model reads them."""
    if record.refusal is None:
        return []
    call_id = record.call_id or record.key
    return [
        FunctionCall(call_id, record.name, record.arguments, status="completed"),
        FunctionCallOutput(record.refusal, call_id, status="completed"),
    ]
