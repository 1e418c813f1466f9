"""The one form in which we ask a server that speaks Responses: what Codex sends, to the letter.

Every key that is not optional is always there, and three of them have one value only. What a client wishes beyond that
goes on top of it, see `backends.responses`.
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
else:  # msgspec has no literals of this kind: `__post_init__` refuses the other value
    AlwaysTrue = AlwaysFalse = bool

# What stands in the addresses of Azure's servers, and of those in front of them.
_AZURE_MARKS = (
    "azure.com",
    "openai.azure.",
    "cognitiveservices.azure.",
    "aoai.azure.",
    "azure-api.",
    "azurefd.",
)


class ReasoningControls(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """`summary` may be a switch: some clients have one where the API has a word."""

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
    """The body. `store` is for Azure, which forgets the items of a turn otherwise; elsewhere nothing is kept."""

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
    """Whether this is an Azure server, asked in the way of the Responses API."""
    if wire_api.lower() != "responses":
        return False
    url = base_url.lower()
    return name.lower() == "azure" or any(mark in url for mark in _AZURE_MARKS)


def takes_verbosity(model: str) -> bool:
    """Whether the model is of the family that knows `text.verbosity`. A path may stand before its name."""
    return model.rpartition("/")[2].lower().startswith("gpt-5")


def write_format(text_format: Format) -> dict[str, Any]:
    """A text format without the fields that are not set."""
    fields = msgspec.to_builtins(text_format)
    return {name: value for name, value in fields.items() if value is not None}


def validate(request: ResponsesApiRequest) -> None:
    """Raise on what no server could answer, before one is asked, naming the field."""
    if not request.instructions and not request.input:
        raise MissingParameter("Either input or instructions is required.", param="input")
    _check_named(request.input, "input")
    _check_named(request.tools, "tools")
    names = [tool.name for tool in request.tools if isinstance(tool, FunctionTool)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"There is more than one function '{name}'.", param="tools", code="invalid_value")


def _check_named(members: Sequence[Item | Any], param: str) -> None:
    for index, member in enumerate(members):
        if isinstance(member, Unknown) and not member.type:
            where = f"{param}[{index}].type"
            raise MissingParameter(f"Missing required parameter: '{where}'.", param=where)
