"""The compared servers: how each is installed, configured and started.

Every server has one worker and one core. Logs are as their documentation recommends for production, or default.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

import antiphon
from benchmarks import peers
from benchmarks.client import HOST
from benchmarks.peers import Environment
from benchmarks.servers import Server, make_antiphon_command, read_cpu, read_megabytes
from benchmarks.side_by_side.models import MODELS

KEY = f"sk-{secrets.token_hex(32)}"
_START_SECONDS = 90.0
# LiteLLM has a copy of the file that OGX wants to download when it starts.
_TIKTOKEN_FILE = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"

# Work that a server may not support.
WHOLE, STORE, CHAIN, TOOL, WEBSOCKET = "whole", "store", "chain", "tool", "websocket"


class Peer(NamedTuple):
    """A compared server.

    `prepare` takes its interpreter, folder and port and the port of the upstream, and returns the command.
    `unsupported` gives the reason for each kind of work that the server cannot do; `remarks` are for work that it does
    in its own manner.
    """

    name: str
    package: str
    environment: Environment | None
    upstream: str
    settings: str
    prepare: Callable[[Path, Path, int, int], list[str]]
    ready_path: str
    path: str = "/v1/responses"
    model_prefix: str = ""
    key: str = ""
    variables: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    unsupported: Mapping[str, str] = {}
    remarks: Mapping[str, str] = {}

    def make_server(self, python: Path, upstream_port: int, folder: Path, cores: Collection[int]) -> Server:
        def prepare(own_folder: Path, port: int) -> list[str]:
            return self.prepare(python, own_folder, port, upstream_port)

        variables = self.variables(folder)
        return Server(self.name, self.ready_path, prepare, _START_SECONDS, variables, cores)


def _prepare_antiphon(kind: str) -> Callable[[Path, Path, int, int], list[str]]:
    def prepare(python: Path, folder: Path, port: int, upstream_port: int) -> list[str]:
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\n[[api_keys]]\nkey = "{KEY}"\n[backends.upstream]\nkind = "{kind}"\n'
            f'base_url = "http://{HOST}:{upstream_port}/v1"\nmodels = {json.dumps(MODELS)}\n'
        )
        return make_antiphon_command(folder, port)

    return prepare


def _prepare_litellm(python: Path, folder: Path, port: int, upstream_port: int) -> list[str]:
    models = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"openai/{model}",
                "api_base": f"http://{HOST}:{upstream_port}/v1",
                "api_key": "none",
                # Otherwise it forwards requests to the upstream's Responses API.
                "use_chat_completions_api": True,
            },
        }
        for model in MODELS
    ]
    settings = {
        "model_list": models,
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"set_verbose": False},
    }
    # JSON is valid YAML.
    (folder / "config.yaml").write_text(json.dumps(settings))
    start = "import sys; from litellm import run_server; sys.exit(run_server())"
    options = ["--config", str(folder / "config.yaml"), "--host", HOST, "--port", str(port), "--num_workers", "1"]
    return [str(python), "-c", start, *options, "--telemetry", "False"]


def _prepare_ogx(python: Path, folder: Path, port: int, upstream_port: int) -> list[str]:
    def on(backend: str, **more: str) -> dict[str, str]:
        return more | {"backend": backend}

    def provide(kind: str, name: str, **config: object) -> list[dict[str, object]]:
        return [{"provider_id": name, "provider_type": f"{kind}::{name}", "config": config}]

    sql, key_values = "sql_default", "kv_default"
    settings = {
        "version": 2,
        "distro_name": "benchmark",
        "apis": ["inference", "responses", "tool_runtime", "vector_io", "files"],
        "providers": {
            "inference": provide("remote", "vllm", base_url=f"http://{HOST}:{upstream_port}/v1", api_token="none"),
            "responses": provide("inline", "builtin", persistence={"responses": on(sql, table_name="responses")}),
            "vector_io": provide(
                "inline",
                "sqlite-vec",
                db_path=str(folder / "vectors.db"),
                persistence=on(key_values, namespace="vector_io"),
            ),
            "files": provide(
                "inline",
                "localfs",
                storage_dir=str(folder / "files"),
                metadata_store=on(sql, table_name="files_metadata"),
            ),
        },
        "storage": {
            "backends": {
                key_values: {"type": "kv_sqlite", "db_path": str(folder / "keys.db")},
                sql: {"type": "sql_sqlite", "db_path": str(folder / "sql.db")},
            },
            "stores": {
                "metadata": on(key_values, namespace="registry"),
                "inference": on(sql, table_name="inference_store"),
                "conversations": on(sql, table_name="openai_conversations"),
                "prompts": on(key_values, namespace="prompts"),
                "connectors": on(key_values, namespace="connectors"),
            },
        },
        "server": {"host": HOST, "port": port},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    return [str(python.with_name("ogx")), "run", str(folder / "config.yaml"), "--port", str(port), "--insecure"]


def _make_ogx_variables(folder: Path) -> dict[str, str]:
    found = next(peers.BRIDGE.folder.rglob(_TIKTOKEN_FILE), None)
    cache = {"TIKTOKEN_CACHE_DIR": str(found.parent)} if found else {}
    return cache | {"HOME": str(folder), "OGX_LOGGING": "all=warning"}


def _prepare_open_responses_server(python: Path, folder: Path, port: int, upstream_port: int) -> list[str]:
    start = "from open_responses_server.cli import start_server; start_server()"
    variables = {
        "API_ADAPTER_HOST": HOST,
        "API_ADAPTER_PORT": str(port),
        "OPENAI_BASE_URL_INTERNAL": f"http://{HOST}:{upstream_port}",
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items()), str(python), "-c", start]


def _prepare_agentic_api(python: Path, folder: Path, port: int, upstream_port: int) -> list[str]:
    options = ["--gateway-host", HOST, "--gateway-port", str(port), "--skip-llm-ready-check"]
    database = f"sqlite://{folder / 'agentic.db'}?mode=rwc"
    upstream = f"http://{HOST}:{upstream_port}"
    return [str(python.with_name("agentic-server")), "--llm-api-base", upstream, *options, "--db-url", database]


CHAT, RESPONSES = "Chat Completions", "Responses"

ANTIPHON = Peer(
    "Antiphon",
    "antiphon",
    None,
    CHAT,
    "default settings: SQLite store, access log; a key",
    _prepare_antiphon("chat_completions"),
    "/readyz",
    key=KEY,
)
ANTIPHON_RESPONSES = ANTIPHON._replace(name="Antiphon (R)", upstream=RESPONSES, prepare=_prepare_antiphon("responses"))
LITELLM = Peer(
    "LiteLLM",
    "litellm",
    peers.BRIDGE,
    CHAT,
    "`--num_workers 1`, `LITELLM_LOG=ERROR`, `LITELLM_MODE=PRODUCTION`, `use_chat_completions_api`, a master key, no "
    "database",
    _prepare_litellm,
    "/health/liveliness",
    key=KEY,
    variables=lambda folder: {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        # Otherwise it downloads its list of prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    unsupported={
        CHAIN: "continues a response only with PostgreSQL",
        WEBSOCKET: "its WebSocket needs an upstream that has one",
    },
    remarks={STORE: "ignores `store`: it stores responses only with PostgreSQL"},
)
OGX = Peer(
    "OGX",
    "ogx",
    peers.OGX,
    CHAT,
    "`remote::vllm`, `inline::builtin` responses on SQLite, `OGX_LOGGING=all=warning`, no authentication",
    _prepare_ogx,
    "/v1/health",
    model_prefix="vllm/",
    variables=_make_ogx_variables,
)
OPEN_RESPONSES_SERVER = Peer(
    "open-responses-server",
    "open-responses-server",
    peers.OPEN_RESPONSES_SERVER,
    CHAT,
    "default settings; its log of every chunk cannot be turned off; no authentication",
    _prepare_open_responses_server,
    "/health",
    path="/responses",
    unsupported={WHOLE: "answers streamed requests only", WEBSOCKET: "no WebSocket"},
    remarks={STORE: "ignores `store`: it has the last 100 conversations in memory"},
)
AGENTIC_API = Peer(
    "agentic-api",
    "agentic-api",
    peers.AGENTIC_API,
    RESPONSES,
    "`agentic-server` (Rust) on SQLite, `RUST_LOG=warn`, no authentication",
    _prepare_agentic_api,
    "/health",
    variables=lambda folder: {"HOME": str(folder), "AGENTIC_API_HOME": str(folder), "RUST_LOG": "warn"},
)
PEERS = (ANTIPHON, LITELLM, OGX, OPEN_RESPONSES_SERVER, ANTIPHON_RESPONSES, AGENTIC_API)


class ProcessTree(NamedTuple):
    """A process and its descendants."""

    pid: int

    def find(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (thread / "children").read_text().split())
        return found

    @property
    def cpu(self) -> float:
        return sum(map(read_cpu, self.find()))

    @property
    def megabytes(self) -> float:
        return sum(map(read_megabytes, self.find()))


def read_version(peer: Peer, python: Path) -> str:
    if peer.environment is None:
        return metadata.version(peer.package)
    return _find_distribution(peer.package, _find_packages(python)).version


def measure_installed_size(peer: Peer, python: Path) -> float:
    """Return the megabytes of a server's package and of everything that it requires."""
    folder = _find_packages(python)
    names = {peer.package} if peer.environment is None else None
    size = 0
    for distribution in _list_distributions(folder, names):
        for file in distribution.files or []:
            with contextlib.suppress(OSError):
                size += Path(str(distribution.locate_file(file))).stat().st_size
    if peer.environment is None:
        # An editable installation: its own files are in the source tree.
        source = Path(antiphon.__path__[0])
        size += sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    return size / 2**20


def _find_packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*/site-packages"))


def _find_distribution(name: str, folder: Path) -> metadata.Distribution:
    return next(iter(metadata.distributions(name=name, path=[str(folder)])))


def _list_distributions(folder: Path, names: Collection[str] | None) -> Iterator[metadata.Distribution]:
    """Yield all distributions except the installers, or those with these names and everything that they require."""
    if names is None:
        for distribution in metadata.distributions(path=[str(folder)]):
            if distribution.name not in ("pip", "setuptools"):
                yield distribution
        return
    waiting = list(names)
    for name in waiting:
        for distribution in metadata.distributions(name=name, path=[str(folder)]):
            yield distribution
            requirements = map(Requirement, distribution.requires or [])
            wanted = [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
            waiting += [each for each in wanted if each not in waiting]
