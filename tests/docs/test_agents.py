"""The guides list every option of agents, runs, tools and MCP servers, and every kind of outcome."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from antiphon import Agent
from antiphon.agent.arguments import ResumeOptions, StartOptions
from antiphon.agent.outcome import OutcomeKind
from antiphon.tools.base import Tool
from antiphon.tools.mcp import McpOptions

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
DEPRECATED = {"state", "durable"}
# The parts of a tool that come from its function.
DERIVED = {"parameters", "invoke"}


def list_options(heading: str, page: str = "agents.md") -> list[str]:
    """Return the names in the first column of the table with this heading."""
    rows = (GUIDES / page).read_text("utf-8").split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [
        name for cell in re.findall(r"^\| (.*?) \|", rows, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]


def list_keywords(function: object) -> set[str]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("option of `Agent` | default", list_keywords(Agent.__init__)),
        (
            "option of a run",
            {*list_keywords(Agent.run_stream), *StartOptions.__annotations__, *ResumeOptions.__annotations__},
        ),
        ("option of `as_tool`", list_keywords(Agent.as_tool)),
        ("option", set(Tool.__struct_fields__) - DERIVED),
    ],
)
def test_every_option_is_listed_once(heading: str, names: Iterable[str]) -> None:
    assert sorted(list_options(heading)) == sorted(set(names) - DEPRECATED)


def test_every_kind_of_outcome_is_listed_once() -> None:
    assert sorted(list_options("kind")) == sorted(get_args(OutcomeKind))


def test_every_option_of_mcp_servers_is_listed_once() -> None:
    assert sorted(list_options("option", "mcp.md")) == sorted(McpOptions.__annotations__)
