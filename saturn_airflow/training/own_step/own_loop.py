"""The training loop around a training step of the model's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from saturn_airflow import library
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit
from saturn_airflow.launch.users_code import common_to_alike
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import adapting
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import reporting, resuming, rng
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.frozen import digest
from saturn_airflow.training.guarding.own_step_spot_checks import OwnStepSpotChecks
from saturn_airflow.training.job_training import Training
from saturn_airflow.training.own_step import hooks, lightning, shared_step
from saturn_airflow.training.own_step.configured import check_hparams, functions_of
from saturn_airflow.training.own_step.own_step_state import OwnStepState
from saturn_airflow.training.own_step.user_step import OwnStep
from saturn_airflow.training.own_step.validation import OwnEvaluation


class OwnStepTraining(Training):
    """One job's training on this rank, its model taking the steps."""

    own: OwnStep
    state: OwnStepState
    counted = None
    awaits_copies = False  # what its hooks change, and when, is its own affair

    def _look_at_model(self, model: nn.Module) -> None:
        hooks.check(model, str(self.job.load_model), evaluated=self.job.load_eval_dataloader is not None)
        if hooks.is_own(model, "configure_optimizers"):
            check_hparams(self.hparams)

    def _parallelize(self, technique: library.BaseTechnique, model: nn.Module) -> None:
        request = self.request
        with common_to_alike():
            returned = technique.parallelize(model, self.ranks, **request.parameters, own_step=True)
            if not isinstance(returned, Parallel) and returned is not model:
                raise DoesNotFit(
                    f"{request.technique} wraps the model, whose own training step would be passed by "
                    "(own_step=True)"
                )
            self.parallel = adapting.adapt(returned, model, self.ranks, request.technique)

    @contextmanager
    def compared(self, job: Job) -> Iterator[Training]:
        own = copy.copy(self)
        own.job, own.hparams, own.metrics = job, job.hparams, {}
        own._prepare()
        own.own.hold_schedulers()
        own._begin_to_train()
        yield own
        # The model may have noted the optimizers that it configured.
        self._prepare()

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.own.optimizers

    def _prepare(self) -> None:
        self.own = OwnStep(self.job, self.parallel, self.total)
        self.optimizer = self.own.optimizers[0]
        variables = resuming.job_globals(self, functions_of(self.own.schedulers))
        self.state = OwnStepState(self.parallel, self.own, self.aliases, variables)
        self.logged: dict[str, float] = {}
        if self.eval_data is not None:
            self.evaluation = OwnEvaluation(self.job, self.parallel, self.own, self.eval_data)

    def _schedule(self) -> None:
        """Its schedulers are as the checkpoint left them."""

    def _make_spot_checks(self, bare: nn.Module | None) -> OwnStepSpotChecks:
        return OwnStepSpotChecks(self, lambda: self.own)

    def _look_at_alike(self) -> None:
        if not hooks.is_own(self.parallel.model, "configure_optimizers"):
            return
        for other in self.request.alike:
            try:
                check_hparams(other.hparams)
            except JobError as error:
                self.ranks.emit("broken", job=other.name, reason=str(error))

    def _train_step(self, batch: GlobalBatch, save_due: bool) -> tuple[bool, bool]:
        if self.is_past_end:
            self.own.hold_schedulers()
        rng.seed(self.hparams.seed, "step", self.step, 0, self.parallel.share)
        self.own.place(batch, self.step)
        if batch.position.batch == 0:
            hooks.call(self.parallel.model, "on_train_epoch_start")
        loss, self.logged = shared_step.take(self.own, self.parallel, batch, schedule=not self.is_past_end)
        asked = self.ranks.sums([self.ranks.stop_requested(), save_due and self.ranks.is_first])
        stop, save = (flag > 0 for flag in asked)
        reporting.check_is_number(self, loss, batch)
        self.state.groups.refuse_other_parameters()
        if self.step == self.first_step:
            # What can't be kept is told at once.
            self.state.attributes.values()
            self.state.own.values()
            self.state.schedulers()
        self.advance(batch, loss)
        return stop, save

    def _begin_to_train(self) -> None:
        lightning.train_mode(self.parallel.model)

    def _inputs(self, batch: GlobalBatch) -> list[dict[str, Any]]:
        return []  # only the step knows what it calls the model with

    def _metrics_of_epoch(self) -> dict[str, float]:
        return self.own.metrics_of_epoch()

    def _end_epoch(self, epoch: int) -> None:
        super()._end_epoch(epoch)
        self.own.end_epoch({**self.metrics, **self.own_metrics})

    def _save(self, *, final: bool) -> None:
        if self.checkpoints is not None and self.saved_step != self.step:
            self._check_replicas()
        super()._save(final=final)

    def _check_replicas(self) -> None:
        """Check that all ranks hold the same: what they remember of a batch must be of all of it.

        :raises ChangesResultError: naming what differs.
        """
        if self.ranks.size == 1:
            return
        tensors = self.state.model_tensors()
        here = {name: digest(tensor) for name, tensor in tensors.items()}
        for there in self.ranks.everyones(here):
            if different := [name for name, found in there.items() if found != here[name]]:
                name = different[0].removeprefix("model.")
                raise ChangesResultError(
                    f"{self.request.technique} x {self.ranks.size} changes the result: at step {self.step} "
                    f"{name!r} is not the same on all devices. What follows from the samples of a batch must "
                    "follow from all of them: saturn_airflow.training.whole_batch has them; or leave the "
                    "technique out of Job(techniques=...)"
                )

    def _own_extra(self) -> dict[str, Any]:
        return {
            "schedulers": self.state.schedulers(),
            "own_step": self.own.counts(),
            "metric_objects": {name: list(logged) for name, logged in self.own.metric_objects.logged.items()},
        }

    def _set_own_extra(self, extra: Mapping[str, Any]) -> None:
        self.state.set_schedulers(extra["schedulers"])
        self.own.set_counts(extra["own_step"])
        logged = extra.get("metric_objects", {})
        self.own.metric_objects.logged = {name: (part, at_end) for name, (part, at_end) in logged.items()}

    def begin_epoch_anew(self, why: str) -> None:
        raise JobError(
            f"{why}, nor begin anew: what own_step has measured of it can't be taken back. Start the job "
            "from scratch"
        )

    def _further(self) -> dict[str, Any]:
        return {"metrics": self.logged} if self.logged else {}
