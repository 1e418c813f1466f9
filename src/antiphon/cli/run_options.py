"""The options of an agent run, stored next to the ledger: `antiphon runs resume` needs only the id of the run."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from antiphon.agent.limits import Limits, Prices
from antiphon.config.settings import Settings
from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import read_json

LEDGER_FILE = "runs.db"
_FOLDER = "runs"


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of a run. Its fields are the stored format.

    `directory` is the working directory at the start, where its tools are loaded from. Secrets are not stored:
    `key_env` is the name of an environment variable.
    """

    task: str = ""
    model: str | None = None
    url: str | None = None
    key_env: str | None = None
    instructions: str | None = None
    tools: tuple[str, ...] = ()
    directory: str = ""
    max_turns: int | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    prices: tuple[float, ...] | None = None
    currency: str | UnsetType = UNSET
    local: bool | UnsetType = UNSET

    def make_limits(self) -> Limits:
        limits = Limits(tokens=self.max_tokens, seconds=self.deadline)
        return limits if self.max_turns is None else msgspec.structs.replace(limits, turns=self.max_turns)

    def make_prices(self, settings: Settings) -> Prices | None:
        """Return the prices of the options, else those of the settings."""
        prices = self.prices or settings.run_prices
        if not prices:
            return None
        input_price, output_price, *cached = prices
        return Prices(
            input=input_price,
            output=output_price,
            cached=cached[0] if cached else None,
            currency=self.currency or settings.run_currency,
        )


def parse_run_options(arguments: Namespace) -> RunOptions:
    """Return the options of a new run."""
    return RunOptions(**_collect_options(arguments), directory=str(Path.cwd()))


def save_run_options(settings: Settings, run_id: str, options: RunOptions) -> None:
    try:
        encoded = msgspec.json.format(msgspec.json.encode(options))
    except UnicodeEncodeError:
        raise AntiphonError("The arguments or the working directory contain bytes that are not UTF-8.") from None
    path = _options_path(settings, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # as the ledger: the task may be confidential
    path.write_bytes(encoded)


def load_run_options(settings: Settings, run_id: str, arguments: Namespace) -> RunOptions:
    """Return the stored options of a run, overridden by those on the command line."""
    return msgspec.structs.replace(find_run_options(settings, run_id), **_collect_options(arguments))


def find_run_options(settings: Settings, run_id: str) -> RunOptions:
    """Return the stored options of a run; the defaults if there are none, because a program has started it."""
    path = _options_path(settings, run_id)
    try:
        return read_json(path.read_bytes(), RunOptions)
    except FileNotFoundError:
        return RunOptions(directory=str(Path.cwd()))
    except (OSError, msgspec.DecodeError) as error:
        raise AntiphonError(f"Cannot read {path}: {error}") from None


def delete_run_options(settings: Settings, run_id: str) -> None:
    """Delete the stored options of a run, if it has any. A program can give runs ids that are not file names."""
    if Path(run_id).name == run_id:
        _options_path(settings, run_id).unlink(missing_ok=True)


def _options_path(settings: Settings, run_id: str) -> Path:
    if Path(run_id).name != run_id:
        raise AntiphonError(f"{run_id!r} is not a valid run id.")
    return settings.data_dir / _FOLDER / f"{run_id}.json"


def _collect_options(arguments: Namespace) -> dict[str, Any]:
    """Return the options that were given, by field."""
    values = vars(arguments)
    given = {name: values[name] for name in RunOptions.__struct_fields__ if values.get(name) is not None}
    if isinstance(given.get("tools"), Sequence):
        given["tools"] = tuple(name for group in given["tools"] for name in group.split(",") if name)
    return given
