"""llama.cpp in this process: templates, generations and grammars."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.base import Turn
from antiphon.backends.embedded.model import CompletionChunk, Generation, Llama, LlamaSlot
from antiphon.backends.embedded.tokenizer import SLICE, PromptTooLong
from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import ConfigError, Unavailable
from antiphon.protocol.request import CreateRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama(shallow_weights: Path) -> AsyncIterator[Llama]:
    llama = Llama(shallow_weights, window=2048, slots=1, threads=1, batch=16)
    await llama.load()
    yield llama
    await llama.close()


def make_turn() -> Turn:
    return Turn(request=CreateRequest(), items=[])


def join_text(chunks: list[CompletionChunk]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


async def finish(llama: Llama, prompt: str, tokens: int) -> str:
    return "".join([join_text(chunks) async for chunks in llama.generate({"prompt": prompt, "max_tokens": tokens})])


async def test_messages_are_tokenized_with_the_chat_template(llama: Llama) -> None:
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = [*question, {"role": "assistant", "content": "Hello"}]
    tokenizer, turn = llama.tokenizer, make_turn()
    short = await tokenizer.tokenize(question, turn=turn, limit=100)
    long = await tokenizer.tokenize(answered, turn=turn, limit=100)
    # The template closes an answer, and opens the next one.
    answer_start = short[-3:]
    assert long[: len(short)] == short
    assert long[-3:] == answer_start


async def test_long_prompt_is_counted_and_tokenized_like_a_short_one(llama: Llama) -> None:
    tokenizer, turn = llama.tokenizer, make_turn()
    # Runs of blanks are few tokens, so the prompt has several slices and fits.
    text = f"{' ' * 40_000}one{' ' * 40_000}two"
    messages = [{"role": "user", "content": text}]
    assert len(text) > SLICE
    tokens = await tokenizer.tokenize(messages, turn=turn, limit=10_000)
    prompt = tokenizer._render(messages)
    assert tokens == tokenizer._read_tokens(prompt)
    assert await tokenizer.count(messages, turn=turn, exact_up_to=10_000) == len(tokens)
    roughly = await tokenizer.count(messages, turn=turn, exact_up_to=10)
    assert abs(roughly - len(tokens)) <= 4
    with pytest.raises(PromptTooLong, match=f"^{len(tokens)} tokens"):
        await tokenizer.tokenize(messages, turn=turn, limit=len(tokens) - 1)
    await tokenizer.tokenize(messages, turn=turn, limit=len(tokens))
    with pytest.raises(PromptTooLong, match=r"^at least 1\d\d tokens"):
        await tokenizer.tokenize(messages, turn=turn, limit=100)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
async def test_known_tokens_are_the_common_prefix(before: list[int], prompt: list[int]) -> None:
    slot = LlamaSlot(0)
    slot.prompt = before
    known = slot.count_known(prompt)
    assert prompt[:known] == before[:known]
    assert known == min(len(before), len(prompt)) or before[known] != prompt[known]


async def test_closing_the_generator_stops_reading_the_prompt(llama: Llama) -> None:
    generation = llama.generate({"prompt": "word " * 1900, "max_tokens": 100})
    first = await anext(generation)
    await generation.aclose()
    # The prompt was still being read.
    assert join_text(first) == ""
    assert await finish(llama, "Hello", 2)


async def test_chunks_that_arrive_while_loop_is_busy_are_one_batch() -> None:
    generation = Generation()
    for step in (b"one", b"two", b"three"):
        await asyncio.to_thread(generation.receive, step)
    assert await generation.take() == [b"one", b"two", b"three"]
    generation.cancel()
    assert await asyncio.to_thread(generation.receive, b"four") is True
    generation.finish(Future())
    assert await generation.take() == []


async def test_loop_takes_whole_batches_and_the_rest_at_the_end() -> None:
    generation = Generation(batch=2)
    await asyncio.to_thread(generation.receive, b"one")
    taken = asyncio.ensure_future(generation.take())
    await asyncio.sleep(0)
    assert not taken.done()
    await asyncio.to_thread(generation.receive, b"two")
    assert await taken == [b"one", b"two"]
    await asyncio.to_thread(generation.receive, b"three")
    generation.finish(Future())
    assert await generation.take() == [b"three"]
    assert await generation.take() == []


@pytest.mark.parametrize(
    ("grammar", "accepted"),
    [
        ('%llguidance {}\nstart: "a"\n', True),
        ("%llguidance {}\nstart: missing\n", False),
        ('%llguidance {}\nstart: %json {"type": "odd"}\n', False),
        ('%llguidance {}\nstart: ("a" | b)\nb: %json {"type": "integer"}\n', True),
    ],
)
async def test_grammar_is_accepted_only_if_it_compiles(llama: Llama, grammar: str, *, accepted: bool) -> None:
    assert await llama.accepts_grammar(grammar) is accepted
    assert await llama.accepts_grammar(grammar) is accepted


async def test_model_is_unavailable_before_loading() -> None:
    llama = Llama(find_weights("smollm2-135m"), window=512, slots=1, threads=1, batch=16)
    with pytest.raises(Unavailable):
        _ = llama.tokenizer
    with pytest.raises(Unavailable):
        await finish(llama, "Hello", 1)
    await llama.close()


@pytest.mark.parametrize(("kind", "is_computed"), [("CPU", False), ("ACCEL", False), ("GPU", True), ("IGPU", True)])
async def test_layers_that_fit_are_computed_only_for_a_gpu(
    kind: str, is_computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    computed: list[bool] = []

    def refuse(params: Any) -> None:
        computed.append(params.fit_params)
        raise RuntimeError("refused")

    types = xllamacpp.ggml_backend_dev_type
    devices = [{"type": types.GGML_BACKEND_DEVICE_TYPE_CPU}, {"type": types[f"GGML_BACKEND_DEVICE_TYPE_{kind}"]}]
    monkeypatch.setattr(xllamacpp, "get_device_info", lambda: devices)
    monkeypatch.setattr(xllamacpp, "Server", refuse)
    with pytest.raises(ConfigError, match="refused"):
        await Llama(Path("weights.gguf"), window=512, slots=1, threads=1, batch=16).load()
    assert computed == [is_computed]
