"""Reading of the event log in PostgreSQL."""

from antiphon.store.event_batches import take_events
from antiphon.store.postgres.steps import PostgresSteps
from antiphon.store.record import DAMAGE, report_damage
from antiphon.store.sql_events import READ

# Rows of a page: batches up to this size are read at once. The number of bytes is summed before the contents are read.
READ_PAGE = """
SELECT last, lines FROM (
    SELECT last, lines, sum(length(lines)) OVER (ORDER BY last) - length(lines) AS before FROM events
    WHERE project = ?1 AND response_id = ?2 AND last > ?3 ORDER BY last LIMIT ?5
) AS page WHERE before < ?4 ORDER BY last
"""

# Maximum number of rows in a page.
PAGE_ROWS = 200


class PostgresEventLog(PostgresSteps):
    async def read_events(
        self, project: str, response_id: str, after: int, *, max_bytes: int | None = None
    ) -> list[tuple[int, bytes]]:
        if max_bytes is None:
            rows = await self._fetch(READ, (project, response_id, after))
        else:
            rows = await self._fetch(READ_PAGE, (project, response_id, after, max_bytes, PAGE_ROWS))
        try:
            return take_events(rows, after, max_bytes)
        except DAMAGE as error:
            raise report_damage(f"events of response {response_id}", error) from None
