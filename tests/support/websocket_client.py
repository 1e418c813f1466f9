"""A WebSocket client that sends and receives single messages."""

import json
import re
from collections import defaultdict, deque
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

from support.live_server import TIMEOUT, LiveServer

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
Event = dict[str, Any]


class WebSocketClient:
    """Sends messages, and sorts received messages by lane."""

    def __init__(
        self, running: LiveServer, *, key: str | None = None, headers: dict[str, str] | None = None, **options: Any
    ) -> None:
        headers = (headers or {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self.socket: ClientConnection = connect(
            f"{running.url.replace('http', 'ws')}/v1/responses",
            additional_headers=headers,
            proxy=None,
            compression=None,
            max_size=None,
            **options,
        )
        self._received: dict[str | None, deque[Event]] = defaultdict(deque)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def create(self, text: Any = "hi", **options: Any) -> None:
        self.send({"type": "response.create", "model": "scripted", "input": text} | options)

    def steer(self, response_id: str, text: Any = "turn left", **options: Any) -> None:
        self.send({"type": "response.steer", "previous_response_id": response_id, "input": text, **options})

    def read(self) -> Event:
        """Return the next message of any lane."""
        event: Event = json.loads(self.socket.recv(TIMEOUT))
        return event

    def next(self, lane: str | None = None) -> Event:
        """Return the next message of a lane."""
        while not self._received[lane]:
            event = self.read()
            self._received[event.get("stream_id")].append(event)
        return self._received[lane].popleft()

    def until(self, kind: str, lane: str | None = None) -> Event:
        """Skip messages of a lane up to one of this type, and return it. Fail on an error."""
        while (event := self.next(lane))["type"] != kind:
            assert event["type"] != "error", event
        return event

    def until_error(self) -> Event:
        """Return the next error of the default lane. Messages before it stay available to `next`."""
        skipped: list[Event] = []
        while "status" not in (event := self.next()):
            skipped.append(event)
        self._received[None].extendleft(reversed(skipped))
        return event

    def finish(self, lane: str | None = None) -> list[Event]:
        """Return the messages of a lane up to the end of a response or an error."""
        events = [self.next(lane)]
        while events[-1]["type"] not in TERMINAL and "status" not in events[-1]:
            events.append(self.next(lane))
        return events

    def ask(self, text: Any = "hi", **options: Any) -> Event:
        """Send a request and return its completed response."""
        self.create(text, **options)
        last = self.finish(options.get("stream_id"))[-1]
        assert last["type"] == "response.completed", last
        response: Event = last["response"]
        return response

    def refuse(self, text: Any = "hi", **options: Any) -> Event:
        """Send a request that the server refuses, and return the error."""
        self.create(text, **options)
        error = self.next(options.get("stream_id"))
        assert (error["type"], isinstance(error["status"], int)) == ("error", True), error
        return error


def list_codes(errors: list[Event]) -> list[tuple[int, str]]:
    return [(error["status"], error["error"]["code"]) for error in errors]


def get_text(response: Event) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def normalise(events: list[Event]) -> list[Event]:
    """Return the events without run-specific values: ids are numbered, times are 0, lanes are removed."""
    names: dict[str, str] = {}
    text = json.dumps([{key: value for key, value in event.items() if key != "stream_id"} for event in events])
    text = re.sub(r"(?<=_)[0-9a-f]{44}", lambda found: names.setdefault(found[0], f"<{len(names)}>"), text)
    normalised: list[Event] = json.loads(re.sub(r'("(?:created|completed)_at": )\d+', r"\g<1>0", text))
    return normalised
