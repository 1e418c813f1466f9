"""The settings of a server. `loading` reads them."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from antiphon.config.limits import FileLimits, ModelPrice, ProjectSettings, UsageLimits
from antiphon.config.readers import hide_password
from antiphon.config.tools import (
    CodeInterpreterSettings,
    ImageGenerationSettings,
    McpServerSettings,
    ProgramSettings,
    WebSearchSettings,
)

DEFAULT_PROJECT = "default"

Dialect = Literal["openai", "open-responses"]
KeyScope = Literal["read", "inference", "admin"]
UnsupportedTools = Literal["default", "drop", "refuse"]
HostedPlacement = Literal["auto", "local"]


class ApiKey(Struct, frozen=True):
    """An API key of clients, and the project that it gives access to.

    `id` names the key in statistics. Without it, the name is the position of the key in the settings.
    """

    key: str
    project: str = DEFAULT_PROJECT
    scope: KeyScope = "admin"
    id: str = ""

    def __repr__(self) -> str:
        return f"ApiKey(key='***', project={self.project!r})"


class BackendSettings(Struct, frozen=True):
    """The kind of a backend and its options. Options may be secrets, so `repr` shows only their names."""

    kind: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"BackendSettings(kind={self.kind!r}, options=<{', '.join(self.options)}>)"


class GrammarLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[grammars]`: limits on JSON schemas, grammars and patterns of clients that this server compiles."""

    schema_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024
    schema_depth: Annotated[int, Meta(ge=1, le=100)] = 64
    items: Annotated[int, Meta(ge=1)] = 10_000
    properties: Annotated[int, Meta(ge=1)] = 1000
    length: Annotated[int, Meta(ge=1)] = 100_000
    multiple_of: Annotated[int, Meta(ge=1)] = 10_000
    enum_values: Annotated[int, Meta(ge=1)] = 5000
    alternatives: Annotated[int, Meta(ge=1)] = 500
    references: Annotated[int, Meta(ge=1)] = 5000
    pattern_size: Annotated[int, Meta(ge=1)] = 10_000
    definition_length: Annotated[int, Meta(ge=1)] = 50_000
    rules: Annotated[int, Meta(ge=1)] = 1000
    compile_seconds: Annotated[float, Meta(ge=0.01, le=60)] = 0.5
    compile_megabytes: Annotated[int, Meta(ge=16)] = 128
    queued: Annotated[int, Meta(ge=1)] = 64


class EmbeddingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[embeddings]`: an OpenAI-compatible server that computes the vectors of vector stores."""

    base_url: Annotated[str, Meta(min_length=1)]
    model: Annotated[str, Meta(min_length=1)]
    api_key: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=16384)] | None = None
    batch: Annotated[int, Meta(ge=1, le=2048)] = 32
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 60

    def __repr__(self) -> str:
        return f"EmbeddingSettings(base_url={self.base_url!r}, model={self.model!r})"


class Settings(Struct, frozen=True, kw_only=True):
    """All settings. docs/configuration.md describes each of them.

    `warnings` is not a setting: it has messages about deprecated settings and ignored variables, for the log.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    data_dir: Path
    store: Annotated[str, Meta(min_length=1)]
    api_keys: tuple[ApiKey, ...] = ()
    insecure: bool = False
    allowed_hosts: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    max_body_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    body_budget_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_body_values: Annotated[int, Meta(ge=1000)] = 500_000
    max_input_items: Annotated[int, Meta(ge=1)] = 20_000
    max_content_parts: Annotated[int, Meta(ge=1)] = 50_000
    max_tools: Annotated[int, Meta(ge=1)] = 4096
    max_prompt_bytes: Annotated[int, Meta(ge=1)] = 32 * 1024 * 1024
    max_prompts: Annotated[int, Meta(ge=1)] = 10_000
    max_conversations: Annotated[int, Meta(ge=1)] = 1_000_000
    max_keys: Annotated[int, Meta(ge=1)] = 10_000
    shutdown_drain_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0
    shutdown_grace_seconds: Annotated[float, Meta(ge=0, le=86400)] = 10
    keepalive_seconds: Annotated[float, Meta(ge=0, le=86400)] = 15
    max_connections: Annotated[int, Meta(ge=1)] = 4096
    max_unauthenticated: Annotated[int, Meta(ge=1)] = 512
    max_unauthenticated_per_address: Annotated[int, Meta(ge=1)] = 128
    head_timeout_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60
    body_timeout_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60
    write_timeout_seconds: Annotated[float, Meta(gt=0, le=86400)] = 120
    min_bytes_per_second: Annotated[float, Meta(ge=0)] = 100
    idle_timeout_seconds: Annotated[float, Meta(gt=0, le=86400)] = 75
    websocket_max_seconds: Annotated[float, Meta(gt=0, le=604800)] = 3600
    websocket_first_message_seconds: Annotated[float, Meta(gt=0, le=604800)] = 600
    websocket_max_small_fragments: Annotated[int, Meta(ge=1)] = 4096
    websocket_max_control_frames: Annotated[int, Meta(ge=1)] = 600
    inherit_tools: bool = True
    retention_days: Annotated[float, Meta(ge=0, le=36500)] = 30
    queued: Annotated[int, Meta(ge=0)] = 512
    queued_per_project: Annotated[int, Meta(ge=0)] = 128
    queue_seconds: Annotated[float, Meta(gt=0, le=86400)] = 300
    background_slots: Annotated[int, Meta(ge=1)] = 64
    background_lease_seconds: Annotated[float, Meta(ge=0.1, le=3600)] = 15
    background_queued: Annotated[int, Meta(ge=1)] = 10_000
    background_queued_per_project: Annotated[int, Meta(ge=1)] = 2_000
    background_concurrency: Annotated[int, Meta(ge=1)] | None = None
    background_concurrency_per_project: Annotated[int, Meta(ge=1)] | None = None
    background_starts_per_minute: Annotated[int, Meta(ge=1)] | None = None
    store_min_free_bytes: Annotated[int, Meta(ge=0)] = 16 * 1024 * 1024
    store_wal_bytes: Annotated[int, Meta(ge=1024 * 1024)] = 64 * 1024 * 1024
    store_cache_bytes: Annotated[int, Meta(ge=0)] = 32 * 1024 * 1024
    store_connections: Annotated[int, Meta(ge=1, le=1000)] = 8
    store_listen_url: str = ""
    event_page_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024
    history_budget_bytes: Annotated[int, Meta(ge=1)] = 512 * 1024 * 1024
    history_wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10
    opening_seconds: Annotated[float, Meta(ge=0, le=86400)] = 1
    max_answer_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_answer_text_bytes: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024
    max_answer_items: Annotated[int, Meta(ge=1, le=100_000)] = 2048
    max_answer_events: Annotated[int, Meta(ge=1)] = 1_000_000
    outbound_allow: tuple[str, ...] = ()
    hosted_tools: HostedPlacement = "auto"
    max_hosted_calls: Annotated[int, Meta(ge=1)] = 128
    models: dict[str, tuple[str, ...]] = {}
    seal_keys: tuple[str, ...] = ()
    limits: UsageLimits = UsageLimits()
    projects: dict[str, ProjectSettings] = {}
    prices: dict[str, ModelPrice] = {}
    grammars: GrammarLimits = GrammarLimits()
    files: FileLimits = FileLimits()
    embeddings: EmbeddingSettings | None = None
    code_interpreter: CodeInterpreterSettings = CodeInterpreterSettings()
    programs: ProgramSettings = ProgramSettings()
    compat: Dialect = "openai"
    unsupported_tools: UnsupportedTools = "default"
    stateless: bool = False
    stateless_id_prefix: Annotated[str, Meta(pattern="^[A-Za-z0-9-]{0,32}$")] = ""
    agent_model: str = ""
    agent_system: str = ""
    agent_temperature: Annotated[float, Meta(ge=0, le=2)] = 0.7
    agent_tools: tuple[str, ...] = ()
    mcp_servers: dict[str, McpServerSettings] = {}
    web_search: WebSearchSettings | None = None
    image_generation: ImageGenerationSettings | None = None
    run_prices: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(max_length=3)] = ()
    run_currency: Annotated[str, Meta(min_length=1, max_length=16)] = "USD"
    run_retention_days: Annotated[float, Meta(ge=0, le=36500)] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_block_ms: Annotated[float, Meta(ge=0, le=60000)] = 100
    metrics: bool = False
    metrics_key: str = ""
    backends: dict[str, BackendSettings] = msgspec.field(
        default_factory=lambda: {"embedded": BackendSettings(kind="embedded")}
    )
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "warnings"}
        shown |= {"store": hide_password(self.store), "store_listen_url": hide_password(self.store_listen_url)}
        shown |= {"seal_keys": f"<{len(self.seal_keys)}>", "metrics_key": "***" if self.metrics_key else ""}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
