"""The probabilities of tokens, in the words of many servers."""

from typing import Any

import pytest

from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.upstream.fields import parse_logprobs

YES = {"token": "Yes", "logprob": -0.25}
BYTES = [89, 101, 115]


@pytest.mark.parametrize(
    ("told", "read"),
    [
        (None, ()),
        ({"content": []}, ()),
        ([], ()),
        ([YES | {"bytes": BYTES, "top_logprobs": []}], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES | {"bytes": ["Y"], "top_logprobs": None}], (LogProb("Yes", -0.25, BYTES, []),)),
        ([YES | {"top_logprobs": [YES, "No"]}], (LogProb("Yes", -0.25, BYTES, [TopLogProb("Yes", -0.25, BYTES)]),)),
        (["Yes", {"token": "Yes"}, {"token": None, "logprob": 0}, {"logprob": -1}], ()),
    ],
)
def test_what_is_told_in_full_is_read(told: Any, read: tuple[LogProb, ...]) -> None:
    assert parse_logprobs(told) == read
