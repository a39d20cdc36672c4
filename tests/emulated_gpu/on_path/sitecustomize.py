"""Gives torch emulated GPUs where ``CUDA_EMULATED_GPUS`` says how many (tests/emulated_gpu)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _Around(importlib.abc.Loader):
    """Loads torch, before that the devices, and after that what stands in for its functions of CUDA."""

    def __init__(self, loader: importlib.machinery.SourceFileLoader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import emulated_cuda

        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        library = emulated_cuda.load_devices(Path(self._loader.path).parent)
        self._loader.exec_module(module)
        emulated_cuda.install(library)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
            spec.loader = _Around(spec.loader)
        return spec


if os.environ.get("CUDA_EMULATED_GPUS"):
    sys.meta_path.insert(0, _Finder())
