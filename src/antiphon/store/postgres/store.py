"""The PostgreSQL store, for several servers on one database. This module joins its parts."""

from antiphon.store.postgres.events import PostgresEventLog
from antiphon.store.postgres.files import PostgresFileCheck
from antiphon.store.postgres.runs import PostgresRunQueue
from antiphon.store.postgres.steps import PostgresSteps
from antiphon.store.sql_chains import SqlChains
from antiphon.store.sql_containers import SqlContainers
from antiphon.store.sql_events import SqlEventLog
from antiphon.store.sql_expiry import SqlExpiry
from antiphon.store.sql_hosted_steps import SqlHostedSteps
from antiphon.store.sql_keys import SqlKeys
from antiphon.store.sql_prompts import SqlPrompts
from antiphon.store.sql_references import SqlReferences
from antiphon.store.sql_usage import SqlUsage


class PostgresStore(
    PostgresEventLog,
    PostgresRunQueue,
    PostgresFileCheck,
    PostgresSteps,
    SqlReferences,
    SqlChains,
    SqlEventLog,
    SqlExpiry,
    SqlHostedSteps,
    SqlPrompts,
    SqlKeys,
    SqlUsage,
    SqlContainers,
):
    """All parts of a store on one database. They share the writer, so one transaction can span several parts.

    A trigger deletes the contents of deleted files of containers.
    """

    is_shared = True
