"""Complaints E55 to E57 about reasoning items that clients send back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.backends.scripted.backend import create as create_scripted
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.items import Reasoning
from antiphon.store.memory.store import MemoryStore
from support.live_server import LiveServer

SCRIPT: dict[str, Any] = {
    "rules": [
        {"user": "think", "answers": [[{"reasoning": "The word is plinth."}, {"text": "I have a word."}]]},
        {"user": "recall", "text": "plinth", "answers": ["The word is plinth."]},
        {"user": "recall", "answers": ["I do not know."]},
    ]
}
WANTED = {"store": False, "include": ["reasoning.encrypted_content"]}


def ask(server: LiveServer, *items: dict[str, Any]) -> Any:
    return server.ask("POST", "/v1/responses", {"model": "scripted", "input": list(items)} | WANTED)


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def get_reasoning(server: LiveServer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a reasoning item without its readable content, and the answer after it."""
    reasoning, answer = ask(server, say("think")).json["output"]
    return {name: value for name, value in reasoning.items() if name != "content"}, answer


def test_pain_e_57_encrypted_reasoning_reaches_the_model_again(serve: Callable[..., LiveServer]) -> None:
    server = serve(SCRIPT)
    reasoning, answer = get_reasoning(server)
    assert "plinth" not in reasoning["encrypted_content"]
    assert ask(server, say("think"), reasoning, answer, say("recall")).json["output"][0]["content"][0]["text"] == (
        "The word is plinth."
    )


def test_pain_e_56_undecryptable_reasoning_does_not_end_the_session(serve: Callable[..., LiveServer]) -> None:
    server = serve(SCRIPT)
    reasoning, answer = get_reasoning(server)
    stale = reasoning | {"encrypted_content": "gAAAAABsealed-by-somebody-else"}
    response = ask(server, say("think"), stale, answer, say("recall"))
    assert response.status == 200
    assert response.json["output"][0]["content"][0]["text"] == "I do not know."
    assert "cannot be opened here" in response.headers["x-antiphon-warnings"]


async def test_pain_e_55_reasoning_of_another_backend_is_accepted(tmp_path: Path) -> None:
    opaque = {"default": [{"reasoning": "The word is plinth."}, {"seal": "signed-by-one"}, {"text": "I have a word."}]}
    scripts = {"one": opaque, "two": SCRIPT}
    backends = {name: create_scripted(name, {"script": script}, tmp_path) for name, script in scripts.items()}
    names = {"first": ["one/scripted"], "second": ["two/scripted"]}
    engine = Engine(backends=backends, store=MemoryStore(), policy=Policy(models=names))
    await engine.start()

    async def answer(model: str, items: list[Any]) -> Any:
        body = codec.encode({"model": model, "input": items} | WANTED)
        run = await engine.create(codec.decode_request(body).body, project="p")
        return await run.drain()

    first = await answer("first", [say("think")])
    reasoning = first.output[0]
    assert isinstance(reasoning, Reasoning)
    assert "signed-by-one" not in (reasoning.encrypted_content or "")
    moved = await answer("second", [say("think"), *first.output, say("recall")])
    assert (moved.status, moved.output_text, moved.served_by) == ("completed", "The word is plinth.", "two/scripted")
    await engine.close()
