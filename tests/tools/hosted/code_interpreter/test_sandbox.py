"""Real code in the sandboxes: its results, its limits, and attempts to leave the sandbox."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from antiphon.errors import Unavailable
from antiphon.tools.hosted.code_interpreter.messages import CodeResult
from antiphon.tools.hosted.code_interpreter.sandbox import Sandboxes, SandboxTarget
from support.code_sandbox import CACHE, HAS_BUBBLEWRAP, make_code_settings, require_sandbox
from support.crashing_server import wait_until

require_sandbox()

KINDS = [
    "wasm",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(not HAS_BUBBLEWRAP, reason="bubblewrap cannot be run here")),
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Container:
    """A container without rows, for one sandbox."""

    def __init__(self, sandboxes: Sandboxes, folder: Path, name: str = "cntr_1") -> None:
        (folder / "data").mkdir(parents=True)
        self.data = folder / "data"
        self.sandboxes = sandboxes
        self.target = SandboxTarget(name, "p", folder, memory_bytes=1 << 30, folder_bytes=1_000_000)

    async def run(self, code: str) -> CodeResult:
        return (await self.sandboxes.run(self.target, code)).result


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def container(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Container]:
    """A container that all tests of a sandbox share, because a start takes time."""
    settings = make_code_settings(sandbox=request.param, output_bytes=8000)
    sandboxes = Sandboxes(settings, cache_dir=CACHE)
    yield Container(sandboxes, tmp_path_factory.mktemp("container"))
    await sandboxes.close()


async def test_value_of_the_last_expression_is_in_the_logs(container: Container) -> None:
    assert (await container.run("x = 41\nprint('first')\nx + 1")).logs == "first\n42\n"


async def test_variables_live_until_the_next_call(container: Container) -> None:
    await container.run("kept = [1]\nimport json")
    assert await container.run("kept.append(2)\njson.dumps(kept)") == CodeResult(ending="returned", logs="'[1, 2]'\n")


async def test_output_and_errors_keep_their_order(container: Container) -> None:
    code = "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')"
    assert (await container.run(code)).logs == "a\nb\nc\n"


async def test_exception_is_shown_with_its_traceback(container: Container) -> None:
    result = await container.run("def f():\n    raise ValueError('wrong')\nf()")
    assert result.ending == "returned"
    assert result.logs.startswith("Traceback (most recent call last):")
    assert result.logs.endswith("ValueError: wrong\n")
    assert "line 2, in f" in result.logs


async def test_code_that_is_not_python_is_shown_as_an_error(container: Container) -> None:
    assert "SyntaxError" in (await container.run("def :")).logs


async def test_long_output_is_cut_off(container: Container) -> None:
    result = await container.run("print('x' * 9000)")
    assert (result.logs, result.is_truncated) == ("x" * 8000, True)


async def test_files_are_read_and_written(container: Container) -> None:
    (container.data / "upload.txt").write_text("from the server")
    if container.sandboxes.settings.sandbox == "bubblewrap":  # it copies the files when it starts
        await container.sandboxes.end(container.target.id)
    code = "import os\nos.makedirs('sub')\nopen('sub/out.txt', 'w').write(open('/mnt/data/upload.txt').read())"
    assert (await container.run(code)).logs == "15\n"
    assert (container.data / "sub" / "out.txt").read_text() == "from the server"
    await container.run("os.remove('upload.txt')")
    assert not (container.data / "upload.txt").exists()


# The code, and a part of the last line of its output.
ATTEMPTS = {
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 80), 1)", ("Error",)),
    "loopback": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:22')", ("Error",)),
    "host file": ("open('/etc/passwd').read()", ("FileNotFoundError",)),
    "host folder": ("import os\nos.listdir('/home')", ("FileNotFoundError",)),
    "parent folder": ("open('/mnt/data/../../etc/passwd')", ("PermissionError", "FileNotFoundError")),
    "process": ("import subprocess\nsubprocess.run(['ls'])", ("OSError", "PermissionError")),
    "fork": ("import os\nos.fork()", ("AttributeError", "PermissionError")),
    "symlink": (
        "import os\nos.symlink('/etc/passwd', 'link')\nopen('link').read()",
        ("OSError", "FileNotFoundError"),
    ),
    "write outside": ("open('/opt/antiphon/x.py', 'w')", ("PermissionError", "OSError")),
    "memory": ("data = bytearray(1 << 30)", ("MemoryError",)),
    "other process": ("open('/proc/1/environ').read() or 1 / 0", ("FileNotFoundError", "ZeroDivisionError", "PATH=")),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
async def test_escape_attempt_fails_with_an_error(container: Container, attempt: str) -> None:
    code, endings = ATTEMPTS[attempt]
    result = await container.run(code)
    assert result.ending == "returned"
    assert any(ending in result.logs.splitlines()[-1] for ending in endings), result.logs


async def test_environment_has_no_variables_of_the_server(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    await container.sandboxes.end(container.target.id)
    logs = (await container.run("import os\nsorted(os.environ)")).logs
    assert "SECRET_KEY" not in logs
    assert "MPLBACKEND" in logs


async def test_files_beyond_the_limit_are_not_saved(container: Container) -> None:
    code = "with open('large', 'wb') as file:\n    file.write(b'x' * 2_000_000)"
    assert "No space left on device" in (await container.run(code)).logs
    assert not (container.data / "large").exists() or (container.data / "large").stat().st_size == 0
    await container.run("import os\nos.path.exists('large') and os.remove('large')")


async def test_endless_code_is_stopped_and_the_container_goes_on(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    await container.run("before = 1\nopen('file.txt', 'w').write('text')")
    with monkeypatch.context() as patch:
        patch.setattr(container.sandboxes, "settings", replace(container.sandboxes.settings, call_seconds=0.5))
        result = await container.run("while True: pass")
    assert (result.ending, result.logs) == ("timeout", "")
    assert "NameError" in (await container.run("before")).logs
    assert (await container.run("open('file.txt').read()")).logs == "'text'\n"


async def test_file_whose_name_is_no_text_harms_nothing(container: Container) -> None:
    result = await container.run("import os\nopen(b'/mnt/data/\\xff', 'w').close()")
    assert result.ending == "returned"
    assert (await container.run("1")).logs == "1\n"
    await container.run("os.path.exists(b'/mnt/data/\\xff') and os.remove(b'/mnt/data/\\xff')")


async def test_exit_does_not_end_the_container(container: Container) -> None:
    await container.run("exit()")
    assert (await container.run("1")).logs == "1\n"


async def test_figures_are_returned_as_images(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    if container.sandboxes.settings.sandbox == "bubblewrap":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(container.sandboxes, "settings", replace(container.sandboxes.settings, images=2))
    code = "import matplotlib.pyplot as plt\nfor n in range(3):\n    plt.plot([n])\n    plt.show()\nprint('done')"
    result = await container.run(code)
    assert (result.logs, len(result.images), result.skipped_images) == ("done\n", 2, 1)
    assert all(image.startswith(b"\x89PNG") for image in result.images)
    assert (await container.run("plt.figure()\nprint(plt.get_fignums())")) == CodeResult(
        ending="returned", logs="[1]\n"
    )


async def test_containers_share_neither_variables_nor_files(tmp_path: Path) -> None:
    sandboxes = Sandboxes(make_code_settings(interpreters=1), cache_dir=CACHE)
    first = Container(sandboxes, tmp_path / "1", "cntr_1")
    second = Container(sandboxes, tmp_path / "2", "cntr_2")
    try:
        await first.run("secret = 1\nopen('secret.txt', 'w').write('secret')\nopen('/tmp/secret', 'w').write('x')")
        name = sandboxes.find_interpreter("cntr_1")
        logs = (await second.run("import os\nprint(os.listdir('.'), os.listdir('/tmp'))\nsecret")).logs
        assert logs.startswith("[] []\n")
        assert "NameError" in logs
        # There may be one interpreter: the second container has ended the first one's.
        assert sandboxes.find_interpreter("cntr_1") is None
        assert [each.name for each in (tmp_path / "1").glob("*")] == ["data"]
        logs = (await first.run("print(open('secret.txt').read())\nsecret")).logs
        assert logs.startswith("secret\n")
        assert "NameError" in logs
        assert sandboxes.find_interpreter("cntr_1") not in (None, name)
        await _check_cancellation(first)
    finally:
        await sandboxes.close()
    assert [each.name for each in tmp_path.glob("*/*")] == ["data", "data"]  # noqa: ASYNC240 - it is small
    with pytest.raises(Unavailable, match="shutting down"):
        await first.run("1")


async def _check_cancellation(container: Container) -> None:
    """Check that cancelled code stops, and that calls of one container wait for each other."""
    running = asyncio.create_task(container.run("open('started', 'w').close()\nwhile True: pass"))
    waiting = asyncio.create_task(container.run("'second'"))
    await asyncio.to_thread(wait_until, (container.data / "started").exists)
    assert container.sandboxes.is_busy("cntr_1")
    running.cancel()
    assert (await waiting).logs == "'second'\n"
    assert running.cancelled()
