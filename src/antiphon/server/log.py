"""The log: one line per request and all other records of the process, as text or as JSON."""

import functools
import logging
import time
from typing import TYPE_CHECKING, TextIO

import msgspec
from msgspec import Struct

from antiphon.config.settings import DEFAULT_PROJECT, Settings
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


class AccessLine(Struct, omit_defaults=True):
    """The fields of an access log line. It is the message of the log record; each formatter writes it in its format.

    The text must fit a terminal. So it shows one id, that of the response if there is one, and shortens long ids, also
    those in the path. It omits the key and the default project. JSON has all fields.
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
    key_id: str | None = None
    stream: bool = False
    error: str | None = None
    warnings: list[str] = []

    def __str__(self) -> str:
        return self.format()

    def format(self) -> str:
        """Return the line as text."""
        path = self.path if len(self.path) <= _MAX_SHOWN_PATH else _shorten_path(self.path)
        text = f"{self.method} {_escape_name(path)} {self.status} {self.ms}ms {self.bytes}B"
        if self.response_id is None:
            text += f" request_id={_shorten(self.request_id)}"
        elif path is self.path or self.response_id not in self.path:
            text += f" response_id={_escape(_shorten(self.response_id))}"
        if self.project is not None and self.project != DEFAULT_PROJECT:
            text += f" project={_escape_name(self.project)}"
        if self.model is not None:
            text += f" model={_escape_name(self.model)}"
        if self.error is not None:
            text += f" error={_escape(self.error)}"
        if self.stream:
            text += " stream"
        if self.warnings:
            text += f" warnings={_escape('; '.join(self.warnings))}"
        return text


class LogMessage(Struct, omit_defaults=True):
    """The fields of any other log line. Modules attach the ids to a record with `extra`, to find it by them."""

    message: str
    request_id: str | None = None
    response_id: str | None = None
    exception: str | None = None

    def format(self) -> str:
        """Return the line as text."""
        text = self.message
        if self.request_id is not None:
            text += f" request_id={_escape(self.request_id)}"
        if self.response_id is not None:
            text += f" response_id={_escape(self.response_id)}"
        return text if self.exception is None else f"{text}\n{self.exception}"


def log_http_request(http_request: "HttpRequest") -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    line = AccessLine(
        request_id=http_request.id,
        method=http_request.method,
        path=http_request.path[:_MAX_LENGTH],
        status=http_request.status,
        ms=round(http_request.elapsed_ms * 100) / 100,  # `round` with digits costs ten times as much
        bytes=http_request.bytes_sent,
        project=http_request.project or None,
        model=http_request.model[:_MAX_LENGTH] if http_request.model else None,
        response_id=http_request.response_id[:_MAX_LENGTH] if http_request.response_id else None,
        key_id=http_request.key_id or None,
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


# The constant fields of a record. `logging` would look up the thread, the file and the clock for each record.
_RECORD_TEMPLATE = vars(logging.LogRecord(access.name, logging.INFO, __file__, 0, None, (), None))


def _write(line: AccessLine) -> None:
    handler = _find_only_handler()
    if handler is None or handler.lock is None:
        access.handle(_make_record(line))
        return
    with handler.lock:
        handler.emit_line(line)


def _find_only_handler() -> "LineHandler | None":
    """Return our handler if no other one gets access lines. Passing a line through `logging` doubles its cost."""
    handlers = logging.root.handlers
    if access.handlers or access.filters or _package.handlers or len(handlers) != 1:
        return None
    handler = handlers[0]
    if type(handler) is not LineHandler or handler.filters or handler.level > logging.INFO:
        return None
    return handler if access.propagate and _package.propagate else None


def _make_record(line: AccessLine) -> logging.LogRecord:
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__ = {**_RECORD_TEMPLATE, "msg": line, "created": time.time()}
    return record


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes a record as one line. Unlike the base class, it takes the lock only once for a record."""

    def emit_line(self, line: AccessLine) -> None:
        """Write an access line without a record. The caller holds the lock."""
        formatter = self.formatter
        if not isinstance(formatter, LineFormatter):
            self.emit(_make_record(line))
            return
        try:
            self.stream.write(f"{formatter.format_line(line, time.time(), 'info', access.name)}\n")
            self.stream.flush()
        except Exception:
            self.handleError(_make_record(line))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) if self.formatter is None else self.formatter.format(record)
            self.stream.write(f"{text}\n")
            self.stream.flush()
        except Exception:
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """Formats a record. An access line needs no record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = record.msg if isinstance(record.msg, AccessLine) else self._read_message(record)
        return self.format_line(fields, record.created, record.levelname.lower(), record.name)

    def format_line(self, fields: AccessLine | LogMessage, created: float, level: str, name: str) -> str:
        """Format the fields of a line. `name` is the name of its logger."""
        raise NotImplementedError

    def _read_message(self, record: logging.LogRecord) -> LogMessage:
        message = LogMessage(record.getMessage())
        for name in ("request_id", "response_id"):
            if hasattr(record, name):
                setattr(message, name, str(getattr(record, name)))
        if record.exc_info:
            message.exception = self.formatException(record.exc_info)
        return message


class TextFormatter(LineFormatter):
    """Formats a record as a line of text."""

    def format_line(self, fields: AccessLine | LogMessage, created: float, level: str, name: str) -> str:
        return f"{_format_time(created)} {level} {fields.format()}"


class JsonFormatter(LineFormatter):
    """Formats a record as a JSON object on one line."""

    def format_line(self, fields: AccessLine | LogMessage, created: float, level: str, name: str) -> str:
        head = f'{{"time":"{_format_time(created)}","level":"{level}","logger":"{name}",'
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


_THOUSANDTHS = [f"{number:03d}" for number in range(1000)]


@functools.lru_cache(maxsize=1)
def _format_second(timestamp: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(timestamp))


def _format_time(created: float) -> str:
    second = int(created)
    return f"{_format_second(second)}.{_THOUSANDTHS[int((created - second) * 1000)]}Z"


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


# For names that repeat from line to line. The cached texts are short.
_escape_name = functools.lru_cache(maxsize=256)(_escape)
