"""The handlers of /v1/models."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from antiphon.backends.base import Model
from antiphon.engine.engine import Engine
from antiphon.errors import ModelNotFound
from antiphon.server.exchange import Exchange


class ModelObject(Struct):
    """`context_window` is ours: how many tokens a turn may take, if that is known."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"
    context_window: int | UnsetType = UNSET


class ModelList(Struct):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class ModelHandlers:
    """Listing the models, and looking one up."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list_all(self, exchange: Exchange) -> None:
        await exchange.answer_with(ModelList([_present(model) for model in self._engine.models()]))

    async def retrieve(self, exchange: Exchange) -> None:
        for model in self._engine.models():
            if model.id == exchange.param:
                await exchange.answer_with(_present(model))
                return
        raise ModelNotFound(f"The model '{exchange.param[:200]}' does not exist.", param="model")


def _present(model: Model) -> ModelObject:
    window = UNSET if model.context_window is None else model.context_window
    return ModelObject(id=model.id, created=model.created, owned_by=model.owned_by, context_window=window)
