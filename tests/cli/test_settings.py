import asyncio
import json
from argparse import Namespace
from urllib.request import Request, urlopen

import pytest

from antiphon.cli.arguments import build_parser
from antiphon.cli.main import main
from antiphon.cli.settings import UPSTREAM_KINDS, upstream_backend
from support.upstream_server import json_of, serve, stream_of

LISTED = json_of({"object": "list", "data": [{"id": "qwen3", "object": "model"}, {"id": "gemma4", "object": "model"}]})
HELLO = stream_of(
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hello."}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)


def parse(*options: str) -> Namespace:
    return build_parser().parse_args(["serve", *options])


def test_upstream_options_define_a_backend(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sk-theirs")
    url = "http://127.0.0.1:1/v1"
    defined = [
        upstream_backend(parse(*options))
        for options in (
            ["--upstream", url],
            *(
                ["--upstream", url, "--upstream-kind", kind, "--upstream-key-env", "THEIR_KEY"]
                for kind in UPSTREAM_KINDS
            ),
            [],
        )
    ]
    assert defined == [
        {"upstream": {"kind": "chat_completions", "base_url": url}},
        {"upstream": {"kind": "chat_completions", "base_url": url, "api_key": "sk-theirs"}},
        {"upstream": {"kind": "responses", "base_url": url, "api_key": "sk-theirs"}},
        {"upstream": {"kind": "anthropic_messages", "base_url": url, "api_key": "sk-theirs"}},
        None,
    ]


@pytest.mark.parametrize("options", [["--upstream-kind", "soap"], ["--upstream", "http://x/v1", "--model", "m"]])
def test_conflicting_upstream_options_are_rejected(options, capsys):
    with pytest.raises(SystemExit):
        main(["serve", *options])
    assert "serve: error: " in capsys.readouterr().err


async def test_all_models_of_an_upstream_are_served(start, monkeypatch):
    monkeypatch.setenv("ANTIPHON_UPSTREAM_KEY", "sk-theirs-0123456789")

    def request_both(address: str) -> list[str]:
        options = ("--upstream", address, "--upstream-kind", "chat", "--upstream-key-env", "ANTIPHON_UPSTREAM_KEY")
        with start(*options, "--store", "memory:") as server:
            assert server.banner[1] == "  models  qwen3, gemma4"
            assert "sk-theirs" not in "".join(server.banner)
            texts = []
            for model in ("gemma4", "unlisted"):
                body = json.dumps({"model": model, "input": "Hi."}).encode()
                request = Request(f"{server.url}/v1/responses", body, {"Content-Type": "application/json"})
                with urlopen(request, timeout=10) as reply:
                    texts.append(json.load(reply)["output"][0]["content"][0]["text"])
            return texts

    async with serve([HELLO, HELLO], fixed={"/v1/models": LISTED}) as upstream:
        assert await asyncio.to_thread(request_both, upstream.url) == ["Hello.", "Hello."]
        posted = [request for request in upstream.requests if request.method == "POST"]
    assert [(request.path, request.json["model"]) for request in posted] == [
        ("/v1/chat/completions", "gemma4"),
        ("/v1/chat/completions", "unlisted"),
    ]
    assert {request.headers["authorization"] for request in upstream.requests} == {"Bearer sk-theirs-0123456789"}


def test_server_starts_while_its_upstream_is_down(start):
    with start("--upstream", "http://127.0.0.1:1/v1", "--store", "memory:") as server:
        assert server.banner[1] == "  models  unknown: the upstream does not list any"
        assert server.banner[-1].endswith("""-d '{"model": "NAME", "input": "Say hello."}'""")


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_models_of_an_upstream_are_listed(server, kind, capsys):
    assert main(["models", "--upstream", f"{server.url}/v1", "--upstream-kind", kind]) == 0
    assert capsys.readouterr() == (f"scripted  upstream ({UPSTREAM_KINDS[kind]})\n", "")


def test_upstream_without_models_is_an_error(capsys):
    assert main(["models", "--upstream", "http://127.0.0.1:1/v1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "antiphon: backends.upstream: the upstream does not list any models.")


def test_server_can_be_the_upstream_of_another(start, server):
    with start("--upstream", f"{server.url}/v1", "--upstream-kind", "responses", "--store", "memory:") as front:
        assert front.banner[1] == "  models  scripted"
        body = json.dumps({"model": "scripted", "input": "Hi."}).encode()
        request = Request(f"{front.url}/v1/responses", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=10) as reply:
            assert json.load(reply)["output"][0]["content"][0]["text"] == "You said: Hi. (1)"
