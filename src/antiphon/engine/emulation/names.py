"""Which function a tool is to a backend that only knows functions, and back."""

import hashlib
import re
from typing import NamedTuple

LONGEST = 64
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")


class Identity(NamedTuple):
    """What tells a tool from all others. `kind` is `named` for functions and custom tools, else the tool's type."""

    kind: str
    namespace: str | None = None
    name: str = ""


# Tools have one name as a tool, and may have another as a choice.
_COMPUTERS = frozenset({"computer", "computer_use", "computer_use_preview"})


def identify_type(kind: str) -> Identity:
    """The one tool of a type that has no names."""
    return Identity("computer" if kind in _COMPUTERS else kind)


class Names:
    """Gives each tool a name that every chat API takes; the same tools get the same names, turn after turn."""

    def __init__(self) -> None:
        self._given: dict[Identity, str] = {}
        self._bearers: dict[str, Identity] = {}

    def keep(self, identity: Identity) -> str:
        """A function's own name stays as it is, whatever it looks like."""
        return self._give(identity, identity.name)

    def give(self, identity: Identity) -> str:
        """The name of this tool: the first one who asks for a name has it."""
        known = self._given.get(identity)
        if known is not None:
            return known
        wanted = _spell(identity)
        name = wanted if _is_legal(wanted) else _shorten(identity, 0)
        attempt = 0
        while name in self._bearers:
            name = _shorten(identity, attempt)
            attempt += 1
        return self._give(identity, name)

    def _give(self, identity: Identity, name: str) -> str:
        self._given[identity] = name
        self._bearers[name] = identity
        return name


def _spell(identity: Identity) -> str:
    if identity.kind != "named":
        return identity.kind
    return identity.name if identity.namespace is None else f"{identity.namespace}__{identity.name}"


def _is_legal(name: str) -> bool:
    return 0 < len(name) <= LONGEST and _ILLEGAL.search(name) is None


def _shorten(identity: Identity, attempt: int) -> str:
    """A name that says what it can of the tool, and has a mark that no other tool's name has."""
    told = "\0".join([identity.kind, identity.namespace or "", identity.name, str(attempt)])
    mark = hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:8]
    readable = _ILLEGAL.sub("_", _spell(identity))
    return f"{readable[: LONGEST - len(mark) - 1]}_{mark}"
