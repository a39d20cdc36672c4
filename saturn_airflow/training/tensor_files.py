"""Tensors in a folder of safetensors files, each rank its own part, and the manifest of such a folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from saturn_airflow.launch import checkpoint_files
from saturn_airflow.launch.checkpoint_files import HASH, MANIFEST

_FILE_BYTES = 2**30  # the tensors of one file are in memory twice while it is written


def write(folder: Path, tensors: dict[str, torch.Tensor], lengths: Mapping[str, int], group: Any) -> None:
    """Write what this rank has of ``tensors``; every rank must call this together.

    :param lengths: bytes of every tensor of all ranks.
    """
    writer = HuggingFaceStorageWriter(str(folder), _file_of(lengths), save_distributed=True)
    save_distributed(tensors, storage_writer=writer, process_group=group)


def read_into(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors of these names, as far as this rank has them; every rank must call this together."""
    load_distributed(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Of each tensor there is its shape."""
    described = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {n: entry.size for n, entry in described.items() if isinstance(entry, TensorStorageMetadata)}


def read_whole(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """All tensors whose names begin with ``prefix``, whole and on the CPU."""
    reader = HuggingFaceStorageReader(str(folder))
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is but one process
        load_distributed(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


def describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file, which is on the disk afterwards."""
    described = checkpoint_files.describe(path)
    sync(path)
    return described


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Write the manifest of a folder, which is on the disk afterwards.

    :returns: its digest.
    """
    path, digest = folder / MANIFEST, checkpoint_files.digest_of(manifest)
    path.write_text(json.dumps({**manifest, HASH: digest}))
    sync(path)
    sync(folder)
    return digest


def sync(path: Path) -> None:
    """Have a file or folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor is written to: files of bounded size."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers
