"""The C kernels give what the PyTorch operations give, over random shapes; attention stays within its own context."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.model.attention import Attention, AttentionOptions, TorchAttention
from services.engine.model.batch import Batch, build_batch
from services.engine.model.cpu_attention import KernelAttention
from services.engine.model.cpu_decoder_ops import KernelDecoderOps
from services.engine.model.decoder_ops import Heads, TorchDecoderOps
from services.engine.model.kernel_structures import AttentionArguments
from services.engine.model.kernels import MAX_QUERY_GROUP, Kernels, load_kernels
from services.engine.model.kv_pool import KVLayer, KVPool
from services.engine.request import Request, RequestKey, ScheduledRequest
from shared.sampling_params import SamplingParams

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = st.sampled_from(list(TOLERANCES))
HEADS = st.tuples(st.integers(1, 3), st.integers(1, 5))  # KV heads, query heads of each
HEAD_DIMS = st.sampled_from([2, 8, 16, 24, 64, 80, 128])


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = load_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def make_pool(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, num_blocks: int = 64) -> KVPool:
    pool = KVPool(
        [KVLayer(kv_heads, head_dim)],
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool.keys[0].normal_()
    pool.values[0].normal_()
    return pool


def make_batch(shapes: list[tuple[int, int]], pool: KVPool, seed: int) -> Batch:
    """`shapes` holds each sequence's (query length, tokens before it); the blocks lie in random order."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(pool.num_blocks, generator=generator).tolist()
    scheduled: list[ScheduledRequest] = []
    for i, (length, before) in enumerate(sorted(shapes, key=lambda shape: shape[0] > 1)):
        end = length + before
        blocks = [free.pop() for _ in range(-(-end // pool.block_size))]
        request = Request(RequestKey(b"test", i), [0] * end, end, SamplingParams(), block_table=blocks)
        scheduled.append(ScheduledRequest(request, before, length))
    return build_batch(scheduled, block_size=pool.block_size, num_blocks=pool.num_blocks, device=torch.device("cpu"))


def reference(query: torch.Tensor, pool: KVPool, batch: Batch, options: AttentionOptions) -> torch.Tensor:
    """Row by row from the definition, in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    keys, values = (x[0].flatten(0, 1).double() for x in (pool.keys, pool.values))
    group = query.shape[1] // keys.shape[1]
    for i, length in enumerate(batch.query_lens_list):
        for offset in range(length):
            row = int(batch.query_starts[i]) + offset
            position = batch.context_lens_list[i] - length + offset
            first = 0 if options.window is None else max(0, position - options.window + 1)
            slots = [
                int(batch.block_tables[i, p // pool.block_size]) * pool.block_size + p % pool.block_size
                for p in range(first, position + 1)
            ]
            for head in range(query.shape[1]):
                scores = keys[slots, head // group] @ query[row, head].double() * options.scale
                if options.soft_cap is not None:
                    scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
                out[row, head] = scores.softmax(0) @ values[slots, head // group]
    return out


@QUICK
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=4),
    heads=HEADS,
    head_dim=HEAD_DIMS,
    block_size=st.sampled_from([1, 4, 16, 48]),
    dtype=DTYPES,
    window=st.none() | st.integers(1, 50),
    soft_cap=st.none() | st.just(3.0),
    seed=st.integers(0, 1000),
)
def test_attention_equals_its_definition(
    kernels: Kernels,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    pool = make_pool(heads[0], head_dim, block_size, dtype, num_blocks=512)
    batch = make_batch(shapes, pool, seed)
    query = torch.randn(len(batch.token_ids), heads[0] * heads[1], head_dim).to(dtype)
    options = AttentionOptions(head_dim**-0.5, window, soft_cap)
    expected = reference(query, pool, batch, options)
    attentions: list[Attention] = [KernelAttention(pool, kernels), TorchAttention(pool)]
    for attention in attentions:
        out = attention.attend(query, 0, batch, options)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [24, 64, 256])
@pytest.mark.parametrize("group", [59, 61, MAX_QUERY_GROUP])
def test_as_many_query_heads_as_are_allowed_share_a_kv_head(
    kernels: Kernels, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(group)
    pool = make_pool(1, head_dim, 16, dtype)
    for shapes in ([(5, 130), (3, 0)], [(1, 90), (1, 3), (1, 64), (1, 31), (3, 7)]):
        batch = make_batch(shapes, pool, seed=1)
        query = torch.randn(len(batch.token_ids), group, head_dim).to(dtype)
        options = AttentionOptions(head_dim**-0.5)
        out = KernelAttention(pool, kernels).attend(query, 0, batch, options)
        expected = reference(query, pool, batch, options)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("make", [TorchAttention, KernelAttention])
def test_what_others_left_in_a_block_is_not_seen(kernels: Kernels, make: Any) -> None:
    pool = make_pool(2, 16, 8, torch.float32)
    batch = make_batch([(1, 2), (1, 12), (5, 6)], pool, seed=1)
    attention = make(pool, kernels) if make is KernelAttention else make(pool)
    query = torch.randn(len(batch.token_ids), 4, 16)
    options = AttentionOptions(0.25)
    clean = attention.attend(query, 0, batch, options)
    used = {
        int(batch.block_tables[i, p // 8]) * 8 + p % 8
        for i, length in enumerate(batch.context_lens_list)
        for p in range(length)
    }
    unused = [slot for slot in range(64 * 8) if slot not in used]
    for tensor in (pool.keys[0], pool.values[0]):
        tensor.flatten(0, 1)[unused] = float("nan")
    assert torch.equal(attention.attend(query, 0, batch, options), clean)


def interleave(pool: KVPool) -> None:
    """Bring the pool into the order that kernels/attention_dot.h describes."""
    blocks, block_size, kv_heads, head_dim = pool.keys[0].shape
    stripes = blocks * block_size // 16
    keys = pool.keys[0].view(stripes, 16, kv_heads, head_dim // 2, 2).permute(0, 2, 3, 1, 4)
    values = pool.values[0].view(stripes, 8, 2, kv_heads, head_dim).permute(0, 3, 1, 4, 2)
    pool.keys[0], pool.values[0] = keys.contiguous(), values.contiguous()


@QUICK
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=6),
    heads=HEADS,
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([16, 48]),
    window=st.none() | st.integers(1, 50),
    soft_cap=st.none() | st.just(3.0),
    seed=st.integers(0, 1000),
)
def test_an_interleaved_pool_gives_the_same_bits(
    kernels: Kernels,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    if not kernels.long.can_interleave(head_dim, block_size):
        pytest.skip("this processor has no bf16 dot products")
    torch.manual_seed(seed)
    pool = make_pool(heads[0], head_dim, block_size, torch.bfloat16, num_blocks=512)
    batch = make_batch(shapes, pool, seed)
    query = torch.randn(len(batch.token_ids), heads[0] * heads[1], head_dim).bfloat16()
    options = AttentionOptions(head_dim**-0.5, window, soft_cap)
    plain = KernelAttention(pool, kernels).attend(query, 0, batch, options)
    # What others left beside a sequence's tokens, in its last block as well, is not seen.
    used = {
        int(batch.block_tables[i, p // block_size]) * block_size + p % block_size
        for i, length in enumerate(batch.context_lens_list)
        for p in range(length)
    }
    unused = [slot for slot in range(512 * block_size) if slot not in used]
    for tensor in (pool.keys[0], pool.values[0]):
        tensor.flatten(0, 1)[unused] = float("nan")
    interleave(pool)
    attention = KernelAttention(pool, kernels)
    attend = attention._attend

    def attend_interleaved(arguments: AttentionArguments) -> None:
        arguments.kv_heads, arguments.head_dim, arguments.interleaved = heads[0], head_dim, 1
        attend(arguments)

    attention._attend = attend_interleaved
    assert torch.equal(attention.attend(query, 0, batch, options), plain)


@pytest.mark.parametrize("make", [TorchAttention, KernelAttention])
def test_nan_in_one_request_leaves_the_others_alone(kernels: Kernels, make: Any) -> None:
    pool = make_pool(2, 16, 8, torch.float32)
    batch = make_batch([(1, 2), (1, 12), (5, 6)], pool, seed=1)
    attention = make(pool, kernels) if make is KernelAttention else make(pool)
    query = torch.randn(len(batch.token_ids), 4, 16)
    clean = attention.attend(query, 0, batch, AttentionOptions(0.25))
    pool.values[0][batch.block_tables[1, 0].long()] = float("nan")
    dirty = attention.attend(query, 0, batch, AttentionOptions(0.25))
    assert dirty[1].isnan().all()
    others = [row for row in range(batch.num_tokens) if row != 1]
    assert torch.equal(dirty[others], clean[others])


@QUICK
@given(
    rows=st.integers(1, 70),
    heads=HEADS,
    head_dim=HEAD_DIMS,
    size=st.integers(1, 70),
    dtype=DTYPES,
    normed=st.booleans(),
)
def test_decoder_operations_equal_those_of_pytorch(
    kernels: Kernels, rows: int, heads: tuple[int, int], head_dim: int, size: int, dtype: torch.dtype, normed: bool
) -> None:
    torch.manual_seed(rows)
    ops, plain = KernelDecoderOps(kernels, dtype), TorchDecoderOps()

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])

    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    sums = residual.clone(), residual.clone()
    close(ops.add_rms_norm(x, sums[0], weight, 1e-5), plain.add_rms_norm(x, sums[1], weight, 1e-5))
    assert torch.equal(sums[0], sums[1])
    gate_up = torch.cat([torch.randn(rows, size) * 30, torch.randn(rows, size)], dim=1).to(dtype)
    close(ops.silu_and_multiply(gate_up), plain.silu_and_multiply(gate_up))

    kv_heads, group = heads
    pools = [make_pool(kv_heads, head_dim, 4, dtype) for _ in range(2)]
    for pool in pools:
        pool.keys[0].zero_()
        pool.values[0].zero_()
    batch = make_batch([(rows, 3)], pools[0], seed=rows)
    norm = torch.rand(head_dim).to(dtype) if normed else None
    layout = Heads(kv_heads * group, kv_heads, head_dim, norm, norm)
    qkv = torch.randn(len(batch.token_ids), (kv_heads * group + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(80, head_dim // 2)
    queries = [
        which.rotate_and_store(qkv, layout, 1e-5, angles.cos(), angles.sin(), batch, pool, 0)[: batch.num_tokens]
        for which, pool in zip((ops, plain), pools, strict=True)
    ]
    close(queries[0], queries[1])
    close(pools[0].keys[0], pools[1].keys[0])
    assert torch.equal(pools[0].values[0], pools[1].values[0])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_nan_survives_the_decoder_operations(kernels: Kernels, dtype: torch.dtype) -> None:
    ops = KernelDecoderOps(kernels, dtype)
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 7] = float("nan")
    normed = ops.rms_norm(x, torch.ones(40, dtype=dtype), 1e-5)
    assert normed[1].isnan().all()
    assert not normed[[0, 2]].isnan().any()
    assert ops.silu_and_multiply(x)[1].isnan().any()
