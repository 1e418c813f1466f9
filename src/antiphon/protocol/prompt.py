"""Prompts: stored templates of requests, which a request refers to by id."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from antiphon.protocol.unions import Wire, always

# An id is a URL path segment, so it has no characters that need escaping.
Name: TypeAlias = Annotated[str, Meta(pattern="^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]


class PromptDefinition(Wire):
    """A new version of a prompt. `template` is a partial create request with `{{name}}` for each variable.

    Without an `id` it creates a new prompt. Without a `version` the version is the next number.
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
    """An entry in the list of prompts: a version without its template."""

    id: str
    version: str
    created_at: int
    object: Literal["prompt"] = always("prompt")
