"""HTTP client for a running server. It uses only the standard library, which keeps the start of commands fast."""

import http.client
import json
import secrets
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from antiphon.cli.settings import load_settings, read_key, server_url
from antiphon.config.readers import hide_password
from antiphon.errors import AntiphonError
from antiphon.protocol.codec import decode_event, encode
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import read_json
from antiphon.protocol.prompt import Prompt, PromptDefinition, PromptSummary
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.stream.sse import SseDecoder

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

CONNECT_SECONDS = 5
_BOUNDARY = f"antiphon-{secrets.token_hex(16)}"
_UPLOAD_BYTES = 256 * 1024
READ_SECONDS = 600

Events = Generator[Event | Unknown, None, None]
T = TypeVar("T")


class ListedModel(msgspec.Struct, frozen=True):
    """A model in the list of a server. Not every server reports the context window."""

    id: str
    context_window: int | None = None


class ServerUnreachable(AntiphonError):
    """No server accepts connections at the address."""


class _ModelList(msgspec.Struct):
    data: list[ListedModel]


class _PromptList(msgspec.Struct):
    data: list[PromptSummary]


class ServerClient:
    """Client for the server at `url`, with or without `/v1` at the end. `key` is sent with every request."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.shown_url = hide_password(self.url)
        self.key = key
        self._secure, self._host, self._port, self._path = _split_url(self.url)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """Return the ids of the served models."""
        return [model.id for model in self.served_models()]

    def served_models(self) -> list[ListedModel]:
        with self._send_request("GET", "/v1/models", None) as reply:
            try:
                return read_json(reply.read(), _ModelList).data
            except msgspec.DecodeError:
                raise AntiphonError(
                    f"The server at {self.shown_url} does not list models. Is it an API server?"
                ) from None

    def define_prompt(self, definition: PromptDefinition) -> Prompt:
        with self._send_request("POST", "/v1/prompts", encode(definition)) as reply:
            return self._decode(reply, Prompt)

    def prompts(self) -> list[PromptSummary]:
        """Return all versions of all prompts."""
        with self._send_request("GET", "/v1/prompts", None) as reply:
            return self._decode(reply, _PromptList).data

    def prompt(self, prompt_id: str, *, version: str | None = None) -> Prompt:
        query = "" if version is None else f"?version={quote(version, safe='')}"
        with self._send_request("GET", f"/v1/prompts/{quote(prompt_id, safe='')}{query}", None) as reply:
            return self._decode(reply, Prompt)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request with a JSON body, if there is one, and return the JSON of the reply."""
        with self._send_request(method, path, None if body is None else encode(body)) as reply:
            return self._decode(reply, Any)

    def upload_file(self, path: Path, *, purpose: str, on_progress: Callable[[int], None]) -> Any:
        """Upload a file without reading it into memory at once, and return the file object."""
        with path.open("rb") as file:
            head, tail = _make_form(path.name, purpose)
            size = path.stat().st_size
            headers = {
                "Content-Type": f"multipart/form-data; boundary={_BOUNDARY}",
                "Content-Length": str(len(head) + size + len(tail)),
            }
            body = _read_parts(head, file, tail, on_progress)
            with self._send_request("POST", "/v1/files", body, headers) as reply:
                return self._decode(reply, Any)

    def stream(self, request: CreateRequest) -> Events:
        """Yield the events of a streamed response. Closing the generator disconnects, which cancels the response."""
        with self._send_request("POST", "/v1/responses", encode(request)) as reply:
            decoder = SseDecoder()
            while chunk := reply.read1(1 << 16):
                for message in decoder.feed(chunk):
                    if message.data == b"[DONE]":
                        return
                    yield decode_event(message.data)

    def close(self) -> None:
        """Do nothing: every request has its own connection."""

    def _decode(self, reply: http.client.HTTPResponse, kind: type[T]) -> T:
        try:
            return read_json(reply.read(), kind)
        except msgspec.DecodeError:
            message = f"The server at {self.shown_url} sent an answer that is not valid. Is it an Antiphon server?"
            raise AntiphonError(message) from None

    @contextmanager
    def _send_request(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with closing(self._connect()) as connection:
            try:
                connection.request(method, f"{self._path}{path}", body, {**self._headers, **(headers or {})})
                with closing(connection.getresponse()) as reply:
                    if reply.status != http.HTTPStatus.OK:
                        raise _read_error(reply)
                    yield reply
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                raise AntiphonError(f"The connection to {self.shown_url} was lost: {_describe_cause(error)}.") from None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ServerUnreachable(f"Cannot connect to {self.shown_url}: {error.strerror or error}.") from None
        connection.sock.settimeout(READ_SECONDS)
        return connection


def find_running_server(settings: "Settings", *, key: str | None) -> ServerClient | None:
    """Return a client for the configured server, or None if it does not run."""
    client = _make_client(settings, key)
    try:
        client.models()
    except ServerUnreachable:
        return None
    return client


def connect(arguments: Namespace) -> ServerClient:
    """Return a client for the server that `--url` names, else for the configured server."""
    key = read_key(arguments)
    return ServerClient(arguments.url, key=key) if arguments.url else _make_client(load_settings(arguments), key)


def _make_client(settings: "Settings", key: str | None) -> ServerClient:
    # The first key of the settings belongs to this server and is sent to no other address.
    own_key = settings.api_keys[0].key if settings.api_keys else None
    return ServerClient(server_url(settings), key=key or own_key)


def _split_url(url: str) -> tuple[bool, str, int | None, str]:
    """Return whether the URL uses TLS, the host, the port and the path."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.scheme == "https", parts.hostname, parts.port, parts.path
    except ValueError:
        pass  # invalid brackets or port
    raise AntiphonError(f"{hide_password(url)!r} is not a valid server URL: use http://HOST:PORT.")


def _describe_cause(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | ConnectionResetError | BrokenPipeError):
        return "the server closed the connection"
    return str(error) or type(error).__name__


def _read_error(reply: http.client.HTTPResponse) -> AntiphonError:
    """Return the error that a reply contains."""
    try:
        message: Any = json.loads(reply.read())["error"]["message"]
    except (ValueError, TypeError, KeyError):
        message = f"The server returned {reply.status} {reply.reason}."
    if reply.status == http.HTTPStatus.UNAUTHORIZED:
        message = f"{message} Use --key-env to name the environment variable with your API key."
    return AntiphonError(message)


def _make_form(filename: str, purpose: str) -> tuple[bytes, bytes]:
    """Return the bytes of a form before and after its file."""
    name = filename.replace("\\", "\\\\").replace('"', "%22")
    head = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    )
    return head.encode(), f"\r\n--{_BOUNDARY}--\r\n".encode()


def _read_parts(head: bytes, file: IO[bytes], tail: bytes, on_progress: Callable[[int], None]) -> Iterator[bytes]:
    yield head
    done = 0
    while data := file.read(_UPLOAD_BYTES):
        yield data
        done += len(data)
        on_progress(done)
    yield tail
