"""Techniques that train otherwise than one device does, each in a way of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from saturn_airflow.library import BaseTechnique
from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.replicating import Replicated


class _Wrong(BaseTechnique):
    """Each is right but for one thing; ``how`` much may be said."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        return Parallel(model, ranks)


class LossOff(_Wrong):
    def parallelize(self, model: nn.Module, ranks: Any, off: float = 0.01, **parameters: Any) -> Any:
        class Off(Parallel):
            def backward(self, *args: Any) -> Any:
                total, over = super().backward(*args)
                return total * (1 + off), over

        return Off(model, ranks)


class GradientsScaled(_Wrong):
    def parallelize(self, model: nn.Module, ranks: Any, by: float = 2.0, **parameters: Any) -> Any:
        class Scaled(Parallel):
            def finish_gradients(self) -> None:
                self.scale_gradients(by)

        return Scaled(model, ranks)


class OneDropped(_Wrong):
    def parallelize(self, model: nn.Module, ranks: Any, zeros: bool = False, **parameters: Any) -> Any:
        class Dropped(Parallel):
            def finish_gradients(self) -> None:
                dropped = self.model.blocks[1].bias
                dropped.grad = torch.zeros_like(dropped) if zeros else None

        return Dropped(model, ranks)


class ZerosForMissing(_Wrong):
    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Filled(Parallel):
            def finish_gradients(self) -> None:
                for p in self.model.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad

        return Filled(model, ranks)


class ForwardTwice(_Wrong):
    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Twice(Parallel):
            def backward(self, objective: Any, batch: Any, samples: int, *args: Any) -> Any:
                with torch.no_grad():
                    objective.run(self.module, objective.prepare(batch, samples)[0])
                return super().backward(objective, batch, samples, *args)

        return Twice(model, ranks)


class EvaluatesOldWeights(_Wrong):
    """Evaluates with the weights that it had at first."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        at_first = copy.deepcopy(model).eval()

        class Old(Parallel):
            def evaluate(self, objective: Any, batch: Any, samples: int) -> Any:
                own, self.module = self.module, at_first
                try:
                    return super().evaluate(objective, batch, samples)
                finally:
                    self.module = own

        return Old(model, ranks)


class MeanOfMeans(_Wrong):
    """Every share counts the same, whatever its size."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Means(Replicated):
            def backward(self, objective: Any, batch: Any, samples: int, scale: float, last: bool) -> Any:
                total, over = super().backward(objective, batch, samples, scale / max(1, samples), last)
                return total / max(1, samples), over / max(1, samples)

        ddp = DistributedDataParallel(model)
        return Means(model, ranks, ddp, share=ranks.rank, shares=ranks.size)


class CountsOtherwise(_Wrong):
    """Loss and gradients are those of one device, but it says that they are means over something else."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Counts(Parallel):
            def backward(self, *args: Any) -> Any:
                total, over = super().backward(*args)
                self.scale_gradients(2.0)
                return 2 * total, 2 * over

        return Counts(model, ranks)


class StaleParameter(_Wrong):
    """One parameter stays as it was."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        at_first = model.leave.bias.detach().clone()  # type: ignore[union-attr]

        class Stale(Parallel):
            def drop_gradients(self) -> None:
                super().drop_gradients()
                self.model.leave.bias.data.copy_(at_first)

        return Stale(model, ranks)


class OtherSchedule(_Wrong):
    """It changes the weights behind the optimizer's back."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Other(Parallel):
            def finish_gradients(self) -> None:
                with torch.no_grad():
                    self.model.leave.weight.mul_(1 + 1e-4)

        return Other(model, ranks)


class Blames(_Wrong):
    """What it does to the model makes that raise."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        raise JobError("the model raised what it does not raise by itself")


class Right(_Wrong):
    pass


TECHNIQUES = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, _Wrong)
}
del TECHNIQUES["_Wrong"]
