"""The public API for backends, and a third-party backend that uses nothing else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon import backends, errors
from antiphon.config.loading import load
from antiphon.engine.assembly import build_engine
from antiphon.protocol import codec

CODE = '''
"""A backend that repeats the last message."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from antiphon.backends import Capabilities, Deltas, InvalidRequest, Model, Turn
from antiphon.backends import deltas, extract_text, read_options


class Options(msgspec.Struct):
    suffix: str = ""


class EchoBackend:
    capabilities = Capabilities()

    def __init__(self, options: Options) -> None:
        self._options = options

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id="echo", created=0, owned_by="third-party")]

    async def count_tokens(self, turn: Turn) -> int:
        return len(turn.items)

    async def stream(self, turn: Turn) -> Deltas:
        text = extract_text(turn.items[-1].content)
        if not text:
            raise InvalidRequest("The message has no text.", param="input")
        return self._answer(text)

    async def _answer(self, text: str) -> Deltas:
        yield [deltas.Text(text + self._options.suffix), deltas.Finish("stop")]


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> EchoBackend:
    return EchoBackend(read_options(options, Options, name=name))
'''

PROJECT = """
[build-system]
requires = ["flit_core"]
build-backend = "flit_core.buildapi"

[project]
name = "antiphon_echo"
version = "1.0"
description = "A backend that repeats the last message."

[project.entry-points."antiphon.backends"]
echo = "antiphon_echo:create"
"""

SETTINGS = """
[backends.parrot]
kind = "echo"
suffix = "!"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package from its folder with pip, without a package index."""
    folder, site = tmp_path / "project", tmp_path / "site"
    folder.mkdir()
    (folder / "antiphon_echo.py").write_text(CODE)
    (folder / "pyproject.toml").write_text(PROJECT)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", site, folder], check=True)
    monkeypatch.syspath_prepend(site)
    # monkeypatch removes the module from sys.modules after the test.
    monkeypatch.setitem(sys.modules, "antiphon_echo", None)
    del sys.modules["antiphon_echo"]


@pytest.mark.usefixtures("installed")
async def test_backend_installed_from_a_folder_serves_its_model(tmp_path: Path) -> None:
    path = tmp_path / "antiphon.toml"
    path.write_text(SETTINGS)
    engine = build_engine(load(path, {}, {"data_dir": str(tmp_path / "data"), "store": "memory:"}))
    await engine.start()
    try:
        request = codec.decode_request(b'{"model": "echo", "input": "Hello", "stream": true}').body
        run = await engine.create(request, project="p")
        events: list[Any] = [event async for batch in run.events() for event in batch]
    finally:
        await engine.close()
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello!"


def test_all_public_names_exist() -> None:
    assert backends.__all__ == sorted(set(backends.__all__))
    assert all(hasattr(backends, name) for name in backends.__all__)
    with pytest.raises(AttributeError, match=r"^module 'antiphon.backends' has no attribute 'Parrot'$"):
        _ = backends.Parrot


def test_public_names_are_documented() -> None:
    documentation = backends.__doc__ or ""
    assert [name for name in backends.__all__ if not hasattr(errors, name) and name not in documentation] == []


def test_importing_backends_loads_no_http_client() -> None:
    code = (
        "import sys; from antiphon.backends import Backend, Turn, deltas; "
        "print(sorted({'antiphon.upstream.http', 'httptools', 'xllamacpp'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
