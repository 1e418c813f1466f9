import sys

import pytest

from antiphon.backends.embedded.backend import create
from antiphon.backends.embedded.library import import_library
from antiphon.errors import ConfigError

MISSING = "libgomp.so.1: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            f"raise ImportError({MISSING!r})",
            (
                f"The embedded model needs a library that this system lacks: {MISSING}. Install it with 'apt install "
                "libgomp1' (Debian, Ubuntu) or 'dnf install libgomp' (Fedora, RHEL)."
            ),
        ),
        (
            "raise ImportError('libm.so: version `GLIBC_2.38` not found')",
            "The embedded model needs a library that this system lacks: libm.so: version `GLIBC_2.38` not found.",
        ),
        (
            "import antiphon_missing",
            (
                "The embedded model needs xllamacpp (No module named 'antiphon_missing'). Install it with: pip install "
                "'antiphon[embedded]'"
            ),
        ),
    ],
)
def test_library_that_cannot_be_loaded_is_an_error_with_its_remedy(tmp_path, monkeypatch, source, message):
    (tmp_path / "xllamacpp.py").write_text(source)
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_library()
    assert caught.value.message == message


def test_missing_package_is_reported_before_missing_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError) as caught:
        create("embedded", {"model": "absent"}, tmp_path)
    assert caught.value.message == (
        "The embedded model needs xllamacpp, which is not installed. Configure another backend, or install it with: "
        "pip install 'antiphon[embedded]'"
    )
