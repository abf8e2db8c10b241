"""Log lines are JSON where nobody sits at a terminal."""

import json
import logging

import pytest

from shared.logging import JsonFormatter, configure_logging


def test_a_record_is_one_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        import sys

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


def test_the_level_is_obeyed(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        configure_logging("warning", "engine")
        logging.getLogger("x").info("hidden")
        logging.getLogger("x").warning("shown")
    finally:
        logging.basicConfig(handlers=before or [logging.NullHandler()], level=logging.WARNING, force=True)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["shown"]
