"""Makes a Hugging Face folder, as the hub has it, of SmolLM2's GGUF file.

transformers reads GGUF, but what it saves afterwards is not what the model's authors published; each difference
that is put right here changed tokens, or made other programs refuse the folder.
"""

import json
from pathlib import Path
from typing import Any

_CONTEXT_LENGTH = 8192


def convert(gguf: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bf16 safetensors of `gguf` into the new `folder`."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions may leave the weights packed unless told
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    folder.mkdir(parents=True)
    _save_weights(model, folder)
    _save_configs(model.config, folder)
    _save_tokenizer(tokenizer, folder)


def _save_weights(model: Any, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied to the embeddings
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _save_configs(config: Any, folder: Path) -> None:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,  # <|im_end|>
            "hidden_act": config.hidden_act,
            "hidden_size": config.hidden_size,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": _CONTEXT_LENGTH,
            "mlp_bias": False,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "pad_token_id": 2,
            "rms_norm_eps": 1e-5,  # GGUF's float32 says 9.999999747378752e-06
            "rope_scaling": None,
            "rope_theta": rope["rope_theta"],
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": config.vocab_size,
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # The model learnt digits one by one; GGUF only names this ("smollm"), and transformers does not know the name.
    digits = {"type": "Digits", "individual_digits": True}
    backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    backend["post_processor"] = None
    _write_json(folder / "tokenizer.json", backend)

    special = [token["content"] for token in backend["added_tokens"]]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {str(token.pop("id")): token for token in backend["added_tokens"]},
            "additional_special_tokens": [token for token in special if token in ("<|im_start|>", "<|im_end|>")],
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _CONTEXT_LENGTH,
            "chat_template": tokenizer.chat_template,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
