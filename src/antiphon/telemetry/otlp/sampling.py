"""Samplers of traces: OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG."""

import logging

from antiphon.telemetry.environment import read_variable

logger = logging.getLogger(__name__)

_SAMPLERS = ("always_on", "always_off", "traceidratio")
_PARENT_BASED = "parentbased_"
_DEFAULT = "parentbased_always_on"
# The last 64 bits of the trace id decide, as in the SDK of OpenTelemetry. The processes of a trace must agree.
_ID_RANGE = 1 << 64


class Sampler:
    """Decides which traces are recorded. `ratio` is the share of the traces that begin here.

    `records_new` is True if all of these are recorded.
    """

    def __init__(self, ratio: float, *, follows_parent: bool) -> None:
        self._bound = round(ratio * _ID_RANGE)
        self._follows_parent = follows_parent
        self.records_new = self._bound == _ID_RANGE

    def decide(self, trace_id: int, *, is_parent_sampled: bool | None) -> bool:
        """Return True if the trace is recorded. `is_parent_sampled` is None for a span without a parent."""
        if is_parent_sampled is not None and self._follows_parent:
            return is_parent_sampled
        return trace_id % _ID_RANGE < self._bound


def make_sampler() -> Sampler:
    """Return the sampler of the environment. A value that is not valid is a warning."""
    name = read_variable("OTEL_TRACES_SAMPLER").lower() or _DEFAULT
    if name.removeprefix(_PARENT_BASED) not in _SAMPLERS:
        logger.warning("OTEL_TRACES_SAMPLER: %r is not a known sampler; using %s", name, _DEFAULT)
        name = _DEFAULT
    root = name.removeprefix(_PARENT_BASED)
    ratio = _read_ratio() if root == "traceidratio" else float(root == "always_on")
    return Sampler(ratio, follows_parent=name.startswith(_PARENT_BASED))


def _read_ratio() -> float:
    text = read_variable("OTEL_TRACES_SAMPLER_ARG")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if 0 <= ratio <= 1:
        return ratio
    logger.warning("OTEL_TRACES_SAMPLER_ARG: %r is not a number from 0 to 1; using 1", text)
    return 1.0
