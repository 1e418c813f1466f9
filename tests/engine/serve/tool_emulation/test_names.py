"""Names of tools as functions."""

import re

from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.serve.tool_emulation.catalog import ToolKey, ToolNames

texts = st.text("ab_.-é ", min_size=1, max_size=80)
identities = st.builds(ToolKey, st.just("named"), st.none() | texts, texts) | st.builds(
    ToolKey, st.sampled_from(["shell", "computer", "tool_search"])
)


def test_a_child_of_a_namespace_is_called_by_both_names() -> None:
    assert ToolNames().get_or_assign(ToolKey("named", "crm", "get")) == "crm__get"


def test_a_tool_without_a_name_is_called_by_its_type() -> None:
    assert ToolNames().get_or_assign(ToolKey("shell")) == "shell"


def test_a_function_keeps_its_name_and_others_make_way() -> None:
    names = ToolNames()
    names.reserve(ToolKey("named", None, "crm__get"))
    names.reserve(ToolKey("named", None, "shell"))
    given_names = [names.get_or_assign(ToolKey("named", "crm", "get")), names.get_or_assign(ToolKey("shell"))]
    assert [re.sub("[0-9a-f]{8}$", "*", name) for name in given_names] == ["crm__get_*", "shell_*"]


def test_different_splits_of_one_name_are_told_apart() -> None:
    names = ToolNames()
    first = names.get_or_assign(ToolKey("named", "a", "b__c"))
    second = names.get_or_assign(ToolKey("named", "a__b", "c"))
    assert first == "a__b__c" != second


@given(st.lists(identities, unique=True, max_size=12))
def test_names_are_legal_unique_and_the_same_each_time(tools: list[ToolKey]) -> None:
    names, again = ToolNames(), ToolNames()
    given_names = [names.get_or_assign(tool) for tool in tools]
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for name in given_names)
    assert len(set(given_names)) == len(tools)
    assert [names.get_or_assign(tool) for tool in tools] == given_names == [again.get_or_assign(tool) for tool in tools]
