"""llama.cpp in this process, through xllamacpp: loading, tokenizing, and generating outside the event loop."""

import asyncio
import contextlib
import http.client
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from antiphon.errors import ConfigError, ModelError, Unavailable


class TokenCandidate(Struct):
    """A token that the model considered."""

    token: str
    logprob: float
    bytes: list[int] = []


class GeneratedToken(TokenCandidate):
    top_logprobs: list[TokenCandidate] = []


class TokenLogprobs(Struct):
    content: list[GeneratedToken] = []


class CompletionChoice(Struct):
    text: str = ""
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class Timings(Struct):
    """The number of tokens so far: prompt tokens from the cache, other prompt tokens, and generated tokens."""

    cache_n: int
    prompt_n: int
    predicted_n: int


class CompletionError(Struct):
    message: str


class CompletionChunk(Struct):
    """A report of llama.cpp after a step: more text, progress in the prompt, or an error."""

    choices: list[CompletionChoice] = []
    timings: Timings | None = None
    error: CompletionError | None = None


_chunk_decoder = msgspec.json.Decoder(CompletionChunk)

# A grammar that does not compile is ignored silently. One that starts with this text makes the model write it, which
# shows that it compiled.
_PROBE = "%%%%"
_MAX_ACCEPTED = 1000


class Generation:
    """A generation in progress. llama.cpp's thread adds chunks, and the event loop takes `batch` or more at a time."""

    def __init__(self, *, batch: int = 1) -> None:
        self.is_done = False
        self._batch = batch
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._pending: deque[bytes] = deque()
        self._is_waking = False
        self._arrived = asyncio.Event()

    def receive(self, data: bytes) -> bool:
        """Add a chunk. llama.cpp calls this after each step and stops if it returns True."""
        if not self._is_cancelled:
            self._pending.append(data)
            if len(self._pending) >= self._batch:
                self._wake()
        return self._is_cancelled

    def finish(self, _: "Future[None]") -> None:
        self.is_done = True
        # The event loop may be closed already.
        with contextlib.suppress(RuntimeError):
            self._wake()

    def cancel(self) -> None:
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    async def take(self) -> list[bytes]:
        """Wait for chunks and return all that have arrived; none only at the end."""
        while len(self._pending) < self._batch and not self.is_done:
            await self._arrived.wait()
            self._arrived.clear()
        # Take only the chunks counted now: the other thread may add more.
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def _wake(self) -> None:
        # One wake-up is enough for all chunks that arrive before it runs.
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._set_arrived)

    def _set_arrived(self) -> None:
        self._is_waking = False
        self._arrived.set()


class Llama:
    """One loaded model, which runs `slots` turns at a time. Other turns wait in a queue."""

    def __init__(self, path: Path, *, window: int, slots: int, threads: int, batch: int) -> None:
        self._path = path
        self._window = window
        self._slots = slots
        self._threads = threads
        self._batch = batch
        self._key = secrets.token_hex(32)
        self._server: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._generations: set[Generation] = set()
        self._accepted: set[str] = set()

    async def load(self) -> None:
        self._server = await asyncio.to_thread(self._open)
        self._pool = ThreadPoolExecutor(self._slots, thread_name_prefix="llama")

    def _open(self) -> Any:
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(
                f"The embedded model needs xllamacpp ({error}). Install it with: pip install 'antiphon[embedded]'"
            ) from error
        if not xllamacpp.json_schema_to_grammar({}).startswith("%llguidance"):
            raise ConfigError("This build of xllamacpp lacks llguidance, which the embedded model's JSON output needs.")
        try:
            server = xllamacpp.Server(self._set_parameters(xllamacpp.CommonParams()))
            # A server that is dropped before its port has answered can hang in its destructor.
            with urlopen(f"{server.listening_address}/health", timeout=30):
                return server
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"The weights at {self._path} cannot be loaded: {error}") from error

    def _set_parameters(self, params: Any) -> Any:
        params.model.path = str(self._path)
        # llama.cpp divides the context among the slots.
        params.n_ctx = self._window * self._slots
        params.n_parallel = self._slots
        # llama.cpp checks for a cancelled turn once per batch.
        params.n_batch = params.n_ubatch = self._batch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        # It always listens on a loopback port, so a random key protects it.
        params.api_keys = [self._key]
        params.port = 0
        params.ui = False
        params.endpoint_slots = False
        # A last message by the assistant is a finished turn, not the beginning of the answer.
        params.prefill_assistant = False
        # A cache of evicted prompts would take gigabytes. Each slot still caches its last prompt.
        params.cache_ram_mib = 0
        params.verbosity = -1
        return params

    async def close(self) -> None:
        for generation in self._generations:
            generation.cancel()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = self._server = None

    async def tokenize(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of the messages in the model's chat template, up to the start of the answer."""
        if self._server is None:
            raise Unavailable("The embedded model is not loaded.")
        return await asyncio.to_thread(self._tokenize, self._server.listening_address, messages)

    def _tokenize(self, address: str, messages: Sequence[dict[str, str]]) -> list[int]:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            prompt = self._post(connection, "/apply-template", {"messages": messages})["prompt"]
            body = {"content": prompt, "add_special": True, "parse_special": True}
            tokens: list[int] = self._post(connection, "/tokenize", body)["tokens"]
        return tokens

    def _post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection.request("POST", path, msgspec.json.encode(body), headers)
        reply = msgspec.json.decode(connection.getresponse().read())
        if "error" in reply:
            raise ModelError(f"The model's chat template failed: {reply['error']['message']}")
        return reply

    async def accepts_grammar(self, grammar: str) -> bool:
        """Return True if the grammar compiles, found out by generating with it."""
        if grammar in self._accepted:
            return True
        probe = grammar.replace("start: ", f'start: "{_PROBE}" ', 1)
        text = ""
        async for chunks in self.generate({"prompt": "Hello", "max_tokens": 1, "temperature": 0, "grammar": probe}):
            text += "".join(choice.text for chunk in chunks for choice in chunk.choices)
        if not text or not _PROBE.startswith(text):
            return False
        if len(self._accepted) >= _MAX_ACCEPTED:
            self._accepted.clear()
        self._accepted.add(grammar)
        return True

    async def generate(self, body: dict[str, Any], *, batch: int = 1) -> AsyncGenerator[list[CompletionChunk], None]:
        """Yield `batch` or more chunks of output at a time, and the rest at the end.

        Closing the generator stops the model, or removes the turn from the queue.
        """
        if self._pool is None:
            raise Unavailable("The embedded model is not loaded.")
        # Progress reports allow the turn to be cancelled while a long prompt is read.
        streaming = {"stream": True, "return_progress": True, "timings_per_token": True}
        generation = Generation(batch=batch)
        self._generations.add(generation)
        future = self._pool.submit(self._run, msgspec.json.encode(body | streaming), generation)
        future.add_done_callback(generation.finish)
        try:
            while chunks := [_chunk_decoder.decode(data) for data in await generation.take()]:
                yield chunks
            if future.cancelled() or generation.is_cancelled:
                raise Unavailable("The embedded model is shutting down.")
            future.result()
        finally:
            generation.cancel()
            future.cancel()
            self._generations.discard(generation)

    def _run(self, body: bytes, generation: Generation) -> None:
        if not generation.is_cancelled:
            self._server.handle_completions(body, generation.receive)
