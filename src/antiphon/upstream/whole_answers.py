"""Calls without streaming: the upstream sends the whole answer at once.

Nothing is sent while the model writes, so a gateway between here and the model may give up or close the connection.
Some servers reject such calls. After either failure the upstream is called with streaming for a while.
"""

import logging
import math
import re
from collections.abc import Callable

from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.retry import is_outage

STREAMING_SECONDS = 3600.0
"""Time during which an upstream is called with streaming after a call without it failed."""

# Added to the connect timeout: a call that fails sooner was not cut off for its silence.
_SILENT_SECONDS = 5.0
# "This model only supports stream mode", "Stream must be set to true". Our own messages contain "upstream".
_STREAM = re.compile(r"\bstream", re.IGNORECASE)

logger = logging.getLogger(__name__)


class WholeAnswers:
    """Decides if an upstream can be called without streaming. `name` is the backend's name in the configuration."""

    def __init__(self, name: str, options: UpstreamOptions, *, now: Callable[[], float]) -> None:
        self._name = name
        self._now = now
        self._silent_seconds = options.connect_timeout + _SILENT_SECONDS
        self._streaming_until = math.inf if options.always_stream else -math.inf

    @property
    def are_possible(self) -> bool:
        return self._now() >= self._streaming_until

    def note_failure(self, error: AntiphonError, *, seconds: float) -> bool:
        """Return True if a call without streaming failed because of that. `seconds` is the time that it took.

        Later calls are then streamed.
        """
        is_rejected = isinstance(error, InvalidRequest) and _STREAM.search(error.message) is not None
        is_cut_off = is_outage(error) and error.retry_after is None and seconds >= self._silent_seconds
        if not is_rejected and not is_cut_off:
            return False
        self._streaming_until = self._now() + STREAMING_SECONDS
        logger.warning(
            "backend %s: no answer without streaming: %s Streaming for the next hour; `always_stream` does so always.",
            self._name,
            error.message,
        )
        return True
