"""Locating wheels with the real pip and a folder of wheels as its index."""

import hashlib
import zipfile

import pytest

from antiphon.cli.packages import Wheel, locate_wheels
from antiphon.errors import AntiphonError

METADATA = "Metadata-Version: 2.1\nName: tiny\nVersion: {}\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Make a package index on the disk and configure pip to use only it."""
    for version in ("1.0", "2.0"):
        with zipfile.ZipFile(tmp_path / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny-{version}.dist-info/METADATA", METADATA.format(version))
            wheel.writestr(f"tiny-{version}.dist-info/WHEEL", WHEEL)
            wheel.writestr(f"tiny-{version}.dist-info/RECORD", "")
    page = tmp_path / "simple" / "tiny"
    page.mkdir(parents=True)
    links = [
        f'<a href="{wheel.as_uri()}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a>'
        for wheel in tmp_path.glob("*.whl")
    ]
    (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    return tmp_path


def wheel_of(index, version):
    wheel = index / f"tiny-{version}-py3-none-any.whl"
    return Wheel(url=wheel.as_uri(), sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_configured_index_is_used(index):
    assert locate_wheels(["tiny==1.0", "tiny==2.0"]) == {
        "tiny==1.0": wheel_of(index, "1.0"),
        "tiny==2.0": wheel_of(index, "2.0"),
    }


def test_report_is_used_if_pip_has_other_internals(index, monkeypatch):
    # Every Python process imports this file. It removes the internal module of pip that the script imports.
    (index / "sitecustomize.py").write_text("import sys; sys.modules['pip._internal.commands.index'] = None")
    monkeypatch.setenv("PYTHONPATH", str(index))
    assert locate_wheels(["tiny==1.0"]) == {"tiny==1.0": wheel_of(index, "1.0")}


def test_missing_package_shows_the_reason_of_pip(index):
    with pytest.raises(
        AntiphonError, match=r"^pip cannot find other==1\.0: No matching distribution found for other==1\.0$"
    ):
        locate_wheels(["other==1.0"])


def test_missing_pip_shows_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AntiphonError, match=r"needs pip, which is not installed. Install it with '.* -m ensurepip'"):
        locate_wheels(["tiny==1.0"])
