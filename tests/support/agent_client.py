"""A server with an agent, and the requests and answers of its clients."""

import json
from pathlib import Path
from typing import Any

from antiphon.config.settings import ApiKey
from antiphon.stream.sse import SseDecoder
from support.live_server import HttpResponse, LiveServer, make_settings

PATH = "/v1/agent/execute"
TOOLS = str(Path(__file__).with_name("agent_tools.py"))
CLIENT_TOOL = {"type": "function", "name": "open_file", "parameters": {"type": "object", "properties": {}}}


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_call": {"name": name, "call_id": call_id, "arguments": arguments}}


SCRIPT: dict[str, Any] = {
    "models": ["scripted", "other"],
    "rules": [
        {"text": '"paper"', "answers": ["The file says paper."]},
        {"text": "FINALIZE NOW", "answers": ["This is all I have."]},
        {"user": "client tool", "answers": [[call("open_file", "call_1", path="a"), call("open_file", "call_2")]]},
        {
            "user": "both",
            "answers": [[{"text": "Both."}, call("look_up", "call_s", word="x"), call("open_file", "call_c")]],
        },
        {"user": "one id", "last_item": "function_call_output", "answers": [[call("open_file", "call_1")]]},
        {"user": "one id", "answers": [[call("look_up", "call_1", word="x")]]},
        {"user": "define", "last_item": "function_call_output", "answers": ["It is a call and its answer."]},
        {"user": "define", "answers": [[{"text": "Let me see."}, call("look_up", "call_1", word="antiphon")]]},
        {"user": "circles", "answers": [[call("look_up", f"call_{n}", word="same")] for n in range(9)]},
        {"user": "explode", "last_item": "function_call_output", "answers": ["It went off."]},
        {"user": "explode", "answers": [[call("explode", "call_1"), call("nobody", "call_2")]]},
        {
            "user": "custom",
            "answers": [[{"custom_tool_call": {"name": "patch", "call_id": "call_p", "input": "diff"}}]],
        },
        {"user": "cut off", "answers": [[{"text": "So "}, {"finish": "length"}]]},
        {"user": "fail later", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]]},
        {
            "user": "then fail",
            "last_item": "function_call_output",
            "answers": [[{"raise": {"message": "Hot.", "status": 503}}]],
        },
        {"user": "then fail", "answers": [[call("read_mood", "call_1")]]},
        {"user": "too much", "answers": [[{"raise": {"message": "Slow.", "status": 429, "type": "rate_limit_error"}}]]},
        {"user": "think", "answers": [[{"reasoning": "Hm."}, {"text": ["One", " two"]}]]},
        {"user": "silent", "answers": [[{"text": ""}]]},
        {"user": "odd name", "answers": [[call("my.tool/1", "call_1")]]},
        {"user": "refuse", "answers": [[{"refusal": "Not that."}]]},
    ],
    "default": "You said: {input} ({history})",
}


class AgentServer:
    """A server with agent tools, and requests to its execute endpoint."""

    def __init__(self) -> None:
        keys = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
        settings = make_settings(api_keys=keys, agent_tools=(TOOLS,), agent_system="Be kind.")
        self.running = LiveServer(SCRIPT, settings)

    def execute(self, key: str = "sk-ada", *, accept: str = "application/json", **body: Any) -> HttpResponse:
        headers = {"Authorization": f"Bearer {key}", "Accept": accept}
        return self.running.ask("POST", PATH, body, headers=headers)


def texts(item: Any) -> list[str]:
    return [part.text for part in item.content]


def results(*pairs: tuple[str, Any]) -> str:
    return json.dumps([{"CallId": call_id, "ResultJson": result} for call_id, result in pairs])


def read_events(answer: HttpResponse) -> list[tuple[str | None, Any]]:
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    return [(message.event, json.loads(message.data)) for message in SseDecoder().feed(answer.body)]
