"""A reader of Chat Completions chunks, for the tests of its parts."""

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.protocol.response import Usage

STATEFUL = Quirks(keep_call_extras=True, reasoning_field="reasoning_details")

DEEP = b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
"""A chunk that is nested too deeply."""


def make_reader() -> ChatReader:
    return ChatReader(STATEFUL, estimate=lambda _: Usage(0, 0, 0))
