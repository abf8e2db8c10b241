"""Chart tests need real helm; where it cannot be had they are skipped, and say why."""

import pytest

from tests.chart.kube_tools import NoKubeTools, tool


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    try:
        tool("helm")
    except NoKubeTools as missing:
        pytest.skip(str(missing))
