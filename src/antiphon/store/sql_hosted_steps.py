"""The steps of background responses with hosted tools, shared by the SQL stores. Each has its own statements."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from antiphon.store.sql_work import SqlDatabase


class HostedStepWork(NamedTuple):
    """The work of `SqlHostedSteps`. `append` is a function that returns False if the owner does not have the run."""

    append: Any
    load: str
    claim: Any


class SqlHostedSteps(SqlDatabase):
    """Base of the classes that store the steps of hosted tools by SQL."""

    @property
    @abstractmethod
    def _hosted_work(self) -> HostedStepWork: ...

    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        parameters = (project, response_id, first, tuple(steps), owner)
        appended: bool = await self._writer.submit(self._hosted_work.append, parameters)
        return appended

    async def load_hosted_steps(self, project: str, response_id: str) -> list[bytes]:
        rows = await self._reader.submit(self._hosted_work.load, (project, response_id))
        return [bytes(step) for (step,) in rows]

    async def claim_effect(self, project: str, key: str, *, expires_at: int | None = None) -> bool:
        claimed: int = await self._writer.submit(self._hosted_work.claim, (project, key, expires_at))
        return claimed > 0
