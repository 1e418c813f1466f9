"""`antiphon prompts`: define and show prompt templates on a running server."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from antiphon.cli.server_client import connect
from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.prompt import PromptDefinition
from antiphon.text_table import format_table


def run(arguments: Namespace) -> int:
    client = connect(arguments)
    if arguments.action == "add":
        definition = PromptDefinition(template=_read_template(arguments.file), id=arguments.id)
        created = client.define_prompt(definition)
        print(f"{created.id}  version {created.version}")
    elif arguments.action == "list":
        for line in format_table([(each.id, f"version {each.version}") for each in client.prompts()]):
            print(line)
    else:
        shown = client.prompt(arguments.id, version=arguments.version)
        print(json.dumps(msgspec.to_builtins(shown), indent=2, ensure_ascii=False))
    return 0


def _read_template(path: Path) -> dict[str, Any]:
    try:
        return read_json(path.read_bytes(), JsonObject)
    except OSError as error:
        raise AntiphonError(f"Cannot read {path}: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise AntiphonError(f"{path} is not a valid JSON object: {error}.") from None
