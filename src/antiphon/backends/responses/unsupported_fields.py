"""Optional fields that an upstream has rejected, which are omitted from later requests.

Codex requests reasoning from every model, and a stored chain returns all earlier encrypted reasoning. Clients cannot
change that, so the backend omits these fields where they are rejected.
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

MAX_REJECTIONS = 10_000

# A parameter, the `include` value for encrypted reasoning, reasoning items in the input, or reasoning items that were
# encrypted with another key.
RejectedField = Literal["reasoning", "reasoning.summary", "include", "reasoning_items", "encrypted_content"]

_UNSUPPORTED_CODES = ("unsupported_parameter", "unknown_parameter")
_UNSUPPORTED = re.compile(
    r"not supported|unsupported (?:parameter|argument)|extra (?:inputs|fields)"
    r"|un(?:known|recognized|expected)\b.{0,30}(?:parameter|argument|field)",
    re.IGNORECASE,
)
_WRONG_VALUE = re.compile(r"supported values?\b", re.IGNORECASE)
_ENCRYPTED_CONTENT = re.compile(r"encrypted[ _]content", re.IGNORECASE)
# For errors without `param`. They match only the start of a message: the rest may quote the client, and a rejection
# affects all requests for the model.
_NO_ENCRYPTED_CONTENT = re.compile(r"encrypted[ _]content is not supported", re.IGNORECASE)
_NO_REASONING_ITEMS = re.compile(r"reasoning (?:input )?items can only be", re.IGNORECASE)
_REASONING_PARAM = re.compile(
    r"un(?:supported|known|recognized|expected)\b[\w :]{0,40}['\"`]?(reasoning(?:\.\w+)?)", re.IGNORECASE
)


def find_rejected_field(error: InvalidRequest) -> RejectedField | None:
    """Return the field that an error is about, if it can be omitted. A field with a wrong value cannot."""
    param, message = error.param or "", error.message
    if error.code == "invalid_encrypted_content":
        return "encrypted_content"
    if _NO_REASONING_ITEMS.match(message):
        return "reasoning_items"
    if _NO_ENCRYPTED_CONTENT.match(message) or (param.startswith("include") and _ENCRYPTED_CONTENT.search(message)):
        return "include"
    if error.code in _UNSUPPORTED_CODES or (_UNSUPPORTED.search(message) and not _WRONG_VALUE.search(message)):
        return _find_reasoning_param(param, message)
    return "encrypted_content" if _ENCRYPTED_CONTENT.search(message) else None


def _find_reasoning_param(param: str, message: str) -> RejectedField | None:
    found = _REASONING_PARAM.match(message) if not param else None
    name = found[1].lower() if found is not None else param
    if name == "reasoning.summary":
        return "reasoning.summary"
    return "reasoning" if name.partition(".")[0] == "reasoning" else None


class StrippedTurn(msgspec.Struct, frozen=True):
    """A turn without rejected fields. `can_encrypt`: encrypted reasoning may be requested."""

    turn: Turn
    can_encrypt: bool = True

    @property
    def model(self) -> str | None:
        return self.turn.request.model

    @property
    def requests_encryption(self) -> bool:
        request = self.turn.request
        has_reasoning = request.reasoning is not None or ENCRYPTED_REASONING in (request.include or ())
        return self.can_encrypt and has_reasoning


class UnsupportedFields:
    """The most recent rejections: by model, or by the item for encrypted reasoning."""

    def __init__(self, max_rejections: int = MAX_REJECTIONS) -> None:
        self._max_rejections = max_rejections
        self._rejections: OrderedDict[Hashable, None] = OrderedDict()

    def is_supported(self, model: str | None, field: RejectedField) -> bool:
        """Return True if the model has not rejected the field."""
        if (model, field) not in self._rejections:
            return True
        self._rejections.move_to_end((model, field))
        return False

    def list_ignored_params(self, request: CreateRequest, model: str) -> Sequence[str]:
        """Return the request's parameters that have no effect on this model."""
        fields: tuple[RejectedField, ...] = ("reasoning", "reasoning.summary")
        return [
            field for field in fields if _has_field(request.reasoning, field) and not self.is_supported(model, field)
        ][:1]

    def strip(self, turn: Turn) -> StrippedTurn:
        """Return the turn without rejected fields and items."""
        if not self._rejections:  # the most frequent case
            return StrippedTurn(turn)
        request = self._strip_request(turn.request)
        items = [item for item in turn.items if not self._is_rejected(item, request.model)]
        stripped = msgspec.structs.replace(turn, request=request, items=items)
        return StrippedTurn(stripped, self.is_supported(request.model, "include"))

    def _strip_request(self, request: CreateRequest) -> CreateRequest:
        model, reasoning, include = request.model, request.reasoning, request.include
        if not self.is_supported(model, "reasoning"):
            reasoning = None
        elif reasoning is not None and not self.is_supported(model, "reasoning.summary"):
            rest = msgspec.structs.replace(reasoning, summary=None, generate_summary=None)
            reasoning = rest if rest != ReasoningConfig() else None
        if include and not (self.is_supported(model, "include") and self.is_supported(model, "reasoning")):
            include = [each for each in include if each != ENCRYPTED_REASONING]
        return msgspec.structs.replace(request, reasoning=reasoning, include=include)

    def _is_rejected(self, item: Item | Unknown, model: str | None) -> bool:
        if not isinstance(item, Reasoning):
            return False
        if not self.is_supported(model, "reasoning_items"):
            return True
        return item.encrypted_content is not None and _hash_seal(item) in self._rejections

    def record(self, error: InvalidRequest, sent: StrippedTurn) -> RejectedField | None:
        """Record and return the rejected field. Return None if the turn had no such field: a retry would not help."""
        field = find_rejected_field(error)
        reasoning_items = [item for item in sent.turn.items if isinstance(item, Reasoning)]
        encrypted = [item for item in reasoning_items if item.encrypted_content]
        match field:
            case "encrypted_content" if encrypted:
                self._add(*map(_hash_seal, encrypted))
            case "reasoning_items" if reasoning_items:
                self._add((sent.model, field))
            case "include" if sent.requests_encryption:
                self._add((sent.model, field))
            case "reasoning" | "reasoning.summary" if _has_field(sent.turn.request.reasoning, field):
                self._add((sent.model, field))
            case _:
                return None
        return field

    def _add(self, *rejections: Hashable) -> None:
        self._rejections |= dict.fromkeys(rejections)
        while len(self._rejections) > self._max_rejections:
            self._rejections.popitem(last=False)


def _has_field(reasoning: ReasoningConfig | None, field: RejectedField) -> bool:
    if reasoning is None:
        return False
    return field == "reasoning" or bool(reasoning.summary or reasoning.generate_summary)


def _hash_seal(item: Reasoning) -> bytes:
    return blake2b((item.encrypted_content or "").encode(), digest_size=16).digest()
