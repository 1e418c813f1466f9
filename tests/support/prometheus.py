"""A strict parser of the Prometheus text format, version 0.0.4. It refuses text that only some readers accept."""

import math
import re
from typing import NamedTuple

_HELP = re.compile(r"# HELP ([a-z_][a-z0-9_]*) (.+)")
_TYPE = re.compile(r"# TYPE ([a-z_][a-z0-9_]*) (counter|gauge|histogram)")
_SAMPLE = re.compile(r"([a-z_][a-z0-9_]*)(?:\{(.*)\})? (\+Inf|-Inf|NaN|-?[0-9.]+(?:e[+-]?[0-9]+)?)")
_LABEL = re.compile(r'([a-z_][a-z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_ESCAPED = re.compile(r'\\(["\\n])')
_SUFFIXES = ("_bucket", "_sum", "_count")

Labels = dict[str, str]


class Family(NamedTuple):
    """A metric with its samples: the suffix of the name, the labels and the value."""

    kind: str
    samples: list[tuple[str, Labels, float]]

    def get(self, suffix: str = "", **labels: str) -> float:
        """Return the value of the sample with exactly these labels."""
        (value,) = [value for found, others, value in self.samples if found == suffix and others == labels]
        return value


def parse_metrics(text: str) -> dict[str, Family]:
    """Return all metrics by name. Fail if a line breaks the format."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    described = current = ""
    for line in text.removesuffix("\n").split("\n"):
        if found := _HELP.fullmatch(line):
            described = found[1]
        elif found := _TYPE.fullmatch(line):
            current = found[1]
            assert current == described, line
            assert current not in families, line
            families[current] = Family(found[2], [])
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            _add_sample(families[current], current, found)
    for name, family in families.items():
        _check_family(name, family)
    return families


def _add_sample(family: Family, name: str, found: re.Match[str]) -> None:
    suffix = found[1].removeprefix(name)
    assert found[1] == name + suffix, found[0]
    assert suffix in (_SUFFIXES if family.kind == "histogram" else ("",)), found[0]
    family.samples.append((suffix, _parse_labels(found[2] or ""), float(found[3])))


def _parse_labels(text: str) -> Labels:
    labels: Labels = {}
    position = 0
    while position < len(text):
        found = _LABEL.match(text, position)
        assert found is not None, text
        assert found[1] not in labels, text
        labels[found[1]] = _ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], found[2])
        position = found.end()
    assert not text.endswith(","), text
    return labels


def _check_family(name: str, family: Family) -> None:
    keys = [(suffix, tuple(sorted(labels.items()))) for suffix, labels, _ in family.samples]
    assert len(keys) == len(set(keys)), f"{name} has a sample twice"
    if family.kind == "counter":
        assert name.endswith("_total"), name
        assert all(value >= 0 for _, _, value in family.samples), name
    if family.kind == "histogram":
        buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for suffix, labels, value in family.samples:
            if suffix == "_bucket":
                series = tuple((label, text) for label, text in labels.items() if label != "le")
                buckets.setdefault(series, []).append((float(labels["le"]), value))
        for series, counts in buckets.items():
            assert counts == sorted(counts), name
            assert counts[-1][0] == math.inf, name
            assert [count for _, count in counts] == sorted(count for _, count in counts), name
            assert family.get("_count", **dict(series)) == counts[-1][1], name
            assert family.get("_sum", **dict(series)) >= 0, name
        assert len(family.samples) == sum(len(counts) + 2 for counts in buckets.values()), name
