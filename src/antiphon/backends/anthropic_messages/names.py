"""Names and ids: this API takes fewer characters than the Responses API does, so some get a substitute."""

import hashlib
import itertools
import re
from collections.abc import Container

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}", re.ASCII)
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)
_LONGEST_STEM = 100


def name_tool(name: str) -> str:
    """The name a tool goes by upstream. It depends on nothing else, so that a conversation always reads the same."""
    return name if _TOOL_NAME.fullmatch(name) else _substitute(name)


def name_call(call_id: str, *, taken: Container[str]) -> str:
    """The id a call goes by upstream, where no two calls may share one: some models count theirs anew each time."""
    wire = call_id if _CALL_ID.fullmatch(call_id) else _substitute(call_id)
    numbered = (f"{wire}_{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([wire], numbered) if each not in taken)


def _substitute(name: str) -> str:
    return f"{_OTHERS.sub('_', name)[:_LONGEST_STEM]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
