"""The serving pipeline: its stages, and the second preparation of queued requests."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.base import Backend, Turn
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Accepted, Prepared
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.ids import Mint
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve import pipeline as pipeline_module
from antiphon.engine.serve.pipeline import Pipeline, add_stages
from antiphon.engine.serve.stage import Stage
from antiphon.errors import InvalidRequest, ModelNotFound
from antiphon.protocol import codec
from antiphon.protocol.conversation import Conversation
from antiphon.protocol.items import FunctionCall, FunctionCallOutput
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.request import JsonObjectFormat, TextConfig
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.memory.store import MemoryStore

SEALER = Sealer([bytes(32)])


class Recorder(ScriptedBackend):
    """A backend that records its turns."""

    def __init__(self, script: dict[str, Any] | None = None) -> None:
        super().__init__("recorder", msgspec.convert({"default": [{"text": "hello"}]} | (script or {}), Script))
        self.turns: list[Turn] = []

    async def stream(self, turn: Turn) -> Any:
        self.turns.append(turn)
        return await super().stream(turn)


def make_pipeline(store: MemoryStore, backend: Backend | None = None, **policy: Any) -> Pipeline:
    return Pipeline(
        {"test": backend or Recorder()}, store=store, prompts=Prompts(store), policy=Policy(**policy), sealer=SEALER
    )


def decode(**fields: Any) -> Any:
    return codec.decode_request(codec.encode({"model": "scripted", "input": "hi"} | fields)).body


def accept(prepared: Prepared) -> Accepted:
    """Return the fixed parts of a prepared request, as a queued one has them when it starts."""
    return Accepted(input=prepared.input, mint=Mint(prepared.mint.token, prepared.mint.minted))


def test_documented_stages_are_modules_in_the_order_of_the_code() -> None:
    named = re.findall(r"^    (\w+) {2,}\w", pipeline_module.__doc__ or "", re.MULTILINE)
    folder = Path(pipeline_module.__file__).parent
    assert [name for name in named if not (folder / f"{name}.py").exists() and not (folder / name).is_dir()] == []
    wrapped: Any = add_stages("test", Recorder(), SEALER)
    stages = []
    while isinstance(wrapped, Stage):
        stages.append(type(wrapped).__module__.removeprefix("antiphon.engine.serve.").split(".")[0])
        wrapped = wrapped.inner
    assert stages == named[-len(stages) :]


async def test_queued_request_is_prepared_like_the_accepted_one() -> None:
    pipeline = make_pipeline(MemoryStore())
    tools = [{"type": "function", "name": "f", "parameters": {}, "strict": False}]
    request = decode(tools=tools, temperature=0.5, background=True, instructions="Be kind.")
    prepared = await pipeline.prepare(request, project="p")
    again = await pipeline.prepare_accepted(prepared.turn.request, accept(prepared), project="p")
    assert again.turn.request == prepared.turn.request
    assert (again.turn.items, again.input) == (prepared.turn.items, prepared.input)
    assert again.turn.response_id == prepared.turn.response_id == prepared.mint.response_id
    assert (prepared.turn.may_be_repeated, again.turn.may_be_repeated) == (False, True)


async def test_queued_request_sees_context_that_changed_meanwhile() -> None:
    store = MemoryStore()
    await store.open()
    pipeline = make_pipeline(store)
    call = FunctionCall("call_1", "f", "{}", "fc_1")
    first = Response(id="resp_1", created_at=1, status="completed", model="scripted", output=[call])
    await store.save("p", StoredResponse(response=first, input=[]))
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    prepared = await pipeline.prepare(decode(input=[output], previous_response_id="resp_1"), project="p")
    emptied = Response(id="resp_1", created_at=1, status="completed", model="scripted", output=[])
    await store.save("p", StoredResponse(response=emptied, input=[]))
    again = await pipeline.prepare_accepted(prepared.turn.request, accept(prepared), project="p")
    assert [type(item) for item in prepared.turn.items] == [FunctionCall, FunctionCallOutput]
    assert (again.turn.items, len(again.repairs)) == ([], 1)


async def test_queued_request_does_not_apply_its_prompt_template_again() -> None:
    store = MemoryStore()
    prompts = Prompts(store)
    pipeline = Pipeline({"test": Recorder()}, store=store, prompts=prompts, policy=Policy(), sealer=SEALER)
    await store.open()
    prompt = await prompts.define("p", PromptDefinition({"input": "before"}))
    prepared = await pipeline.prepare(decode(prompt={"id": prompt.id}), project="p")
    again = await pipeline.prepare_accepted(prepared.turn.request, accept(prepared), project="p")
    assert len(prepared.turn.items) == 2
    assert again.turn.items == prepared.turn.items


async def test_queued_request_keeps_its_settings_on_a_backend_that_lacks_them() -> None:
    request = decode(top_logprobs=2, tools=[{"type": "file_search", "vector_store_ids": ["vs_1"]}])
    able = Recorder({"native_tools": None})
    prepared = await make_pipeline(MemoryStore(), able).prepare(request, project="p")
    lacking = Recorder({"native_tools": ["function"], "lacks": ["logprobs"]})
    other = make_pipeline(MemoryStore(), lacking, unsupported_tools="refuse")
    with pytest.raises(InvalidRequest):
        await other.prepare(request, project="p")
    again = await other.prepare_accepted(prepared.turn.request, accept(prepared), project="p")
    assert again.turn.request == prepared.turn.request


async def test_queued_request_ignores_configuration_updates_added_meanwhile() -> None:
    store = MemoryStore()
    await store.open()
    pipeline = make_pipeline(store)
    await store.create_conversation("p", Conversation("conv_1", 1, {}), [])
    prepared = await pipeline.prepare(decode(conversation="conv_1"), project="p")
    update = codec.decode_items(
        b'[{"type": "configuration_update", "id": "cfg_1", "text": {"format": {"type": "json_object"}}}]'
    )
    await store.append_items("p", "conv_1", update)
    again = await pipeline.prepare_accepted(prepared.turn.request, accept(prepared), project="p")
    fresh = await pipeline.prepare(decode(conversation="conv_1"), project="p")
    assert (again.turn.request.text, fresh.turn.request.text) == (None, TextConfig(format=JsonObjectFormat()))


async def test_queued_request_of_removed_model_raises_model_not_found() -> None:
    prepared = await make_pipeline(MemoryStore()).prepare(decode(), project="p")
    other = Pipeline({}, store=MemoryStore(), prompts=Prompts(MemoryStore()), policy=Policy(), sealer=SEALER)
    with pytest.raises(ModelNotFound):
        await other.prepare_accepted(prepared.turn.request, accept(prepared), project="p")


async def test_compaction_markers_do_not_reach_backend() -> None:
    backend = Recorder()
    pipeline = make_pipeline(MemoryStore(), backend)
    request = decode(context_management=[{"type": "compaction", "compact_threshold": 100000}])
    prepared = await pipeline.prepare(request, project="p")
    serving = await pipeline.serve(prepared)
    await serving.deltas.aclose()
    (turn,) = backend.turns
    assert prepared.turn.request.context_management is not None
    assert turn.request.context_management is None


async def test_serving_leaves_prepared_request_unchanged() -> None:
    pipeline = make_pipeline(MemoryStore(), models={"alias": ["test/scripted"]})
    prepared = await pipeline.prepare(decode(model="alias"), project="p")
    before = codec.encode([prepared.turn.request, prepared.turn.items, prepared.warnings])
    serving = await pipeline.serve(prepared)
    await serving.deltas.aclose()
    assert serving.candidate is not None
    assert serving.candidate.address == "test/scripted"
    assert codec.encode([prepared.turn.request, prepared.turn.items, prepared.warnings]) == before
