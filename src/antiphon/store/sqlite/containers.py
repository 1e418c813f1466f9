"""Containers and their files in the SQLite store."""

from antiphon.store.sql_containers import SqlContainers
from antiphon.store.sqlite.steps import SqliteSteps


class SqliteContainers(SqliteSteps, SqlContainers):
    """Containers in SQLite. The contents of their files are beside the store."""
