"""`configuration_update` items: settings that hold from their place on, until another one changes them."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import msgspec

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol import faults
from antiphon.protocol.items import ConfigurationUpdate, Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest, Effort, Format, JsonSchemaFormat, ReasoningConfig, TextConfig


def check_updates(items: Sequence[Item | Unknown], *, param: str = "input") -> None:
    """Raise on an update among the new items that sets what cannot be, naming the place in `param`."""
    if ConfigurationUpdate not in map(type, items):  # nearly always
        return
    for index, item in enumerate(items):
        if isinstance(item, ConfigurationUpdate):
            _read(item, f"{param}[{index}]")


def apply_updates(request: CreateRequest, items: Sequence[Item | Unknown]) -> tuple[CreateRequest, list[str]]:
    """The request with what the newest updates set, and what is to be known about it.

    `items` is the whole history, in order. The new ones were checked; of the others, one that sets what cannot be must
    not stand in the way for ever.
    """
    if ConfigurationUpdate not in map(type, items):
        return request, []
    updates = [item for item in items if isinstance(item, ConfigurationUpdate)]
    request = copy(request)
    useless: list[str] = []
    for update in updates:
        try:
            effort, form = _read(update, "")
        except InvalidRequest as error:
            useless.append(f"the configuration_update {update.id} was left out: {error.message}")
            continue
        if update.reasoning is not None:
            before = request.reasoning or ReasoningConfig()
            request.reasoning = msgspec.structs.replace(before, effort=effort)
        if form is not None:
            request.text = msgspec.structs.replace(request.text or TextConfig(), format=form)
    return request, useless


def _read(update: ConfigurationUpdate, path: str) -> tuple[Effort | None, Format | None]:
    effort = update.reasoning.effort if update.reasoning is not None else None
    given = update.text.format if update.text is not None else None
    form = _convert(given, Format | None, _join(path, "text.format"))
    if isinstance(form, JsonSchemaFormat) and form.schema is None:
        place = _join(path, "text.format.schema")
        raise MissingParameter(f"Missing required parameter: '{place}'.", param=place)
    return _convert(effort, Effort | None, _join(path, "reasoning.effort")), form


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _convert(value: Any, kind: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = faults.read(error)
        where = _join(path, fault.path) if fault.path else path
        raise InvalidRequest(f"Invalid '{where}': {fault.reason}.", param=where, code="invalid_value") from None
