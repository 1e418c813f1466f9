"""Links between the pages of the documentation lead to existing files and headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    broken = []
    for path, anchor in _LINK.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []
