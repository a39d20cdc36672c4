"""Whether an optimizer updates each number of a parameter by itself, so that parts of it can be apart.

Adam and SGD do. Adafactor keeps means over rows and columns, Muon makes matrices orthogonal, others scale or
clip by a norm: what they do to a part of a matrix is not the part of what they do to the matrix. It is found
out by letting the optimizer take a few steps with a small parameter, and with its two halves, each alone.
Where these differ, its steps may be right all the same if it computes with distributed tensors as they are
(DTensor gathers what a product or a norm needs): it takes the same steps with a small one of these. All that
is tried with gradients of usual size, and with very large, very small and missing numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.training.optim import tried_steps
from saturn_airflow.training.optim.update_formats import UpdateFormat

_LONGEST = 64  # enough for optimizers that treat small matrices as vectors
_SCALES = (1.0, 100.0, 1e-3, 10.0)  # of the gradients: some clip only what is large
_WITHIN = 1e-4  # float32's rounding and more, relative to how far the parameter went
# Where an optimizer computes in a lower format, as Muon does in bfloat16, sums over devices are rounded
# elsewhere: they are so many times the format's spacing apart.
_ROUNDINGS = 6
_FIX = "use another optimizer, or single, ddp, pipeline or spill"

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def refuse_coupled(
    what: str, make: Make, groups: Sequence[Mapping[str, Any]], *, known: bool = False
) -> None:
    """Refuse an optimizer that needs whole parameters where parameters are spread over devices.

    :param what: names the optimizer.
    :param make: makes it from its groups.
    :param known: whether it is known never to do otherwise for gradients of other sizes.
    :raises DoesNotFit: when steps of a part are not parts of steps, or its state is of other shapes.
    """
    for group in groups:
        for (shape, dim), parameter in sorted(
            _small_splits(group["params"]).items(), key=lambda found: found[0]
        ):
            options = {key: value for key, value in group.items() if key != "params"}
            device = group["params"][0].device
            whole = _values(shape, device)
            noted = UpdateFormat()
            usual = torch.ones_like(whole)
            try:
                with noted:
                    _, state = _after_steps(make, options, whole, usual, slice(None), dim)
            except Exception as error:
                raise DoesNotFit(
                    f"{what} can't be tried on a small parameter ({error}), and each device has a part of "
                    f"each parameter here; {_FIX}"
                ) from error
            spread_within = max(_WITHIN, _ROUNDINGS * torch.finfo(noted.lowest).eps)
            trial = _HalvesTrial(make, options, whole, dim, parameter, spread_within)
            try:
                coupled = trial.couples(usual)
            except Exception as error:
                raise DoesNotFit(_reason(what)) from error
            for times in () if known else _extremes(whole, dim):
                # Some raise at what is no number: they stop the job, and take no other steps.
                with contextlib.suppress(Exception):
                    coupled = coupled or trial.couples(times)
            if coupled:
                raise DoesNotFit(_reason(what))
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != whole.shape:
                    raise DoesNotFit(
                        f"{what} keeps {key!r} in a shape that is not its parameter's, and here each device "
                        f"has a part of each parameter; {_FIX}"
                    )


def _reason(what: str) -> str:
    return (
        f"{what} updates a part of a parameter otherwise than as a part of the whole, as optimizers do that "
        "use norms, means over rows or whole matrices, and here each device has a part of each parameter; "
        f"{_FIX}"
    )


def _extremes(whole: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """What gradients are multiplied by, of one trial after the other: what clips or skips rarely does so."""
    no_numbers = torch.ones_like(whole)
    no_numbers.narrow(dim, 0, 1).fill_(math.nan)
    return [torch.full_like(whole, 1e8), torch.full_like(whole, 1e-8), no_numbers]


@dataclass(frozen=True)
class _HalvesTrial:
    """Steps of a parameter, beside those of its halves.

    :param whole: what the parameter is at first.
    :param dim: the one along which it is halved.
    :param like: a parameter that is spread over the devices, and
    :param spread_within: how far steps of one like it may be off, relative to how far it went.
    """

    make: Make
    options: Mapping[str, Any]
    whole: torch.Tensor
    dim: int
    like: DTensor
    spread_within: float

    def couples(self, times: torch.Tensor) -> bool:
        """Whether the halves go elsewhere than the whole, and so does the whole where it is spread.

        :param times: what gradients are multiplied by.
        """
        middle = (self.whole.shape[self.dim] + 1) // 2
        after, *parts = (
            _after_steps(self.make, self.options, self.whole, times, rows, self.dim)[0]
            for rows in (slice(None), slice(None, middle), slice(middle, None))
        )
        if self._close(torch.cat(parts, self.dim), after, _WITHIN):
            return False
        spread = _after_steps_spread(self.make, self.options, self.whole, times, self.like)
        return not self._close(spread, after, self.spread_within)

    def _close(self, found: torch.Tensor, after: torch.Tensor, within: float) -> bool:
        # NaN equals NaN here. One that only one of them has stays, and no comparison with it is true.
        off = (found - after).abs().masked_fill(found.isnan() & after.isnan(), 0.0)
        return float(off.max()) <= within * float((after - self.whole).abs().nan_to_num(0.0).max())


def _small_splits(parameters: Sequence[nn.Parameter]) -> dict[tuple[tuple[int, ...], int], DTensor]:
    """The shapes of parameters that are spread, made smaller, and the dimension that each is spread along."""
    found: dict[tuple[tuple[int, ...], int], DTensor] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            for placement in parameter.placements:
                dim = getattr(placement, "dim", None)
                if dim is not None and parameter.shape[dim] > 1 and parameter.numel():
                    small = tuple(min(size, _LONGEST) for size in parameter.shape)
                    found.setdefault((small, dim % parameter.ndim), parameter)
    return found


def _values(shape: tuple[int, ...], device: torch.device, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def _after_steps(
    make: Make, options: Mapping[str, Any], whole: torch.Tensor, times: torch.Tensor, rows: slice, dim: int
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """The ``rows`` of a parameter after some steps of it alone, and the optimizer's state of it."""
    chosen = (*(slice(None) for _ in range(dim)), rows)
    parameter = nn.Parameter(whole[chosen].clone())
    optimizer = make([{**options, "params": [parameter]}])

    def give(step: int) -> None:
        parameter.grad = (times * _gradient(whole, step))[chosen].clone()

    tried_steps.take(optimizer, len(_SCALES), give)
    return parameter.detach(), optimizer.state[parameter]


def _gradient(whole: torch.Tensor, step: int) -> torch.Tensor:
    return _SCALES[step % len(_SCALES)] * _values(tuple(whole.shape), whole.device, step + 1)


def _after_steps_spread(
    make: Make, options: Mapping[str, Any], whole: torch.Tensor, times: torch.Tensor, like: DTensor
) -> torch.Tensor:
    """All of a parameter after the same steps of it, spread over the devices as ``like`` is."""

    def spread(values: torch.Tensor) -> DTensor:
        # None: nothing is sent, since every rank has drawn the same values.
        return distribute_tensor(values.clone(), like.device_mesh, like.placements, src_data_rank=None)

    parameter = nn.Parameter(spread(whole))
    optimizer = make([{**options, "params": [parameter]}])

    def give(step: int) -> None:
        parameter.grad = spread(times * _gradient(whole, step))

    tried_steps.take(optimizer, len(_SCALES), give)
    found = parameter.detach()
    assert isinstance(found, DTensor)
    return found.full_tensor().to(whole.device)  # what is offloaded is spread over the devices all the same
