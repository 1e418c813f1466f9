"""DBOS's log, as a line now and then: left to itself, it tells at every try that its database is out of reach."""

import logging
import math
import re
import time
import warnings

_SECONDS = 60.0
# Of a line, what tells its kind.
_KIND = 40
_MOST_KINDS = 100
_ID = re.compile(r"resp_\w+")
_TRACEBACK = "Traceback (most recent call last):"
_FAILURE = re.compile(r"[\w.]+: ")
# A workflow that is cancelled, all of them when a server stops, one that another process goes on with: no faults.
_HARMLESS = re.compile(
    r"Asyncio task cancelled|Exception encountered in asynchronous workflow|Error executing workflow"
    r"|Workflow \S+ outcome was not recorded"
)


class Quiet(logging.Filter):
    """Lets one line of each kind pass in a minute, without its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line, *others = record.getMessage().splitlines() or [""]
        if line.endswith(_TRACEBACK):
            told = [other for other in others if _FAILURE.match(other)]
            line = line.removesuffix(_TRACEBACK) + (told[-1] if told else "")
        kind, now = _ID.sub("", line)[:_KIND], time.monotonic()
        if _HARMLESS.match(line) or now - self._told.get(kind, -math.inf) < _SECONDS:
            return False
        if len(self._told) >= _MOST_KINDS:
            self._told.clear()
        self._told[kind] = now
        record.msg, record.args, record.exc_info, record.exc_text = line, (), None, None
        return True


def quieten() -> None:
    """Have DBOS log like the rest of us. Before it is made: it would add a handler of its own to a bare logger."""
    warnings.filterwarnings("ignore", "coroutine .*execute_dequeued_workflow.* was never awaited", RuntimeWarning)
    logger = logging.getLogger("dbos")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.addFilter(Quiet())
