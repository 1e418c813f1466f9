"""Complaints I76, I77 and B28: WebSockets that are rejected or lose their context."""

from typing import Any

from behaviour.samples import FUNCTION
from support.websocket_client import WebSocketClient, get_text

# As Codex opens its connection.
CODEX = {"OpenAI-Beta": "responses_websockets=2026-02-06", "session-id": "s1", "x-codex-beta-features": "x"}


def test_pain_i_76_upgrade_is_accepted_with_any_headers(guarded: Any) -> None:
    """icebear0828/codex-proxy#681, headroomlabs-ai/headroom#79, BerriAI/litellm#22051"""
    for _ in range(3):
        with WebSocketClient(guarded, key="sk-ada", headers=CODEX) as client:
            assert client.socket.response is not None
            assert (client.socket.response.status_code, client.ask("hi")["status"]) == (101, "completed")


def test_pain_i_77_message_names_the_model_and_warm_up_makes_no_call(server: Any) -> None:
    """BerriAI/litellm#24959"""
    with WebSocketClient(server, headers=CODEX) as client:
        warm = client.ask("my name is ada", generate=False, store=False, tools=[FUNCTION])
        assert (warm["model"], warm["status"], warm["output"]) == ("scripted", "completed", [])
        again = client.ask("recall", model="another", store=False, previous_response_id=warm["id"])
        assert (again["model"], get_text(again)) == ("another", "Your name is ada.")


def test_pain_b_28_unstored_websocket_message_is_continued(server: Any) -> None:
    """maximhq/bifrost#2441"""
    with WebSocketClient(server) as client:
        first = client.ask("my name is ada", store=False)
        second = client.ask("recall", store=False, previous_response_id=first["id"])
        assert get_text(second) == "Your name is ada."
        assert get_text(client.ask("recall", store=False, previous_response_id=second["id"])) == "Your name is ada."
