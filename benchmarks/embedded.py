"""The embedded model against llama.cpp's own server: same weights, threads, context, batch and prompts, greedy.

Both run the same build of llama.cpp: the package of the embedded backend contains its server too. Both get the same
messages and have to give the same text.
"""

import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import Answer, Client, InvalidAnswer, post
from benchmarks.report import Row, make_count_row, make_row
from benchmarks.servers import RunningServer, Server, make_antiphon_command, start_server

SLOTS = 4
CONTEXT = 2048
THREADS = 1
BATCH = 16
TARGET = 1 / 0.95

LLAMA, OURS = "llama.cpp", "antiphon"
_MODEL = "smollm2-135m"
_SYSTEM = "You are a helpful assistant."
_GENERATE = "Write a long story about a railway station in the mountains, with many characters."
_SENTENCE = "Mountain railways are steep. "
_SECONDS = 120.0


class Job(NamedTuple):
    """A number of concurrent requests that generate `tokens` tokens each.

    A request with `sentences` has a new prompt of so many sentences, to measure how fast a prompt is read.
    """

    name: str
    concurrency: int
    streamed: bool
    tokens: int = 1
    sentences: int = 0

    def scale(self, factor: float) -> "Job":
        if self.sentences:
            return self._replace(sentences=max(1, round(self.sentences * factor)))
        return self._replace(tokens=max(1, round(self.tokens * factor)))


JOBS = (
    Job("generation, 1 request", 1, streamed=False, tokens=200),
    Job("generation, 1 request, streamed", 1, streamed=True, tokens=200),
    Job("generation, 4 requests", 4, streamed=False, tokens=200),
    Job("generation, 4 requests, streamed", 4, streamed=True, tokens=200),
    Job("reading a prompt", 1, streamed=False, sentences=100),
)


class Measured(NamedTuple):
    """Microseconds a token: wall-clock time, CPU time of the process, and CPU time of its main thread."""

    wall: float
    cpu: float
    main_thread: float


Measurements = dict[tuple[str, str], list[Measured]]
"""The figures of every round, by job and server."""


def find_missing() -> str:
    """Return the reason why this part cannot run, or an empty string."""
    if find_spec("xllamacpp") is None:
        return "xllamacpp is not installed"
    return "" if _find_weights() is not None else "there are no weights of the embedded model"


def _find_weights() -> Path | None:
    from antiphon.backends.embedded.weights import find_weights
    from antiphon.errors import ConfigError

    try:
        return find_weights(_MODEL)
    except ConfigError:
        return None


def _prepare_llama(folder: Path, port: int) -> list[str]:
    figures = map(str, (CONTEXT, SLOTS, THREADS, BATCH))
    return [sys.executable, "-m", "benchmarks.llama_server", str(port), str(_find_weights()), *figures]


def _prepare_antiphon(folder: Path, port: int) -> list[str]:
    (folder / "antiphon.toml").write_text(
        f'data_dir = "{folder}"\n[backends.embedded]\nkind = "embedded"\nweights = "{_find_weights()}"\n'
        f"context = {CONTEXT}\nslots = {SLOTS}\nthreads = {THREADS}\nbatch = {BATCH}\n"
    )
    return make_antiphon_command(folder, port)


SERVERS = (Server(LLAMA, "/health", _prepare_llama), Server(OURS, "/readyz", _prepare_antiphon))


async def measure(folder: Path, *, rounds: int, scale: float) -> Measurements:
    """Return the figures of every round, by job and server. The servers take turns."""
    found: Measurements = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        running: list[tuple[RunningServer, Client]] = []
        for server in SERVERS:
            started = await stack.enter_async_context(start_server(server, folder / f"embedded-{server.name}"))
            running.append((started, stack.enter_context(contextlib.closing(Client(started.port)))))
        for number in range(rounds + 1):  # the first round is a short warm-up
            for job in [each.scale(scale if number else scale / 10) for each in JOBS]:
                texts = set()
                for server, client in running if number % 2 else reversed(running):
                    measured, text = await _run(server, client, job, number)
                    texts.add(text)
                    if number:
                        found[job.name, server.name].append(measured)
                if len(texts) > 1:
                    raise InvalidAnswer(f"{job.name}: the texts differ: {texts}")
    return dict(found)


async def _run(server: RunningServer, client: Client, job: Job, number: int) -> tuple[Measured, str]:
    # Every prompt that is read is new: the servers keep the last one of each slot.
    prompt = f"{number}. " + _SENTENCE * job.sentences if job.sentences else _GENERATE
    request = _make_request(server.name, job, prompt)
    cpu, main_thread, began = server.cpu, _read_main_thread(server.pid), time.perf_counter()
    answers = await client.load(request, count=job.concurrency, concurrency=job.concurrency, seconds=_SECONDS)
    wall = time.perf_counter() - began
    cpu, main_thread = server.cpu - cpu, _read_main_thread(server.pid) - main_thread
    results = {_read_answer(answer, server.name, streamed=job.streamed) for answer in answers}
    if len(results) > 1:
        raise InvalidAnswer(f"{server.name}, {job.name}: the texts differ")
    text, read, written = results.pop()
    if written != job.tokens:
        raise InvalidAnswer(f"{server.name}, {job.name}: {written} tokens, not {job.tokens}")
    tokens = job.concurrency * (read if job.sentences else written)
    return Measured(*(1e6 * each / tokens for each in (wall, cpu, main_thread))), text


def _read_main_thread(pid: int) -> float:
    """Return the CPU time of the main thread in seconds. In our server it runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _make_request(server: str, job: Job, prompt: str) -> bytes:
    greedy = {"model": _MODEL, "temperature": 0, "stream": job.streamed}
    if server == OURS:
        body = greedy | {"input": prompt, "instructions": _SYSTEM, "max_output_tokens": job.tokens, "store": False}
        return post(json.dumps(body).encode())
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": prompt}]
    body = greedy | {"messages": messages, "max_tokens": job.tokens, "top_k": 0, "top_p": 1.0, "min_p": 0.05}
    body |= {"stream_options": {"include_usage": True}} if job.streamed else {}
    return post(json.dumps(body).encode(), path="/v1/chat/completions")


def _read_answer(answer: Answer, server: str, *, streamed: bool) -> tuple[str, int, int]:
    """Return the text of an answer, and the numbers of tokens read and generated."""
    if answer.status != 200:
        raise InvalidAnswer(f"{server}: {answer.head!r} {answer.body!r}")
    lines = answer.content.splitlines() if streamed else []
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    if server == OURS:
        response = events[-1]["response"] if streamed else json.loads(answer.content)
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        return text, response["usage"]["input_tokens"], response["usage"]["output_tokens"]
    if not streamed:
        events = [json.loads(answer.content)]
    parts = [choice.get("delta" if streamed else "message", {}) for event in events for choice in event["choices"]]
    usage: dict[str, Any] = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return "".join(part.get("content") or "" for part in parts), usage["prompt_tokens"], usage["completion_tokens"]


def make_tables(found: Measurements) -> list[list[Row]]:
    def collect(job: Job, field: str) -> dict[str, list[float]]:
        return {name: [getattr(each, field) for each in found[job.name, name]] for name in (LLAMA, OURS)}

    rows = [
        make_row(f"embedded model, {title} µs a token", job.name, collect(job, field), target=target)
        for title, field, target in (("wall-clock", "wall", TARGET), ("CPU", "cpu", None))
        for job in JOBS
    ]
    main_thread = []
    for job in JOBS:
        medians = {name: statistics.median(each) for name, each in collect(job, "main_thread").items()}
        main_thread.append(make_count_row("embedded model, CPU µs a token, main thread", job.name, medians))
    return [rows, main_thread]
