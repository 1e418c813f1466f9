import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future

import pytest
import pytest_asyncio

from antiphon.backends.embedded.model import Chunk, Job, Llama
from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama() -> AsyncIterator[Llama]:
    llama = Llama(find_weights("smollm2-135m"), window=2048, slots=1, threads=1, batch=16)
    await llama.load()
    yield llama
    await llama.close()


def say(chunks: list[Chunk]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


async def finish(llama: Llama, prompt: str, tokens: int) -> str:
    return "".join([say(chunks) async for chunks in llama.generate({"prompt": prompt, "max_tokens": tokens})])


async def test_the_models_own_template_lays_out_the_conversation(llama: Llama) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Hello"}]
    short, long = await llama.read(asked), await llama.read(answered)
    # An answer is closed, and room made for the next one.
    opening = short[-3:]
    assert long[: len(short)] == short
    assert long[-3:] == opening


async def test_a_long_prompt_is_left_off_when_nobody_waits_for_it(llama: Llama) -> None:
    generation = llama.generate({"prompt": "word " * 1900, "max_tokens": 100})
    first = await anext(generation)
    await generation.aclose()
    # Nothing was said yet: the prompt was still being read.
    assert say(first) == ""
    assert await finish(llama, "Hello", 2)


async def test_what_comes_while_the_loop_is_busy_is_taken_at_once() -> None:
    job = Job()
    for step in (b"one", b"two", b"three"):
        await asyncio.to_thread(job.receive, step)
    assert await job.take() == [b"one", b"two", b"three"]
    job.cancel()
    assert await asyncio.to_thread(job.receive, b"four") is True
    job.finish(Future())
    assert await job.take() == []


@pytest.mark.parametrize(
    ("grammar", "accepted"),
    [
        ('%llguidance {}\nstart: "a"\n', True),
        ("%llguidance {}\nstart: missing\n", False),
        ('%llguidance {}\nstart: %json {"type": "odd"}\n', False),
        ('%llguidance {}\nstart: ("a" | b)\nb: %json {"type": "integer"}\n', True),
    ],
)
async def test_a_grammar_is_accepted_only_if_it_holds_the_model(llama: Llama, grammar: str, *, accepted: bool) -> None:
    assert await llama.accepts(grammar) is accepted
    assert await llama.accepts(grammar) is accepted


async def test_before_loading_nothing_can_be_asked() -> None:
    llama = Llama(find_weights("smollm2-135m"), window=512, slots=1, threads=1, batch=16)
    with pytest.raises(Unavailable):
        await llama.read([{"role": "user", "content": "Hi"}])
    with pytest.raises(Unavailable):
        await finish(llama, "Hello", 1)
    await llama.close()
