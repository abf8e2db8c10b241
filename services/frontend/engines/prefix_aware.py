"""The routing policy `prefix_aware`: what an engine's cache already holds of a prompt, weighed against its load."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engines.prefix_index import PromptBlocks
from services.frontend.engines.routing import AnyCandidate, Candidate, RoutingPolicy, queued_work
from services.frontend.generation import Generation

# Of engines that hold equally much, so many are drawn and compared: see PrefixAware.
DRAWN = 2
# Engines with the longest and the second longest prefix are looked at.
DEPTHS = 2
# All engines are compared at the first STRIDE blocks and then at every STRIDEth; those drawn, at every block.
STRIDE = 8
# Looking a block up takes some 0.1 µs: a prefix that many engines hold is followed for 0.5 ms.
MAX_LOOK_UPS = 5_000


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """What a token costs: one of the prompt that must be computed again, one of work ahead of it at the engine, and
    one that does not fit into the engine's free blocks."""

    prefix: float = 2.0
    load: float = 1.0
    memory: float = 1.0


class PrefixAware(RoutingPolicy):
    """The cheapest of a few engines, in tokens to be computed: those that hold the most of the prompt, and two drawn
    at random (Mitzenmacher, The Power of Two Choices, 2001).

    Cost adds what the engine does not hold of the prompt, the work that is ahead of it there, and what does not fit
    into its free blocks, each with a weight (NVIDIA Dynamo's router adds the first two likewise). To compute a prefix
    again costs everybody's throughput, to wait only costs this request's time: so the first weighs more by default.

    Of engines that hold equally much two are drawn too, so that frontends with the same stale view of a popular
    prefix do not all go to the one that was the idlest of its holders.
    """

    def __init__(self, weights: RoutingWeights) -> None:
        self._weights = weights
        self._prompt: tuple[Sequence[int], str] | None = None
        self._blocks: dict[int, PromptBlocks] = {}  # by block size; of the last prompt
        self._had_choice = True  # for the last prompt

    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        self._had_choice = len(candidates) > 1
        if not self._had_choice:
            return candidates[0]
        contenders: dict[AnyCandidate, int] = {}
        for depth, holders in self._longest_prefixes(candidates, generation):
            for candidate in _draw(holders):
                contenders[candidate] = self._held_blocks(candidate, generation, depth)
        for candidate in _draw(candidates):
            if candidate not in contenders:
                contenders[candidate] = self._held_blocks(candidate, generation)
        num_tokens = len(generation.prompt_token_ids)
        costs = {
            candidate: self._cost(candidate, max(0, num_tokens - depth * candidate.block_size))
            for candidate, depth in contenders.items()
        }
        cheapest = min(costs.values())
        return random.choice([candidate for candidate, cost in costs.items() if cost == cheapest])

    def sent(self, candidate: Candidate, generation: Generation, num_tokens: int) -> None:
        if not self._had_choice:
            # Where there is one engine, nobody asks what it holds.
            candidate.load.sent(num_tokens)
            return
        held = self._held_blocks(candidate, generation) * candidate.block_size
        candidate.load.sent(max(0, num_tokens - held))
        candidate.prefixes.expect(self._blocks_of(generation, candidate.block_size))

    def _longest_prefixes(
        self, candidates: Sequence[AnyCandidate], generation: Generation
    ) -> list[tuple[int, list[AnyCandidate]]]:
        """(blocks held at least, the engines that hold so many), the most first, DEPTHS at most; none that hold
        nothing. No block is hashed much beyond the first that nobody holds."""
        groups: list[tuple[int, list[AnyCandidate]]] = []
        # During a rolling update engines may differ in their block size; a name is one size's.
        for block_size in {candidate.block_size for candidate in candidates}:
            holders = [candidate for candidate in candidates if candidate.block_size == block_size]
            blocks = self._blocks_of(generation, block_size)
            depth = look_ups = 0
            for index in (*range(min(STRIDE, len(blocks))), *range(2 * STRIDE - 1, len(blocks), STRIDE)):
                look_ups += len(holders)
                if look_ups > MAX_LOOK_UPS:
                    break
                hash_ = blocks[index]
                still = [candidate for candidate in holders if hash_ in candidate.prefixes]
                if depth and len(still) < len(holders):
                    groups.append((depth, list(set(holders).difference(still))))
                holders, depth = still, index + 1
                if not holders:
                    break
            if depth and holders:
                groups.append((depth, holders))
        groups.sort(key=lambda group: group[0] * group[1][0].block_size, reverse=True)
        return groups[:DEPTHS]

    def _held_blocks(self, candidate: Candidate, generation: Generation, at_least: int = 0) -> int:
        blocks, prefixes = self._blocks_of(generation, candidate.block_size), candidate.prefixes
        for index in range(at_least, len(blocks)):
            if blocks[index] not in prefixes:
                return index
        return len(blocks)

    def _blocks_of(self, generation: Generation, block_size: int) -> PromptBlocks:
        # The choices of one request share one list, and come one after the other.
        prompt, salt = generation.prompt_token_ids, generation.cache_salt
        if self._prompt is None or self._prompt[0] is not prompt or self._prompt[1] != salt:
            self._prompt, self._blocks = (prompt, salt), {}
        blocks = self._blocks.get(block_size)
        if blocks is None:
            blocks = self._blocks[block_size] = PromptBlocks(prompt, block_size, salt)
        return blocks

    def _cost(self, candidate: Candidate, num_uncached: int) -> float:
        weights = self._weights
        reported = candidate.load.reported
        shortage = 0
        if reported.total_blocks:
            shortage = max(0, num_uncached - reported.free_blocks * candidate.block_size)
        return weights.prefix * num_uncached + weights.load * queued_work(candidate) + weights.memory * shortage


def _draw(candidates: Sequence[AnyCandidate]) -> Sequence[AnyCandidate]:
    return candidates if len(candidates) <= DRAWN else random.sample(candidates, DRAWN)
