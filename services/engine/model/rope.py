"""Rotary position embedding: the tables of cosines and sines, from a Hugging Face config.

Plain, linear, llama3 and yarn scaling; the formulas for the scaled ones are transformers' own.
"""

from typing import Any

import torch
from torch import Tensor

from services.engine.model.errors import ModelLoadError

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: Any) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and what belongs to it, from a transformers config (of version 4 or 5)."""
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return parameters


def check_rope_type(rope_type: str) -> None:
    """Raise ModelLoadError for scalings whose angles change with the length of a sequence: in a shared batch one
    request's length would change another's result."""
    if rope_type not in SUPPORTED_TYPES:
        raise ModelLoadError(
            f"The model's rope_type {rope_type!r} is not supported ({', '.join(SUPPORTED_TYPES)} are): set another in "
            "the rope_parameters of its config.json."
        )


def rope_tables(config: Any, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [length, head_dim / 2], of every position below `length`."""
    parameters = rope_parameters(config)
    rope_type = parameters["rope_type"]
    check_rope_type(rope_type)
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies, factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
