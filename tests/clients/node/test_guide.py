"""Every JavaScript snippet of the guide prints what the guide says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ADDRESS = "http://127.0.0.1:8484"
GUIDE = (ROOT / "docs/guides/clients.md").read_text("utf-8")
SNIPPETS = re.findall(r"^```js\n(.*?)^```\n\n```text\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(json.loads((ROOT / "examples/scripted.json").read_text("utf-8")))


@pytest.mark.parametrize(("code", "printed"), SNIPPETS, ids=re.findall(r"^## (.*)\n\n```js$", GUIDE, re.MULTILINE))
def test_snippet_prints_the_output_in_the_guide(node: Any, server: Any, code: str, printed: str) -> None:
    assert node.run(code.replace(ADDRESS, server.url)) == printed


def test_every_snippet_is_run() -> None:
    assert len(SNIPPETS) == GUIDE.count("```js\n") == 3
