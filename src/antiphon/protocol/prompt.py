"""Prompts: stored templates that a request names instead of spelling them out."""

from typing import Any, Literal

from antiphon.protocol.open import Wire, always


class PromptDefinition(Wire):
    """A new version of a prompt. `template` is a create request in part, with `{{name}}` wherever a variable goes."""

    template: dict[str, Any]
    id: str | None = None
    version: str | None = None


class Prompt(Wire):
    id: str
    version: str
    created_at: int
    template: dict[str, Any]
    object: Literal["prompt"] = always("prompt")


class PromptSummary(Wire):
    id: str
    version: str
    created_at: int
    object: Literal["prompt"] = always("prompt")
