"""docs/configuration.md lists every setting and its default."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.embedded.backend import EmbeddedOptions
from antiphon.config.limits import FileLimits, UsageLimits
from antiphon.config.loading import load
from antiphon.config.settings import EmbeddingSettings, GrammarLimits, Settings
from antiphon.config.tools import (
    CodeInterpreterSettings,
    ImageGenerationSettings,
    McpServerSettings,
    ProgramSettings,
    WebSearchSettings,
)

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "configuration.md").read_text("utf-8")
# The heading before the table of each table of the settings, with the page.
TABLES = [
    ("configuration.md", "## Grammars", GrammarLimits),
    ("configuration.md", "## Files", FileLimits),
    ("configuration.md", "## Code interpreter", CodeInterpreterSettings),
    ("configuration.md", "## Programs", ProgramSettings),
    ("configuration.md", "## Embeddings", EmbeddingSettings),
    ("guides/hosted-mcp.md", "## Servers in the settings", McpServerSettings),
    ("guides/web-search.md", "# Web search", WebSearchSettings),
    ("guides/image-generation.md", "# Image generation", ImageGenerationSettings),
    ("guides/limits.md", "# Limits", UsageLimits),
]


def read_table(heading: str) -> dict[str, str]:
    """Return the first two columns of the table with this heading: names and defaults."""
    rows = TEXT.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", rows, flags=re.MULTILINE))


def find_plain_defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the defaults that are a single value."""
    found = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float)}


@pytest.mark.parametrize(("heading", "struct"), [("setting", Settings), ("option", EmbeddedOptions)])
def test_every_setting_is_listed_with_its_default(heading: str, struct: type[msgspec.Struct]) -> None:
    listed = read_table(heading)
    assert list(listed) == [
        name for name in struct.__struct_fields__ if name != "warnings"
    ]  # `warnings` is not a setting
    for name, value in find_plain_defaults(struct).items():
        assert listed[name] == f"`{json.dumps(value)}`", name


@pytest.mark.parametrize(("page", "heading", "struct"), TABLES, ids=[struct.__name__ for *_, struct in TABLES])
def test_every_field_of_a_table_is_listed(page: str, heading: str, struct: type[msgspec.Struct]) -> None:
    text = "\n" + (DOCS / page).read_text("utf-8")
    rows = text.split(f"\n{heading}", 1)[1].split("|---|", 1)[1].split("\n\n", 1)[0]
    cells = re.findall(r"^\| (.*?) \|(?: (.*?) \|)?", rows, flags=re.MULTILINE)
    listed = {name: default for names, default in cells for name in re.findall(r"`(\w+)`", names)}
    assert listed.keys() - {"api_key_env"} == set(struct.__struct_fields__)
    defaults = {name: value for name, value in find_plain_defaults(struct).items() if value != ""}
    assert {name: json.loads(listed[name].strip("`")) for name in defaults} == defaults


def test_example_file_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert example is not None
    path = tmp_path / "antiphon.toml"
    path.write_text(example[1])
    settings = load(path, {"ADAS_KEY": "sk-ada", "HOME": str(tmp_path)}, {})
    assert list(settings.backends) == list(tomllib.loads(example[1])["backends"])
    assert [key.project for key in settings.api_keys] == ["ada", "default"]
