"""The command line: what is refused, how it says so, and that every flag names its environment variable."""

import pytest

from services.command import main, read_settings
from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings
from services.launcher.settings import ServeSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is needed"),
        (["serv"], "did you mean 'serve'"),
        (["frontend"], "--model (or TANDEM_MODEL) is needed"),
        (["engine"], "--model (or TANDEM_MODEL) is needed"),
        (["frontend", "--model", "m", "--port", "99999"], "--port (or TANDEM_PORT): Input should be less than"),
        (["engine", "--model", "m", "--dtype", "int3"], "--dtype"),
        (["engine", "--model", "m", "--port", "1"], "unrecognized arguments: --port 1"),
        (["engine", "--model", "m", "--max-num", "1"], "unrecognized arguments: --max-num 1"),
        (["serve", "--engines", "0"], "--engines (or TANDEM_ENGINES)"),
        (["serve", "--engine-addresses", "a:1"], "--engine-addresses (or TANDEM_ENGINE_ADDRESSES) is not for"),
        (["serve", "--engines", "2", "--link-port", "65535"], "--link-port leaves no room for 2 engines"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "not JSON")
    with pytest.raises(SystemExit) as exit_:
        read_settings(FrontendSettings, "tandem frontend", [])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "api_key" in message
    assert "JSON" in message
    assert "not JSON" not in message.replace("is JSON", "")


def test_a_flag_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PORT", "1")
    monkeypatch.setenv("TANDEM_MAX_N", "7")
    settings = read_settings(FrontendSettings, "tandem frontend", ["--port", "2", "--served-model-name", "a,b"])
    assert (settings.port, settings.max_n, settings.served_model_name) == (2, 7, ["a", "b"])


@pytest.mark.parametrize(
    ("command", "settings_class"),
    [("frontend", FrontendSettings), ("engine", EngineSettings), ("serve", ServeSettings)],
)
def test_help_shows_every_flag_with_its_variable(
    command: str, settings_class: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    decided = {"discovery", "engine_addresses", "models", "link_host", "listen_fd"} if command == "serve" else set()
    for name in settings_class.model_fields:
        flag, variable = f"--{name.replace('_', '-')}", f"[env: TANDEM_{name.upper()}]"
        assert (flag in shown and variable in shown) == (name not in decided), name
