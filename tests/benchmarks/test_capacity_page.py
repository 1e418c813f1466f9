"""The tables of docs/scaling.md."""

import json

import pytest

from benchmarks import capacity, capacity_page


def test_page_shows_the_recorded_figures() -> None:
    assert capacity_page.PAGE.read_text() == capacity_page.render(json.loads(capacity_page.FIGURES.read_text()))


def test_every_workload_was_recorded_on_both_stores() -> None:
    rows = json.loads(capacity_page.FIGURES.read_text())["rows"]
    assert [(row["workload"], row["store"]) for row in rows] == [
        (workload.name, store) for workload in capacity.WORKLOADS for store in ("SQLite", "PostgreSQL")
    ]
    assert {tuple(row) for row in rows} == {capacity.Figures._fields}


def test_new_rows_replace_those_of_the_same_workload_and_store() -> None:
    figures = json.loads(capacity_page.FIGURES.read_text())
    old = figures["rows"][2]
    machine, row, added = {"date": "2027-01-01"}, old | {"cpu_us": 1.0}, old | {"workload": "new"}
    merged = capacity_page.merge(figures, machine, [row, added], None)
    rows = [*figures["rows"], added]
    rows[2] = row
    assert merged == {"recorded": machine, "memory": figures["memory"], "rows": rows}


def test_workloads_are_chosen_by_a_part_of_their_name() -> None:
    names = [workload.name for workload in capacity.choose_workloads("background")]
    assert names == [capacity_page.BACKGROUND_PAIR, capacity_page.BACKGROUND]
    assert capacity.choose_workloads("memory") == []
    assert capacity.choose_workloads("") == list(capacity.WORKLOADS)
    with pytest.raises(ValueError, match="no workload has 'other' in its name: choose memory, or one of 'resp"):
        capacity.choose_workloads("other")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 B"), (7.5, "7.5 B"), (2163, "2.2 KB"), (22_260_000, "22 MB"), (186_883_200_000_000, "190 TB")],
)
def test_sizes_have_two_digits(value: float, text: str) -> None:
    assert capacity_page._format_bytes(value) == text
