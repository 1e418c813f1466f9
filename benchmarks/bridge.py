"""CPU time of bridges: servers that translate a Chat Completions upstream to the Responses API.

The skeleton needs no upstream. The difference to it is the additional cost of a bridge.
"""

import contextlib
import functools
import json
import re
import secrets
from pathlib import Path

from benchmarks import rounds
from benchmarks.client import HOST, Answer, Client, InvalidAnswer, post
from benchmarks.rounds import Rounds
from benchmarks.servers import (
    SERVERS,
    UPSTREAM,
    ProcessFailed,
    RunningServer,
    Server,
    make_antiphon_command,
    start_server,
)
from benchmarks.workloads import ANSWERS, BRIEF, BRIEF_BATCHED, LONG, LONG_BATCHED, STORED, Workload

# LiteLLM requires a key, so our server requires one too.
KEY = f"sk-{secrets.token_hex(32)}"

WHOLE = STORED._replace(name="not streamed", store=False, key=KEY, concurrency=8, requests=48)
FEW = BRIEF._replace(name="streamed, 2 deltas", store=False, key=KEY, concurrency=8, requests=32)
# One request at a time: the slowest server must finish a delta before the next one arrives.
ALONE = FEW._replace(name="streamed, 2 deltas, 1 at once", concurrency=1, requests=16)
MANY = ALONE._replace(name="streamed, 200 deltas", model=LONG.model, requests=3)
FEW_BATCHED = ALONE._replace(name="streamed, 10 deltas a read, 1 read", model=BRIEF_BATCHED.model)
MANY_BATCHED = ALONE._replace(name="streamed, 10 deltas a read, 20 reads", model=LONG_BATCHED.model, requests=4)
WORKLOADS = (WHOLE, FEW, ALONE, MANY, FEW_BATCHED, MANY_BATCHED)

SKELETON = SERVERS[0]
_LITELLM_SECONDS = 90.0
_COMPLETED = re.compile(rb'"status": ?"completed"')


def make_antiphon(upstream: RunningServer) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\n[[api_keys]]\nkey = "{KEY}"\n[backends.chat]\nkind = "chat_completions"\n'
            f'base_url = "http://{HOST}:{upstream.port}/v1"\nmodels = {json.dumps(list(ANSWERS))}\n'
        )
        return make_antiphon_command(folder, port)

    return Server("antiphon", "/readyz", prepare)


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

    return Server("litellm", "/health/liveliness", prepare, start_timeout=_LITELLM_SECONDS)


async def measure(litellm: Path | None, folder: Path, *, repeats: int, scale: float) -> tuple[Rounds, list[str]]:
    """Return the rounds, and notes. `litellm` is the interpreter that has LiteLLM, or None to skip it.

    If LiteLLM does not start, a note says so.
    """
    notes: list[str] = []
    async with start_server(UPSTREAM, folder / "bridge-upstream") as upstream, contextlib.AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(start_server(server, folder / f"bridge-{server.name}"))
            for server in (SKELETON, make_antiphon(upstream))
        ]
        if litellm is not None:
            server = make_litellm(litellm, upstream)
            try:
                running.append(await stack.enter_async_context(start_server(server, folder / f"bridge-{server.name}")))
            except ProcessFailed as error:
                notes.append(f"bridge: without LiteLLM, because {error}")
        clients = {each.name: stack.enter_context(contextlib.closing(Client(each.port))) for each in running}
        for workload in WORKLOADS:
            for each in running:
                _check_whole(each.name, workload, await clients[each.name].send(post(workload.body, key=KEY)))
        measure_rounds = functools.partial(rounds.measure, running, clients, WORKLOADS, scale=scale, check=_check)
        await measure_rounds(rounds=1)  # a warm-up
        return await measure_rounds(rounds=repeats), notes


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
    if pieces != expected:
        raise InvalidAnswer(f"{name}, {workload.name}: {pieces} is not {expected}")
