"""Environment variables that are not settings, and errors with all problems of the settings."""

from pathlib import Path

import pytest

from antiphon.config.loading import load
from antiphon.config.readers import ConfigProblems

HOME = {"HOME": "/home/ada"}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    path = Path("settings.toml")
    path.write_text(text)
    return path


def test_unknown_variables_are_ignored_with_warnings() -> None:
    settings = load(None, HOME | {"ANTIPHON_PROT": "1", "ANTIPHON_ZZZ": "sk-secret", "ANTIPHON_port": "2"}, {})
    assert (settings.port, settings.warnings) == (
        8484,
        (
            "Unknown environment variable ANTIPHON_PROT is ignored. Did you mean ANTIPHON_PORT?",
            "Unknown environment variable ANTIPHON_ZZZ is ignored. No setting has this name.",
            "Unknown environment variable ANTIPHON_port is ignored. Did you mean ANTIPHON_PORT?",
        ),
    )


KUBERNETES = {
    "ANTIPHON_PORT": "tcp://10.0.0.1:8484",
    "ANTIPHON_PORT_8484_TCP": "tcp://10.0.0.1:8484",
    "ANTIPHON_PORT_8484_TCP_ADDR": "10.0.0.1",
    "ANTIPHON_PORT_8484_TCP_PORT": "8484",
    "ANTIPHON_PORT_8484_TCP_PROTO": "tcp",
    "ANTIPHON_SERVICE_HOST": "10.0.0.1",
    "ANTIPHON_SERVICE_PORT": "8484",
    "ANTIPHON_SERVICE_PORT_HTTP": "8484",
}


def test_variables_of_a_kubernetes_service_are_ignored_with_one_warning() -> None:
    settings = load(write("port = 9000"), HOME | KUBERNETES, {})
    assert (settings.port, settings.warnings) == (
        9000,
        (
            (
                f"Ignored as addresses of a Kubernetes Service: {', '.join(sorted(KUBERNETES))}. To avoid such "
                "variables, set enableServiceLinks: false for the Pod."
            ),
        ),
    )


def test_variables_of_a_service_with_a_longer_name_are_ignored() -> None:
    variables = {"ANTIPHON_DB_PORT": "tcp://[2001:db8::1]:5432", "ANTIPHON_DB_SERVICE_HOST": "10.0.0.2"}
    (warning,) = load(None, HOME | variables, {}).warnings
    assert warning.startswith("Ignored as addresses of a Kubernetes Service: ANTIPHON_DB_PORT, ANTIPHON_DB_SERVICE_HO")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ANTIPHON_PORT", "tcp:8484", "ANTIPHON_PORT: Expected `int`, got `str`."),
        ("ANTIPHON_PORT", "99999", "ANTIPHON_PORT: Expected `int` <= 65535."),
        (
            "ANTIPHON_STATELESS",
            "tcp://10.0.0.1:1",
            "ANTIPHON_STATELESS: 'tcp://10.0.0.1:1' is not one of true, false, 1, 0.",
        ),
    ],
)
def test_other_wrong_values_of_variables_are_errors(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigProblems) as raised:
        load(None, HOME | KUBERNETES | {variable: value}, {})
    assert raised.value.problems == (message,)


def test_error_has_every_problem_of_the_settings() -> None:
    path = write(
        """
        prot = 1
        port = "x"
        max_body_bytes = "many"
        body_budget_bytes = 10
        run_prices = [1]
        allowed_hosts = ["http://a"]
        api_keys = [{key = ""}, {kye = "sk-secret"}, {key = "a", project = 3}]
        [backends.a]
        key_env = "UNSET_KEY"
        [backends.b]
        kind = "scripted"
        key_env = "UNSET_KEY"
        [models]
        m = []
        [grammars]
        items = 0
        rules = "x"
        [mcp_servers.a]
        [mcp_servers.b]
        url = "ftp://b"
        """
    )
    with pytest.raises(ConfigProblems) as raised:
        load(path, HOME | {"ANTIPHON_LOG_LEVEL": "loud"}, {"host": 3})
    assert raised.value.message == raised.value.problems[0]
    assert [problem.removeprefix("settings.toml: ") for problem in raised.value.problems] == [
        "unknown setting 'prot'. Did you mean port?",
        "port: Expected `int`, got `str`.",
        "max_body_bytes: Expected `int`, got `str`.",
        "api_keys[0]: a key must be a non-empty line of text without spaces around it.",
        "api_keys[1]: unknown setting 'kye'. Did you mean key?",
        "api_keys[2].project: Expected `str`, got `int`.",
        'backends.a: a backend needs a kind, as in kind = "embedded".',
        "backends.b.key_env: the environment variable UNSET_KEY is not set.",
        'models.m: a target is a backend or backend/model, as in "local" or "local/some-model".',
        "grammars.items: Expected `int` >= 1.",
        "grammars.rules: Expected `int`, got `str`.",
        "mcp_servers.a: set either url or command.",
        "mcp_servers.b.url: Expected `str` matching regex '^https?://[^\\\\s?#@]+$'.",
        "ANTIPHON_LOG_LEVEL: 'loud' is not one of debug, info, warning, error.",
        "--host: Expected `str`, got `int`.",
        "run_prices: expected the prices of input and output tokens, and optionally of cached ones.",
        "allowed_hosts: 'http://a' is not a host name. Omit the scheme, the port and the path.",
    ]
