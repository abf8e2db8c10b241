"""Reads a checkpoint's safetensors by memory map, and accounts for every tensor: what is missing, of the wrong
shape, or left over is an error that names it. Nothing is unpickled.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.model.errors import ModelLoadError
from shared.model_source import ModelSourceError, read_json

INDEX_NAME = "model.safetensors.index.json"
# Buffers that old checkpoints saved though they follow from the config.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.masked_bias$|\.attn\.bias$")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`. Raises ModelLoadError."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            weight_map = read_json(index).get("weight_map")
        except ModelSourceError as error:
            raise ModelLoadError(str(error)) from error
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} has no weight_map: the checkpoint is broken.")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ModelLoadError(f"{index} names files outside its folder.")
    else:
        names = ["model.safetensors"]
        if not (folder / names[0]).is_file():
            names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks {missing[0]}, which {INDEX_NAME} names: download the model again.")
    if not names:
        raise ModelLoadError(
            f"{folder} holds no *.safetensors. Other weight formats are not read: they may run code when loaded, or "
            "are not the original weights; convert the model with transformers' save_pretrained."
        )
    return [folder / name for name in names]


class Checkpoint:
    """Tensors by name, each taken once. They are views of the memory-mapped files until they are converted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
                self._left.update(dict.fromkeys(file.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path} cannot be read as safetensors: {error}") from error

    def reopened(self) -> "Checkpoint":
        """The same files mapped anew. What was read through this one's map leaves memory with the last view of it."""
        return Checkpoint(self._folder)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, in the checkpoint's own type. Raises ModelLoadError where it is missing or not of `shape`."""
        file = self._left.pop(name, None)
        if file is None:
            raise ModelLoadError(
                f"The checkpoint in {self._folder} has no tensor {name}, which its config.json asks for."
            )
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"The tensor {name} in {self._folder} has shape {tuple(tensor.shape)}; config.json asks for {shape}."
            )
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"The tensor {name} in {self._folder} is {tensor.dtype}: quantized checkpoints are not supported."
            )
        return tensor

    def finish(self) -> None:
        """Raise ModelLoadError if tensors are left that no part of the model took: the config is another model's."""
        unexpected = sorted(name for name in self._left if not _DERIVED.search(name))
        if unexpected:
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise ModelLoadError(
                f"The checkpoint in {self._folder} has the tensor {unexpected[0]}{more}, for which its config.json "
                "has no place: this architecture is not fully supported."
            )
        self._left = {}
