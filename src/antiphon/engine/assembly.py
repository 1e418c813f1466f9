"""Assembly of an engine from settings: its backends, its store, its policy and its keys."""

import logging

from antiphon.backends.registry import create
from antiphon.config.settings import Settings
from antiphon.engine.containers.containers import Containers
from antiphon.engine.engine import Engine
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.engine.node_settings import make_setting_digests
from antiphon.engine.policy import Policy
from antiphon.engine.sealing import KeyFile, Sealer, read_secrets
from antiphon.errors import ConfigError
from antiphon.store.base import Store
from antiphon.store.containers import ContainerStore
from antiphon.store.files.location import SharedFileStore
from antiphon.store.limits import RunLimits, StoreLimits
from antiphon.store.location import locate_containers, locate_files, locate_store
from antiphon.stream.limits import AnswerLimits
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.code_interpreter.prepare import locate_cache
from antiphon.tools.hosted.registry import HostedTools, create_hosted_tools
from antiphon.turn_queue import QueueLimits
from antiphon.upstream.addresses import OutboundRules

logger = logging.getLogger(__name__)

SEAL_FILE = "seal.keys"
_DAY = 24 * 60 * 60
_SCRIPTED = "scripted"
# Hosted tools are created again if one of these settings has changed.
_TOOL_SETTINGS = ("mcp_servers", "web_search", "image_generation", "outbound_allow", "max_hosted_calls")


def build_engine(settings: Settings) -> Engine:
    """Return an engine, not yet started. Log the warnings of the settings.

    Raises ConfigError for an unknown backend or store.
    """
    for warning in settings.warnings:
        logger.warning("%s", warning)
    backends = {
        name: create(backend.kind, name=name, options=backend.options, data_dir=settings.data_dir)
        for name, backend in settings.backends.items()
    }
    sealer = make_sealer(settings)
    # A stateless server must not show the data of another server in the store.
    url = "memory:" if settings.stateless else settings.store
    limits = StoreLimits(
        min_free_bytes=settings.store_min_free_bytes,
        wal_bytes=settings.store_wal_bytes,
        chain_cache_bytes=settings.store_cache_bytes,
        connections=settings.store_connections,
        listen_url=settings.store_listen_url,
        max_conversations=settings.max_conversations,
        max_prompts=settings.max_prompts,
        max_keys=settings.max_keys,
        max_files=settings.files.max_files,
        max_uploads=settings.files.max_uploads,
        max_upload_parts=settings.files.max_upload_parts,
        max_vector_stores=settings.files.max_vector_stores,
        max_vector_store_files=settings.files.max_vector_store_files,
    )
    store = locate_store(url, configuration_id=make_configuration_id(settings, sealer), limits=limits)
    engine = Engine(
        backends=backends,
        store=store,
        policy=make_policy(settings),
        sealer=sealer,
        files=FileServiceLoader(
            locate_files(url, contents=settings.files.directory),
            limits=settings.files,
            embeddings=settings.embeddings,
            lease=settings.background_lease_seconds,
            store_limits=limits,
            has_files=store.has_files if isinstance(store, SharedFileStore) else None,
        ),
        # A stateless server has function tools only.
        hosted_tools=HostedTools() if settings.stateless else create_hosted_tools(HostedSetup(settings=settings)),
        containers=make_containers(settings, store),
    )
    engine.node_settings.digests = make_setting_digests(settings, sealer)
    return engine


async def reconfigure(engine: Engine, old: Settings, new: Settings) -> None:
    """Change the backends, models, hosted tools and limits of a running engine to those of new settings.

    Backends with the same settings stay open. Raises ConfigError, or the error of a backend that cannot start; nothing
    has then changed.
    """
    backends = {}
    for name, backend in new.backends.items():
        # A script may have changed, although its name has not.
        if backend == old.backends.get(name) and backend.kind != _SCRIPTED:
            backends[name] = engine.backends[name]
        else:
            backends[name] = create(backend.kind, name=name, options=backend.options, data_dir=new.data_dir)
    tools = engine.hosted_tools
    if not new.stateless and any(getattr(new, name) != getattr(old, name) for name in _TOOL_SETTINGS):
        tools = create_hosted_tools(HostedSetup(settings=new))
    await engine.reconfigure(
        backends=backends,
        policy=make_policy(new),
        hosted_tools=tools,
        configuration_id=make_configuration_id(new, engine.sealer),
    )
    engine.node_settings.digests = make_setting_digests(new, engine.sealer)


def make_containers(settings: Settings, store: Store) -> Containers | None:
    """Return the containers of the code interpreter, or None if the server has none."""
    options = settings.code_interpreter
    if settings.stateless or not options.enabled:
        return None
    if options.sandbox == "wasm" and options.max_memory not in ("1g", "4g"):
        raise ConfigError("code_interpreter.max_memory: the sandbox 'wasm' allows at most 4g.")
    if not isinstance(store, ContainerStore):
        return None
    return Containers(
        store,
        options,
        cache_dir=locate_cache(settings),
        root=locate_containers(store),
        is_shared=store.is_shared,
    )


def make_configuration_id(settings: Settings, sealer: Sealer) -> str:
    """Return an id that is the same for all processes that serve the same models, even after a restart.

    The id is stored, and backend options contain secrets. The id is a keyed digest, so that a guessed secret cannot be
    verified.
    """
    backends = [(name, backend.kind, backend.options) for name, backend in settings.backends.items()]
    configuration = repr((str(settings.data_dir), backends, settings.models))
    return sealer.digest(configuration.encode())


def make_sealer(settings: Settings) -> Sealer:
    """Return a sealer with the keys of the settings, or else of the key file in the data folder."""
    if settings.seal_keys:
        return Sealer(read_secrets(settings.seal_keys, origin="seal_keys"))
    file = KeyFile(settings.data_dir / SEAL_FILE)
    return Sealer(file.load(), reload_secrets=file.reload)


def make_policy(settings: Settings) -> Policy:
    return Policy(
        inherit_tools=settings.inherit_tools,
        # A short retention must not round to 0, which means none.
        retention_seconds=max(1, round(settings.retention_days * _DAY)) if settings.retention_days else None,
        queue=QueueLimits(settings.queued, settings.queued_per_project, settings.queue_seconds),
        background_slots=settings.background_slots,
        background_lease_seconds=settings.background_lease_seconds,
        background_limits=make_run_limits(settings),
        event_page_bytes=settings.event_page_bytes,
        history_budget_bytes=settings.history_budget_bytes,
        history_wait_seconds=settings.history_wait_seconds,
        first_delta_seconds=settings.opening_seconds,
        models=settings.models,
        unsupported_tools=settings.unsupported_tools,
        max_input_items=settings.max_input_items,
        max_content_parts=settings.max_content_parts,
        max_tools=settings.max_tools,
        max_prompt_bytes=settings.max_prompt_bytes,
        grammar_limits=settings.grammars,
        file_limits=settings.files,
        embeddings=settings.embeddings,
        prices=settings.prices,
        stored_bytes=settings.limits.stored_bytes,
        stored_bytes_by_project=_collect_limits(settings, "stored_bytes"),
        stateless=settings.stateless,
        id_prefix=settings.stateless_id_prefix if settings.stateless else "",
        answer_limits=AnswerLimits(
            max_answer_bytes=settings.max_answer_bytes,
            max_answer_text_bytes=settings.max_answer_text_bytes,
            max_answer_items=settings.max_answer_items,
            max_answer_events=settings.max_answer_events,
        ),
        outbound=OutboundRules.parse(settings.outbound_allow),
        max_hosted_calls=settings.max_hosted_calls,
        run_hosted_locally=settings.hosted_tools == "local",
    )


def make_run_limits(settings: Settings) -> RunLimits:
    """Return the limits on background responses. The table `[limits]` replaces the settings for each project."""
    limits = settings.limits
    queued, concurrency = settings.background_queued_per_project, settings.background_concurrency_per_project
    default = RunLimits(
        concurrency=settings.background_concurrency,
        concurrency_per_project=concurrency if limits.background is None else limits.background,
        starts_per_minute=settings.background_starts_per_minute,
        queued=settings.background_queued,
        queued_per_project=queued if limits.queued is None else limits.queued,
        concurrency_by_project=_collect_limits(settings, "background"),
        queued_by_project=_collect_limits(settings, "queued"),
    )
    return default if limits.queued is None else default._replace(queued_setting="limits.queued")


def _collect_limits(settings: Settings, name: str) -> dict[str, int]:
    """Return the values of a limit that single projects have instead of the default."""
    values = {project: getattr(table.limits, name) for project, table in settings.projects.items()}
    return {project: value for project, value in values.items() if value is not None}
