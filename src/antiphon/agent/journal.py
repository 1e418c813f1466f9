"""What a run has done so far, as a list of entries; everything else about the run follows from them.

A live run and one that is resumed build the same state from the same entries, so there is no second way for a run to
come to be where it is. With a ledger each entry is on disk before anything is done that depends on it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.outcome import RunError
from antiphon.agent.state import JsonObject, State, text_of
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol.response import Usage
from antiphon.tools.base import Call
