"""llama.cpp in this process, through xllamacpp: loading, tokenizing, and generating outside the event loop."""

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from antiphon.backends.embedded.library import import_library
from antiphon.backends.embedded.tokenizer import Tokenizer
from antiphon.errors import ConfigError, Unavailable
from antiphon.turn_queue import TurnQueue


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
# Batches of a long prompt that are read before other prompts get their turn.
_SLICE_BATCHES = 4
# In reports about the prompt. The first report without it has the first token.
_PROGRESS = b'"prompt_progress"'


class Generation:
    """A generation in progress. llama.cpp's thread adds chunks, and the event loop takes `batch` or more at a time.

    `on_end` is called on the event loop when the model has stopped. `sliced_tokens` is the number of prompt tokens that
    were read in slices before the last part of the prompt.
    """

    def __init__(self, *, batch: int = 1, on_end: Callable[[], object] | None = None) -> None:
        self.is_done = False
        self.sliced_tokens = 0
        self._batch = batch
        self._on_end = on_end
        self._is_cancelled = False
        self._future: Future[None] | None = None
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

    def watch(self, future: "Future[None]") -> None:
        """Follow the call of the model. Must be called before `read`."""
        self._future = future
        future.add_done_callback(self.finish)

    def finish(self, _: "Future[None]") -> None:
        self.is_done = True
        # The event loop may be closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._future is not None:
            self._future.cancel()  # if it has not begun

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    async def read(self) -> list[CompletionChunk]:
        """Wait for chunks and return all that have arrived; none only at the end. Raises the error of the model."""
        if chunks := [_chunk_decoder.decode(data) for data in await self.take()]:
            return chunks
        if self._is_cancelled:
            raise Unavailable("The embedded model is shutting down.")
        if self._future is not None:
            self._future.result()
        return []

    async def take(self) -> list[bytes]:
        """Wait for chunks and return all that have arrived, not decoded."""
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

    def _end(self) -> None:
        self._arrived.set()
        if self._on_end is not None:
            self._on_end()


class LlamaSlot:
    """A slot of llama.cpp, and the prompt that it read last. llama.cpp keeps its state and reads only what differs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt: Sequence[int] = ()

    def count_known(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens at the start of the prompt that the slot has read before."""
        known, end = 0, min(len(prompt), len(self.prompt))
        while known < end:
            middle = (known + end + 1) // 2
            if prompt[known:middle] == self.prompt[known:middle]:
                known = middle
            else:
                end = middle - 1
        return known


class _FairLock:
    """A lock that threads get in the order in which they ask for it. Any thread may release it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Event] = deque()

    def acquire(self) -> None:
        with self._mutex:
            if not self._is_held:
                self._is_held = True
                return
            granted = threading.Event()
            self._waiting.append(granted)
        granted.wait()

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_held = False


class Llama:
    """One loaded model, which runs `slots` turns at a time. A caller needs a slot of `queue` to begin one."""

    def __init__(self, path: Path, *, window: int, slots: int, threads: int, batch: int) -> None:
        self.queue = TurnQueue(slots)
        self._path = path
        self._window = window
        self._slots = slots
        self._threads = threads
        self._batch = batch
        self._key = secrets.token_hex(32)
        self._server: Any = None
        self._tokenizer: Tokenizer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._generations: set[Generation] = set()
        self._accepted: set[str] = set()
        # Without a free slot the pool has no free thread either. The slot that was used longest ago is the first.
        self._free_slots = [LlamaSlot(number) for number in range(slots)]
        self._free_slots_lock = threading.Lock()
        self._reading = _FairLock()

    async def load(self) -> None:
        self._server = await asyncio.to_thread(self._open)
        self._tokenizer = Tokenizer(self._server.listening_address, self._key, queue=self.queue)
        self._pool = ThreadPoolExecutor(self._slots, thread_name_prefix="llama")

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unavailable("The embedded model is not loaded.")
        return self._tokenizer

    def _open(self) -> Any:
        xllamacpp = import_library()
        if not xllamacpp.json_schema_to_grammar({}).startswith("%llguidance"):
            raise ConfigError("This build of xllamacpp lacks llguidance, which the embedded model's JSON output needs.")
        try:
            params = self._set_parameters(xllamacpp.CommonParams())
            # With a GPU, this finds the number of layers that fit its memory. Without one it would only block all
            # threads for a while: the size of the context is a setting.
            params.fit_params = any(each["type"].name.endswith("GPU") for each in xllamacpp.get_device_info())
            server = xllamacpp.Server(params)
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
        self.queue.close("The embedded model is shutting down.")
        for generation in tuple(self._generations):
            generation.cancel()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._tokenizer = self._pool = self._server = None

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
        """Yield `batch` or more chunks of output at a time, and the rest at the end. Closing stops the model."""
        generation = self.begin(body, batch=batch)
        try:
            while chunks := await generation.read():
                yield chunks
        finally:
            generation.cancel()

    def begin(self, body: dict[str, Any], *, batch: int = 1, on_end: Callable[[], object] | None = None) -> Generation:
        """Start the model. The caller cancels the generation if it does not read it to the end."""
        if self._pool is None:
            raise Unavailable("The embedded model is not loaded.")
        generation = Generation(batch=batch, on_end=on_end)
        self._generations.add(generation)
        future = self._pool.submit(self._run, body, generation)
        future.add_done_callback(lambda _: self._generations.discard(generation))
        generation.watch(future)
        return generation

    def _run(self, body: dict[str, Any], generation: Generation) -> None:
        if generation.is_cancelled:
            return
        prompt = body["prompt"] if isinstance(body["prompt"], list) else []
        slot = self._take_slot(prompt)
        try:
            if self._slots > 1:
                self._read_slices(slot, prompt, generation)
            self._generate(body | {"id_slot": slot.number}, generation)
        finally:
            slot.prompt = prompt
            with self._free_slots_lock:
                self._free_slots.append(slot)

    def _take_slot(self, prompt: Sequence[int]) -> LlamaSlot:
        """Return the free slot that knows most of the prompt."""
        with self._free_slots_lock:
            slot = max(self._free_slots, key=lambda each: each.count_known(prompt))
            self._free_slots.remove(slot)
        return slot

    def _read_slices(self, slot: LlamaSlot, prompt: list[int], generation: Generation) -> None:
        """Read a long prompt up to its last slice.

        llama.cpp fills its batches with the prompt of one slot before it begins the next. So that each prompt gets its
        turn, long ones are read in slices, and only one is read at a time.
        """
        known = slot.count_known(prompt)
        chunks: list[bytes] = []

        def receive(data: bytes) -> bool:
            chunks.append(data)
            return generation.is_cancelled

        size = _SLICE_BATCHES * self._batch
        for end in range(known + size, len(prompt), size):
            body = {"prompt": prompt[:end], "max_tokens": 0, "stream": True, "id_slot": slot.number}
            self._reading.acquire()
            try:
                if generation.is_cancelled:
                    return
                self._server.handle_completions(msgspec.json.encode(body), receive)
            finally:
                self._reading.release()
            if not generation.sliced_tokens:  # the first slice: llama.cpp may know more of the prompt than we do
                reports = (_chunk_decoder.decode(data).timings for data in chunks)
                known = next((report.cache_n for report in reports if report is not None), known)
            generation.sliced_tokens = end - known

    def _generate(self, body: dict[str, Any], generation: Generation) -> None:
        """Read the prompt, or its last slice, and generate."""
        # Progress reports allow the turn to be cancelled while a prompt is read.
        streaming = {"stream": True, "return_progress": True, "timings_per_token": True}
        is_reading = True

        def receive(data: bytes) -> bool:
            nonlocal is_reading
            if is_reading and _PROGRESS not in data:
                is_reading = False
                self._reading.release()
            return generation.receive(data)

        self._reading.acquire()
        try:
            if not generation.is_cancelled:
                self._server.handle_completions(msgspec.json.encode(body | streaming), receive)
        finally:
            if is_reading:
                self._reading.release()
