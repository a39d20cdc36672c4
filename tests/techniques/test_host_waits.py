"""No technique has the host wait for its device between a batch and the optimizer's step on it.

Here the device is the CPU: what would be on a GPU are the tensors that are made for the ranks' device, and
what follows from them. Those that are made for the host may be read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import EACH_TECHNIQUE, Strategy, job
from cells import request as train_request
from tiny import Plain
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saturn_airflow.model.jobs import HParams
from saturn_airflow.training import loop, stepping
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.ranks import launch as launch_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")
MAKES = ("tensor", "empty", "frombuffer")


class _OnHost:
    """Tensors that were made for the host, as no device was named."""

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        self._made.append(tensor)

    def __contains__(self, tensor: Any) -> bool:
        return any(_place(tensor) == _place(made) for made in self._made)


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Waits(TorchFunctionMode):
    """Notes what would make the host wait for a device, as far as Python asks for it."""

    def __init__(self, noted: list[str], on_host: _OnHost) -> None:
        super().__init__()
        self._noted, self._on_host = noted, on_host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in READS and not (args and args[0] in self._on_host):
            self._noted.append(name)
        made = func(*args, **kwargs)
        if name in MAKES and kwargs.get("device") is None and isinstance(made, torch.Tensor):
            self._on_host.add(made)
        elif name == "new_tensor" or (name in MAKES and name == "tensor"):
            self._noted.append("a copy from the host")
        return made


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same, as far as torch asks for it itself."""

    def __init__(self, noted: list[str], on_host: _OnHost) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted, self._on_host = noted, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0] not in self._on_host:
            self._noted.append(str(func))
        return func(*args, **(kwargs or {}))


def tied() -> nn.Module:
    """A model of which the first and the last stage of a pipeline have a weight in common."""
    model = Plain()
    last, first = model[4], model[1]
    last.up.weight = first.up.weight  # type: ignore[union-attr]
    return model


def normed() -> nn.Module:
    """A model with a BatchNorm, which looks at the whole batch."""
    return nn.Sequential(nn.BatchNorm1d(16), *Plain())


def some(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss over the samples of all classes but the first."""
    return cross_entropy(outputs, targets, reduction="sum", ignore_index=0), (targets != 0).sum()


def mean_of_some(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same as a mean: Saturn finds out what it is a mean over."""
    return cross_entropy(outputs, targets, ignore_index=0)


def waits(technique: str, loss: str, folder: str, model: str, ranks: Ranks) -> dict[int, list[str]]:
    """Of each step what had the host wait before the optimizer's turn, and in the last that it did later."""
    accumulate = 1 if "normed" in model else 2
    hparams = HParams(batches=4, accumulate=accumulate, clip_grad_norm=0.5, precision="float64")
    a_job = job(
        load_model=model,
        load_dataloader="tiny:vectors",
        loss_function=loss,
        hparams=hparams,
    )
    found: dict[int, list[str]] = {}
    noted: list[str] = []
    take, take_step = stepping.take, optimizers.take_step

    def watched(training: Any, *given: Any) -> Any:
        noted.clear()
        on_host = _OnHost()
        with Waits(noted, on_host), Reads(noted, on_host):
            taken = take(training, *given)
        found[-1] = list(noted)
        return taken

    def stepped(*given: Any) -> None:
        found[len(found) - (-1 in found)] = list(noted)
        take_step(*given)

    stepping.take, optimizers.take_step = watched, stepped  # type: ignore[assignment]
    try:
        loop.train(
            train_request(a_job, Strategy(technique), folder), replace(ranks, _emit=lambda event: None)
        )
    finally:
        stepping.take, optimizers.take_step = take, take_step
    return found


@pytest.mark.parametrize("loss", ["tiny:vector_loss", "test_host_waits:some", "test_host_waits:mean_of_some"])
@pytest.mark.parametrize("strategy", EACH_TECHNIQUE, ids=str)
def test_nobody_waits_before_the_step(strategy: Strategy, loss: str, tmp_path: Path) -> None:
    model = "test_host_waits:tied" if strategy.technique == "pipeline" else "tiny:plain"
    check(launch_ranks(waits, strategy.technique, loss, str(tmp_path), model, size=strategy.devices))


def test_nobody_waits_for_the_statistics_of_the_whole_batch(tmp_path: Path) -> None:
    model = "test_host_waits:normed"
    check(launch_ranks(waits, "ddp", "tiny:vector_loss", str(tmp_path), model, size=2))


def check(everyones: list[dict[int, list[str]]]) -> None:
    """Check what each rank has noted."""
    for found in everyones:
        assert sorted(found) == [-1, 0, 1, 2, 3]
        assert "tolist" in found[-1]  # for the loss, when the step has been asked for
        # In the first step it is looked at what the model does.
        assert [found[step] for step in (1, 2, 3)] == [[], [], []]
