"""The handlers of /v1/models."""

from typing import Literal

from msgspec import Struct

from antiphon.backends.base import Model
from antiphon.engine.engine import Engine
from antiphon.errors import ModelNotFound
from antiphon.protocol.unions import always
from antiphon.server.http import Exchange


class ModelObject(Struct, omit_defaults=True):
    """`context_window` is ours: how many tokens a turn may take, if that is known."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = always("model")
    context_window: int | None = None


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
    return ModelObject(id=model.id, created=model.created, owned_by=model.owned_by, context_window=model.context_window)
