import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.toml_document import MergeError, set_values, write_value

SOMEBODYS = """\
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


def test_a_value_is_changed_in_its_place_and_its_comment_stays():
    changed = set_values(SOMEBODYS, (), {"model": "other"})
    assert changed == SOMEBODYS.replace('model = "gpt-5"', 'model = "other"')


def test_a_new_value_at_the_top_comes_before_the_first_table():
    changed = set_values(SOMEBODYS, (), {"model_provider": "antiphon"})
    assert changed == SOMEBODYS.replace("'never'\n", "'never'\nmodel_provider = \"antiphon\"\n")


def test_a_value_in_a_table_is_added_or_changed_or_taken_out():
    changed = set_values(SOMEBODYS, ("model_providers", "mine"), {"name": None, "base_url": "u", "retries": 3})
    assert changed == SOMEBODYS.replace('name = "Mine"\n', "").replace(
        '"http://127.0.0.1:1/v1"\n', '"u"\nretries = 3\n'
    )


def test_a_new_table_comes_at_the_end():
    changed = set_values(SOMEBODYS, ("a", "b"), {"on": True, "off": None})
    assert changed == SOMEBODYS + "\n[a.b]\non = true\n"


def test_a_file_that_begins_with_a_table_gets_its_first_values_above():
    assert set_values("[a]\nb = 1\n", (), {"c": 2, "d": 3}) == "c = 2\nd = 3\n\n[a]\nb = 1\n"


def test_an_empty_file_is_filled():
    filled = set_values(set_values("", (), {"a": "x", "b": None}), ("t",), {"c": False})
    assert filled == 'a = "x"\n\n[t]\nc = false\n'


def test_the_ends_of_lines_stay_as_they_are():
    changed = set_values("a = 1\r\n\r\n[t]\r\nb = 2", (), {"c": 3})
    assert set_values(changed, ("u",), {"d": 4}) == "a = 1\r\nc = 3\r\n\r\n[t]\r\nb = 2\r\n\r\n[u]\r\nd = 4\r\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "it is not valid TOML: Invalid value (at end of document)"),
        ('p = "no table"', "p.q is no table"),
        ("p = {q = {x = 1}}", "x, y cannot be set safely in [p.q]: it is written in a way not understood"),
        ("[p]\nq.x = 1", "x, y cannot be set safely in [p.q]: it is written in a way not understood"),
        ('[p.q]\nx = """\nlong"""', "x, y cannot be set safely in [p.q]: it is written in a way not understood"),
        ('a = """\n[p.q]\n"""', "x, y cannot be set safely in [p.q]: it is written in a way not understood"),
    ],
)
def test_what_cannot_be_set_safely_is_refused(text, said):
    with pytest.raises(MergeError) as refused:
        set_values(text, ("p", "q"), {"x": 1, "y": 2})
    assert refused.value.message == said


keys = st.sampled_from(["a", "b", "c"])
values = st.integers(0, 9) | st.booleans() | st.text("xyz#[]=\"'\\\n é", max_size=6)
comments = st.sampled_from(["", "", "# said [a] = 1", "   "])


@st.composite
def documents(draw):
    lines = []
    for header in draw(st.lists(st.sampled_from(["[t]", "[t.u]", "[[list]]", "[other] # note"]), unique=True)):
        lines += [header, *draw(entries())]
    return "\n".join([*draw(entries()), *lines]) + draw(st.sampled_from(["", "\n", "\n\n"]))


@st.composite
def entries(draw):
    table = draw(st.dictionaries(keys, values, max_size=3))
    lines = [f"{draw(st.sampled_from(['', '  ']))}{key} = {write_value(value)}" for key, value in table.items()]
    return [line for entry in lines for line in (entry + draw(st.sampled_from(["", " # why"])), draw(comments))]


@given(documents(), st.sampled_from([(), ("t",), ("t", "u")]), st.dictionaries(keys, values, min_size=1))
def test_whatever_is_set_reads_back_and_setting_it_again_changes_nothing(text, path, changes):
    changed = set_values(text, path, changes)
    table = tomllib.loads(changed)
    for name in path:
        table = table[name]
    assert {key: table[key] for key in changes} == changes
    assert set_values(changed, path, changes) == changed
    kept = [line for line in text.split("\n") if line.lstrip().startswith("#")]
    assert [line for line in changed.split("\n") if line.lstrip().startswith("#")] == kept
