"""`antiphon rotate`: create a new key for sealed content."""

from argparse import Namespace

from antiphon.cli.settings import load_settings
from antiphon.engine.assembly import SEAL_FILE
from antiphon.engine.sealing import rotate_secrets
from antiphon.errors import ConfigError


def run(arguments: Namespace) -> int:
    settings = load_settings(arguments)
    if settings.seal_keys:
        raise ConfigError("The setting seal_keys is used: add the new key there, as the first one.")
    path = settings.data_dir / SEAL_FILE
    count = rotate_secrets(path)
    print(f"{path} now has {count} keys. The new key encrypts, all keys decrypt. Restart running servers to use it.")
    return 0
