"""A store that forgets everything with its process: for trials and tests."""

from antiphon.store.memory.prompts import Prompts
from antiphon.store.memory.responses import Responses
from antiphon.store.memory.runs import RunQueue


class MemoryStore(Responses, RunQueue, Prompts):
    """All parts on one set of tables."""
