"""Matchers, masks and the compiler, each by itself."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher

from services.engine.grammars import GrammarCompiler, GrammarFault, GrammarMatcher, MaskFiller, compile_threads
from services.engine.grammars import compiler as compiler_module
from services.engine.grammars import masks as masks_module
from services.frontend.tokenizer import Tokenizer
from shared.grammar_turns import turn_of
from shared.grammars import llguidance_grammar, parser_limits
from shared.sampling_params import SamplingParams
from tests.engine_harness import wait_until
from tests.grammar_harness import constrain

VOCAB_SIZE = 49_152
EOS = [2, 0]


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> GrammarCompiler:
    return GrammarCompiler(lambda: smollm2, VOCAB_SIZE, EOS)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def make(compiler: GrammarCompiler, kind: str, value: str, output: list[int] | None = None, **fields) -> GrammarMatcher:
    sampling = SamplingParams(structured_output=constrain(kind, value), **fields)
    return compiler.compile(sampling, output or []).result(timeout=60)


def allowed(filler: MaskFiller, matcher: GrammarMatcher) -> set[int]:
    mask = filler.start([0], [matcher]).bitmask([0])[0]
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    return MaskFiller(VOCAB_SIZE, EOS)


def test_the_mask_allows_exactly_the_tokens_that_can_follow(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer
) -> None:
    """Checked against the definition, over the whole vocabulary."""
    for text, rest in [("", "yes"), ("y", "es"), ("ye", "s")]:
        matcher = make(compiler, "choice", '["yes"]', tokenizer.encode(text, add_special_tokens=False) if text else [])
        expected = {
            token_id
            for token_id in range(VOCAB_SIZE)
            if tokenizer.token_bytes(token_id)
            and token_id not in tokenizer.special_token_ids
            and rest.encode().startswith(tokenizer.token_bytes(token_id))
        }
        assert allowed(filler, matcher) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}}'),
        ("json_schema", '{"type": "array", "items": {"type": ["string", "number"]}}'),
        ("json_object", ""),
        ("regex", "[a-z ]{3,20}|(?s:.{0,9})"),
    ],
)
def test_the_kinds_of_tokens_change_no_mask(
    compiler: GrammarCompiler, filler: MaskFiller, kind: str, value: str
) -> None:
    """What is looked up for many tokens at once is what each of them gets by itself."""
    grammar = llguidance_grammar(constrain(kind, value))
    _, table = compiler._vocabulary()
    plain = GrammarMatcher(LLMatcher(table.with_slices([]), grammar, limits=parser_limits()), frozenset(EOS))
    sliced = make(compiler, kind, value)
    rng = np.random.default_rng(0)
    for _ in range(60):
        tokens = allowed(filler, sliced)
        assert tokens == allowed(filler, plain)
        token_id = int(rng.choice(sorted(tokens - set(EOS)) or EOS))
        if token_id in EOS:
            break
        plain.accept(token_id)
        sliced.accept(token_id)


def test_masks_have_the_threads_of_this_process(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    asked: list[int] = []
    real = llguidance.LLExecutor
    monkeypatch.setattr(llguidance, "LLExecutor", lambda threads: (asked.append(threads), real(threads))[1])
    for usable, threads in ((1, 1), (3, 3), (64, masks_module.MAX_THREADS)):
        monkeypatch.setattr(masks_module, "usable_threads", lambda usable=usable: usable)
        filler = MaskFiller(VOCAB_SIZE, EOS)
        assert allowed(filler, make(compiler, "choice", '["yes"]'))
        filler.close()
        assert asked.pop() == threads


def test_at_the_end_only_eos_may_come(compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer) -> None:
    matcher = make(compiler, "choice", '["yes"]', tokenizer.encode("yes", add_special_tokens=False))
    assert matcher.done
    assert allowed(filler, matcher) == set(EOS)


def test_ignore_eos_keeps_eos_out_while_something_else_may_come(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer
) -> None:
    a = tokenizer.encode("a", add_special_tokens=False)
    assert set(EOS) < allowed(filler, make(compiler, "regex", "a+", a))
    assert not set(EOS) & allowed(filler, make(compiler, "regex", "a+", a, ignore_eos=True))
    assert allowed(filler, make(compiler, "regex", "a", a, ignore_eos=True)) == set(EOS)


def test_rollback_takes_back_what_was_accepted(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer
) -> None:
    value = json.dumps({"type": "object", "properties": {"a": {"enum": ["xyz", 17]}}, "required": ["a"]})
    matcher = make(compiler, "json_schema", value)
    masks = [allowed(filler, matcher)]
    tokens = tokenizer.encode('{"a": "xyz"', add_special_tokens=False)
    for token_id in tokens:
        assert token_id in masks[-1]
        matcher.accept(token_id)
        masks.append(allowed(filler, matcher))
    for num_tokens in range(1, len(tokens) + 1):
        matcher.rollback(num_tokens)
        assert matcher.error is None
        assert allowed(filler, matcher) == masks[len(tokens) - num_tokens]
        matcher.replay(tokens[len(tokens) - num_tokens :])
    assert allowed(filler, matcher) == masks[-1]
    with pytest.raises(ValueError, match="cannot be taken back"):
        matcher.rollback(len(tokens) + 1)


def test_rollback_of_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = make(compiler, "choice", '["yes"]')
    for token_id in tokenizer.encode("yes", add_special_tokens=False):
        matcher.accept(token_id)
    assert matcher.done
    matcher.rollback(1)
    assert not matcher.done
    assert matcher.error is None


def test_masks_come_in_the_rows_asked_for(compiler: GrammarCompiler, filler: MaskFiller) -> None:
    yes, no = make(compiler, "choice", '["yes"]'), make(compiler, "choice", '["no"]')
    masks = filler.start([0, 3, 4], [yes, None, no])
    whole = masks.bitmask([0, 3, 4])
    assert whole.shape == (3, VOCAB_SIZE // 32)
    assert (whole[1] == -1).all()
    assert (masks.bitmask([4, 0]) == whole[[2, 0]]).all()
    assert not (whole[0] == whole[2]).all()


def test_equal_grammars_are_compiled_once_and_copies_do_not_meet(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = compiler_module.llguidance_grammar
    monkeypatch.setattr(
        compiler_module,
        "llguidance_grammar",
        lambda structured, names: (compiled.append(structured.value), real(structured, names))[1],
    )
    value = '["once", "only"]'
    first = make(compiler, "choice", value)
    before = allowed(filler, first)
    second = make(compiler, "choice", value)
    second.accept(tokenizer.encode("on", add_special_tokens=False)[0])
    assert compiled == [value]
    assert allowed(filler, first) == before


def test_a_known_grammar_needs_no_thread(compiler: GrammarCompiler) -> None:
    sampling = SamplingParams(structured_output=constrain("choice", '["known"]'))
    compiler.compile(sampling, []).result(timeout=60)
    assert compiler.compile(sampling, []).done()


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED_GRAMMARS", 3)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_CHARACTERS", 1000)
    for number in range(6):
        make(compiler, "choice", json.dumps([f"n{number}"]))
    assert len(compiler._compiled) == 3
    make(compiler, "choice", json.dumps(["x" * 996]))
    assert len(compiler._compiled) == 1


def test_a_slow_grammar_does_not_keep_others_waiting(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = compiler_module.llguidance_grammar

    def slow(structured, names):
        if "slow" in structured.value:
            assert release.wait(60)
        return real(structured, names)

    monkeypatch.setattr(compiler_module, "llguidance_grammar", slow)
    waiting = [
        compiler.compile(SamplingParams(structured_output=constrain("choice", '["slow"]')), []) for _ in range(5)
    ]
    make(compiler, "choice", '["quick"]')
    assert not any(future.done() for future in waiting)
    release.set()
    assert [future.result(timeout=60).error for future in waiting] == [None] * 5


Held = tuple[GrammarCompiler, list[str], threading.Event]


@pytest.fixture
def held(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A compiler whose threads a grammar holds up; the values that they have begun with; what lets them go."""
    compiler = GrammarCompiler(lambda: smollm2, VOCAB_SIZE, EOS)
    begun: list[str] = []
    release = threading.Event()
    real = compiler_module.llguidance_grammar

    def slow(structured, names):
        begun.append(structured.value)
        assert release.wait(60)
        return real(structured, names)

    monkeypatch.setattr(compiler_module, "llguidance_grammar", slow)
    for number in range(compiler_module.COMPILE_THREADS):
        compiler.compile(SamplingParams(structured_output=constrain("choice", f'["held {number}"]')), [])
    wait_until(lambda: len(begun) == compiler_module.COMPILE_THREADS, "all threads have begun")
    yield compiler, begun, release
    release.set()
    compiler.close()


def test_what_nobody_waits_for_any_more_is_not_compiled(held: Held) -> None:
    compiler, begun, release = held
    num_known, characters = len(compiler._compiled), compiler._characters
    abandoned = SamplingParams(structured_output=constrain("choice", '["abandoned"]'))
    shared = SamplingParams(structured_output=constrain("choice", '["shared"]'))
    first, second, third = (compiler.compile(params, []) for params in (abandoned, shared, shared))
    assert first.cancel()
    assert second.cancel()
    release.set()
    assert third.result(timeout=60).error is None
    assert sorted(begun) == ['["held 0"]', '["held 1"]', '["shared"]']
    assert compiler._characters == characters + len('["shared"]')
    assert len(compiler._compiled) == num_known + 1
    assert compiler.compile(abandoned, []).result(timeout=60).error is None  # it may come again


def test_small_grammars_pass_large_ones(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, begun, release = held
    # As if they came at the same time, however slow the machine is.
    monkeypatch.setattr(compile_threads, "turn_of", lambda now, characters: turn_of(0.0, characters))
    values = [json.dumps([f"{name} " + "x" * size]) for name, size in (("large", 60_000), ("larger", 90_000))]
    values += [json.dumps([f"small {number}"]) for number in range(3)]
    waiting = [compiler.compile(SamplingParams(structured_output=constrain("choice", value)), []) for value in values]
    release.set()
    assert [future.result(timeout=60).error for future in waiting] == [None] * 5
    # Of two threads, one may begin with its small one just after the other with a large one.
    assert min(map(begun.index, values[:2])) >= 4


def test_closed_it_compiles_nothing_that_has_not_begun(held: Held) -> None:
    compiler, begun, _ = held
    before = list(begun)
    waiting = [
        compiler.compile(SamplingParams(structured_output=constrain("choice", f'["{number}"]')), [])
        for number in range(9)
    ]
    compiler.close()
    assert all(isinstance(future.exception(timeout=60), CancelledError) for future in waiting)
    assert begun == before


def test_prepared_it_reads_the_vocabulary_no_more(smollm2: Path) -> None:
    reads: list[Path] = []

    def folder() -> Path:
        reads.append(smollm2)
        return smollm2

    compiler = GrammarCompiler(folder, VOCAB_SIZE, EOS)
    compiler.prepare()
    assert len(reads) == 1
    assert make(compiler, "choice", '["yes"]').error is None
    assert len(reads) == 1


def test_without_a_vocabulary_it_is_prepared_to_refuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = GrammarCompiler(lambda: tmp_path, VOCAB_SIZE, EOS)
    compiler.prepare()
    assert "tokenizer.json" in caplog.text
    with pytest.raises(GrammarFault, match=r"tokenizer\.json"):
        make(compiler, "choice", '["a"]')


def test_a_vocabulary_that_cannot_be_read_is_not_read_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def folder() -> Path:
        reads.append(tmp_path)
        return tmp_path

    compiler = GrammarCompiler(folder, VOCAB_SIZE, EOS)
    for number in range(3):
        with pytest.raises(GrammarFault, match=r"tokenizer\.json"):
            make(compiler, "choice", f'["{number}"]')
    assert len(reads) == 1
    monkeypatch.setattr(compiler, "_vocabulary_fault", (compiler._vocabulary_fault[0], 0.0))  # pyright: ignore[reportOptionalSubscript]
    with pytest.raises(GrammarFault, match=r"tokenizer\.json"):
        make(compiler, "choice", '["later"]')
    assert len(reads) == 2


def test_thousands_of_choices_are_followed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = [f"choice {number} of many" for number in range(5000)]
    matcher = make(compiler, "choice", json.dumps(choices))
    for token_id in tokenizer.encode(choices[4321], add_special_tokens=False):
        matcher.accept(token_id)
    assert matcher.error is None
    assert matcher.done


def test_a_choice_that_begins_another_can_end_or_go_on(
    compiler: GrammarCompiler, filler: MaskFiller, tokenizer: Tokenizer
) -> None:
    matcher = make(compiler, "choice", '["", "yes", "yes please"]')
    assert set(EOS) & allowed(filler, matcher)
    for token_id in tokenizer.encode("yes", add_special_tokens=False):
        matcher.accept(token_id)
    tokens = allowed(filler, matcher)
    assert set(EOS) & tokens
    assert tokenizer.encode(" please", add_special_tokens=False)[0] in tokens


def test_an_expression_of_very_many_states_fails_before_it_has_them(
    compiler: GrammarCompiler, filler: MaskFiller
) -> None:
    matcher = make(compiler, "regex", "(.*[a-m].{25}x)*")
    for _ in range(20):
        tokens = allowed(filler, matcher)
        if matcher.error is not None:
            break
        matcher.accept(max(tokens))
    assert "too many" in str(matcher.error)


def test_a_panic_while_masks_are_filled_fails_the_requests_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As pyo3 raises them."""

    class Panicking:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            raise Panic("index out of bounds")

    filler = MaskFiller(VOCAB_SIZE, EOS)
    matcher = make(compiler, "choice", '["yes"]')
    allowed(filler, matcher)
    monkeypatch.setattr(filler, "_executor", Panicking())
    assert len(allowed(filler, matcher)) == VOCAB_SIZE
    assert "index out of bounds" in str(matcher.error)


def test_a_model_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    with pytest.raises(GrammarFault, match=r"tokenizer\.json"):
        make(GrammarCompiler(lambda: tmp_path, VOCAB_SIZE, EOS), "choice", '["a"]')


def test_a_model_without_eos_ends_where_the_grammar_does(smollm2: Path, tokenizer: Tokenizer) -> None:
    compiler, filler = GrammarCompiler(lambda: smollm2, VOCAB_SIZE, []), MaskFiller(VOCAB_SIZE, [])
    matcher = make(compiler, "choice", '["yes"]')
    assert allowed(filler, matcher)
    for token_id in tokenizer.encode("yes", add_special_tokens=False):
        matcher.accept(token_id)
    assert matcher.done
