"""The sampler: one pass over the whole batch, from the model's logits to token ids.

The executor calls it after each run of the model. Its parts, in the order of their work: `row_state`,
`batch_plan`, `token_mask`, `logit_edits`, `processors`, and `draw` with its two implementations.
"""

import logging
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from services.engine.model.kernels import load_kernels
from services.engine.request import Request, RequestKey, SampledToken
from services.engine.sampling.batch_plan import BatchPlan
from services.engine.sampling.draw import Drawer
from services.engine.sampling.kernel_draw import KernelDrawer
from services.engine.sampling.processors import LogitsProcessor, LogitsProcessorFault, ProcessorChain
from services.engine.sampling.row_state import RowState
from services.engine.sampling.token_mask import TokenMask
from services.engine.sampling.torch_draw import TorchDrawer
from shared.protocol import TokenLogprobs

log = logging.getLogger(__name__)

_LOOK_FOR = "look for broken weights, or for an overflow in the model's number type"
NOT_FINITE = (
    f"the model's logits for this request's next token hold NaN or infinity: no token can be chosen; {_LOOK_FOR}"
)
PROMPT_NOT_FINITE = f"the model's logits for this request's prompt hold NaN or infinity: no logprobs; {_LOOK_FOR}"
NOTHING_ALLOWED = (
    "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, min_tokens, the grammar and the "
    "logits processors together exclude the whole vocabulary"
)


class Sampler:
    """Chooses the next token of every request. What `sample` does to a row, in this order:

    1. Where logprobs are asked for and the mode is `raw`, the row is kept as the model made it.
    2. The row becomes float32.
    3. Tokens outside `allowed_token_ids` are banned; then those of the grammar's bitmask; then every last token
       of `bad_words_token_ids` whose beginning the output ends with.
    4. While there are fewer output tokens than `min_tokens`, the eos ids (with `ignore_eos` too) and
       `stop_token_ids` are banned. `logit_bias` is added.
    5. Penalties. Tokens of prompt and output: a positive logit is divided, another multiplied, by
       `repetition_penalty`. Tokens of the output: minus `frequency_penalty` times their count, minus
       `presence_penalty`.
    6. Logits processors.
    7. A row whose maximum is NaN or infinite fails here, alone.
    8. `temperature` 0 or `top_k` 1: the first token wins. The first of a row's tokens is that with the highest
       logit, and of equals the one with the lowest id; this order decides every tie below, too.
    9. Weights: exp((logit - maximum) / temperature), as whole numbers (see `weights`). p is a token's weight
       over the sum of all that have survived so far.
    10. `min_p`: tokens with a p under min_p times the highest are cut.
    11. `top_k`: all but the first top_k are cut. Then `top_p`: tokens are kept from the first on until their p
        add up to top_p.
    12. The survivors race: argmax(weight / E), where E is exponential and a hash of (seed, position, token id).
        A row that nothing truncates (no min_p, top_k or top_p) races in two heats, which gives the same
        distribution: first every 512 consecutive ids as one entrant, E being a hash of (seed, position,
        -1 - group); then the tokens of the group that won.
    13. Logprobs where asked for: of the row that step 1 kept, or in `processed` mode of the distribution drawn
        from (of a greedy row: after step 6, at temperature 1).

    The position of the token being chosen is `len(request.token_ids)`. A row's result is a function of its own
    logits, tokens and parameters alone.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        processors: Sequence[LogitsProcessor] = (),
        threads: int | None = None,
        use_kernels: bool = True,
    ) -> None:
        """`vocab_size` is the model's: the logits' columns. `threads`: of the C kernels, as many as PyTorch's where
        it is None; `use_kernels` False keeps to PyTorch's operations. Raises ValueError where an eos id is outside
        the vocabulary.
        """
        if any(not 0 <= token_id < vocab_size for token_id in eos_token_ids):
            raise ValueError(f"eos ids {list(eos_token_ids)} are not all in the vocabulary (0 to {vocab_size - 1})")
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._logprobs_mode = logprobs_mode
        self._processors = ProcessorChain(processors)
        kernels = load_kernels() if use_kernels and device.type == "cpu" else None
        threads = threads or torch.get_num_threads()
        self._token_mask = TokenMask(device, kernels, threads)
        self._drawer: Drawer = (
            TorchDrawer(vocab_size, device) if kernels is None else KernelDrawer(kernels, vocab_size, threads)
        )
        self._kept = torch.empty(0, vocab_size, dtype=torch.float32, device=device)
        self._rows: dict[RequestKey, RowState] = {}
        self._plan = BatchPlan([], self._drawer, device)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: Sequence[Request], token_bitmask: Tensor | None = None
    ) -> list[SampledToken]:
        """The next token of each request, or its error.

        `logits` is [len(requests), vocab_size] in any float type; float32 logits are overwritten. `token_bitmask`
        is a grammar's, see `token_mask`. Each token that is returned must be appended to its request
        before the next call. Raises ValueError where the shapes do not fit, which is the caller's mistake.
        """
        if logits.dim() != 2 or logits.shape != (len(requests), self._vocab_size):
            raise ValueError(
                f"logits must be [{len(requests)} requests, {self._vocab_size} tokens], not {tuple(logits.shape)}"
            )
        if not requests:
            return []
        plan = self._plan_for(requests)
        wanted = plan.logprob_rows
        changes = token_bitmask is not None or plan.edits.any or bool(self._processors)
        raw = self._keep(logits, wanted) if wanted and self._logprobs_mode == "raw" and changes else None
        logits = logits.float().contiguous()
        if token_bitmask is not None:
            self._token_mask.apply(logits, token_bitmask)
        plan.edits.apply(logits)
        if self._processors:
            try:
                logits = self._processors.apply(logits, requests)
            except LogitsProcessorFault as fault:
                # It works on the whole batch, so nothing says whose fault it is. The next step starts it afresh.
                log.exception("a logits processor failed; the %d requests of this step end with it", len(requests))
                return [SampledToken(error=str(fault)) for _ in requests]

        drawn = plan.draw.draw(logits, wanted if self._logprobs_mode == "processed" else ())
        sampled = [
            _outcome(state, token_id, row_max)
            for state, token_id, row_max in zip(plan.states, drawn.token_ids, drawn.row_maxima, strict=True)
        ]
        if wanted:
            own = drawn.processed if self._logprobs_mode == "processed" else raw
            self._add_logprobs(sampled, wanted, logits if own is None else own, own is not None)
        for state, result in zip(plan.states, sampled, strict=True):
            if result.token_id is not None:
                state.append(result.token_id)
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], count: int) -> list[TokenLogprobs]:
        """The logprobs of the tokens that follow n prompt positions, with `count` alternatives each, always of
        the model's own distribution. `logits` is [n, vocab_size], row i that before `next_token_ids[i]`.

        Raises ValueError, with a message for that request, for ids outside the vocabulary and for logits that
        hold NaN or infinity.
        """
        if logits.shape != (len(next_token_ids), self._vocab_size):
            raise ValueError(
                f"logits must be [{len(next_token_ids)} positions, {self._vocab_size} tokens], "
                f"not {tuple(logits.shape)}"
            )
        if not next_token_ids:
            return []
        if not 0 <= min(next_token_ids) <= max(next_token_ids) < self._vocab_size:
            raise ValueError(f"the prompt holds a token id outside the vocabulary (0 to {self._vocab_size - 1})")
        logits = logits.float()
        if not bool(logits.amax(dim=1).isfinite().all()):
            raise ValueError(PROMPT_NOT_FINITE)
        rows = range(len(next_token_ids))
        return self._drawer.token_logprobs(logits, rows, next_token_ids, [count] * len(rows))

    def release(self, key: RequestKey) -> None:
        """Forget a request. One that is not known is ignored."""
        self._rows.pop(key, None)

    def _plan_for(self, requests: Sequence[Request]) -> BatchPlan:
        states = [self._state_of(request) for request in requests]
        if not self._plan.is_of(states):
            self._plan = BatchPlan(states, self._drawer, self._device)
        return self._plan

    def _state_of(self, request: Request) -> RowState:
        state = self._rows.get(request.key)
        if state is None or not state.describes(request):
            state = self._rows[request.key] = RowState(request, self._vocab_size, self._eos_token_ids)
        return state

    def _keep(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """A copy of these rows in float32, overwritten by the next. In memory that stays: fresh pages cost several
        times what the copying does."""
        if len(self._kept) < len(rows):
            self._kept = torch.empty(len(rows), self._vocab_size, dtype=torch.float32, device=self._device)
        kept = self._kept[: len(rows)]
        if len(rows) == len(logits):
            kept.copy_(logits)
        elif logits.dtype == torch.float32:
            torch.index_select(logits, 0, torch.tensor(rows, device=self._device), out=kept)
        else:
            kept.copy_(logits[list(rows)])
        return kept

    def _add_logprobs(
        self, sampled: Sequence[SampledToken], wanted: Sequence[int], logits: Tensor, only_wanted: bool
    ) -> None:
        """`logits` are of the whole batch, or of the wanted rows only."""
        chosen = [
            (place if only_wanted else row, row, token_id, self._plan.states[row].params.logprobs or 0)
            for place, row in enumerate(wanted)
            if (token_id := sampled[row].token_id) is not None
        ]
        if not chosen:
            return
        places, rows, token_ids, counts = (list(column) for column in zip(*chosen, strict=True))
        for row, entry in zip(rows, self._drawer.token_logprobs(logits, places, token_ids, counts), strict=True):
            sampled[row].logprobs = entry


def _outcome(state: RowState, token_id: int, row_max: float) -> SampledToken:
    if state.error is not None:
        return SampledToken(error=state.error)
    if math.isfinite(row_max):
        return SampledToken(token_id=token_id)
    return SampledToken(error=NOTHING_ALLOWED if row_max == -math.inf else NOT_FINITE)
