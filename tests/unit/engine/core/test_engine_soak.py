"""Two thousand requests of random lengths, aborts and lost frontends through one small engine."""

import random
from pathlib import Path

from engine_harness import make_add, make_core, write_model


def test_two_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(0)
    model = write_model(tmp_path / "model")
    core = make_core(model, num_kv_blocks=60, max_num_seqs=12, max_num_batched_tokens=48)
    peers = [b"one", b"two", b"three"]
    unfinished: dict[bytes, set[int]] = {peer: set() for peer in peers}
    for request_id in range(2000):
        peer = rng.choice(peers)
        beginning = rng.choice([3, 30])
        prompt = [beginning + position % 11 for position in range(rng.randint(1, 80))]
        core.add(
            peer,
            make_add(
                request_id, prompt, max_tokens=rng.randint(1, 60), priority=rng.randint(0, 2), seed=rng.randint(0, 3)
            ),
        )
        unfinished[peer].add(request_id)
        if rng.random() < 0.2:
            some = rng.choice(peers)
            ids = rng.sample(sorted(unfinished[some]), min(2, len(unfinished[some])))
            core.abort(some, ids)
            unfinished[some].difference_update(ids)
        if rng.random() < 0.01:
            gone = rng.choice(peers)
            core.abort_peer(gone)
            unfinished[gone].clear()
        for _ in range(rng.choice([0, 0, 3, 8])):
            take(core.step(), unfinished)
        if request_id % 50 == 0:
            core.check()
    for _ in range(100_000):
        if not core.has_work:
            break
        take(core.step(), unfinished)
    assert not any(unfinished.values())
    core.check_when_idle()
    core.check()
    assert core.statistics.preemptions > 100
    assert core.statistics.cached_tokens > 1000


def take(step_outputs: dict, unfinished: dict[bytes, set[int]]) -> None:
    for peer, outputs in step_outputs.items():
        for output in outputs:
            assert output.request_id in unfinished[peer], "an output after the end, or after an abort"
            if output.finish_reason is not None:
                unfinished[peer].remove(output.request_id)
