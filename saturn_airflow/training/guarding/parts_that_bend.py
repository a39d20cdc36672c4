"""Refusing to cut what bends, or shows nothing: parts of a batch need not make up the whole where they do in
compared steps.
"""

from __future__ import annotations

from saturn_airflow.launch.request import ChangesResultError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.guarding.first_steps import PlainSteps


def refuse_bent(plain: PlainSteps, job: Job, parallel: Parallel, technique: str) -> None:
    """Refuse parts of a batch where its loss or gradients do not grow as those of samples do, or show none.

    :param technique: and the number of its devices.
    :raises ChangesResultError: where the loss is no linear function of its means, and batches are cut; where
        they are cut, and nothing has a gradient in the compared steps; where gradients do not grow as losses
        do, and those of samples are of another size here, or those of parameters are computed in parts.
    """
    accumulates = job.hparams.accumulate > 1 and not job.in_micro_batches
    name = technique.partition(" ")[0]
    all_the_same = f"If it may all the same, Job(trust=[{name!r}]) leaves it unchecked"
    cut = parallel.shares > 1 or parallel.pieces > 1 or accumulates
    if cut and not plain.shows and not job.own_step:
        raise ChangesResultError(
            f"{technique} may change the result: no weight has a gradient in any of the batches that are "
            "compared with one device, as of a loss of pairs where a batch has none, so that nothing tells "
            "what parts of others make. Have the first batches of the data ones that train something, or use "
            f"one device, with accumulate=1. {all_the_same}"
        )
    if plain.bent_loss and cut:
        raise ChangesResultError(
            f"{technique} may change the result: the loss is no linear function of the means over a batch "
            "that it is made of, as where they are clamped, or left out where they are large, which does "
            "otherwise with those of parts. Apply that to the losses of single samples, before mean() or "
            f"sum(); or use one device, with accumulate=1. {all_the_same}"
        )
    in_parts = accumulates or parallel.ranks.size > 1
    if plain.bent and (parallel.shares > 1 or (in_parts and plain.bent_by_hooks)):
        raise ChangesResultError(
            f"{technique} may change the result: the gradient of {plain.bent!r} does not grow as the loss "
            "does, as where a hook or a backward pass of the job's own clamps it or adds noise, and parts of "
            "it would not add up to the whole batch's. Clip by clip_grad_norm, or let the optimizer do it; "
            f"or use one device, with accumulate=1. {all_the_same}"
        )
