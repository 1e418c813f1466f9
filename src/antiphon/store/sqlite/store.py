"""The default store: one SQLite file."""

from antiphon.store.sqlite.conversations import Conversations
from antiphon.store.sqlite.events import EventLog
from antiphon.store.sqlite.prompts import Prompts
from antiphon.store.sqlite.references import References
from antiphon.store.sqlite.responses import Responses
from antiphon.store.sqlite.runs import RunQueue


class SqliteStore(Responses, Conversations, References, EventLog, RunQueue, Prompts):
    """All parts on one file, with one writer between them: a transaction may reach across."""
