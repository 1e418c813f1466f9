"""What comes back from Chat Completions, in all the shapes that servers give it. What varies too much is left open."""

from typing import Any

import msgspec


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class CallPiece(msgspec.Struct):
    """A call, or a piece of one."""

    index: int | None = None
    id: str | int | None = None
    function: Function | None = None
    extra_content: Any = None


class Said(msgspec.Struct):
    """More of the answer (`delta`), or all of it (`message`)."""

    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    tool_calls: list[CallPiece | None] | None = None
    function_call: Function | None = None
    annotations: Any = None

    def is_plain(self) -> bool:
        """Whether there is text, and nothing else."""
        return (
            type(self.content) is str
            and bool(self.content)
            and not self.reasoning_content
            and not self.reasoning
            and not self.reasoning_details
            and not self.refusal
            and not self.tool_calls
            and self.function_call is None
            and not self.annotations
        )


class Choice(msgspec.Struct):
    index: int | None = None
    delta: Said | None = None
    message: Said | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    error: Any = None

    def is_plain(self) -> bool:
        """Whether there is nothing beside what is said."""
        return self.finish_reason is None and self.logprobs is None and not self.error and self.message is None


class Chunk(msgspec.Struct):
    model: Any = None
    choices: list[Choice] | None = None
    usage: Any = None
    x_groq: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None

    def is_error(self) -> bool:
        if self.error or self.object == "error":
            return True
        # Some servers put the bare error there, and a chunk without choices has none of these.
        return self.choices is None and bool(self.message or self.detail)


decode_chunk = msgspec.json.Decoder(Chunk).decode
