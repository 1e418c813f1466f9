"""Characters cut in two, in the JSON of messages."""

import pytest

from antiphon.stream.sse import SurrogateRepairer


@pytest.mark.parametrize(
    ("messages", "mended"),
    [
        ([rb'"a\ud83d"', rb'"\ude00b"'], [rb'"a"', rb'"\ud83d\ude00b"']),
        ([rb'"a\uD83D"', rb'{"ping": 1}', rb'"\uDE00"'], [rb'"a"', rb'{"ping": 1}', rb'"\uD83D\uDE00"']),
        ([rb'"\ud83d\ude00"'], [rb'"\ud83d\ude00"']),
        ([rb'"\ud83d\ude00\ud83d"', rb'"\ude00"'], [rb'"\ud83d\ude00"', rb'"\ud83d\ude00"']),
        ([rb'"\ude00"', rb'"\ud83dx"'], [rb'"\ufffd"', rb'"\ufffdx"']),
        ([rb'"\ud83d"', rb'"x"', rb'"y"'], [rb'""', rb'"x"', rb'"y"']),
        ([rb'"\\ud83d"', rb'"\\ude00"'], [rb'"\\ud83d"', rb'"\\ude00"']),
        ([rb'"\\\ud83d"', rb'"\ude00"'], [rb'"\\"', rb'"\ud83d\ude00"']),
        ([rb'"\ud7ff"', rb'"\ue000"'], [rb'"\ud7ff"', rb'"\ue000"']),
    ],
)
def test_halves_that_follow_one_another_are_one_character(messages: list[bytes], mended: list[bytes]) -> None:
    mender = SurrogateRepairer()
    assert [mender.repair(message) for message in messages] == mended


def test_a_message_without_halves_is_not_touched() -> None:
    message = b'{"text": "\xf0\x9f\x98\x80 \\u0041"}'
    assert SurrogateRepairer().repair(message) is message
