"""An agent that reviews a bounty submission and returns a decision.

    antiphon serve                          # or any other Responses API server
    python examples/bounty_review.py --url http://127.0.0.1:8484/v1 --model NAME

The model gets the bounty's terms and two tools to read the submission. Its call of `submit_decision` ends the review.

For real use it needs a model that calls tools reliably over several turns, such as gpt-5-mini, Claude Haiku 4.5 or
Qwen3-32B. The embedded model is too small for it.
"""

import argparse
import asyncio
import json
import os

from antiphon import HttpTransport
from antiphon.agent.orchestrator import OrchestratorTool, run_orchestrator
from antiphon.agent.provider import Provider

SUBMISSION = {
    "README.md": "A parser for dates. Run `pytest` to see that it works.",
    "dates.py": "def parse(text):\n    year, month, day = map(int, text.split('-'))\n    return year, month, day\n",
    "test_dates.py": "from dates import parse\n\ndef test_parse():\n    assert parse('2024-02-29') == (2024, 2, 29)\n",
}

PROMPT = """\
You review submissions for a bounty. The terms: "A function that parses dates like 2024-02-29, with a test."
Look at the files of the submission, then call submit_decision: approve it if it fulfils the terms, and say why.
"""


def list_files() -> dict[str, list[str]]:
    return {"files": sorted(SUBMISSION)}


def read_file(path: str) -> dict[str, str]:
    return {"path": path, "content": SUBMISSION[path]}  # the model gets a KeyError as the tool output


TOOLS = [
    OrchestratorTool(
        name="list_files",
        description="List the files of the submission.",
        parameters={"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        run=list_files,
    ),
    OrchestratorTool(
        name="read_file",
        description="Read one file of the submission.",
        parameters={
            "type": "object",
            "properties": {"path": {"type": "string", "description": "A path from list_files."}},
            "required": ["path"],
            "additionalProperties": False,
        },
        run=read_file,
    ),
]


async def review(url: str, model: str, key: str | None) -> dict[str, object]:
    provider = Provider(HttpTransport(url, api_key=key), model=model)
    try:
        return await run_orchestrator(provider, TOOLS, PROMPT, max_turns=20)
    finally:
        await provider.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8484/v1")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    decision = asyncio.run(review(arguments.url, arguments.model, os.environ.get("OPENAI_API_KEY")))
    print(json.dumps(decision, indent=2))
