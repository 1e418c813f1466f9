"""Settings from files, environment variables and the command line."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.config.loading import load
from antiphon.config.readers import hide_password
from antiphon.config.settings import ApiKey, BackendSettings, GrammarLimits, Settings
from antiphon.config.tools import ImageGenerationSettings, McpServerSettings, WebSearchSettings
from antiphon.errors import ConfigError

HOME = {"HOME": "/home/ada"}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    path = Path("settings.toml")
    path.write_text(text)
    return path


def load_error(
    path: Path | None = None, env: dict[str, str] | None = None, overrides: dict[str, Any] | None = None
) -> str:
    with pytest.raises(ConfigError) as raised:
        load(path, HOME | (env or {}), overrides or {})
    return raised.value.message


def test_defaults_apply_without_configuration() -> None:
    assert load(None, HOME, {}) == Settings(
        host="127.0.0.1",
        port=8484,
        data_dir=Path("/home/ada/.local/share/antiphon"),
        store="sqlite:////home/ada/.local/share/antiphon/antiphon.db",
        api_keys=(),
        max_body_bytes=64 * 1024 * 1024,
        shutdown_grace_seconds=10,
        log_level="info",
        log_format="text",
        backends={"embedded": BackendSettings(kind="embedded")},
    )


def test_file_sets_all_settings() -> None:
    path = write(
        """
        host = "::1"
        port = 9000
        data_dir = "~/antiphon"
        store = "memory:"
        max_body_bytes = 1024
        shutdown_grace_seconds = 0.5
        log_level = "debug"
        log_format = "json"
        background_concurrency = 20
        background_concurrency_per_project = 5
        background_starts_per_minute = 600

        [[api_keys]]
        key = "sk-one"

        [[api_keys]]
        key_env = "SECOND_KEY"
        project = "b"

        [backends.small]
        kind = "embedded"
        threads = 1
        token_env = "TOKEN"
        """
    )
    assert load(path, HOME | {"SECOND_KEY": "sk-two", "TOKEN": "t"}, {}) == Settings(
        host="::1",
        port=9000,
        data_dir=Path("/home/ada/antiphon"),
        store="memory:",
        api_keys=(ApiKey("sk-one", "default"), ApiKey("sk-two", "b")),
        max_body_bytes=1024,
        shutdown_grace_seconds=0.5,
        background_concurrency=20,
        background_concurrency_per_project=5,
        background_starts_per_minute=600,
        log_level="debug",
        log_format="json",
        backends={"small": BackendSettings(kind="embedded", options={"threads": 1, "token": "t"})},
    )


def test_command_line_overrides_environment_and_file() -> None:
    path = write('host = "file"\nport = 1\nstore = "memory:"\nlog_level = "debug"')
    settings = load(
        path,
        {**HOME, "ANTIPHON_HOST": "variable", "ANTIPHON_PORT": "2"},
        {"host": "flag", "log_level": None},
    )
    assert (settings.host, settings.port, settings.store, settings.log_level) == ("flag", 2, "memory:", "debug")


def test_file_in_the_working_directory_is_the_default() -> None:
    Path("antiphon.toml").write_text("port = 7")
    assert load(None, HOME, {}).port == 7


def test_given_file_replaces_the_default_file() -> None:
    Path("antiphon.toml").write_text("port = 7")
    assert load(write("host = 'other'"), HOME, {}).port == 8484


def test_data_dir_follows_xdg_and_store_follows_data_dir() -> None:
    settings = load(None, HOME | {"XDG_DATA_HOME": "/data"}, {})
    assert (settings.data_dir, settings.store) == (Path("/data/antiphon"), "sqlite:////data/antiphon/antiphon.db")


def test_relative_xdg_directory_is_ignored() -> None:
    assert load(None, HOME | {"XDG_DATA_HOME": "data"}, {}).data_dir == Path("/home/ada/.local/share/antiphon")


@pytest.mark.parametrize("given", ["here", Path("here")])
def test_relative_data_dir_becomes_absolute(given: str | Path) -> None:
    settings = load(None, HOME, {"data_dir": given})
    assert (settings.data_dir, settings.store) == (Path.cwd() / "here", f"sqlite:///{Path.cwd()}/here/antiphon.db")


def test_variables_are_converted_to_the_types_of_settings() -> None:
    env = {
        "ANTIPHON_DATA_DIR": "~/d",
        "ANTIPHON_MAX_BODY_BYTES": "100",
        "ANTIPHON_SHUTDOWN_GRACE_SECONDS": "1.5",
        "ANTIPHON_LOG_FORMAT": "json",
        "ANTIPHON_STATELESS": "true",
        "ANTIPHON_API_KEYS": "sk-one, sk:two:b",
    }
    settings = load(None, HOME | env, {})
    assert (settings.data_dir, settings.max_body_bytes, settings.shutdown_grace_seconds, settings.log_format) == (
        Path("/home/ada/d"),
        100,
        1.5,
        "json",
    )
    assert settings.stateless is True
    assert settings.api_keys == (ApiKey("sk-one", "default"), ApiKey("sk:two", "b"))


def test_empty_variable_is_ignored() -> None:
    assert load(None, HOME | {"ANTIPHON_PORT": ""}, {}).port == 8484


def test_variable_named_in_the_file_may_start_with_the_prefix() -> None:
    path = write('[[api_keys]]\nkey_env = "ANTIPHON_CLIENT_KEY"')
    assert load(path, HOME | {"ANTIPHON_CLIENT_KEY": "k"}, {}).api_keys == (ApiKey("k"),)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('port = "8484"', "settings.toml: port: Expected `int`, got `str`."),
        ("port = 65536", "settings.toml: port: Expected `int` <= 65535."),
        ("keepalive_seconds = -1", "settings.toml: keepalive_seconds: Expected `float` >= 0.0."),
        ("inherit_tools = 1", "settings.toml: inherit_tools: Expected `bool`, got `int`."),
        ("retention_days = 36501", "settings.toml: retention_days: Expected `float` <= 36500.0."),
        ("background_slots = 0", "settings.toml: background_slots: Expected `int` >= 1."),
        ("background_lease_seconds = 0", "settings.toml: background_lease_seconds: Expected `float` >= 0.1."),
        ("background_concurrency = 0", "settings.toml: background_concurrency: Expected `int` >= 1."),
        (
            "background_concurrency = 1\nbackground_concurrency_per_project = 2",
            "background_concurrency_per_project must not exceed background_concurrency.",
        ),
        (
            "background_concurrency = 1\n[dbos]\nconcurrency_per_project = 2",
            "background_concurrency_per_project must not exceed background_concurrency.",
        ),
        ("dbos = true", "settings.toml: dbos: Expected `object`, got `bool`."),
        ("dbos = 1", "settings.toml: dbos: Expected `object`, got `int`."),
        ("[dbos]\nconcurency = 1", "settings.toml: dbos: unknown setting 'concurency'. Did you mean concurrency?"),
        ("[dbos]\nconcurrency = 0", "settings.toml: dbos.concurrency: Expected `int` >= 1."),
        (
            "[dbos]\nconcurrency = 1\nconcurrency_per_project = 2",
            "settings.toml: dbos: concurrency_per_project must not exceed concurrency.",
        ),
        (
            "stateless_id_prefix = 'a b'",
            "settings.toml: stateless_id_prefix: Expected `str` matching regex '^[A-Za-z0-9-]{0,32}$'.",
        ),
        (
            "max_body_bytes = 10\nbody_budget_bytes = 9",
            "body_budget_bytes must not be less than max_body_bytes.",
        ),
        (
            'allowed_hosts = ["a.example", "http://b.example"]',
            "allowed_hosts: 'http://b.example' is not a host name. Omit the scheme, the port and the path.",
        ),
        (
            'allowed_hosts = ["b.example:8484"]',
            "allowed_hosts: 'b.example:8484' is not a host name. Omit the scheme, the port and the path.",
        ),
        ("max_body_bytes = 0", "settings.toml: max_body_bytes: Expected `int` >= 1."),
        ('log_level = "loud"', "settings.toml: log_level: 'loud' is not one of debug, info, warning, error."),
        ("data_dir = 3", "settings.toml: data_dir: Expected `str`, got `int`."),
        ("prot = 1", "settings.toml: unknown setting 'prot'. Did you mean port?"),
        ("[models]\nm = 1", "settings.toml: models.m: Expected `str | array`, got `int`."),
        ("[backends]\nb = 1", "settings.toml: backends.b: Expected `object`, got `int`."),
        (
            '[mcp_servers.m]\nurl = "http://m"\nheaders = { x = 1 }',
            "settings.toml: mcp_servers.m.headers.x: Expected `str`, got `int`.",
        ),
        ("api_keys = 1", "settings.toml: api_keys: Expected `array`, got `int`."),
        ("[[api_keys]]\nkye = 'x'", "settings.toml: api_keys[0]: unknown setting 'kye'. Did you mean key?"),
        ("[[api_keys]]\nproject = 'x'", "settings.toml: api_keys[0]: set either key or key_env."),
        ("[[api_keys]]\nkey = 'x'\nkey_env = 'X'", "settings.toml: api_keys[0]: set either key or key_env."),
        (
            "[[api_keys]]\nkey_env = 'NOWHERE'",
            "settings.toml: api_keys[0].key_env: the environment variable NOWHERE is not set.",
        ),
        (
            "[[api_keys]]\nkey = ''",
            "settings.toml: api_keys[0]: a key must be a non-empty line of text without spaces around it.",
        ),
        (
            "[[api_keys]]\nkey = 'a'\n[[api_keys]]\nkey = 'a'\nproject = 'b'",
            "settings.toml: api_keys[1]: duplicate key.",
        ),
        ("[grammars]\nitem = 3", "settings.toml: grammars: unknown setting 'item'. Did you mean items?"),
        ("[grammars]\nitems = 0", "settings.toml: grammars.items: Expected `int` >= 1."),
        ("[backends]", "settings.toml: backends: at least one backend is required."),
        (
            "[backends.a]\nthreads = 1",
            'settings.toml: backends.a: a backend needs a kind, as in kind = "embedded".',
        ),
        (
            "[backends.a]\nkind = 'x'\nkey = '1'\nkey_env = 'Y'",
            "settings.toml: backends.a: set either key or key_env.",
        ),
    ],
)
def test_invalid_setting_is_named_with_its_file(toml: str, message: str) -> None:
    assert load_error(write(toml)) == message


def test_invalid_variable_is_named() -> None:
    assert load_error(env={"ANTIPHON_PORT": "http"}) == "ANTIPHON_PORT: Expected `int`, got `str`."


def test_unknown_setting_lists_all_settings() -> None:
    message = load_error(write("zzz = 1"))
    assert message.startswith("settings.toml: unknown setting 'zzz'. Allowed: agent_model, ")


def test_invalid_option_is_named() -> None:
    assert load_error(overrides={"max_body_bytes": -1}) == "--max-body-bytes: Expected `int` >= 1."


@pytest.mark.parametrize("keys", ["a,,b", "", ":b"])
def test_empty_key_in_the_variable_is_rejected(keys: str) -> None:
    assert (
        load_error(env={"ANTIPHON_API_KEYS": keys}) == "ANTIPHON_API_KEYS: empty key; the format is key1,key2:project."
    )


def test_missing_configuration_file_is_named() -> None:
    assert load_error(Path("nowhere.toml")) == "Cannot read nowhere.toml: No such file or directory."


def test_default_file_that_cannot_be_looked_up_is_a_problem(tmp_path: Path) -> None:
    Path("antiphon.toml").symlink_to("antiphon.toml")
    assert load_error() == (
        f"Cannot look for antiphon.toml in the working directory {tmp_path}: Too many levels of symbolic links. Use "
        "another working directory, or name the settings file with --config."
    )


def test_invalid_toml_is_named_with_its_line() -> None:
    assert re.fullmatch(r"settings\.toml is not valid TOML: .*line 2.*", load_error(write("port = 1\nhost = \n")))


def test_repr_shows_no_secrets() -> None:
    path = write(
        """
        store = "postgresql://user:hunter2@db/antiphon?password=hunter3"
        seal_keys = ["c2VhbA=="]
        [[api_keys]]
        key = "sk-secret"
        [backends.up]
        kind = "chat"
        key = "sk-upstream"
        """
    )
    settings = load(path, HOME, {})
    names = [name for name in Settings.__struct_fields__ if name != "warnings"]
    shown = {name: repr(getattr(settings, name)) for name in names} | {
        "store": "'postgresql://user:***@db/antiphon'",
        "api_keys": "(ApiKey(key='***', project='default'),)",
        "seal_keys": "'<1>'",
        "backends": "{'up': BackendSettings(kind='chat', options=<key>)}",
    }
    assert repr(settings) == f"Settings({', '.join(f'{name}={text}' for name, text in shown.items())})"
    assert not re.search("hunter2|hunter3|c2VhbA|sk-secret|sk-upstream", repr(settings))


def test_secret_in_place_of_a_variable_name_is_not_shown() -> None:
    assert load_error(write("[[api_keys]]\nkey_env = 'sk-secret'")) == (
        "settings.toml: api_keys[0].key_env: the environment variable is not set."
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory:", "memory:"),
        ("sqlite:////data/antiphon.db", "sqlite:////data/antiphon.db"),
        ("postgresql://ada:pw@db:5432/x", "postgresql://ada:***@db:5432/x"),
        ("postgresql://[broken", "***"),
    ],
)
def test_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_dbos_false_of_version_0_1_0_is_accepted_with_a_warning() -> None:
    settings = load(write("dbos = false"), HOME, {})
    assert settings == msgspec.structs.replace(load(None, HOME, {}), warnings=settings.warnings)
    assert settings.warnings == ("settings.toml: dbos: deprecated and without effect. Remove it.",)


def test_dbos_table_of_version_0_1_0_sets_the_limits_with_a_warning() -> None:
    path = write("[dbos]\nconcurrency = 8\nconcurrency_per_project = 2\nstarts_per_minute = 60")
    settings = load(path, HOME, {})
    assert settings == msgspec.structs.replace(
        load(None, HOME, {}),
        background_concurrency=8,
        background_concurrency_per_project=2,
        background_starts_per_minute=60,
        warnings=settings.warnings,
    )
    (warning,) = settings.warnings
    assert warning == (
        "settings.toml: dbos: this table is deprecated. Use background_concurrency, "
        "background_concurrency_per_project, background_starts_per_minute instead."
    )


def test_dbos_database_of_version_0_1_0_has_no_effect_and_is_not_shown() -> None:
    path = write("[dbos]\ndatabase_env = 'DBOS_URL'\npolling_seconds = 1")
    settings = load(path, HOME | {"DBOS_URL": "postgresql://ada:hunter2@db/dbos"}, {})
    assert settings.warnings == (
        "settings.toml: dbos: this table is deprecated. Remove it.",
        "settings.toml: dbos.database has no effect: background responses are queued in the store itself.",
        "settings.toml: dbos.polling_seconds has no effect: background responses are queued in the store itself.",
    )
    assert "hunter2" not in repr(settings)


def test_new_limits_override_the_dbos_table() -> None:
    path = write("[dbos]\nconcurrency = 8\nstarts_per_minute = 60")
    settings = load(path, HOME | {"ANTIPHON_BACKGROUND_CONCURRENCY": "4"}, {})
    assert (settings.background_concurrency, settings.background_starts_per_minute) == (4, 60)


def test_model_names_have_one_or_several_targets() -> None:
    path = write(
        """
        [models]
        fast = "local/small"
        "gpt-*" = ["openai", "azure/gpt"]
        """
    )
    assert load(path, HOME, {}).models == {"fast": ("local/small",), "gpt-*": ("openai", "azure/gpt")}


@pytest.mark.parametrize("targets", ['""', "[]", '["local", ""]'])
def test_model_without_a_target_is_rejected_by_name(targets: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.fast: a target is a backend or backend/model"):
        load(write(f"[models]\nfast = {targets}"), HOME, {})


def test_allowed_hosts_in_a_variable_are_separated_by_commas() -> None:
    hosts = ("a", "*.b.example", "*", "10.0.0.1", "[2001:db8::1]", "::1")
    assert load(None, HOME | {"ANTIPHON_ALLOWED_HOSTS": ", ".join(hosts)}, {}).allowed_hosts == hosts


def test_agent_tools_in_a_variable_are_separated_by_commas() -> None:
    assert load(None, HOME | {"ANTIPHON_AGENT_TOOLS": "one, two:f"}, {}).agent_tools == ("one", "two:f")


def test_seal_keys_in_a_variable_are_separated_by_commas() -> None:
    assert load(None, HOME | {"ANTIPHON_SEAL_KEYS": "b25l, dHdv"}, {}).seal_keys == ("b25l", "dHdv")


def test_tables_of_hosted_tools_take_secrets_from_variables() -> None:
    path = write(
        """
        [web_search]
        provider = "brave"
        api_key_env = "BRAVE_KEY"

        [image_generation]
        base_url = "http://127.0.0.1:1/v1"
        model = "m"
        api_key = "sk-image"

        [mcp_servers.notes]
        url = "https://notes.example/mcp"
        authorization_env = "NOTES_KEY"
        headers = { X-Team = "a", X-Key_env = "NOTES_KEY" }

        [mcp_servers.files]
        command = "files"
        args = ["/srv"]
        env = { TOKEN_env = "NOTES_KEY" }
        """
    )
    settings = load(path, HOME | {"BRAVE_KEY": "sk-brave", "NOTES_KEY": "sk-notes"}, {})
    assert settings.web_search == WebSearchSettings(provider="brave", api_key="sk-brave")
    assert settings.image_generation == ImageGenerationSettings(
        base_url="http://127.0.0.1:1/v1", model="m", api_key="sk-image"
    )
    assert settings.mcp_servers == {
        "notes": McpServerSettings(
            url="https://notes.example/mcp", authorization="sk-notes", headers={"X-Team": "a", "X-Key": "sk-notes"}
        ),
        "files": McpServerSettings(command="files", args=("/srv",), env={"TOKEN": "sk-notes"}),
    }
    assert not re.search("sk-brave|sk-notes|sk-image", repr(settings))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            '[web_search]\nprovider = "bing"',
            "settings.toml: web_search.provider: 'bing' is not one of searxng, brave, tavily, exa.",
        ),
        (
            '[web_search]\nprovider = "exa"',
            "settings.toml: web_search: exa needs api_key_env, the name of an environment variable with the key.",
        ),
        (
            '[web_search]\nprovider = "searxng"',
            "settings.toml: web_search: searxng needs base_url, the address of the instance.",
        ),
        ("[mcp_servers.a]", "settings.toml: mcp_servers.a: set either url or command."),
        (
            '[mcp_servers.a]\ncommand = "x"\nauthorization = "y"',
            "settings.toml: mcp_servers.a: headers and authorization need url.",
        ),
        (
            '[mcp_servers.a]\ncomand = "x"',
            "settings.toml: mcp_servers.a: unknown setting 'comand'. Did you mean command?",
        ),
        (
            '[image_generation]\nmodel = "m"',
            "settings.toml: image_generation: Object missing required field `base_url`.",
        ),
    ],
)
def test_invalid_table_of_a_hosted_tool_is_named(toml: str, message: str) -> None:
    assert load_error(write(toml)) == message


def test_limits_of_grammars_are_a_table(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[grammars]\nitems = 3\ncompile_seconds = 2")
    assert load(path, HOME, {}).grammars == GrammarLimits(items=3, compile_seconds=2)
