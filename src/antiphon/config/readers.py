"""Helpers that read settings: conversion of values, environment variables, and errors that name all problems."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from antiphon.errors import ConfigError

PREFIX = "ANTIPHON_"
# Kubernetes sets such variables for a Service whose name starts with `antiphon`, and Docker for a link.
_LINK_NAME = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


class ConfigProblems(ConfigError):
    """All problems that were found in the settings. The message is the first of them."""

    def __init__(self, problems: Collection[str]) -> None:
        super().__init__(next(iter(problems)))
        self.problems = tuple(problems)


class ProblemCollector:
    """Collects errors, so that one wrong setting does not hide the next."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch a ConfigError."""
        try:
            yield
        except ConfigError as error:
            self.problems += error.problems if isinstance(error, ConfigProblems) else [error.message]

    @contextmanager
    def collect_at(self, path: str) -> Iterator[None]:
        """Catch a ConfigError. Put the path of the setting before a message that does not name it."""
        before = len(self.problems)
        with self.collect():
            yield
        self.problems[before:] = [
            text if text.startswith(path) else f"{path}: {text}" for text in self.problems[before:]
        ]

    def raise_any(self) -> None:
        """Raise ConfigProblems if there are any."""
        if self.problems:
            raise ConfigProblems(self.problems)


def is_service_link(variable: str, value: str) -> bool:
    """Return True if the name and the value of a variable are those of the address of a Service: `tcp://…`."""
    return _LINK_NAME.fullmatch(variable) is not None and _LINK_VALUE.fullmatch(value.strip()) is not None


def describe_ignored_variables(variables: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yield a warning for each variable that is not a setting, and one for all variables of a Service.

    `known` are the settings that have a variable.
    """
    links = []
    for variable in variables:
        if _LINK_NAME.fullmatch(variable):
            links.append(variable)
            continue
        name = variable.removeprefix(PREFIX).lower()
        similar = difflib.get_close_matches(name, sorted(known), n=1)
        advice = f"Did you mean {PREFIX}{similar[0].upper()}?" if similar else "No setting has this name."
        yield f"Unknown environment variable {variable} is ignored. {advice}"
    if links:
        yield (
            f"Ignored as addresses of a Kubernetes Service: {', '.join(sorted(links))}. To avoid such variables, set "
            "enableServiceLinks: false for the Pod."
        )


def convert(value: Any, kind: Any, *, origin: str, strict: bool = True) -> Any:
    """Convert a value to a type. Raises ConfigError."""
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(get_args(kind))}.")
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        if kind is bool and not strict:
            raise ConfigError(f"{origin}: {value!r} is not one of true, false, 1, 0.") from None
        if get_origin(kind) is dict and isinstance(value, Mapping):  # the error does not name the key
            for name, each in value.items():
                convert(each, get_args(kind)[1], origin=f"{origin}.{name}", strict=strict)
        raise ConfigError(describe_error(error, origin=origin)) from None


def describe_error(error: msgspec.ValidationError, *, origin: str) -> str:
    """Return the message for a wrong value, with the path of the field at its beginning."""
    reason, separator, path = str(error).rpartition(" - at `$")
    return f"{origin}{path.rstrip('`')}: {reason}." if separator else f"{origin}: {error}."


def convert_table(table: Mapping[str, Any], kind: type[Struct], *, origin: str) -> Any:
    """Convert a table to a struct. Raises ConfigProblems, with a problem for each unknown or wrong field."""
    found = ProblemCollector()
    for name in table:
        with found.collect():
            check_name(name, kind.__struct_fields__, origin=origin)
    converted: Any = None
    try:
        converted = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        wrong = list(_find_wrong_fields(table, kind, origin=origin))
        # Without a wrong field, one is missing, or several do not fit together. Names are checked above.
        if wrong or not found.problems:
            found.problems += wrong or [describe_error(error, origin=origin)]
    found.raise_any()
    return converted


def _find_wrong_fields(table: Mapping[str, Any], kind: type[Struct], *, origin: str) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if field.name in table:
            try:
                convert(table[field.name], field.type, origin=f"{origin}.{field.name}")
            except ConfigError as error:
                yield error.message


def read_keys_of_list(text: str, *, origin: str) -> list[dict[str, str]]:
    """Parse `key1,key2:project`. An empty key is an error: a missing secret must not open the server to everyone."""
    entries: list[dict[str, str]] = []
    for part in text.split(","):
        key, colon, project = part.strip().rpartition(":")
        if not (key if colon else project):
            raise ConfigError(f"{origin}: empty key; the format is key1,key2:project.")
        entries.append({"key": key, "project": project} if colon else {"key": project})
    return entries


def resolve_variables(options: Mapping[str, Any], env: Mapping[str, str], *, origin: str) -> dict[str, Any]:
    """Replace each option `NAME_env = "VARIABLE"` by NAME with the value of that environment variable."""
    found = ProblemCollector()
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        option = name.removesuffix("_env")
        with found.collect():
            if option in resolved or (option != name and option in options):
                raise ConfigError(f"{origin}: set either {option} or {option}_env.")
            resolved[option] = value if option == name else read_variable(value, env, origin=f"{origin}.{name}")
    found.raise_any()
    return resolved


def read_variable(variable: Any, env: Mapping[str, str], *, origin: str) -> str:
    """Return the value of the environment variable that a setting names. Raises ConfigError if it is not set."""
    value = env.get(variable) if isinstance(variable, str) else None
    if not value:
        # If the value is not a plausible variable name, it may be the secret itself. It must not appear in the log.
        is_name = isinstance(variable, str) and variable.isidentifier() and variable.isupper()
        raise ConfigError(f"{origin}: the environment variable{f' {variable}' if is_name else ''} is not set.")
    return value


def find_named_variables(value: Any) -> Iterable[str]:
    """Yield the environment variables that a file names. They are not settings, even if they start with ANTIPHON_."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name.endswith("_env") and isinstance(inner, str):
                yield inner
            yield from find_named_variables(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from find_named_variables(inner)


def check_name(name: str, known: Collection[str], *, origin: str) -> None:
    """Raise ConfigError if a setting is unknown."""
    if name not in known:
        similar = difflib.get_close_matches(name, sorted(known), n=1)
        advice = f"Did you mean {similar[0]}?" if similar else f"Allowed: {', '.join(sorted(known))}."
        raise ConfigError(f"{origin}: unknown setting '{name}'. {advice}")


def locate_data_dir(env: Mapping[str, str]) -> Path:
    """Return the default data folder."""
    base = env.get("XDG_DATA_HOME", "")
    # The XDG specification requires that a relative path is ignored.
    return (Path(base) if Path(base).is_absolute() else _home(env) / ".local" / "share") / "antiphon"


def expand_path(text: str, env: Mapping[str, str]) -> Path:
    """Return an absolute path. `~` is the home folder."""
    first, *rest = Path(text).parts or (".",)
    return (_home(env).joinpath(*rest) if first == "~" else Path(text)).absolute()


def _home(env: Mapping[str, str]) -> Path:
    home = env.get("HOME")
    return Path(home) if home else Path.home()


def hide_password(url: str) -> str:
    """Return a URL without secrets: *** for the password, and no query, which may contain one too."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return "***"
    shown = url.partition("?")[0]
    return shown.replace(f":{password}@", ":***@", 1) if password else shown
