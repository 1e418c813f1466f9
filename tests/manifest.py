"""The behaviour manifest: the state of every part of the Responses API, and the page generated from it.

    python tests/manifest.py      writes docs/behaviour.md

The data is in tests/behaviour/manifest, one file per family. A group of entries has a state, the names of the entries,
and the ids of the tests that show it. In a test id, `{name}` is replaced by the name of the entry. The states:

    implemented   follows the API
    accepted      echoed, stored or forwarded without change
    refused       an error names it
    planned       not supported yet; the note gives the reason or the present behaviour
"""

import functools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "behaviour" / "manifest"
PAGE = ROOT / "docs" / "behaviour.md"

State = Literal["implemented", "accepted", "refused", "planned"]
STATES: tuple[State, ...] = ("implemented", "accepted", "refused", "planned")
# In the order of the page.
FAMILIES = (
    "endpoints",
    "hosted_endpoints",
    "organization_endpoints",
    "parameters",
    "input_items",
    "output_items",
    "parts",
    "tools",
    "choices",
    "formats",
    "includes",
    "events",
    "statuses",
    "reasons",
    "rules",
    "stateless",
    "contract",
    "requests",
    "results",
    "provider",
    "complaints",
    "agent_complaints",
    "pitfalls",
    "wire",
)
_LONGEST_LIST = 6
_LINE_LENGTH = 120


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str]
    tests: list[str] = []
    note: str = ""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family. `gaps` describes the missing parts in words, if the entry names do not."""

    title: str
    about: str = ""
    gaps: str = ""
    implemented: list[Group] = []
    accepted: list[Group] = []
    refused: list[Group] = []
    planned: list[Group] = []


class Entry(msgspec.Struct, frozen=True):
    name: str
    state: State
    tests: tuple[str, ...]
    note: str


@functools.cache
def load(family: str) -> File:
    return msgspec.toml.decode((DATA / f"{family}.toml").read_bytes(), type=File)


def entries(family: str) -> Iterator[Entry]:
    for state in STATES:
        for group in getattr(load(family), state):
            for name in group.names:
                yield Entry(name, state, tuple(test.replace("{name}", name) for test in group.tests), group.note)


def names(family: str, *states: State) -> list[str]:
    """Return the entry names of a family, in these states or in all."""
    return [entry.name for entry in entries(family) if not states or entry.state in states]


# The page


def render_page() -> str:
    """Return the text of docs/behaviour.md."""
    head = (
        "# Supported behaviour\n\n"
        "Every part of the Responses API and its state in Antiphon. `make format` generates this page from\n"
        "`tests/behaviour/manifest`, which also names the tests of each entry.\n\n"
        "*Implemented*: it follows the API. *Accepted*: it is echoed, stored or forwarded without change.\n"
        "*Refused*: an error names it. *Planned*: it is not supported yet.\n"
        "Every entry that is not planned has tests.\n"
    )
    return head + render_summary() + "".join(map(_render_family, FAMILIES))


def render_summary() -> str:
    """Return the table of all families: the number of entries in each state, and the missing parts."""
    lines = [
        "\n## Summary\n",
        "|  | implemented | accepted | refused | planned | not supported |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        counts = " | ".join(str(len(names(family, state)) or "") for state in STATES)
        lines.append(f"| {load(family).title} | {counts} | {_list_gaps(family)} |")
    return "\n".join(lines) + "\n"


def _list_gaps(family: str) -> str:
    if load(family).gaps:
        return load(family).gaps
    gaps = names(family, "refused", "planned")
    shown = [f"`{name}`" for name in (gaps if len(gaps) <= _LONGEST_LIST else gaps[: _LONGEST_LIST - 1])]
    more = [f"{len(gaps) - len(shown)} more"] if len(gaps) > len(shown) else []
    return ", ".join(shown + more)


def _render_family(family: str) -> str:
    file = load(family)
    about = textwrap.fill(file.about, _LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
    lines = [f"\n## {file.title}\n", *([f"{about}\n"] if about else [])]
    lines += ["| name | state | note |", "|---|---|---|"]
    lines += [f"| `{entry.name}` | {entry.state} | {entry.note} |" for entry in entries(family)]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(render_page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
