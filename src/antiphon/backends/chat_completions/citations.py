"""The sources that an answer names."""

from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.protocol.content import Annotation, UrlCitation
from antiphon.protocol.open import Unknown


def read_annotation(told: Any) -> "Annotation | Unknown | None":
    """An annotation as this API has it: flat. What is of another kind is kept as it is."""
    if not isinstance(told, Mapping) or not isinstance(told.get("type"), str):
        return None
    cited = told.get("url_citation", told)
    if told["type"] != "url_citation" or not isinstance(cited, Mapping) or not isinstance(cited.get("url"), str):
        return Unknown(msgspec.json.encode(told))
    return UrlCitation(
        cited["url"], str(cited.get("title") or ""), _place(cited.get("start_index")), _place(cited.get("end_index"))
    )


def _place(told: Any) -> int:
    return told if isinstance(told, int) else 0
