"""What a server wants back as it came, and no client needs to understand: it travels sealed in a reasoning item."""

from typing import Any

import msgspec

from antiphon.protocol.items import Reasoning

_GROWING = ("text", "summary", "data")


class Keepsake(msgspec.Struct, omit_defaults=True, tag_field="of", tag="chat_completions"):
    """`details` are OpenRouter's `reasoning_details`; `calls` holds the `extra_content` of calls, by call id."""

    details: list[dict[str, Any]] = []
    calls: dict[str, Any] = {}

    def add_detail(self, detail: dict[str, Any]) -> None:
        """More of the details: a piece of the last one, if it is of the same kind and has its index, or another."""
        last = self.details[-1] if self.details else {}
        if not last or any(last.get(name) != detail.get(name) for name in ("type", "index")):
            self.details.append(dict(detail))
            return
        for name, value in detail.items():
            if name in _GROWING and isinstance(value, str) and isinstance(last.get(name), str):
                last[name] += value
            elif value is not None:
                last[name] = value

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


def read_keepsake(item: Reasoning) -> Keepsake:
    """What this item keeps for us. One that some other model has sealed keeps nothing."""
    try:
        return msgspec.json.decode(item.encrypted_content or "{}", type=Keepsake)
    except msgspec.DecodeError:
        return Keepsake()
