"""The PostgreSQL store without the package of its driver."""

import importlib
import sys

import pytest

from antiphon.errors import ConfigError


@pytest.mark.parametrize("module", ["session", "ledger", "store", "inspection", "files"])
def test_missing_driver_names_the_package_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("antiphon.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(ConfigError, match=r"needs the package asyncpg: pip install 'antiphon\[postgres\]'"):
        importlib.import_module(f"antiphon.store.postgres.{module}")
