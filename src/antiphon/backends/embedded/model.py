"""llama.cpp in this process, through xllamacpp: loading, reading prompts, and generating off the event loop."""

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


class Candidate(Struct):
    """A token the model weighed."""

    token: str
    logprob: float
    bytes: list[int] = []


class Token(Candidate):
    top_logprobs: list[Candidate] = []


class TokenList(Struct):
    content: list[Token] = []


class Choice(Struct):
    text: str = ""
    finish_reason: str | None = None
    logprobs: TokenList | None = None


class Timings(Struct):
    """Tokens so far: read from the cache, read anew, and written."""

    cache_n: int
    prompt_n: int
    predicted_n: int


class Fault(Struct):
    message: str


class Chunk(Struct):
    """What llama.cpp tells after a step: more text, progress in reading the prompt, or what went wrong."""

    choices: list[Choice] = []
    timings: Timings | None = None
    error: Fault | None = None


_chunks = msgspec.json.Decoder(Chunk)

# Whether a grammar was taken shows only in what it does: one that begins with these letters makes the model say them.
_SIGN = "%%%%"


class Job:
    """A generation under way: llama.cpp's thread hands over, the event loop takes."""

    def __init__(self) -> None:
        self.done = False
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes] = deque()
        self._called = False
        self._bell = asyncio.Event()

    def receive(self, data: bytes) -> bool:
        """llama.cpp calls this after each step; True makes it stop."""
        if not self._cancelled:
            self._waiting.append(data)
            self._call()
        return self._cancelled

    def finish(self, _: "Future[None]") -> None:
        self.done = True
        # A loop that is closed by now has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._call()

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    async def take(self) -> list[bytes]:
        """All that has come since the last time. Empty only at the end."""
        while not self._waiting and not self.done:
            await self._bell.wait()
            self._bell.clear()
        # Only what is counted now: the other thread may be adding to it.
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _call(self) -> None:
        # One wake-up of the loop carries everything that has come by the time it runs.
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._called = False
        self._bell.set()


class Llama:
    """One model, loaded once, that reads and writes for `slots` turns at a time; the others wait in line."""

    def __init__(self, path: Path, *, window: int, slots: int, threads: int, batch: int) -> None:
        self._path = path
        self._window = window
        self._slots = slots
        self._threads = threads
        self._batch = batch
        self._key = secrets.token_hex(32)
        self._server: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: set[Job] = set()
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
            server = xllamacpp.Server(self._parameters(xllamacpp.CommonParams()))
            # One that is dropped before its port has answered can hang in its destructor.
            with urlopen(f"{server.listening_address}/health", timeout=30):
                return server
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"The weights at {self._path} cannot be loaded: {error}") from error

    def _parameters(self, params: Any) -> Any:
        params.model.path = str(self._path)
        # llama.cpp divides the context among the slots.
        params.n_ctx = self._window * self._slots
        params.n_parallel = self._slots
        # It looks up from its work, to see that a turn was cancelled, once a batch.
        params.n_batch = params.n_ubatch = self._batch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        # It always listens on a loopback port; nobody but us has the key.
        params.api_keys = [self._key]
        params.port = 0
        params.ui = False
        params.endpoint_slots = False
        # A last message by the assistant is a finished turn, not a beginning to go on from.
        params.prefill_assistant = False
        # Keeping evicted prompts would take gigabytes; each slot still remembers its last one.
        params.cache_ram_mib = 0
        params.verbosity = -1
        return params

    async def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = self._server = None

    async def read(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, laid out by the model's own template and ready for the answer."""
        if self._server is None:
            raise Unavailable("The embedded model is not loaded.")
        return await asyncio.to_thread(self._read, self._server.listening_address, messages)

    def _read(self, address: str, messages: Sequence[dict[str, str]]) -> list[int]:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            prompt = self._post(connection, "/apply-template", {"messages": messages})["prompt"]
            asked = {"content": prompt, "add_special": True, "parse_special": True}
            tokens: list[int] = self._post(connection, "/tokenize", asked)["tokens"]
        return tokens

    def _post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection.request("POST", path, msgspec.json.encode(body), headers)
        reply = msgspec.json.decode(connection.getresponse().read())
        if "error" in reply:
            raise ModelError(f"The model's chat template failed: {reply['error']['message']}")
        return reply

    async def accepts(self, grammar: str) -> bool:
        """Whether the grammar really constrains the model: one that cannot be compiled is ignored without a word."""
        if grammar in self._accepted:
            return True
        signed = grammar.replace("start: ", f'start: "{_SIGN}" ', 1)
        said = ""
        async for chunks in self.generate({"prompt": "Hello", "max_tokens": 1, "temperature": 0, "grammar": signed}):
            said += "".join(choice.text for chunk in chunks for choice in chunk.choices)
        if not said or not _SIGN.startswith(said):
            return False
        if len(self._accepted) >= 1000:
            self._accepted.clear()
        self._accepted.add(grammar)
        return True

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[list[Chunk], None]:
        """Batches of what the model says. Closing the generator stops the model, or leaves the line."""
        if self._pool is None:
            raise Unavailable("The embedded model is not loaded.")
        # Progress is told so that there is a moment to stop while a long prompt is read.
        told = {"stream": True, "return_progress": True, "timings_per_token": True}
        job = Job()
        self._jobs.add(job)
        work = self._pool.submit(self._work, msgspec.json.encode(body | told), job)
        work.add_done_callback(job.finish)
        try:
            while chunks := [_chunks.decode(data) for data in await job.take()]:
                yield chunks
            if work.cancelled() or job.cancelled:
                raise Unavailable("The embedded model is shutting down.")
            work.result()
        finally:
            job.cancel()
            work.cancel()
            self._jobs.discard(job)

    def _work(self, body: bytes, job: Job) -> None:
        if not job.cancelled:
            self._server.handle_completions(body, job.receive)
