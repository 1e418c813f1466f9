"""`antiphon usage`: the table, the chart and the JSON."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.store.location import locate_store
from antiphon.store.usage import DAY, UsageRow

NOW = 1_700_049_600 + 3600  # 2023-11-15 13:00 UTC


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/store.db"

    async def fill() -> None:
        store = locate_store(url)
        await store.open()
        minute = NOW - NOW % 60
        await store.add_usage(
            [
                UsageRow(minute, "team-a", "key_1", "gpt-small", 3, 1200, 200, 300, 0.25),
                UsageRow(minute, "team-b", "", "gpt-small", 1, 10, 0, 5, 0.0),
                UsageRow(minute - 2 * DAY, "team-a", "key_2", "gpt-large", 1, 500, 0, 100, 1.5),
                UsageRow(minute - 9 * DAY, "team-a", "key_2", "gpt-large", 1, 9, 9, 9, 9.0),
            ],
            write_id="1",
        )
        await store.close()

    asyncio.run(fill())
    return url


def test_usage_is_shown_as_a_table_and_a_chart(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", url, "--days", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "PROJECT  REQUESTS  INPUT  CACHED  OUTPUT        COST",
        "team-a          4  1,700     200     400  1.7500 USD",
        "team-b          1     10       0       5  0.0000 USD",
        "",
        "Tokens by day (UTC)",
        f"2023-11-13    600  {'█' * 16}",
        "2023-11-14      0",
        f"2023-11-15  1,515  {'█' * 41}",
    ]


MODELS = {"org/a-model-with-a-name-of-forty-five-charact": 1, "模型-日本語の名前": 1000}


async def add_usage(url: str, *rows: UsageRow) -> None:
    store = locate_store(url)
    await store.open()
    await store.add_usage(rows, write_id="2")
    await store.close()


@pytest.fixture
def large_usage(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a store with large numbers and long and wide names on its last day."""
    rows = (
        UsageRow(
            NOW + DAY, "p", "", model, 7 * factor, 318_220 * factor, 98_304 * factor, 75_410 * factor, 1.0 * factor
        )
        for model, factor in MODELS.items()
    )
    asyncio.run(add_usage(url, *rows))
    monkeypatch.setattr(time, "time", lambda: float(NOW + DAY))
    return url


def test_table_in_a_pipe_has_whole_names(large_usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", large_usage, "--by", "model", "--days", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "MODEL                                          REQUESTS        INPUT      CACHED      OUTPUT            COST",
        "org/a-model-with-a-name-of-forty-five-charact         7      318,220      98,304      75,410      1.0000 USD",
        "模型-日本語の名前                                 7,000  318,220,000  98,304,000  75,410,000  1,000.0000 USD",
    ]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            80,
            [
                "MODEL              REQUESTS        INPUT      CACHED      OUTPUT            COST",
                "org/a-model-with…         7      318,220      98,304      75,410      1.0000 USD",
                "模型-日本語の名前     7,000  318,220,000  98,304,000  75,410,000  1,000.0000 USD",
            ],
        ),
        (
            70,
            [
                "MODEL                REQUESTS        INPUT      OUTPUT            COST",
                "org/a-model-with-a…         7      318,220      75,410      1.0000 USD",
                "模型-日本語の名前       7,000  318,220,000  75,410,000  1,000.0000 USD",
            ],
        ),
        (
            40,
            [
                "MODEL                               COST",
                "org/a-model-with-a-name…      1.0000 USD",
                "模型-日本語の名前         1,000.0000 USD",
            ],
        ),
    ],
)
def test_table_fits_the_terminal(
    large_usage: str,
    columns: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["usage", "--store", large_usage, "--by", "model", "--days", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == lines


@pytest.mark.parametrize(
    ("by", "names"),
    [("project", ["team-a", "team-b"]), ("key", ["", "key_1", "key_2"]), ("model", ["gpt-large", "gpt-small"])],
)
def test_usage_is_printed_as_json(url: str, capsys: pytest.CaptureFixture[str], by: str, names: list[str]) -> None:
    assert main(["usage", "--store", url, "--by", by, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [group[by] for group in printed["groups"]] == names
    assert (printed["start_time"], printed["end_time"]) == (NOW - NOW % DAY - 6 * DAY, NOW)
    assert printed["days"] == [
        {
            "start_time": NOW - NOW % DAY - 2 * DAY,
            "requests": 1,
            "input_tokens": 500,
            "cached_tokens": 0,
            "output_tokens": 100,
            "cost": 1.5,
        },
        {
            "start_time": NOW - NOW % DAY,
            "requests": 4,
            "input_tokens": 1210,
            "cached_tokens": 200,
            "output_tokens": 305,
            "cost": 0.25,
        },
    ]


def test_store_without_usage_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", f"sqlite:///{tmp_path}/new.db"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "There is no usage in the last 7 days.\n"
    assert shown.err == f"antiphon: warning: there is no store at {tmp_path}/new.db\n"
    assert not list(tmp_path.glob("*.db*"))
    assert main(["db", "migrate", "--store", f"sqlite:///{tmp_path}/new.db"]) == 0
    assert main(["usage", "--store", f"sqlite:///{tmp_path}/new.db"]) == 0
    assert capsys.readouterr().err == ""


def test_memory_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", "memory:"]) == 1
    assert "A memory store has no lasting usage" in capsys.readouterr().err


def test_store_that_a_stateless_server_does_not_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_STATELESS", "1")
    assert main(["usage"]) == 1
    assert "a stateless server stores no usage" in capsys.readouterr().err
    assert main([*["usage"], "--store", f"sqlite:///{tmp_path}/other.db"]) == 0


@pytest.mark.parametrize("days", ["0", "401", "x", "-1"])
def test_wrong_number_of_days_is_refused(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["usage", "--days", days])
    assert (ended.value.code, "--days" in capsys.readouterr().err) == (2, True)


def test_terminal_controls_in_names_are_not_printed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(add_usage(url, UsageRow(NOW, "p", "", "\x1b[2Jmodel", 1, 1, 0, 1, 0.0)))
    main(["usage", "--store", url, "--by", "model"])
    assert "\n?[2Jmodel" in capsys.readouterr().out
