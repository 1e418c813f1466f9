"""The configuration of Codex CLI for a server: values of its config.toml, and its model catalogue."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import Struct

from antiphon.cli.server_client import ListedModel
from antiphon.cli.toml_document import Value, set_values

PROVIDER = "antiphon"
_TABLE = ("model_providers", PROVIDER)
# Codex requests compaction items only from a provider with this name. From others it requests a summary as text.
_COMPACTING_NAME = "OpenAI"
_MAX_TOOL_OUTPUT_TOKENS = 10_000
_EFFORTS = {"low": "Quick", "medium": "Balanced", "high": "Thorough"}


class CodexOptions(Struct, frozen=True, kw_only=True):
    """A server and the way Codex uses it. `catalogue` is the path of the model catalogue, if there is one."""

    url: str
    model: ListedModel
    key_env: str | None = None
    server_compaction: bool = False
    catalogue: Path | None = None


def merge_config(text: str, options: CodexOptions) -> str:
    """Return the config.toml `text` with the values for the server. Everything else stays unchanged."""
    return set_values(set_values(text, (), _top_values(options)), _TABLE, _provider_values(options))


def _top_values(options: CodexOptions) -> Mapping[str, Value | None]:
    window = options.model.context_window
    return {
        "model": options.model.id,
        "model_provider": PROVIDER,
        "model_catalog_json": str(options.catalogue) if options.catalogue else None,
        # This value would override the windows in the catalogue.
        "model_context_window": None if options.catalogue else window,
    }


def _provider_values(options: CodexOptions) -> Mapping[str, Value | None]:
    return {
        "name": _COMPACTING_NAME if options.server_compaction else "Antiphon",
        "base_url": f"{options.url}/v1",
        "wire_api": "responses",
        "env_key": options.key_env,
        "supports_websockets": True,
    }


def format_catalogue(models: Sequence[ListedModel]) -> str:
    """Return the content of the file that `model_catalog_json` names. Codex has defaults for missing fields."""
    instructions = resources.files("antiphon.cli").joinpath("codex_instructions.md").read_text()
    entries = [_describe_model(model, priority, instructions) for priority, model in enumerate(models)]
    return json.dumps({"models": entries}, indent=2, ensure_ascii=False) + "\n"


def _describe_model(model: ListedModel, priority: int, instructions: str) -> dict[str, Any]:
    window = model.context_window
    limit = _MAX_TOOL_OUTPUT_TOKENS if window is None else min(_MAX_TOOL_OUTPUT_TOKENS, window // 4)
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
        "truncation_policy": {"mode": "tokens", "limit": limit},
        **({} if window is None else {"context_window": window}),
    }
