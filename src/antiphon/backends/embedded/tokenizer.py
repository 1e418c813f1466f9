"""Prompts of the embedded model as tokens. llama.cpp renders the chat template and tokenizes in threads of its own.

A long prompt is tokenized in slices. A prompt that cannot fit the context window is recognized after the first slices,
or by its length alone.
"""

import asyncio
import contextlib
import http.client
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from antiphon.backends.base import Turn
from antiphon.errors import ModelError
from antiphon.turn_queue import TurnQueue

T = TypeVar("T")

# Characters of a prompt that is tokenized at once. Shorter ones do not wait for longer ones.
SLICE = 64 * 1024
_SHORT_SLOTS = 2
_LONG_SLOTS = 1
# No vocabulary has longer tokens.
_MAX_TOKEN_LENGTH = 512
# A cut may add tokens. A count by slices that exceeds a limit by this factor is above the limit without the cuts too.
_CUT_FACTOR = 1.1
_TIMEOUT_SECONDS = 60


class PromptTooLong(Exception):
    """A prompt has more tokens than the limit. As text: the number of tokens."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{tokens} tokens" if exact else f"at least {tokens} tokens")


class Tokenizer:
    """Tokenizes prompts on the llama.cpp server at `address`. `key` is its API key.

    Turns that wait here count as turns that wait in `queue`.
    """

    def __init__(self, address: str, key: str, *, queue: TurnQueue) -> None:
        self._address = address.removeprefix("http://")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        # A slot is free when its thread is: a cancelled turn frees it later than its caller expects.
        self._threads = ThreadPoolExecutor(_SHORT_SLOTS + _LONG_SLOTS, thread_name_prefix="tokenizer")
        self._short_prompts = TurnQueue(_SHORT_SLOTS, ahead_of=queue)
        self._long_prompts = TurnQueue(_LONG_SLOTS, ahead_of=queue)

    def close(self) -> None:
        for queue in (self._short_prompts, self._long_prompts):
            queue.close("The embedded model is shutting down.")
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, messages: Sequence[dict[str, str]], *, turn: Turn, limit: int) -> list[int]:
        """Return the tokens of the messages in the model's chat template, up to the start of the answer.

        Raises PromptTooLong if there are more than `limit`.
        """
        size = _measure(messages)
        if size > limit * _MAX_TOKEN_LENGTH:
            raise PromptTooLong(size // _MAX_TOKEN_LENGTH, exact=False)
        if size <= SLICE:
            tokens = await self._run(self._short_prompts, turn, lambda: self._read_tokens(self._render(messages)))
        else:
            text, counted = await self._count_slices(messages, turn, stop_after=limit)
            if counted > limit * _CUT_FACTOR:
                raise PromptTooLong(round(counted / _CUT_FACTOR), exact=False)
            tokens = await self._run(self._long_prompts, turn, lambda: self._read_tokens(text))
        if len(tokens) > limit:
            raise PromptTooLong(len(tokens), exact=True)
        return tokens

    async def count(self, messages: Sequence[dict[str, str]], *, turn: Turn, exact_up_to: int) -> int:
        """Count the tokens of the messages. A higher count may be too high by a few tokens per slice."""
        if _measure(messages) <= SLICE:
            tokens = await self._run(self._short_prompts, turn, lambda: self._read_tokens(self._render(messages)))
            return len(tokens)
        text, counted = await self._count_slices(messages, turn)
        if counted > exact_up_to * _CUT_FACTOR:
            return counted
        return len(await self._run(self._long_prompts, turn, lambda: self._read_tokens(text)))

    async def _count_slices(
        self, messages: Sequence[dict[str, str]], turn: Turn, *, stop_after: int | None = None
    ) -> tuple[str, int]:
        """Return the rendered prompt and the sum of the tokens of its slices, up to one that exceeds `stop_after`."""
        text = await self._run(self._long_prompts, turn, lambda: self._render(messages))
        counted = 0
        for start in range(0, len(text), SLICE):
            part = text[start : start + SLICE]
            counted += len(await self._run(self._long_prompts, turn, partial(self._read_tokens, part)))
            if stop_after is not None and counted > stop_after * _CUT_FACTOR:
                break
        return text, counted

    async def _run(self, queue: TurnQueue, turn: Turn, work: Callable[[], T]) -> T:
        """Run a step of a prompt in a thread. Other prompts of the queue run between two steps."""
        slot = await queue.acquire(turn.project, background=turn.background)
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
        except BaseException:
            slot.release()
            raise
        future.add_done_callback(lambda _: _call_soon(loop, slot.release))
        return await asyncio.wrap_future(future)

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        text: str = self._post("/apply-template", {"messages": messages})["prompt"]
        return text

    def _read_tokens(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def _post(self, path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, msgspec.json.encode(body), self._headers)
            reply = msgspec.json.decode(connection.getresponse().read())
        if "error" in reply:
            raise ModelError(f"The model's chat template failed: {reply['error']['message']}")
        return reply


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed
        loop.call_soon_threadsafe(callback)


def _measure(messages: Sequence[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)
