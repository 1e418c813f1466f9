"""Local references in a JSON schema, resolved once for each target."""

from typing import Any
from urllib.parse import unquote

Pointer = tuple[str, ...]
_Chain = tuple["_Chain | None", str]


class References:
    """The targets of the references of one schema. References that are spelt differently can have one target."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = _get_base(root)
        self._anchors: dict[str, Pointer] | None = None
        self._pointers: dict[str, Pointer | None] = {}
        self._targets: dict[Pointer, Any] = {}

    def parse(self, reference: str) -> Pointer | None:
        """Return the steps from the root to the target. None if the reference names no part of this schema.

        It can be `#/a/b`, `#name` for an `$anchor`, and both after the `$id` of the schema.
        """
        if reference not in self._pointers:
            self._pointers[reference] = self._parse(reference)
        return self._pointers[reference]

    def find(self, pointer: Pointer) -> Any:
        """Return the target. Raises LookupError if the schema does not have it."""
        if pointer not in self._targets:
            self._targets[pointer] = _walk(self._root, pointer)
        return self._targets[pointer]

    def _parse(self, reference: str) -> Pointer | None:
        if self._base and reference.startswith(self._base):
            reference = reference[len(self._base) :] or "#"
        if not reference.startswith("#"):
            return None
        first, *steps = reference[1:].split("/")
        if first:
            if self._anchors is None:
                self._anchors = _find_anchors(self._root)
            return self._anchors.get(unquote(first)) if not steps else None
        return tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in steps)


def _get_base(root: Any) -> str:
    base = root.get("$id") if isinstance(root, dict) else None
    return base.partition("#")[0] if isinstance(base, str) else ""


def _find_anchors(root: Any) -> dict[str, Pointer]:
    """Return the pointers of all parts with an `$anchor`."""
    anchors: dict[str, Pointer] = {}
    # Each part has the chain of steps that leads to it. It is written out only for an anchor.
    pending: list[tuple[Any, _Chain | None]] = [(root, None)]
    while pending:
        part, chain = pending.pop()
        if isinstance(part, dict):
            name = part.get("$anchor")
            if isinstance(name, str):
                anchors.setdefault(name, _list_steps(chain))
            pending += [(each, (chain, step)) for step, each in part.items()]
        elif isinstance(part, list):
            pending += [(each, (chain, str(index))) for index, each in enumerate(part)]
    return anchors


def _list_steps(chain: _Chain | None) -> Pointer:
    steps: list[str] = []
    while chain is not None:
        chain, step = chain
        steps.append(step)
    return tuple(reversed(steps))


def _walk(schema: Any, pointer: Pointer) -> Any:
    for step in pointer:
        if isinstance(schema, list):
            if not (step.isascii() and step.isdigit() and len(step) < 10):
                raise LookupError(step)
            schema = schema[int(step)]
        elif isinstance(schema, dict):
            schema = schema[step]
        else:
            raise LookupError(step)
    return schema
