"""Export of traces over OTLP/HTTP, decoded by a receiver on the loopback interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from support.otlp_receiver import OtlpReceiver

TOOLS = '''
from antiphon import tool


@tool
def count(number: int) -> int:
    """Count one on."""
    return number + 1
'''
CALL = {"tool_call": {"name": "count", "call_id": "call_1", "arguments": {"number": 1}}}


def test_command_exports_a_run_to_the_endpoint_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "script.json").write_text(json.dumps({"rules": [{"answers": [[CALL], "It is two."]}]}))
    (tmp_path / "antiphon.toml").write_text('[backends.scripted]\nkind = "scripted"\nscript = "script.json"\n')
    with OtlpReceiver() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "HOME": str(tmp_path), "OTEL_SERVICE_NAME": "mine"}
        done = subprocess.run(
            [sys.executable, "-m", "antiphon", "run", "count", "--tools", "tools.py", "--local"],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "It is two.\n", "")
    agent = receiver.find("invoke_agent agent")
    parents = sorted((span.name, span.parent_id) for span in receiver.spans)
    assert parents == [
        ("chat scripted", agent.span_id),
        ("chat scripted", agent.span_id),
        ("execute_tool count", agent.span_id),
        ("invoke_agent agent", ""),
    ]
    assert {span.trace_id for span in receiver.spans} == {agent.trace_id}
    assert agent.resource["service.name"] == "mine"
    assert agent.attributes["antiphon.outcome"] == "final"
