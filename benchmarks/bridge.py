"""CPU time of bridges: servers that translate a Chat Completions upstream to the Responses API.

The two skeletons are bridges with the minimal work (`skeleton_bridge.py`). The difference to them is the cost of
everything else that a server does.
"""

import contextlib
import json
import re
import secrets
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rounds, skeleton_bridge
from benchmarks.client import HOST, Answer, Client, InvalidAnswer, post
from benchmarks.rounds import Round, Rounds
from benchmarks.servers import UPSTREAM, ProcessFailed, RunningServer, Server, make_antiphon_command, start_server
from benchmarks.workloads import (
    ANSWERS,
    BRIEF,
    BRIEF_BATCHED,
    LONG,
    LONG_BATCHED,
    TEN_ITEMS,
    Workload,
    make_items,
    make_tools,
)

# LiteLLM requires a key, so our server requires one too.
KEY = f"sk-{secrets.token_hex(32)}"

SHORT_ANSWER = Workload(
    "2 tokens", BRIEF.model, TEN_ITEMS, False, True, concurrency=8, requests=160, key=KEY, tools=make_tools(3)
)
LONG_ANSWER = SHORT_ANSWER._replace(name="200 tokens", model=LONG.model)
FEW = SHORT_ANSWER._replace(name="2 tokens, streamed", stream=True, requests=96)
ITEMS = {
    count: SHORT_ANSWER._replace(name=f"{count:,} items", input=make_items(count), tools=(), requests=6400 // count)
    for count in (10, 100, 1000)
}
TOOLS = {
    count: SHORT_ANSWER._replace(name=f"{count} tools", tools=make_tools(count), requests=1600 // count)
    for count in (20, 200)
}
# One request at a time: the slowest server must finish a delta before the next one arrives.
ALONE = FEW._replace(name="2 tokens, streamed, 1 at once", concurrency=1, requests=48)
MANY = ALONE._replace(name="200 tokens, streamed", model=LONG.model, requests=3)
FEW_BATCHED = ALONE._replace(name="10 tokens a read, 1 read", model=BRIEF_BATCHED.model)
MANY_BATCHED = ALONE._replace(name="10 tokens a read, 20 reads", model=LONG_BATCHED.model, requests=6)
WORKLOADS = (
    SHORT_ANSWER,
    LONG_ANSWER,
    FEW,
    *ITEMS.values(),
    *TOOLS.values(),
    ALONE,
    MANY,
    FEW_BATCHED,
    MANY_BATCHED,
)

LEAN, AIOHTTP, ANTIPHON, LITELLM, DIRECT = "lean", "aiohttp", "antiphon", "litellm", "direct"
# LiteLLM needs tens of times the time of the others.
_SCALES = {LITELLM: 0.25}
_LITELLM_SECONDS = 90.0
_COMPLETED = re.compile(rb'"status": ?"completed"')


def make_skeleton(kind: str, upstream: RunningServer) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        return [sys.executable, "-m", skeleton_bridge.__name__, kind, str(port), str(upstream.port)]

    return Server(kind, "/", prepare)


def make_antiphon(upstream: RunningServer) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\n[[api_keys]]\nkey = "{KEY}"\n[backends.chat]\nkind = "chat_completions"\n'
            f'base_url = "http://{HOST}:{upstream.port}/v1"\nmodels = {json.dumps(list(ANSWERS))}\n'
        )
        return make_antiphon_command(folder, port)

    return Server(ANTIPHON, "/readyz", prepare)


def make_litellm(python: Path, upstream: RunningServer) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        models = [
            {
                "model_name": model,
                "litellm_params": {
                    "model": f"openai/{model}",
                    "api_base": f"http://{HOST}:{upstream.port}/v1",
                    "api_key": "none",
                    # Otherwise it forwards requests to the upstream's Responses API.
                    "use_chat_completions_api": True,
                },
            }
            for model in ANSWERS
        ]
        # JSON is valid YAML.
        (folder / "config.yaml").write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
        start = "import sys; from litellm import run_server; sys.exit(run_server())"
        options = ["--config", str(folder / "config.yaml"), "--host", HOST, "--port", str(port), "--num_workers", "1"]
        # Otherwise it downloads its list of prices.
        return ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", str(python), "-c", start, *options, "--telemetry", "False"]

    return Server(LITELLM, "/health/liveliness", prepare, start_timeout=_LITELLM_SECONDS)


async def measure(litellm: Path | None, folder: Path, *, repeats: int, scale: float) -> tuple[Rounds, list[str]]:
    """Return the rounds, and notes. `litellm` is the interpreter that has LiteLLM, or None to skip it.

    If LiteLLM does not start, a note says so.
    """
    notes: list[str] = []
    async with start_server(UPSTREAM, folder / "bridge-upstream") as upstream, contextlib.AsyncExitStack() as stack:
        servers = [make_skeleton(LEAN, upstream), make_skeleton(AIOHTTP, upstream), make_antiphon(upstream)]
        running = [
            await stack.enter_async_context(start_server(server, folder / f"bridge-{server.name}"))
            for server in servers
        ]
        if litellm is not None:
            server = make_litellm(litellm, upstream)
            try:
                running.append(await stack.enter_async_context(start_server(server, folder / f"bridge-{server.name}")))
            except ProcessFailed as error:
                notes.append(f"bridge: without LiteLLM, which did not start: {str(error).strip().splitlines()[-1]}")
        clients = {each.name: stack.enter_context(contextlib.closing(Client(each.port))) for each in running}
        direct = stack.enter_context(contextlib.closing(Client(upstream.port)))
        for workload in WORKLOADS:
            for each in running:
                _check_whole(each.name, workload, await clients[each.name].send(post(workload.body, key=KEY)))
        found: Rounds = defaultdict(list)
        for number in range(repeats + 1):  # the first round is a warm-up
            one = await _measure_round(running, clients, direct, scale=scale)
            if number:
                for name, measured in one.items():
                    found[name] += measured
        return dict(found), notes


async def _measure_round(
    running: Sequence[RunningServer], clients: dict[str, Client], direct: Client, *, scale: float
) -> Rounds:
    found = await rounds.measure(running, clients, WORKLOADS, rounds=1, scale=scale, check=_check, scales=_SCALES)
    found[ALONE.name, DIRECT] = [await _measure_direct(direct, round(ALONE.requests * scale))]
    return found


async def _measure_direct(client: Client, count: int) -> Round:
    """Stream the answer of ALONE from the upstream without a bridge."""
    messages = [{"role": "user", "content": "When does the next train leave?"}]
    body = json.dumps({"model": ALONE.model, "messages": messages, "stream": True}).encode()
    answers = await client.load(post(body, path="/v1/chat/completions"), count=count, concurrency=1, seconds=30)
    return rounds.summarize(answers, 0, 1)


def _check(name: str, workload: Workload, answer: Answer) -> None:
    """Check status and completion only, because it is cheap. The number of events differs between servers."""
    if answer.status != 200 or not _COMPLETED.search(answer.body):
        raise InvalidAnswer(f"{name}, {workload.name}: {answer.head + answer.body[:2000]!r}")


def _check_whole(name: str, workload: Workload, answer: Answer) -> None:
    """Check the text and the number of its deltas."""
    _check(name, workload, answer)
    if workload.stream:
        lines = [line.removeprefix(b"data: ") for line in answer.content.splitlines() if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    else:
        pieces = [json.loads(answer.content)["output"][0]["content"][0]["text"]]
    expected = [piece for read in ANSWERS[workload.model] for piece in read]
    if not workload.stream:
        expected = ["".join(expected)]
    if pieces != expected:
        raise InvalidAnswer(f"{name}, {workload.name}: {pieces} is not {expected}")
