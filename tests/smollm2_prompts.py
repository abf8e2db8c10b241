"""Prompts that tests run on SmolLM2: chats and bare texts, English, Chinese, code, digits and emoji."""

from pathlib import Path
from typing import Any

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


def smollm2_prompts(folder: Path) -> list[list[int]]:
    """The token ids of all of them, the chats first: those share their system prompt."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in CHAT
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats + TEXTS]
