"""Every token attends to the right past: at each step the blocks of a request hold exactly what its tokens would
have written, whatever was shared, taken back or reused before, and even where the blocks' names collide."""

import tempfile
from pathlib import Path

import pytest
from engine_harness import make_add, make_settings, take_step, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.kv_cache import cache as cache_module
from services.engine.request import SampledToken, Step
from services.engine.settings import EngineSettings
from shared.block_hash import block_hash


class RememberingExecutor(SimulatedExecutor):
    """Keeps in each slot the whole past that was written there, and draws the next token from what it finds."""

    def __init__(self, engine_settings: EngineSettings) -> None:
        super().__init__(engine_settings)
        self._block_size = engine_settings.block_size
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def execute(self, step: Step) -> list[SampledToken]:
        written: set[int] = set()
        results: list[SampledToken] = []
        for entry in step.scheduled:
            request = entry.request
            for position in range(entry.start, entry.start + entry.num_tokens):
                slot = self._slot(request.block_table, position)
                assert slot not in written, "two requests write to one slot"
                written.add(slot)
                self._slots[slot] = (request.cache_salt, tuple(request.token_ids[: position + 1]))
        for entry in step.scheduled:
            request = entry.request
            for position in range(entry.start + entry.num_tokens):
                expected = (request.cache_salt, tuple(request.token_ids[: position + 1]))
                found = self._slots.get(self._slot(request.block_table, position))
                assert found == expected, f"position {position} of {request.key} holds another's past"
            # A small vocabulary, so that requests meet and part again.
            token_id = sum(request.token_ids) % 3 + 3
            results.append(SampledToken(token_id=token_id if entry.samples else None))
        return results

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size


@pytest.fixture(scope="module")
def model() -> Path:
    return write_model(Path(tempfile.mkdtemp()) / "model", vocab_size=50)


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(3, 5), min_size=1, max_size=14),
        "max_tokens": st.integers(1, 12),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from(["", "", "tenant"]),
    }
)
actions = st.lists(
    st.tuples(st.just("add"), requests)
    | st.tuples(st.just("step"), st.integers(1, 4))
    | st.tuples(st.just("abort"), st.integers(0, 20)),
    min_size=8,
    max_size=50,
)


@pytest.mark.parametrize("name_bits", [64, 3, 0])
@settings(max_examples=150, deadline=None)
@given(st.integers(7, 16), st.integers(1, 4), st.integers(1, 20), st.integers(1, 5), actions)
def test_blocks_hold_what_their_users_expect(
    model: Path,
    name_bits: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    seqs: int,
    mix: list[tuple[str, object]],
) -> None:
    engine_settings = make_settings(
        model, num_kv_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=seqs
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cache_module, "block_hash", lambda parent, tokens: block_hash(parent, tokens) & ((1 << name_bits) - 1)
        )
        core = EngineCore(RememberingExecutor(engine_settings), engine_settings)
        results: dict = {}
        added = 0
        for action, value in [*mix, ("step", 2000)]:
            if action == "add":
                core.add(b"peer", make_add(added, **value))  # type: ignore[arg-type]
                added += 1
            elif action == "abort":
                core.abort(b"peer", [value])  # type: ignore[list-item]
            else:
                for _ in range(value):  # type: ignore[arg-type]
                    if core.has_work:
                        take_step(core, results)
                        core.check()
        core.check_when_idle()
        assert not core.has_work
