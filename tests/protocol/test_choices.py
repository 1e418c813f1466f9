import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from antiphon.protocol.choices import find_choices
from antiphon.protocol.containers import CreateContainer
from antiphon.protocol.request import CreateRequest

MCP = {"type": "mcp", "server_label": "s", "server_url": "https://a.example", "require_approval": "x"}
GRAMMAR = {"type": "grammar", "syntax": "x", "definition": ""}


class Point(Struct, rename={"axis": "dimension"}):
    axis: Annotated[Literal["x", "y"], Meta(description="An axis.")] | None = None
    size: int | Literal["auto"] = 0


@pytest.mark.parametrize(
    ("kind", "body", "steps", "choices"),
    [
        (Literal["a", "b"] | None, "x", [], ("a", "b")),
        (Point, {"dimension": "z"}, ["dimension"], ("x", "y")),
        (Point, {"size": "z"}, ["size"], ("auto",)),
        (list[Point], [{}, {"dimension": "z"}], [1, "dimension"], ("x", "y")),
        (CreateRequest, {"tools": [{"type": "shell"}, MCP]}, ["tools", 1, "require_approval"], ("always", "never")),
        (
            CreateRequest,
            {"tools": [{"type": "custom", "name": "c", "format": GRAMMAR}]},
            ["tools", 0, "format", "syntax"],
            ("lark", "regex"),
        ),
        (
            CreateRequest,
            {"input": [{"role": "user", "content": [{"type": "input_file", "detail": "x"}]}]},
            ["input", 0, "content", 0, "detail"],
            ("auto", "low", "high"),
        ),
        (CreateContainer, {"name": "c", "memory_limit": "x"}, ["memory_limit"], ("1g", "4g", "16g", "64g")),
    ],
)
def test_choices_are_those_of_the_type_at_the_path(
    kind: Any, body: Any, steps: Sequence[str | int], choices: tuple[str, ...]
) -> None:
    assert find_choices(kind, json.dumps(body).encode(), steps) == choices


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ({"model": "m"}, ["model"]),
        ({"tools": [{"type": "novelty", "mode": "x"}]}, ["tools", 0, "mode"]),
        ({"tools": [{}]}, ["tools", 1, "type"]),
        ({"tools": "x"}, ["tools", 0]),
        ({}, ["no", "field"]),
    ],
)
def test_field_without_choices_has_none(body: Mapping[str, Any], steps: Sequence[str | int]) -> None:
    assert find_choices(CreateRequest, json.dumps(body).encode(), steps) == ()
