from antiphon.cli.main import main


def test_configured_models_are_listed_without_loading_them(home, script, capsys):
    (home / "antiphon.toml").write_text(f'[backends.demo]\nkind = "scripted"\nscript = "{script}"\n')
    assert main(["models"]) == 0
    assert capsys.readouterr() == ("scripted  demo (scripted)\n", "")


def test_embedded_model_shows_its_path_or_the_pull_command(home, capsys):
    models = home / ".local/share/antiphon/models"
    models.mkdir(parents=True)
    (models / "here.gguf").write_bytes(b"GGUF")
    (home / "antiphon.toml").write_text(
        '[backends.near]\nkind = "embedded"\nmodel = "here"\n[backends.far]\nkind = "embedded"\nmodel = "elsewhere"\n'
    )
    assert main(["models"]) == 1
    assert capsys.readouterr() == (
        f"here  near ({models}/here.gguf)\n",
        ("antiphon: There are no weights for 'elsewhere' on this machine. Get them with: antiphon pull elsewhere\n"),
    )


def test_models_of_a_running_server_are_listed(server, capsys):
    assert main(["models", "--url", server.url]) == 0
    assert capsys.readouterr() == (f"scripted  {server.url}\n", "")


def test_stopped_server_is_one_line_and_exit_1(capsys):
    assert main(["models", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr() == ("", "antiphon: Cannot connect to http://127.0.0.1:1: Connection refused.\n")
