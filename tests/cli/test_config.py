"""`antiphon config check`: all problems with their paths, or a summary, and never a secret."""

import pytest

from antiphon.cli.main import main


def check(capfd, *options: str) -> tuple[int, list[str]]:
    status = main(["config", "check", *options])
    out, err = capfd.readouterr()
    assert err == ""
    return status, out.splitlines()


def test_good_settings_are_summarized(home, script, capfd):
    pytest.importorskip("asyncpg")
    (home / "antiphon.toml").write_text(
        """
        store = "postgresql://ada:pg-password@db/antiphon"
        api_keys = [{key = "sk-ada-secret", project = "ada"}, {key = "sk-other-secret"}]
        models = {fast = "demo/scripted"}
        [backends.demo]
        kind = "scripted"
        script = "script.json"
        """
    )
    assert check(capfd) == (
        0,
        [
            "ok",
            "  file      antiphon.toml",
            "  address   127.0.0.1, port 8484",
            "  store     postgresql://ada:***@db/antiphon",
            "  keys      2, of the projects ada, default",
            "  backends  demo (scripted)",
            "  models    fast",
        ],
    )


def test_every_problem_of_a_file_is_shown(home, capfd):
    (home / "other.toml").write_text('prot = 1\nport = "x"\nlog_level = "loud"\napi_keys = ["sk-ada-secret"]')
    assert check(capfd, "--config", "other.toml") == (
        1,
        [
            "problem: other.toml: unknown setting 'prot'. Did you mean port?",
            "problem: other.toml: port: Expected `int`, got `str`.",
            "problem: other.toml: log_level: 'loud' is not one of debug, info, warning, error.",
            "problem: other.toml: api_keys[0]: Expected `object`, got `str`.",
        ],
    )


def test_problems_that_would_stop_the_start_are_shown(home, capfd):
    (home / "antiphon.toml").write_text(
        """
        host = "0.0.0.0"
        store = "papyrus://ada:pg-password@db"
        seal_keys = ["c2VhbC1zZWNyZXQ="]
        outbound_allow = ["http://10.0.0.1"]
        agent_tools = ["no_such_module"]
        models = {fast = ["nowhere/m", "none"]}
        [backends.a]
        kind = "chat_completions"
        base_url = "127.0.0.1:1"
        api_key = "sk-upstream-secret"
        [backends.b]
        kind = "embedded"
        model = "absent-model"
        [backends.c]
        kind = "papyrus"
        """
    )
    status, lines = check(capfd)
    paths = ["store", "models.fast", "models.fast", "seal_keys", "outbound_allow", "agent_tools"]
    paths += ["backends.a.base_url", "backends.b", "backends.c.kind"]
    assert (status, [line.split(": ")[:2] for line in lines]) == (1, [["problem", path] for path in paths])
    assert not any(secret in line for line in lines for secret in ("secret", "pg-password", "c2VhbC1"))


@pytest.mark.parametrize("command", [["config", "check"], ["doctor"]])
def test_missing_settings_file_is_a_problem(command, capfd):
    assert main([*command, "--config", "nowhere.toml"]) == 1
    assert "Cannot read nowhere.toml: No such file or directory." in capfd.readouterr().out


def test_ignored_variables_and_insecure_are_warnings(script, monkeypatch, capfd):
    monkeypatch.setenv("ANTIPHON_PROT", "1")
    monkeypatch.setenv("ANTIPHON_HOST", "::")
    monkeypatch.setenv("ANTIPHON_INSECURE", "1")
    status, lines = check(capfd)
    assert (status, lines[:3]) == (
        0,
        [
            "warning: Unknown environment variable ANTIPHON_PROT is ignored. Did you mean ANTIPHON_PORT?",
            "warning: insecure: anyone who can reach :: can use this server, because it has no API keys",
            "ok",
        ],
    )


def test_check_creates_no_files(home, capfd):
    assert check(capfd)[0] == 0
    assert list(home.iterdir()) == []


def test_other_commands_print_the_warnings(monkeypatch, script, capfd):
    monkeypatch.setenv("ANTIPHON_STROE", "memory:")
    assert main(["rotate"]) == 0
    assert capfd.readouterr().err == (
        "antiphon: warning: Unknown environment variable ANTIPHON_STROE is ignored. Did you mean ANTIPHON_STORE?\n"
    )


def test_key_in_the_store_allows_other_addresses(home, script, capfd):
    (home / "antiphon.toml").write_text(f'host = "0.0.0.0"\nport = 0\nstore = "sqlite:///{home}/store.db"')
    assert check(capfd)[0] == 1
    assert main(["db", "migrate"]) == 0
    capfd.readouterr()
    assert check(capfd)[0] == 1
    assert main(["keys", "create", "--project", "p"]) == 0
    capfd.readouterr()
    assert check(capfd)[0] == 0
    assert "  keys      in the store" in check(capfd)[1]
    assert main(["doctor"]) == 0


@pytest.mark.parametrize("command", [["config", "check"], ["doctor"]])
def test_keys_of_a_store_that_cannot_be_opened_are_not_reported_as_missing(home, script, capfd, command):
    (home / "store.db").write_bytes(b"not a database, " * 100)
    (home / "antiphon.toml").write_text(f'host = "0.0.0.0"\nport = 0\nstore = "sqlite:///{home}/store.db"')
    assert main(command) == 1
    out = capfd.readouterr().out
    assert f"The store {home}/store.db cannot be opened: file is not a database." in out
    assert "has no API key" not in out


def test_cost_budget_without_a_price_for_other_models_is_a_warning(home, script, capfd):
    path = home / "antiphon.toml"
    settings = f"""
        [backends.demo]
        kind = "scripted"
        script = "{script}"
        [projects.a.key_limits]
        cost_per_month = 5.0
        [prices.big]
        input = 1.0
        output = 2.0
        """
    path.write_text(settings)
    warning = 'warning: cost_per_month: models without a price cost nothing. [prices."*"] is a price for all of them.'
    assert check(capfd)[1][:2] == [warning, "ok"]
    path.write_text(settings + '[prices."*"]\ninput = 1.0\noutput = 2.0\n')
    assert check(capfd)[1][0] == "ok"


def test_budget_that_a_restart_resets_is_a_warning(home, script, capfd):
    (home / "antiphon.toml").write_text("stateless = true\n[limits]\ntokens_per_month = 1000")
    warning = (
        "limits.tokens_per_month: a stateless server loses the usage when it stops, so that a budget begins again at "
        "every start. Store data in SQLite or PostgreSQL."
    )
    assert check(capfd)[1][:2] == [f"warning: {warning}", "ok"]
    main(["doctor"])
    assert warning in " ".join(capfd.readouterr().out.split())
