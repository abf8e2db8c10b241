"""Makes the matcher of a request's grammar, in threads beside the engine's loop: a schema may take long to compile.

The vocabulary's table is read from the model's folder by `prepare`, or when the first grammar comes. Compiled grammars
are kept, the least recently used leave first.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.engine.grammars.compile_threads import CompileThreads
from services.engine.grammars.matcher import GrammarMatcher
from shared.grammars import InvalidGrammar, llguidance_grammar, parser_limits
from shared.sampling_params import SamplingParams
from shared.structured_output import StructuredOutput
from shared.vocabulary import Vocabulary, VocabularyError, read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_CHARACTERS = 8 * 1024 * 1024  # of their values: what a grammar takes grows with its text
COMPILE_THREADS = 2
# A vocabulary that cannot be read is not tried again sooner: megabytes of JSON keep the interpreter from the loop.
VOCABULARY_RETRY_SECONDS = 60.0
# Tokens that a string of JSON may hold, by their length: llguidance looks at all of a kind at once where all may come.
# With its own three kinds, a string that may have no more than 40 characters took ten times as long.
_BLANKS, _TEXT = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]'
SLICES = [_BLANKS, *(f"{_TEXT}{{1,{length}}}" for length in (2, 4, 6, 8, 10, 16, 30)), f"{_TEXT}+"]

_Key = tuple[str, str, str, str, bool]


class GrammarFault(Exception):
    """This grammar cannot be matched here. The message is for the client."""


@dataclass(slots=True, eq=False)
class _Compilation:
    key: _Key
    matcher: "Future[LLMatcher]"
    num_waiting: int = 0  # requests, where it is not done yet


class GrammarCompiler:
    """`compile` may be called, and what it returns cancelled, from the loop's thread alone; the threads start with the
    first grammar."""

    def __init__(self, folder: Callable[[], Path], vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`folder` gives the model's, and may raise."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._threads: CompileThreads | None = None
        self._table: tuple[Vocabulary, LLTokenizer] | None = None
        self._table_lock = threading.Lock()
        self._vocabulary_fault: tuple[str, float] | None = None  # and when to try again
        self._compiled: OrderedDict[_Key, _Compilation] = OrderedDict()
        self._characters = 0

    def prepare(self) -> None:
        """Read the vocabulary now. Making its table keeps the interpreter for tenths of a second, which every stream
        would wait for once there are any. Where it cannot be read, requests are told why."""
        try:
            self._vocabulary()
        except GrammarFault as fault:
            logger.warning("Requests with grammars will fail: %s", fault)

    def compile(self, sampling: SamplingParams, output: Sequence[int]) -> Future[GrammarMatcher]:
        """A matcher that has read `output`. The future is done already where the grammar is known and there is no
        output; otherwise a thread completes it. It raises GrammarFault. Cancelled, it takes with it what no other
        request waits for: threads that work for nobody would keep everybody else's grammars waiting."""
        structured = sampling.structured_output
        if structured is None:
            raise ValueError("the request asks for no structured output")
        compilation = self._find(structured)
        compiled = compilation.matcher
        if compiled.done() and output:
            # To read a long output takes too long for the loop.
            return self._pool().submit(0, lambda: self._matcher(compiled.result(), sampling, output))
        made: Future[GrammarMatcher] = Future()

        def make(compiled: "Future[LLMatcher]") -> None:
            if not made.set_running_or_notify_cancel():
                return
            try:
                made.set_result(self._matcher(compiled.result(), sampling, output))
            except BaseException as error:
                made.set_exception(error)

        def let_go(made: "Future[GrammarMatcher]") -> None:
            if made.cancelled():
                self._let_go(compilation)

        if not compiled.done():
            compilation.num_waiting += 1
            made.add_done_callback(let_go)
        # In the thread that compiled it: one that waited for another would be missing where both are needed.
        compiled.add_done_callback(make)
        return made

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def _pool(self) -> CompileThreads:
        if self._threads is None:
            self._threads = CompileThreads(COMPILE_THREADS)
        return self._threads

    def _find(self, structured: StructuredOutput) -> _Compilation:
        key = (
            structured.kind,
            structured.value,
            structured.reasoning_start,
            structured.reasoning_end,
            structured.reasoning_opened,
        )
        known = self._compiled.get(key)
        if known is not None and not (known.matcher.done() and known.matcher.exception() is not None):
            self._compiled.move_to_end(key)
            return known
        if known is None:
            self._characters += len(structured.value)
        # Those that failed are tried again: they cost no more than the first time.
        matcher = self._pool().submit(len(structured.value), lambda: self._compile(structured))
        compilation = self._compiled[key] = _Compilation(key, matcher)
        while len(self._compiled) > MAX_CACHED_GRAMMARS or (
            self._characters > MAX_CACHED_CHARACTERS and len(self._compiled) > 1
        ):
            self._forget(next(iter(self._compiled)))
        return compilation

    def _forget(self, key: _Key) -> None:
        del self._compiled[key]
        self._characters -= len(key[1])

    def _let_go(self, compilation: _Compilation) -> None:
        """A request waits no longer."""
        compilation.num_waiting -= 1
        # Once a thread has begun, it goes on, and the next request for this grammar finds it.
        cancelled = not compilation.num_waiting and compilation.matcher.cancel()
        if cancelled and self._compiled.get(compilation.key) is compilation:
            self._forget(compilation.key)

    def _compile(self, structured: StructuredOutput) -> "LLMatcher":
        from llguidance import LLMatcher

        vocabulary, table = self._vocabulary()
        began = time.monotonic()
        try:
            grammar = llguidance_grammar(structured, vocabulary.special_names)
        except InvalidGrammar as error:
            raise GrammarFault(f"structured_output{error.place} {error.message}") from error
        matcher = LLMatcher(table, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarFault(f"the grammar cannot be compiled: {matcher.get_error().strip()[:300]}")
        seconds = time.monotonic() - began
        if seconds > 1.0:
            logger.warning("A grammar of %d characters took %.1f s to compile", len(structured.value), seconds)
        return matcher

    def _matcher(self, compiled: "LLMatcher", sampling: SamplingParams, output: Sequence[int]) -> GrammarMatcher:
        matcher = GrammarMatcher(compiled.deep_copy(), frozenset(self._eos_ids), sampling.ignore_eos)
        matcher.replay(output)
        if matcher.error is not None:
            raise GrammarFault(matcher.error)
        return matcher

    def _vocabulary(self) -> "tuple[Vocabulary, LLTokenizer]":
        with self._table_lock:
            if self._table is None:
                began = time.monotonic()
                if self._vocabulary_fault is not None and began < self._vocabulary_fault[1]:
                    raise GrammarFault(self._vocabulary_fault[0])
                try:
                    vocabulary = read_vocabulary(self._folder(), self._vocab_size, self._eos_ids)
                    table = make_token_table(vocabulary, self._eos_ids)
                except Exception as error:
                    fault = str(error)
                    if not isinstance(error, VocabularyError):
                        logger.exception("The model's vocabulary cannot be read")
                        fault = f"the model's vocabulary cannot be read for grammars: {error}"
                    self._vocabulary_fault = fault, time.monotonic() + VOCABULARY_RETRY_SECONDS
                    raise GrammarFault(fault) from error
                self._table = vocabulary, table
                logger.info(
                    "Read the vocabulary of %d tokens for grammars in %.2f s",
                    self._vocab_size,
                    time.monotonic() - began,
                )
            return self._table


def make_token_table(vocabulary: Vocabulary, eos_ids: Sequence[int]) -> "LLTokenizer":
    """llguidance's form of a vocabulary. Several eos ids may end a grammar; a model may also have none."""
    from llguidance import LLTokenizer

    table: Any = _Table(vocabulary, eos_ids)
    return LLTokenizer(table, eos_token=list(eos_ids) or None, slices=SLICES)


class _Table:
    """What LLTokenizer asks of its argument: a table without a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = eos_ids[0] if eos_ids else None

    def __call__(self, text: object) -> list[int]:
        raise NotImplementedError("the engine has no tokenizer: grammars must be made with no_forcing")
