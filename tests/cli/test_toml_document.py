import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.toml_document import MergeError, format_value, set_values

EXISTING = """\
# my settings
model = "gpt-5" # the good one
approval_policy = 'never'

[tools] # what it may do
web_search = true

[[rules]]
model = "not this one"

["model_providers".mine]
name = "Mine"
base_url = "http://127.0.0.1:1/v1"

# the end
"""


def test_changed_value_stays_in_its_line_with_its_comment():
    changed = set_values(EXISTING, (), {"model": "other"})
    assert changed == EXISTING.replace('model = "gpt-5"', 'model = "other"')


def test_new_top_value_is_put_before_the_first_table():
    changed = set_values(EXISTING, (), {"model_provider": "antiphon"})
    assert changed == EXISTING.replace("'never'\n", "'never'\nmodel_provider = \"antiphon\"\n")


def test_table_value_is_added_changed_and_removed():
    changed = set_values(EXISTING, ("model_providers", "mine"), {"name": None, "base_url": "u", "retries": 3})
    assert changed == EXISTING.replace('name = "Mine"\n', "").replace('"http://127.0.0.1:1/v1"\n', '"u"\nretries = 3\n')


def test_new_table_is_appended():
    changed = set_values(EXISTING, ("a", "b"), {"on": True, "off": None})
    assert changed == EXISTING + "\n[a.b]\non = true\n"


def test_first_values_are_put_above_the_first_table():
    assert set_values("[a]\nb = 1\n", (), {"c": 2, "d": 3}) == "c = 2\nd = 3\n\n[a]\nb = 1\n"


def test_empty_file_is_filled():
    filled = set_values(set_values("", (), {"a": "x", "b": None}), ("t",), {"c": False})
    assert filled == 'a = "x"\n\n[t]\nc = false\n'


def test_line_endings_are_preserved():
    changed = set_values("a = 1\r\n\r\n[t]\r\nb = 2", (), {"c": 3})
    assert set_values(changed, ("u",), {"d": 4}) == "a = 1\r\nc = 3\r\n\r\n[t]\r\nb = 2\r\n\r\n[u]\r\nd = 4\r\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "it is not valid TOML: Invalid value (at end of document)"),
        ('p = "no table"', "p.q is not a table"),
        ("p = {q = {x = 1}}", "x, y cannot be set safely in [p.q]: its syntax is not supported"),
        ("[p]\nq.x = 1", "x, y cannot be set safely in [p.q]: its syntax is not supported"),
        ('[p.q]\nx = """\nlong"""', "x, y cannot be set safely in [p.q]: its syntax is not supported"),
        ('a = """\n[p.q]\n"""', "x, y cannot be set safely in [p.q]: its syntax is not supported"),
    ],
)
def test_unsafe_change_is_rejected(text, message):
    with pytest.raises(MergeError) as raised:
        set_values(text, ("p", "q"), {"x": 1, "y": 2})
    assert raised.value.message == message


keys = st.sampled_from(["a", "b", "c"])
values = st.integers(0, 9) | st.booleans() | st.text("xyz#[]=\"'\\\n é", max_size=6)
comments = st.sampled_from(["", "", "# note [a] = 1", "   "])


@st.composite
def documents(draw):
    lines = []
    for header in draw(st.lists(st.sampled_from(["[t]", "[t.u]", "[[list]]", "[other] # note"]), unique=True)):
        lines += [header, *draw(entries())]
    return "\n".join([*draw(entries()), *lines]) + draw(st.sampled_from(["", "\n", "\n\n"]))


@st.composite
def entries(draw):
    table = draw(st.dictionaries(keys, values, max_size=3))
    lines = [f"{draw(st.sampled_from(['', '  ']))}{key} = {format_value(value)}" for key, value in table.items()]
    return [line for entry in lines for line in (entry + draw(st.sampled_from(["", " # why"])), draw(comments))]


@given(documents(), st.sampled_from([(), ("t",), ("t", "u")]), st.dictionaries(keys, values, min_size=1))
def test_set_values_are_read_back_and_set_only_once(text, path, changes):
    changed = set_values(text, path, changes)
    table = tomllib.loads(changed)
    for name in path:
        table = table[name]
    assert {key: table[key] for key in changes} == changes
    assert set_values(changed, path, changes) == changed
    comment_lines = [line for line in text.split("\n") if line.lstrip().startswith("#")]
    assert [line for line in changed.split("\n") if line.lstrip().startswith("#")] == comment_lines
