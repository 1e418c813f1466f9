"""The field `tool_usage`: the usages of hosted tools add up, and bad numbers count as zero."""

from antiphon.stream.deltas import ToolUsage
from antiphon.stream.tool_usage import add_tool_usage, make_tool_usage


def test_usages_of_searches_and_images_add_up() -> None:
    images = {"input_tokens": 5, "input_tokens_details": {"text_tokens": 5}, "output_tokens": 7, "total_tokens": 12}
    usage = make_tool_usage()
    for added in (ToolUsage(1), ToolUsage(images=images), ToolUsage(0), ToolUsage(2, images)):
        usage = add_tool_usage(usage, added)
    assert usage == {
        "image_gen": {
            "input_tokens": 10,
            "input_tokens_details": {"image_tokens": 0, "text_tokens": 10},
            "output_tokens": 14,
            "output_tokens_details": {"image_tokens": 0, "text_tokens": 0},
            "total_tokens": 24,
        },
        "web_search": {"num_requests": 3},
    }


def test_invalid_numbers_of_an_endpoint_count_as_zero() -> None:
    images = {"input_tokens": "5", "input_tokens_details": [], "output_tokens": -1, "total_tokens": True, "other": 1}
    assert add_tool_usage(None, ToolUsage(images=images)) == make_tool_usage()
