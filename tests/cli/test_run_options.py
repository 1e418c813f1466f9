"""The stored options of agent runs."""

import stat
from argparse import Namespace
from pathlib import Path

import pytest

from antiphon.cli.run_options import RunOptions, load_run_options, save_run_options
from antiphon.config.loading import load
from antiphon.errors import AntiphonError

# Written by version 0.1.0.
STORED = """\
{
  "task": "Pay.",
  "model": "scripted",
  "url": null,
  "key_env": "MY_KEY",
  "instructions": null,
  "tools": [
    "tools.py",
    "more:one"
  ],
  "directory": "/home/ada/work",
  "max_turns": 5,
  "max_tokens": null,
  "deadline": 1.5,
  "prices": [
    2.0,
    8.0
  ]
}"""
OPTIONS = RunOptions(
    task="Pay.",
    model="scripted",
    key_env="MY_KEY",
    tools=("tools.py", "more:one"),
    directory="/home/ada/work",
    max_turns=5,
    deadline=1.5,
    prices=(2.0, 8.0),
)


def test_options_stored_by_version_0_1_0_are_read_and_written(home: Path) -> None:
    settings = load(None, {"HOME": str(home)}, {})
    path = settings.data_dir / "runs" / "run_1.json"
    path.parent.mkdir(parents=True)
    path.write_text(STORED)
    assert load_run_options(settings, "run_1", Namespace()) == OPTIONS
    save_run_options(settings, "run_2", OPTIONS)
    written = path.with_name("run_2.json")
    assert (written.read_text(), stat.filemode(written.stat().st_mode)) == (STORED, "-rw-------")


def test_options_on_the_command_line_override_stored_ones(home: Path) -> None:
    settings = load(None, {"HOME": str(home)}, {})
    save_run_options(settings, "run_1", OPTIONS)
    options = load_run_options(settings, "run_1", Namespace(model="other", tools=["a,b", "c"], max_turns=None))
    assert (options.model, options.tools, options.max_turns) == ("other", ("a", "b", "c"), 5)


def test_damaged_options_are_an_error(home: Path) -> None:
    settings = load(None, {"HOME": str(home)}, {})
    save_run_options(settings, "run_1", OPTIONS)
    (settings.data_dir / "runs" / "run_1.json").write_text("{")
    with pytest.raises(AntiphonError, match=r"^Cannot read .*run_1\.json: "):
        load_run_options(settings, "run_1", Namespace())
