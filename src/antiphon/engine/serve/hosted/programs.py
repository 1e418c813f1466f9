"""Programs of the tool programmatic_tool_calling: their calls, their pauses, and their continuation.

A program runs until it waits for results. Its hosted calls are run one after the other, in order. When only calls of
the client are left, or calls that need an approval, the response ends with their items. The next response runs the
program again from its beginning and gives it the recorded results in the same order, so that it arrives where it was.
If a call differs from its record, the program ends as incomplete, and nothing is called twice.

A background response has the calls of a program in its journal, below the program (`parent`).
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.serve.hosted.answer import AnswerCall, CallBudget
from antiphon.engine.serve.hosted.call_runner import CallRunner
from antiphon.engine.serve.hosted.journal import CallRecord, IntentStep, OutcomeStep
from antiphon.engine.serve.hosted.program_records import (
    CallPair,
    ProgramRecord,
    ReplayError,
    add_calls,
    find_unfinished_program,
    is_same_call,
    make_fingerprint,
    make_nested_id,
    make_program_id,
    make_seed,
)
from antiphon.engine.serve.hosted.program_tools import (
    NestedTool,
    list_nested_tools,
    make_client_call,
    make_error,
    read_client_output,
    read_decision,
    read_hosted_item,
)
from antiphon.engine.serve.hosted.toolset import HostedToolset
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.protocol.hosted import (
    AdditionalTools,
    ItemStatus,
    McpApprovalRequest,
    Program,
    ProgramOutput,
    ToolSearchOutput,
)
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.delta_codec import decode_deltas
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import ApprovedCall, HostedCall
from antiphon.tools.hosted.code_interpreter.code_stream import parse_code
from antiphon.tools.hosted.program.messages import CallResult, ProgramStep, ToolRequest
from antiphon.tools.hosted.program.runner import RunningProgram
from antiphon.tools.hosted.program.tool import NAME, ProgramSession, ProgramTool

_CLOCK_DIGITS = 12
_NO_CODE = 'The arguments must be a JSON object with the code as a string: {"code": "text(1)"}.'
_ANOTHER_WAITS = "Another program waits for results. Run this one again when it has ended."
_MAX_CODE_CHARS = 1024 * 1024


def order_calls(calls: Sequence[AnswerCall]) -> Sequence[AnswerCall]:
    """Return the calls with the programs last: all hosted items after a program are its own."""
    return sorted(calls, key=lambda each: isinstance(each.call, ProgramCall)) if len(calls) > 1 else calls


class Programs:
    """The programs of one response. Without the tool in the request, it has none."""

    def __init__(self, turn: Turn, toolset: HostedToolset, runner: CallRunner, budget: CallBudget) -> None:
        self.runner = runner
        self.budget = budget
        self.outcomes: dict[str, OutcomeStep] = {}
        self.intents: dict[str, IntentStep] = {}
        self.is_waiting = False
        self._toolset = toolset
        self._sources: Items = []
        self._record: ProgramRecord | None = None
        self.session = next((each.session for each in toolset if isinstance(each.session, ProgramSession)), None)
        if self.session is not None:
            self.session.host = self
            self._sources = [item for item in turn.items if isinstance(item, AdditionalTools | ToolSearchOutput)]
            self._record = find_unfinished_program(turn.items)

    @property
    def resumed_id(self) -> str | None:
        """The call id of the program that this response continues."""
        return None if self._record is None else self._record.program.call_id

    def find_tools(self) -> dict[str, NestedTool]:
        return list_nested_tools(self._toolset, self._sources)

    def list_tools(self) -> Sequence[ProgramTool]:
        return [tool.shown for tool in self.find_tools().values()]

    def list_pending(self) -> Sequence[ApprovedCall]:
        record = self._record
        if record is None:
            return ()
        arguments = msgspec.json.encode({"code": record.program.code}).decode()
        assert self.session is not None
        session = self.session
        return [ApprovedCall(name=NAME, arguments=arguments, begin=lambda key: ProgramCall(self, session, key, record))]

    def begin(self, key: str) -> HostedCall:
        assert self.session is not None
        return ProgramCall(self, self.session, key)

    def restore(self, step: IntentStep | OutcomeStep) -> None:
        """Add a step that an earlier attempt has stored for a call of a program."""
        if isinstance(step, IntentStep):
            self.intents[step.key] = step
        else:
            self.outcomes[step.key] = step

    def observe(self, items: Items) -> None:
        """Take note of new items of this response: loaded tools, and results of approved calls."""
        if self.session is None:
            return
        self._sources += [item for item in items if isinstance(item, AdditionalTools | ToolSearchOutput)]
        if self._record is not None and not self.is_waiting:
            add_calls(self._record, items)

    def select_context(self, items: Items) -> Items:
        """Return the items for the model, without those of a program's calls."""
        output = next((item for item in items if isinstance(item, ProgramOutput)), None)
        if output is None:
            return items
        selected: Items = [item for item in items if isinstance(item, Program | ProgramOutput)]
        record = self._record
        if record is not None and record.program.call_id == output.call_id:
            self._record = None
            return [record.program, *selected]
        return selected


class _LimitReached(Exception):
    """The response may make no more hosted calls."""


class ProgramCall(HostedCall):
    """A run of a program. With a `record`, it continues a program of an earlier response."""

    def __init__(
        self, programs: Programs, session: ProgramSession, key: str, record: ProgramRecord | None = None
    ) -> None:
        self._programs = programs
        self._session = session
        self._key = key
        self._record = record
        self._program: Program | None = None if record is None else record.program

    @property
    def is_repeatable(self) -> bool:
        return True  # a program has no effects besides its calls, and these have steps of their own

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        if self._record is None:
            code = parse_code(arguments)
            yield self._open(code or "")
            if code is None or len(code) > _MAX_CODE_CHARS:
                yield self._end("", _NO_CODE if code is None else "The code is too long.")
                return
            if self._programs.is_waiting:
                yield self._end("", _ANOTHER_WAITS)
                return
        async with aclosing(self._run_program()) as batches:
            async for batch in batches:
                yield batch

    def fail(self, message: str) -> Sequence[Delta]:
        opening = self._open("") if self._program is None else []
        return [*opening, *self._end("", message)]

    async def _run_program(self) -> AsyncGenerator[Sequence[Delta], None]:
        assert self._program is not None
        record = self._record or ProgramRecord(self._program)
        try:
            clock_ms = record.check()
            tools = self._programs.find_tools()
            async with self._session.runner.open(
                self._session.context.project,
                code=self._program.code,
                tools=list(tools),
                text_tools=[name for name, tool in tools.items() if tool.shown.takes_text],
                clock_ms=clock_ms,
                seed=make_seed(self._program),
            ) as running:
                run = _ProgramRun(self._programs, running, self._program, tools, record, self._key)
                async with aclosing(run.stream()) as batches:
                    async for batch in batches:
                        yield batch
        except ReplayError as error:
            yield self._end("", f"The program cannot be continued: {error}. No call was repeated.")
            return
        except _LimitReached as error:
            yield self._end("", str(error))
            return
        if run.end is None:
            self.needs_client = self._programs.is_waiting = True
            yield run.client_deltas
            return
        note = "\n[The output was cut off: it is too long.]" if run.end.is_truncated else ""
        yield self._end(run.end.output + note, run.end.error)

    def _open(self, code: str) -> list[Delta]:
        response_id = self._session.context.response_id
        call_id = make_program_id(response_id, self._key)
        fingerprint = make_fingerprint(code, call_id, _read_clock(response_id))
        self._program = Program(call_id, code, fingerprint)
        return [
            deltas.OpenItem(self._key, Program(call_id, "", ""), "cm"),
            deltas.CloseItem(self._key, self._program),
        ]

    def _end(self, output: str, error: str) -> Sequence[Delta]:
        assert self._program is not None
        result = "\n".join(text for text in (output, error) if text)
        status: ItemStatus = "incomplete" if error else "completed"
        return [deltas.WholeItem(ProgramOutput(self._program.call_id, result, "", status))]


class _ProgramRun:
    """The calls of a running program, from the record or new.

    `end` is None if it waits for the client. `client_deltas` are the items of the calls that the client has to run.
    """

    def __init__(
        self,
        programs: Programs,
        running: RunningProgram,
        program: Program,
        tools: dict[str, NestedTool],
        record: ProgramRecord,
        key: str,
    ) -> None:
        self.end: ProgramStep | None = None
        self.client_deltas: list[Delta] = []
        self._programs = programs
        self._running = running
        self._program = program
        self._tools = tools
        self._key = key
        self._hosted = list(record.hosted)  # records that have not been matched yet
        self._client = list(record.client)
        self._hosted_count = 0
        self._waiting: list[ToolRequest] = []
        self._paused: dict[int, CallPair] = {}  # calls that wait for an approval
        self._result: CallResult | None = None

    async def stream(self) -> AsyncGenerator[Sequence[Delta], None]:
        step = await self._running.start()
        while not step.is_done:
            self._waiting += step.calls
            request = next((each for each in self._waiting if self._is_hosted(each)), None)
            if request is not None:
                async with aclosing(self._call_hosted(request)) as batches:
                    async for batch in batches:
                        yield batch
                result, self._result = self._result, None
                if result is None:  # it waits for an approval
                    step = ProgramStep()
                    continue
                self._waiting.remove(request)
                step = await self._running.resume([result])
                continue
            results = self._settle_waiting_calls()
            if results is None:
                return
            self._waiting = []
            step = await self._running.resume(results)
        if self._hosted or self._client:
            raise ReplayError("it made fewer calls than before")
        self.end = step

    def _is_hosted(self, request: ToolRequest) -> bool:
        return request.number not in self._paused and self._tools[request.name].client is None

    def _check_live(self) -> None:
        """Raise ReplayError unless all earlier calls were made again."""
        if self._hosted or self._client:
            raise ReplayError("it made other calls than before")

    # Hosted calls

    async def _call_hosted(self, request: ToolRequest) -> AsyncGenerator[Sequence[Delta], None]:
        """Run a call, or take its result from the record. Sets the result, unless the call needs an approval."""
        self._hosted_count += 1
        if self._hosted:
            pair = self._hosted.pop(0)
            if not is_same_call(pair.call, self._tools[request.name], request.arguments):
                raise ReplayError("it made another call than before")
        else:
            self._check_live()
            refusal = self._programs.budget.take()
            if refusal is not None:
                raise _LimitReached(refusal)
            emitted: list[Delta] = []
            async with aclosing(self._run_hosted(request)) as batches:
                async for batch in batches:
                    emitted += batch
                    yield batch
            pair = _read_pair(emitted)
        if isinstance(pair.call, McpApprovalRequest):
            self._paused[request.number] = pair
            return
        self._result = self._read_hosted(request, pair)

    def _read_hosted(self, request: ToolRequest, pair: CallPair) -> CallResult:
        result = read_hosted_item(request.number, pair.output)
        if result is None:
            raise ReplayError(f"the result of a call of {request.name} is missing in the input")
        return result

    async def _run_hosted(self, request: ToolRequest) -> AsyncGenerator[Sequence[Delta], None]:
        key = f"{self._key}.{request.number}"
        outcome = self._programs.outcomes.get(key)
        if outcome is not None:  # an earlier attempt at this response has run it
            yield decode_deltas(outcome.deltas)
            if outcome.needs_client:
                self._programs.budget.give_back()
            return
        tool = self._tools[request.name]
        assert tool.opened is not None
        call = tool.opened.session.begin(tool.own_name, key)
        intent = self._programs.intents.get(key)
        nested = AnswerCall(
            CallRecord(key=key, name=request.name, arguments=request.arguments, parent=self._key),
            call,
            is_interrupted=intent is not None,
            is_repeatable=intent is not None and intent.is_repeatable,
        )
        async with aclosing(self._programs.runner.run(nested, call)) as batches:
            async for batch in batches:
                yield batch
        if call.needs_client:
            self._programs.budget.give_back()

    # Calls of the client, and calls that need an approval

    def _settle_waiting_calls(self) -> list[CallResult] | None:
        """Return the recorded results of all waiting calls, or None if the client has to reply first."""
        before = len(self._client)
        is_answered = bool(self._client) or any(pair.is_recorded for pair in self._paused.values())
        results = [self._settle(request) for request in self._waiting]
        known = [result for result in results if result is not None]
        self._paused = {}
        if len(known) == len(results):
            return known
        if is_answered or len(self._client) != before:
            raise ReplayError("it made other calls than before")
        self._check_live()
        return None

    def _settle(self, request: ToolRequest) -> CallResult | None:
        paused = self._paused.get(request.number)
        if paused is not None:
            if not paused.is_recorded:
                return None
            is_denied = paused.decision is None or not paused.decision.approve
            return read_decision(request.number, paused.decision) if is_denied else self._read_hosted(request, paused)
        tool = self._tools[request.name]
        try:
            made = make_client_call(
                tool,
                request.arguments,
                key=f"{self._key}.{request.number}",
                call_id=make_nested_id(self._program.call_id, request.number, self._hosted_count),
                program_id=self._program.call_id,
            )
        except msgspec.ValidationError as error:
            return make_error(request.number, f"The arguments of tools.{request.name} are invalid: {error}")
        if not self._client:
            self.client_deltas += made
            return None
        pair = self._client.pop(0)
        if not is_same_call(pair.call, tool, request.arguments):
            raise ReplayError("it made another call than before")
        if pair.output is None:
            raise ReplayError(f"the output of a call of {request.name} is missing in the input")
        return read_client_output(request.number, tool, pair.output)


def _read_pair(emitted: Sequence[Delta]) -> CallPair:
    """Return the call and the result of a hosted call from its deltas."""
    closed: list[Item | Unknown] = [
        delta.item
        for delta in emitted
        if isinstance(delta, deltas.CloseItem | deltas.WholeItem) and delta.item is not None
    ]
    first, last = closed[0], closed[-1]
    assert not isinstance(first, Unknown)
    assert not isinstance(last, Unknown)
    return CallPair(first, None if isinstance(first, McpApprovalRequest) else last, is_recorded=False)


def _read_clock(response_id: str) -> int:
    """Return the time of a program in milliseconds: that of its response, which all attempts have in common.

    Ids begin with it, unless they have a configured prefix. Responses with such ids have one attempt only.
    """
    digits = response_id.partition("_")[2][:_CLOCK_DIGITS]
    now = time.time_ns() // 1_000_000
    try:
        created = int(digits, 16)
    except ValueError:
        return now
    return created if len(digits) == _CLOCK_DIGITS and created <= now else now
