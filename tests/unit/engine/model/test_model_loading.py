"""Models that cannot be served are refused in one line that names what is wrong and what to do."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_driver import Driver, make_executor
from safetensors.torch import load_file, save_file

from services.engine.model.cuda_attention import varlen_handles
from services.engine.model.errors import ModelLoadError
from shared.model_source import ModelSourceError

CONFIG: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelSourceError) as caught:
        make_executor(folder, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(DOWN))
    assert DOWN in refusal(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({DOWN: torch.zeros(32, 47)}))
    message = refusal(folder)
    assert DOWN in message
    assert "(32, 47)" in message
    assert "(32, 48)" in message


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_a_missing_head_of_an_untied_model_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(folder)


def test_buffers_that_old_checkpoints_saved_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    make_executor(folder)


def test_tensors_that_are_no_floats_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({DOWN: torch.zeros(32, 48, dtype=torch.int8)}))
    assert "quantized" in refusal(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in refusal(folder)


def test_a_download_that_broke_off_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in refusal(folder)
    path.write_bytes(struct.pack("<Q", 1 << 40))
    assert "model.safetensors" in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
    )
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}})
    )
    assert "outside" in refusal(folder)


def test_shards_give_the_same_model_as_one_file(folder: Path, tmp_path: Path) -> None:
    prompt = [[3, 1, 4, 1, 5]]
    whole = Driver(make_executor(folder)).run(prompt, max_tokens=5)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == part}, folder / part)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Driver(make_executor(folder)).run(prompt, max_tokens=5) == whole


def test_a_quantized_model_is_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refusal(folder)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(folder: Path, kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0} | (factors if kind == "longrope" else {})
    edit_config(folder, rope_parameters=rope)
    assert kind in refusal(folder)


def test_an_architecture_without_an_attention_function_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4, seq_length=64)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    assert "Bloom" in refusal(tmp_path)


def test_a_missing_tensor_of_another_architecture_is_named(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**{k: v for k, v in CONFIG.items() if k != "num_key_value_heads"})
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    edit_weights(tmp_path, lambda tensors: tensors.pop(name))
    assert name in refusal(tmp_path)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    edit_config(folder, model_type="llama-of-tomorrow", architectures=["LlamaOfTomorrow"])
    assert "config.json" in refusal(folder)


def test_code_of_the_model_is_not_run_unless_asked_for(folder: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    assert "this ran" not in refusal(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "not-there" in refusal(tmp_path / "not-there")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    assert "GPU" in refusal(folder, device="cuda")


def test_a_length_beyond_the_models_own_is_refused_with_both_numbers(folder: Path) -> None:
    message = refusal(folder, max_model_len=65)
    assert "65" in message
    assert "64" in message


def test_a_length_that_the_kv_cache_cannot_hold_is_refused_with_both_numbers(folder: Path) -> None:
    message = refusal(folder, max_model_len=64, num_kv_blocks=15)
    assert "60 tokens" in message
    assert "64" in message
    assert "16" in message
    # 2 layers * 2 (keys, values) * 2 heads * 8 * 4 bytes = 256 bytes a token.
    message = refusal(folder, max_model_len=64, num_kv_blocks=None, kv_cache_memory=32 * 256 / 2**30)
    assert "32 tokens" in message
    assert "--kv-cache-memory" in message


def test_without_a_length_asked_for_the_kv_cache_sets_the_limit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = make_executor(folder, num_kv_blocks=15)
    assert executor.description.limits.max_model_len == 60
    assert any("60" in r.getMessage() and "64" in r.getMessage() for r in caplog.records)


def test_no_memory_at_all_for_a_kv_cache_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no memory"):
        make_executor(folder, num_kv_blocks=None, kv_cache_memory=1e-9)


def test_the_types_and_sizes_that_were_asked_for(folder: Path) -> None:
    executor = make_executor(folder, num_kv_blocks=None, kv_cache_memory=4096 * 256 / 2**30, dtype="float32")
    assert executor.num_blocks == 1024
    halves = make_executor(folder, num_kv_blocks=None, kv_cache_memory=4096 * 256 / 2**30, dtype="bfloat16")
    assert halves.num_blocks == 2048
    edit_config(folder, dtype="bfloat16")
    automatic = make_executor(folder, num_kv_blocks=None, kv_cache_memory=4096 * 256 / 2**30, dtype="auto")
    assert automatic.num_blocks == 2048


def test_float16_runs_on_a_cpu(folder: Path) -> None:
    wide, half = (
        Driver(make_executor(folder, dtype=dtype)).run([[3, 1, 4, 1, 5]], max_tokens=1)
        for dtype in ("float32", "float16")
    )
    assert len(half[0]) == len(wide[0]) == 1


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "handled"),
    [
        ((9, 0), 128, torch.bfloat16, True),
        ((8, 0), 64, torch.float16, True),
        ((7, 5), 64, torch.float16, False),  # flash attention needs Ampere
        ((9, 0), 128, torch.float32, False),
        ((9, 0), 60, torch.bfloat16, False),
        ((9, 0), 512, torch.bfloat16, False),
    ],
)
def test_flash_attention_is_chosen_only_where_it_runs(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, handled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert varlen_handles(head_dim, dtype, torch.device("cuda")) is handled
