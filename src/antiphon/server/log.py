"""The log: one line for each request and whatever else happens, as text for people or as JSON for machines."""

import functools
import logging
import time

import msgspec
from msgspec import Struct

from antiphon.config import Settings
from antiphon.server.http import Exchange

access = logging.getLogger("antiphon.access")

_LONGEST = 256
# What other modules attach to a record with `extra`, so that it can be found by the response or request it is about.
_EXTRAS = ("request_id", "response_id")


class AccessLine(Struct, omit_defaults=True):
    """What is said of a request. It is the message of its log record, and each formatter writes it in its own way."""

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
        parts = [self.method, _printable(self.path), str(self.status), f"{self.ms}ms", f"{self.bytes}B"]
        for name in ("request_id", "response_id", "project", "model", "error"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name}={_printable(value)}")
        if self.stream:
            parts.append("stream")
        if self.warnings:
            parts.append(f"warnings={_printable('; '.join(self.warnings))}")
        return " ".join(parts)


def write_access(exchange: Exchange) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    line = AccessLine(
        request_id=exchange.id,
        method=exchange.method,
        path=exchange.path[:_LONGEST],
        status=exchange.status,
        ms=round(exchange.milliseconds, 2),
        bytes=exchange.sent,
        project=exchange.project or None,
        model=exchange.model[:_LONGEST] if exchange.model else None,
        response_id=exchange.response_id[:_LONGEST] if exchange.response_id else None,
        stream=exchange.stream,
        error=exchange.error_code,
        warnings=[warning[:_LONGEST] for warning in exchange.warnings],
    )
    access.handle(_record(line))


def write_line(line: AccessLine) -> None:
    """Write a line about something that is not an exchange of its own."""
    if access.isEnabledFor(logging.INFO):
        line.path, line.model = line.path[:_LONGEST], line.model and line.model[:_LONGEST]
        line.warnings = [warning[:_LONGEST] for warning in line.warnings]
        access.handle(_record(line))


# A record like all others but for what changes: to make one anew would look up threads, files and clocks each time.
_BLANK = vars(logging.LogRecord(access.name, logging.INFO, __file__, 0, None, (), None))


def _record(line: AccessLine) -> logging.LogRecord:
    record = logging.LogRecord.__new__(logging.LogRecord)
    vars(record).update(_BLANK, msg=line, created=time.time())
    return record


class TextFormatter(logging.Formatter):
    """A line a person can read."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_clock(record)} {record.levelname.lower()} {record.getMessage()}"
        for name, value in _extras(record).items():
            text += f" {name}={_printable(value)}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """A JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: object = record.msg
        if not isinstance(fields, AccessLine):
            fields = {"message": record.getMessage()} | _extras(record)
            if record.exc_info:
                fields["exception"] = self.formatException(record.exc_info)
        head = f'{{"time":"{_clock(record)}","level":"{record.levelname.lower()}","logger":"{record.name}",'
        return head + msgspec.json.encode(fields)[1:].decode()


def configure(settings: Settings) -> None:
    """Send this process's log to standard error, in the form and from the level that the settings name."""
    # What no line of ours shows need not be looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("antiphon").setLevel(settings.log_level.upper())
    # What uvicorn has to say is said by the application too, with the request it is about.
    debug = settings.log_level == "debug"
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if debug else logging.CRITICAL)


@functools.lru_cache(maxsize=1)
def _second(timestamp: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(timestamp))


def _clock(record: logging.LogRecord) -> str:
    second, rest = divmod(record.created, 1)
    return f"{_second(int(second))}.{int(rest * 1000):03d}Z"


def _extras(record: logging.LogRecord) -> dict[str, str]:
    return {name: str(getattr(record, name)) for name in _EXTRAS if hasattr(record, name)}


def _printable(text: str) -> str:
    """Text that a client chose, on one line and in one word: it cannot forge a line or a field of the log."""
    return text if text.isprintable() and " " not in text else ascii(text)
