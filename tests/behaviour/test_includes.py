"""What becomes of each value of `include`."""

from typing import Any

import pytest

from behaviour.item_samples import in_company
from behaviour.samples import PARTS
from behaviour.wire import ask, get
from manifest import names


@pytest.mark.parametrize("name", names("includes"))
def test_it_is_taken(server: Any, name: str) -> None:
    response = ask(server, "hi", include=[name])
    for path in (f"/responses/{response['id']}", f"/responses/{response['id']}/input_items"):
        get(server, f"{path}?include={name}")


def holding(name: str) -> list[dict[str, Any]]:
    kind, *_ = name.split(".")
    if kind == "message":
        return [{"type": "message", "role": "user", "content": [PARTS["input_image"]]}]
    return in_company(kind)


def dig(item: dict[str, Any], path: list[str]) -> Any:
    """The value at the end of a path; in a message, `input_image` stands for its first part."""
    for key in path:
        item = item["content"][0] if key == "input_image" else item[key]
    return item


@pytest.mark.parametrize("name", [name for name in names("includes", "implemented") if "logprobs" not in name])
def test_it_is_there(server: Any, name: str) -> None:
    sent = holding(name)
    response = ask(server, sent, include=[name])
    page = get(server, f"/responses/{response['id']}/input_items?order=asc&include={name}")
    path = name.split(".")[1:]
    assert dig(page["data"][-1], path) == dig(sent[-1], path)
    assert dig(sent[-1], path)
