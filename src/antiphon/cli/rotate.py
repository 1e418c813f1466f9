"""`antiphon rotate`: a new key for what is sealed from now on."""

from argparse import Namespace

from antiphon.cli.settings import load_settings
from antiphon.engine.assembly import SEAL_FILE
from antiphon.engine.sealing import rotate_secrets
from antiphon.errors import ConfigError


def run(arguments: Namespace) -> int:
    settings = load_settings(arguments)
    if settings.seal_keys:
        raise ConfigError("The settings name the seal_keys: put the new one in front of them there.")
    path = settings.data_dir / SEAL_FILE
    count = rotate_secrets(path)
    print(f"{path} has {count} keys now: the new one seals, all of them open. Servers take it up when they start.")
    return 0
