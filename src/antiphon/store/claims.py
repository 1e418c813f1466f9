"""Selection of the runs that an owner claims, shared by the SQL stores."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from antiphon.store.limits import RunLimits


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

    def is_left_to_others(self, run: FreeRun, alive_until: Mapping[str, float]) -> bool:
        """Return True while this run is left to other processes.

        The waiting time begins when no process of the run's configuration is alive, however long their queue is.
        """
        waited = self.as_of - max(run.free_since, alive_until.get(run.configuration_id, run.free_since))
        return run.configuration_id != self.configuration_id and waited < self.wait_by_model.get(run.model, -math.inf)
