"""Pipelines that share backends: each backend is closed once, after its last user."""

import asyncio

from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from antiphon.engine.policy import Policy
from antiphon.engine.prompts import Prompts
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.replaced_pipelines import ReplacedPipelines
from antiphon.store.memory.store import MemoryStore


class Recorder(ScriptedBackend):
    """A backend that records its starts and ends."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, Script())
        self._log = log
        self._label = name

    async def start(self) -> None:
        self._log.append(f"start {self._label}")

    async def close(self) -> None:
        self._log.append(f"close {self._label}")


def make_pipeline(*backends: Recorder) -> Pipeline:
    store = MemoryStore()
    named = {f"backend{number}": backend for number, backend in enumerate(backends)}
    return Pipeline(named, store=store, prompts=Prompts(store), policy=Policy(), sealer=Sealer([bytes(32)]))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_shared_backend_is_closed_after_the_last_pipeline_that_uses_it() -> None:
    log: list[str] = []
    shared, first, third = Recorder("shared", log), Recorder("first", log), Recorder("third", log)
    one, two, three = make_pipeline(shared, first), make_pipeline(shared), make_pipeline(third)
    await one.start()
    one.acquire()
    await two.start(replaced=one)
    replaced = ReplacedPipelines()
    replaced.add(one, two)
    await three.start(replaced=two)
    replaced.add(two, three)
    await settle()
    assert log == ["start shared", "start first", "start third"]  # a request of the first pipeline is still running
    one.release()
    await settle()
    assert sorted(log[3:]) == ["close first", "close shared"]
    await replaced.close(three)
    await three.close()
    assert log[5:] == ["close third"]


async def test_end_closes_replaced_pipelines_that_are_in_use() -> None:
    log: list[str] = []
    shared, first = Recorder("shared", log), Recorder("first", log)
    one, two = make_pipeline(shared, first), make_pipeline(shared)
    await one.start()
    one.acquire()
    await two.start(replaced=one)
    replaced = ReplacedPipelines()
    replaced.add(one, two)
    await replaced.close(two)
    await two.close()
    assert log == ["start shared", "start first", "close first", "close shared"]
