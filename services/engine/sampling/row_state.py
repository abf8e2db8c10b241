"""What the sampler keeps of one request between steps: token counts, bad words, and how far it has come.

Built from the request's tokens when it is first seen (or seen again after a preemption or a move), then
updated by the one token that each step adds. `batch_plan` and `logit_edits` read it.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.engine.request import Request
from shared.sampling_params import InvalidSamplingParams, SamplingParams, check_sampling_params


class TokenCounts:
    """The distinct tokens of one request that penalties touch, and how often each is in the output.

    Sparse, since a request has far fewer distinct tokens than the vocabulary: a step with penalties touches
    these alone, where dense counts would cost several passes over [rows, vocab].
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        in_output, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        in_prompt = np.setdiff1d(np.asarray(prompt, dtype=np.int64), in_output)
        self._size = len(in_output) + len(in_prompt)
        self._ids = np.concatenate([in_output, in_prompt])
        self._output_counts = np.zeros(self._size, dtype=np.float32)
        self._output_counts[: len(in_output)] = counts
        self._place = {int(token_id): place for place, token_id in enumerate(self._ids)}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """As float32: the number that the frequency penalty multiplies. 0 for tokens of the prompt alone."""
        return self._output_counts[: self._size]

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is not None:
            self._output_counts[place] += 1
            return
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros(room, dtype=np.float32)])
        self._place[token_id] = self._size
        self._ids[self._size] = token_id
        self._output_counts[self._size] = 1
        self._size += 1


class RowState:
    """One request's row. `error` is set where the request asks for what cannot be carried out."""

    def __init__(self, request: Request, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        params = request.sampling
        self.request = request
        self.params: SamplingParams = params
        self.error: str | None = None
        self.num_tokens = len(request.token_ids)
        self._num_prompt_tokens = request.num_prompt_tokens
        self._last_token = request.token_ids[-1] if request.token_ids else None
        self.counts: TokenCounts | None = None
        # Multi-token bad words by the last token of the part that must have been written already.
        self._bad_endings: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        self._min_tokens_ban: list[int] = []
        # Laid out once for each request, since a batch's plan is made anew whenever a request comes or goes.
        self.allowed: NDArray[np.int64] | None = None
        self.added_ids = np.empty(0, dtype=np.int64)
        self.added_values = np.empty(0, dtype=np.float32)
        try:
            check_sampling_params(params, vocab_size)
            self._build(request, vocab_size, eos_token_ids)
        except InvalidSamplingParams as error:
            self.error = f"the engine cannot sample for this request: {error}"

    def _build(self, request: Request, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        params = self.params
        if self.has_penalties:
            counted = request.token_ids[0 if params.repetition_penalty != 1.0 else request.num_prompt_tokens :]
            if counted and not 0 <= min(counted) <= max(counted) < vocab_size:
                raise InvalidSamplingParams(
                    "token_ids",
                    f"hold an id outside the vocabulary (0 to {vocab_size - 1}), which penalties cannot count",
                )
            prompt = request.token_ids[: request.num_prompt_tokens] if params.repetition_penalty != 1.0 else []
            self.counts = TokenCounts(prompt, request.token_ids[request.num_prompt_tokens :])
        if params.allowed_token_ids is not None:
            self.allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        banned = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
        self.added_ids = np.array([*banned, *params.logit_bias], dtype=np.int64)
        self.added_values = np.array([-np.inf] * len(banned) + list(params.logit_bias.values()), dtype=np.float32)
        for word in params.bad_words_token_ids:
            if len(word) > 1:
                self._bad_endings[word[-2]].append((word[:-1], word[-1]))
        if params.min_tokens > self.num_output_tokens:
            self._min_tokens_ban = sorted({*eos_token_ids, *params.stop_token_ids})

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    @property
    def bans_by_output(self) -> bool:
        """Whether banned_now may ever return something."""
        return bool(self._bad_endings or self._min_tokens_ban)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self._num_prompt_tokens

    def describes(self, request: Request) -> bool:
        """Whether this state is of exactly these tokens and parameters."""
        token_ids = request.token_ids
        return (
            request is self.request
            and request.sampling is self.params
            and len(token_ids) == self.num_tokens
            and request.num_prompt_tokens == self._num_prompt_tokens
            and (not token_ids or token_ids[-1] == self._last_token)
        )

    def append(self, token_id: int) -> None:
        """The engine will append this token, and nothing else."""
        self.num_tokens += 1
        self._last_token = token_id
        if self.counts is not None:
            self.counts.add(token_id)

    def banned_now(self) -> list[int]:
        """Ids banned because of what the output is so far: min_tokens, and bad words about to be completed."""
        banned: list[int] = []
        if self._min_tokens_ban:
            if self.num_output_tokens < self.params.min_tokens:
                banned += self._min_tokens_ban
            else:
                self._min_tokens_ban = []
        if self._bad_endings and self.num_output_tokens > 0 and self._last_token is not None:
            output = self.request.token_ids
            for beginning, last in self._bad_endings.get(self._last_token, ()):
                if len(beginning) <= self.num_output_tokens and output[-len(beginning) :] == beginning:
                    banned.append(last)
        return banned
