import math

import pytest

from antiphon.server.metrics.registry import (
    BoundedLabel,
    Counter,
    Histogram,
    Metric,
    Reading,
    format_number,
    write_text,
)
from support.prometheus import parse_metrics


def test_counter_is_written_with_sorted_labels() -> None:
    counter = Counter(Metric("things_total", "Things.", ("color", "size")))
    counter.find_series(("red", "s")).value += 1
    counter.find_series(("blue", "l")).value += 2
    counter.find_series(("red", "s")).value += 0.5
    assert write_text([counter]).decode() == (
        "# HELP things_total Things.\n"
        "# TYPE things_total counter\n"
        'things_total{color="blue",size="l"} 2\n'
        'things_total{color="red",size="s"} 1.5\n'
    )


def test_metric_without_labels_begins_at_zero() -> None:
    families = parse_metrics(
        write_text([Counter(Metric("a_total", "A.")), Histogram(Metric("b_seconds", "B."), (1.0,))]).decode()
    )
    assert (families["a_total"].samples, families["b_seconds"].samples) == (
        [("", {}, 0)],
        [("_bucket", {"le": "1.0"}, 0), ("_bucket", {"le": "+Inf"}, 0), ("_sum", {}, 0), ("_count", {}, 0)],
    )


def test_histogram_counts_a_value_at_its_bound_and_all_above() -> None:
    histogram = Histogram(Metric("wait_seconds", "Wait.", ("kind",)), (0.5, 1.0))
    for value in (0.25, 0.5, 1.0, 4.0):
        histogram.find_series(("a",)).observe(value)
    assert write_text([histogram]).decode() == (
        "# HELP wait_seconds Wait.\n"
        "# TYPE wait_seconds histogram\n"
        'wait_seconds_bucket{kind="a",le="0.5"} 2\n'
        'wait_seconds_bucket{kind="a",le="1.0"} 3\n'
        'wait_seconds_bucket{kind="a",le="+Inf"} 4\n'
        'wait_seconds_sum{kind="a"} 5.75\n'
        'wait_seconds_count{kind="a"} 4\n'
    )


@pytest.mark.parametrize("value", ['a "quoted" name', "back\\slash", "two\nlines", "\\n", "ä,b={}", ""])
def test_label_value_is_escaped(value: str) -> None:
    counter = Counter(Metric("things_total", "Things.", ("name",)))
    counter.find_series((value,)).value += 1
    assert parse_metrics(write_text([counter]).decode())["things_total"].samples == [("", {"name": value}, 1)]


def test_description_is_escaped() -> None:
    text = write_text([Counter(Metric("a_total", "One\\two\nthree."))]).decode()
    assert text.splitlines()[0] == r"# HELP a_total One\\two\nthree."


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.1, "0.1"), (1e21, "1e+21"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_number_is_formatted(value: float, text: str) -> None:
    assert format_number(value) == text


def test_reading_is_read_at_each_write() -> None:
    values = [1, 2]
    reading = Reading(Metric("now", "Now."), "gauge", lambda: [((), values.pop())])
    texts = [write_text([reading]).decode().splitlines()[-1] for _ in range(2)]
    assert texts == ["now 2", "now 1"]


def test_label_values_beyond_the_limit_become_other() -> None:
    label = BoundedLabel(2)
    names = ["a", "x" * 129, "b", "c", "a", "d", "b"]
    assert [label.bound(name) for name in names] == ["a", "other", "b", "other", "a", "other", "b"]
