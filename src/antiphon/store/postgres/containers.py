"""Containers and their files in PostgreSQL."""

from antiphon.store.postgres.steps import PostgresSteps
from antiphon.store.sql_containers import SqlContainers


class PostgresContainers(PostgresSteps, SqlContainers):
    """Containers in PostgreSQL. A trigger deletes the contents of deleted files."""

    is_shared = True
