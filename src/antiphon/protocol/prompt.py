"""Prompts: stored templates that a request names instead of spelling them out."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from antiphon.protocol.unions import Wire, always

# An id is a segment of a path, so it has nothing in it that a path would have to escape.
Name: TypeAlias = Annotated[str, Meta(pattern="^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]


class PromptDefinition(Wire):
    """A new version of a prompt. `template` is a create request in part, with `{{name}}` wherever a variable goes.

    Without an id it is a new prompt; without a version, the versions are counted.
    """

    template: dict[str, Any]
    id: Name | None = None
    version: Name | None = None


class Prompt(Wire):
    id: str
    version: str
    created_at: int
    template: dict[str, Any]
    object: Literal["prompt"] = always("prompt")


class PromptSummary(Wire):
    """A version of a prompt as it is listed, without its template."""

    id: str
    version: str
    created_at: int
    object: Literal["prompt"] = always("prompt")
