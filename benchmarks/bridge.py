"""Servers that ask a Chat Completions server, and tell its answers in the Responses API.

The skeleton has its answers itself: what stands beside it is what a bridge costs more than any server.
"""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks import rounds
from benchmarks.client import HOST, Answer, BadAnswer, Client, post
from benchmarks.rounds import Rounds
from benchmarks.servers import SERVERS, UPSTREAM, Running, Server, run, serve_antiphon
from benchmarks.workloads import ANSWERS, BRIEF, BRIEF_BATCHED, LONG, LONG_BATCHED, STORED, Workload

WHOLE = STORED._replace(name="not streamed", store=False, concurrency=8, requests=64)
FEW = BRIEF._replace(name="streamed, 2 deltas", store=False, concurrency=8, requests=32)
# One at once: the slowest of the servers has to be done with a delta before the next one comes.
ALONE = FEW._replace(name="streamed, 2 deltas, 1 at once", concurrency=1, requests=16)
MANY = LONG._replace(name="streamed, 200 deltas", store=False, concurrency=1, requests=4)
FEW_BATCHED = BRIEF_BATCHED._replace(store=False, concurrency=1, requests=16)
MANY_BATCHED = LONG_BATCHED._replace(store=False, concurrency=1, requests=8)
WORKLOADS = (WHOLE, FEW, ALONE, MANY, FEW_BATCHED, MANY_BATCHED)

SKELETON = SERVERS[0]
_LITELLM_SECONDS = 90.0
_COMPLETED = re.compile(rb'"status": ?"completed"')


def make_antiphon(upstream: Running) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\n[backends.chat]\nkind = "chat_completions"\n'
            f'base_url = "http://{HOST}:{upstream.port}/v1"\nmodels = {json.dumps(list(ANSWERS))}\n'
        )
        return serve_antiphon(folder, port)

    return Server("antiphon", "/readyz", prepare)


def make_litellm(python: Path, upstream: Running) -> Server:
    """Its bridge is what it takes for servers that are not known to speak the Responses API."""

    def prepare(folder: Path, port: int) -> list[str]:
        models = [
            {
                "model_name": model,
                "litellm_params": {
                    "model": f"custom_openai/{model}",
                    "api_base": f"http://{HOST}:{upstream.port}/v1",
                    "api_key": "none",
                },
            }
            for model in ANSWERS
        ]
        # What is JSON is YAML too.
        (folder / "config.yaml").write_text(json.dumps({"model_list": models}))
        start = "import sys; from litellm import run_server; sys.exit(run_server())"
        options = ["--config", str(folder / "config.yaml"), "--host", HOST, "--port", str(port), "--telemetry", "False"]
        return ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", str(python), "-c", start, *options]

    return Server("litellm", "/health/liveliness", prepare, patience=_LITELLM_SECONDS)
