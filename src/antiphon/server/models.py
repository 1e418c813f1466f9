"""The handlers of /v1/models."""

from typing import ClassVar, Literal

from msgspec import Struct

from antiphon.backends.base import Model
from antiphon.engine.engine import Engine
from antiphon.errors import ModelNotFound
from antiphon.protocol.unions import always
from antiphon.server.http import HttpRequest
from antiphon.server.router import Operation


class ModelObject(Struct, omit_defaults=True):
    """A model. `context_window` is an extension: the maximum tokens of a turn, if known."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = always("model")
    context_window: int | None = None


class ModelList(Struct):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class ModelHandlers:
    """One method per operation on models."""

    operations: ClassVar[dict[str, Operation]] = {
        "list_all": Operation(id="listModels", summary="List the models.", response_type=ModelList),
        "retrieve": Operation(id="getModel", summary="Get a model.", response_type=ModelObject),
    }

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def list_all(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(ModelList([_encode_model(model) for model in self._engine.models()]))

    async def retrieve(self, http_request: HttpRequest) -> None:
        for model in self._engine.models():
            if model.id == http_request.path_param:
                await http_request.respond_with(_encode_model(model))
                return
        raise ModelNotFound(f"The model '{http_request.path_param[:200]}' does not exist.", param="model")


def _encode_model(model: Model) -> ModelObject:
    return ModelObject(id=model.id, created=model.created, owned_by=model.owned_by, context_window=model.context_window)
