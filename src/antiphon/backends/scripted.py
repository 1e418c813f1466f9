"""A deterministic backend for tests, demos and benchmarks: it answers from a JSON script.

The option `script` is the script itself or the path of a file that holds it. Without one, every answer is an echo.

    {
      "models": ["scripted"],
      "rules": [
        {"user": "weather", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}]]},
        {"last_item": "function_call_output", "answers": ["It is mild."]}
      ],
      "default": "You said: {input}"
    }

The first rule that fits answers. A rule may ask for a `model`, for words in the last `user` message, for words in any
`text` the model reads, and for the type of the `last_item`; words are a part of the text, or `{"regex": "…"}`. The n-th
time a rule answers, it gives the n-th of its `answers`, and the last one from then on.

An answer is a text, or a list of steps; each step is an object with one of these keys:

    text, reasoning, refusal  a string, sent word by word, or a list of strings, sent as they are; in `text`, `{input}`
                              stands for the last user message and `{history}` for the number of items read
    tokens                    text with logprobs: a list of `{"token", "logprob", "bytes", "top_logprobs"}`
    summary                   a reasoning summary: a string, or one string for each of its parts
    seal                      the encrypted form of the reasoning
    annotation                a citation on the text so far
    tool_call                 `{"name", "arguments", "call_id", "namespace", "key"}`; arguments are an object, a string,
                              or a list of fragments; calls are interleaved by continuing one under the same `key`
    custom_tool_call          the same, with `input` (a string or fragments) for `arguments`
    item, event               an output item that comes whole, an event of an unknown type: any JSON object
    usage                     the token usage; if there is none, the words read and said are counted
    finish                    "stop" (when nothing else ends the answer), "length", "content_filter"; or null: the answer
                              breaks off without an end
    failure                   `{"message", "code", "type", "param"}`: the model reports that it failed
    raise                     `{"message", "status", "code", "type", "param"}`: an error is raised; by `stream` itself
                              if nothing was said before
    crash                     a message: an exception nobody has foreseen is raised
    delay                     seconds to sleep
    wait                      the name of a gate: the turn goes on when `release` is called
"""

import asyncio
import functools
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError

from antiphon.backends.base import Capabilities, Deltas, Model, Turn, locate, read_options
from antiphon.errors import AntiphonError, ConfigError
from antiphon.protocol import items as wire
from antiphon.protocol.content import ANNOTATIONS, LogProb, text_of
from antiphon.protocol.items import ITEMS, Item, OutputItem
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import OutputTokensDetails, Usage
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

Chunks = str | list[str]
Key = int | str


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a script."""


class Options(Strict):
    script: str | dict[str, Any] = {}


class Words(Strict):
    regex: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"{error} - at `$.regex`") from None


class ToolCall(Strict):
    name: str = ""
    arguments: Chunks | dict[str, Any] = ""
    call_id: str | None = None
    namespace: str | None = None
    key: Key | None = None


class CustomToolCall(Strict):
    name: str = ""
    input: Chunks = ""
    call_id: str | None = None
    namespace: str | None = None
    key: Key | None = None


class Raised(Strict):
    message: str
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    code: str = "server_error"
    type: str = "server_error"
    param: str | None = None


class Step(Strict):
    """One of these."""

    text: Chunks | UnsetType = UNSET
    reasoning: Chunks | UnsetType = UNSET
    refusal: Chunks | UnsetType = UNSET
    tokens: list[LogProb] | UnsetType = UNSET
    summary: Chunks | UnsetType = UNSET
    seal: str | UnsetType = UNSET
    annotation: Raw | UnsetType = UNSET
    tool_call: ToolCall | UnsetType = UNSET
    custom_tool_call: CustomToolCall | UnsetType = UNSET
    item: Raw | UnsetType = UNSET
    event: Raw | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    finish: Literal["stop", "length", "content_filter"] | None | UnsetType = UNSET
    failure: deltas.Failure | UnsetType = UNSET
    raise_: Raised | UnsetType = msgspec.field(default=UNSET, name="raise")
    crash: str | UnsetType = UNSET
    delay: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    wait: str | UnsetType = UNSET
