"""Tests of the tool in docs/guides/hosted-tools.md, extracted from the page."""

import json
import re
from pathlib import Path
from typing import Any

from antiphon.protocol import codec
from antiphon.store.memory.store import MemoryStore
from antiphon.tools.hosted.registry import HostedTools
from support.engine_harness import EngineHarness

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "hosted-tools.md").read_text("utf-8")
(CODE,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "class DiceTool" in block)


async def test_call_with_wrong_arguments_fails_and_the_response_completes() -> None:
    page: dict[str, Any] = {}
    exec(CODE, page)
    rolls = [{"tool_call": {"name": "roll_dice", "arguments": {"size": 6}}}]
    script = {"native_tools": ["function"], "rules": [{"answers": [rolls, "No dice."]}]}
    harness = EngineHarness(script, MemoryStore(), hosted_tools=HostedTools([page["create"](None)]))
    await harness.engine.start()
    response = await (await harness.ask("Roll.", tools=[{"type": "dice"}])).drain()
    await harness.engine.close()
    call, answer = response.output
    assert (json.loads(codec.encode(call))["status"], answer.type) == ("failed", "message")
    assert (response.status, response.output_text) == ("completed", "No dice.")
