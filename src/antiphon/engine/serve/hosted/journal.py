"""The journal of the hosted calls of a background response, so that another process can continue after a crash.

Three kinds of steps are stored, each before its deltas are sent: the introduction of the sessions, a complete answer of
the model that calls hosted tools, and the outcome of a call. The intent of a call is stored before the call is run. A
call with an intent and without an outcome has an unknown effect: it is run again only if it is repeatable. So a step
waits for a failing store.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from antiphon.engine.respond.run import Postponed
from antiphon.errors import ServerError, StoreUnavailable
from antiphon.protocol.response import Usage
from antiphon.store.base import HostedStepStore, LeaseLost
from antiphon.stream.delta_codec import EncodedDelta, decode_deltas
from antiphon.stream.deltas import Delta

logger = logging.getLogger(__name__)

# A step waits this long for a failing store, with one try per interval.
SAVE_TIMEOUT_SECONDS = 600.0
RETRY_SECONDS = 1.0


class CallRecord(msgspec.Struct, kw_only=True):
    """A call of a hosted function that the model made. `is_open`: deltas of its item are part of the answer.

    A call with a `refusal` is not run: the model gets this text instead of a result. `parent` is the key of the program
    that makes the call, if it is not the model.
    """

    key: str
    name: str
    arguments: str
    call_id: str | None = None
    is_open: bool = False
    refusal: str | None = None
    parent: str | None = None


class IntroductionStep(msgspec.Struct, kw_only=True, tag_field="kind", tag="introduction"):
    """The items before the first model call."""

    deltas: list[EncodedDelta]


class AnswerStep(msgspec.Struct, kw_only=True, tag_field="kind", tag="answer"):
    """A complete answer of the model with its hosted calls, and the usage of the response so far.

    `is_pending`: the calls are not the model's, but were requested by the context.
    """

    deltas: list[EncodedDelta]
    calls: list[CallRecord]
    awaits_client: bool = False
    is_pending: bool = False
    usage: Usage | None = None


class IntentStep(msgspec.Struct, kw_only=True, tag_field="kind", tag="intent"):
    """A call that is about to be run."""

    key: str
    is_repeatable: bool
    parent: str | None = None


class OutcomeStep(msgspec.Struct, kw_only=True, tag_field="kind", tag="outcome"):
    """The rest of a call's deltas, up to the end of its item. A program sends those of its calls again itself."""

    key: str
    deltas: list[EncodedDelta]
    needs_client: bool = False
    parent: str | None = None


Step = IntroductionStep | AnswerStep | IntentStep | OutcomeStep

_decoder = msgspec.json.Decoder(Step)


class HostedJournal(Protocol):
    """The steps of a response. `recorded` are those of earlier attempts."""

    recorded: Sequence[Step]

    async def append(self, *steps: Step) -> None:
        """Store steps in one transaction."""


class NoJournal:
    """The journal of a foreground response, which is not continued by another process."""

    recorded: Sequence[Step] = ()

    async def append(self, *steps: Step) -> None:
        return


class StepJournal:
    """A journal in the store, written by the owner of the response's run."""

    def __init__(self, store: HostedStepStore, *, project: str, response_id: str, owner: str) -> None:
        self._store = store
        self._project = project
        self._response_id = response_id
        self._owner = owner
        self._count = 0
        self.recorded: Sequence[Step] = ()

    async def load(self) -> None:
        """Read the steps of earlier attempts. Raises ServerError if they cannot be read."""
        rows = await self._store.load_hosted_steps(self._project, self._response_id)
        try:
            self.recorded = [_decoder.decode(row) for row in rows]
        except msgspec.MsgspecError as error:
            raise ServerError(f"The steps of the response {self._response_id} are damaged.") from error
        self._count = len(rows)

    async def append(self, *steps: Step) -> None:
        """Store steps. Retry while the store fails: no call may run without its intent.

        Raises LeaseLost if another process has taken over the run, and Postponed if the store fails for too long.
        """
        rows = [msgspec.json.encode(step) for step in steps]
        deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
        is_owner: bool | None = None
        has_failed = False
        while is_owner is None:
            try:
                is_owner = await self._store.append_hosted_steps(
                    self._project, self._response_id, self._count, rows, owner=self._owner
                )
            except StoreUnavailable as error:
                if time.monotonic() > deadline:
                    raise Postponed(f"The steps of the response cannot be stored: {error.message}") from error
                if not has_failed:
                    logger.error(
                        "the steps of the response cannot be stored yet: %s",
                        error.message,
                        extra={"response_id": self._response_id},
                    )
                has_failed = True
                await asyncio.sleep(RETRY_SECONDS)
        if not is_owner:
            raise LeaseLost(f"The run of {self._response_id} belongs to another process now.")
        self._count += len(rows)


def list_deltas(steps: Sequence[Step]) -> list[Delta]:
    """Return all deltas of the steps, in order. The step of a program has the deltas of its calls."""
    return [delta for step in steps if not is_nested(step) for delta in _decode_step(step)]


def is_nested(step: Step) -> bool:
    """Return True if the step belongs to a call of a program."""
    return isinstance(step, IntentStep | OutcomeStep) and step.parent is not None


def _decode_step(step: Step) -> list[Delta]:
    return [] if isinstance(step, IntentStep) else decode_deltas(step.deltas)
