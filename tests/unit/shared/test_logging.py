"""Log lines are JSON where nobody sits at a terminal."""

import io
import json
import logging
import sys
import warnings

import pytest

from shared.logging import JsonFormatter, configure_logging


def test_a_record_is_one_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("here").makeRecord(
            "here", logging.ERROR, "f", 1, "failed %s", ("so",), sys.exc_info(), extra={"request_id": 7}
        )
    line = JsonFormatter("engine").format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["service"], parsed["message"], parsed["request_id"]) == (
        "error",
        "engine",
        "failed so",
        7,
    )
    assert "ValueError: two\nlines" in parsed["exception"]
    assert "taskName" not in parsed


def test_the_level_is_obeyed(capfd: pytest.CaptureFixture[str], root_logger: logging.Logger) -> None:
    configure_logging("warning", "engine")
    logging.getLogger("x").info("hidden")
    logging.getLogger("x").warning("shown")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["shown"]


def test_libraries_lines_have_the_same_form(capfd: pytest.CaptureFixture[str], root_logger: logging.Logger) -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)  # as uvicorn itself does where it is told a level
    configure_logging("info", "frontend")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    warnings.warn("odd", UserWarning, stacklevel=1)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", *["py.warnings"] * (len(lines) - 1)]
    assert {line["service"] for line in lines} == {"frontend"}


def test_on_a_terminal_the_fields_follow_the_message(root_logger: logging.Logger) -> None:
    terminal = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "isatty", lambda: True, raising=False)
        patch.setattr(sys, "stderr", terminal)
        configure_logging("info", "frontend")
        logging.getLogger("x").info("GET /v1 %d", 200, extra={"model": "m", "prompt_tokens": 3})
        try:
            raise KeyError("k")
        except KeyError:
            logging.getLogger("x").exception("failed")
    first, second, *rest = terminal.getvalue().splitlines()
    assert first.endswith("INFO     frontend: GET /v1 200 model=m prompt_tokens=3")
    assert second.endswith("ERROR    frontend: failed")
    assert rest[-1] == "KeyError: 'k'"


def test_a_librarys_own_handler_is_taken_over(capfd: pytest.CaptureFixture[str], root_logger: logging.Logger) -> None:
    theirs = logging.getLogger("library_with_a_handler")
    theirs.addHandler(logging.StreamHandler())
    theirs.propagate = False
    configure_logging("info", "engine")
    theirs.warning("look out")
    assert [json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()] == ["look out"]
