from antiphon.cli.main import main


def test_the_models_of_the_settings_are_listed_without_loading_them(home, script, capsys):
    (home / "antiphon.toml").write_text(f'[backends.demo]\nkind = "scripted"\nscript = "{script}"\n')
    assert main(["models"]) == 0
    assert capsys.readouterr() == ("scripted  demo (scripted)\n", "")


def test_a_running_server_is_asked(server, capsys):
    assert main(["models", "--url", server.url]) == 0
    assert capsys.readouterr() == (f"scripted  {server.url}\n", "")


def test_a_server_that_does_not_run_is_one_line_and_exit_1(capsys):
    assert main(["models", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr() == ("", "antiphon: Nothing answers at http://127.0.0.1:1: Connection refused.\n")
