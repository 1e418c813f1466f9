"""The checks of `antiphon doctor`. Each has a short timeout and changes nothing."""

import asyncio
import http.client
import json
import os
import shutil
import stat
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from antiphon.backends.embedded.library import import_library
from antiphon.backends.embedded.weights import DEFAULT_MODEL, find_weights
from antiphon.backends.registry import create
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.cli.config import find_problems, find_warnings
from antiphon.cli.extras import find_missing_packages
from antiphon.cli.settings import server_url
from antiphon.cli.stored_keys import has_stored_keys, inspect_store
from antiphon.config.loading import find_file
from antiphon.config.readers import hide_password
from antiphon.config.settings import BackendSettings, Settings
from antiphon.engine.assembly import SEAL_FILE, make_sealer
from antiphon.engine.node_settings import (
    SETTINGS_QUESTION,
    compare_nodes,
    decode_nodes,
    describe_node,
    make_setting_digests,
)
from antiphon.engine.sealing import load_secrets, read_secrets
from antiphon.errors import AntiphonError, ConfigError
from antiphon.server.listener import bind_socket
from antiphon.store.condition import StoreCondition
from antiphon.store.files.location import DATABASE_NAME
from antiphon.store.location import is_postgres, locate_files, locate_store
from antiphon.store.sqlite.store import SqliteStore
from antiphon.tools.hosted.code_interpreter.prepare import (
    COMMAND,
    find_compilation,
    find_stage,
    locate_cache,
    name_compiled_file,
)
from antiphon.upstream.error_mapping import REFUSED

_TIMEOUT_SECONDS = 5.0
_PROBE_SECONDS = 2.0
_MAX_CLOCK_OFFSET = 5.0
_DAY = 24 * 60 * 60
_GIGABYTE = 1e9
# Free space below this multiple of `store_min_free_bytes` is a warning.
_LOW_SPACE_FACTOR = 16
_OTHER_USERS = 0o077
_GGUF = b"GGUF"
_SHOWN_MODELS = 5
_SHOWN_NODES = 5
_OK = 200
_CODE = "code sandbox"
_POSTGRES_ADVICE = (
    "Check that PostgreSQL is running, and the address, user and password in the setting 'store', and the rights of "
    "this user."
)
_LISTEN_ADVICE = "Check the settings 'store' and 'store_listen_url'."
_FILE_ADVICE = "Correct the setting 'store' or the permissions, or restore the file from a backup."
_LOCK_ADVICE = "Check the permissions, and that no other program holds a lock on it."
_SETTINGS_ADVICE = "Correct the setting. docs/configuration.md describes all of them."

Status = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True):
    """The result of one check."""

    name: str
    status: Status
    message: str
    advice: str = ""


def ok(name: str, message: str) -> Finding:
    return Finding(name, "ok", message)


def warning(name: str, message: str, advice: str) -> Finding:
    return Finding(name, "warning", message, advice)


def problem(name: str, message: str, advice: str) -> Finding:
    return Finding(name, "problem", message, advice)


async def check_server(settings: Settings, config: Path | None) -> list[Finding]:
    """Run all checks for a server with these settings."""
    checks = [
        _run_check("store", check_store(settings), _POSTGRES_ADVICE if is_postgres(settings.store) else _FILE_ADVICE),
        _run_check("seal keys", check_seal_keys(settings), "Correct seal_keys, or restore the file from a backup."),
    ]
    checks += [
        _run_check(f"backend {name}", check_backend(name, backend, settings), "Correct the settings of the backend.")
        for name, backend in settings.backends.items()
    ]
    checks.append(_run_check("port", check_port(settings), "Set another port or host."))
    results = await asyncio.gather(*checks)
    try:
        has_keys = await has_stored_keys(settings)
    except ConfigError:  # the check of the store reports it
        has_keys = True
    findings = check_settings(settings, config, has_stored_keys=has_keys)
    for found in results:
        findings += found
    store, seal_keys = results[:2]
    has_problem = any(each.status == "problem" and each.name != "clock" for each in (*store, *seal_keys))
    if is_postgres(settings.store) and not settings.stateless and not has_problem:
        findings += await _run_check("nodes", check_nodes(settings), _LISTEN_ADVICE)
    return [*findings, *check_extras(settings), *check_code_interpreter(settings), check_clock()]


async def _run_check(name: str, check: Coroutine[Any, Any, list[Finding]], advice: str) -> list[Finding]:
    """Return the findings of a check. A check that fails is a problem with this advice."""
    try:
        return await asyncio.wait_for(check, _TIMEOUT_SECONDS)
    except TimeoutError:
        return [problem(name, f"no answer within {_TIMEOUT_SECONDS:g} seconds", "Check the address and the network.")]
    except (AntiphonError, OSError) as error:
        return [problem(name, " ".join(str(error).split()), advice)]


def check_settings(settings: Settings, config: Path | None, *, has_stored_keys: bool) -> list[Finding]:
    findings = [
        problem("settings", " ".join(text.split()), _SETTINGS_ADVICE)
        for text in find_problems(settings, has_stored_keys=has_stored_keys)
    ]
    findings += [
        warning("settings", text, "A server starts nevertheless.")
        for text in find_warnings(settings, has_stored_keys=has_stored_keys)
    ]
    return findings or [ok("settings", str(find_file(config) or "no file: the defaults and the environment"))]


async def check_store(settings: Settings) -> list[Finding]:
    if settings.stateless or settings.store.startswith("memory:"):
        return [ok("store", "in memory: nothing is stored on disk")]
    condition = await inspect_store(settings.store)
    shown, is_server = hide_password(settings.store), is_postgres(settings.store)
    advice = _POSTGRES_ADVICE if is_server else _LOCK_ADVICE
    findings = [] if condition is None else list(_judge_store(shown, condition, advice))
    if is_server:
        return [*findings, *_check_file_folder(settings.files.directory)]
    store = locate_store(settings.store)
    assert isinstance(store, SqliteStore)
    path = store.path.absolute()
    if condition is None:
        findings.append(_judge_new_file("store", path, "another store"))
    elif path.stat().st_mtime > time.time() + _DAY:
        findings.append(warning("clock", f"{path} was changed in the future", "Check the date of this machine."))
    findings += await _check_file_database(settings)
    findings.append(_check_disk(path, settings.store_min_free_bytes))
    return findings


def _check_file_folder(directory: str) -> list[Finding]:
    """Return the problem of the folder that all nodes share for the contents of files."""
    if not directory:
        return []
    finding = _judge_new_file("store", Path(directory).absolute() / "contents", "another files.directory")
    return [finding] if finding.status == "problem" else []


async def _check_file_database(settings: Settings) -> list[Finding]:
    """Return the problems of the database of files beside a SQLite store. The first file creates it."""
    folder = locate_files(settings.store).folder
    assert folder is not None
    path = folder.absolute() / DATABASE_NAME
    if not path.is_file():
        return []
    from antiphon.store.sqlite.inspection import inspect_file

    condition = await asyncio.to_thread(inspect_file, path, schema="files")
    return [each for each in _judge_store(str(path), condition, _LOCK_ADVICE) if each.status == "problem"]


def _judge_store(shown: str, condition: StoreCondition, advice: str) -> Iterable[Finding]:
    schema, newest = condition.schema, condition.newest
    if schema > newest:
        text = f"{shown} has schema version {schema}, this program supports up to {newest}"
        yield problem("store", text, "Update Antiphon, or use another store.")
    elif condition.other_tables:
        text = f"{shown} has tables of another program: {', '.join(condition.other_tables)}"
        yield problem("store", text, "Use another file, or a database or a schema of its own.")
    elif condition.refusal is not None:
        text = f"{shown} cannot be written to: {condition.refusal}"
        yield problem("store", text, advice)
    elif schema < newest:
        state = f"schema version {schema}, {newest} is current" if schema else "no tables yet"
        yield warning("store", f"{shown}: {state}", "The next start changes this, or: antiphon db migrate")
    else:
        yield ok("store", f"{shown}, schema version {schema}, can be written to")
    if abs(condition.clock_offset) > _MAX_CLOCK_OFFSET:
        text = f"the clock of the database differs by {condition.clock_offset:+.0f} seconds"
        advice = "Synchronize the clocks of both machines, for example with NTP."
        judge = problem if abs(condition.clock_offset) > _DAY else warning
        yield judge("clock", text, advice)


async def check_nodes(settings: Settings) -> list[Finding]:
    """Compare these settings with those of the running nodes."""
    from antiphon.store.postgres.inspection import ask_processes

    started = time.monotonic()
    answers = await ask_processes(
        settings.store, SETTINGS_QUESTION, seconds=_PROBE_SECONDS, listen_url=settings.store_listen_url
    )
    if answers is None:
        text = (
            "the URL leads to a connection pooler, which does not support LISTEN: other nodes are noticed with a delay"
        )
        return [warning("nodes", text, "Set store_listen_url to the URL of the PostgreSQL server.")]
    seconds = time.monotonic() - started
    nodes = decode_nodes(answers)
    if not nodes:
        return [ok("nodes", "none is running on this database")]
    if not settings.seal_keys and not (settings.data_dir / SEAL_FILE).exists():
        text = f"running: {len(nodes)}. The settings have no seal_keys to compare with theirs"
        return [warning("nodes", text, "Set the seal_keys of the nodes.")]
    own = describe_node(make_setting_digests(settings, make_sealer(settings)))
    differences = list(compare_nodes(own, nodes, seconds=seconds))
    advice = "Use the same version and settings on all nodes, and synchronize their clocks, for example with NTP."
    return [warning("nodes", text, advice) for text in differences] or [
        ok("nodes", f"{len(nodes)} with these settings: {', '.join(node.name for node in nodes[:_SHOWN_NODES])}")
    ]


def _judge_new_file(name: str, path: Path, setting: str) -> Finding:
    folder = _find_existing_folder(path)
    if not folder.is_dir():
        return problem(name, f"{folder} is not a folder", f"Set {setting}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        return problem(name, f"{path} cannot be created: no permission for {folder}", "Change the permissions.")
    return ok(name, f"{path} does not exist yet: the first start creates it")


def _find_existing_folder(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def _check_disk(path: Path, min_free: int) -> Finding:
    folder = _find_existing_folder(path)
    free = shutil.disk_usage(folder).free
    size = f"{free / _GIGABYTE:.1f} GB" if free >= _GIGABYTE else f"{free / 1e6:.0f} MB"
    text = f"{size} are free at {folder}"
    if free < min_free:
        return problem("disk", text, "Free some space: below store_min_free_bytes the server is not ready.")
    if free < _LOW_SPACE_FACTOR * min_free:
        return warning("disk", text, "Free some space, or shorten retention_days.")
    return ok("disk", text)


async def check_seal_keys(settings: Settings) -> list[Finding]:
    if settings.seal_keys:
        count = len(read_secrets(settings.seal_keys, origin="seal_keys"))
        return [ok("seal keys", f"{count} in the settings")]
    path = settings.data_dir / SEAL_FILE
    if not path.exists():
        return [_judge_new_file("seal keys", path, "data_dir or seal_keys")]
    count = len(load_secrets(path))
    if _may_others_replace_files(path.parent):
        text = f"other users may replace {path}"
        return [warning("seal keys", text, f"Run: chmod go-w {path.parent}")]
    if path.stat().st_mode & _OTHER_USERS:
        return [warning("seal keys", f"other users may access {path}", f"Run: chmod 600 {path}")]
    return [ok("seal keys", f"{count} in {path}")]


def _may_others_replace_files(folder: Path) -> bool:
    """Return True if other users may replace files in a folder. The group of this process is often its own.

    It is that of the user, or that of a volume in a container.
    """
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:  # as for /tmp: only the owner of a file may replace it
        return False
    is_own_group = status.st_gid == os.getegid()
    return bool(status.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWGRP | stat.S_IWOTH))


async def check_backend(name: str, configured: BackendSettings, settings: Settings) -> list[Finding]:
    title = f"backend {name}"
    try:
        backend = create(configured.kind, name=name, options=configured.options, data_dir=settings.data_dir)
    except ConfigError as error:
        return [problem(title, error.message, "Correct this. 'antiphon models' lists the models of all backends.")]
    if configured.kind == "embedded":
        return [_check_weights(title, configured, settings), *await asyncio.to_thread(_check_library, title)]
    if isinstance(backend, UpstreamBackend):
        return [await _check_upstream(title, configured.kind, backend)]
    await backend.start()
    try:
        models = backend.models()
    finally:
        await backend.close()
    return [_judge_models(title, configured.kind, [model.id for model in models])]


def _check_weights(title: str, configured: BackendSettings, settings: Settings) -> Finding:
    path = configured.options.get("weights")
    model = configured.options.get("model", DEFAULT_MODEL)
    weights = find_weights(model, path=Path(path) if path else None, folder=settings.data_dir / "models")
    with weights.open("rb") as file:
        if file.read(len(_GGUF)) != _GGUF:
            return problem(title, f"{weights} is not a GGUF file", f"Get the model again: antiphon pull {model}")
    return ok(title, f"embedded, weights of {model}: {weights} ({weights.stat().st_size / 1e6:.0f} MB)")


def _check_library(title: str) -> list[Finding]:
    """Return a problem if xllamacpp cannot be loaded."""
    try:
        import_library()
    except ConfigError as error:
        return [problem(title, error.message, "Install what is missing, or set another backend.")]
    return []


async def _check_upstream(title: str, kind: str, backend: UpstreamBackend) -> Finding:
    await backend.upstream.start()
    try:
        models = await backend.fetch_models()
    except AntiphonError as error:
        if error.code == REFUSED and backend.upstream.options.models is not None:
            text = f"{kind}, reachable, but it does not list its models"
            return warning(title, text, "The configured models are served. Check base_url if requests fail.")
        return problem(title, error.message, "Check base_url, the key, and that the upstream is running.")
    finally:
        await backend.upstream.close()
    return _judge_models(title, kind, [model.id for model in models])


def _judge_models(title: str, kind: str, models: list[str]) -> Finding:
    if not models:
        return warning(title, f"{kind}, reachable, but it lists no models", "Load a model there, or set models here.")
    more = f" and {len(models) - _SHOWN_MODELS} more" if len(models) > _SHOWN_MODELS else ""
    return ok(title, f"{kind}, reachable, models: {', '.join(models[:_SHOWN_MODELS])}{more}")


def check_extras(settings: Settings) -> list[Finding]:
    missing = find_missing_packages()
    needed = {"embedded"} if any(each.kind == "embedded" for each in settings.backends.values()) else set()
    if is_postgres(settings.store) and not settings.stateless:
        needed.add("postgres")
    if settings.mcp_servers:
        needed.add("mcp")
    findings = [
        problem("extras", f"{extra} needs {', '.join(missing[extra])}", f"Run: pip install 'antiphon[{extra}]'")
        for extra in sorted(needed)
        if missing.get(extra)
    ]
    installed = ", ".join(extra for extra, packages in missing.items() if not packages) or "none"
    others = ", ".join(extra for extra, packages in missing.items() if packages and extra not in needed)
    absent = f"; not installed and not needed by the settings: {others}" if others else ""
    return [*findings, ok("extras", f"installed: {installed}{absent}")]


def check_code_interpreter(settings: Settings) -> list[Finding]:
    """Show if the interpreter of the WebAssembly sandbox is compiled. Without the tool there is nothing to show."""
    options = settings.code_interpreter
    if settings.stateless or not options.enabled or options.sandbox != "wasm" or name_compiled_file() is None:
        return []
    folder = locate_cache(settings)
    seconds = find_compilation(folder)
    if find_stage(folder) is not None:
        return [
            ok(_CODE, f"compiled in {folder}" + ("" if seconds is None else "; a faster version is being compiled"))
        ]
    if seconds is not None:
        return [ok(_CODE, f"being compiled into {folder}, for {seconds:.0f} seconds so far; calls wait for it")]
    if options.compile_at_start:
        return [ok(_CODE, f"not compiled yet: the next start of a server compiles it into {folder}")]
    text = f"not compiled: the first call compiles it into {folder}, which takes minutes"
    return [warning(_CODE, text, f"Run: python -m {COMMAND}")]


def check_clock() -> Finding:
    now = time.time()
    # The files of this program were installed in the past.
    if now < Path(__file__).stat().st_mtime - _DAY:
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC is before this program was installed"
        return problem("clock", text, "Set the date of this machine, for example with NTP.")
    return ok("clock", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC")


async def check_port(settings: Settings) -> list[Finding]:
    try:
        bind_socket(settings).close()
    except ConfigError as error:
        found = await asyncio.to_thread(_probe_server, server_url(settings))
        return [found or problem("port", error.message, "Set another port or host, or stop the other program.")]
    if not settings.port:
        return [ok("port", "0: a server selects a free port")]
    return [ok("port", f"{settings.port} on {settings.host} is free: no server is running")]


def _probe_server(url: str) -> Finding | None:
    """Return a finding about the server at an address, or None if it is not this program."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PROBE_SECONDS)
    try:
        _, greeting = _get(connection, "/")
        if greeting.get("name") != "antiphon":
            return None
        status, answer = _get(connection, "/readyz")
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if status == _OK:
        return ok("port", f"a server is running at {url} and is ready")
    reason = answer.get("error", {}).get("message", f"status {status}")
    return warning("port", f"a server is running at {url} and is not ready: {reason}", "See the log of the server.")


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, dict[str, Any]]:
    connection.request("GET", path)
    answer = connection.getresponse()
    payload: dict[str, Any] = json.loads(answer.read(65536))
    return answer.status, payload
