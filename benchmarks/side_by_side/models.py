"""The models of the upstream: their names and answers."""

import json

from benchmarks.workloads import make_words

PLAIN, PACED, TOOL, CHAIN = "plain", "paced", "tool", "chain"
MODELS = (PLAIN, PACED, TOOL, CHAIN)

TOKENS = 200
# Seconds between the tokens of the paced model.
PACE = 0.005
# Turns of a chain.
TURNS = 20
# The upstream counts this in a request to see whether it has the whole history.
QUESTION = b"Where do I change trains?"

TOOL_NAME = "timetable"
ARGUMENTS = json.dumps({"station": "main", "limit": 3})
CALL_ID = "call_0123456789abcdef01234567"


def make_pieces() -> list[str]:
    return make_words(TOKENS)


def make_chain_pieces(number: int) -> list[str]:
    """Return the answer to the question with this number."""
    return [*make_words(20), f" ({number})"]
