"""The model on a GPU: flash attention over block tables gives what PyTorch's operations give. Skips without a GPU."""

from pathlib import Path

import pytest
import torch
import transformers
from model_driver import Driver, RecordingSampler, make_executor

from services.engine.model.attention import AttentionOptions, TorchAttention
from services.engine.model.batch import build_batch
from services.engine.model.cuda_attention import VarlenAttention
from services.engine.model.kv_pool import KVLayer, KVPool
from services.engine.request import Request, RequestKey, ScheduledRequest
from shared.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("in_place", [True, False], ids=["block-tables", "gathered"])
def test_attention_equals_that_of_pytorch(block_size: int, window: int | None, in_place: bool) -> None:
    torch.manual_seed(1)
    device = torch.device("cuda")
    pool = KVPool([KVLayer(2, 64)], num_blocks=64, block_size=block_size, dtype=torch.bfloat16, device=device)
    pool.keys[0].normal_()
    pool.values[0].normal_()
    free = torch.randperm(64).tolist()
    scheduled: list[ScheduledRequest] = []
    for i, (length, before) in enumerate([(1, 0), (1, 77), (30, 0), (17, 40)]):
        blocks = [free.pop() for _ in range(-(-(length + before) // block_size))]
        request = Request(RequestKey(b"test", i), [0] * (length + before), length, SamplingParams(), block_table=blocks)
        scheduled.append(ScheduledRequest(request, before, length))
    batch = build_batch(scheduled, block_size=block_size, num_blocks=64, device=device)
    query = torch.randn(len(batch.token_ids), 6, 64, dtype=torch.bfloat16, device=device)
    options = AttentionOptions(0.125, window)
    attention = VarlenAttention(pool)
    if in_place and not attention._reads_block_tables:
        pytest.skip("this PyTorch's flash attention reads no block tables")
    attention._reads_block_tables = in_place
    expected = TorchAttention(pool).attend(query, 0, batch, options)
    torch.testing.assert_close(attention.attend(query, 0, batch, options), expected, atol=2e-2, rtol=2e-2)


def test_a_model_runs_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    prompts = [[5, 9, 3], [7] * 40]
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.15)):
        samplers = [RecordingSampler(), RecordingSampler()]
        for device, sampler in zip(("cpu", "cuda"), samplers, strict=True):
            executor = make_executor(tmp_path, sampler, dtype=dtype, device=device, block_size=16, num_kv_blocks=64)
            Driver(executor, budget=16).run(prompts, max_tokens=1)
        for i, prompt in enumerate(prompts):
            on_cpu, on_gpu = (sampler.logits[i][len(prompt) - 1].float().cpu() for sampler in samplers)
            assert (on_cpu - on_gpu).abs().max() < tolerance * max(1.0, on_cpu.abs().max().item())


def test_the_kv_cache_takes_its_share_of_the_gpus_memory(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    executor = make_executor(tmp_path, device="cuda", num_kv_blocks=None, gpu_memory_utilization=0.2, block_size=16)
    free, total = torch.cuda.mem_get_info()
    assert executor.num_blocks > 0
    assert total - free < 0.25 * total
