"""What training leaves of a model as it was, such as the base that adapters are trained on.

It is written once, into a folder ``frozen-<digest>`` beside the checkpoints, which name it with its digest.
Whether it is still as it was is seen from its numbers, not from ``requires_grad``: a teacher whose weights
are an average of its student's needs no gradient, and changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from saturn_airflow.launch.checkpoint_files import HASH

#: The least share of a checkpoint for which a folder of its own pays.
_SHARE = 0.1
# Words of 8 bytes that are mixed at once: 2 MiB.
_WORDS = 2**18
# 64 bits; the two factors of Mix13, as signed numbers.
_MASK, _ONE, _OTHER = 2**64 - 1, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class FrozenFolder(NamedTuple):
    """The folder with what training leaves alone.

    :param digest: that of its manifest.
    :param names: of the tensors in it that no checkpoint has.
    """

    folder: str
    digest: str
    names: frozenset[str]

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> FrozenFolder | None:
        """The one that a checkpoint with this manifest needs, if it needs one."""
        told = manifest.get("frozen")
        return None if told is None else cls(told["folder"], told[HASH], frozenset(told["names"]))

    def to_manifest(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of it."""
        return {"folder": self.folder, HASH: self.digest, "names": sorted(self.names)}


class UnchangedTensors:
    """Which tensors of this rank are as they were."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def remember(self, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Take ``tensors`` of these names as they are now."""
        self._digests = {name: digest(tensor) for name, tensor in tensors.items() if name in names}

    def changed(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """The names of those that are no longer what they were."""
        return {
            name
            for name, before in self._digests.items()
            if name not in tensors or digest(tensors[name]) != before
        }

    def forget(self, names: Collection[str]) -> None:
        """Ask about these no more."""
        self._digests = {name: known for name, known in self._digests.items() if name not in names}

    def names(self) -> set[str]:
        """Of those that are asked about."""
        return set(self._digests)


def worth_a_folder(frozen: Collection[str], lengths: Mapping[str, int]) -> bool:
    """Whether the tensors named are enough of a checkpoint, of which ``lengths`` are the bytes of all."""
    share = sum(lengths[name] for name in frozen) / (sum(lengths.values()) or 1)
    return bool(frozen) and share >= _SHARE


@torch.no_grad()
def digest(tensor: torch.Tensor) -> int:
    """64 bits that tell this rank's part of ``tensor`` from other numbers, where nobody tries to forge them.

    Each 8 bytes are mixed with a random word of their place (by Stafford's "Mix13", as SplitMix64 does) and
    added up, on the tensor's device and piece by piece: it takes little time and memory. A device is waited
    for once.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    keys, sums = _keys(local.device), list[torch.Tensor]()
    for piece in torch.split(flat, 8 * _WORDS):
        padding = -piece.numel() % 8
        if padding or piece.storage_offset() % 8:
            piece = torch.nn.functional.pad(piece, (0, padding)) if padding else piece.clone()
        words = piece.view(torch.int64) ^ keys[: piece.numel() // 8]
        _mix(words, 30, _ONE)
        _mix(words, 27, _OTHER)
        sums.append(words.sum())
    total = flat.numel()
    for one in torch.stack(sums).tolist():
        total = (total * 0x9E3779B97F4A7C15 + one) & _MASK
    return total


def _mix(words: torch.Tensor, shift: int, factor: int) -> None:
    words.bitwise_xor_((words >> shift) & (2 ** (64 - shift) - 1)).mul_(factor)


@lru_cache
def _keys(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), dtype=torch.int64, generator=generator).to(device)
