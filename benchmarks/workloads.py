"""The workloads of every server: the answers of the models, and the requests."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

SENTENCE = "The rain has passed, the roads are dry, and the evening train leaves from the usual platform."
_WORDS = SENTENCE.split()


def make_words(count: int) -> list[str]:
    return [f"{' ' if number else ''}{_WORDS[number % len(_WORDS)]}" for number in range(count)]


def _group(pieces: list[str], size: int) -> list[list[str]]:
    return [pieces[start : start + size] for start in range(0, len(pieces), size)]


# The answer of each model: one list of texts per upstream read.
ANSWERS: dict[str, list[list[str]]] = {
    "short": [[SENTENCE]],
    "brief": _group(make_words(2), 1),
    "brief-batched": _group(make_words(10), 10),
    "long": _group(make_words(200), 1),
    "long-batched": _group(make_words(200), 10),
}

# The first piece of a text as JSON. The client looks for it to find the time of the first delta.
FIRST_PIECE = json.dumps(_WORDS[0]).encode()

# The model that sends one delta and then nothing.
IDLE = "idle"

ONE_MESSAGE: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "When does the next train leave?"}]}
]

TEN_ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Answer in one sentence."}]},
    *ONE_MESSAGE,
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "From which station?"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "From the main station."}]},
    {"type": "function_call", "call_id": "call_1", "name": "timetable", "arguments": '{"station":"main"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": '{"next":"18:04","platform":7}'},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "At 18:04."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Will it rain?"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No, it is dry."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Then sum it all up, please."}]},
]


def make_tools(count: int) -> list[dict[str, Any]]:
    """Return function tools of the size that agents have."""
    return [
        {
            "type": "function",
            "name": f"timetable_{number}" if number else "timetable",
            "description": "Return the next departures of a station.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "station": {"type": "string", "description": "Name of the station."},
                    "limit": {"type": "integer", "description": "Number of departures."},
                },
                "required": ["station"],
            },
        }
        for number in range(count)
    ]


def make_items(count: int) -> list[dict[str, Any]]:
    """Return a conversation of messages that ends with one of the user."""
    kinds = (("user", "input_text"), ("assistant", "output_text"))
    return [
        {"type": "message", "role": role, "content": [{"type": kind, "text": f"{number}: {SENTENCE}"}]}
        for number in range(count)
        for role, kind in [kinds[(number + count + 1) % 2]]
    ]


class Workload(NamedTuple):
    """Identical requests. A round has `requests` of them, with `concurrency` in flight.

    `key` is the API key.
    """

    name: str
    model: str
    input: list[dict[str, Any]]
    stream: bool
    store: bool
    concurrency: int
    requests: int
    background: bool = False
    key: str = ""
    tools: Sequence[dict[str, Any]] = ()

    @property
    def body(self) -> bytes:
        fields = {"model": self.model, "input": self.input, "stream": self.stream, "store": self.store}
        if self.background:
            fields["background"] = True
        if self.tools:
            fields["tools"] = self.tools
        return json.dumps(fields, separators=(",", ":")).encode()

    @property
    def text(self) -> str:
        """The expected text."""
        return "".join(piece for pieces in ANSWERS[self.model] for piece in pieces)

    @property
    def events(self) -> int:
        """The expected number of events.

        Created, in progress, item added, part added; the deltas; text done, part done, item done, completed. A
        background response also has a queued event.
        """
        return 4 + sum(map(len, ANSWERS[self.model])) + 4 + self.background


STORED = Workload("1 message, stored", "short", ONE_MESSAGE, stream=False, store=True, concurrency=32, requests=640)
ALONE = STORED._replace(name="1 message, stored, 1 at once", concurrency=1, requests=200)
BRIEF = Workload("streamed, 2 deltas", "brief", ONE_MESSAGE, stream=True, store=True, concurrency=32, requests=320)
LONG = BRIEF._replace(name="streamed, 200 deltas", model="long", requests=64)
BRIEF_BATCHED = BRIEF._replace(name="streamed, 10 deltas a read, 1 read", model="brief-batched")
LONG_BATCHED = BRIEF._replace(name="streamed, 10 deltas a read, 20 reads", model="long-batched", requests=128)

UNSTORED = STORED._replace(name="1 message, not stored", store=False)
TEN_STORED = STORED._replace(name="10 items, stored", input=TEN_ITEMS)
TEN_UNSTORED = STORED._replace(name="10 items, not stored", input=TEN_ITEMS, store=False)
BRIEF_BACKGROUND = BRIEF._replace(name="streamed, 2 deltas, background", background=True)
LONG_BACKGROUND = LONG._replace(name="streamed, 200 deltas, background", background=True)

WORKLOADS = (
    ALONE,
    ALONE._replace(name="1 message, not stored, 1 at once", store=False),
    STORED,
    UNSTORED,
    TEN_STORED,
    TEN_UNSTORED,
    BRIEF,
    BRIEF._replace(name="streamed, 2 deltas, 1 at once", concurrency=1, requests=120),
    LONG,
    BRIEF_BATCHED,
    LONG_BATCHED,
)

# Features that need state, each with the same work without it.
STATEFUL = (BRIEF, BRIEF_BACKGROUND, LONG, LONG_BACKGROUND)
