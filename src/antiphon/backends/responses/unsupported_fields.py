"""What an upstream has refused though its model can answer without it: that is left out, and not sent there again.

Codex asks every model to reason, and a chain brings back all that was ever sealed: no client can take that out.
"""

import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from antiphon.backends.base import Turn
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item, Reasoning
from antiphon.protocol.request import ENCRYPTED_REASONING, CreateRequest, ReasoningConfig
from antiphon.protocol.unions import Unknown

MOST_REFUSALS = 10_000

# A parameter that the model does not take, reasoning among its input, or reasoning that is sealed with another key.
Fault = Literal["reasoning", "reasoning.summary", "include", "items", "seals"]

_CODES = ("unsupported_parameter", "unknown_parameter")
_NOT_TAKEN = re.compile(
    r"not supported|unsupported (?:parameter|argument)|extra (?:inputs|fields)"
    r"|un(?:known|recognized|expected)\b.{0,30}(?:parameter|argument|field)",
    re.IGNORECASE,
)
_WRONG_VALUE = re.compile(r"supported values?\b", re.IGNORECASE)
_SEALED = re.compile(r"encrypted[ _]content", re.IGNORECASE)
# What an error that names no parameter begins with: further on there may be words of the client's, and what is learned
# of a model counts for all.
_NO_SEALS = re.compile(r"encrypted[ _]content is not supported", re.IGNORECASE)
_NO_ITEMS = re.compile(r"reasoning (?:input )?items can only be", re.IGNORECASE)
_ABOUT = re.compile(
    r"un(?:supported|known|recognized|expected)\b[\w :]{0,40}['\"`]?(reasoning(?:\.\w+)?)", re.IGNORECASE
)


def find_fault(error: InvalidRequest) -> Fault | None:
    """What a refusal is about, if that can be left out. A wrong value cannot: only the client knows a better one."""
    param, told = error.param or "", error.message
    if error.code == "invalid_encrypted_content":
        return "seals"
    if _NO_ITEMS.match(told):
        return "items"
    if _NO_SEALS.match(told) or (param.startswith("include") and _SEALED.search(told)):
        return "include"
    if error.code in _CODES or (_NOT_TAKEN.search(told) and not _WRONG_VALUE.search(told)):
        return _find_parameter(param, told)
    return "seals" if _SEALED.search(told) else None


def _find_parameter(param: str, told: str) -> Fault | None:
    named = _ABOUT.match(told) if not param else None
    about = named[1].lower() if named is not None else param
    if about == "reasoning.summary":
        return "reasoning.summary"
    return "reasoning" if about.partition(".")[0] == "reasoning" else None


class Sent(msgspec.Struct, frozen=True):
    """A turn without what is known to be refused. `wants_seals` says whether sealed reasoning may be asked for."""

    turn: Turn
    wants_seals: bool = True

    @property
    def model(self) -> str | None:
        return self.turn.request.model

    @property
    def asks_for_seals(self) -> bool:
        request = self.turn.request
        asked = request.reasoning is not None or ENCRYPTED_REASONING in (request.include or ())
        return self.wants_seals and asked


class Refusals:
    """The last of them. Those that are about the request hold for its model, wherever it is asked for again."""

    def __init__(self, most: int = MOST_REFUSALS) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, None] = OrderedDict()

    def takes(self, model: str | None, fault: Fault) -> bool:
        """Whether nothing is known against asking this model so."""
        if (model, fault) not in self._known:
            return True
        self._known.move_to_end((model, fault))
        return False

    def list_ignored(self, request: CreateRequest, model: str) -> Sequence[str]:
        """Which parameters of a request have no effect on this model."""
        faults: tuple[Fault, ...] = ("reasoning", "reasoning.summary")
        return [fault for fault in faults if _asks_for(request.reasoning, fault) and not self.takes(model, fault)][:1]

    def strip(self, turn: Turn) -> Sent:
        if not self._known:  # nearly always
            return Sent(turn)
        request = self._strip_request(turn.request)
        items = [item for item in turn.items if not self._refuses(item, request.model)]
        return Sent(msgspec.structs.replace(turn, request=request, items=items), self.takes(request.model, "include"))

    def _strip_request(self, request: CreateRequest) -> CreateRequest:
        model, reasoning, include = request.model, request.reasoning, request.include
        if not self.takes(model, "reasoning"):
            reasoning = None
        elif reasoning is not None and not self.takes(model, "reasoning.summary"):
            rest = msgspec.structs.replace(reasoning, summary=None, generate_summary=None)
            reasoning = rest if rest != ReasoningConfig() else None
        if include and not (self.takes(model, "include") and self.takes(model, "reasoning")):
            include = [each for each in include if each != ENCRYPTED_REASONING]
        return msgspec.structs.replace(request, reasoning=reasoning, include=include)

    def _refuses(self, item: Item | Unknown, model: str | None) -> bool:
        if not isinstance(item, Reasoning):
            return False
        return not self.takes(model, "items") or (item.encrypted_content is not None and _mark(item) in self._known)

    def learn(self, error: InvalidRequest, sent: Sent) -> Fault | None:
        """Note what this was refused for. If it had nothing of the kind, that is no reason to ask again."""
        fault = find_fault(error)
        thoughts = [item for item in sent.turn.items if isinstance(item, Reasoning)]
        sealed = [thought for thought in thoughts if thought.encrypted_content]
        match fault:
            case "seals" if sealed:
                self._note(*map(_mark, sealed))
            case "items" if thoughts:
                self._note((sent.model, fault))
            case "include" if sent.asks_for_seals:
                self._note((sent.model, fault))
            case "reasoning" | "reasoning.summary" if _asks_for(sent.turn.request.reasoning, fault):
                self._note((sent.model, fault))
            case _:
                return None
        return fault

    def _note(self, *facts: Hashable) -> None:
        self._known |= dict.fromkeys(facts)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


def _asks_for(asked: ReasoningConfig | None, fault: Fault) -> bool:
    if asked is None:
        return False
    return fault == "reasoning" or bool(asked.summary or asked.generate_summary)


def _mark(item: Reasoning) -> bytes:
    return blake2b((item.encrypted_content or "").encode(), digest_size=16).digest()
