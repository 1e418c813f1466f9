"""Where a run is: what its journal amounts to."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from antiphon.agent.entries import (
    Answered,
    Began,
    Ended,
    Entry,
    Intended,
    JsonObject,
    Judgement,
    Paused,
    Resulted,
    Wasted,
)
from antiphon.agent.guard import Signature, sign
from antiphon.agent.history import OUTPUTS
from antiphon.agent.pending import as_call, make_output
from antiphon.agent.sealing import unseal
from antiphon.protocol.response import Usage
from antiphon.tools.base import Call, Spending


class State:
    """Where a run is. `calls` are those of the last turn, and `open` the ones that have no result yet, in order."""

    def __init__(self) -> None:
        self.agent = ""
        self.began_at = 0.0
        """When it would have begun, had it been at work ever since."""
        self.history: list[JsonObject] = []
        self.response_id: str | None = None
        self.sent = 0
        """How much of the history the response of that id has seen."""
        self.turns = 0
        self.tool_calls = 0
        self.repairs = 0
        self.usage = Usage(0, 0, 0)
        """What all models took, those asked by tools too."""
        self.unpriced = Usage(0, 0, 0)
        """What of it the prices of this run hold for."""
        self.charged = 0.0
        """What the rest cost."""
        self.text = ""
        self.refusal = ""
        self.cut = ""
        self.last = ""
        self.calls: list[Call] = []
        self.open: list[Call] = []
        self.intended: set[str] = set()
        self.paused: dict[str, Paused] = {}
        self.judged: dict[str, Judgement] = {}
        self.made: Counter[Signature] = Counter()
        self.decided: Call | None = None
        self.limit = ""
        self.ended: Ended | None = None

    def waits_for(self, call_id: str) -> bool:
        """Whether somebody may say something about the call of this id."""
        waiting = {call.call_id for call in self.open}
        waiting |= {call.call_id for paused in self.paused.values() for call in paused.calls}
        return call_id in waiting and call_id not in self.judged

    def check(self, entry: Entry) -> None:
        """Raises ValueError if the entry cannot come here."""
        if isinstance(entry, Intended | Paused | Resulted):
            self._find_open(entry.call_id)

    def apply(self, entry: Entry) -> None:
        """Raises ValueError if the entry cannot come here."""
        match entry:
            case Began():
                self.agent, self.began_at = entry.agent, entry.at
                self.history += entry.input
            case Answered():
                self._answer(entry)
            case Wasted():
                self._spend(Spending(entry.usage))
            case Intended():
                self._intend(entry)
            case Paused():
                self._find_open(entry.call_id)
                self.paused[entry.call_id] = entry
                for call in entry.calls:
                    self.judged.pop(call.call_id, None)
            case Resulted():
                self._settle(entry)
            case Ended():
                self.ended = entry
            case _:
                self.judged |= {each.call_id: each for each in entry.judged}
                if self.ended is not None:
                    self.began_at += entry.at - self.ended.at
                self.ended = None

    def _answer(self, entry: Answered) -> None:
        self.turns += 1
        self.repairs += entry.repairs
        self.last, self.cut = entry.last, entry.cut
        if entry.unsealed:
            self.history = unseal(self.history)
        self.history += [*entry.told, *entry.output]
        self.response_id = entry.response_id or None
        self.sent = len(self.history)
        self._spend(Spending(entry.usage))
        self.text, self.refusal = text_of(entry.output), text_of(entry.output, kinds=("refusal",))
        self.calls = calls_of(entry.output)
        self.open = list(self.calls)
        self.intended, self.paused, self.judged = set(), {}, {}

    def _intend(self, entry: Intended) -> None:
        self._find_open(entry.call_id)
        self.judged.pop(entry.call_id, None)
        if entry.call_id not in self.intended:
            self.intended.add(entry.call_id)
            self.tool_calls += 1

    def _settle(self, entry: Resulted) -> None:
        call = self._find_open(entry.call_id)
        self.open.remove(call)
        if entry.spent is not None:
            self._spend(entry.spent)
        self.paused.pop(entry.call_id, None)
        self.made[sign(call)] += 1
        if entry.means == "decision":
            self.decided = call
        elif entry.means:
            self.limit = entry.means
        self.history.insert(self._place(call), make_output(self._find_item(call), entry.output))

    def _spend(self, spent: Spending) -> None:
        self.usage += spent.usage
        if spent.cost is None:
            self.unpriced += spent.usage
        else:
            self.charged += spent.cost

    def _find_open(self, call_id: str) -> Call:
        for call in self.open:
            if call.call_id == call_id:
                return call
        raise ValueError(f"no call '{call_id}' is open")

    def _find_item(self, call: Call) -> JsonObject:
        """The item that an open call stands for: the last of its id, since ids may come again."""
        items = (item for item in reversed(self.history) if item.get("type") in OUTPUTS)
        return next(item for item in items if item.get("call_id") == call.call_id)

    def _place(self, call: Call) -> int:
        """Outputs stand in the order of their calls, whichever came first."""
        position = self.calls.index(call)
        later = {each.call_id for each in self.calls[position + 1 :]}
        for index in range(self.sent, len(self.history)):
            if self.history[index].get("call_id") in later:
                return index
        return len(self.history)


def text_of(items: Sequence[JsonObject], *, kinds: Sequence[str] = ("output_text", "input_text", "text")) -> str:
    """The text of the messages among these items."""
    texts: list[str] = []
    for item in items:
        if item.get("type", "message") == "message":
            known = (part for part in _list_parts(item.get("content")) if part.get("type") in kinds)
            texts += [str(part.get("text") or part.get("refusal") or "") for part in known]
    return "".join(texts)


def _list_parts(content: Any) -> list[JsonObject]:
    """What a message is made of. Whatever a server has put there, a run that has been written down stays readable."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def calls_of(items: Sequence[JsonObject]) -> list[Call]:
    return [as_call(item) for item in items if item.get("type") in OUTPUTS]
