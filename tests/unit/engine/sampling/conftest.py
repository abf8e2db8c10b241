"""Small constants, so that a vocabulary of a few dozen tokens walks through every path of the sampler."""

from collections.abc import Iterator

import pytest

from services.engine.sampling import ordering, truncation, weights


@pytest.fixture(scope="module")
def small_constants() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "BLOCK", 4)
        patch.setattr(truncation, "LEADERS", (6, 14))
        patch.setattr(weights, "GROUP", 16)
        yield
