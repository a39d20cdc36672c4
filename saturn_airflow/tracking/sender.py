"""Bringing the records of an outbox to MLflow, in order."""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.model import formats
from saturn_airflow.model.printable import without_login
from saturn_airflow.tracking import absence, estimate_observations, models, parameters, server, unique
from saturn_airflow.tracking.outbox import OUTBOX, Outbox, Record
from saturn_airflow.tracking.server import MlflowAwayError, RecordRefusedError, RunGoneError

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)

# https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits
_METRICS_PER_REQUEST = 1000
_PARAMS_PER_REQUEST = 100
_BATCHED = ("metrics", "tags")
# Seconds between two rounds of sending while MLflow answers. Each costs both sides ten milliseconds of a
# core, which the jobs of a hundred devices would ask of one server.
_PAUSE = 5.0
# Between two tries, at most, while it does not.
_LONGEST_PAUSE = 30.0


class Sender:
    """Sends the records of one outbox to the run its first record describes.

    :param uri: MLflow's address. It may hold credentials and is written nowhere.
    """

    def __init__(self, uri: str, outbox: Outbox) -> None:
        self.uri = uri
        self.outbox = outbox
        # One at a time sends the records of an outbox, on one machine at least.
        self._creator = _digest(f"{socket.gethostname()} {outbox.folder.absolute()}")
        self._server = _digest(uri)
        self._state: dict[str, Any] = {}
        self._load()

    @property
    def run_id(self) -> str | None:
        """The run's id, once MLflow has given it one."""
        return self._state.get("run_id")

    @property
    def experiment_id(self) -> str | None:
        """The id of the run's experiment, once there is a run."""
        return self._state.get("experiment_id")

    @property
    def url(self) -> str | None:
        """The address of the run's page, once there is one."""
        if self.run_id is None:
            return None
        return server.run_url(self.uri, self._state["experiment_id"], self.run_id)

    @property
    def registered(self) -> dict[str, Any] | None:
        """What came of registering the sweep's best model; None as long as that is open."""
        return self._state.get("registered")

    @property
    def last_step(self) -> int:
        """The last training step that the run had when this process found it; -1 for none."""
        return int(self._state.get("last_step", -1))

    def send(self) -> bool:
        """Send what waits. Returns whether nothing waits any more.

        False when another process is sending these records just now.

        :raises MlflowAwayError: when MLflow does not answer; what is left stays in the outbox.
        """
        with self.outbox.sole_sender() as sole:
            self._load()
            if not sole:
                return self.all_sent()
            lost_runs = 0
            while waiting := self.outbox.read(self._state["offset"]):
                try:
                    self._send(waiting)
                except RunGoneError as error:
                    lost_runs += 1
                    if lost_runs > 1:
                        raise MlflowAwayError(str(error)) from error
                    log.warning("%s It is made anew from the records in %s", error, self.outbox.folder)
                    self._state = {"server": self._server, "offset": 0}
        return self.all_sent()

    def all_sent(self) -> bool:
        """Whether MLflow has acknowledged every record."""
        return bool(self._state["offset"] >= self.outbox.size())

    def _load(self) -> None:
        state = self.outbox.state()
        # Another server knows nothing of what was sent to the one before.
        self._state = state if state.get("server") == self._server else {"server": self._server, "offset": 0}

    def _send(self, waiting: Sequence[tuple[Record, int]]) -> None:
        batch: list[Record] = []
        sent = self._state["offset"]
        for record, offset in waiting:
            batched = record["kind"] in _BATCHED
            if batch and (not batched or _size(batch) + _size([record]) > _METRICS_PER_REQUEST):
                self._send_batch(batch)
                self._note(sent)
                batch = []
            if batched:
                batch.append(record)
            else:
                self._send_one(record)
                self._note(offset)
            sent = offset
        if batch:
            self._send_batch(batch)
            self._note(sent)

    def _note(self, offset: int) -> None:
        self._state["offset"] = offset
        self.outbox.note(self._state)

    def _send_batch(self, batch: Sequence[Record]) -> None:
        try:
            self._log_batch(batch)
        except RecordRefusedError as error:
            if len(batch) == 1:
                self.outbox.refuse(batch[0], str(error))
                return
            for record in batch:
                self._send_batch([record])

    def _log_batch(self, batch: Sequence[Record]) -> None:
        mlflow = server.client(self.uri)
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(key, value, record["time"], record["step"])
            for record in batch
            if record["kind"] == "metrics"
            for key, value in record["values"].items()
        ]
        tags = {k: v for record in batch if record["kind"] == "tags" for k, v in record["values"].items()}
        with server.translated_errors():
            for key, value in tags.items() if len(tags) > _PARAMS_PER_REQUEST else ():
                mlflow.set_tag(self._run(), key, value)
            mlflow.log_batch(
                self._run(),
                metrics=metrics,
                tags=[RunTag(k, v) for k, v in tags.items()] if len(tags) <= _PARAMS_PER_REQUEST else [],
                synchronous=True,
            )

    def _send_one(self, record: Record) -> None:
        try:
            match record["kind"]:
                case "run":
                    self._check_format(record)
                    self._open(record)
                case "artifact" | "model":
                    self._log_artifact(record)
                case "params":
                    self._log_params(record)
                case "register":
                    self._register(record)
                case "end":
                    self._end(record)
                case "estimate":
                    estimate_observations.send(self.uri, record)
                case "torn":
                    pass
                case _:
                    self.outbox.refuse(record, f"this version knows no records of kind {record['kind']!r}")
        except RecordRefusedError as error:
            if record["kind"] == "run":  # without it nothing else can be sent
                raise MlflowAwayError(str(error)) from error
            self.outbox.refuse(record, str(error))

    def _check_format(self, record: Record) -> None:
        try:
            formats.check(record, OUTBOX, self.outbox.folder)
        except formats.NewerFormatError as error:  # as for a server that is away: all is kept for later
            raise MlflowAwayError(str(error)) from error

    def _run(self) -> str:
        assert self.run_id is not None, "the first record of an outbox describes the run"
        return self.run_id

    def _open(self, record: Record) -> None:
        run, experiment = find_or_create_run(self.uri, record, self._creator)
        self._state["run_id"] = run.info.run_id
        self._state["experiment_id"] = experiment
        if record.get("above") not in (None, run.data.tags.get("mlflow.parentRunId")):
            log.warning(
                "The run of %s is recorded in %s, which does not have the sweep's run %s that its first task "
                "began: MLFLOW_TRACKING_URI, or the connection, names another MLflow on this machine than on "
                "that task's, or somebody deleted that run",
                record["name"],
                without_login(self.uri),
                record["above"],
            )
        self._state["last_step"] = max(self.last_step, int(run.data.metrics.get("step", -1)))
        tags = {**record["tags"], **self._set_params(run, record["params"])}
        from mlflow.entities import Dataset, DatasetInput, InputTag

        mlflow = server.client(self.uri)
        with server.translated_errors():
            if datasets := record.get("datasets"):
                inputs = [
                    DatasetInput(
                        Dataset(**{key: value for key, value in data.items() if key != "context"}),
                        [InputTag("mlflow.data.context", data["context"])],
                    )
                    for data in datasets
                ]
                mlflow.log_inputs(run.info.run_id, inputs)
            if (run.info.end_time or 0) >= record["time"]:
                return  # it has gone on, and ended, elsewhere: what this record says is old news
            for key, value in tags.items():
                if run.data.tags.get(key) != value:
                    mlflow.set_tag(run.info.run_id, key, value, synchronous=True)
            if run.info.status != "RUNNING":
                mlflow.update_run(run.info.run_id, status="RUNNING")

    def _set_params(self, run: Run, params: Mapping[str, str]) -> dict[str, str]:
        """Set a run's parameters; those that it has with other values, which can only be tags.

        MLflow's parameters can't change. A job that comes back under another strategy has the strategy it
        began with as parameters, and the present one as tags.
        """
        from mlflow.entities import Param

        mlflow, known = server.client(self.uri), run.data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        with server.translated_errors():
            for start in range(0, len(new), _PARAMS_PER_REQUEST):
                part = new[start : start + _PARAMS_PER_REQUEST]
                mlflow.log_batch(run.info.run_id, params=part, synchronous=True)
        tagged = {key: run.data.tags[key] for key in parameters.STRATEGY & run.data.tags.keys()}
        return {key: v for key, v in params.items() if known.get(key, v) != v or tagged.get(key, v) != v}

    def _log_params(self, record: Record) -> None:
        with server.translated_errors():
            run = server.client(self.uri).get_run(self._run())
        if others := self._set_params(run, record["values"]):
            self._log_batch([{"kind": "tags", "values": others}])

    def _log_artifact(self, record: Record) -> None:
        path = self.outbox.at(record["path"])
        mlflow = server.client(self.uri)
        if not path.exists():
            self.outbox.refuse(record, f"{path} is not there any more")
            return
        with server.translated_errors(), server.uploading():
            if record["kind"] == "model":
                models.log_model(self.uri, self._run(), path, record["to"], record.get("inputs", []))
            elif path.is_dir():
                mlflow.log_artifacts(self._run(), str(path), record["to"])
            else:
                mlflow.log_artifact(self._run(), str(path), record["to"] or None)

    def _register(self, record: Record) -> None:
        try:
            lock = self.outbox.at(record["lock"]) if record.get("lock") else None
            found = models.register(self.uri, self._state["experiment_id"], record, lock)
        except RecordRefusedError as error:
            found = {"name": record["name"], "alias": record["alias"], "version": None, "champion": None}
            found["reason"] = str(error)
            self.outbox.refuse(record, str(error))
        self._state["registered"] = found

    def _end(self, record: Record) -> None:
        mlflow = server.client(self.uri)
        with server.translated_errors():
            ended = mlflow.get_run(self._run()).info.end_time
            if ended is None or ended < record["time"]:
                self._log_batch([{"kind": "tags", "values": record["tags"]}])
                mlflow.set_terminated(self._run(), record["status"], record["time"])


class BackgroundSender:
    """Sends the records of an outbox from a thread of its own: the first at once, the others now and then."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._changed = threading.Condition()
        self._stopping = False
        self._tries = 0
        self._sending = False
        self._all_sent = False
        self._away = False
        self._hurry = False
        self._thread = threading.Thread(target=self._work, name="saturn-mlflow", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until the run exists; whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: self.sender.run_id is not None, seconds)

    def flush(self) -> bool:
        """Send what waits now. Returns whether all was sent; waits for as long as MLflow answers."""
        with self._changed:
            before = self._tries
            # A try under way may have begun before the last record came: the next one counts.
            wanted = before + (2 if self._sending else 1)
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._tries >= wanted
                    or (self._tries > before and self._away)
                    or not self._thread.is_alive()
                )
            )
            return self._all_sent

    def stop(self) -> None:
        """End the thread; what was not sent stays in the outbox."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=1)

    def _work(self) -> None:
        away_since: float | None = None
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._hurry, pause)
                if self._stopping:
                    return
                self._hurry = False
                self._sending = True
            pause = _PAUSE
            all_sent = False
            away = True
            try:
                self.sender.outbox.sync()
                all_sent = self.sender.send()
                away = False
                if away_since is not None:
                    log.info("MLflow answers again after %.0f s", time.monotonic() - away_since)
                    absence.over(self.sender.uri)
                    away_since = None
            except MlflowAwayError as error:
                if away_since is None:
                    away_since = time.monotonic()
                    absence.say(self.sender.uri, str(error), self.sender.outbox.folder)
                gone = time.monotonic() - away_since
                pause = min(_LONGEST_PAUSE, _PAUSE + gone / 2) * random.uniform(0.8, 1.2)
            except Exception:
                log.exception(
                    "Sending records to MLflow failed; they are kept in %s", self.sender.outbox.folder
                )
                pause = _LONGEST_PAUSE
            with self._changed:
                self._tries += 1
                self._sending = False
                self._all_sent = all_sent
                self._away = away
                self._changed.notify_all()


def find_or_create_run(uri: str, record: Record, creator: str) -> tuple[Run, str]:
    """The run that a ``run`` record describes, its parent's run first, and its experiment's id.

    :param creator: see :func:`unique.find_or_create`.
    """
    tags, above = dict(record["tags"]), record.get("parent")
    if above:
        parent, experiment = find_or_create_run(uri, above, creator)
        tags["mlflow.parentRunId"] = parent.info.run_id
    if not above or above["experiment"] != record["experiment"]:
        experiment = server.experiment_id(uri, record["experiment"])
    run = unique.find_or_create(
        uri, experiment, record["key"], tuple(record["claim"]), record["name"], tags, record["time"], creator
    )
    return run, experiment


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _size(batch: Sequence[Record]) -> int:
    return sum(len(record["values"]) for record in batch)
