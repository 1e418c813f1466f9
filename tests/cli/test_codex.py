import json
import tomllib

import pytest

from antiphon.cli.main import main


@pytest.fixture(autouse=True)
def _no_codex(monkeypatch):
    monkeypatch.delenv("CODEX_HOME", raising=False)


def block(url: str, *, model: str = "scripted", top: str = "", provider: str = "") -> str:
    return (
        f'model = "{model}"\n'
        'model_provider = "antiphon"\n'
        f"{top}"
        "\n"
        "[model_providers.antiphon]\n"
        'name = "Antiphon"\n'
        f'base_url = "{url}/v1"\n'
        'wire_api = "responses"\n'
        f"{provider}"
        "supports_websockets = true\n"
    )


def catalogue_line(folder, name="antiphon"):
    return f'model_catalog_json = "{folder}/{name}-models.json"\n'


def test_the_configuration_for_a_running_server_is_printed(server, home, capsys):
    assert main(["codex", "--url", f"{server.url}/v1"]) == 0
    said = capsys.readouterr()
    assert said.out == block(server.url)
    assert said.err == (
        f"antiphon: This belongs into {home}/.codex/config.toml: --write merges it in, with a model catalogue.\n"
    )
    assert not (home / ".codex").exists()


def test_a_server_that_does_not_run_is_described_by_its_settings(home, script, capsys):
    (home / "antiphon.toml").write_text(f'port = 1\n[backends.demo]\nkind = "scripted"\nscript = "{script}"\n')
    assert main(["codex"]) == 0
    said = capsys.readouterr()
    assert said.out == block("http://127.0.0.1:1")
    assert said.err.startswith("antiphon: Nothing answers at http://127.0.0.1:1: Connection refused.\n")


def test_the_context_window_is_told_where_it_is_known(home, capsys):
    models = home / ".local/share/antiphon/models"
    models.mkdir(parents=True)
    (models / "here.gguf").write_bytes(b"GGUF")
    (home / "antiphon.toml").write_text(
        'port = 1\n[backends.near]\nkind = "embedded"\nmodel = "here"\ncontext = 8192\n'
    )
    assert main(["codex"]) == 0
    assert capsys.readouterr().out == block("http://127.0.0.1:1", model="here", top="model_context_window = 8192\n")
    assert main(["codex", "--write"]) == 0
    described = json.loads((home / ".codex/antiphon-models.json").read_text())["models"]
    assert [(model["slug"], model["context_window"]) for model in described] == [("here", 8192)]


def test_without_a_server_and_its_settings_the_model_must_be_named(capsys):
    assert main(["codex", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr() == (
        "",
        (
            "antiphon: Nothing answers at http://127.0.0.1:1: Connection refused.\n"
            "antiphon: The models of http://127.0.0.1:1 are not known: name the one to use with --model.\n"
        ),
    )
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "mine"]) == 0
    assert capsys.readouterr().out == block("http://127.0.0.1:1", model="mine")


def test_a_model_that_is_not_listed_is_taken_with_a_word(server, capsys):
    assert main(["codex", "--url", server.url, "--model", "routed"]) == 0
    said = capsys.readouterr()
    assert said.out == block(server.url, model="routed")
    assert said.err.startswith(f"antiphon: {server.url} does not list the model 'routed'.\n")


def test_the_variable_with_the_key_is_named_and_its_value_is_not(serve, monkeypatch, capsys):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "sesame")
    with serve("--store", "memory:") as server:
        monkeypatch.delenv("ANTIPHON_API_KEYS")
        monkeypatch.setenv("MY_KEY", "sesame")
        assert main(["codex", "--url", server.url]) == 1
        assert "--key-env" in capsys.readouterr().err
        assert main(["codex", "--url", server.url, "--key-env", "MY_KEY"]) == 0
    said = capsys.readouterr()
    assert said.out == block(server.url, provider='env_key = "MY_KEY"\n')
    assert "sesame" not in said.err


def test_settings_with_keys_ask_for_the_name_of_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "sesame")
    assert main(["codex"]) == 1
    assert capsys.readouterr() == (
        "",
        "antiphon: The server wants a key: name the variable that will hold it for Codex with --key-env.\n",
    )


def test_server_compaction_is_a_matter_of_the_name(server, capsys):
    assert main(["codex", "--url", server.url, "--server-compaction"]) == 0
    assert capsys.readouterr().out == block(server.url).replace('"Antiphon"', '"OpenAI"')


def test_writing_makes_the_configuration_and_the_catalogue(server, home, capsys):
    assert main(["codex", "--url", server.url, "--write"]) == 0
    folder = home / ".codex"
    assert capsys.readouterr() == (
        f"{folder}/config.toml now points at {server.url}.\nRun it: codex\n",
        "",
    )
    assert (folder / "config.toml").read_text() == block(server.url, top=catalogue_line(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["antiphon-models.json", "config.toml"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    (model,) = json.loads((folder / "antiphon-models.json").read_text())["models"]
    assert "apply_patch" in model.pop("base_instructions")
    assert model == {
        "slug": "scripted",
        "display_name": "scripted",
        "description": "Served by Antiphon",
        "priority": 0,
        "visibility": "list",
        "supported_in_api": True,
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "experimental_supported_tools": [],
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [
            {"effort": "low", "description": "Quick"},
            {"effort": "medium", "description": "Balanced"},
            {"effort": "high", "description": "Thorough"},
        ],
        "support_verbosity": True,
        "input_modalities": ["text", "image"],
        "truncation_policy": {"mode": "tokens", "limit": 10000},
    }


SOMEBODYS = """\
# mine
model = "gpt-5"  # for work
model_context_window = 99

[mcp_servers.docs]
command = "docs"
"""


def test_writing_keeps_all_the_rest_and_a_copy_of_the_old(server, home, monkeypatch, capsys):
    folder = home / "elsewhere"
    folder.mkdir()
    monkeypatch.setenv("CODEX_HOME", str(folder))
    config = folder / "config.toml"
    config.write_text(SOMEBODYS)
    config.chmod(0o640)
    assert main(["codex", "--url", server.url, "--write"]) == 0
    assert capsys.readouterr().out == (
        f"{config} now points at {server.url}. The file as it was: {config}.bak1.\nRun it: codex\n"
    )
    assert config.read_text() == (
        "# mine\n"
        'model = "scripted"  # for work\n'
        'model_provider = "antiphon"\n'
        f"{catalogue_line(folder)}"
        "\n"
        "[mcp_servers.docs]\n"
        'command = "docs"\n'
        "\n"
        "[model_providers.antiphon]\n"
        'name = "Antiphon"\n'
        f'base_url = "{server.url}/v1"\n'
        'wire_api = "responses"\n'
        "supports_websockets = true\n"
    )
    assert (folder / "config.toml.bak1").read_text() == SOMEBODYS
    assert {(folder / name).stat().st_mode & 0o777 for name in ("config.toml", "config.toml.bak1")} == {0o640}


def test_writing_twice_changes_nothing_and_a_changed_address_is_changed_in_its_place(server, home, capsys):
    config = home / ".codex/config.toml"
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "old", "--write"]) == 0
    first = config.read_text()
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "old", "--write"]) == 0
    assert config.read_text() == first
    assert f"{config} says all that already.\n" in capsys.readouterr().out
    assert main(["codex", "--url", server.url, "--write"]) == 0
    assert config.read_text() == first.replace("http://127.0.0.1:1", server.url).replace('"old"', '"scripted"')
    assert (config.parent / "config.toml.bak1").read_text() == first


def test_a_profile_has_a_file_of_its_own(server, home, capsys):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(SOMEBODYS)
    assert main(["codex", "--url", server.url, "--profile", "own", "--write"]) == 0
    assert capsys.readouterr().out == (
        f"{folder}/own.config.toml now points at {server.url}.\nRun it: codex --profile own\n"
    )
    assert (folder / "config.toml").read_text() == SOMEBODYS
    assert (folder / "own.config.toml").read_text() == block(server.url, top=catalogue_line(folder, "own"))


def test_a_link_stays_a_link(server, home):
    (home / ".codex").mkdir()
    (home / "dotfiles.toml").write_text(SOMEBODYS)
    (home / ".codex/config.toml").symlink_to(home / "dotfiles.toml")
    assert main(["codex", "--url", server.url, "--write"]) == 0
    assert (home / ".codex/config.toml").is_symlink()
    assert tomllib.loads((home / "dotfiles.toml").read_text())["model_provider"] == "antiphon"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"model = ", "it is not valid TOML: Invalid value (at end of document)"),
        (
            b"model_providers = {antiphon = {name = 'x'}}\n",
            (
                "name, base_url, wire_api, env_key, supports_websockets cannot be set safely in "
                "[model_providers.antiphon]: it is written in a way not understood"
            ),
        ),
    ],
)
def test_what_cannot_be_merged_is_left_as_it_is(content, reason, server, home, capsys):
    config = home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_bytes(content)
    assert main(["codex", "--url", server.url, "--write"]) == 1
    assert capsys.readouterr() == (
        "",
        f"antiphon: {config} is left as it is: {reason}. Without --write you see what to put there.\n",
    )
    assert [path.name for path in config.parent.iterdir()] == ["config.toml"]
    assert config.read_bytes() == content


def test_a_file_that_is_no_text_is_left_as_it_is(server, home, capsys):
    config = home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_bytes(b"\xff")
    assert main(["codex", "--url", server.url, "--write"]) == 1
    assert capsys.readouterr().err == f"antiphon: {config} is left as it is: it is not UTF-8.\n"
