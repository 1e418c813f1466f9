"""Trials of grammars in a process of their own."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.backends.embedded.vocabulary import GgufError, read_vocabulary
from antiphon.backends.embedded.weights import find_weights
from antiphon.config.settings import GrammarLimits
from antiphon.errors import RateLimited, Unavailable
from antiphon.grammars.trial import GrammarTrial

LIMITS = GrammarLimits()
ABC = 'start: "abc"'


@asynccontextmanager
async def open_trial(*, native: bool = False) -> AsyncIterator[GrammarTrial]:
    weights = find_weights("smollm2-135m")
    trial = GrammarTrial(load_vocabulary=(lambda: read_vocabulary(weights)) if native else None)
    try:
        yield trial
    finally:
        await trial.close()


def write_schema(**schema: object) -> str:
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema)}"


def list_children() -> set[str]:
    """Return the process ids of this process's children."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def test_grammars_are_compiled_in_one_other_process() -> None:
    before = list_children()
    async with open_trial() as trial:
        assert list_children() == before  # nothing starts without a grammar
        assert await trial.find_fault("lark", ABC, LIMITS) is None
        assert await trial.find_fault("regex", "a+", LIMITS) is None
        fault = await trial.find_fault("lark", "start: missing", LIMITS)
        assert fault is not None
        assert "unknown name" in fault
        assert len(list_children() - before) == 1
    assert list_children() == before


async def test_library_of_the_embedded_model_is_used(caplog: pytest.LogCaptureFixture) -> None:
    async with open_trial(native=True) as trial:
        assert await trial.find_fault("lark", write_schema(type="integer"), LIMITS) is None
        assert "Invalid type" in (await trial.find_fault("lark", write_schema(type="odd"), LIMITS) or "")
        # The package llguidance compiles this schema. The library of the embedded model needs gigabytes.
        bomb = write_schema(type="array", items={"type": "integer"}, minItems=10**9)
        fault = await trial.find_fault("lark", bomb, LIMITS)
        assert fault is not None
        assert fault.startswith("compiling it takes more than")
        assert await trial.find_fault("lark", write_schema(type="null"), LIMITS) is None
    assert "does not export" not in caplog.text


async def test_limit_of_time_ends_the_process_and_another_one_starts() -> None:
    limits = GrammarLimits(compile_seconds=0.1, compile_megabytes=1000)
    async with open_trial() as trial:
        bomb = write_schema(type="integer", multipleOf=9_999_991)
        fault = await trial.find_fault("lark", bomb, limits)
        assert fault == "compiling it takes more than 0.1 seconds of CPU time (setting grammars.compile_seconds)."
        assert await trial.find_fault("lark", bomb, limits) == fault  # from the cache
        assert await trial.find_fault("lark", ABC, limits) is None


async def test_stack_overflow_ends_only_the_worker() -> None:
    async with open_trial() as trial:
        chain = {f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(3000)}
        schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a3000": {"type": "null"}}}
        fault = await trial.find_fault("lark", f"start: %json {json.dumps(schema)}", LIMITS)
        assert fault is not None
        assert "setting grammars.compile_megabytes" in fault
        assert await trial.find_fault("lark", ABC, LIMITS) is None


async def test_results_are_cached_unless_repeated() -> None:
    before = list_children()
    async with open_trial() as trial:
        assert await trial.find_fault("lark", ABC, LIMITS) is None
        await trial.end_worker()
        assert await trial.find_fault("lark", ABC, LIMITS) is None
        assert list_children() == before
        assert await trial.find_fault("lark", ABC, LIMITS, is_repeated=True) is None
        assert len(list_children() - before) == 1


async def test_worker_that_died_between_trials_is_replaced() -> None:
    before = list_children()
    async with open_trial() as trial:
        assert await trial.find_fault("lark", ABC, LIMITS) is None
        (worker,) = list_children() - before
        os.kill(int(worker), signal.SIGKILL)
        assert await trial.find_fault("lark", 'start: "b"', LIMITS) is None


async def test_closing_ends_a_running_trial_and_refuses_others() -> None:
    before = list_children()
    limits = GrammarLimits(compile_seconds=50, compile_megabytes=4000)
    async with open_trial() as trial:
        assert await trial.find_fault("lark", ABC, limits) is None
        bombs = [
            asyncio.ensure_future(trial.find_fault("lark", write_schema(type="integer", multipleOf=number), limits))
            for number in (9_999_991, 9_999_973)
        ]
        await asyncio.sleep(0)
        await trial.close()
        results = await asyncio.gather(*bombs, return_exceptions=True)
        assert [type(each) for each in results] == [Unavailable, Unavailable]
    assert list_children() == before


async def test_cancelled_trial_ends_its_process() -> None:
    before = list_children()
    limits = GrammarLimits(compile_seconds=50, compile_megabytes=4000)
    async with open_trial() as trial:
        assert await trial.find_fault("lark", ABC, limits) is None
        bomb = asyncio.ensure_future(
            trial.find_fault("lark", write_schema(type="integer", multipleOf=9_999_991), limits)
        )
        waiting = asyncio.ensure_future(trial.find_fault("lark", 'start: "b"', limits))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bomb.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bomb
        assert await waiting is None
    assert list_children() == before


async def test_too_many_waiting_grammars_are_refused_at_once() -> None:
    limits = GrammarLimits(queued=8)
    async with open_trial() as trial:
        running = [
            asyncio.ensure_future(trial.find_fault("lark", f'start: "{name}"', limits, project="greedy"))
            for name in ("a", "b", "c")
        ]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited) as caught:
            await trial.find_fault("lark", ABC, limits, project="greedy")
        assert caught.value.retry_after
        assert await trial.find_fault("lark", ABC, limits, project="other") is None
        assert await asyncio.gather(*running) == [None] * 3


def test_vocabulary_is_read_from_the_weights(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(find_weights("smollm2-135m"))
    assert len(vocabulary.tokens) == 49152
    assert {b" the", b"\n", b"\xc3", b"\xff<|im_end|>"} <= set(vocabulary.tokens)
    assert vocabulary.tokens[vocabulary.end] == b"\xff<|im_end|>"
    for name, content in {
        "empty": b"",
        "text": b"hello",
        "cut": find_weights("smollm2-135m").read_bytes()[:5000],
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(GgufError):
            read_vocabulary(path)
