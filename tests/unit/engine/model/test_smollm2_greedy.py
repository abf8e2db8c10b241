"""SmolLM2's greedy output in float32 is transformers' own, token for token, however its requests are run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_driver import Driver, RecordingSampler, make_executor

from services.engine.executor.torch_executor import TorchExecutor

MAX_TOKENS = 64
CHAT = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 50.",
    "Explain photosynthesis to a child.",
    "Translate to French: Good morning, my friend.",
    "法国的首都是哪里？",
    "请用中文写一首关于春天的短诗。",
    "今天天气很好，我们去公园散步吧。",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
]
TEXTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "const sum = (a, b) => {",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "床前明月光，疑是地上霜。",
    "机器学习是人工智能的一个分支，",
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8,",
    "😀 🎉 means",
    "In 1969, Apollo 11",
]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(smollm2)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in CHAT
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats + TEXTS]


@pytest.fixture(scope="module")
def executor(smollm2: Path) -> TorchExecutor:
    return make_executor(smollm2, block_size=16, num_kv_blocks=512)


@pytest.fixture(scope="module")
def outputs(executor: TorchExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """All in one batch, which every other way of running them is compared with."""
    return Driver(executor).run(prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def test_every_token_is_the_one_that_transformers_finds_likeliest(
    reference: Any, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    # By induction this is what greedy generation gives, at a fraction of its time.
    assert len(prompts) >= 20
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


def test_generate_itself_gives_the_same(reference: Any, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for i in (5, 10):
        prompt = torch.tensor([prompts[i]])
        # The mask is given, since generate would guess that the pad id (which ends each message here) is padding.
        generated = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
        )
        assert generated[0, len(prompts[i]) :].tolist() == outputs[i]


def test_one_by_one(executor: TorchExecutor, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    for i in range(0, len(prompts), 5):
        assert Driver(executor).run([prompts[i]], MAX_TOKENS) == [outputs[i]]


def test_in_chunks(executor: TorchExecutor, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    assert Driver(executor, budget=37).run(prompts, MAX_TOKENS) == outputs


def test_preempted_again_and_again(executor: TorchExecutor, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    assert Driver(executor, preempt_every=9).run(prompts[8:14], MAX_TOKENS) == outputs[8:14]


def test_with_blocks_of_shared_prefixes(
    executor: TorchExecutor, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    # The chats share their system prompt; the second round finds whole prompts in the cache.
    driver = Driver(executor, budget=150, share_prefixes=True)
    assert driver.run([*prompts[:5], *prompts[:5]], MAX_TOKENS) == [*outputs[:5], *outputs[:5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_alone_in_company_and_in_chunks(
    smollm2: Path, prompts: list[list[int]], dtype: str
) -> None:
    sampler = RecordingSampler()
    executor = make_executor(smollm2, sampler, block_size=16, num_kv_blocks=256, dtype=dtype)
    if type(executor._attention).__name__ != "KernelAttention":
        pytest.skip("no C compiler here; PyTorch's attention makes no such promise")

    def logits(budget: int, batch: list[list[int]]) -> dict[int, dict[int, torch.Tensor]]:
        sampler.logits = {}
        Driver(executor, budget=budget).run(batch, max_tokens=6)
        return sampler.logits

    alone = logits(1 << 30, prompts[:1])[0]
    for other in (logits(1 << 30, prompts)[0], logits(13, prompts[:3])[0], logits(1 << 30, prompts[:2])[0]):
        assert alone.keys() == other.keys()
        for position, row in alone.items():
            assert torch.equal(row, other[position])
