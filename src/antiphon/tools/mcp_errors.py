"""Errors of the packages `mcp` and `httpx2` as texts without credentials."""

import logging

from antiphon.errors import AntiphonError

_MAX_LOGGED = 500
_UNPARSED = "Failed to parse JSON response: "
_INVALID_JSON = "The answer of the server is not a valid message of JSON-RPC."


def describe_error(error: BaseException) -> str:
    """Return an error as one line for the log, without credentials."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, AntiphonError) else describe_by_type(error)
    # Further lines of an error of Pydantic have the data of the server.
    return text.partition("\n")[0][:_MAX_LOGGED]


class _OneLineFilter(logging.Filter):
    """Replaces a traceback by the reason. The `mcp` package logs one for each malformed answer of a server."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.msg, record.args = "%s: %s", (record.getMessage(), describe_error(error))
            record.exc_info = None
        return True


one_line = _OneLineFilter()


def describe_by_type(error: BaseException) -> str:
    """Return the text of an error. One with a URL or a header, which may contain credentials, is left out."""
    import httpx2
    from mcp import MCPError

    if isinstance(error, MCPError):
        # The package adds the errors of Pydantic, with the data of the server.
        return _INVALID_JSON if error.message.startswith(_UNPARSED) else error.message
    if isinstance(error, RuntimeError) and is_invalid_answer(error):
        text = str(error).partition("\n")[0]
        # The rest is advice to users of the package.
        return text.partition(";")[0] if text.startswith("Server returned InputRequiredResult") else text
    if is_invalid_answer(error):
        first = error.errors(include_url=False, include_input=False)[0]  # type: ignore[attr-defined]
        path = ".".join(map(str, first["loc"]))
        return f"The answer of the server is invalid: {f'{path}: ' if path else ''}{first['msg']}"
    if isinstance(error, httpx2.HTTPStatusError):
        return f"{type(error).__name__}: the server answered with status {error.response.status_code}"
    return type(error).__name__ if _has_credentials(error) else f"{type(error).__name__}: {error}"


def is_invalid_answer(error: BaseException) -> bool:
    """Return True if an answer of the server does not match the protocol, or the schema of the tool."""
    from pydantic import ValidationError

    return isinstance(error, ValidationError) or (isinstance(error, RuntimeError) and _is_raised_by_package(error))


def _is_raised_by_package(error: BaseException) -> bool:
    """Return True if the `mcp` package raised the error, and not a package that it uses."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")).startswith("mcp.")


def get_cause(error: BaseException) -> BaseException | None:
    """Return the cause for the log, unless its text has a URL or a header."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return None if _has_credentials(error) else error


def _has_credentials(error: BaseException) -> bool:
    """Return True if the text of an error has the URL or a header of the request."""
    import httpx2

    kinds = httpx2.HTTPStatusError | httpx2.InvalidURL | httpx2.LocalProtocolError | httpx2.UnsupportedProtocol
    return isinstance(error, kinds)
