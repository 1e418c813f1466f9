"""The steps of background responses with hosted tools, and claims of effects, shared by the SQL stores."""

from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.sql_steps import Batch, SqlStep, StepDatabase, Steps

# The lock keeps other owners from claiming the run until the steps are written.
HOLD_RUN = "SELECT 1 FROM runs WHERE project = ? AND response_id = ? AND owner = ? FOR NO KEY UPDATE"
COUNT = "SELECT count(*) FROM hosted_steps WHERE project = ? AND response_id = ?"
APPEND = "INSERT INTO hosted_steps (project, response_id, number, step) VALUES (?, ?, ?, ?)"
LOAD = "SELECT step FROM hosted_steps WHERE project = ? AND response_id = ? ORDER BY number"
LOAD_FROM = "SELECT step FROM hosted_steps WHERE project = ? AND response_id = ? AND number >= ? ORDER BY number"
CLAIM = "INSERT INTO effect_claims (project, key, expires_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
EXPIRE_CLAIMS = "DELETE FROM effect_claims WHERE expires_at <= ?"


class SqlHostedSteps(StepDatabase):
    """Base of the classes that store the steps of hosted tools by SQL."""

    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        return await self._write(_append, project, response_id, first, steps, owner)

    async def load_hosted_steps(self, project: str, response_id: str) -> list[bytes]:
        return [bytes(step) for (step,) in await self._fetch(LOAD, (project, response_id))]

    async def claim_effect(self, project: str, key: str, *, expires_at: int | None = None) -> bool:
        return await self._change(CLAIM, (project, key, expires_at)) > 0


def _append(project: str, response_id: str, first: int, steps: Sequence[bytes], owner: str) -> Steps[bool]:
    if not (yield SqlStep(HOLD_RUN, (project, response_id, owner))):
        return False
    ((count,),) = yield SqlStep(COUNT, (project, response_id))
    if count != first:
        stored = yield SqlStep(LOAD_FROM, (project, response_id, first))
        if [bytes(step) for (step,) in stored] == list(steps):
            return True
        raise ServerError(f"The response {response_id} has {count} hosted steps, not {first}.")
    yield Batch(APPEND, [(project, response_id, number, step) for number, step in enumerate(steps, first)])
    return True
