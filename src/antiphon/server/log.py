"""The log: one line per request and all other records of the process, as text or as JSON."""

import functools
import logging
import time
from typing import TYPE_CHECKING, TextIO

import msgspec
from msgspec import Struct

from antiphon.config import DEFAULT_PROJECT, Settings
from antiphon.telemetry.current_trace import CurrentTrace

if TYPE_CHECKING:
    from antiphon.server.http import HttpRequest

access = logging.getLogger("antiphon.access")
_package = logging.getLogger("antiphon")

_MAX_LENGTH = 256
_MAX_SHOWN_ID = 12
_MAX_SHOWN_PATH = 32
_MAX_SHOWN_SEGMENT = 24
_MAX_SEGMENTS = 8
# Fields that other modules attach to a record with `extra`, to find it by its response or request.
_EXTRA_FIELDS = ("request_id", "response_id")


class AccessLine(Struct, omit_defaults=True):
    """The fields of an access log line. It is the message of the log record; each formatter writes it in its format.

    The text must fit a terminal. So it shows one id, that of the response if there is one, and shortens long ids, also
    those in the path. It omits the default project. JSON has all fields.
    """

    request_id: str
    method: str
    path: str
    status: int
    ms: float
    bytes: int
    project: str | None = None
    model: str | None = None
    response_id: str | None = None
    stream: bool = False
    error: str | None = None
    warnings: list[str] = []

    def __str__(self) -> str:
        path = self.path if len(self.path) <= _MAX_SHOWN_PATH else _shorten_path(self.path)
        text = f"{self.method} {_escape(path)} {self.status} {self.ms}ms {self.bytes}B"
        if self.response_id is None:
            text += f" request_id={_shorten(self.request_id)}"
        elif path is self.path or self.response_id not in self.path:
            text += f" response_id={_escape(_shorten(self.response_id))}"
        if self.project is not None and self.project != DEFAULT_PROJECT:
            text += f" project={_escape(self.project)}"
        if self.model is not None:
            text += f" model={_escape(self.model)}"
        if self.error is not None:
            text += f" error={_escape(self.error)}"
        if self.stream:
            text += " stream"
        if self.warnings:
            text += f" warnings={_escape('; '.join(self.warnings))}"
        return text


def log_http_request(http_request: "HttpRequest") -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    line = AccessLine(
        request_id=http_request.id,
        method=http_request.method,
        path=http_request.path[:_MAX_LENGTH],
        status=http_request.status,
        ms=round(http_request.elapsed_ms, 2),
        bytes=http_request.bytes_sent,
        project=http_request.project or None,
        model=http_request.model[:_MAX_LENGTH] if http_request.model else None,
        response_id=http_request.response_id[:_MAX_LENGTH] if http_request.response_id else None,
        stream=http_request.stream,
        error=http_request.error_code,
    )
    if http_request.warnings:
        line.warnings = [warning[:_MAX_LENGTH] for warning in http_request.warnings]
    _write(line)


def log_line(line: AccessLine) -> None:
    """Log a response that has no HTTP request of its own, such as one on a WebSocket."""
    if access.isEnabledFor(logging.INFO):
        line.path, line.model = line.path[:_MAX_LENGTH], line.model and line.model[:_MAX_LENGTH]
        line.warnings = [warning[:_MAX_LENGTH] for warning in line.warnings]
        _write(line)


# The constant fields of a record. Making each record anew would look up threads, files and clocks every time.
_RECORD_TEMPLATE = vars(logging.LogRecord(access.name, logging.INFO, __file__, 0, None, (), None))


def _write(line: AccessLine) -> None:
    """Write a line. If our handler is the only one, the way through `logging` is skipped: it costs as much again."""
    record = _make_record(line)
    handlers = logging.root.handlers
    has_others = access.handlers or access.filters or _package.handlers or len(handlers) != 1
    if has_others or not (access.propagate and _package.propagate):
        access.handle(record)
        return
    handler = handlers[0]
    if type(handler) is not LineHandler or handler.filters or handler.level > logging.INFO or handler.lock is None:
        access.handle(record)
        return
    with handler.lock:
        handler.emit(record)


def _make_record(line: AccessLine) -> logging.LogRecord:
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__ = {**_RECORD_TEMPLATE, "msg": line, "created": time.time()}
    return record


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes a record as one line. Unlike the base class, it takes the lock only once for a record."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) if self.formatter is None else self.formatter.format(record)
            self.stream.write(f"{text}\n")
            self.stream.flush()
        except Exception:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """Formats a record as a line of text."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, AccessLine):
            return f"{_format_time(record)} {record.levelname.lower()} {record.msg}"
        text = f"{_format_time(record)} {record.levelname.lower()} {record.getMessage()}"
        for name, value in _read_extras(record).items():
            text += f" {name}={_escape(value)}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: object = record.msg
        if not isinstance(fields, AccessLine):
            fields = {"message": record.getMessage()} | _read_extras(record)
            if record.exc_info:
                fields["exception"] = self.formatException(record.exc_info)
        head = f'{{"time":"{_format_time(record)}","level":"{record.levelname.lower()}","logger":"{record.name}",'
        ids = None if CurrentTrace.read_ids is None else CurrentTrace.read_ids()
        if ids is not None:
            head += f'"trace_id":"{ids[0]}","span_id":"{ids[1]}",'
        return head + msgspec.json.encode(fields)[1:].decode()


def configure_logging(settings: Settings) -> None:
    """Send the log of this process to standard error, in the configured format and from the configured level."""
    # No log line shows threads or processes, so records need not look them up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LineHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("antiphon").setLevel(settings.log_level.upper())
    # The application logs the same errors as uvicorn, with the request id.
    debug = settings.log_level == "debug"
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if debug else logging.CRITICAL)


@functools.lru_cache(maxsize=1)
def _format_second(timestamp: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(timestamp))


def _format_time(record: logging.LogRecord) -> str:
    second = int(record.created)
    return f"{_format_second(second)}.{int((record.created - second) * 1000):03d}Z"


def _read_extras(record: logging.LogRecord) -> dict[str, str]:
    return {name: str(getattr(record, name)) for name in _EXTRA_FIELDS if hasattr(record, name)}


def _shorten(identifier: str) -> str:
    """Return the end of a long id. Its digits are random; the beginning of a response id is the time."""
    return identifier if len(identifier) <= _MAX_SHOWN_ID else f"…{identifier[-_MAX_SHOWN_ID:]}"


def _shorten_path(path: str) -> str:
    """Return a path with only the ends of long segments, which are ids."""
    segments = path.split("/", _MAX_SEGMENTS)
    return "/".join(_shorten(each) if len(each) > _MAX_SHOWN_SEGMENT else each for each in segments)


def _escape(text: str) -> str:
    """Escape text that a client chose, so that it cannot forge a line or a field of the log."""
    return text if text.isprintable() and " " not in text else ascii(text)
