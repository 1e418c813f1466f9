"""What Antiphon does of the Responses API, as data, and the tables that README.md and docs/behaviour.md show of it.

    python tests/manifest.py      writes both anew

The data is in tests/behaviour/manifest, one file per family. A group of entries has a state, the names of the entries,
and the ids of the tests that show it, in which `{name}` stands for the entry's own name:

    implemented   it does what the API says
    carried       it is accepted, and echoed, kept or passed on unharmed
    refused       it gets a clear error
    planned       it is not there yet; the note says why, or what happens instead
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "behaviour" / "manifest"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "behaviour.md"
BEGIN, END = "<!-- behaviour:begin -->\n", "<!-- behaviour:end -->"

State = Literal["implemented", "carried", "refused", "planned"]
STATES: tuple[State, ...] = ("implemented", "carried", "refused", "planned")
# In the order in which they are shown.
FAMILIES = (
    "endpoints",
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
)
_LONGEST_LIST = 6


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str]
    tests: list[str] = []
    note: str = ""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A family. `gaps` says in words what is not there, if the names of the entries do not."""

    title: str
    about: str = ""
    gaps: str = ""
    implemented: list[Group] = []
    carried: list[Group] = []
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
    """The names of a family's entries in any of these states, or of all of them."""
    return [entry.name for entry in entries(family) if not states or entry.state in states]


# The tables


def render_summary() -> str:
    """One line per family: how many of its entries are in which state, and which are not there."""
    lines = [
        "|  | implemented | carried | refused | planned | not there |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        counts = " | ".join(str(len(names(family, state)) or "") for state in STATES)
        lines.append(f"| {load(family).title} | {counts} | {_list_gaps(family)} |")
    legend = (
        "*Carried*: accepted, and echoed, kept or passed on unharmed. *Refused*: with an error that names it.\n"
        "What is not merely planned has its tests: [the whole list](docs/behaviour.md).\n"
    )
    return "\n".join([*lines, "", legend])


def _list_gaps(family: str) -> str:
    if load(family).gaps:
        return load(family).gaps
    gaps = names(family, "refused", "planned")
    shown = [f"`{name}`" for name in (gaps if len(gaps) <= _LONGEST_LIST else gaps[: _LONGEST_LIST - 1])]
    more = [f"{len(gaps) - len(shown)} more"] if len(gaps) > len(shown) else []
    return ", ".join(shown + more)


def render_page() -> str:
    """The whole list."""
    head = (
        "# What works\n\n"
        "Every name of the Responses API, and what becomes of it here. This page is made from\n"
        "`tests/behaviour/manifest`, which also names the tests that show each line: `python tests/manifest.py`\n"
        "writes it anew.\n\n"
        "*Implemented*: it does what the API says. *Carried*: it is accepted, and echoed, kept or passed on unharmed.\n"
        "*Refused*: it gets an error that names it. *Planned*: it is not there yet.\n"
    )
    return head + "".join(map(_render_family, FAMILIES))


def _render_family(family: str) -> str:
    file = load(family)
    lines = [f"\n## {file.title}\n", *([f"{file.about}\n"] if file.about else []), "|  |  |  |", "|---|---|---|"]
    lines += [f"| `{entry.name}` | {entry.state} | {entry.note} |" for entry in entries(family)]
    return "\n".join(lines) + "\n"


def put_summary(readme: str) -> str:
    """The README with today's table between its markers, which are put at the end if it has none."""
    if BEGIN not in readme:
        readme = f"{readme.rstrip()}\n\n{BEGIN}{END}\n"
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{render_summary()}{END}{after}"


def main() -> None:
    README.write_text(put_summary(README.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(render_page(), encoding="utf-8")
    sys.stdout.write(f"wrote {README.name} and {PAGE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
