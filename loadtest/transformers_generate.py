"""transformers' `generate` in a process of its own, driven by `bench_serve`: the yardstick beside the server.

One JSON line in, {"prompts": [[token id, …], …], "max_tokens": n}, one out, {"seconds": s}. Every batch is padded
on the left, decoded greedily in bf16, and runs to max_tokens whatever it says.
"""

import json
import sys
import time
from typing import Any


def main(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"seconds": _generate(model, request["prompts"], request["max_tokens"])}), flush=True)


def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> float:
    import torch

    longest = max(len(prompt) for prompt in prompts)
    pad = model.generation_config.pad_token_id
    input_ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
        )
    seconds = time.perf_counter() - started
    assert output.shape[1] == longest + max_tokens
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])
