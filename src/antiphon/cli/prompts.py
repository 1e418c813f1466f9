"""`antiphon prompts`: the prompt templates of a running server."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from antiphon.cli.server_client import ServerClient
from antiphon.cli.settings import load_settings, read_secret, server_url
from antiphon.errors import AntiphonError
from antiphon.protocol.prompt import PromptDefinition


def run(arguments: Namespace) -> int:
    remote = _reach(arguments)
    if arguments.action == "add":
        definition = PromptDefinition(template=_read_template(arguments.file), id=arguments.id)
        made = remote.define_prompt(definition)
        print(f"{made.id}  version {made.version}")
    elif arguments.action == "list":
        listed = remote.prompts()
        width = max((len(each.id) for each in listed), default=0)
        for each in listed:
            print(f"{each.id:{width}}  version {each.version}")
    else:
        shown = remote.prompt(arguments.id, version=arguments.version)
        print(json.dumps(msgspec.to_builtins(shown), indent=2, ensure_ascii=False))
    return 0


def _reach(arguments: Namespace) -> ServerClient:
    """The server that was named, or the one that these settings would start."""
    key = read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None
    if arguments.url:
        return ServerClient(arguments.url, key=key)
    settings = load_settings(arguments)
    own = settings.api_keys[0].key if settings.api_keys else None
    return ServerClient(server_url(settings), key=key or own)


def _read_template(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise AntiphonError(f"Cannot read {path}: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise AntiphonError(f"{path} is not a JSON object: {error}.") from None
