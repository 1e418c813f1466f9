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
    """Settings of an engine.

    `inherit_tools`: a continuation without `tools` gets those of the response it continues.
    `retention_seconds`: time for which responses and conversations are stored; None keeps them until they are deleted.
    `queue`: limits of the queue of each model that runs a limited number of turns at once.
    `background_slots`: number of background responses that this process works on at once.
    `background_lease_seconds`: time after which the runs of a dead process on another machine are taken over. Runs of a
    dead process on this machine are taken over within a second.
    `background_limits`: limits on background responses, shared by all processes that use the store.
    `event_page_bytes`: size of the stored events that a follower of a background response holds in memory.
    `history_budget_bytes`: memory for the stored items that requests in progress have loaded. `history_wait_seconds`:
    time for which a request waits for it.
    `first_delta_seconds`: time after which a stream begins although its model has not answered.
    `models`: names for models, see `serve.routing.ModelRouter`.
    `unsupported_tools`: handling of tools that cannot be run. By default web search is dropped and others are refused.
    `max_input_items`, `max_content_parts`, `max_tools`: maximum numbers in one request.
    `max_prompt_bytes`: maximum size of a prompt template with its variables.
    `answer_limits`: limits on the size of one answer of a model.
    `max_hosted_calls`: maximum number of hosted tool calls in one response.
    `run_hosted_locally`: run hosted tools here even if the backend could run them itself.
    `outbound`: the rules for URLs of clients that an upstream fetches.
    `grammar_limits`: limits on schemas and grammars that this process compiles.
    `file_limits`: limits on files and vector stores. `embeddings`: the embeddings server; None for the local model.
    `prices`: the prices of models, for the cost of their usage.
    `stored_bytes`: maximum size of the data of a project. `stored_bytes_by_project`: other sizes for some projects.
    `stateless`: nothing is stored, and every request stands alone. `id_prefix`: the prefix of the ids in that case.
    """

    inherit_tools: bool = True
    retention_seconds: int | None = None
    queue: QueueLimits = QueueLimits()
    background_slots: int = 64
    background_lease_seconds: float = 15.0
    background_limits: RunLimits = RunLimits(queued=10_000, queued_per_project=2_000)
    event_page_bytes: int = 256 * 1024
    history_budget_bytes: int = 512 * 1024 * 1024
    history_wait_seconds: float = 10.0
    first_delta_seconds: float = 1.0
    models: Mapping[str, Sequence[str]] = {}
    unsupported_tools: UnsupportedTools = "default"
    max_input_items: int = 20_000
    max_content_parts: int = 50_000
    max_tools: int = 4096
    max_prompt_bytes: int = 32 * 1024 * 1024
    grammar_limits: GrammarLimits = GrammarLimits()
    file_limits: FileLimits = FileLimits()
    embeddings: EmbeddingSettings | None = None
    prices: Mapping[str, ModelPrice] = {}
    stored_bytes: int | None = None
    stored_bytes_by_project: Mapping[str, int] = {}
    stateless: bool = False
    id_prefix: str = ""
    answer_limits: AnswerLimits = AnswerLimits()
    outbound: OutboundRules = OutboundRules()
    max_hosted_calls: int = 128
    run_hosted_locally: bool = False
