"""pip itself is asked, with a directory of wheels for its index."""

import hashlib
import zipfile

import pytest

from antiphon.cli.packages import Wheel, locate_wheels
from antiphon.errors import AntiphonError

METADATA = "Metadata-Version: 2.1\nName: tiny\nVersion: {}\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index on the disk, and a pip that knows no other."""
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


def archive_of(index, version):
    wheel = index / f"tiny-{version}-py3-none-any.whl"
    return Wheel(url=wheel.as_uri(), sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_the_users_own_index_is_asked(index):
    assert locate_wheels(["tiny==1.0", "tiny==2.0"]) == {
        "tiny==1.0": archive_of(index, "1.0"),
        "tiny==2.0": archive_of(index, "2.0"),
    }


def test_a_pip_with_other_insides_is_asked_through_its_report(index, monkeypatch):
    # Read by every Python that starts: in it, the part of pip that we look into is not there.
    (index / "sitecustomize.py").write_text("import sys; sys.modules['pip._internal.commands.index'] = None")
    monkeypatch.setenv("PYTHONPATH", str(index))
    assert locate_wheels(["tiny==1.0"]) == {"tiny==1.0": archive_of(index, "1.0")}


def test_a_package_that_no_index_has_is_named_with_pips_reason(index):
    with pytest.raises(
        AntiphonError, match=r"^pip does not find other==1\.0: No matching distribution found for other==1\.0$"
    ):
        locate_wheels(["other==1.0"])


def test_without_pip_the_way_to_get_it_is_shown(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AntiphonError, match=r"this Python has no pip: install it with '.* -m ensurepip'"):
        locate_wheels(["tiny==1.0"])
