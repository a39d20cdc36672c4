"""What a technique's ``search`` and ``execute`` work with: a folder, Saturn's ranks, and a way to report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow import library
from saturn_airflow.launch import launching
from saturn_airflow.launch.emitted import EventChecker
from saturn_airflow.launch.failures import Failure, RanksFailedError
from saturn_airflow.launch.launching import Link
from saturn_airflow.launch.request import DoesNotFit, Measure, TrainRequest
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.model import guards
from saturn_airflow.model.arguments import json_mapping
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status
from saturn_airflow.training.guarding.plain_files import PlainFile

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DoesNotFit", "Session"]

Parameters = Mapping[str, Any]
_LOOP = "saturn_airflow.training.loop:train"
_LENGTH = "saturn_airflow.training.loop:batches_per_epoch"
_GUARDED = "saturn_airflow.training.guarding.guarded:measure"
_GUARD_ALONE = "saturn_airflow.training.guarding.guarded:check"
# With less time left no further job is guarded in a trial; its training will begin with that.
_LEAST_SECONDS_TO_GUARD = 15.0
#: Where it keeps the trained model.
MODEL = "model"
# With less spread than this a quick look tells enough.
_STEADY = 0.1


class Session:
    """One call of a technique's ``search`` or ``execute``.

    :ivar folder: where files go that the job keeps between runs.
    """

    def __init__(self, link: Link, spec: RunSpec, deadline: float) -> None:
        self.folder = Path(spec.folder)
        self._link = link
        self._spec = spec
        self._deadline = deadline
        self._measured: dict[str, dict[str, Any]] = {}
        self._verdicts: dict[str, str] = {}
        self._plain_file = PlainFile(spec)
        self._result: dict[str, Any] | None = None
        self._told_to_stop = False
        self._emitted = EventChecker()

    def train(self, parameters: Parameters, batch_count: int | None = None) -> dict[str, Any]:
        """Train with Saturn's ranks and loop, from the last checkpoint on.

        :param batch_count: global batches to train for; None for all that are left.
        :returns: ``status`` (``finished`` or ``stopped``), ``steps``, ``loss`` and more.
        """
        ranks = self._launch(launching.pack(_LOOP, self.request(parameters, batch_count)))
        self._result = dict(ranks[0]["value"])
        self._result["peak_device_bytes"] = max(rank["peak_device_bytes"] for rank in ranks)
        self._result["peak_host_bytes"] = sum(rank["peak_host_bytes"] for rank in ranks)
        # Training has what a trial has: launching, setting up, first batches that are slow.
        self._result["setup_seconds"] += ranks[0]["launch_seconds"] + self._result["warmup_seconds"]
        return self._result

    def fastest(self, candidates: Sequence[Parameters]) -> tuple[Parameters, float]:
        """Measure candidates, a few batches each through the same ranks and loop that train.

        A candidate that runs out of memory, or fails where others don't, is passed over.

        :param candidates: the likeliest first: time may not suffice for all.
        :returns: the fastest parameters, with what the technique decided that they left open, and the seconds
            of one global batch under them.
        :raises RanksFailedError: when none of them runs: why, and that the memory ran out if it did.
        :raises DoesNotFit: when there are none.
        """
        if not candidates:
            raise DoesNotFit("the technique has no parameters to try")
        for parameters in candidates:
            self._check_candidate(parameters)
        how = self._spec.measure
        if len(candidates) > 1:
            how = how._replace(precise_seconds=0.0)
        best: tuple[Parameters, float] | None = None
        failed: list[RanksFailedError] = []
        for number, parameters in enumerate(candidates):
            seconds_left = self._deadline - time.monotonic()
            if best is not None and seconds_left < 1:
                break
            # One broken candidate must not use up the time of the others.
            share = seconds_left if number + 1 == len(candidates) else 0.6 * seconds_left
            try:
                parameters, seconds = self._measure(parameters, max(share, 1.0), how)
            except RanksFailedError as error:
                if error.failure.whose == "job":
                    raise
                failed.append(error)
                continue
            if best is None or seconds < best[1]:
                best = (parameters, seconds)
        if best is not None:
            return best if len(candidates) == 1 else self._look_closer(*best)
        # Out of memory says most: with it the user knows what to change.
        reasons = sorted(failed, key=lambda error: error.failure.status != Status.OUT_OF_MEMORY)
        raise reasons[0]

    def _check_candidate(self, parameters: Any) -> None:
        try:
            json_mapping(dict(parameters), "parameters")
        except (TypeError, ValueError):
            raise TypeError(
                f"technique {self._spec.technique!r}: {parameters!r:.100} is no candidate; each is a mapping "
                "of parameters that fits in JSON, without infinity or NaN"
            ) from None

    def launch(self, function: Callable[..., Any] | str, *arguments: Any) -> list[Any]:
        """Run a function of your own on one rank per device: ``function(*arguments, ranks)``.

        :param function: a module-level function (of the technique's file, too), or its ``"module:name"``.
        :returns: what each rank returned.
        """
        return [rank["value"] for rank in self._launch(launching.pack(function, *arguments))]

    def emit(self, event: str, **fields: Any) -> None:
        """Report what happens: ``emit("step", step=3, loss=0.5)`` shows up where all training shows up.

        :raises TypeError: naming what an event lacks (:class:`~saturn_airflow.launch.emitted.EventChecker`).
        """
        self._link.emit(self._emitted.complete(event, fields))

    def export(self, model: nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Make ``model`` the job's trained model, which can be registered: a technique that trains by itself
        calls this last.

        :param model: what the job's ``load_model`` gives, trained, or its ``state_dict()``.
        :raises ValueError: when it is not that model.
        """
        from saturn_airflow.training.exports import export_trained

        export_trained(model, self._spec.job, self.folder / MODEL)

    def stop_requested(self) -> bool:
        """Whether to save what there is and return; asking shows that the training is alive.

        Once this was True, here or on a rank (:meth:`saturn_airflow.training.ranks.Ranks.stop_requested`),
        returning from ``execute`` means that the training stopped, not that it finished.
        """
        self._told_to_stop = self._link.stop_requested() or self._told_to_stop
        return self._told_to_stop

    def measured(self, parameters: Parameters) -> dict[str, Any]:
        """What :meth:`fastest` learned of ``parameters`` besides their speed; empty where it did not try."""
        return self._measured.get(_key(parameters), {})

    def length_of_data(self) -> dict[str, int]:
        """``batches_per_epoch`` of the job's data, for a technique whose ``search`` measured without Saturn's
        loop: nobody else may say how long an epoch takes. Empty where that can't be found in the time left.
        """
        left = self._deadline - time.monotonic()
        if self._spec.job.trainer or left <= 0:
            return {}
        try:
            (rank,) = self._launch(launching.pack(_LENGTH, self.request({}, None)), left, ranks=1)
        except RanksFailedError:
            return {}
        return {"batches_per_epoch": rank["value"]}

    def verdict(self, parameters: Parameters) -> str:
        """What the guard says of ``parameters``; it is asked now where it was not yet.

        :raises RanksFailedError: when they change the job's result, or can't train it.
        """
        key, technique = _key(parameters), library.get(self._spec.technique)
        if self._spec.technique in self._spec.job.trust:
            return guards.TRUSTED
        if trains_by_itself(technique):
            return self._verdicts.setdefault(
                key, f"{guards.NOT_CHECKED}: {self._spec.technique} trains by itself, in its execute"
            )
        if key not in self._verdicts:
            ranks = self._launch_guarded(_GUARD_ALONE, self.request(parameters, None))
            self._note_verdict(parameters, ranks[0]["value"])
        return self._verdicts[key]

    def verdicts(self, parameters: Parameters) -> dict[str, str]:
        """What the guard says of ``parameters`` for the trial's job and for those that share it, by their
        :func:`~saturn_airflow.model.guards.mark`; nothing of those that time does not suffice for.
        """
        spec, version = self._spec, library.get(self._spec.technique).version
        # Whoever trusts the technique says nothing of it to the others.
        asking = [job for job in (spec.job, *spec.alike) if spec.technique not in job.trust]
        verdicts: dict[str, str] = {}
        for job in asking:
            mark = guards.mark(job, version)
            if mark in verdicts:
                continue
            if job is spec.job:
                verdicts[mark] = self.verdict(parameters)
            elif self._deadline - time.monotonic() > _LEAST_SECONDS_TO_GUARD:
                verdicts.update(self._verdict_on_another(job, mark, parameters))
        return verdicts

    def _verdict_on_another(self, job: Job, mark: str, parameters: Parameters) -> dict[str, str]:
        # What a technique does to a model does not depend on its weights.
        own = replace(job, init_from=None)
        session = Session(self._link, replace(self._spec, job=own, alike=()), self._deadline)
        try:
            return {mark: session.verdict(parameters)}
        except RanksFailedError as error:
            refused = error.failure.status in (Status.CHANGES_RESULT, Status.DOES_NOT_FIT)
            return {mark: guards.refused(error.failure.reason)} if refused else {}

    def _note_verdict(self, parameters: Parameters, found: Mapping[str, Any]) -> None:
        verdict = self._verdicts[_key(parameters)] = str(found["guard"])
        self.emit("guard", parameters=dict(parameters), verdict=verdict, seconds=found["guard_seconds"])

    @property
    def result(self) -> dict[str, Any]:
        """How the training went."""
        if self._result is not None:
            return self._result
        return {"status": Status.STOPPED if self._told_to_stop else Status.FINISHED}

    def _look_closer(self, parameters: Parameters, seconds: float) -> tuple[Parameters, float]:
        """The fastest candidate and its seconds per batch, measured for longer where they vary much."""
        how, known = self._spec.measure, self.measured(parameters)
        left = self._deadline - time.monotonic()
        if how.precise_seconds <= 0 or known["spread"] < _STEADY or left < 3 * how.precise_seconds:
            return parameters, seconds
        try:
            return self._measure(parameters, left, how)
        except RanksFailedError:
            return parameters, seconds

    def _measure(self, parameters: Parameters, seconds: float, how: Measure) -> tuple[Parameters, float]:
        """``parameters``, with what was decided that they left open, and the seconds of one global batch."""
        begun = time.monotonic()
        request = self.request(parameters, None, how._replace(seconds=seconds / 2))
        known = _key(parameters) in self._verdicts or self._spec.technique in self._spec.job.trust
        if known:
            ranks = self._launch(launching.pack(_LOOP, request), seconds)
        else:
            ranks = self._launch_guarded(_GUARDED, request, seconds)
        value = ranks[0]["value"]
        parameters = {**parameters, **value["decided"]}
        if not known:
            self._note_verdict(parameters, value)
        per_batch, set_up = float(value["seconds_per_batch"]), float(value["setup_seconds"])
        # As the supervisor has it: what comes before the second batch takes nothing of the trial's time.
        self._deadline += ranks[0]["launch_seconds"] + set_up + value["warmup_seconds"]
        self._measured[_key(parameters)] = {
            "setup_seconds": ranks[0]["launch_seconds"] + set_up + value["warmup_seconds"],
            "evaluation_seconds": value["evaluation_seconds"],
            "spread": value["spread"],
            "busy_cores": max(rank["value"].get("busy_cores", 0.0) for rank in ranks),
            "batches": value["batches"],
            "batches_per_epoch": value["batches_per_epoch"],
            "peak_device_bytes": max(rank["peak_device_bytes"] for rank in ranks),
            "peak_host_bytes": sum(
                max(rank["peak_host_bytes"], rank["value"].get("other_host_bytes", 0)) for rank in ranks
            ),
        }
        self.emit(
            "measured",
            parameters=dict(parameters),
            seconds_per_batch=per_batch,
            seconds=time.monotonic() - begun,
        )
        return parameters, per_batch

    def request(
        self, parameters: Parameters, batch_count: int | None, measure: Measure | None = None
    ) -> TrainRequest:
        """What the ranks of Saturn's loop are asked, of what the run's spec says."""
        alike = self._spec.alike if measure is not None else ()
        own: dict[str, Any] = {"parameters": dict(parameters), "batch_count": batch_count}
        return TrainRequest.of(self._spec, **own, measure=measure, alike=alike)

    def _launch_guarded(
        self, function: str, request: TrainRequest, seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """Launch a guard; the plain steps that the first one took are those of the others, too."""
        known = self._plain_file.read()
        try:
            ranks = self._launch(launching.pack(function, replace(request, plain_steps=known)), seconds)
        except RanksFailedError as error:
            # Weights or data that are others in each launch are not the technique's doing.
            if not known or error.failure.status != Status.CHANGES_RESULT:
                raise
            ranks = self._launch(launching.pack(function, request), seconds)
            self._plain_file.forget()
        self._plain_file.write(ranks[0]["value"].get("plain_steps", b""))
        return ranks

    def _launch(
        self, call: bytes, seconds: float | None = None, ranks: int | None = None
    ) -> list[dict[str, Any]]:
        began = time.monotonic()
        answer = self._link.request((call, ranks or self._spec.devices, seconds))
        if isinstance(answer, Failure):
            if seconds is not None:
                self._deadline += max(0.0, time.monotonic() - began - seconds)
            raise RanksFailedError(answer)
        results: list[dict[str, Any]] = answer
        # Who is told so in there saves what there is and returns, as if it had come to the end.
        self._told_to_stop = self._told_to_stop or any(rank["told_to_stop"] for rank in results)
        return results


def trains_by_itself(technique: library.BaseTechnique) -> bool:
    """Whether it has nothing for Saturn's loop to call."""
    return technique.trains_by_itself or type(technique).parallelize is library.BaseTechnique.parallelize


def _key(parameters: Parameters) -> str:
    return json.dumps(dict(parameters), sort_keys=True)
