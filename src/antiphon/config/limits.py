"""The tables of the settings for limits, projects and prices."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from antiphon.config.readers import ProblemCollector, check_name, convert, convert_table
from antiphon.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=2**53)]
ANY_MODEL = "*"
"""The name of the price for models without one of their own."""

Price = Annotated[float, Meta(ge=0, le=1e9)]


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an API key. None is no limit. Months are calendar months in UTC."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    tokens_per_month: Count | None = None
    cost_per_month: Annotated[float, Meta(gt=0)] | None = None

    @property
    def has_any(self) -> bool:
        """True if one of these limits is set."""
        return any(getattr(self, name) is not None for name in KeyLimits.__struct_fields__)

    @property
    def has_budget(self) -> bool:
        return self.tokens_per_month is not None or self.cost_per_month is not None


class UsageLimits(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tables `[limits]`, for every key, and `[projects.NAME.limits]`, for all keys of a project together.

    `queued`: background responses that wait. `background`: background responses that run at once. `stored_bytes`: size
    of the stored responses, events and conversations. These three are always limits of a project: `[limits]` has their
    default.
    """

    queued: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    background: Count | None = None
    stored_bytes: Count | None = None


class ProjectSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[projects.NAME]`. `key_limits` replaces the table `[limits]` for the keys of the project."""

    limits: UsageLimits = UsageLimits()
    key_limits: KeyLimits | None = None


class ModelPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[prices.MODEL]`: prices of a million tokens. Without `cached_input`, cached tokens cost `input`."""

    input: Price
    output: Price
    cached_input: Price | None = None

    def compute_cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        cached_price = self.input if self.cached_input is None else self.cached_input
        fresh_tokens = max(0, input_tokens - cached_tokens)
        return (fresh_tokens * self.input + cached_tokens * cached_price + output_tokens * self.output) / 1_000_000


class FileLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[files]`: limits on files, uploads and vector stores.

    `directory` is a folder that all nodes share, for the contents of files. Without it, they are in PostgreSQL.
    """

    directory: str = ""
    max_file_bytes: Annotated[int, Meta(ge=1)] = 512 * 1024 * 1024
    max_upload_bytes: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024 * 1024
    max_part_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_project_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_project_index_bytes: Annotated[int, Meta(ge=1)] = 16 * 1024 * 1024 * 1024
    max_files: Annotated[int, Meta(ge=1)] = 100_000
    max_uploads: Annotated[int, Meta(ge=1)] = 10_000
    max_upload_parts: Annotated[int, Meta(ge=1)] = 10_000
    max_vector_stores: Annotated[int, Meta(ge=1)] = 100_000
    max_vector_store_files: Annotated[int, Meta(ge=1)] = 10_000
    max_input_bytes: Annotated[int, Meta(ge=1)] = 50 * 1024 * 1024
    max_text_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    max_file_tokens: Annotated[int, Meta(ge=1)] = 5_000_000
    parse_seconds: Annotated[float, Meta(gt=0, le=3600)] = 60
    worker_megabytes: Annotated[int, Meta(ge=64)] = 1024
    idle_seconds: Annotated[float, Meta(ge=0, le=86400)] = 30
    search_cache_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024


# The limits that each process counts, and exchanges through the store.
_COUNTED = KeyLimits.__struct_fields__
_BUDGETS = ("tokens_per_month", "cost_per_month")
_PROJECT_TABLES: Mapping[str, type[Struct]] = {"limits": UsageLimits, "key_limits": KeyLimits}


def read_projects(value: Any, *, origin: str) -> dict[str, ProjectSettings]:
    """Parse the tables `[projects.NAME]`. Raises ConfigProblems."""
    found = ProblemCollector()
    projects: dict[str, ProjectSettings] = {}
    for name, tables in convert(value, dict[str, dict[str, Any]], origin=origin).items():
        where = f"{origin}.{name}"
        fields: dict[str, Any] = {}
        for table, content in tables.items():
            with found.collect():
                check_name(table, _PROJECT_TABLES, origin=where)
                path = f"{where}.{table}"
                checked = convert(content, dict[str, Any], origin=path)
                fields[table] = convert_table(checked, _PROJECT_TABLES[table], origin=path)
        if not name:
            found.problems.append(f"{origin}: the name of a project must not be empty.")
        projects[name] = ProjectSettings(**fields)
    found.raise_any()
    return projects


def read_prices(value: Any, *, origin: str) -> dict[str, ModelPrice]:
    """Parse the tables `[prices.MODEL]`. Raises ConfigProblems."""
    found = ProblemCollector()
    prices: dict[str, ModelPrice] = {}
    for model, table in convert(value, dict[str, Any], origin=origin).items():
        with found.collect():
            if not isinstance(table, dict):
                raise ConfigError(f"{origin}.{model}: expected a table, as in {{ input = 1.0, output = 4.0 }}.")
            prices[model] = convert_table(table, ModelPrice, origin=f"{origin}.{model}")
    found.raise_any()
    return prices


def lacks_prices(limits: UsageLimits, projects: Mapping[str, ProjectSettings], prices: Mapping[str, object]) -> bool:
    """Return True if there is a budget of costs, but no price."""
    return not prices and _has_cost_budget(limits, projects)


def lacks_default_price(
    limits: UsageLimits, projects: Mapping[str, ProjectSettings], prices: Mapping[str, object]
) -> bool:
    """Return True if there is a budget of costs, and models without a price do not count for it."""
    return ANY_MODEL not in prices and _has_cost_budget(limits, projects)


def describe_unused_prices(prices: Mapping[str, object], models: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield warnings about prices that do not apply to the models that they seem to name.

    `models` are the names and targets of `[models]`. A client can also request `backend/model`, so the name of an alias
    may be that of a model: its price is no mistake if the models of the alias have prices of their own.
    """
    found = {name: [target.partition("/")[2] or name for target in targets] for name, targets in models.items()}
    used = {model for targets in found.values() for model in targets}
    for name in prices:
        if name in found and name not in used and not prices.keys() >= set(found[name]):
            yield (
                f"prices: '{name}' is an alias, and a price needs the name of the model on its backend: "
                f"{', '.join(dict.fromkeys(found[name]))}. The price does not apply to the alias."
            )
        elif "*" in name and name != ANY_MODEL:
            yield f"prices: '{name}': patterns are not supported. Use the name of one model, or '*' for all others."


def describe_lost_counts(
    limits: UsageLimits, projects: Mapping[str, ProjectSettings], *, store: str, workers: int
) -> Iterator[str]:
    """Yield warnings about the limits of a server whose counts are only in the memory of each process.

    `store` describes the reason, such as "a stateless server".
    """
    tables = dict(_list_tables(limits, projects))
    names = [f"{path}.{name}" for path, table in tables.items() for name in _list_set(table, _COUNTED)]
    if names and workers > 1:
        yield (
            f"{', '.join(names)}: each of the {workers} workers of {store} counts for itself, so that together they "
            f"admit up to {workers} times as much. Divide the limits by {workers}, use one worker, or store data in "
            "SQLite or PostgreSQL."
        )
    names = [f"{path}.{name}" for path, table in tables.items() for name in _list_set(table, _BUDGETS)]
    if names:
        yield (
            f"{', '.join(names)}: {store} loses the usage when it stops, so that a budget begins again at every start. "
            "Store data in SQLite or PostgreSQL."
        )


def _list_set(table: KeyLimits, names: Iterable[str]) -> list[str]:
    return [name for name in names if getattr(table, name) is not None]


def _has_cost_budget(limits: UsageLimits, projects: Mapping[str, ProjectSettings]) -> bool:
    return any(table.cost_per_month is not None for _, table in _list_tables(limits, projects))


def _list_tables(limits: UsageLimits, projects: Mapping[str, ProjectSettings]) -> Iterator[tuple[str, KeyLimits]]:
    """Yield all tables of limits, with their param paths."""
    yield "limits", limits
    for name, project in projects.items():
        yield f"projects.{name}.limits", project.limits
        if project.key_limits is not None:
            yield f"projects.{name}.key_limits", project.key_limits
