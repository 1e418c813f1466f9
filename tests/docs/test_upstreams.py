"""docs/guides/upstreams.md lists every option with its default, and its examples are valid."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.chat_completions.backend import ChatCompletionsOptions
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.registry import create
from antiphon.backends.responses.request import ResponsesOptions
from antiphon.config.loading import load
from antiphon.upstream.options import UpstreamOptions

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "upstreams.md"
TEXT = GUIDE.read_text("utf-8")
EXAMPLES = re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)


def list_defaults(struct: type[msgspec.Struct], *, beyond: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    inherited = beyond.__struct_fields__ if beyond is not None else ()
    return {field.name: field.default for field in msgspec.structs.fields(struct) if field.name not in inherited}


@pytest.mark.parametrize(
    ("heading", "defaults"),
    [
        ("These options are common to all kinds", list_defaults(UpstreamOptions)),
        ("Options of this kind", list_defaults(ChatCompletionsOptions, beyond=UpstreamOptions)),
        ("### Quirks", list_defaults(Quirks)),
        ("| Responses option", list_defaults(ResponsesOptions, beyond=UpstreamOptions)),
    ],
)
def test_guide_lists_every_option_with_its_default(heading: str, defaults: dict[str, Any]) -> None:
    table = TEXT.split(heading, 1)[1].split("|---|", 1)[1].split("\n\n", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, flags=re.MULTILINE))
    assert list(listed) == list(defaults)
    for name, value in defaults.items():
        if isinstance(value, str | int | float):
            assert listed[name] == f"`{json.dumps(value)}`", name


@pytest.mark.parametrize("example", EXAMPLES)
def test_guide_example_creates_its_backends(example: str, tmp_path: Path) -> None:
    path = tmp_path / "antiphon.toml"
    path.write_text(example)
    variables = dict.fromkeys(re.findall(r'_env = "(\w+)"', example), "sk-test")
    settings = load(path, variables | {"HOME": str(tmp_path)}, {})
    for name, backend in settings.backends.items():
        create(backend.kind, name=name, options=backend.options, data_dir=tmp_path)
    assert settings.backends
