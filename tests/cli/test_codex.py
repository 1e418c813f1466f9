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


def test_configuration_for_a_running_server_is_printed(server, home, capsys):
    assert main(["codex", "--url", f"{server.url}/v1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == block(server.url)
    assert printed.err == (
        f"antiphon: --write merges this into {home}/.codex/config.toml and adds a model catalogue.\n"
    )
    assert not (home / ".codex").exists()


def test_stopped_server_is_described_by_its_settings(home, script, capsys):
    (home / "antiphon.toml").write_text(f'port = 1\n[backends.demo]\nkind = "scripted"\nscript = "{script}"\n')
    assert main(["codex"]) == 0
    printed = capsys.readouterr()
    assert printed.out == block("http://127.0.0.1:1")
    assert printed.err.startswith("antiphon: Cannot connect to http://127.0.0.1:1: Connection refused.\n")


def test_known_context_window_is_written(home, capsys):
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


def test_model_of_an_unknown_server_must_be_named(capsys):
    assert main(["codex", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr() == (
        "",
        (
            "antiphon: Cannot connect to http://127.0.0.1:1: Connection refused.\n"
            "antiphon: The models of http://127.0.0.1:1 are unknown: name one with --model.\n"
        ),
    )
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "mine"]) == 0
    assert capsys.readouterr().out == block("http://127.0.0.1:1", model="mine")


def test_unlisted_model_is_used_with_a_warning(server, capsys):
    assert main(["codex", "--url", server.url, "--model", "routed"]) == 0
    printed = capsys.readouterr()
    assert printed.out == block(server.url, model="routed")
    assert printed.err.startswith(f"antiphon: {server.url} does not list the model 'routed'.\n")


def test_key_variable_is_written_without_its_value(serve, monkeypatch, capsys):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret")
    with serve("--store", "memory:") as server:
        monkeypatch.delenv("ANTIPHON_API_KEYS")
        monkeypatch.setenv("MY_KEY", "secret")
        assert main(["codex", "--url", server.url]) == 1
        assert "--key-env" in capsys.readouterr().err
        assert main(["codex", "--url", server.url, "--key-env", "MY_KEY"]) == 0
    printed = capsys.readouterr()
    assert printed.out == block(server.url, provider='env_key = "MY_KEY"\n')
    assert "secret" not in printed.err


def test_configured_keys_require_the_key_env_option(monkeypatch, capsys):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret")
    assert main(["codex"]) == 1
    assert capsys.readouterr() == (
        "",
        "antiphon: The server requires an API key: use --key-env to name the variable with it.\n",
    )


def test_server_compaction_changes_the_provider_name(server, capsys):
    assert main(["codex", "--url", server.url, "--server-compaction"]) == 0
    assert capsys.readouterr().out == block(server.url).replace('"Antiphon"', '"OpenAI"')


def test_write_creates_configuration_and_catalogue(server, home, capsys):
    assert main(["codex", "--url", server.url, "--write"]) == 0
    folder = home / ".codex"
    assert capsys.readouterr() == (
        f"{folder}/config.toml now uses {server.url}.\nStart Codex: codex\n",
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


EXISTING = """\
# mine
model = "gpt-5"  # for work
model_context_window = 99

[mcp_servers.docs]
command = "docs"
"""


def test_write_preserves_other_values_and_makes_a_backup(server, home, monkeypatch, capsys):
    folder = home / "elsewhere"
    folder.mkdir()
    monkeypatch.setenv("CODEX_HOME", str(folder))
    config = folder / "config.toml"
    config.write_text(EXISTING)
    config.chmod(0o640)
    assert main(["codex", "--url", server.url, "--write"]) == 0
    assert capsys.readouterr().out == (f"{config} now uses {server.url}. Backup: {config}.bak1.\nStart Codex: codex\n")
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
    assert (folder / "config.toml.bak1").read_text() == EXISTING
    assert {(folder / name).stat().st_mode & 0o777 for name in ("config.toml", "config.toml.bak1")} == {0o640}


def test_second_write_changes_only_what_differs(server, home, capsys):
    config = home / ".codex/config.toml"
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "old", "--write"]) == 0
    first = config.read_text()
    assert main(["codex", "--url", "http://127.0.0.1:1", "--model", "old", "--write"]) == 0
    assert config.read_text() == first
    assert f"{config} is up to date.\n" in capsys.readouterr().out
    assert main(["codex", "--url", server.url, "--write"]) == 0
    assert config.read_text() == first.replace("http://127.0.0.1:1", server.url).replace('"old"', '"scripted"')
    assert (config.parent / "config.toml.bak1").read_text() == first


def test_profile_is_written_to_its_own_file(server, home, capsys):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(EXISTING)
    assert main(["codex", "--url", server.url, "--profile", "own", "--write"]) == 0
    assert capsys.readouterr().out == (
        f"{folder}/own.config.toml now uses {server.url}.\nStart Codex: codex --profile own\n"
    )
    assert (folder / "config.toml").read_text() == EXISTING
    assert (folder / "own.config.toml").read_text() == block(server.url, top=catalogue_line(folder, "own"))


def test_symbolic_link_is_followed(server, home):
    (home / ".codex").mkdir()
    (home / "dotfiles.toml").write_text(EXISTING)
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
                "[model_providers.antiphon]: its syntax is not supported"
            ),
        ),
    ],
)
def test_file_that_cannot_be_merged_is_unchanged(content, reason, server, home, capsys):
    config = home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_bytes(content)
    assert main(["codex", "--url", server.url, "--write"]) == 1
    assert capsys.readouterr() == (
        "",
        f"antiphon: {config} is unchanged: {reason}. Run the command without --write and add the values yourself.\n",
    )
    assert [path.name for path in config.parent.iterdir()] == ["config.toml"]
    assert config.read_bytes() == content


def test_file_that_is_not_utf8_is_unchanged(server, home, capsys):
    config = home / ".codex/config.toml"
    config.parent.mkdir()
    config.write_bytes(b"\xff")
    assert main(["codex", "--url", server.url, "--write"]) == 1
    assert capsys.readouterr().err == f"antiphon: {config} is unchanged: it is not UTF-8.\n"
