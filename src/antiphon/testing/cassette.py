"""Cassettes: what a model once answered, in a file, so that a test gets the same answers without the model."""

import difflib
import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.transports.base import Events, Transport
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.upstream.error_mapping import map_api_error, redact

# What changes nothing of the answer.
_UNSAID = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream", "stream_options", "user"}
)
_SECRETS = frozenset({"authorization", "api_key", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_BLOTTED = "***"
_MOST_LINES = 80


def render(request: JsonObject, origins: Mapping[str, str]) -> JsonObject:
    """The request in a form that is the same in every run.

    Ids of items and calls are numbered as they come; the id of a response becomes the key of the request that it
    answered, which `origins` tells.
    """
    rendered = {name: value for name, value in request.items() if name not in _UNSAID}
    previous = rendered.get("previous_response_id")
    if isinstance(previous, str):
        rendered["previous_response_id"] = f"the response to {origins[previous]}" if previous in origins else previous
    if isinstance(rendered.get("input"), list):
        numbers: dict[str, str] = {}
        rendered["input"] = [_rename(item, numbers) for item in rendered["input"]]
    hidden: JsonObject = hide_secrets(rendered)
    return hidden


def _rename(item: Any, numbers: dict[str, str]) -> Any:
    if not isinstance(item, dict):
        return item
    renamed = dict(item)
    for name in ("id", "call_id", "approval_request_id"):
        if isinstance(item.get(name), str):
            renamed[name] = numbers.setdefault(item[name], f"id {len(numbers) + 1}")
    return renamed


def hide_secrets(value: Any) -> Any:
    """The value with everything blotted out that stands where secrets do, as in the tools of type `mcp`."""
    if isinstance(value, list):
        return [hide_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    hidden = {
        name: _BLOTTED if name.lower() in _SECRETS and isinstance(each, str) else hide_secrets(each)
        for name, each in value.items()
    }
    if value.get("type") == "mcp" and isinstance(value.get("headers"), dict):
        hidden["headers"] = dict.fromkeys(value["headers"], _BLOTTED)
    return hidden


def make_key(rendered: JsonObject) -> str:
    canonical = json.dumps(rendered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def find_nearest(rendered: JsonObject, recorded: Sequence[JsonObject]) -> JsonObject | None:
    """The recorded request that has most lines in common with this one."""
    asked = _lines(rendered)
    return max(
        recorded,
        key=lambda each: difflib.SequenceMatcher(None, _lines(each), asked, autojunk=False).ratio(),
        default=None,
    )


def show_difference(recorded: JsonObject, asked: JsonObject) -> str:
    diff = difflib.unified_diff(_lines(recorded), _lines(asked), "recorded", "asked", n=2, lineterm="")
    lines = list(diff)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} lines more"]
    return "\n".join(lines)


def _lines(rendered: JsonObject) -> list[str]:
    return json.dumps(rendered, sort_keys=True, indent=2, ensure_ascii=False).splitlines()


_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


class CassetteMiss(AssertionError):
    """A request that is not on the cassette. The message shows how it differs from the nearest one that is."""


class _Failure(Struct, frozen=True):
    """An error that was raised, as it is told on the wire."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


class _Exchange(Struct, frozen=True, omit_defaults=True):
    """A request, the events that came of it, and the error that ended them if one did."""

    request: JsonObject
    events: list[JsonObject]
    error: _Failure | None = None


class _Tape(Struct, frozen=True):
    version: Literal[1]
    exchanges: list[_Exchange]


class Cassette:
    """A transport that records what goes over another one, and replays it.

    `mode`: "replay" never reaches a model, and raises CassetteMiss for what is not recorded; "record" asks the
    `transport` about everything, and replaces what was recorded; "auto" asks it only about what is not recorded.
    Requests are found by what they ask, so their order does not matter; one that is made several times gets the answers
    in the order in which they were given, and the last one from then on. `normalise` may take out of a request what
    differs each time, such as the date. Keys and credentials are never written.
    """

    def __init__(
        self,
        path: str | Path,
        transport: Transport | None = None,
        *,
        mode: Literal["auto", "replay", "record"] = "auto",
        normalise: Callable[[JsonObject], JsonObject] | None = None,
    ) -> None:
        self._path = Path(path)
        self._transport = None if mode == "replay" else transport
        self._mode = mode
        self._normalise = normalise
        if mode == "record" and transport is None:
            raise ConfigError("A cassette needs a transport to record from.")
        if mode == "replay" and not self._path.exists():
            raise ConfigError(f"There is no cassette {self._path}: record it first.")
        self._tracks: dict[str, list[_Exchange]] = {}
        for exchange in _load(self._path):
            self._tracks.setdefault(make_key(exchange.request), []).append(exchange)
        self._asked: dict[str, int] = {}
        self._origins: dict[str, str] = {}

    async def stream(self, request: JsonObject) -> Events:
        rendered = render(self._normalise(dict(request)) if self._normalise else request, self._origins)
        key = make_key(rendered)
        turn = self._asked.get(key, 0)
        self._asked[key] = turn + 1
        if self._mode == "record" and turn == 0:
            self._tracks.pop(key, None)
        track = self._tracks.get(key)
        if track and self._mode != "record":
            return self._replay(key, track[min(turn, len(track) - 1)])
        if self._transport is None:
            raise CassetteMiss(self._explain(rendered))
        try:
            events = await self._transport.stream(request)
        except AntiphonError as error:
            self._keep(key, _Exchange(rendered, [], _describe(error)))
            raise
        return self._record(key, rendered, events)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    def _replay(self, key: str, exchange: _Exchange) -> Events:
        if exchange.error is not None and not exchange.events:
            raise _restore(exchange.error)
        return self._retell(key, exchange)

    async def _retell(self, key: str, exchange: _Exchange) -> Events:
        for event in exchange.events:
            self._note_origin(key, event)
            yield (codec.decode_event(msgspec.json.encode(event)),)
        if exchange.error is not None:
            raise _restore(exchange.error)

    async def _record(self, key: str, rendered: JsonObject, events: Events) -> Events:
        told: list[JsonObject] = []
        failure: _Failure | None = None
        ended = False
        try:
            async with aclosing(events):
                async for batch in events:
                    for event in batch:
                        told.append(_as_json(event))
                        self._note_origin(key, told[-1])
                    yield batch
            ended = True
        except AntiphonError as error:
            failure = _describe(error)
            raise
        finally:
            # An answer that nobody heard to its end is no answer to replay.
            if ended or failure is not None or (told and told[-1]["type"] in _TERMINAL):
                self._keep(key, _Exchange(rendered, told, failure))

    def _note_origin(self, key: str, event: JsonObject) -> None:
        response = event.get("response")
        if isinstance(response, dict) and isinstance(response.get("id"), str):
            self._origins[response["id"]] = key

    def _keep(self, key: str, exchange: _Exchange) -> None:
        self._tracks.setdefault(key, []).append(exchange)
        _save(self._path, [each for track in self._tracks.values() for each in track])

    def _explain(self, rendered: JsonObject) -> str:
        nearest = find_nearest(rendered, [track[0].request for track in self._tracks.values()])
        if nearest is None:
            return f"The cassette {self._path} is empty, and there is no transport to record from."
        difference = show_difference(nearest, rendered)
        return f"This request is not on the cassette {self._path}. The nearest one that is:\n{difference}"


def _as_json(event: Event | Unknown) -> JsonObject:
    told: JsonObject = hide_secrets(msgspec.json.decode(codec.encode(event)))
    return told


def _describe(error: AntiphonError) -> _Failure:
    return _Failure(error.status, error.type, redact(error.message), error.code, error.param, error.retry_after)


def _restore(failure: _Failure) -> AntiphonError:
    told = {"message": failure.message, "type": failure.type, "code": failure.code, "param": failure.param}
    return map_api_error(failure.status, told, retry_after=failure.retry_after)


def _load(path: Path) -> Sequence[_Exchange]:
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Tape).exchanges
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a cassette: {error}.") from None


def _save(path: Path, exchanges: Sequence[_Exchange]) -> None:
    """For people to read, and to compare: requests with one value on a line, events with one event on a line."""
    shown = ",\n".join(textwrap.indent(_show(exchange), "    ") for exchange in exchanges)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(f'{{\n  "version": 1,\n  "exchanges": [\n{shown}\n  ]\n}}\n', "utf-8")
    half.replace(path)


def _show(exchange: _Exchange) -> str:
    request = textwrap.indent(json.dumps(exchange.request, indent=2, ensure_ascii=False), "  ").lstrip()
    events = ",\n".join(f"    {json.dumps(event, ensure_ascii=False)}" for event in exchange.events)
    fields = [f'  "request": {request}', f'  "events": [\n{events}\n  ]' if events else '  "events": []']
    if exchange.error is not None:
        fields.append(f'  "error": {json.dumps(msgspec.to_builtins(exchange.error), ensure_ascii=False)}')
    return "{\n" + ",\n".join(fields) + "\n}"
