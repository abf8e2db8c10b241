"""From a request's fields to the sampler's parameters and the output's options, checked against the model."""

from typing import TypeVar

from services.frontend.generation import new_seed
from services.frontend.generation_config import SamplingDefaults
from services.frontend.http.errors import bad_request
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.schemas.generation import GenerationFields
from services.frontend.output.processor import OutputOptions
from services.frontend.tokenizer import Tokenizer
from shared.sampling_params import MAX_SEED, InvalidSamplingParams, SamplingParams, check_sampling_params
from shared.structured_output import StructuredOutput

# Of all of them together: each stop string's characters are states of a matcher, each bad word's are tokenized.
_MAX_STOP_CHARACTERS = 4096
_MAX_BAD_WORDS_CHARACTERS = 65_536
_MAX_BAD_WORD_CHARACTERS = 1024  # a character may take four tokens, and the link takes MAX_LIST_LENGTH

Value = TypeVar("Value")


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    *,
    max_tokens: int,
    bad_words: list[list[int]],
    vocab_size: int,
    defaults: SamplingDefaults,
    structured_output: StructuredOutput | None = None,
) -> SamplingParams:
    """The request's sampling parameters; its seed is the first choice's (see `choice_seed`). `bad_words` are token
    ids (see `bad_word_ids`); `defaults` are the model's; `structured_output` has been checked. Raises ApiError 400."""
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs set to true", "top_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt_logprobs = request.prompt_logprobs
    else:
        logprobs = request.logprobs
        prompt_logprobs = request.prompt_logprobs
        if request.echo and logprobs is not None:
            # The echoed prompt is scored like the text that follows it.
            prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=min(max(_or(request.top_k, defaults.top_k), 0), vocab_size),
        min_p=_or(request.min_p, defaults.min_p),
        seed=_seed(request.seed),
        min_tokens=_or(request.min_tokens, 0),
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=request.stop_token_ids or [],
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=request.logit_bias or {},
        allowed_token_ids=request.allowed_token_ids,
        bad_words_token_ids=bad_words,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output,
    )
    try:
        check_sampling_params(params, vocab_size)
    except InvalidSamplingParams as error:
        raise bad_request(str(error), error.field) from error
    return params


def choice_seed(seed: int, choice: int) -> int:
    """Each choice of a prompt draws its own noise, and the same one every time."""
    return (seed + choice) & MAX_SEED


def output_options(request: ChatCompletionRequest | CompletionRequest) -> OutputOptions:
    """What becomes of the tokens of each choice."""
    return OutputOptions(
        stop=tuple(request.stop or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        min_tokens=_or(request.min_tokens, 0),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        logprobs=wants_logprobs(request),
        hide_reasoning=isinstance(request, ChatCompletionRequest) and request.include_reasoning is False,
    )


def wants_logprobs(request: ChatCompletionRequest | CompletionRequest) -> bool:
    if isinstance(request, ChatCompletionRequest):
        return bool(request.logprobs)
    return request.logprobs is not None


def check_counts(request: GenerationFields, *, max_n: int, max_stop: int) -> None:
    """Raise ApiError 400 where a list or a number is over the server's limits."""
    if request.n is not None and request.n > max_n:
        raise bad_request(f"n must be at most {max_n}, not {request.n}", "n")
    if request.stop is not None and len(request.stop) > max_stop:
        raise bad_request(f"stop must hold at most {max_stop} strings, not {len(request.stop)}", "stop")
    _check_characters("stop", request.stop, _MAX_STOP_CHARACTERS)
    _check_characters("bad_words", request.bad_words, _MAX_BAD_WORDS_CHARACTERS)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _seed(seed: int | None) -> int:
    # vLLM takes -1 for none; another negative seed is as good as any.
    return new_seed() if seed is None or seed == -1 else seed & MAX_SEED


def _check_characters(field: str, texts: list[str] | None, limit: int) -> None:
    length = sum(map(len, texts or ()))
    if length > limit:
        raise bad_request(f"{field} must have at most {limit} characters in all, not {length}", field)


def bad_word_ids(request: GenerationFields, tokenizer: Tokenizer) -> list[list[int]]:
    """Each of the bad words as it is written at the start of a text and after a space (vLLM's rule).

    Raises ApiError 400.
    """
    banned: list[list[int]] = []
    for word in request.bad_words or ():
        plain = word.lstrip()
        if not plain or len(plain) > _MAX_BAD_WORD_CHARACTERS:
            raise bad_request(f"bad_words must hold words of 1 to {_MAX_BAD_WORD_CHARACTERS} characters", "bad_words")
        at_start = tokenizer.encode(plain, add_special_tokens=False)
        after_space = tokenizer.encode(" " + plain, add_special_tokens=False)
        if at_start:
            banned.append(at_start)
        if at_start and len(after_space) == len(at_start) and after_space[0] != at_start[0]:
            banned.append(after_space)
    return banned
