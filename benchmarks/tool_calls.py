"""Measure how often an embedded model decides rightly to call a tool, and how often the call is right.

    python -m benchmarks.tool_calls --model smollm2-135m
    python -m benchmarks.tool_calls --model qwen2.5-coder-1.5b --data-dir ~/.local/share/antiphon --threads 2

Starts a server with the model and sends it the requests of `benchmarks.tool_requests`, one at a time, half of them
streamed. The columns count requests. Each column includes the conditions of those before it:

    decision  a call if a tool is needed, else a text
    tool      the right tool is called
    valid     the arguments match the tool's schema
    right     there is one call with the right values, or the answer mentions the tool's result
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from openai import AsyncOpenAI
from openai.types.responses import Response

from benchmarks.servers import Server, make_antiphon_command, start_server
from benchmarks.tool_requests import CASES, Case, Exactly, OneOf

PARTS = ("all", "development", "held-out")
_COLUMNS = ("decision", "tool", "valid", "right")
# A text shows the decision with its first words. An answer from a tool's result has to mention it. A repeated call is
# dropped only if it is complete, so calls need room.
_MAX_OUTPUT_TOKENS = {"no tool": 12, "result": 40}
_DEFAULT_MAX_OUTPUT_TOKENS = 120


class Score(NamedTuple):
    """The columns of one request. `tool` and `valid` are None if no tool is needed."""

    decision: bool
    tool: bool | None
    valid: bool | None
    right: bool


class Result(NamedTuple):
    """A request with its score, the output as one line, and its cost."""

    case: Case
    score: Score
    output: str
    seconds: float
    tokens: int


def is_equal(expected: Any, value: Any) -> bool:
    """Return True if an argument has the expected value."""
    match expected:
        case OneOf():
            return any(is_equal(each, value) for each in expected.values)
        case Exactly():
            return bool(value == expected.value)
        case str():
            return isinstance(value, str) and _normalize(value) == _normalize(expected)
        case dict():
            return isinstance(value, dict) and all(is_equal(each, value.get(key)) for key, each in expected.items())
        case list():
            return (
                isinstance(value, list)
                and len(value) == len(expected)
                and all(is_equal(each, found) for each, found in zip(expected, value, strict=True))
            )
        case _:
            return type(value) in (int, float, bool) and bool(value == expected)


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!")


def score_answer(case: Case, calls: Sequence[tuple[str, str]], text: str) -> Score:
    """Score the calls (name and arguments) and the text of an answer."""
    if not case.tool:
        decision = not calls and bool(text.strip())
        return Score(decision, None, None, decision and case.mentions.casefold() in text.casefold())
    if not calls:
        return Score(decision=False, tool=False, valid=False, right=False)
    tool = calls[0][0] == case.tool
    valid = tool and all(_is_valid(case, name, arguments) for name, arguments in calls)
    right = valid and len(calls) == 1 and is_equal(dict(case.values), json.loads(calls[0][1]))
    return Score(True, tool, valid, right)


def _is_valid(case: Case, name: str, arguments: str) -> bool:
    schema = next((tool["parameters"] for tool in case.tools if tool["name"] == name), None)
    try:
        jsonschema.validate(json.loads(arguments), schema if schema is not None else False)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def run_case(client: AsyncOpenAI, case: Case, parameters: Mapping[str, Any]) -> Result:
    limit = _MAX_OUTPUT_TOKENS.get(case.kind, _DEFAULT_MAX_OUTPUT_TOKENS)
    body: dict[str, Any] = {"input": case.input, "tools": case.tools, "tool_choice": "auto", "store": False}
    body["max_output_tokens"] = limit
    began = time.perf_counter()
    response = await _request(client, body | dict(parameters), streamed=case.is_streamed)
    seconds = time.perf_counter() - began
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    output = " ".join(f"{name}({arguments})" for name, arguments in calls) or json.dumps(
        response.output_text, ensure_ascii=False
    )
    tokens = response.usage.output_tokens if response.usage is not None else 0
    return Result(case, score_answer(case, calls, response.output_text), output, seconds, tokens)


async def _request(client: AsyncOpenAI, body: dict[str, Any], *, streamed: bool) -> Response:
    if not streamed:
        response: Response = await client.responses.create(**body)
        return response
    final: Response | None = None
    async for event in await client.responses.create(**body, stream=True):
        if event.type in {"response.completed", "response.incomplete"}:
            final = event.response
        elif event.type in {"response.failed", "error"}:
            raise RuntimeError(f"The response failed: {event}")
    if final is None:
        raise RuntimeError("The stream ended without a response.")
    return final


def format_table(results: Sequence[Result]) -> str:
    """Return a table in Markdown, with a row for each class and one for all."""
    kinds = dict.fromkeys(each.case.kind for each in results)
    lines = [f"| class | requests | {' | '.join(_COLUMNS)} |", "|---|---|---|---|---|---|"]
    lines += [_format_row(kind, [each for each in results if each.case.kind == kind]) for kind in kinds]
    lines.append(_format_row("tool needed", [each for each in results if each.case.tool]))
    lines.append(_format_row("no tool needed", [each for each in results if not each.case.tool]))
    lines.append(_format_row("**all**", results))
    return "\n".join(lines)


def _format_row(name: str, results: Sequence[Result]) -> str:
    cells = [name, str(len(results))]
    for column in _COLUMNS:
        values = [value for each in results if (value := getattr(each.score, column)) is not None]
        cells.append(f"{sum(values)} of {len(values)}" if values else "–")
    return f"| {' | '.join(cells)} |"


def _select_cases(part: str, kinds: Iterable[str]) -> list[Case]:
    chosen = set(kinds)
    return [
        case
        for case in CASES
        if (part == "all" or case.is_held_out == (part == "held-out")) and (not chosen or case.kind in chosen)
    ]


def _make_server(arguments: argparse.Namespace) -> Server:
    def prepare(folder: Path, port: int) -> list[str]:
        data_dir = Path(arguments.data_dir).expanduser().resolve() if arguments.data_dir else folder
        weights = data_dir / "models" / f"{arguments.model}.gguf"
        chosen = f'weights = "{weights}"\n' if weights.exists() else ""
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\n[backends.embedded]\nkind = "embedded"\nmodel = "{arguments.model}"\n{chosen}'
            f"slots = 1\nbatch = 128\nthreads = {arguments.threads}\n"
        )
        return make_antiphon_command(folder, port)

    return Server("antiphon", "/readyz", prepare, start_timeout=300)


async def measure(arguments: argparse.Namespace) -> list[Result]:
    parameters: dict[str, Any] = {"model": arguments.model}
    if arguments.sampling == "greedy":
        parameters["temperature"] = 0
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        async with start_server(_make_server(arguments), Path(folder) / "server") as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
                for case in _select_cases(arguments.part, arguments.kind):
                    result = await run_case(client, case, parameters)
                    results.append(result)
                    if arguments.details:
                        mark = "ok  " if result.score.right else "MISS"
                        print(f"{mark} {case.name:12} {result.seconds:6.1f} s  {result.output}", flush=True)
            cpu = server.cpu
    print(format_table(results))
    tokens = sum(each.tokens for each in results)
    print(f"\n{arguments.model}, {arguments.part}, {arguments.sampling}: {tokens} output tokens, {cpu:.0f} s of CPU")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tool_calls", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", help="the folder that `antiphon pull` wrote into")
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--kind", action="append", default=[], help="only this class of requests; may be repeated")
    parser.add_argument("--sampling", choices=("greedy", "default"), default="greedy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--details", action="store_true", help="print every output")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
