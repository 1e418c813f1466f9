import json

import pytest

from antiphon.cli.main import main

TEMPLATE = {"model": "scripted", "instructions": "Sei {{wie}}, bitte schön."}


@pytest.fixture
def template(home):
    path = home / "template.json"
    path.write_text(json.dumps(TEMPLATE))
    return str(path)


def test_prompt_is_added_listed_and_shown(serve, template, capsys):
    with serve("--store", "memory:") as server:
        for version in ("1", "2"):
            assert main(["prompts", "add", template, "--id", "polite", "--url", server.url]) == 0
            assert capsys.readouterr() == (f"polite  version {version}\n", "")
        assert main(["prompts", "list", "--url", server.url]) == 0
        assert capsys.readouterr() == ("polite  version 1\npolite  version 2\n", "")
        assert main(["prompts", "show", "polite", "--url", server.url, "--version", "1"]) == 0
        shown = capsys.readouterr().out
    assert "bitte schön" in shown
    prompt = json.loads(shown)
    assert prompt == {
        "id": "polite",
        "version": "1",
        "created_at": prompt["created_at"],
        "template": TEMPLATE,
        "object": "prompt",
    }


def test_prompt_without_id_gets_one(server, template, capsys):
    assert main(["prompts", "add", template, "--url", server.url]) == 0
    assert capsys.readouterr().out.startswith("pmpt_")


def test_rejected_prompt_is_one_line_and_exit_1(server, home, capsys):
    (home / "wrong.json").write_text('{"top_p": 7}')
    assert main(["prompts", "add", "wrong.json", "--url", server.url]) == 1
    assert capsys.readouterr() == ("", "antiphon: Invalid value for 'top_p': Expected `float` <= 1.0.\n")
    assert main(["prompts", "show", "no-such?thing", "--url", server.url]) == 1
    assert "not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "antiphon: Cannot read template.json: No such file or directory.\n"),
        (b"[]", "antiphon: template.json is not a valid JSON object: Expected `object`, got `array`.\n"),
        (b"{", "antiphon: template.json is not a valid JSON object: Input data was truncated.\n"),
        (
            b'{"model": "\xff"}',
            "antiphon: template.json is not a valid JSON object: JSON is malformed: invalid start byte.\n",
        ),
    ],
)
def test_invalid_template_file_is_one_line_and_exit_1(content, message, home, capsys):
    if content is not None:
        (home / "template.json").write_bytes(content)
    assert main(["prompts", "add", "template.json", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr() == ("", message)


def test_configured_server_is_the_default(home, capsys):
    (home / "antiphon.toml").write_text("port = 1\n")
    assert main(["prompts", "list"]) == 1
    assert capsys.readouterr() == ("", "antiphon: Cannot connect to http://127.0.0.1:1: Connection refused.\n")


def test_unknown_action_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["prompts", "sing"])
    assert exited.value.code == 2
    assert "usage: antiphon prompts" in capsys.readouterr().err
