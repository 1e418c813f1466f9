"""A running server, asked over HTTP with nothing but the standard library."""

import http.client
import json
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from antiphon.errors import AntiphonError
from antiphon.protocol.codec import decode_event, encode
from antiphon.protocol.events import Event
from antiphon.protocol.prompt import Prompt, PromptDefinition, PromptSummary
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import SseDecoder

CONNECT_SECONDS = 5
SILENCE_SECONDS = 600

Events = Generator[Event | Unknown, None, None]


T = TypeVar("T")


class PromptList(msgspec.Struct):
    data: list[PromptSummary]


class ServedModel(msgspec.Struct, frozen=True):
    """What a server tells of a model. Not every server knows how many tokens one can read."""

    id: str
    context_window: int | None = None


class ModelList(msgspec.Struct):
    data: list[ServedModel]


class ServerUnreachable(AntiphonError):
    """Nothing answers at the server's address."""


class ServerClient:
    """The server at `url`, with or without `/v1` at its end. `key` is sent with every request if there is one."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._secure, self._host, self._port, self._path = _split(self.url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """The ids of the models it serves."""
        return [model.id for model in self.served_models()]

    def served_models(self) -> list[ServedModel]:
        with self._exchange("GET", "/v1/models", None) as reply:
            try:
                return msgspec.json.decode(reply.read(), type=ModelList).data
            except msgspec.DecodeError:
                raise AntiphonError(f"What answers at {self.url} does not list models: is it an API server?") from None

    def define_prompt(self, definition: PromptDefinition) -> Prompt:
        with self._exchange("POST", "/v1/prompts", encode(definition)) as reply:
            return self._decode(reply, Prompt)

    def prompts(self) -> list[PromptSummary]:
        """Every version of every prompt."""
        with self._exchange("GET", "/v1/prompts", None) as reply:
            return self._decode(reply, PromptList).data

    def prompt(self, prompt_id: str, *, version: str | None = None) -> Prompt:
        query = "" if version is None else f"?version={quote(version, safe='')}"
        with self._exchange("GET", f"/v1/prompts/{quote(prompt_id, safe='')}{query}", None) as reply:
            return self._decode(reply, Prompt)

    def stream(self, request: CreateRequest) -> Events:
        """The events of a streamed response, as they come. Closing the generator hangs up, and the model stops."""
        with self._exchange("POST", "/v1/responses", encode(request)) as reply:
            decoder = SseDecoder()
            while chunk := reply.read1(1 << 16):
                for message in decoder.feed(chunk):
                    if message.data == b"[DONE]":
                        return
                    yield decode_event(message.data)

    def close(self) -> None:
        """Nothing to release: every question has a connection of its own."""

    def _decode(self, reply: http.client.HTTPResponse, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(reply.read(), type=kind)
        except msgspec.DecodeError:
            raise AntiphonError(f"What answers at {self.url} does not keep prompts: is it an Antiphon?") from None

    @contextmanager
    def _exchange(self, method: str, path: str, body: bytes | None) -> Generator[http.client.HTTPResponse, None, None]:
        with closing(self._connect()) as connection:
            try:
                connection.request(method, f"{self._path}{path}", body, self._headers)
                with closing(connection.getresponse()) as reply:
                    if reply.status != http.HTTPStatus.OK:
                        raise _read_error(reply)
                    yield reply
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                raise AntiphonError(f"The connection to {self.url} broke: {_reason(error)}.") from None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ServerUnreachable(f"Nothing answers at {self.url}: {error.strerror or error}.") from None
        connection.sock.settimeout(SILENCE_SECONDS)
        return connection


def _split(url: str) -> tuple[bool, str, int | None, str]:
    """Whether it is secured, the host, the port and the path."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.scheme == "https", parts.hostname, parts.port, parts.path
    except ValueError:
        pass  # brackets or a port that are none
    raise AntiphonError(f"{url!r} is not the address of a server: write it as http://HOST:PORT.")


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | ConnectionResetError | BrokenPipeError):
        return "the server hung up"
    return str(error) or type(error).__name__


def _read_error(reply: http.client.HTTPResponse) -> AntiphonError:
    """The server's refusal in its own words."""
    try:
        message: Any = json.loads(reply.read())["error"]["message"]
    except (ValueError, TypeError, KeyError):
        message = f"The server answers {reply.status} {reply.reason}."
    hint = (
        " Name the variable that holds your key with --key-env." if reply.status == http.HTTPStatus.UNAUTHORIZED else ""
    )
    return AntiphonError(f"{message}{hint}")
