"""The engine's policy: the settings that change how requests are served."""

from collections.abc import Mapping, Sequence

import msgspec

from antiphon.config.limits import FileLimits, ModelPrice
from antiphon.config.settings import EmbeddingSettings, GrammarLimits, UnsupportedTools
from antiphon.store.limits import RunLimits
from antiphon.stream.limits import AnswerLimits
from antiphon.turn_queue import QueueLimits
from antiphon.upstream.addresses import OutboundRules


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine."""

    inherit_tools: bool = True
    """A continuation without `tools` gets those of the response it continues."""
    retention_seconds: int | None = None
    """Time for which responses and conversations are stored. None keeps them until they are deleted."""
    queue: QueueLimits = QueueLimits()
    """Limits of the queue of each model that runs a limited number of turns at once."""
    background_slots: int = 64
    """Number of background responses that this process works on at once."""
    background_lease_seconds: float = 15.0
    """Time after which the runs of a dead process on another machine are taken over.

    Runs of a dead process on this machine are taken over within a second.
    """
    background_limits: RunLimits = RunLimits(queued=10_000, queued_per_project=2_000)
    """Limits on background responses, shared by all processes that use the store."""
    event_page_bytes: int = 256 * 1024
    """Size of the stored events that a follower of a background response holds in memory."""
    history_budget_bytes: int = 512 * 1024 * 1024
    """Memory for the stored items that requests in progress have loaded."""
    history_wait_seconds: float = 10.0
    """Time for which a request waits for that memory."""
    first_delta_seconds: float = 1.0
    """Time after which a stream begins even if its model has not answered."""
    models: Mapping[str, Sequence[str]] = {}
    """Names for models, see `serve.routing.ModelRouter`."""
    unsupported_tools: UnsupportedTools = "default"
    """Handling of tools that cannot be run. By default web search is dropped and others are refused."""
    max_input_items: int = 20_000
    """Maximum number of input items in one request."""
    max_content_parts: int = 50_000
    """Maximum number of content parts in one request."""
    max_tools: int = 4096
    """Maximum number of tools in one request."""
    max_prompt_bytes: int = 32 * 1024 * 1024
    """Maximum size of a prompt template with its variables."""
    grammar_limits: GrammarLimits = GrammarLimits()
    """Limits on schemas and grammars that this process compiles."""
    file_limits: FileLimits = FileLimits()
    """Limits on files and vector stores."""
    embeddings: EmbeddingSettings | None = None
    """The embeddings server. None for the local model."""
    prices: Mapping[str, ModelPrice] = {}
    """The prices of models, for the cost of their usage."""
    stored_bytes: int | None = None
    """Maximum size of the data of a project."""
    stored_bytes_by_project: Mapping[str, int] = {}
    """Other maximum sizes for some projects."""
    stateless: bool = False
    """Nothing is stored, and every request stands alone."""
    id_prefix: str = ""
    """The prefix of the ids if `stateless` is set."""
    answer_limits: AnswerLimits = AnswerLimits()
    """Limits on the size of one answer of a model."""
    outbound: OutboundRules = OutboundRules()
    """The rules for URLs of clients that an upstream or this server fetches."""
    max_hosted_calls: int = 128
    """Maximum number of hosted tool calls in one response."""
    run_hosted_locally: bool = False
    """Run hosted tools here even if the backend could run them itself."""
