"""The command line: what is refused, how it says so, and that every flag names its environment variable."""

import pytest

from services.command import main, read_settings
from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings
from services.launcher.settings import DECIDED_BY_LAUNCHER, ServeSettings


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
    monkeypatch.setenv("TANDEM_MODELS", "not JSON")
    with pytest.raises(SystemExit) as exit_:
        read_settings(FrontendSettings, "tandem frontend", [])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "models" in message
    assert "JSON" in message
    assert "not JSON" not in message


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ("only", ["only"]),
        ("first,second", ["first", "second"]),
        (" first , second ", ["first", "second"]),
        ('["first", "with, a comma"]', ["first", "with, a comma"]),
        ("", []),
    ],
)
def test_a_list_in_a_variable_or_a_flag(monkeypatch: pytest.MonkeyPatch, written: str, keys: list[str]) -> None:
    names = ("api_key", "served_model_name", "engine_addresses", "allowed_origins")
    for name in names:
        monkeypatch.setenv(f"TANDEM_{name.upper()}", written)
    settings = read_settings(FrontendSettings, "tandem frontend", [])
    assert [getattr(settings, name) for name in names] == [keys] * len(names)
    for name in names:
        monkeypatch.delenv(f"TANDEM_{name.upper()}")
    if keys:
        assert read_settings(FrontendSettings, "tandem frontend", ["--api-key", written]).api_key == keys


def test_other_lists_in_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_REASONING_TAGS", "<a>,</a>")
    monkeypatch.setenv("TANDEM_REASONING_FIELDS", "reasoning")
    settings = read_settings(FrontendSettings, "tandem frontend", [])
    assert settings.reasoning_tags == ("<a>", "</a>")
    assert settings.reasoning_fields == ["reasoning"]


def test_a_broken_json_list_does_not_show_the_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", '["secret"')
    with pytest.raises(SystemExit):
        read_settings(FrontendSettings, "tandem frontend", [])
    message = capsys.readouterr().err
    assert "TANDEM_API_KEY" in message
    assert "secret" not in message


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
    decided = DECIDED_BY_LAUNCHER if command == "serve" else ()
    for name in settings_class.model_fields:
        flag, variable = f"--{name.replace('_', '-')}", f"[env: TANDEM_{name.upper()}]"
        assert (flag in shown and variable in shown) == (name not in decided), name
