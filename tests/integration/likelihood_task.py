"""A small task for evaluation harnesses, how lm-eval turns it into requests, and its scores by transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

MAX_LENGTH = 2048  # lm-eval's default


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    choices: tuple[str, ...]
    answer: int


QUESTIONS = [
    Question("The capital of France is", ("Paris", "London", "a kind of bread"), 0),
    Question("Water boils at a temperature of", ("7 degrees", "100 degrees Celsius", "blue"), 1),
    Question("Two and two make", ("five", "four", "a 👩‍👩‍👧‍👦 family"), 1),
    Question("北京是", ("中国的首都。", "法国的首都。"), 0),
    Question("def add(a, b):\n    return", ("a + b", "None", "print(1)"), 0),
    Question("The opposite of hot is ", ("cold", "warm", "hot, hot, hot"), 0),  # it ends with a space
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Ein naïver Bäcker verkauft 3.14 Brötchen für 20 £ – „günstig“.",
    "春眠不觉晓，处处闻啼鸟。",
]


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-likelihood of a continuation, and whether it is what greedy decoding would give."""

    logprob: float
    greedy: bool


class Reference:
    """transformers' own model in float64, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def token_logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids) - 1, vocabulary]: of what follows each token but the last."""
        with torch.inference_mode():
            return torch.log_softmax(self._model(torch.tensor([list(token_ids)])).logits[0, :-1], -1)

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Scored:
        logprobs = self.token_logprobs([*context, *continuation])[len(context) - 1 :]
        chosen = logprobs.gather(-1, torch.tensor(list(continuation))[:, None])
        return Scored(chosen.sum().item(), logprobs.argmax(-1).tolist() == list(continuation))

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Every choice of every question, then every text, as lm-eval's TemplateLM cuts them into token ids."""
        pairs = [self.pair(question.context, f" {choice}") for question in QUESTIONS for choice in question.choices]
        return pairs + [([self.tokenizer.bos_token_id], self._encode(text)) for text in TEXTS]

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        # A space at the end of the context belongs to what follows it.
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, before = self._encode(context + continuation), self._encode(context)
        return before, whole[len(before) :]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def payload(model: str, prompt: Any) -> dict[str, Any]:
    """The body that lm-eval's `local-completions` sends for log-likelihoods (LocalCompletionsAPI._create_payload)."""
    return {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def parse(answer: dict[str, Any], context_lengths: Sequence[int], generated: int = 1) -> list[Scored]:
    """What lm-eval reads out of the answer (LocalCompletionsAPI.parse_logprobs), exact comparison included.

    `generated` is the number of tokens after the prompt, which lm-eval leaves out.
    """
    scored: list[Scored] = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, context_length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]
        kept = slice(context_length, len(logprobs["tokens"]) - generated)
        tokens, tops = logprobs["token_logprobs"][kept], logprobs["top_logprobs"][kept]
        greedy = all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))
        scored.append(Scored(sum(tokens), greedy))
    return scored
