"""The request body of the Responses contract, as Codex sends it.

All required keys are always present, and three of them have a fixed value. `antiphon.backends.responses.request` adds
the client's other parameters.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol.items import ITEMS, Item, Items
from antiphon.protocol.request import Effort, Format
from antiphon.protocol.tools import TOOLS, FunctionTool, Tools
from antiphon.protocol.unions import Unknown

if TYPE_CHECKING:
    AlwaysTrue: TypeAlias = Literal[True]
    AlwaysFalse: TypeAlias = Literal[False]
else:  # msgspec does not support boolean literals, so `__post_init__` checks the values
    AlwaysTrue = AlwaysFalse = bool

# Parts of the host names of Azure servers and gateways.
_AZURE_HOSTS = (
    "azure.com",
    "openai.azure.",
    "cognitiveservices.azure.",
    "aoai.azure.",
    "azure-api.",
    "azurefd.",
)


class ReasoningControls(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The `reasoning` field. `summary` may be a boolean, which some clients send; true means "auto"."""

    effort: Effort | UnsetType = UNSET
    summary: Literal["auto", "concise", "detailed"] | bool | UnsetType = UNSET
    context: str | UnsetType = UNSET
    mode: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.summary, bool):
            self.summary = "auto" if self.summary else UNSET


class TextControls(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET
    format: dict[str, Any] | UnsetType = UNSET


class ResponsesApiRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The request body. `store` is true for Azure, which otherwise drops the items of a turn."""

    model: Annotated[str, Meta(min_length=1)]
    instructions: str
    input: Items
    tools: Tools
    tool_choice: Literal["auto"] = "auto"
    parallel_tool_calls: AlwaysFalse = False
    reasoning: ReasoningControls | UnsetType = UNSET
    store: bool
    stream: AlwaysTrue = True
    include: list[str]
    prompt_cache_key: str | UnsetType = UNSET
    text: TextControls | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.input = ITEMS.decode_list_field(self.input, "input", required=True)
        self.tools = TOOLS.decode_list_field(self.tools, "tools", required=True)
        if self.tool_choice != "auto":
            raise ValueError("Expected 'auto' - at `$.tool_choice`")
        if self.parallel_tool_calls is not False:
            raise ValueError("Expected false - at `$.parallel_tool_calls`")
        if self.stream is not True:
            raise ValueError("Expected true - at `$.stream`")


def is_azure(base_url: str, *, wire_api: str, name: str = "") -> bool:
    """Return True if this is the Responses API of an Azure server."""
    if wire_api.lower() != "responses":
        return False
    url = base_url.lower()
    return name.lower() == "azure" or any(mark in url for mark in _AZURE_HOSTS)


def takes_verbosity(model: str) -> bool:
    """Return True if the model is of a family with `text.verbosity`. A path before its name is ignored."""
    return model.rpartition("/")[2].lower().startswith("gpt-5")


def write_format(text_format: Format) -> dict[str, Any]:
    """Return the set fields of a text format."""
    fields = msgspec.to_builtins(text_format)
    return {name: value for name, value in fields.items() if value is not None}


def validate(request: ResponsesApiRequest) -> None:
    """Raise InvalidRequest, which names the field, if no server could accept the request."""
    if not request.instructions and not request.input:
        raise MissingParameter("Either input or instructions is required.", param="input")
    _check_types(request.input, "input")
    _check_types(request.tools, "tools")
    names: set[str] = set()
    for tool in request.tools:
        if isinstance(tool, FunctionTool):
            if tool.name in names:
                raise InvalidRequest(f"Duplicate function name: '{tool.name}'.", param="tools", code="invalid_value")
            names.add(tool.name)


def _check_types(members: Sequence[Item | Any], param: str) -> None:
    for index, member in enumerate(members):
        if isinstance(member, Unknown) and not member.type:
            path = f"{param}[{index}].type"
            raise MissingParameter(f"Missing required parameter: '{path}'.", param=path)
