"""The runs of a sweep: one for the sweep itself, below it one per job."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.disks import is_fault, left, write_whole
from saturn_airflow.model.errors import DiskError
from saturn_airflow.model.folders import slug
from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.status import Status
from saturn_airflow.tracking import job_table, machine, models, parameters, unique
from saturn_airflow.tracking.events import OTHERWISE, STATUSES, Event, Recorder
from saturn_airflow.tracking.outbox import OUTBOX, Outbox, now
from saturn_airflow.tracking.sender import BackgroundSender, Sender
from saturn_airflow.tracking.sending import send_patiently
from saturn_airflow.tracking.server import MlflowAwayError

log = logging.getLogger(__name__)

#: Seconds for which MLflow is not asked again where it did not answer.
_SECONDS_LEFT_ALONE = 30.0

SWEEP_TAG = "saturn.sweep"
#: Why a later training of the same job stands in for this one.
SUPERSEDED_TAG = "saturn.superseded"
#: Figures of the result that :meth:`SweepRun.log_plan` logs, once per round.
_IN_PLAN = ("planned_seconds", "lower_bound", "planning_seconds", "gap")


class _Run:
    """What sweeps and jobs have in common: an outbox, and the run its records go to."""

    def __init__(
        self, uri: str, folder: str | Path, description: Mapping[str, Any], said: bool = False
    ) -> None:
        self.description = dict(description)
        self._outbox = Outbox(folder)
        self._sender = Sender(uri, self._outbox)
        #: Names of artifacts for which a disk had no room.
        self._unwritten = set[str]()
        if not said:
            self._outbox.append({**self.description, **formats.stamp(OUTBOX)})

    @property
    def id(self) -> str | None:
        """The run's id; None for as long as MLflow has not answered."""
        return self._sender.run_id

    @property
    def url(self) -> str | None:
        """The address of the run's page; None without an MLflow server, or until it has answered."""
        return self._sender.url

    def tag(self, values: Mapping[str, Any]) -> None:
        """Set tags."""
        self._outbox.append({"kind": "tags", "values": parameters.tags(values)})

    def log_metrics(self, values: Mapping[str, float | None], step: int = 0) -> None:
        """Log metrics at a step; those that are None are left out."""
        numbers = {
            parameters.metric_key(key): float(value) for key, value in values.items() if value is not None
        }
        self._outbox.append(
            {"kind": "metrics", "name": "own", "step": step, "time": now(), "values": numbers}
        )

    def log_artifact(self, path: str | Path, to: str = "") -> None:
        """Log a file, or what a folder holds, as an artifact; it must stay where it is until it is sent.

        :param to: the folder among the run's artifacts.
        """
        self._outbox.append({"kind": "artifact", "path": self._outbox.place_of(path), "to": to})

    def log_bytes(self, data: bytes, name: str) -> None:
        """Log ``data`` as an artifact.

        :param name: its path among the run's artifacts.
        """
        path = self._outbox.folder / "artifacts" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            log.warning("%s can't be written (%s); MLflow will not get it", path, error.strerror)
            if is_fault(error):
                self._unwritten.add(name)
            return
        self._unwritten.discard(name)
        parent = str(Path(name).parent)
        self.log_artifact(path, "" if parent == "." else parent)

    @property
    def is_kept(self) -> bool:
        """Whether all that was logged stands in a file, or has been sent."""
        return not (self._outbox.unwritten or self._unwritten)

    def check_kept(self) -> None:
        """Check that all that was logged stands in a file.

        :raises DiskError: when there is no room for it.
        """
        self._outbox.sync()
        if not self.is_kept:
            folder = self._outbox.folder
            raise DiskError(f"records for MLflow can't be written to {folder}: {left(folder)}")

    def _append_end(self, status: str, reason: str | None) -> None:
        tags = parameters.tags({"saturn.status": status, "saturn.reason": reason})
        end = {"kind": "end", "status": STATUSES.get(status, "FAILED"), "tags": tags}
        self._outbox.append({**end, "time": self._outbox.moment()})


class SweepRun(_Run):
    """The run of a sweep. What is logged is sent at once; what MLflow does not take now is kept for later."""

    def __init__(self, uri: str, folder: str | Path, description: Mapping[str, Any], patience: float) -> None:
        super().__init__(uri, folder, description)
        self._patience = patience
        self._gave_up = -math.inf

    def to_dict(self) -> dict[str, Any]:
        """This run as JSON-ready data, for XCom: what :func:`open_job` and :func:`reopen_sweep` need."""
        return {**self.description, "run_id": self.id, "url": self.url}

    def log_plan(
        self,
        plan: Plan,
        round: int = 1,
        promise: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a plan and its figures; they are sent with the chart.

        :param round: which of the sweep's plans it is, from 1.
        :param promise: ``seconds`` in which it is done with the odds ``confidence``, where that is known.
        """
        self.log_bytes(json.dumps(plan.to_dict(), indent=2).encode(), f"plan/round-{round}/plan.json")
        figures = {
            "planned_seconds": plan.makespan,
            "lower_bound_seconds": plan.lower_bound,
            "planning_seconds": plan.seconds,
        }
        if plan.lower_bound > 0:
            figures["gap"] = plan.gap
        if promise and math.isfinite(promise.get("seconds", math.inf)):
            figures |= {"promised_seconds": promise["seconds"], "promised_odds": promise["confidence"]}
        self.log_metrics(figures, step=round)

    def log_chart(self, plan: Plan, nodes: Iterable[Node] | None = None, round: int = 1) -> None:
        """Draw a plan, and send what waits.

        :param nodes: the cluster's, to show devices the plan leaves idle.
        :param round: which of the sweep's plans it is, from 1.
        """
        from saturn_airflow.tracking.chart import draw

        nodes = None if nodes is None else list(nodes)
        for format in ("png", "svg"):
            self.log_bytes(draw(plan, format, nodes), f"plan/round-{round}/plan.{format}")
        self.flush()

    def log_report(self, result: Mapping[str, Any]) -> None:
        """Log what came of the sweep.

        :param result: its numbers become metrics, the whole becomes ``report.json``, and ``jobs``, a mapping
            per job, the table ``jobs.json``, which MLflow's UI shows.
        """
        self.log_metrics({k: v for k, v in result.items() if is_number(v) and k not in _IN_PLAN})
        self.log_bytes(json.dumps(result, indent=2, default=str).encode(), "report.json")
        if rows := [job_table.with_columns(row) for row in result.get("jobs") or []]:
            self.log_bytes(job_table.table(rows), "jobs.json")
            self.tag({"mlflow.loggedArtifacts": json.dumps([{"path": "jobs.json", "type": "table"}])})
        if best := result.get("best"):
            self.tag({f"saturn.best.{key}": best.get(key) for key in ("job", "metric", "value", "model_uri")})
            self.log_metrics({"best_value": best.get("value")})
        if champion := result.get("champion"):
            names = {"champion_value": "value", "champion_beaten_by": "beaten_by"}
            self.log_metrics({name: champion[key] for name, key in names.items()})
        self.flush()

    def run_of(self, job: str, training: int = 1) -> str | None:
        """The id of a job's run; None where there is none, or MLflow does not answer.

        :param training: which of the job's trainings, from 1.
        """
        if self._sender.experiment_id is None:
            return None
        try:
            key = unique.key_of_job(self.description["key"], job, training)
            run = unique.find(self._sender.uri, self._sender.experiment_id, key, ("job", job))
        except MlflowAwayError:
            return None
        return str(run.info.run_id) if run is not None else None

    def register(
        self,
        register_as: str,
        best: Mapping[str, Any],
        mode: str = "min",
        against: Mapping[str, Any] | None = None,
        locks: Path | None = None,
        training: int = 1,
    ) -> dict[str, Any]:
        """Register the best job's model, if it beats the registered model's champion.

        :param register_as: ``"name"`` or ``"name@alias"``; the alias is ``champion`` unless said.
        :param best: ``job``, ``metric`` and ``value``.
        :param mode: whether the metric is better small (``"min"``) or large (``"max"``).
        :param against: the champion on the data that ``best`` was evaluated on: ``version``, and ``value`` or
            ``why`` it has none; None where it was not scored on these.
        :param locks: a folder that all who register share, who then do it one after the other.
        :param training: which of the job's trainings ``best`` is of, from 1.
        :returns: ``name``, ``alias``, ``version`` (None where nothing was registered), ``champion`` (what it
            was measured against: ``version``, ``value``) and ``reason``. While MLflow is away nothing is
            registered yet; that is done when what waits is sent.
        """
        name, alias = models.parse_name(register_as)
        record = {"kind": "register", "name": name, "alias": alias, "mode": mode}
        measured = {key: best[key] for key in ("job", "metric", "value")} | {
            "against": against,
            "training": training,
        }
        if locks is not None:
            measured["lock"] = self._outbox.place_of(locks / f"{slug(name)}.lock")
        self._outbox.append({**record, **measured, "sweep": self.description["key"]})
        # What it came to before, as when a report runs again, is not what this comes to.
        if self.flush() and (found := self._sender.registered):
            return found
        reason = "MLflow has not answered, or not got the model yet; it is registered when it has"
        return {"name": name, "alias": alias, "version": None, "champion": None, "reason": reason}

    def close(self, status: str = Status.FINISHED, reason: str | None = None) -> bool:
        """End the run.

        :param status: ``finished``, ``failed``, ``stopped`` or ``pruned``.
        :returns: whether MLflow has everything.
        """
        self._append_end(status, reason)
        return self.flush()

    def flush(self) -> bool:
        """Send what waits. Returns whether all was sent, also of what a full disk had no room for.

        For some seconds after MLflow did not answer it is not asked again: a task must not wait for each
        thing it logs.
        """
        self._outbox.sync()
        if time.monotonic() - self._gave_up < _SECONDS_LEFT_ALONE:
            return False
        sent = send_patiently(self._sender, self._patience)
        if not sent:
            self._gave_up = time.monotonic()
        return sent and self.is_kept


class JobRun(_Run):
    """The run of a job. What is logged goes to a file at once, and from there to MLflow in the background."""

    def __init__(
        self, uri: str, folder: str | Path, description: Mapping[str, Any], said: bool = False
    ) -> None:
        super().__init__(uri, folder, description, said)
        step, evaluation, job = (self._outbox.last("metrics", name) or {} for name in ("step", "eval", "job"))
        changed = self._outbox.last("tags", OTHERWISE) or {}
        otherwise = changed.get("time", -1) > step.get("time", -1)
        self._recorder = Recorder(
            step.get("step", -1), evaluation.get("step", -1), job.get("logged"), otherwise
        )
        self._has_steps = bool(step)
        self._background = BackgroundSender(self._sender)
        self._gpus: list[str] = []
        self._inputs: list[dict[str, Any]] = []
        self._machine: machine.MachineMetrics | None = None

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until ``id`` and ``url`` are known; whether they are."""
        return self._background.wait(seconds)

    def follow(self, event: Event) -> None:
        """Record an event of training.

        That is ``leased``, ``start``, ``step``, ``eval``, ``logged``, ``checkpoint``, ``warning`` or ``end``.

        Takes microseconds, whatever MLflow does. Steps that are recorded already, as after a resume, are
        left out, and so are events of other kinds.
        """
        if not self._has_steps:  # somebody may have removed what was recorded of them
            self._recorder.last_step = max(self._recorder.last_step, self._sender.last_step)
        match event.get("event"):
            case "leased":
                self._gpus = [name for name in event.get("names", ()) if str(name).startswith("GPU-")]
            case "step" if machine.is_fresh(event.get("time")):
                self._watch_machine()
            case "logged" if event.get("artifact"):
                self.log_artifact(event["artifact"], event.get("to", ""))
            case "end":
                self._inputs = (event.get("result") or {}).get("inputs") or []
                self._leave_machine()
        if records := self._recorder.records(event):
            self._outbox.append(*records)
            self._has_steps |= event["event"] == "step"
        if event.get("event") == "end" and event.get("traceback"):
            self.log_bytes(str(event["traceback"]).encode(), "traceback.txt")

    def log_model_folder(self, path: str | Path) -> str | None:
        """Log the folder of an exported model; it must stay where it is until it is sent.

        ``mlflow.pyfunc.load_model`` takes the URI, where the module of the job's ``load_model`` is.

        :returns: its URI, ``runs:/<id>/model``; None where MLflow has not answered yet.
        """
        record = {"kind": "model", "path": self._outbox.place_of(path), "to": models.FOLDER}
        self._outbox.append({**record, "inputs": self._inputs})
        return f"runs:/{self.id}/{models.FOLDER}" if self.id else None

    def flush(self) -> bool:
        """Send what waits, for as long as MLflow answers. Returns whether all was sent."""
        return self._background.flush()

    def close(self, status: str = Status.FINISHED, reason: str | None = None) -> bool:
        """End the run, and send what waits for as long as MLflow answers.

        :param status: ``finished``, ``failed``, ``stopped`` or ``pruned``.
        :returns: whether MLflow has everything; what it has not stays in the job's folder.
        """
        self._append_end(status, reason)
        return self.leave()

    def supersede(self, reason: str, *, ended: bool) -> None:
        """Mark the run as that of a training which a later one stands in for, and stop sending.

        :param ended: whether the run has ended already; else it ends as stopped.
        """
        if not ended:
            self._append_end(Status.STOPPED, reason)
        self.tag({"saturn.status": "superseded", SUPERSEDED_TAG: reason})
        self.leave()

    def leave(self) -> bool:
        """Send what waits and stop sending, without ending the run: the job will come back to it.

        :raises DiskError: when there was no room for some of it.
        """
        self._leave_machine()
        sent = self.flush()
        self.stop_sending()
        self.check_kept()
        return sent

    def stop_sending(self) -> None:
        """Stop, though something may not be sent yet: whoever opens the run next, or the sweep, sends it."""
        self._background.stop()

    def _watch_machine(self) -> None:
        if self._machine is None and machine.is_wanted():
            last = self._outbox.last("metrics", "machine") or {}
            self._machine = machine.MachineMetrics(self._log_machine, self._gpus, last.get("step", -1) + 1)

    def _leave_machine(self) -> None:
        if self._machine is not None:
            self._machine.stop()

    def _log_machine(self, number: int, values: Mapping[str, float]) -> None:
        self._outbox.append(
            {"kind": "metrics", "name": "machine", "step": number, "time": now(), "values": dict(values)}
        )
