"""The settings: from antiphon.toml, ANTIPHON_* variables and the command line.

No other module reads the environment.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from antiphon.errors import ConfigError
from antiphon.tool_settings import (
    CodeInterpreterSettings,
    ImageGenerationSettings,
    McpServerSettings,
    WebSearchSettings,
)

DEFAULT_FILE = Path("antiphon.toml")
DEFAULT_PROJECT = "default"
_PREFIX = "ANTIPHON_"
# A name, a name after `*.`, `*`, or an address.
_HOST_NAME = re.compile(r"\*|(\*\.)?[\w.-]+|\[?[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*\]?")

Dialect = Literal["openai", "open-responses"]
UnsupportedTools = Literal["default", "drop", "refuse"]
HostedPlacement = Literal["auto", "local"]


class ApiKey(Struct, frozen=True):
    """An API key of clients, and the project that it gives access to."""

    key: str
    project: str = DEFAULT_PROJECT

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


class FileLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[files]`: limits on files, uploads and vector stores."""

    max_file_bytes: Annotated[int, Meta(ge=1)] = 512 * 1024 * 1024
    max_upload_bytes: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024 * 1024
    max_part_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_project_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_input_bytes: Annotated[int, Meta(ge=1)] = 50 * 1024 * 1024
    max_text_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_file_tokens: Annotated[int, Meta(ge=1)] = 5_000_000
    parse_seconds: Annotated[float, Meta(gt=0, le=3600)] = 60
    worker_megabytes: Annotated[int, Meta(ge=64)] = 1024
    idle_seconds: Annotated[float, Meta(ge=0, le=86400)] = 30
    search_cache_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024


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


class _DbosTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[dbos]` of version 0.1.0. Its limits set the new settings, its other options have no effect."""

    database: str = ""
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    concurrency_per_project: Annotated[int, Meta(ge=1)] | None = None
    starts_per_minute: Annotated[int, Meta(ge=1)] | None = None
    polling_seconds: Annotated[float, Meta(ge=0.01, le=60)] = 0.1


class Settings(Struct, frozen=True, kw_only=True):
    """All settings. docs/configuration.md describes each of them.

    `warnings` is not a setting: it has messages about deprecated settings, for the log.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    data_dir: Path
    store: Annotated[str, Meta(min_length=1)]
    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    max_body_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    body_budget_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_body_values: Annotated[int, Meta(ge=1000)] = 500_000
    max_input_items: Annotated[int, Meta(ge=1)] = 20_000
    max_content_parts: Annotated[int, Meta(ge=1)] = 50_000
    max_tools: Annotated[int, Meta(ge=1)] = 4096
    max_prompt_bytes: Annotated[int, Meta(ge=1)] = 32 * 1024 * 1024
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
    grammars: GrammarLimits = GrammarLimits()
    files: FileLimits = FileLimits()
    embeddings: EmbeddingSettings | None = None
    code_interpreter: CodeInterpreterSettings = CodeInterpreterSettings()
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
    backends: dict[str, BackendSettings] = msgspec.field(
        default_factory=lambda: {"embedded": BackendSettings(kind="embedded")}
    )
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in _TYPES}
        shown |= {"store": hide_password(self.store), "store_listen_url": hide_password(self.store_listen_url)}
        shown |= {"seal_keys": f"<{len(self.seal_keys)}>"}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def hide_password(url: str) -> str:
    """Return a URL without secrets: *** for the password, and no query, which may contain one too."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return "***"
    shown = url.partition("?")[0]
    return shown.replace(f":{password}@", ":***@", 1) if password else shown


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings) if field.name != "warnings"}
# Settings of version 0.1.0 that are still accepted in a file.
_DEPRECATED = frozenset({"dbos"})
# Settings with an environment variable. Tables have none.
_TABLES: dict[str, type[Struct]] = {
    "code_interpreter": CodeInterpreterSettings,
    "embeddings": EmbeddingSettings,
    "files": FileLimits,
    "grammars": GrammarLimits,
    "image_generation": ImageGenerationSettings,
    "web_search": WebSearchSettings,
}
_IN_ENVIRONMENT = frozenset(_TYPES) - {"backends", "models", "mcp_servers", *_TABLES}
_LIMITS = ("concurrency", "concurrency_per_project", "starts_per_minute")


def environment() -> Mapping[str, str]:
    """Return the environment variables, for `load` and for options that name a variable."""
    return os.environ


def load(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Load the settings. Precedence: command line, environment, file, defaults.

    `overrides` are settings from the command line; None means not given. If `path` is None, antiphon.toml in the
    working directory is read if it exists. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    named: set[str] = set()
    file = DEFAULT_FILE if path is None and DEFAULT_FILE.exists() else path
    if file is not None:
        table = _read_file(file)
        named = set(_find_named_variables(table))
        values |= _read_table(table, env, origin=str(file))
    values |= _read_environment(env, named)
    for name, value in overrides.items():
        if value is not None:
            values[name] = _read_setting(name, value, env, origin=f"--{name.replace('_', '-')}")
    data_dir = values.setdefault("data_dir", _default_data_dir(env))
    values.setdefault("store", f"sqlite:///{data_dir}/antiphon.db")
    dbos: _Dbos | None = values.pop("dbos", None)
    if dbos is not None:
        values = dbos.limits | values
    settings = Settings(**values, warnings=() if dbos is None else dbos.warnings)
    if len(settings.run_prices) == 1:
        raise ConfigError("run_prices: expected the prices of input and output tokens, and optionally of cached ones.")
    if (settings.background_concurrency_per_project or 0) > (settings.background_concurrency or math.inf):
        raise ConfigError("background_concurrency_per_project must not exceed background_concurrency.")
    if settings.body_budget_bytes is not None and settings.body_budget_bytes < settings.max_body_bytes:
        raise ConfigError("body_budget_bytes must not be less than max_body_bytes.")
    for name in settings.allowed_hosts:
        if not _HOST_NAME.fullmatch(name.strip()):
            raise ConfigError(f"allowed_hosts: {name!r} is not a host name. Omit the scheme, the port and the path.")
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _read_table(table: Mapping[str, Any], env: Mapping[str, str], *, origin: str) -> dict[str, Any]:
    _check_names(table, _TYPES, origin=origin, deprecated=_DEPRECATED)
    return {name: _read_setting(name, value, env, origin=f"{origin}: {name}") for name, value in table.items()}


def _read_environment(env: Mapping[str, str], named: set[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(_PREFIX) or variable in named:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name not in _IN_ENVIRONMENT or variable != variable.upper():
            known = [f"{_PREFIX}{setting.upper()}" for setting in _IN_ENVIRONMENT]
            raise ConfigError(f"Unknown environment variable {variable}. {_suggest(variable.upper(), known)}")
        if name == "api_keys":
            values[name] = _read_keys(_parse_key_list(text, origin=variable), env, origin=variable)
        elif name in ("seal_keys", "agent_tools", "allowed_hosts", "outbound_allow"):
            values[name] = tuple(part.strip() for part in text.split(",") if part.strip())
        elif text:  # an empty variable counts as not set
            values[name] = _read_setting(name, text, env, origin=variable, strict=False)
    return values


def _read_setting(name: str, value: Any, env: Mapping[str, str], *, origin: str, strict: bool = True) -> Any:
    if name == "api_keys":
        return _read_keys(value, env, origin=origin)
    if name == "backends":
        return _read_backends(value, env, origin=origin)
    if name == "models":
        return _read_models(value, origin=origin)
    if name in _TABLES:
        return _read_table_of(value, _TABLES[name], env, origin=origin)
    if name == "mcp_servers":
        tables = _convert(value, dict[str, dict[str, Any]], origin=origin)
        return {
            each: _read_table_of(table, McpServerSettings, env, origin=f"{origin}.{each}")
            for each, table in tables.items()
        }
    if name == "dbos":
        return _read_dbos(value, env, origin=origin)
    if name == "data_dir":
        return _expand_path(_convert(str(value) if isinstance(value, Path) else value, str, origin=origin), env)
    return _convert(value, _TYPES[name], origin=origin, strict=strict)


def _convert(value: Any, kind: Any, *, origin: str, strict: bool = True) -> Any:
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(get_args(kind))}.")
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}.") from None


class _KeyEntry(Struct):
    key: str | None = None
    key_env: str | None = None
    project: Annotated[str, Meta(min_length=1)] = DEFAULT_PROJECT


def _read_keys(value: Any, env: Mapping[str, str], *, origin: str) -> tuple[ApiKey, ...]:
    keys: dict[str, ApiKey] = {}
    for index, table in enumerate(_convert(value, list[dict[str, Any]], origin=origin)):
        where = f"{origin}[{index}]"
        _check_names(table, _KeyEntry.__struct_fields__, origin=where)
        entry: _KeyEntry = _convert(table, _KeyEntry, origin=where)
        if (entry.key is None) == (entry.key_env is None):
            raise ConfigError(f"{where}: set either key or key_env.")
        key = entry.key if entry.key_env is None else _read_variable(entry.key_env, env, origin=f"{where}.key_env")
        if not key or not key.isprintable() or key != key.strip():
            raise ConfigError(f"{where}: a key must be a non-empty line of text without spaces around it.")
        if key in keys:
            raise ConfigError(f"{where}: duplicate key.")
        keys[key] = ApiKey(key=key, project=entry.project)
    return tuple(keys.values())


def _parse_key_list(text: str, *, origin: str) -> list[dict[str, str]]:
    """Parse `key1,key2:project`. An empty key is an error, because a missing secret must not open the server."""
    entries: list[dict[str, str]] = []
    for part in text.split(","):
        key, colon, project = part.strip().rpartition(":")
        if not (key if colon else project):
            raise ConfigError(f"{origin}: empty key; the format is key1,key2:project.")
        entries.append({"key": key, "project": project} if colon else {"key": project})
    return entries


def _read_backends(value: Any, env: Mapping[str, str], *, origin: str) -> dict[str, BackendSettings]:
    backends: dict[str, BackendSettings] = {}
    for name, table in _convert(value, dict[str, dict[str, Any]], origin=origin).items():
        where = f"{origin}.{name}"
        options = dict(table)
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or not kind:
            raise ConfigError(f'{where}: a backend needs a kind, as in kind = "embedded".')
        backends[name] = BackendSettings(kind=kind, options=_resolve_variables(options, env, origin=where))
    if not backends:
        raise ConfigError(f"{origin}: at least one backend is required.")
    return backends


def _read_models(value: Any, *, origin: str) -> dict[str, tuple[str, ...]]:
    """Parse `name = "backend/model"`, or an array of such targets with the fallbacks."""
    models: dict[str, tuple[str, ...]] = {}
    for name, targets in _convert(value, dict[str, str | list[str]], origin=origin).items():
        models[name] = (targets,) if isinstance(targets, str) else tuple(targets)
        if not name or not models[name] or not all(models[name]):
            raise ConfigError(
                f'{origin}.{name}: a target is a backend or backend/model, as in "local" or "local/some-model".'
            )
    return models


def _read_table_of(value: Any, kind: type[Struct], env: Mapping[str, str], *, origin: str) -> Any:
    """Parse a table of settings. Secrets in it, and in the tables inside it, may come from the environment."""
    table = _resolve_variables(_convert(value, dict[str, Any], origin=origin), env, origin=origin)
    _check_names(table, kind.__struct_fields__, origin=origin)
    for name, inner in table.items():
        if isinstance(inner, dict):
            table[name] = _resolve_variables(inner, env, origin=f"{origin}.{name}")
    return _convert(table, kind, origin=origin)


class _Dbos(Struct, frozen=True):
    """The setting `dbos` of version 0.1.0, translated to the current settings."""

    limits: dict[str, int] = {}
    warnings: tuple[str, ...] = ()


def _read_dbos(value: Any, env: Mapping[str, str], *, origin: str) -> _Dbos:
    if value is False:
        return _Dbos(warnings=(f"{origin}: deprecated and without effect. Remove it.",))
    table = _resolve_variables(_convert(value, dict[str, Any], origin=origin), env, origin=origin)
    _check_names(table, _DbosTable.__struct_fields__, origin=origin)
    settings: _DbosTable = _convert(table, _DbosTable, origin=origin)
    if (settings.concurrency_per_project or 0) > (settings.concurrency or math.inf):
        raise ConfigError(f"{origin}: concurrency_per_project must not exceed concurrency.")
    limits = {f"background_{name}": getattr(settings, name) for name in _LIMITS if name in table}
    advice = f"Use {', '.join(limits)} instead." if limits else "Remove it."
    warnings = [f"{origin}: this table is deprecated. {advice}"]
    warnings += [
        f"{origin}.{name} has no effect: background responses are queued in the store itself."
        for name in ("database", "polling_seconds")
        if name in table
    ]
    return _Dbos(limits=limits, warnings=tuple(warnings))


def _resolve_variables(options: Mapping[str, Any], env: Mapping[str, str], *, origin: str) -> dict[str, Any]:
    """Replace each option `NAME_env = "VARIABLE"` by NAME with the value of that environment variable."""
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        option = name.removesuffix("_env")
        if option in resolved or (option != name and option in options):
            raise ConfigError(f"{origin}: set either {option} or {option}_env.")
        resolved[option] = value if option == name else _read_variable(value, env, origin=f"{origin}.{name}")
    return resolved


def _read_variable(variable: Any, env: Mapping[str, str], *, origin: str) -> str:
    value = env.get(variable) if isinstance(variable, str) else None
    if not value:
        # If the value is not a plausible variable name, it may be the secret itself. It must not appear in the log.
        is_name = isinstance(variable, str) and variable.isidentifier() and variable.isupper()
        raise ConfigError(f"{origin}: the environment variable{f' {variable}' if is_name else ''} is not set.")
    return value


def _find_named_variables(value: Any) -> Iterable[str]:
    """Yield the environment variables that a file names. They are not settings, even if they start with ANTIPHON_."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name.endswith("_env") and isinstance(inner, str):
                yield inner
            yield from _find_named_variables(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_named_variables(inner)


def _check_names(
    names: Iterable[str], known: Collection[str], *, origin: str, deprecated: Collection[str] = ()
) -> None:
    for name in names:
        if name not in known and name not in deprecated:
            raise ConfigError(f"{origin}: unknown setting '{name}'. {_suggest(name, known)}")


def _suggest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f"Did you mean {matches[0]}?" if matches else f"Allowed: {', '.join(sorted(known))}."


def _default_data_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_DATA_HOME", "")
    # The XDG specification requires that a relative path is ignored.
    return (Path(base) if Path(base).is_absolute() else _home(env) / ".local" / "share") / "antiphon"


def _expand_path(text: str, env: Mapping[str, str]) -> Path:
    first, *rest = Path(text).parts or (".",)
    return (_home(env).joinpath(*rest) if first == "~" else Path(text)).absolute()


def _home(env: Mapping[str, str]) -> Path:
    home = env.get("HOME")
    return Path(home) if home else Path.home()
