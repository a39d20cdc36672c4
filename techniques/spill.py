"""Spilling: a model far larger than the device's memory trains on one device.

The blocks' weights, gradients and optimizer state live in the host's memory. While one block is computed the
next one's weights are fetched; in the backward pass each block is fetched and computed again, and its
gradients go back to the host. The idea is Hydra's (Nagrecha and Kumar, 2021) and ZeRO-Offload's (Ren et al.,
2021). What is outside of the blocks, such as embeddings, stays on the device.

How that is done is told in ``saturn_airflow.parallelism.spilling``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.library import BaseTechnique, Parameters
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.parallelism.parallel import Parallel
    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class Spill(BaseTechnique):
    """Blocks streamed from the host's memory.

    Its parameters: ``resident``, how many blocks may be on the device at once, at least two; ``stay``, how
    many more are there for good, with their gradients and their optimizer; and ``folder``, where the host's
    memory does not suffice either: weights and gradients of the others are then in files there.
    """

    def why_not(self, job: Job, devices: int) -> str | None:
        """It uses one device."""
        return None if devices == 1 else "spill uses one device"

    def spares_memory(self, parameters: Parameters) -> bool:
        """Always: that is what it is for."""
        return True

    def candidates(self, job: Job, devices: int) -> Sequence[Parameters]:
        """Two and four blocks on the device at once."""
        return [{"resident": 2}, {"resident": 4}]

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure the candidates, then the faster with as many blocks staying as the memory seems to have
        room for."""
        from saturn_airflow.launch.failures import RanksFailedError
        from saturn_airflow.training.searching import how_many_stay

        parameters, seconds = session.fastest(self.candidates(job, len(devices)))
        stay = how_many_stay(job, parameters, session)
        if not stay:
            return parameters, seconds
        try:
            fuller, faster = session.fastest([{**parameters, "stay": stay}])
        except RanksFailedError as error:
            if error.failure.status not in (Status.OUT_OF_MEMORY, Status.LOST, Status.HUNG):
                raise
            return parameters, seconds
        return (fuller, faster) if faster < seconds else (parameters, seconds)

    def parallelize(
        self,
        model: nn.Module,
        ranks: Ranks,
        resident: int = 2,
        folder: str | None = None,
        stay: int = 0,
        **parameters: Any,
    ) -> Parallel:
        """Move the blocks' weights to the host's memory, and stream them through the device."""
        from saturn_airflow.launch.request import DoesNotFit
        from saturn_airflow.parallelism.spilling import Spilled

        if ranks.size != 1:
            raise DoesNotFit("spill uses one device")
        return Spilled(model, ranks, resident, folder, stay=stay)
