"""Prompt templates: define, list and delete them, and apply one to a request."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from antiphon import offload
from antiphon.engine.items import check_item_ids
from antiphon.engine.respond.ids import new_token
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol import codec
from antiphon.protocol.items import Item, Message
from antiphon.protocol.prompt import Prompt, PromptDefinition, PromptSummary
from antiphon.protocol.request import CreateRequest, PromptRef
from antiphon.protocol.unions import Unknown
from antiphon.store.base import Store
from antiphon.store.prompts import StoredPrompt

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z0-9_.-]+)\s*\}\}")
_MAX_DEPTH = 100
# Parameters that would bind the prompt to one conversation, to one kind of response, or to itself.
_FORBIDDEN_IN_TEMPLATE = ("prompt", "previous_response_id", "conversation", "stream", "background", "store")


# The maximum size of an expanded template, unless the settings have another.
DEFAULT_MAX_BYTES = 32 * 1024 * 1024


class Prompts:
    """The prompt templates of a store. `max_bytes` limits a template after its variables are replaced."""

    def __init__(self, store: Store, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._store = store
        self.max_bytes = max_bytes

    async def define(self, project: str, definition: PromptDefinition) -> Prompt:
        """Save a new version of a prompt, or the first version of a new prompt."""
        for name in _FORBIDDEN_IN_TEMPLATE:
            if name in definition.template:
                raise InvalidRequest(f"A template cannot set '{name}'.", param=f"template.{name}", code="invalid_value")
        await offload.run(_check_template, definition.template)
        prompt_id = definition.id or f"pmpt_{new_token()}"
        created_at = int(time.time())
        body = msgspec.json.encode(definition.template)
        if definition.version is not None:
            version = definition.version
            await self._store.save_prompt(project, prompt_id, version, body, created_at)
        else:
            version = await self._save_next(project, prompt_id, body, created_at)
        return Prompt(prompt_id, version, created_at, definition.template)

    async def _save_next(self, project: str, prompt_id: str, body: bytes, created_at: int) -> str:
        """Save the body under the next version number and return the number."""
        newest = await self._store.load_prompt(project, prompt_id, None)
        if newest is not None and not newest.version.isdecimal():
            raise InvalidRequest(
                f"The newest version is '{newest.version}', which is not a number: set 'version'.",
                param="version",
                code="invalid_value",
            )
        version = 0 if newest is None else int(newest.version)
        while True:
            version += 1
            # The number may be taken, by a version that was named so or by a concurrent request.
            with suppress(InvalidRequest):
                await self._store.save_prompt(project, prompt_id, str(version), body, created_at)
                return str(version)

    async def retrieve(self, project: str, prompt_id: str, version: str | None) -> Prompt:
        """Return this version of a prompt, or for None the latest."""
        found = await self._find(project, prompt_id, version, param="prompt_id")
        return Prompt(prompt_id, found.version, found.created_at, msgspec.json.decode(found.body))

    async def list_all(self, project: str) -> list[PromptSummary]:
        return [PromptSummary(*each) for each in await self._store.list_prompts(project)]

    async def delete(self, project: str, prompt_id: str) -> None:
        if not await self._store.delete_prompt(project, prompt_id):
            raise NotFound(f"Prompt with id '{prompt_id}' not found.", param="prompt_id")

    async def apply_template(self, request: CreateRequest, project: str) -> CreateRequest:
        """Return the request with the template of its prompt as defaults. Template input comes before the request's."""
        if request.prompt is None:
            return request
        found = await self._find(project, request.prompt.id, request.prompt.version, param="prompt")
        filled = await self._fill_template(found.body, request.prompt)
        changes: dict[str, Any] = {
            name: getattr(filled, name)
            for name in request.__struct_fields__
            if getattr(request, name) is None and getattr(filled, name) is not None
        }
        if filled.input is not None and request.input is not None:
            changes["input"] = [*_as_items(filled.input), *_as_items(request.input)]
        return msgspec.structs.replace(request, **changes)

    async def _fill_template(self, body: bytes, prompt: PromptRef) -> CreateRequest:
        template: dict[str, Any] = await offload.run_sized(len(body), msgspec.json.decode, body)
        counts = await offload.run(_count_variables, template)
        variables = _check_variables(counts, prompt)
        size = self._check_size(len(body), counts, variables)
        return await offload.run_sized(size, partial(_decode_template, param="prompt"), template, variables)

    def _check_size(self, body_size: int, counts: Mapping[str, int], variables: Mapping[str, Any]) -> int:
        """Return the size of the expanded template. Raise InvalidRequest if it is too large.

        `counts` says how often each variable occurs.
        """
        sizes = {name: count * len(msgspec.json.encode(variables[name])) for name, count in counts.items()}
        size = body_size + sum(sizes.values())
        if size > self.max_bytes:
            param = f"prompt.variables.{max(sizes, key=sizes.__getitem__)}" if sizes else "prompt"
            raise InvalidRequest(
                f"The prompt is too large: with its variables it has {size} bytes. This server accepts at most "
                f"{self.max_bytes} (setting max_prompt_bytes).",
                param=param,
                code="string_above_max_length",
            )
        return size

    async def _find(self, project: str, prompt_id: str, version: str | None, *, param: str) -> StoredPrompt:
        found = await self._store.load_prompt(project, prompt_id, version)
        if found is None:
            which = f" and version '{version}'" if version is not None else ""
            raise NotFound(f"Prompt with id '{prompt_id}'{which} not found.", param=param)
        return found


def _check_template(template: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if the template cannot be a request, whatever its variables are."""
    _decode_template(template, dict.fromkeys(_count_variables(template), "x"), param="template")


def _as_items(value: "str | list[Item | Unknown]") -> "list[Item | Unknown]":
    return [Message("user", value)] if isinstance(value, str) else value


def _check_variables(counts: Mapping[str, int], prompt: PromptRef) -> Mapping[str, Any]:
    given = prompt.variables or {}
    variables = counts.keys()
    for name in sorted(variables - given.keys()):
        raise InvalidRequest(
            f"The prompt needs a value for its variable '{name}'.",
            param=f"prompt.variables.{name}",
            code="missing_required_parameter",
        )
    for name in sorted(given.keys() - variables):
        raise InvalidRequest(
            f"The prompt has no variable '{name}'.", param=f"prompt.variables.{name}", code="invalid_value"
        )
    return given


def _count_variables(template: Any) -> Counter[str]:
    """Return the names of all variables in a template, and how often each occurs."""
    counts: Counter[str] = Counter()
    levels = [template]
    for _ in range(_MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in levels:
            if isinstance(value, str):
                counts.update(_PLACEHOLDER.findall(value))
            elif isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if not inner:
            return counts
        levels = inner
    raise InvalidRequest("The template is nested too deeply.", param="template", code="invalid_value")


def _decode_template(template: Mapping[str, Any], variables: Mapping[str, Any], *, param: str) -> CreateRequest:
    """Decode the template with its variables replaced. Errors have the param path in the template."""
    filled = _replace_variables(template, variables)
    try:
        decoded = codec.decode_request(msgspec.json.encode(filled))
    except InvalidRequest as error:
        where = f"{param}.{error.param}" if error.param else param
        raise InvalidRequest(error.message, param=where, code=error.code) from None
    if decoded.ignored:
        raise InvalidRequest(
            f"Unknown parameter in the template: '{decoded.ignored[0]}'.",
            param=f"{param}.{decoded.ignored[0]}",
            code="unknown_parameter",
        )
    if isinstance(decoded.body.input, list):
        check_item_ids(decoded.body.input, param=f"{param}.input")
    return decoded.body


def _replace_variables(value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: _as_text(match[1], variables[match[1]]), value)
    if isinstance(value, list):
        return [_replace_variables(each, variables) for each in value]
    if isinstance(value, dict):
        part = _replace_part(value, variables)
        return part if part is not None else {name: _replace_variables(each, variables) for name, each in value.items()}
    return value


def _replace_part(value: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
    """Return the value of a text part that is only a variable, if the value is a content part (an image, a file)."""
    match = _PLACEHOLDER.fullmatch(value["text"]) if isinstance(value.get("text"), str) else None
    if match is None or not isinstance(variables[match[1]], dict):
        return None
    return variables[match[1]]


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") == "input_text" and isinstance(value.get("text"), str):
        return str(value["text"])
    raise InvalidRequest(
        f"The variable '{name}' is inside a text, so its value must be text.",
        param=f"prompt.variables.{name}",
        code="invalid_type",
    )
