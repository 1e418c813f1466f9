from pathlib import Path

from msgspec.structs import replace

from antiphon.config.changes import RELOADABLE, compare_settings
from antiphon.config.settings import Settings

SETTINGS = Settings(data_dir=Path("data"), store="sqlite:///store.db")


def test_reloadable_settings_exist() -> None:
    assert set(Settings.__struct_fields__) >= RELOADABLE
    assert RELOADABLE & {"host", "port", "workers", "store", "data_dir", "stateless"} == set()


def test_settings_that_need_a_restart_have_their_old_values() -> None:
    new = replace(SETTINGS, port=1, workers=3, queued=7, run_currency="EUR", warnings=("A warning.",))
    changes = compare_settings(SETTINGS, new)
    assert changes == (replace(new, port=SETTINGS.port, workers=1), ["queued"], ["port", "workers"])


def test_equal_settings_have_no_changes() -> None:
    assert compare_settings(SETTINGS, SETTINGS) == (SETTINGS, [], [])
