"""Cassettes: recorded answers of a model in a file, which tests replay without the model."""

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
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.unions import Unknown
from antiphon.upstream.error_mapping import map_api_error
from antiphon.upstream.redaction import redact

# Fields that do not affect the answer.
_IGNORED_FIELDS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream", "stream_options", "user"}
)
_SECRET_FIELDS = frozenset({"authorization", "api_key", "api-key", "x-api-key", "proxy-authorization", "cookie"})
_REDACTED = "***"
_TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
_MAX_DIFF_LINES = 80


class CassetteMiss(AssertionError):
    """A request that is not on the cassette. The message shows the difference to the nearest recorded request."""


class _RecordedError(Struct, frozen=True):
    """An error that was raised, in its wire form."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


class _Recording(Struct, frozen=True, omit_defaults=True):
    """A request, its events, and the error that ended them, if any."""

    request: JsonObject
    events: list[JsonObject]
    error: _RecordedError | None = None


class _CassetteFile(Struct, frozen=True):
    version: Literal[1]
    exchanges: list[_Recording]


class Cassette:
    """A transport that records the traffic of another one, and replays it.

    `mode`: "replay" never calls the model, and raises CassetteMiss for an unrecorded request. "record" sends every
    request to `transport` and replaces its recording. "auto" sends only unrecorded requests.

    Requests are matched by content, in any order. A request that was recorded several times gets its answers in
    recorded order, and then the last one again. `normalise` may remove values that differ between runs, such as the
    date, from a request. Keys and credentials are never written.
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
            raise ConfigError('A cassette with mode "record" needs a transport.')
        if mode == "replay" and not self._path.exists():
            raise ConfigError(f"There is no cassette {self._path}: record it first.")
        self._recordings: dict[str, list[_Recording]] = {}
        for recording in _load(self._path):
            self._recordings.setdefault(_make_key(recording.request), []).append(recording)
        self._request_counts: dict[str, int] = {}
        # The key of the request that each response answered.
        self._keys_by_response: dict[str, str] = {}

    async def stream(self, request: JsonObject) -> Events:
        normalised = self._normalise(dict(request)) if self._normalise else request
        rendered = _render(normalised, self._keys_by_response)
        key = _make_key(rendered)
        count = self._request_counts.get(key, 0)
        self._request_counts[key] = count + 1
        if self._mode == "record" and count == 0:
            self._recordings.pop(key, None)
        recordings = self._recordings.get(key)
        if recordings and self._mode != "record":
            return self._replay(key, recordings[min(count, len(recordings) - 1)])
        if self._transport is None:
            raise CassetteMiss(self._explain_miss(rendered))
        try:
            events = await self._transport.stream(request)
        except AntiphonError as error:
            self._add(key, _Recording(rendered, [], _encode_error(error)))
            raise
        return self._record(key, rendered, events)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    def _replay(self, key: str, recording: _Recording) -> Events:
        if recording.error is not None and not recording.events:
            raise _decode_error(recording.error)
        return self._replay_events(key, recording)

    async def _replay_events(self, key: str, recording: _Recording) -> Events:
        for event in recording.events:
            self._note_response(key, event)
            yield (codec.decode_event(msgspec.json.encode(event)),)
        if recording.error is not None:
            raise _decode_error(recording.error)

    async def _record(self, key: str, rendered: JsonObject, events: Events) -> Events:
        recorded: list[JsonObject] = []
        failure: _RecordedError | None = None
        has_ended = False
        try:
            async with aclosing(events):
                async for batch in events:
                    for event in batch:
                        recorded.append(_encode_event(event))
                        self._note_response(key, recorded[-1])
                    yield batch
            has_ended = True
        except AntiphonError as error:
            failure = _encode_error(error)
            raise
        finally:
            # An answer that was not read to its end cannot be replayed.
            if has_ended or failure is not None or (recorded and recorded[-1]["type"] in _TERMINAL_EVENTS):
                self._add(key, _Recording(rendered, recorded, failure))

    def _note_response(self, key: str, event: JsonObject) -> None:
        response = event.get("response")
        if isinstance(response, dict) and isinstance(response.get("id"), str):
            self._keys_by_response[response["id"]] = key

    def _add(self, key: str, recording: _Recording) -> None:
        self._recordings.setdefault(key, []).append(recording)
        _save(self._path, [each for recordings in self._recordings.values() for each in recordings])

    def _explain_miss(self, rendered: JsonObject) -> str:
        nearest = _find_nearest(rendered, [recordings[0].request for recordings in self._recordings.values()])
        if nearest is None:
            return f"The cassette {self._path} is empty, and there is no transport to record from."
        difference = _show_difference(nearest, rendered)
        return (
            f"This request is not on the cassette {self._path}. Difference to the nearest recorded one:\n{difference}"
        )


# Requests


def _render(request: JsonObject, keys_by_response: Mapping[str, str]) -> JsonObject:
    """Return the request in a form that is equal in every run.

    Ids of items and calls are numbered in order. The id of a response is replaced by the key of its request.
    """
    rendered = {name: value for name, value in request.items() if name not in _IGNORED_FIELDS}
    previous = rendered.get("previous_response_id")
    if isinstance(previous, str) and previous in keys_by_response:
        rendered["previous_response_id"] = f"the response to {keys_by_response[previous]}"
    if isinstance(rendered.get("input"), list):
        numbers: dict[str, str] = {}
        rendered["input"] = [_number_ids(item, numbers) for item in rendered["input"]]
    redacted: JsonObject = _hide_secrets(rendered)
    return redacted


def _number_ids(item: Any, numbers: dict[str, str]) -> Any:
    if not isinstance(item, dict):
        return item
    numbered = dict(item)
    for name in ("id", "call_id", "approval_request_id"):
        if isinstance(item.get(name), str):
            numbered[name] = numbers.setdefault(item[name], f"id {len(numbers) + 1}")
    return numbered


def _hide_secrets(value: Any) -> Any:
    """Return the value with secret fields redacted, and all headers of `mcp` tools."""
    if isinstance(value, list):
        return [_hide_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    redacted = {
        name: _REDACTED if name.lower() in _SECRET_FIELDS and isinstance(each, str) else _hide_secrets(each)
        for name, each in value.items()
    }
    if value.get("type") == "mcp" and isinstance(value.get("headers"), dict):
        redacted["headers"] = dict.fromkeys(value["headers"], _REDACTED)
    return redacted


def _make_key(rendered: JsonObject) -> str:
    canonical = json.dumps(rendered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _find_nearest(rendered: JsonObject, recorded: Sequence[JsonObject]) -> JsonObject | None:
    """Return the recorded request that has the most lines in common with this one."""
    lines = _split_lines(rendered)
    return max(
        recorded,
        key=lambda each: difflib.SequenceMatcher(None, _split_lines(each), lines, autojunk=False).ratio(),
        default=None,
    )


def _show_difference(recorded: JsonObject, requested: JsonObject) -> str:
    old, new = _split_lines(recorded), _split_lines(requested)
    lines = list(difflib.unified_diff(old, new, "recorded", "requested", n=2, lineterm=""))
    if len(lines) > _MAX_DIFF_LINES:
        lines[_MAX_DIFF_LINES:] = [f"... and {len(lines) - _MAX_DIFF_LINES} more lines"]
    return "\n".join(lines)


def _split_lines(rendered: JsonObject) -> list[str]:
    return json.dumps(rendered, sort_keys=True, indent=2, ensure_ascii=False).splitlines()


# Events and errors


def _encode_event(event: Event | Unknown) -> JsonObject:
    encoded: JsonObject = _hide_secrets(msgspec.json.decode(codec.encode(event)))
    return encoded


def _encode_error(error: AntiphonError) -> _RecordedError:
    return _RecordedError(error.status, error.type, redact(error.message), error.code, error.param, error.retry_after)


def _decode_error(error: _RecordedError) -> AntiphonError:
    payload = {"message": error.message, "type": error.type, "code": error.code, "param": error.param}
    return map_api_error(error.status, payload, retry_after=error.retry_after)


# Files


def _load(path: Path) -> Sequence[_Recording]:
    if not path.exists():
        return []
    try:
        return read_json(path.read_bytes(), _CassetteFile).exchanges
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a cassette: {error}.") from None


def _save(path: Path, recordings: Sequence[_Recording]) -> None:
    """Write the file for readable diffs: one value of a request per line, and one event per line."""
    written = ",\n".join(textwrap.indent(_write_recording(recording), "    ") for recording in recordings)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{{\n  "version": 1,\n  "exchanges": [\n{written}\n  ]\n}}\n', "utf-8")
    temporary.replace(path)


def _write_recording(recording: _Recording) -> str:
    request = textwrap.indent(json.dumps(recording.request, indent=2, ensure_ascii=False), "  ").lstrip()
    events = ",\n".join(f"    {json.dumps(event, ensure_ascii=False)}" for event in recording.events)
    fields = [f'  "request": {request}', f'  "events": [\n{events}\n  ]' if events else '  "events": []']
    if recording.error is not None:
        fields.append(f'  "error": {json.dumps(msgspec.to_builtins(recording.error), ensure_ascii=False)}')
    return "{\n" + ",\n".join(fields) + "\n}"
