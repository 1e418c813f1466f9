"""Selection of the runs that an owner claims, shared by the SQL stores."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from antiphon.store.limits import RunLimits

# Maximum delay of a run that was returned to the queue. A time further in the future means that the clock was set back.
MAX_DELAY_SECONDS = 60.0


def is_delayed(free_since: float, now: float) -> bool:
    """Return True if a run without an owner must not be claimed yet. `free_since` is then in the future."""
    return 0 < free_since - now <= MAX_DELAY_SECONDS


class FreeRun(NamedTuple):
    """A run that may be claimed. `position` is its order of arrival."""

    position: int
    project: str
    attempt: int
    model: str
    configuration_id: str
    free_since: float


class Claim(NamedTuple):
    """The arguments of one claim."""

    owner: str
    configuration_id: str
    as_of: float
    lease: float
    slots: int
    wait_by_model: Mapping[str, float]
    limits: RunLimits

    def skips(self, run: FreeRun, alive_until: Mapping[str, float], now: float) -> bool:
        """Return True while this run is delayed or left to other processes.

        The waiting time begins when no process of the run's configuration is alive, however long their queue is.
        """
        if is_delayed(run.free_since, max(now, self.as_of)):
            return True
        waited = self.as_of - max(run.free_since, alive_until.get(run.configuration_id, run.free_since))
        return run.configuration_id != self.configuration_id and waited < self.wait_by_model.get(run.model, -math.inf)
