"""The state of a run, derived from the entries of its journal."""

from collections.abc import Callable
from itertools import takewhile
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.agent.entries import (
    AnswerEntry,
    ArgumentsReplacedEntry,
    CallIntentEntry,
    CallPauseEntry,
    CallResultEntry,
    EndEntry,
    Entry,
    FailedAttemptEntry,
    HandoffEntry,
    InputReplacedEntry,
    OutputReplacedEntry,
    Overrides,
    ResumeEntry,
    SessionSaveEntry,
    StartEntry,
    TraceEntry,
    UnresolvedCall,
    Verdict,
)
from antiphon.agent.history import (
    drop_encrypted,
    find_invocations,
    get_call_id,
    is_call,
    join_output,
    join_text,
    make_output_item,
    make_output_items,
    shorten_output,
)
from antiphon.agent.loop_guard import RepeatCounter, make_signature
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolInvocation, UsageCost

# The entries about an open call.
_CALL_ENTRIES = ArgumentsReplacedEntry | CallIntentEntry | CallPauseEntry | CallResultEntry | HandoffEntry


class RunState:
    """State of a run, derived from its journal."""

    def __init__(self) -> None:
        self.agent = ""
        """The name of the agent that has started the run."""
        self.model = ""
        self.active_agent = ""
        """The name of the agent that goes on with the run: the same, or the one of the last handoff."""
        self.started_at = 0.0
        """The start time, moved forward by the pauses: the run has been working for the time since then."""
        self.overrides = Overrides()
        self.session_id: str | None = None
        self.earlier_count = 0
        """The number of items of the conversation that were in the session when the run started."""
        self.saved_count = 0
        """The number of further items that are in a session which cannot replace them."""
        self.history: list[JsonObject] = []
        """The items that the model reads."""
        self.filtered_count = 0
        """The number of items at the beginning of the history that replace `unfiltered`."""
        self.unfiltered: list[JsonObject] = []
        self.response_id: str | None = None
        self.sent_count = 0
        """The number of items of the history that the response of that id has seen."""
        self._answer_index = 0
        """The index of the first item of the last answer."""
        self.turns = 0
        self.tool_calls = 0
        self.calls_before_handoff = 0
        """The number of tool calls up to the last handoff."""
        self.output_repairs = 0
        self.usage = Usage(0, 0, 0)
        """The usage of all models, including those called by tools."""
        self.unpriced_usage = Usage(0, 0, 0)
        """The part of the usage to which the prices of this run apply."""
        self.known_cost = 0.0
        """The cost of the rest."""
        self.text = ""
        self.refusal = ""
        self.incomplete_reason = ""
        self.last_turn_reason = ""
        self.calls: list[ToolInvocation] = []
        """The calls of the last turn."""
        self.open_calls: list[ToolInvocation] = []
        """The calls of the last turn that have no result yet, in order."""
        self.started_calls: set[str] = set()
        self.replaced_calls: set[str] = set()
        """The open calls whose arguments a guardrail has replaced."""
        self.paused_calls: dict[str, CallPauseEntry] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.received_verdicts: set[tuple[str, int]] = set()
        """The calls and numbers of all verdicts that were recorded, used or not."""
        self.unresolved_calls: dict[str, list[UnresolvedCall]] = {}
        """The unresolved calls of subagents, by the name of the subagent's tool: see `unresolved_calls.py`."""
        self.inherited_calls: list[UnresolvedCall] = []
        """The unresolved calls of this run, and of earlier runs of this subagent, that the run has not repeated."""
        self._repeated_calls: dict[str, UnresolvedCall] = {}
        """The unresolved calls that calls of the last turn repeat, by the id of the repetition."""
        self.repeats = RepeatCounter()
        self.decision: ToolInvocation | None = None
        self.final_results: dict[str, str] = {}
        """The final answers in the last turn, by call id: results of tools, or arguments of output tools."""
        self.output_calls: set[str] = set()
        """The calls of output tools among them."""
        self.replaced_output: str | None = None
        """The text that a guardrail has set instead of the final result."""
        self.invalid_output = ""
        """The arguments of an output tool in the last turn that do not match the output type."""
        self.block_reason = ""
        self.limit_reached = ""
        self.traceparent = ""
        """The span of the last process that has executed the run with traces."""
        self.ended: EndEntry | None = None

    @property
    def conversation(self) -> list[JsonObject]:
        """The whole conversation, including items that a filter has removed from the history."""
        return [*self.unfiltered, *self.history[self.filtered_count :]]

    @property
    def conversation_before_answer(self) -> list[JsonObject]:
        """The conversation without the last answer."""
        return [*self.unfiltered, *self.history[self.filtered_count : self._answer_index]]

    @property
    def final_call(self) -> ToolInvocation | None:
        """The call whose result ends the run: the first one of the last turn, in the order of the calls."""
        return next((call for call in self.calls if call.call_id in self.final_results), None)

    @property
    def answer(self) -> str:
        """The text of the final answer: of a call that ends the run, else of the last turn."""
        call = self.final_call
        return self.text if call is None else self.replaced_output or self.final_results[call.call_id]

    def awaits_verdict(self, call_id: str) -> bool:
        """Return True if a person may approve or deny this call."""
        return call_id in self.list_waiting()

    def list_waiting(self) -> list[str]:
        """Return the ids of the calls that a person may approve or deny."""
        waiting = [call.call_id for call in self.open_calls]
        waiting += [call.call_id for paused in self.paused_calls.values() for call in paused.calls]
        return [call_id for call_id in waiting if call_id not in self.verdicts]

    def find_call(self, call_id: str) -> ToolInvocation:
        """Return a call of the last turn."""
        return next(call for call in self.calls if call.call_id == call_id)

    def find_inherited(self, call: ToolInvocation) -> UnresolvedCall | None:
        """Return the unresolved call that a call of the last turn repeats. Each is repeated by one call of a turn."""
        return self._repeated_calls.get(call.call_id)

    def find_subagent_state(self, call: ToolInvocation) -> bytes | UnsetType:
        """Return the state with which a call resumes its subagent: from a pause, or of the call that it repeats."""
        paused, repeated = self.paused_calls.get(call.call_id), self.find_inherited(call)
        if paused is not None:
            return paused.state or UNSET
        return UNSET if repeated is None else repeated.state

    def is_first_of_tool(self, call: ToolInvocation) -> bool:
        """Return True if the call is the first one of its tool in the last turn."""
        return next(each for each in self.calls if each.name == call.name) == call

    def has_received(self, verdict: Verdict) -> bool:
        """Return True if this verdict was recorded before."""
        return (verdict.call_id, verdict.number or 0) in self.received_verdicts

    def check(self, entry: Entry) -> None:
        """Raise ValueError if the entry cannot follow this state."""
        if isinstance(entry, _CALL_ENTRIES):
            self._find_open(entry.call_id)

    def apply(self, entry: Entry) -> None:
        """Update the state. Raise ValueError if the entry cannot follow it."""
        self._HANDLERS[type(entry)](self, entry)

    def _apply_start(self, entry: StartEntry) -> None:
        self.agent = self.active_agent = entry.agent
        self.model = entry.model or ""
        self.started_at = entry.at
        self.overrides = entry.overrides or self.overrides
        self.session_id, self.earlier_count = entry.session_id or None, entry.earlier_count or 0
        self.history += entry.input
        self.inherited_calls = list(entry.unresolved or ())

    def _replace_input(self, entry: InputReplacedEntry) -> None:
        if len(entry.input) != len(self.history):
            pairs = zip(entry.input, self.history[: self.earlier_count], strict=False)
            self.earlier_count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.history = list(entry.input)

    def _apply_answer(self, entry: AnswerEntry) -> None:
        self.turns += 1
        self.output_repairs += entry.repairs_output
        self.last_turn_reason, self.incomplete_reason = entry.last_turn_reason, entry.incomplete_reason
        if entry.drops_encrypted:
            self._drop_encrypted()
        self.history += entry.extra_input
        self._answer_index = len(self.history)
        self.history += entry.output
        self.response_id = entry.response_id or None
        self.sent_count = len(self.history)
        self._add_usage(UsageCost(entry.usage))
        self.text, self.refusal = join_text(entry.output), join_text(entry.output, kinds=("refusal",))
        self.calls = find_invocations(entry.output, entry.native_calls or ())
        self.open_calls = list(self.calls)
        self.started_calls, self.replaced_calls, self.paused_calls, self.verdicts = set(), set(), {}, {}
        self.final_results, self.output_calls, self.replaced_output, self.invalid_output = {}, set(), None, ""
        self._find_repeated_calls()

    def _apply_failed_attempt(self, entry: FailedAttemptEntry) -> None:
        self._add_usage(UsageCost(entry.usage))

    def _find_repeated_calls(self) -> None:
        """Assign the unresolved calls to the calls of the last turn. A call that has started keeps its own."""
        assigned = {key: call for key, call in self._repeated_calls.items() if key in self.started_calls}
        keys = {call.idempotency_key for call in assigned.values()}
        waiting = [call for call in self.inherited_calls if call.idempotency_key not in keys]
        for call in self.calls if waiting else ():
            signature = make_signature(call)
            equal = next((each for each in waiting if make_signature(each) == signature), None)
            if equal is not None and call.call_id not in self.started_calls:
                assigned[call.call_id] = equal
                waiting.remove(equal)
        self._repeated_calls = assigned

    def _replace_output(self, entry: OutputReplacedEntry) -> None:
        """Replace the messages of the last answer, or the final result of a call."""
        call, text = self.final_call, entry.text
        answer = self.history[self._answer_index :]
        if call is not None:
            self.replaced_output = text
            if call.call_id not in self.output_calls:
                self._replace_result(call, text)
                return
            others = [item for item in answer if item.get("call_id") != call.call_id]
        else:
            self.text = text
            others = [item for item in answer if item.get("type", "message") != "message"]
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "role": "assistant", "content": content}
        self.history[self._answer_index :] = [*others, message]
        # The server has stored the original.
        self.response_id, self.sent_count = None, len(self.history)

    def _replace_result(self, call: ToolInvocation, text: str) -> None:
        """Replace the output of a call. The server has not read it yet."""
        item = make_output_item(self.find_item(call), text)
        indexes = (index for index, each in enumerate(self.history) if each.get("call_id") == call.call_id)
        self.history[max(indexes)] = item

    def _replace_arguments(self, entry: ArgumentsReplacedEntry) -> None:
        call = self._find_open(entry.call_id)
        replaced = msgspec.structs.replace(call, arguments=entry.arguments)
        self.calls[self.calls.index(call)] = replaced
        self.open_calls[self.open_calls.index(call)] = replaced
        self.replaced_calls.add(entry.call_id)
        self._find_repeated_calls()

    def _drop_encrypted(self) -> None:
        if not self.filtered_count:
            self.earlier_count = len(drop_encrypted(self.history[: self.earlier_count]))
        filtered = drop_encrypted(self.history[: self.filtered_count])
        self.history = [*filtered, *drop_encrypted(self.history[self.filtered_count :])]
        self.filtered_count = len(filtered)

    def _apply_intent(self, entry: CallIntentEntry) -> None:
        self._find_open(entry.call_id)
        self.verdicts.pop(entry.call_id, None)
        if entry.call_id not in self.started_calls:
            self.started_calls.add(entry.call_id)
            self.tool_calls += 1

    def _apply_pause(self, entry: CallPauseEntry) -> None:
        self._find_open(entry.call_id)
        self.paused_calls[entry.call_id] = entry
        for call in entry.calls:
            self.verdicts.pop(call.call_id, None)

    def _apply_result(self, entry: CallResultEntry) -> None:
        call = self._find_open(entry.call_id)
        subagent_state = self.find_subagent_state(call)
        self._resolve_inherited(call, entry)
        self._close_call(entry.call_id, entry.output)
        if entry.unresolved is not UNSET:
            earlier = [] if self.is_first_of_tool(call) else self.unresolved_calls.get(call.name, [])
            self.unresolved_calls[call.name] = [*earlier, *entry.unresolved]
        if entry.unresolved_key is not UNSET:
            others = [each for each in self.inherited_calls if each.idempotency_key != entry.unresolved_key]
            repeated = UnresolvedCall(call.call_id, call.name, call.arguments, entry.unresolved_key, subagent_state)
            earlier_call = self.find_inherited(call)
            if earlier_call is not None:
                repeated = repeated.add_counted(earlier_call.spent, earlier_call.tool_calls)
            self.inherited_calls = [*others, repeated.add_counted(entry.spent, entry.tool_calls)]
        if entry.spent is not None:
            self._add_usage(entry.spent)
        self.tool_calls += entry.tool_calls or 0
        self.repeats.add(call, entry.output, is_error=entry.is_error)
        if entry.consequence:
            self._apply_consequence(call, entry)

    def _apply_consequence(self, call: ToolInvocation, entry: CallResultEntry) -> None:
        match entry.consequence:
            case "decision":
                self.decision = call
            case "final":
                self.final_results[call.call_id] = join_output(entry.output)
            case "output":
                self.final_results[call.call_id] = call.arguments
                self.output_calls.add(call.call_id)
            case "invalid_output":
                self.output_repairs += not self.invalid_output
                self.invalid_output = call.arguments or "{}"
            case "blocked":
                self.block_reason = entry.block_reason or ""
            case limit:
                self.limit_reached = limit

    def _resolve_inherited(self, call: ToolInvocation, entry: CallResultEntry) -> None:
        """Remove the inherited call that this one has repeated, or that a person has decided on.

        If the repetition has failed, the first call may still have had its effect.
        """
        inherited = self.find_inherited(call)
        if inherited is None or inherited not in self.inherited_calls:
            return
        index = self.inherited_calls.index(inherited)
        has_succeeded = call.call_id in self.started_calls and not entry.is_error
        if has_succeeded or call.call_id in self.verdicts:
            del self.inherited_calls[index]
        else:
            self.inherited_calls[index] = inherited.add_counted(entry.spent, entry.tool_calls)

    def _close_call(self, call_id: str, output: str | list[JsonObject]) -> ToolInvocation:
        """Add the output of an open call to the history."""
        call = self._find_open(call_id)
        self.open_calls.remove(call)
        self.paused_calls.pop(call_id, None)
        index = self.find_output_index(call)
        self.history[index:index] = make_output_items(self.find_item(call), shorten_output(output))
        return call

    def _apply_handoff(self, entry: HandoffEntry) -> None:
        call = self._close_call(entry.call_id, entry.output)
        # A handoff alone is no progress: two agents might hand the run to each other endlessly.
        self.repeats.add(call, entry.output, is_error=True)
        self.active_agent = entry.agent
        self.calls_before_handoff = self.tool_calls
        self.output_repairs = 0
        if entry.cost is not UNSET:
            self.known_cost += entry.cost
            self.unpriced_usage = Usage(0, 0, 0)
        if entry.history is not UNSET:
            self.unfiltered = self.conversation
            self.history = list(entry.history)
            self.filtered_count = len(self.history)
        if entry.drops_encrypted:
            self._drop_encrypted()
        self.response_id, self.sent_count = None, len(self.history)

    def _apply_resume(self, entry: ResumeEntry) -> None:
        self.verdicts |= {verdict.call_id: verdict for verdict in entry.verdicts}
        self.received_verdicts |= {(verdict.call_id, verdict.number or 0) for verdict in entry.verdicts}
        self.started_at += entry.idle_seconds or 0.0 if self.ended is None else entry.at - self.ended.at
        self.ended = None
        if entry.overrides:
            self.overrides = self.overrides.merge(entry.overrides)

    def _set_trace(self, entry: TraceEntry) -> None:
        self.traceparent = entry.traceparent

    def _set_saved_count(self, entry: SessionSaveEntry) -> None:
        self.saved_count = entry.count

    def _set_end(self, entry: EndEntry) -> None:
        self.ended = entry

    def _add_usage(self, spent: UsageCost) -> None:
        self.usage += spent.usage
        if spent.cost is None:
            self.unpriced_usage += spent.usage
        else:
            self.known_cost += spent.cost

    def _find_open(self, call_id: str) -> ToolInvocation:
        for call in self.open_calls:
            if call.call_id == call_id:
                return call
        raise ValueError(f"no call '{call_id}' is open")

    def find_item(self, call: ToolInvocation) -> JsonObject:
        """Return the item of an open call: the last one with its id, since a model may reuse ids."""
        items = (item for item in reversed(self.history) if is_call(item))
        return next(item for item in items if item.get("call_id") == call.call_id)

    def find_output_index(self, call: ToolInvocation) -> int:
        """Return the index for a call's output: outputs are in the order of the calls."""
        position = self.calls.index(call)
        later = {each.call_id for each in self.calls[position + 1 :]}
        for index in range(self.sent_count, len(self.history)):
            if get_call_id(self.history[index]) in later:
                return index
        return len(self.history)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        StartEntry: _apply_start,
        InputReplacedEntry: _replace_input,
        AnswerEntry: _apply_answer,
        OutputReplacedEntry: _replace_output,
        FailedAttemptEntry: _apply_failed_attempt,
        ArgumentsReplacedEntry: _replace_arguments,
        CallIntentEntry: _apply_intent,
        CallPauseEntry: _apply_pause,
        CallResultEntry: _apply_result,
        HandoffEntry: _apply_handoff,
        ResumeEntry: _apply_resume,
        TraceEntry: _set_trace,
        SessionSaveEntry: _set_saved_count,
        EndEntry: _set_end,
    }
