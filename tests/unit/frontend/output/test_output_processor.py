"""The whole way of one choice: token ids in, deltas out, the same however steps group the tokens."""

import functools
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.generation import GenerationError
from services.frontend.output.collector import Collector, Delta
from services.frontend.output.processor import OutputOptions, OutputProcessor
from services.frontend.output.reasoning import make_reasoning_parser
from services.frontend.output.reasoning.parser import ReasoningParser
from services.frontend.tokenizer import Tokenizer
from shared.protocol import FinishReason, RequestOutput, TokenLogprobs
from tests.unit.frontend.output.strategies import cut


def drain(collector: Collector) -> Delta:
    """All that is unread of a single choice, as one delta."""
    return functools.reduce(Delta.merge, [delta for _, delta in collector.take()])


def process(
    tokenizer: Tokenizer,
    steps: Sequence[Sequence[int]],
    options: OutputOptions | None = None,
    reasoning: ReasoningParser | None = None,
    finish_reason: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> Delta:
    """All of a choice's output as one delta. The engine's finish reason comes with the last step."""
    collector = Collector(1)
    processor = OutputProcessor(tokenizer, options or OutputOptions(), collector, 0, reasoning)
    for number, step in enumerate(steps):
        output = RequestOutput(1, list(step))
        if number == len(steps) - 1:
            output.finish_reason, output.stop_token_id = finish_reason, stop_token_id
        if processor.accept(output):
            break
    delta = drain(collector)
    assert collector.done
    return delta


def each(ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_grouping_of_tokens_changes_nothing(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(
        st.lists(
            st.sampled_from(["<think>", "</think>", "<", "th", "\n", " ", "fox", "STOP", "北京", "🙂"]), max_size=12
        )
    )
    stop = tuple(data.draw(st.lists(st.sampled_from(["STOP", "fox", "\n\n", "京🙂", "</think>"]), max_size=2)))
    options = OutputOptions(stop, data.draw(st.booleans()), min_tokens=data.draw(st.integers(0, 6)))
    ids = tokenizer.encode("".join(text), add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    name = data.draw(st.sampled_from([None, "qwen3", "deepseek_r1"]))

    def run(steps: list[list[int]]) -> Delta:
        parser = make_reasoning_parser(name, tokenizer=tokenizer, prompt_token_ids=[]) if name else None
        return process(tokenizer, steps, options, parser)

    one_by_one = run(each(ids) or [[]])
    assert run([ids]) == one_by_one
    assert run(cut(data.draw, ids)) == one_by_one
    if name is None and one_by_one.stop_reason is None:
        assert one_by_one.content == tokenizer.decode(ids)
    assert one_by_one.completion_tokens == len(one_by_one.token_ids)
    assert 0 <= one_by_one.reasoning_tokens <= one_by_one.completion_tokens


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_hidden_reasoning_takes_its_tokens_along(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = "".join(
        data.draw(
            st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "\n", " ", "fox", "北京", "🙂"]), max_size=12)
        )
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = tuple(data.draw(st.lists(st.sampled_from(["fox fox", "\n\n\n", "</think>"]), max_size=1)))
    name = data.draw(st.sampled_from(["qwen3", "deepseek_r1"]))

    def run(steps: list[list[int]], hide: bool) -> Delta:
        collector = Collector(1)
        parser = make_reasoning_parser(name, tokenizer=tokenizer, prompt_token_ids=[])
        options = OutputOptions(stop, logprobs=True, hide_reasoning=hide)
        processor = OutputProcessor(tokenizer, options, collector, 0, parser)
        for step in steps:
            logprobs = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in step]
            if processor.accept(RequestOutput(1, list(step), logprobs=logprobs)):
                break
        else:
            processor.accept(RequestOutput(1, [], finish_reason=FinishReason.LENGTH, logprobs=of_the_end))
        return drain(collector)

    of_the_end: list[TokenLogprobs] | None = data.draw(st.sampled_from([None, []])) if ids else []
    shown, hidden = run(each(ids), False), run(each(ids), True)
    assert run([ids], True) == run(cut(data.draw, ids), True) == hidden
    assert (hidden.content, hidden.reasoning_tokens, hidden.finish_reason, hidden.completion_tokens) == (
        shown.content,
        shown.reasoning_tokens,
        shown.finish_reason,
        shown.completion_tokens,
    )
    num_hidden = len(shown.token_ids) - len(hidden.token_ids)
    assert hidden.token_ids == shown.token_ids[num_hidden:]
    assert [entry.token_id for entry in hidden.logprobs or ()] == hidden.token_ids
    assert num_hidden >= shown.reasoning_tokens
    if not stop:
        written = tokenizer.decode(hidden.token_ids, skip_special_tokens=False)
        assert written.lstrip().endswith(shown.content.lstrip())
        # A token may begin in the closing tag and end in the answer.
        assert "</think>".endswith(written.lstrip().removesuffix(shown.content.lstrip()).strip())


def test_the_first_output_carries_what_only_it_knows(tokenizer: Tokenizer) -> None:
    collector = Collector(1)
    processor = OutputProcessor(tokenizer, OutputOptions(logprobs=True), collector, 0)
    entry = TokenLogprobs(5, -1.0, 1)
    assert not processor.accept(RequestOutput(1, [5], cached_tokens=32, logprobs=[entry], prompt_logprobs=[entry]))
    assert processor.accept(RequestOutput(1, [6], FinishReason.LENGTH, logprobs=[entry]))
    delta = drain(collector)
    assert (delta.cached_tokens, delta.prompt_logprobs, delta.logprobs) == (32, [entry], [entry, entry])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_it_and_later_tokens_are_ignored(tokenizer: Tokenizer, include: bool) -> None:
    collector = Collector(1)
    processor = OutputProcessor(tokenizer, OutputOptions(("o wor",), include, logprobs=True), collector, 0)
    ids = tokenizer.encode("Hello world, hello", add_special_tokens=False)
    used = next(n for n in range(len(ids)) if "o wor" in tokenizer.decode(ids[:n]))
    logprobs = [TokenLogprobs(token_id, -1.0, 1) for token_id in ids]
    assert processor.accept(RequestOutput(1, ids, logprobs=logprobs))
    assert processor.accept(RequestOutput(1, [7], FinishReason.LENGTH))
    processor.fail(GenerationError("the engine is gone"))
    delta = drain(collector)
    assert delta.content == ("Hello wor" if include else "Hell")
    assert (delta.finish_reason, delta.stop_reason, delta.error) == (FinishReason.STOP, "o wor", None)
    assert (delta.token_ids, delta.logprobs, delta.completion_tokens) == (ids[:used], logprobs[:used], used)
    assert collector.done


def test_nothing_of_a_stop_string_is_sent_before_it_is_complete(tokenizer: Tokenizer) -> None:
    collector = Collector(1)
    processor = OutputProcessor(tokenizer, OutputOptions(("\n\nUser:",)), collector, 0)
    for token_id in tokenizer.encode("One\n\nUse", add_special_tokens=False):
        assert not processor.accept(RequestOutput(1, [token_id]))
    assert drain(collector).content == "One"
    processor.accept(RequestOutput(1, tokenizer.encode("less", add_special_tokens=False)[-1:]))
    assert drain(collector).content.startswith("\n\nUse")


def test_a_stop_string_counts_from_the_token_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox fox fox", add_special_tokens=False)
    # The number of tokens with which the first and the second "fox" are complete.
    first, second = (
        next(n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n]).count("fox") == k) for k in (1, 2)
    )
    for min_tokens, content in ((0, ""), (first - 1, ""), (first, "fox "), (second, "fox fox ")):
        for steps in (each(ids), [ids]):
            delta = process(tokenizer, steps, OutputOptions(("fox",), min_tokens=min_tokens))
            assert (delta.content, delta.stop_reason) == (content, "fox")


def test_the_text_of_the_token_that_ended_it_stays_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    for steps in (each(ids), [ids]):
        delta = process(tokenizer, steps, None, None, FinishReason.STOP, ids[-1])
        assert delta.content == tokenizer.decode(ids[:-1])
        assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, ids[-1])
        assert delta.completion_tokens == len(ids)
        shown = OutputOptions(include_stop_str_in_output=True)
        assert process(tokenizer, steps, shown, None, FinishReason.STOP, ids[-1]).content == "Hello world"


def test_eos_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    ids = [*tokenizer.encode("Hello", add_special_tokens=False), eos]
    delta = process(tokenizer, each(ids), OutputOptions(skip_special_tokens=False), None, FinishReason.STOP, eos)
    assert (delta.content, delta.finish_reason, delta.stop_reason) == ("Hello", FinishReason.STOP, None)


def test_half_a_character_at_the_end_is_one_replacement_and_may_complete_a_stop_string(deepseek: Tokenizer) -> None:
    ids = deepseek.encode("🙂", add_special_tokens=False)
    parts = [token_id for token_id in ids if len(deepseek.token_bytes(token_id)) < 4]
    assert parts
    assert process(deepseek, each(parts[:1])).content == "\ufffd"
    delta = process(deepseek, each(parts[:1]), OutputOptions(("\ufffd",)))
    assert (delta.content, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, "\ufffd")


@pytest.mark.parametrize(
    ("finish_reason", "status"),
    [(FinishReason.ERROR, 500), (FinishReason.OVERLOADED, 503), (FinishReason.HANDED_OVER, 503)],
)
def test_an_engines_failure_is_an_error(tokenizer: Tokenizer, finish_reason: FinishReason, status: int) -> None:
    collector = Collector(1)
    processor = OutputProcessor(tokenizer, OutputOptions(), collector, 0)
    processor.accept(RequestOutput(1, tokenizer.encode("Hi", add_special_tokens=False)))
    assert processor.accept(RequestOutput(1, [], finish_reason, error="NaN in the logits"))
    delta = drain(collector)
    assert delta.error is not None
    assert (delta.error.message, delta.error.status) == ("NaN in the logits", status)
    assert delta.finish_reason is None
    assert collector.done


def test_an_error_while_decoding_is_that_requests_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(2)
    broken, other = (OutputProcessor(tokenizer, OutputOptions(), collector, index) for index in range(2))

    class Broken:
        def push(self, token_ids: Sequence[int]) -> str:
            raise RuntimeError("Invalid prefix encountered")

        def flush(self) -> str:
            return ""

    monkeypatch.setattr(broken, "_detokenizer", Broken())
    with caplog.at_level(logging.ERROR):
        assert broken.accept(RequestOutput(1, [5]))
    assert "Invalid prefix" in caplog.text
    assert not other.accept(RequestOutput(2, tokenizer.encode("Hi", add_special_tokens=False)))
    (_, failed), (_, fine) = collector.take()
    assert failed.error is not None
    assert fine.content == "Hi"


def reasoning_delta(tokenizer: Tokenizer, ids: list[int], name: str = "qwen3", stop: tuple[str, ...] = ()) -> Delta:
    deltas = []
    for steps in (each(ids), [ids]):
        parser = make_reasoning_parser(name, tokenizer=tokenizer, prompt_token_ids=[])
        deltas.append(process(tokenizer, steps, OutputOptions(stop), parser))
    assert deltas[0] == deltas[1]
    return deltas[0]


def test_reasoning_tokens_are_those_between_the_tags(tokenizer: Tokenizer) -> None:
    encode = {text: tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "one two", "</think>")}
    answer = tokenizer.encode("\n\nthree", add_special_tokens=False)
    ids = [*encode["<think>"], *encode["one two"], *encode["</think>"], *answer]
    delta = reasoning_delta(tokenizer, ids)
    assert (delta.reasoning.strip(), delta.content.strip()) == ("one two", "three")
    assert not delta.content.startswith("\n")
    assert delta.reasoning_tokens == len(encode["one two"])
    assert delta.completion_tokens == len(ids)


def test_tags_that_are_special_tokens_are_seen_though_special_tokens_are_skipped(sentencepiece: Tokenizer) -> None:
    start, end, turn = (sentencepiece.token_id(name) for name in ("<think>", "</think>", "<|turn|>"))
    assert None not in (start, end, turn)
    why = sentencepiece.encode("fox", add_special_tokens=False)
    dog = sentencepiece.encode("dog", add_special_tokens=False)
    delta = reasoning_delta(sentencepiece, [start, *why, turn, end, *dog])  # pyright: ignore[reportArgumentType]
    assert (delta.reasoning.strip(), delta.content.strip()) == ("fox", "dog")
    assert delta.reasoning_tokens == len(why) + 1  # the skipped token stands inside the reasoning


def test_cut_off_inside_the_thinking(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two</thi", add_special_tokens=False)
    delta = reasoning_delta(tokenizer, ids, "deepseek_r1")
    assert (delta.reasoning, delta.content) == ("one two</thi", "")
    assert (delta.finish_reason, delta.reasoning_tokens) == (FinishReason.LENGTH, len(ids))


def test_stop_strings_are_found_in_the_reasoning_and_their_hold_back_goes_through_the_parser(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("why STOP</think>x", add_special_tokens=False)
    delta = reasoning_delta(tokenizer, ids, "deepseek_r1", ("STOP",))
    assert (delta.reasoning, delta.content, delta.stop_reason) == ("why ", "", "STOP")
    ids = tokenizer.encode("why</think>STO", add_special_tokens=False)
    delta = reasoning_delta(tokenizer, ids, "deepseek_r1", ("STOP", "</think>!"))
    assert (delta.reasoning, delta.content.strip(), delta.stop_reason) == ("why", "STO", None)
    ids = tokenizer.encode("why</think", add_special_tokens=False)
    delta = reasoning_delta(tokenizer, ids, "deepseek_r1", ("</think>!",))
    assert (delta.reasoning, delta.content) == ("why</think", "")


def test_no_token_at_all(tokenizer: Tokenizer) -> None:
    for reasoning in (None, make_reasoning_parser("deepseek_r1", tokenizer=tokenizer, prompt_token_ids=[])):
        delta = process(tokenizer, [[]], OutputOptions(("x",)), reasoning)
        assert (delta.content, delta.reasoning, delta.completion_tokens) == ("", "", 0)
        assert delta.finish_reason is FinishReason.LENGTH
