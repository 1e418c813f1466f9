"""`antiphon reload`: make a running server read its settings again, and show the result."""

import os
import signal
import sys
import time
import tomllib
from argparse import Namespace
from pathlib import Path

from antiphon.cli.settings import read_settings
from antiphon.config.loading import environment, find_file
from antiphon.config.readers import expand_path, locate_data_dir
from antiphon.errors import ConfigError
from antiphon.server.running_servers import FOLDER, ReloadResult, RunningServer, find_server, list_servers

_POLL_SECONDS = 0.05


def run(arguments: Namespace) -> int:
    data_dir, problem = _locate_data_dir(arguments)
    server = _choose_server(data_dir, arguments.pid, problem)
    try:
        os.kill(server.pid, signal.SIGHUP)
    except ProcessLookupError:
        raise ConfigError(f"The server with the process id {server.pid} has ended.") from None
    except PermissionError:
        raise ConfigError(
            f"The process {server.pid} belongs to another user: run this command as the user of the server."
        ) from None
    result = _wait_for_result(data_dir, server, arguments.timeout)
    if result.error:
        raise ConfigError(f"The settings of {server.url} were not reloaded: {result.error}")
    if result.restart_needed:
        print(f"antiphon: warning: {result.restart_needed}", file=sys.stderr)
    print(f"{server.url} {result.changes}")
    return 0


def _locate_data_dir(arguments: Namespace) -> tuple[Path, ConfigError | None]:
    """Return the data folder, and the error of the settings. The server must see and report that error itself."""
    try:
        return read_settings(arguments).data_dir, None
    except ConfigError as error:
        variables = environment()
        text = variables.get("ANTIPHON_DATA_DIR") or _read_data_dir(arguments.config)
        return expand_path(text, variables) if text else locate_data_dir(variables), error


def _read_data_dir(path: Path | None) -> str | None:
    try:
        file = find_file(path)
        table = {} if file is None else tomllib.loads(file.read_text())
    except (ConfigError, OSError, ValueError):
        return None
    value = table.get("data_dir")
    return value if isinstance(value, str) else None


def _choose_server(data_dir: Path, pid: int | None, problem: ConfigError | None) -> RunningServer:
    servers = [server for server in list_servers(data_dir / FOLDER) if server.is_local]
    if pid is not None:
        servers = [server for server in servers if server.pid == pid]
    if len(servers) == 1:
        return servers[0]
    if problem is not None:
        raise problem
    if not servers:
        which = "" if pid is None else f" with the process id {pid}"
        raise ConfigError(f"No server{which} runs with the data folder {data_dir}. Use the settings of the server.")
    shown = ", ".join(f"{server.pid} ({server.url})" for server in servers)
    raise ConfigError(f"Several servers run with the data folder {data_dir}: choose one with --pid: {shown}.")


def _wait_for_result(data_dir: Path, server: RunningServer, seconds: float) -> ReloadResult:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = find_server(data_dir / FOLDER, server.pid)
        if now is None:
            raise ConfigError(f"The server {server.url} has ended, or is stopping.")
        if now.reloads > server.reloads:
            return now.result
        time.sleep(_POLL_SECONDS)
    raise ConfigError(f"The server has not reloaded its settings in {seconds:g} seconds. Its log shows the result.")
