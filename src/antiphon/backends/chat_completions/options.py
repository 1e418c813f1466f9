"""What can be set for a backend of this kind, beyond what every upstream has."""

from typing import Any

import msgspec
from msgspec import field

from antiphon.backends.base import locate
from antiphon.backends.chat_completions.quirks import Quirks, Server, find_quirks
from antiphon.backends.upstream.options import UpstreamOptions


class Options(UpstreamOptions, kw_only=True):
    """`server` says what program or service answers there, if its address does not.

    `quirks` change what is known of it, for all of its models, and `model_quirks` by patterns of model names.
    `extra_body` is put into every request, over what it would have there.
    """

    server: Server | None = None
    quirks: dict[str, Any] = field(default_factory=dict)
    model_quirks: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)

    def find_quirks(self, model: str) -> Quirks:
        return find_quirks(
            model, self.base_url, server=self.server, changes=self.quirks, model_changes=self.model_quirks
        )


def check_quirks(options: Options, *, name: str) -> None:
    """Refuse quirks that there are none of. `name` is what the configuration calls the backend."""
    where = f"backends.{name}"
    tables = {f"{where}.quirks": options.quirks}
    tables |= {f"{where}.model_quirks.{pattern!r}": table for pattern, table in options.model_quirks.items()}
    for place, table in tables.items():
        try:
            msgspec.convert(table, Quirks)
        except msgspec.ValidationError as error:
            raise locate(error, place) from None
