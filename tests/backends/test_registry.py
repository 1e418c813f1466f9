import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends import registry
from antiphon.errors import ConfigError

MODULE = """
from antiphon.backends.scripted.backend import create as create_scripted

def create(name, options, data_dir):
    backend = create_scripted(name, {}, data_dir)
    backend.made_from = (name, options, data_dir)
    return backend
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package with an entry point where Python finds it, as an installer would."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(package: str, kind: str, *, code: str = MODULE, factory: str = "create") -> None:
        (site / f"{package}.py").write_text(code)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[antiphon.backends]\n{kind} = {package}:{factory}\n")
        # monkeypatch forgets the module again when the test is over.
        monkeypatch.setitem(sys.modules, package, None)
        del sys.modules[package]

    return install


def create(kind: str, options: dict[str, Any] | None = None) -> Any:
    return registry.create(kind, name="local", options=options or {}, data_dir=Path("data"))


def test_installed_backend_gets_name_options_and_data_dir(install: Any) -> None:
    install("antiphon_parrot", "parrot")
    assert create("parrot", {"volume": 11}).made_from == ("local", {"volume": 11}, Path("data"))


def test_only_the_configured_kind_is_imported(install: Any) -> None:
    install("antiphon_parrot", "parrot")
    install("antiphon_broken", "broken", code="raise SystemError('imported')")
    create("parrot")
    assert "antiphon_parrot" in sys.modules
    assert "antiphon_broken" not in sys.modules


def test_unknown_kind_error_lists_installed_kinds(install: Any) -> None:
    install("antiphon_parrot", "parrot")
    install("antiphon_raven", "raven")
    with pytest.raises(ConfigError) as raised:
        create("crow")
    assert raised.value.message == (
        f"backends.local.kind: no backend of kind 'crow' is installed; installed are: {', '.join(registry.kinds())}"
    )
    assert {"parrot", "raven"} <= set(registry.kinds())


def test_failing_import_names_the_package_and_reason(install: Any) -> None:
    install("antiphon_broken", "broken", code="import a_module_that_is_missing")
    with pytest.raises(ConfigError) as raised:
        create("broken")
    assert raised.value.message == (
        "backends.local.kind: the entry point broken = 'antiphon_broken:create' cannot be loaded: "
        "ModuleNotFoundError: No module named 'a_module_that_is_missing'"
    )


def test_missing_or_uncallable_factory_is_named(install: Any) -> None:
    install("antiphon_empty", "empty", code="create = 3", factory="make")
    install("antiphon_number", "number", code="create = 3")
    with pytest.raises(ConfigError, match="'antiphon_empty:make' cannot be loaded: AttributeError"):
        create("empty")
    with pytest.raises(ConfigError, match="'antiphon_number:create' cannot be loaded: it is not callable"):
        create("number")


def test_two_packages_with_one_kind_are_both_named(install: Any) -> None:
    install("antiphon_parrot", "parrot")
    install("antiphon_parakeet", "parrot")
    with pytest.raises(ConfigError) as raised:
        create("parrot")
    assert raised.value.message == (
        "backends.local.kind: several installed packages provide 'parrot': "
        "antiphon_parakeet:create, antiphon_parrot:create; remove all but one"
    )


def test_built_in_kinds_are_entry_points() -> None:
    assert {"embedded", "scripted"} <= set(registry.kinds())
    assert create("scripted").models()[0].id == "scripted"
