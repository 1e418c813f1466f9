"""The beginning of an event stream, made while the upstream works on the request."""

from collections.abc import Callable

from antiphon.engine.background.responses import BackgroundRun
from antiphon.engine.respond.run import Run
from antiphon.offload import is_large
from antiphon.protocol.request import CreateRequest
from antiphon.server.dialect import OutputDialect
from antiphon.server.http import HttpRequest
from antiphon.server.include import add_include
from antiphon.stream.sse import encode_start


class StreamStart:
    """The head and the first events of a stream.

    `run` is the run that they belong to, `dialect` the form of its events, and `chunk` the encoded first ones.
    `is_sent` is True after they were sent.
    """

    __slots__ = ("_http_request", "_include", "chunk", "dialect", "is_sent", "run")

    def __init__(self, http_request: HttpRequest, request: CreateRequest, dialect: OutputDialect) -> None:
        self._http_request = http_request
        self._include = request.include
        self.dialect = dialect
        self.run: Run | BackgroundRun | None = None
        self.chunk = b""
        self.is_sent = False

    def prepare(self, run: Run) -> Callable[[], bool] | None:
        """Encode the first events of a run that may still be refused. Return a function that sends them."""
        if is_large():  # encoded in a thread, when the run begins
            return None
        self.run = run
        if run.begun.tools:
            self.dialect = add_include(self.dialect, run.begun, self._include)
        self.chunk = encode_start(self.dialect.adapt_events(run.start()))
        return self._send

    def _send(self) -> bool:
        """Send the first events if that needs no waiting, and return True if they were sent."""
        assert self.run is not None
        http_request = self._http_request
        model, headers, warnings = http_request.model, len(http_request.extra_headers), len(http_request.warnings)
        self._describe(self.run)
        self.is_sent = http_request.begin_now(self.chunk)
        if not self.is_sent:  # the run may still be refused, or made again
            http_request.model, http_request.response_id = model, None
            del http_request.extra_headers[headers:], http_request.warnings[warnings:]
        return self.is_sent

    def accept(self, run: Run | BackgroundRun) -> None:
        """Continue with the run that the engine has returned."""
        if self.is_sent:
            return
        if self.run is None and run.response.tools:
            self.dialect = add_include(self.dialect, run.response, self._include)
        if run is not self.run:
            self.run, self.chunk = run, b""
        self._describe(run)

    def _describe(self, run: Run | BackgroundRun) -> None:
        http_request, response = self._http_request, run.response
        http_request.describe_response(response.model, response.id, run.warnings)
        http_request.add_served_by(response.served_by)
