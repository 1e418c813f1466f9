"""Calls without streaming: the upstream sends the whole answer at once.

Nothing is sent while the model writes, so a gateway between here and the model may give up or close the connection.
Some servers reject such calls. If the same call then succeeds with streaming, the calls of its project are streamed
for a while. Other projects are not affected, because the content of a request can cause such a failure.
"""

import logging
import math
import re
from collections.abc import Callable

from antiphon.bounds import remove_oldest
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.retry import is_outage

STREAMING_SECONDS = 3600.0
"""Time during which an upstream is called with streaming after a call without it failed."""

# Added to the connect timeout: a call that fails sooner was not cut off for its silence.
_SILENT_SECONDS = 5.0
_MAX_PROJECTS = 10_000
# "This model only supports stream mode", "Stream must be set to true". Our own messages contain "upstream".
_STREAM = re.compile(r"\bstream", re.IGNORECASE)

logger = logging.getLogger(__name__)


class WholeAnswers:
    """Decides if an upstream can be called without streaming. `name` is the backend's name in the configuration."""

    def __init__(self, name: str, options: UpstreamOptions, *, now: Callable[[], float]) -> None:
        self._name = name
        self._now = now
        self._silent_seconds = options.connect_timeout + _SILENT_SECONDS
        self._always_stream = options.always_stream
        self._streaming_until: dict[str, float] = {}  # by project

    def are_possible(self, project: str) -> bool:
        return not self._always_stream and self._now() >= self._streaming_until.get(project, -math.inf)

    def may_need_streaming(self, error: AntiphonError, *, seconds: float) -> bool:
        """Return True if a call may have failed because it was not streamed. `seconds` is the time that it took."""
        if isinstance(error, InvalidRequest):
            return _STREAM.search(error.message) is not None
        return is_outage(error) and error.retry_after is None and seconds >= self._silent_seconds

    def require_streaming(self, project: str, error: AntiphonError) -> None:
        """Stream the later calls of a project: a call failed with this error, and succeeded with streaming."""
        if not self.are_possible(project):
            return
        self._streaming_until.pop(project, None)
        self._streaming_until[project] = self._now() + STREAMING_SECONDS
        remove_oldest(self._streaming_until, _MAX_PROJECTS)
        logger.warning(
            "backend %s: an answer without streaming failed: %s Answers of this project are streamed for the next "
            "hour. To stream all answers, set always_stream.",
            self._name,
            error.message,
        )
