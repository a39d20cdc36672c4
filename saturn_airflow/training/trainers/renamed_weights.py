"""Weights that a ``Trainer``'s checkpoints have under other names than the model, and so would not load.

Transformers writes some models, such as ViT, under the names of an earlier version; ``from_pretrained`` knows
both, but a Trainer that is resumed leaves out what the model calls otherwise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

_FILE = "saturn_renamed.safetensors"
# As transformers names the files of a whole model.
_WRITTEN = "model*.safetensors"


def keep(model: nn.Module, checkpoint: Path) -> None:
    """Write beside ``checkpoint``'s weights those of ``model`` that it has not under their names."""
    written: set[str] = set()
    for path in checkpoint.glob(_WRITTEN):
        with safe_open(path, framework="pt") as file:
            written |= set(file.keys())
    if not written:
        return  # such as adapters, which are loaded by their own names
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    known = {_place(tensor) for name, tensor in tensors.items() if name in written}
    lacking: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name not in written and _place(tensor) not in known:
            known.add(_place(tensor))
            lacking[name] = tensor.detach().contiguous()
    if lacking:
        save_file(lacking, checkpoint / _FILE)


def load(model: nn.Module, checkpoint: Path) -> None:
    """Give ``model`` what :func:`keep` wrote."""
    if (checkpoint / _FILE).is_file():
        tensors = model.state_dict()
        with torch.no_grad():
            for name, kept in load_file(checkpoint / _FILE).items():
                tensors[name].copy_(kept)


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """What tensors that are one and the same have in common, such as tied weights."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
