from antiphon.server.metrics.registry import Counter, Histogram, Metric, write_text
from antiphon.server.metrics.worker_metrics import label_text, merge_texts
from support.prometheus import parse_metrics


def write_worker(number: int, *, tokens: int) -> bytes:
    counter = Counter(Metric("tokens_total", "Tokens.", ("model",)))
    counter.find_series(('a{ "} b',)).value += tokens
    histogram = Histogram(Metric("seconds", "Time."), [1.0])
    histogram.find_series().observe(0.5)
    return label_text(write_text([counter, histogram]), number)


def test_merged_metrics_have_one_head_and_the_samples_of_all_workers() -> None:
    families = parse_metrics(merge_texts([write_worker(1, tokens=3), write_worker(2, tokens=4)]).decode())
    assert {name: family.kind for name, family in families.items()} == {
        "tokens_total": "counter",
        "seconds": "histogram",
    }
    assert families["tokens_total"].samples == [
        ("", {"worker": "1", "model": 'a{ "} b'}, 3),
        ("", {"worker": "2", "model": 'a{ "} b'}, 4),
    ]
    assert [families["seconds"].get("_count", worker=number) for number in ("1", "2")] == [1, 1]


def test_metric_of_one_worker_only_is_part_of_the_merged_text() -> None:
    text = write_worker(1, tokens=3)
    head, _, rest = text.partition(b"# HELP seconds")
    assert merge_texts([head, text]) == head + head.splitlines(keepends=True)[-1] + b"# HELP seconds" + rest
    assert merge_texts([]) == b""


def test_line_separators_in_a_label_do_not_break_the_text() -> None:
    models = ["a\rb", "c\u2028# HELP evil x", "d\x0be", "f\x85g"]
    counter = Counter(Metric("tokens_total", "Tokens.", ("model",)))
    for model in models:
        counter.find_series((model,)).value += 1
    merged = merge_texts([label_text(write_text([counter]), number) for number in (1, 2)]).decode()
    assert merged.split("\n") == [
        "# HELP tokens_total Tokens.",
        "# TYPE tokens_total counter",
        *(f'tokens_total{{worker="{number}",model="{model}"}} 1' for number in (1, 2) for model in models),
        "",
    ]
