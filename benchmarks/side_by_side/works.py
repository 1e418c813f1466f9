"""The work that every server does, and the checks of its answers."""

import json
from typing import Any, NamedTuple

import msgspec

from benchmarks.client import Answer, InvalidAnswer
from benchmarks.side_by_side import servers
from benchmarks.side_by_side.models import (
    ARGUMENTS,
    CHAIN,
    PACED,
    PLAIN,
    QUESTION,
    TOKENS,
    TOOL,
    TOOL_NAME,
    TURNS,
    make_chain_pieces,
    make_pieces,
)
from benchmarks.workloads import make_tools


class Work(NamedTuple):
    """Requests of one kind. A request of the chain model continues the response of the one before it."""

    name: str
    model: str
    stream: bool
    store: bool
    concurrency: int
    websocket: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of an answer with a text that is measured by token, or 0."""
        return TOKENS if self.stream and self.model in (PLAIN, PACED) else 0

    @property
    def needs(self) -> list[str]:
        """The kinds of work that a server must support for this."""
        needs = {
            servers.WHOLE: not self.stream,
            servers.STORE: self.store and self.model != CHAIN,
            servers.CHAIN: self.model == CHAIN,
            servers.TOOL: self.model == TOOL,
            servers.WEBSOCKET: self.websocket,
        }
        return [name for name, needed in needs.items() if needed]


def _make_works() -> tuple[Work, ...]:
    whole = Work("plain", PLAIN, stream=False, store=False, concurrency=32)
    streamed = whole._replace(name="streamed", stream=True)
    paced = streamed._replace(name="streamed, 5 ms a token", model=PACED)
    return (
        whole._replace(store=True),
        streamed._replace(store=True),
        whole,
        streamed,
        whole._replace(concurrency=1),
        streamed._replace(concurrency=1),
        paced._replace(concurrency=1),
        paced,
        Work("20 turns", CHAIN, stream=True, store=True, concurrency=8),
        Work("tool call", TOOL, stream=True, store=False, concurrency=32),
        streamed._replace(name="WebSocket", store=True, websocket=True),
        streamed._replace(name="WebSocket", store=True, websocket=True, concurrency=1),
        whole._replace(concurrency=128),
        streamed._replace(concurrency=128),
        paced._replace(concurrency=128),
    )


WORKS = _make_works()


def make_body(work: Work, *, model_prefix: str = "", previous: str | None = None) -> bytes:
    text = QUESTION.decode() if work.model == CHAIN else "When does the next train leave?"
    body: dict[str, Any] = {
        "model": model_prefix + work.model,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}],
        "store": work.store,
    }
    if not work.websocket:  # a WebSocket always streams
        body["stream"] = work.stream
    if work.model == TOOL:
        body["tools"] = make_tools(3)
    if previous is not None:
        body["previous_response_id"] = previous
    return json.dumps(body).encode()


def make_direct_body(work: Work) -> bytes:
    """Return the request of a client that calls the upstream's Chat Completions itself."""
    return json.dumps(
        {
            "model": work.model,
            "messages": [{"role": "user", "content": "When does the next train leave?"}],
            "stream": work.stream,
        }
    ).encode()


class Event(msgspec.Struct):
    type: str
    delta: Any = None
    response: msgspec.Raw = msgspec.Raw(b"null")


_decode_event = msgspec.json.Decoder(Event).decode


def check(work: Work, answer: Answer, *, turn: int = 0) -> str:
    """Raise InvalidAnswer unless the answer is complete and has the expected text or call. Return the response id."""
    if answer.head and answer.status != 200:
        raise InvalidAnswer(f"status {answer.status}: {answer.content[:300].decode(errors='replace')}")
    try:
        deltas, response = _read(work, answer)
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidAnswer(f"{error!r} in {answer.content[-300:].decode(errors='replace')}") from None
    if response.get("status") != "completed":
        raise InvalidAnswer(f"the response is {response.get('status')}")
    expected = make_chain_pieces(turn) if work.model == CHAIN else make_pieces()
    if work.model == TOOL:
        _check_call(response)
    elif _read_text(response) != "".join(expected):
        raise InvalidAnswer(f"wrong text: {_read_text(response)[-60:]!r}, not {''.join(expected)[-60:]!r}")
    elif work.stream and [delta for delta in deltas if delta] != expected:
        raise InvalidAnswer(f"{len(deltas)} deltas, not one for each of {len(expected)} tokens")
    return str(response["id"])


def _read(work: Work, answer: Answer) -> tuple[list[str], dict[str, Any]]:
    """Return the text deltas and the response."""
    if not work.stream:
        return [], json.loads(answer.content)
    lines = answer.body.split(b"\n") if work.websocket else answer.content.split(b"\n")
    payloads = [line if work.websocket else line[6:] for line in lines if work.websocket or line.startswith(b"data: {")]
    events = [_decode_event(payload) for payload in payloads]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = [event for event in events if event.type == "response.completed"]
    if not last:
        raise InvalidAnswer(f"no response.completed: {payloads[-1][:300].decode(errors='replace')}")
    return deltas, msgspec.json.decode(last[-1].response)


def _read_text(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part.get("text", "") for message in messages for part in message["content"])


def _check_call(response: dict[str, Any]) -> None:
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    if [call["name"] for call in calls] != [TOOL_NAME] or calls[0]["arguments"] != ARGUMENTS:
        raise InvalidAnswer(f"wrong call: {calls}")


def count_turns(work: Work) -> int:
    return TURNS if work.model == CHAIN else 1
