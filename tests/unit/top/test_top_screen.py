"""What the picture shows, as plain text."""

import math

import pytest
from rich.console import Console

from services.top.figures import Figures, Latency
from services.top.reading import Engine, Reading
from services.top.screen import picture, sparkline

QUIET = Figures(30, 12.5, 0, 0, 0, 48, 46, 0, Latency(0.042, 1.31), Latency(0.011, math.nan))
ENGINES = [
    Engine("m", "10.0.0.1:5555", "ready", 31, 0, 39, 100, 812.4),
    Engine("m", "10.0.0.2:5555", "draining", 1, 7, 2, 100, 3),
    Engine("m", "10.0.0.3:5555", "connecting"),
]


def shown(reading: Reading, figures: Figures | None = QUIET) -> str:
    console = Console(width=110, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(picture(reading, figures, [10.0, 1532.4]))
    return capture.get()


def test_a_running_deployment() -> None:
    text = shown(Reading(0, ENGINES, {}, [], 2))
    assert "m  2 frontends, 1 of 3 engines ready" in text
    assert "1,532/s" in text
    assert "12.5/s   48 in flight, 46 of them streaming" in text
    assert "42 ms / 1.3 s" in text
    assert "11 ms / –" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("10.0.0.")}
    assert lines["10.0.0.1:5555"].split() == ["10.0.0.1:5555", "●", "ready", "31", "0", "██████▏···", "61%", "812"]
    assert "draining" in lines["10.0.0.2:5555"]
    assert lines["10.0.0.3:5555"].split() == ["10.0.0.3:5555", "●", "connecting"]
    for quiet in ("refused", "failed", "abandoned", "failover"):
        assert quiet not in text


def test_trouble_is_shown() -> None:
    figures = Figures(30, 12.5, 1.5, 0.4, 0.2, 48, 46, 3, QUIET.first_token, QUIET.each_token)
    text = shown(Reading(0, ENGINES, {}, ["http://f1 does not answer"], 1), figures)
    for trouble in ("1.5/s refused", "0.4/s failed", "0.2/s abandoned", "3 failovers", "http://f1 does not answer"):
        assert trouble in text


def test_models_are_told_apart_only_where_there_are_several() -> None:
    assert "model" not in shown(Reading(0, ENGINES, {}, [], 1))
    several = shown(Reading(0, [*ENGINES, Engine("other", "10.0.1.1:5555", "ready")], {}, [], 1))
    assert "m, other" in several
    assert "model" in several


def test_the_first_look_and_nobody_there() -> None:
    assert "measuring" in shown(Reading(0, ENGINES, {}, [], 1), None)
    assert "engine  " not in shown(Reading(0, [], {}, ["http://f0 does not answer"], 0))


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0.0, 0.0], ""), ([0.0, 8.0, 1.0, 0.01], " █▁▁"), ([5.0], "█")]
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars
