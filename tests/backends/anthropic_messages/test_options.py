"""The guide lists the options that this kind has of its own, with their defaults."""

import json
import re
from pathlib import Path

import msgspec

from antiphon.backends.anthropic_messages.backend import Options
from antiphon.upstream.options import UpstreamOptions

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "upstreams.md").read_text("utf-8")


def test_the_guide_lists_every_option_with_its_default() -> None:
    table = GUIDE.split("| Messages option |", 1)[1].split("\n\n", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE))
    own = {*Options.__struct_fields__} - {*UpstreamOptions.__struct_fields__} | {"base_url"}
    assert listed.keys() == own
    defaults = {field.name: field.default for field in msgspec.structs.fields(Options) if field.name in own}
    for name, value in defaults.items():
        if value is not None:
            assert listed[name] == f"`{json.dumps(value)}`", name
