"""One device, nothing parallel: what every other technique must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.library import BaseTechnique, Parameters
from saturn_airflow.model.jobs import Job

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class Single(BaseTechnique):
    """The whole model and the whole batch on one device.

    Its parameter ``recompute`` computes the blocks' activations again in the backward pass instead of keeping
    them.
    """

    holds_own_steps = True
    holds_trainers = True

    def why_not(self, job: Job, devices: int) -> str | None:
        """It uses one device."""
        return None if devices == 1 else "single uses one device"

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure it plainly, and with ``recompute`` where that does not fit."""
        from saturn_airflow.training.searching import first_that_fits, refuse_hopeless

        if job.trainer:  # whose arguments say whether to recompute
            return session.fastest([{}])
        # To recompute saves memory and costs time: it is only measured where the rest does not fit.
        refuse_hopeless(self.name, {"recompute": True}, job, len(devices), session)
        return first_that_fits(session, self.candidates(job, len(devices)), [{"recompute": True}])

    def parallelize(
        self, model: nn.Module, ranks: Ranks, recompute: bool = False, **parameters: Any
    ) -> nn.Module:
        """Put the model on the device."""
        from saturn_airflow.launch.request import DoesNotFit
        from saturn_airflow.parallelism.blocks import recompute_blocks

        if ranks.size != 1:
            raise DoesNotFit("single uses one device")
        if recompute:
            recompute_blocks(model)
        return model.to(ranks.device)
