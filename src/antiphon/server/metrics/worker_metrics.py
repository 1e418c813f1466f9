"""The metrics of several workers in one text. Each sample gets the label `worker`."""

from collections.abc import Iterable

_HELP = "# HELP "


def label_text(text: bytes, worker: int) -> bytes:
    """Add the label `worker` to each sample of a text."""
    label = b'worker="%d"' % worker
    return b"".join(line if line.startswith(b"#") else _add_label(line, label) for line in _split_lines(text))


def _split_lines(text: bytes) -> list[bytes]:
    r"""Return the lines of a text. Only `\n` ends a line: the name of a model can have other line separators."""
    return [line + b"\n" for line in text.split(b"\n") if line]


def _add_label(sample: bytes, label: bytes) -> bytes:
    """Add a label to a sample, which is `name value` or `name{labels} value`."""
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return b"%b{%b,%b" % (name, label, rest)
    name, _, value = sample.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)


def merge_texts(texts: Iterable[bytes]) -> bytes:
    """Return the samples of all texts, grouped by metric: the format allows each metric only once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name, is_new = "", False
        for line in map(bytes.decode, _split_lines(text)):
            if line.startswith(_HELP):
                name = line.removeprefix(_HELP).partition(" ")[0]
                is_new = name not in heads
                heads.setdefault(name, [])
                samples.setdefault(name, [])
            if not line.startswith("#"):
                samples[name].append(line)
            elif is_new:
                heads[name].append(line)
    return "".join(line for name, head in heads.items() for line in (*head, *samples[name])).encode()
