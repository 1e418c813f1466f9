"""The record of one backend answer, and the budget that all backend answers of a turn share."""

from antiphon.engine.serve.answer_keys import Key
from antiphon.engine.serve.tool_emulation.translate_calls import CallTranslator
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.protocol.response import Response, Usage
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Delta

MAX_SEARCHES = 8


class TurnBudget:
    """Counters and limits of a turn, over all backend answers.

    `searches` are the tool searches left. It is negative if the model went on searching after the last one.
    """

    def __init__(self, *, max_searches: int | None = None, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._max_searches = min(max_searches or MAX_SEARCHES, MAX_SEARCHES)
        self.retries = 1
        self.searches = self._max_searches
        self.calls = 0
        self.answers = 0
        self.spent: Usage | None = None

    @property
    def has_called(self) -> bool:
        """True if the model has made a valid call of an allowed tool."""
        return self.calls > 0 or self.searches < self._max_searches

    def add_usage(self, usage: Usage, before: Usage | None) -> Usage:
        """Set and return the usage of all answers. `before` is the usage of the earlier answers."""
        self.spent = usage if before is None else before + usage
        return self.spent

    def count_tokens_left(self) -> int | None:
        """Return the token limit for the next answer, or None if there is no limit."""
        if self._max_tokens is None or self.spent is None:
            return self._max_tokens
        return max(1, self._max_tokens - self.spent.output_tokens)


class AnswerRecord:
    """One answer of the backend: its deltas, its calls, and the text that is held back until it is checked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received: list[Delta] = []
        self.calls: dict[Key, CallTranslator] = {}
        self.held_text: list[str] = []
        self.held_annotations: list[Delta] = []
        self.is_refusal = False
        self.has_custom_call = False

    def list_items(self) -> Items:
        """Return the answer as items for the backend's next turn."""
        label = f"round{self.number}"
        numbers = iter(range(len(self.received) + 1))
        composer = Composer(
            Response(id=label, created_at=0, model=""), new_id=lambda kind: f"{kind}_{label}_{next(numbers)}", now=int
        )
        composer.compose([*self.received, deltas.Finish()])
        return composer.response.output

    def make_text_deltas(self) -> list[Delta]:
        """Return the deltas of the held text."""
        text = "".join(self.held_text)
        return [deltas.Text(text), *self.held_annotations] if text else []

    def take_commentary(self) -> list[Delta]:
        """Return the held text as commentary and clear it. Text before a call is not checked against `text.format`."""
        text, self.held_text = "".join(self.held_text), []
        if not text.strip():
            return []
        return [deltas.Phase("commentary"), deltas.Text(text), deltas.CloseItem()]
