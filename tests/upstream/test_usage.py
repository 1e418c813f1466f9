"""The numbers of tokens, in the words of many servers, and without any."""

from typing import Any

import pytest

from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.upstream.usage import estimate_usage, parse_usage


@pytest.mark.parametrize(
    ("payload", "usage"),
    [
        (None, None),
        ({}, None),
        ({"prompt_tokens": None, "completion_tokens": "many"}, None),
        ({"prompt_tokens": 5, "completion_tokens": 3}, Usage(5, 3, 8)),
        ({"prompt_tokens": 5}, Usage(5, 0, 5)),
        ({"input_tokens": 5, "output_tokens": 3, "total_tokens": 9}, Usage(5, 3, 9)),
        ({"input_tokens": 5, "output_tokens": 3, "total_tokens": 7}, Usage(5, 3, 8)),
        ({"total_tokens": 9}, None),
        ({"id": "req_1", "usage": {"prompt_tokens": 5, "completion_tokens": 3}}, Usage(5, 3, 8)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(5, 3, 8, InputTokensDetails(4, 1), OutputTokensDetails(2)),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 3, "prompt_cache_hit_tokens": 4, "prompt_tokens_details": None},
            Usage(5, 3, 8, InputTokensDetails(4)),
        ),
        ({"prompt_tokens": 5.0, "completion_tokens": 3.5, "total_tokens": "8"}, Usage(5, 3, 8)),
        ({"prompt_tokens": -1, "input_tokens": 5, "completion_tokens": True}, Usage(5, 0, 5)),
        ({"prompt_tokens": 1e30, "completion_tokens": "3"}, None),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 400, "cache_write_tokens": -1},
                "completion_tokens_details": {"reasoning_tokens": 2**62},
            },
            Usage(5, 3, 8, InputTokensDetails(5), OutputTokensDetails(0)),
        ),
        ({"prompt_tokens": 2**70, "completion_tokens": 3}, Usage(0, 3, 3)),
        (
            {"prompt_tokens": 5, "completion_tokens": [3], "prompt_tokens_details": {"cached_tokens": "4"}},
            Usage(5, 0, 5),
        ),
        (
            {"prompt_tokens": 5, "prompt_tokens_details": 7, "input_tokens_details": {"cached_tokens": 4}},
            Usage(5, 0, 5, InputTokensDetails(4)),
        ),
        ({"prompt_tokens": 5, "estimated": "yes"}, Usage(5, 0, 5)),
        ({"prompt_tokens": 5, "estimated": True}, Usage(5, 0, 5, estimated=True)),
        ({"prompt_tokens": 5.5, "estimated": True}, Usage(5, 0, 5, estimated=True)),
    ],
)
def test_usage_formats_are_parsed(payload: Any, usage: Usage | None) -> None:
    assert parse_usage(payload) == usage


def test_usage_estimate_is_marked_and_grows_with_text() -> None:
    short = estimate_usage(CreateRequest(), [Message("user", "hi")], "")
    long = estimate_usage(CreateRequest(), [Message("user", "hi" * 100)], "yes" * 100)
    assert short.estimated
    assert short.output_tokens == 0 < short.input_tokens < long.input_tokens
    assert long.total_tokens == long.input_tokens + long.output_tokens > long.input_tokens


def test_impossible_counts_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.upstream.usage._warned", set())
    for _ in range(3):
        parse_usage({"prompt_tokens": -5, "completion_tokens": 3, "total_tokens": 2})
    prefix = "an upstream reports an impossible token usage: "
    assert caplog.messages == [
        f"{prefix}'prompt_tokens' is not a possible count; it is ignored.",
        f"{prefix}'total_tokens' is less than the sum of input and output; the sum is used.",
    ]
