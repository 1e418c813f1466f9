import base64
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.sealing import KeyFile, Sealer, load_secrets, make_secret, read_secrets, rotate_secrets
from antiphon.errors import ConfigError

OLD, NEW = b"o" * 32, b"n" * 32
sealer = Sealer([NEW, OLD])


@given(st.binary(max_size=200), st.text(max_size=10), st.text(max_size=10))
def test_sealed_text_opens_only_for_its_project_and_purpose(payload: bytes, project: str, purpose: str) -> None:
    sealed = sealer.seal(payload, project=project, purpose=purpose)
    assert sealer.open(sealed, project=project, purpose=purpose) == payload
    assert sealer.open(sealed, project=project + "x", purpose=purpose) is None
    assert sealer.open(sealed, project=project, purpose=purpose + "x") is None


@given(st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_detected(payload: bytes, data: st.DataObject) -> None:
    sealed = sealer.seal(payload, project="p", purpose="q").encode()
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    changed = bytearray(sealed)
    changed[bit // 8] ^= 1 << bit % 8
    assert sealer.open(changed.decode("latin-1"), project="p", purpose="q") is None


@given(st.text(max_size=80))
def test_other_text_does_not_open(text: str) -> None:
    assert sealer.open(text, project="p", purpose="q") is None
    assert sealer.open("ant1." + text, project="p", purpose="q") is None


def test_sealing_is_deterministic() -> None:
    assert sealer.seal(b"x", project="p", purpose="q") == sealer.seal(b"x", project="p", purpose="q")
    assert sealer.seal(b"x", project="p", purpose="q") != sealer.seal(b"x", project="r", purpose="q")


def test_older_keys_open_and_unknown_keys_do_not() -> None:
    assert sealer.open(Sealer([OLD]).seal(b"x", project="p", purpose="q"), project="p", purpose="q") == b"x"
    assert sealer.open(Sealer([make_secret()]).seal(b"x", project="p", purpose="q"), project="p", purpose="q") is None
    assert Sealer([OLD]).open(sealer.seal(b"x", project="p", purpose="q"), project="p", purpose="q") is None


def test_key_file_is_created_private_and_read_later(tmp_path: Path) -> None:
    path = tmp_path / "new" / "seal.keys"
    made = load_secrets(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [len(secret) for secret in made] == [32]
    assert load_secrets(path) == made
    assert [each.name for each in path.parent.iterdir()] == ["seal.keys"]


def test_concurrent_processes_agree_on_one_key(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    loaded: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: loaded.append(load_secrets(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [loaded[0]] * 8


def test_rotation_adds_a_first_key_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    before = load_secrets(path)
    assert rotate_secrets(path) == 2
    after = load_secrets(path)
    assert after[1:] == before
    assert after[0] not in before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "seal_keys: at least one key is required."),
        (["not base64!"], "seal_keys: key 1 is not 32 bytes in base64."),
        ([base64.b64encode(OLD).decode(), base64.b64encode(b"short").decode()], "seal_keys: key 2 is not 32 bytes"),
    ],
)
def test_invalid_keys_are_refused_and_not_shown(lines: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_secrets(lines, origin="seal_keys")
    assert caught.value.message.startswith(reason)


def test_running_server_opens_text_sealed_with_a_newer_key(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    running = Sealer(load_secrets(path), reload_secrets=lambda: load_secrets(path))
    before = running.seal(b"x", project="p", purpose="q")
    rotate_secrets(path)
    restarted = Sealer(load_secrets(path))
    assert running.open(restarted.seal(b"y", project="p", purpose="q"), project="p", purpose="q") == b"y"
    assert running.seal(b"x", project="p", purpose="q") == before


def test_failed_reload_keeps_the_current_keys(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    running = Sealer(load_secrets(path), reload_secrets=lambda: load_secrets(path))
    before = running.seal(b"x", project="p", purpose="q")
    path.write_text("broken")
    foreign = Sealer([NEW]).seal(b"y", project="p", purpose="q")
    assert [running.open(each, project="p", purpose="q") for each in (foreign, before)] == [None, b"x"]


@pytest.mark.parametrize("act", [load_secrets, rotate_secrets])
def test_unwritable_key_folder_is_reported_with_its_path(act: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        act(tmp_path / "file" / "seal.keys")
    assert caught.value.message.startswith(
        f"The keys for sealed content cannot be stored in {tmp_path}/file/seal.keys: "
    )


def test_file_with_other_data_is_refused_as_keys(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    path.write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match="the keys are not in base64"):
        load_secrets(path)


def test_key_file_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    file = KeyFile(path)
    first = file.load()
    file.reload()  # the file did not exist before
    assert file.reload() is None
    rotate_secrets(path)
    added = file.reload()
    assert added is not None
    assert added[1:] == first
    assert file.reload() is None
    path.write_text("broken")
    with pytest.raises(ConfigError):
        file.reload()
    assert file.reload() is None
