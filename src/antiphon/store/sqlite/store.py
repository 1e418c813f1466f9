"""The default store: one SQLite file. This module joins its parts."""

from antiphon.store.sql_chains import SqlChains
from antiphon.store.sql_containers import SqlContainers
from antiphon.store.sql_events import SqlEventLog
from antiphon.store.sql_expiry import SqlExpiry
from antiphon.store.sql_hosted_steps import SqlHostedSteps
from antiphon.store.sql_keys import SqlKeys
from antiphon.store.sql_prompts import SqlPrompts
from antiphon.store.sql_references import SqlReferences
from antiphon.store.sql_usage import SqlUsage
from antiphon.store.sqlite.events import SqliteEventLog
from antiphon.store.sqlite.input_parts import SqliteInputParts
from antiphon.store.sqlite.runs import SqliteRunQueue
from antiphon.store.sqlite.space import SqliteSpace
from antiphon.store.sqlite.steps import SqliteSteps


class SqliteStore(
    SqliteInputParts,
    SqliteEventLog,
    SqliteRunQueue,
    SqliteSpace,
    SqliteSteps,
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
    """All parts of a store on one file. They share the writer thread, so one transaction can span several parts."""
