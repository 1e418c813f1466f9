"""Loading of the settings: from antiphon.toml, ANTIPHON_* variables and the command line.

No other module reads the environment.
"""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from antiphon.config.limits import (
    FileLimits,
    UsageLimits,
    describe_lost_counts,
    describe_unused_prices,
    lacks_prices,
    read_prices,
    read_projects,
)
from antiphon.config.readers import (
    PREFIX,
    ProblemCollector,
    check_name,
    convert,
    convert_table,
    describe_ignored_variables,
    expand_path,
    find_named_variables,
    is_service_link,
    locate_data_dir,
    read_keys_of_list,
    read_variable,
    resolve_variables,
)
from antiphon.config.settings import (
    DEFAULT_PROJECT,
    ApiKey,
    BackendSettings,
    EmbeddingSettings,
    GrammarLimits,
    KeyScope,
    Settings,
)
from antiphon.config.tools import (
    CodeInterpreterSettings,
    ImageGenerationSettings,
    McpServerSettings,
    ProgramSettings,
    WebSearchSettings,
)
from antiphon.errors import ConfigError

DEFAULT_FILE = Path("antiphon.toml")
# A name, a name after `*.`, `*`, or an address.
_HOST_NAME = re.compile(r"\*|(\*\.)?[\w.-]+|\[?[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*\]?")
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings) if field.name != "warnings"}
# Settings of version 0.1.0 that are still accepted in a file.
_DEPRECATED = frozenset({"dbos"})
_TABLES: dict[str, type[Struct]] = {
    "code_interpreter": CodeInterpreterSettings,
    "embeddings": EmbeddingSettings,
    "files": FileLimits,
    "grammars": GrammarLimits,
    "image_generation": ImageGenerationSettings,
    "limits": UsageLimits,
    "programs": ProgramSettings,
    "web_search": WebSearchSettings,
}
# Settings with an environment variable. Tables have none.
_IN_ENVIRONMENT = frozenset(_TYPES) - {"backends", "models", "mcp_servers", "projects", "prices", *_TABLES}
_LIMITS = ("concurrency", "concurrency_per_project", "starts_per_minute")


def environment() -> Mapping[str, str]:
    """Return the environment variables, for `load` and for options that name a variable."""
    return os.environ


def load(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Load the settings. Precedence: command line, environment, file, defaults.

    `overrides` are settings from the command line; None means not given. If `path` is None, antiphon.toml in the
    working directory is read if it exists. Raises ConfigProblems.
    """
    found = ProblemCollector()
    values: dict[str, Any] = {}
    named: set[str] = set()
    with found.collect():
        file = find_file(path)
        if file is not None:
            table = _read_file(file)
            named = set(find_named_variables(table))
            values |= _read_table(table, env, found, origin=str(file))
    warnings = _read_environment(env, named, values, found)
    for name, value in overrides.items():
        if value is not None:
            with found.collect():
                values[name] = _read_setting(name, value, env, origin=f"--{name.replace('_', '-')}")
    data_dir = values.setdefault("data_dir", locate_data_dir(env))
    values.setdefault("store", f"sqlite:///{data_dir}/antiphon.db")
    dbos: _Dbos | None = values.pop("dbos", None)
    if dbos is not None:
        values = dbos.limits | values
        warnings += dbos.warnings
    settings = Settings(**values, warnings=tuple(warnings))
    for names, message in _find_contradictions(settings):
        # A wrong value has been replaced by the default, which may contradict the other setting.
        if not any(name in problem for problem in found.problems for name in names):
            found.problems.append(message)
    found.raise_any()
    return settings


def find_file(path: Path | None) -> Path | None:
    """Return the settings file: the given one, else antiphon.toml in the working directory if it exists.

    Raises ConfigError if the working directory cannot be searched.
    """
    if path is not None:
        return path
    try:
        DEFAULT_FILE.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"Cannot look for {DEFAULT_FILE} in the working directory {Path.cwd()}: {error.strerror}. Use another "
            "working directory, or name the settings file with --config."
        ) from None
    return DEFAULT_FILE


def _find_contradictions(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of settings that do not fit together, and the error."""
    if len(settings.run_prices) == 1:
        message = "run_prices: expected the prices of input and output tokens, and optionally of cached ones."
        yield (), message
    if (settings.background_concurrency_per_project or 0) > (settings.background_concurrency or math.inf):
        message = "background_concurrency_per_project must not exceed background_concurrency."
        yield ("background_concurrency",), message
    if settings.body_budget_bytes is not None and settings.body_budget_bytes < settings.max_body_bytes:
        yield ("body_budget_bytes", "max_body_bytes"), "body_budget_bytes must not be less than max_body_bytes."
    if settings.workers > 1 and settings.store.startswith("memory:") and not settings.stateless:
        message = "workers: the memory store belongs to one process. Use SQLite or PostgreSQL, or one worker."
        yield ("workers", "store"), message
    if lacks_prices(settings.limits, settings.projects, settings.prices):
        yield ("prices",), "cost_per_month needs the prices of models: set the tables [prices.MODEL]."
    for name in settings.allowed_hosts:
        if not _HOST_NAME.fullmatch(name.strip()):
            yield (), f"allowed_hosts: {name!r} is not a host name. Omit the scheme, the port and the path."


def describe_doubtful_limits(settings: Settings) -> Iterator[str]:
    """Yield warnings for a server about limits whose counts are not stored, and about prices without effect."""
    yield from describe_unused_prices(settings.prices, settings.models)
    if settings.stateless or settings.store.startswith("memory:"):
        store = "a stateless server" if settings.stateless else "the memory store"
        yield from describe_lost_counts(settings.limits, settings.projects, store=store, workers=settings.workers)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _read_table(
    table: Mapping[str, Any], env: Mapping[str, str], found: ProblemCollector, *, origin: str
) -> dict[str, Any]:
    values = {}
    for name, value in table.items():
        with found.collect():
            if name not in _DEPRECATED:
                check_name(name, _TYPES, origin=origin)
            values[name] = _read_setting(name, value, env, origin=f"{origin}: {name}")
    return values


def _read_environment(
    env: Mapping[str, str], named: set[str], values: dict[str, Any], found: ProblemCollector
) -> list[str]:
    """Add the settings of the environment to `values`. Return warnings about the variables that are ignored."""
    ignored = []
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in named:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _IN_ENVIRONMENT or variable != variable.upper() or is_service_link(variable, text):
            ignored.append(variable)
            continue
        with found.collect():
            if name == "api_keys":
                values[name] = _read_keys(read_keys_of_list(text, origin=variable), env, origin=variable)
            elif name in ("seal_keys", "agent_tools", "allowed_hosts", "outbound_allow"):
                values[name] = tuple(part.strip() for part in text.split(",") if part.strip())
            elif text:  # an empty variable counts as not set
                values[name] = _read_setting(name, text, env, origin=variable, strict=False)
    return list(describe_ignored_variables(ignored, _IN_ENVIRONMENT))


def _read_setting(name: str, value: Any, env: Mapping[str, str], *, origin: str, strict: bool = True) -> Any:
    if name == "api_keys":
        return _read_keys(value, env, origin=origin)
    if name == "backends":
        return _read_backends(value, env, origin=origin)
    if name in _READERS:
        return _READERS[name](value, origin=origin)
    if name in _TABLES:
        return _read_table_of(value, _TABLES[name], env, origin=origin)
    if name == "mcp_servers":
        return _read_mcp_servers(value, env, origin=origin)
    if name == "dbos":
        return _read_dbos(value, env, origin=origin)
    if name == "data_dir":
        return expand_path(convert(str(value) if isinstance(value, Path) else value, str, origin=origin), env)
    return convert(value, _TYPES[name], origin=origin, strict=strict)


class _KeyEntry(Struct):
    key: str | None = None
    key_env: str | None = None
    project: Annotated[str, Meta(min_length=1)] = DEFAULT_PROJECT
    scope: KeyScope = "admin"
    id: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{0,64}$")] = ""


def _read_keys(value: Any, env: Mapping[str, str], *, origin: str) -> tuple[ApiKey, ...]:
    found = ProblemCollector()
    keys: dict[str, ApiKey] = {}
    for index, table in enumerate(convert(value, list[dict[str, Any]], origin=origin)):
        where = f"{origin}[{index}]"
        with found.collect():
            key = _read_key(table, env, origin=where)
            if key.key in keys:
                raise ConfigError(f"{where}: duplicate key.")
            keys[key.key] = key
    found.raise_any()
    return tuple(keys.values())


def _read_key(table: Mapping[str, Any], env: Mapping[str, str], *, origin: str) -> ApiKey:
    entry: _KeyEntry = convert_table(table, _KeyEntry, origin=origin)
    if (entry.key is None) == (entry.key_env is None):
        raise ConfigError(f"{origin}: set either key or key_env.")
    key = entry.key if entry.key_env is None else read_variable(entry.key_env, env, origin=f"{origin}.key_env")
    if not key or not key.isprintable() or key != key.strip():
        raise ConfigError(f"{origin}: a key must be a non-empty line of text without spaces around it.")
    return ApiKey(key=key, project=entry.project, scope=entry.scope, id=entry.id)


def _read_backends(value: Any, env: Mapping[str, str], *, origin: str) -> dict[str, BackendSettings]:
    found = ProblemCollector()
    backends: dict[str, BackendSettings] = {}
    for name, table in convert(value, dict[str, dict[str, Any]], origin=origin).items():
        where = f"{origin}.{name}"
        options = dict(table)
        kind = options.pop("kind", None)
        with found.collect():
            if not isinstance(kind, str) or not kind:
                raise ConfigError(f'{where}: a backend needs a kind, as in kind = "embedded".')
            backends[name] = BackendSettings(kind=kind, options=resolve_variables(options, env, origin=where))
    found.raise_any()
    if not backends:
        raise ConfigError(f"{origin}: at least one backend is required.")
    return backends


def _read_models(value: Any, *, origin: str) -> dict[str, tuple[str, ...]]:
    """Parse `name = "backend/model"`, or an array of such targets with the fallbacks."""
    found = ProblemCollector()
    models: dict[str, tuple[str, ...]] = {}
    for name, targets in convert(value, dict[str, str | list[str]], origin=origin).items():
        models[name] = (targets,) if isinstance(targets, str) else tuple(targets)
        if not name or not models[name] or not all(models[name]):
            found.problems.append(
                f'{origin}.{name}: a target is a backend or backend/model, as in "local" or "local/some-model".'
            )
    found.raise_any()
    return models


_READERS: dict[str, Callable[..., Any]] = {"models": _read_models, "projects": read_projects, "prices": read_prices}


def _read_mcp_servers(value: Any, env: Mapping[str, str], *, origin: str) -> dict[str, McpServerSettings]:
    found = ProblemCollector()
    servers: dict[str, McpServerSettings] = {}
    for name, table in convert(value, dict[str, dict[str, Any]], origin=origin).items():
        with found.collect():
            servers[name] = _read_table_of(table, McpServerSettings, env, origin=f"{origin}.{name}")
    found.raise_any()
    return servers


def _read_table_of(value: Any, kind: type[Struct], env: Mapping[str, str], *, origin: str) -> Any:
    """Parse a table of settings. Secrets in it, and in the tables inside it, may come from the environment."""
    table = resolve_variables(convert(value, dict[str, Any], origin=origin), env, origin=origin)
    for name, inner in table.items():
        if isinstance(inner, dict):
            table[name] = resolve_variables(inner, env, origin=f"{origin}.{name}")
    return convert_table(table, kind, origin=origin)


class _DbosTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[dbos]` of version 0.1.0. Its limits set the new settings, its other options have no effect."""

    database: str = ""
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    concurrency_per_project: Annotated[int, Meta(ge=1)] | None = None
    starts_per_minute: Annotated[int, Meta(ge=1)] | None = None
    polling_seconds: Annotated[float, Meta(ge=0.01, le=60)] = 0.1


class _Dbos(Struct, frozen=True):
    """The setting `dbos` of version 0.1.0, translated to the current settings."""

    limits: dict[str, int] = {}
    warnings: tuple[str, ...] = ()


def _read_dbos(value: Any, env: Mapping[str, str], *, origin: str) -> _Dbos:
    if value is False:
        return _Dbos(warnings=(f"{origin}: deprecated and without effect. Remove it.",))
    table = resolve_variables(convert(value, dict[str, Any], origin=origin), env, origin=origin)
    settings: _DbosTable = convert_table(table, _DbosTable, origin=origin)
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
