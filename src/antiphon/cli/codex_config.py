"""What Codex CLI has to be told of a server: the values of its config.toml, and its catalogue of models."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import Struct

from antiphon.cli.server_client import ServedModel
from antiphon.cli.toml_document import Value, set_values

PROVIDER = "antiphon"
_TABLE = ("model_providers", PROVIDER)
# Codex asks for a compaction item only of a provider with this name; it lets any other summarise in an ordinary turn.
_COMPACTING_NAME = "OpenAI"
_LONGEST_OUTPUT_TOKENS = 10_000
_EFFORTS = {"low": "Quick", "medium": "Balanced", "high": "Thorough"}


class Connection(Struct, frozen=True, kw_only=True):
    """A server and how Codex is to use it. `catalogue` is the file that tells Codex of the models, if there is one."""

    url: str
    model: ServedModel
    key_env: str | None = None
    server_compaction: bool = False
    catalogue: Path | None = None


def merge(text: str, connection: Connection) -> str:
    """A config.toml that points Codex at the server, with everything else as it was."""
    return set_values(set_values(text, (), _top(connection)), _TABLE, _provider(connection))


def _top(connection: Connection) -> Mapping[str, Value | None]:
    window = connection.model.context_window
    return {
        "model": connection.model.id,
        "model_provider": PROVIDER,
        "model_catalog_json": str(connection.catalogue) if connection.catalogue else None,
        # It would outweigh what the catalogue says of each model.
        "model_context_window": None if connection.catalogue else window,
    }


def _provider(connection: Connection) -> Mapping[str, Value | None]:
    return {
        "name": _COMPACTING_NAME if connection.server_compaction else "Antiphon",
        "base_url": f"{connection.url}/v1",
        "wire_api": "responses",
        "env_key": connection.key_env,
        "supports_websockets": True,
    }


def write_catalogue(models: Sequence[ServedModel]) -> str:
    """The file that `model_catalog_json` names. What it leaves out has Codex's defaults."""
    instructions = resources.files("antiphon.cli").joinpath("codex_instructions.md").read_text()
    entries = [_describe(model, priority, instructions) for priority, model in enumerate(models)]
    return json.dumps({"models": entries}, indent=2, ensure_ascii=False) + "\n"


def _describe(model: ServedModel, priority: int, instructions: str) -> dict[str, Any]:
    window = model.context_window
    longest = _LONGEST_OUTPUT_TOKENS if window is None else min(_LONGEST_OUTPUT_TOKENS, window // 4)
    return {
        "slug": model.id,
        "display_name": model.id,
        "description": "Served by Antiphon",
        "priority": priority,
        "visibility": "list",
        "supported_in_api": True,
        "base_instructions": instructions,
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "experimental_supported_tools": [],
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [{"effort": name, "description": text} for name, text in _EFFORTS.items()],
        "support_verbosity": True,
        "input_modalities": ["text", "image"],
        "truncation_policy": {"mode": "tokens", "limit": longest},
        **({} if window is None else {"context_window": window}),
    }
