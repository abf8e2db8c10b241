from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import write_model
from link_end import LinkEnd


@pytest.fixture
def open_link(tmp_path: Path) -> Iterator[Callable[..., LinkEnd]]:
    """Opens links, and ends them with the test."""
    model = write_model(tmp_path / "model")
    opened: list[LinkEnd] = []

    def open_one(**overrides: Any) -> LinkEnd:
        opened.append(LinkEnd(model, **overrides))
        return opened[-1]

    yield open_one
    for end in opened:
        end.link.stop(linger=0.1)
        assert end.link.join(10)
        assert end.ended == [None]
