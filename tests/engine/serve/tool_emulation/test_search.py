"""Finding deferred tools by words."""

from antiphon.engine.serve.tool_emulation.catalog import Catalog
from antiphon.engine.serve.tool_emulation.tool_search import MAX_FOUND, group_by_namespace, search_tools
from antiphon.protocol.tools import FunctionTool, NamespaceTool, Tool, ToolSearchTool
from antiphon.protocol.unions import Unknown


def deferred(name: str, description: str = "") -> FunctionTool:
    return FunctionTool(name, description, defer_loading=True)


MAIL = NamespaceTool("mail", "Everything about letters", [deferred("send_mail"), deferred("list_folders")])
WEATHER = deferred("get_weather", "The weather of a city today")
STOCKS = deferred("get_stock", "The price of a share today")


def find(query: str, *tools: Tool | Unknown) -> list[Tool | Unknown]:
    return group_by_namespace(
        search_tools({"query": query}, Catalog([ToolSearchTool(), *tools], [], frozenset({"function"})).list_deferred())
    )


def test_the_best_comes_first_and_what_has_none_of_the_words_not_at_all() -> None:
    assert find("weather today", STOCKS, MAIL, WEATHER) == [WEATHER, STOCKS]


def test_the_words_of_a_namespace_count_and_its_children_come_inside_of_it() -> None:
    assert find("letters", WEATHER, MAIL) == [MAIL]
    assert find("folder", WEATHER, MAIL) == [NamespaceTool("mail", MAIL.description, [deferred("list_folders")])]


def test_only_the_best_few_come() -> None:
    assert len(find("thing", *(deferred(f"thing_{index}") for index in range(9)))) == MAX_FOUND


def test_nothing_is_found_where_nothing_fits() -> None:
    assert find("rocket", WEATHER, STOCKS) == []
