"""What a run was started with, kept beside its ledger: so that its id is all that is needed to go on with it."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.agent.limits import Limits, Prices
from antiphon.config import Settings
from antiphon.errors import AntiphonError

LEDGER_FILE = "runs.db"
_FOLDER = "runs"


class RunOptions(Struct, frozen=True, kw_only=True):
    """The options of a run. `directory` is where it was started, which is where its tools are. Secrets are not in it:
    `key_env` is the name of a variable.
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
    prices: tuple[float, float] | None = None

    def make_limits(self) -> Limits:
        limits = Limits(tokens=self.max_tokens, seconds=self.deadline)
        return limits if self.max_turns is None else msgspec.structs.replace(limits, turns=self.max_turns)

    def make_prices(self) -> Prices | None:
        return None if self.prices is None else Prices(input=self.prices[0], output=self.prices[1])


def parse_run_options(arguments: Namespace) -> RunOptions:
    """What was asked for on the command line."""
    return RunOptions(**_given(arguments), directory=str(Path.cwd()))


def save_run_options(settings: Settings, run_id: str, assignment: RunOptions) -> None:
    try:
        encoded = msgspec.json.format(msgspec.json.encode(assignment))
    except UnicodeEncodeError:
        raise AntiphonError("The command line, or the folder it is in, has bytes that are not UTF-8.") from None
    path = _place(settings, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded)


def load_run_options(settings: Settings, run_id: str, arguments: Namespace) -> RunOptions:
    """What the run was started with, changed by what was asked for now."""
    path = _place(settings, run_id)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=RunOptions)
    except FileNotFoundError:
        kept = RunOptions(directory=str(Path.cwd()))
    except (OSError, msgspec.DecodeError) as error:
        raise AntiphonError(f"{path} cannot be read: {error}") from None
    return msgspec.structs.replace(kept, **_given(arguments))


def _place(settings: Settings, run_id: str) -> Path:
    if Path(run_id).name != run_id:
        raise AntiphonError(f"{run_id!r} is not the id of a run.")
    return settings.data_dir / _FOLDER / f"{run_id}.json"


def _given(arguments: Namespace) -> dict[str, Any]:
    values = vars(arguments)
    given = {name: values[name] for name in RunOptions.__struct_fields__ if values.get(name) is not None}
    if isinstance(given.get("tools"), Sequence):
        given["tools"] = tuple(name for group in given["tools"] for name in group.split(",") if name)
    return given
