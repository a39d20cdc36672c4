"""A train task that is tried again, cleared, or told to start from scratch: it really trains."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from airflow.sdk import DAG, RetryAction
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow import Cluster, HParams, Job, Node, tracking
from saturn_airflow.launch import restarting, runs
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import DiskError
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import beginning, train_task
from saturn_airflow.operators.progress_in_log import ProgressLog
from saturn_airflow.operators.retrying import TRAINING_POLICY, TryAgainError
from saturn_airflow.operators.train_task import TrainOperator
from saturn_airflow.operators.trials_task import TrialsOperator

pytestmark = pytest.mark.ranks

USERLAND = Path(__file__).parents[1] / "training" / "userland"
BATCHES = 12
RETRIES = 10


def job(loss: str = "squared", **hparams: Any) -> Job:
    return Job(
        "small",
        load_model="small_jobs:linear",
        load_dataloader="small_jobs:noise",
        loss_function=f"small_jobs:{loss}",
        hparams=HParams(**{"batches": BATCHES, "lr": 0.01, **hparams}),
    )


class Store(dict[str, Any]):
    """Airflow's store of a task instance's state, which clearing leaves as it is."""

    set = dict.__setitem__


class KilledError(BaseException):
    """What becomes of a task that does not go in time."""


def _killed(*_: Any) -> None:
    raise KilledError


class Sweep:
    """A task instance that trains one job, as Airflow would run its tries."""

    def __init__(self, folder: Path, uri: str, dag: str) -> None:
        self.uri, self.dag, self.home = uri, dag, folder
        self.folder = folder / "sweeps" / dag / "run" / "sweep" / "small"
        self.store = Store()
        self.conf: dict[str, Any] = {}
        self.tries = self.cleared_after = 0
        tags = {"saturn.sweep": f"{dag}/run/sweep"}
        self.parent = tracking.open_sweep(uri, dag, "sweep", tags, {}, self.folder.parent).to_dict()
        self.outcome: dict[str, Any] = {}
        self.state = "running"

    def clear(self) -> None:
        self.cleared_after = self.tries

    def train(
        self,
        job: Job,
        attempt: float = 100.0,
        job_timeout: float | None = None,
        listed: Job | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """One try.

        :param listed: the job as the DAG's file has it.
        """
        self.tries += 1
        entry = {
            "name": "small",
            "job": job.to_dict(),
            "technique": "single",
            "devices": 1,
            "node": "local",
            "device_ids": [0],
            "kind": "cpu",
            "parameters": {},
            "fingerprint": "f",
            "attempt": attempt,
            "position": 0,
            "start": 0.0,
            "end": 1.0,
            "after": [],
        }
        settings = SweepSettings(
            cluster=Cluster(Node("local", 1, "cpu")), group="sweep", retries=3, job_timeout=job_timeout
        )
        with DAG(self.dag, schedule=None):
            TrialsOperator(task_id=settings.trials_task, jobs=[(listed or job).to_dict()], settings=settings)
            operator = TrainOperator(
                task_id="train",
                entry=entry,
                node={"name": "local", "devices": 1, "kind": "cpu"},
                settings=settings,
                retries=RETRIES,
                **arguments,
            )
        ti = SimpleNamespace(
            dag_id=self.dag,
            run_id="run",
            task_id="train",
            map_index=0,
            stats_tags={},
            try_number=self.tries,
            max_tries=self.cleared_after + RETRIES,
            xcom_push=lambda key, value: self.outcome.update({key: value}),
            xcom_pull=lambda **_: self.parent,
            get_task_states=lambda **_: {"run": {"train_0": self.state}},
        )
        context: Any = {"ti": ti, "task_state_store": self.store, "dag_run": SimpleNamespace(conf=self.conf)}
        if self.state != "running":
            operator.on_kill()
        operator.execute(context)
        return dict(self.outcome["outcome"])

    def cleared_while_training(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> runs.Run:
        """A try that Airflow told to go, since it was cleared, and then ended before its training had."""
        self.state = "restarting"
        with monkeypatch.context() as patch:
            patch.setattr(runs.Run, "_wait_until_gone", _killed)
            patch.setattr(train_task, "wait_for_those_before", lambda *_: None)
            patch.setattr(TrainOperator, "must_go", lambda _: bool(self.events("step")))
            with pytest.raises(KilledError):
                self.train(job)
        self.state = "running"
        return runs.all_of(self.folder)[-1]

    def train_partly(self, job: Job, batches: int = 5) -> None:
        """A try whose task is lost, with training that got so far."""
        self.tries += 1
        spec = runs.RunSpec(
            job=job,
            technique="single",
            folder=str(self.folder),
            node="local",
            slots=1,
            devices=1,
            device_ids=(0,),
            kind="cpu",
            priority=(100.0, 0),
            batch_count=batches,
            path=(str(USERLAND),),
            try_number=self.tries,
            leases_folder=str(self.home / "leases"),
        )
        run = runs.start(spec)
        assert run.wait()["result"]["steps"] == batches
        self.store["saturn_run"] = str(run.folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of the training that its folder holds."""
        return [event for run in runs.all_of(self.folder) for event in run.so_far() if event["event"] == kind]

    def mlflow_runs(self) -> list[Any]:
        client = mlflow.MlflowClient(self.uri)
        found = client.get_experiment_by_name(self.dag)
        assert found is not None
        experiment = found.experiment_id
        found = client.search_runs([experiment], "attributes.run_name = 'small'")  # type: ignore[assignment]
        return sorted(found, key=lambda run: run.info.start_time)

    def losses(self, run: Any) -> list[int]:
        history = mlflow.MlflowClient(self.uri).get_metric_history(run.info.run_id, "loss")
        return [metric.step for metric in history]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def sweep(
    tmp_path: Path, home: Path, uri: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Sweep:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(home))
    monkeypatch.setenv("AIRFLOW__SATURN__LEASES_FOLDER", str(tmp_path / "leases"))
    monkeypatch.syspath_prepend(USERLAND)
    monkeypatch.setattr(train_task, "mlflow_uri", lambda conn_id: uri)
    return Sweep(home, uri, request.node.originalname)


def test_a_finished_job_that_is_cleared_trains_again_and_its_retries_do_not(sweep: Sweep) -> None:
    first = sweep.train(job())
    assert (first["status"], first["batches"], first["training"]) == ("finished", BATCHES, 1)
    assert sweep.train(job()) == first, "a retry reports what there is"
    assert len(runs.all_of(sweep.folder)) == 1
    sweep.clear()
    again = sweep.train(job())
    assert (again["status"], again["batches"], again["training"]) == ("finished", BATCHES, 2)
    assert again["loss"] == first["loss"]
    assert (sweep.folder / "superseded-1" / "checkpoints").is_dir()
    assert "it had finished, and was cleared" in sweep.events("warning")[0]["message"]
    assert sweep.train(job())["training"] == 2
    assert len(sweep.events("start")) == 1
    old, new = sweep.mlflow_runs()
    assert (old.info.status, old.data.tags["saturn.status"]) == ("FINISHED", "superseded")
    assert (new.info.status, new.data.tags["saturn.status"]) == ("FINISHED", "finished")
    assert new.info.run_id == again["run_id"]
    assert sweep.losses(old) == sweep.losses(new) == list(range(1, BATCHES + 1))
    assert not tracking.has_unsent(sweep.folder.parent)


def test_a_job_whose_plan_was_made_anew_is_trained_again(sweep: Sweep) -> None:
    sweep.train(job())
    sweep.tries = 0  # it may be another of the mapped tasks now
    assert sweep.train(job(), attempt=200.0)["training"] == 2


def test_an_unfinished_job_starts_anew_where_its_definition_has_changed(sweep: Sweep) -> None:
    sweep.train_partly(job(lr=0.1))
    sweep.clear()
    outcome = sweep.train(job(lr=0.01))
    assert (outcome["status"], outcome["batches"]) == ("finished", BATCHES)
    (warning,) = sweep.events("warning")
    assert "its definition has changed: hparams.lr was 0.1 and is 0.01" in warning["message"]
    assert str(sweep.folder / "superseded-1") in warning["message"]
    manifest = json.loads((Path(outcome["checkpoint"]) / "manifest.json").read_text())
    assert manifest["definition"]["fields"]["hparams"] == {"lr": 0.01, "batches": BATCHES}
    assert manifest["provenance"].keys() == {"saturn_airflow", "torch"}


def test_an_unfinished_job_goes_on_where_its_definition_is_the_same(sweep: Sweep) -> None:
    sweep.train_partly(job())
    sweep.clear()
    outcome = sweep.train(job())
    assert (outcome["batches"], outcome["steps"]) == (BATCHES - 5, BATCHES)
    assert sweep.events("warning") == []


def test_a_retry_goes_on_whatever_has_changed(sweep: Sweep) -> None:
    sweep.train_partly(job(lr=0.1))
    outcome = sweep.train(job(lr=0.01))
    assert (outcome["batches"], outcome["training"]) == (BATCHES - 5, 1)


def test_a_cleared_task_may_be_gone_before_its_training_which_loses_no_step(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = job("slow_third")
    run = sweep.cleared_while_training(slow, monkeypatch)
    assert sweep.outcome["outcome"]["status"] == "stopped", "the report knows, whatever comes now"
    assert run.is_alive(), "the task is gone first"
    assert sweep.train(slow)["status"] == "finished", "the next try waits for it, and goes on"
    stopped, finished = (run.so_far()[-1] for run in runs.all_of(sweep.folder))
    assert (stopped["status"], finished["status"]) == ("stopped", "finished")
    assert [event["step"] for event in sweep.events("step")] == list(range(1, BATCHES + 1))
    assert sweep.losses(*sweep.mlflow_runs()) == list(range(1, BATCHES + 1))


def test_a_changed_job_starts_anew_though_it_trained_when_it_was_cleared(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.cleared_while_training(job("slow_third", lr=0.1), monkeypatch)
    outcome = sweep.train(job(lr=0.01))
    assert (outcome["status"], outcome["batches"], outcome["training"]) == ("finished", BATCHES, 2)


def test_a_finished_job_goes_on_for_more_batches_where_that_was_asked_for(sweep: Sweep) -> None:
    sweep.train(job(batches=5))
    sweep.clear()
    restarting.ask_for(sweep.folder, restarting.GO_ON)
    outcome = sweep.train(job())
    assert (outcome["status"], outcome["batches"], outcome["training"]) == ("finished", BATCHES - 5, 1)
    assert "hparams.batches was 5 and is 12" in sweep.events("warning")[0]["message"]
    assert restarting.wish_of(sweep.folder) is None
    (run,) = sweep.mlflow_runs()
    assert "goes on as asked" in run.data.tags["saturn.warning"]
    assert sweep.losses(run) == list(range(1, BATCHES + 1))


@pytest.mark.parametrize("finished", [False, True])
def test_a_job_that_is_cleared_alone_is_not_trained_as_the_file_said_before(
    sweep: Sweep, finished: bool
) -> None:
    """Its plan has the old definition; who mends the DAG's file and clears the task means the new one."""
    if finished:
        sweep.train(job(lr=0.1))
    else:
        sweep.train_partly(job(lr=0.1))
    sweep.clear()
    with pytest.raises(AirflowFailException) as refused:
        sweep.train(job(lr=0.1), listed=job(lr=0.01))
    told = str(refused.value)
    assert "hparams.lr was 0.1 and is 0.01" in told
    assert "clear sweep.trials with all that is downstream" in told
    assert f"saturn restart {sweep.dag} run small --as-planned" in told
    assert (sweep.outcome["outcome"]["status"], len(runs.all_of(sweep.folder))) == ("failed", 1)
    sweep.clear()
    restarting.ask_for(sweep.folder, restarting.AS_PLANNED)
    outcome = sweep.train(job(lr=0.1), listed=job(lr=0.01))
    assert (outcome["status"], outcome["training"]) == ("finished", 2 if finished else 1)
    assert sweep.train(job(lr=0.1), listed=job(lr=0.001)) == outcome, "a retry trains what was planned"


def test_what_the_file_says_counts_for_the_job_alone_that_ran_under_its_plan_and_was_cleared(
    sweep: Sweep,
) -> None:
    edited = job(lr=0.01)
    assert sweep.train(job(lr=0.1), listed=edited)["training"] == 1, "it was planned, and then edited"
    sweep.clear()
    assert sweep.train(job(lr=0.1), attempt=200.0, listed=edited)["training"] == 2, "it was planned anew"
    sweep.clear()
    templates = dataclasses.replace(job(lr=0.1), data_version="{{ ds }}", init_from="models:/other@champion")
    assert sweep.train(job(lr=0.1), attempt=200.0, listed=templates)["training"] == 3
    sweep.clear()
    renamed = dataclasses.replace(edited, name="renamed")
    assert sweep.train(job(lr=0.1), attempt=200.0, listed=renamed)["training"] == 4, (
        "the file has no such job"
    )


def test_nothing_finishes_with_no_step_of_its_own(sweep: Sweep) -> None:
    sweep.train(job(lr=0.1))
    sweep.clear()
    sweep.conf = {"saturn": {"go_on": ["small"]}}
    with pytest.raises(Exception, match="nothing is left to train: start the job from scratch"):
        sweep.train(job(lr=0.01))
    assert sweep.outcome["outcome"]["status"] == "failed"
    restarting.ask_for(sweep.folder, restarting.FROM_SCRATCH)
    outcome = sweep.train(job(lr=0.01))
    assert (outcome["status"], outcome["batches"], outcome["training"]) == ("finished", BATCHES, 2)


def test_what_a_job_prints_is_in_the_tasks_log_as_it_comes(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def hear(progress_log: ProgressLog, line: str) -> None:
        heard.append(line)
        if line == "can you hear me?":
            (tmp_path / "mark").touch()

    monkeypatch.setattr(ProgressLog, "job_prints", hear)
    monkeypatch.setenv("SMALL_JOBS_MARK", str(tmp_path / "mark"))
    assert sweep.train(job("talking"))["status"] == "finished"
    assert heard.count("can you hear me?") == heard.count("good") == 1
    said = len(heard)
    sweep.train(job("talking"))
    assert len(heard) == said, "a retry does not say again what was said"


def test_what_a_newer_version_wrote_fails_the_task_at_once_and_stays(sweep: Sweep) -> None:
    sweep.train_partly(job())
    (manifest,) = sweep.folder.glob("checkpoints/*/manifest.json")
    newer = {**json.loads(manifest.read_text()), "format": 9, "written_by": "4.5.6"}
    manifest.write_text(json.dumps(newer))
    with pytest.raises(
        AirflowFailException, match=r"a checkpoint in format 9, written by saturn-airflow 4\.5\.6"
    ):
        sweep.train(job())
    assert json.loads(manifest.read_text()) == newer
    assert len(runs.all_of(sweep.folder)) == 1


def test_time_on_devices_counts_over_all_tries_and_is_final(sweep: Sweep) -> None:
    sweep.train_partly(job())
    no_time = r"small timed out: it had its devices .* \(job_timeout\); nothing of its time was left"
    with pytest.raises(AirflowFailException, match=no_time):
        sweep.train(job(), execution_timeout=timedelta(milliseconds=1))
    assert sweep.outcome["outcome"]["status"] == "timed_out"
    (run,) = sweep.mlflow_runs()
    assert run.info.status == "FAILED"
    sweep.clear()
    assert sweep.train(job(), job_timeout=600.0)["status"] == "finished", (
        "who clears it gives it its time again"
    )


class TestOnASmallDisk:
    """Saturn's home is on a disk that fills up."""

    @pytest.fixture
    def home(self, small_disk: Any) -> Path:
        return Path(small_disk.path)

    def test_a_job_that_can_not_begin_is_tried_again_and_no_try_of_its_own_is_gone(
        self, sweep: Sweep, small_disk: Any
    ) -> None:
        small_disk.fill()
        for _ in range(5):
            with pytest.raises((DiskError, OSError)) as met:
                sweep.train(job())
            again = TRAINING_POLICY.evaluate(met.value, sweep.tries, RETRIES)
            assert again.action == RetryAction.RETRY
            assert again.retry_delay == timedelta(seconds=60)
        assert "has 0 kB of 8.4 MB left" in str(met.value)
        small_disk.free()
        assert sweep.train(job())["status"] == "finished"

    def test_records_for_mlflow_that_found_no_room_are_there_in_the_end(
        self, sweep: Sweep, small_disk: Any
    ) -> None:
        filled = threading.Thread(target=fill_once_it_trains, args=(sweep, small_disk))
        filled.start()
        with pytest.raises((DiskError, TryAgainError), match=r"can('t)? be written"):
            sweep.train(job("slow", batches=60))
        filled.join()
        small_disk.free()
        assert sweep.train(job("slow", batches=60))["status"] == "finished"
        (run,) = sweep.mlflow_runs()
        assert run.info.status == "FINISHED"
        assert sorted(sweep.losses(run)) == list(range(1, 61))


def fill_once_it_trains(sweep: Sweep, disk: Any) -> None:
    while len(sweep.events("step")) < 10:
        time.sleep(0.05)
    disk.fill()


def test_a_job_that_somebody_changed_on_its_way_is_not_trained(sweep: Sweep) -> None:
    # In two parts: what this file names in one, its DAG may name.
    edited = dataclasses.replace(job(), loss_function=":".join(["joblib", "load"]))
    with pytest.raises(AirflowFailException, match="'joblib:load' comes from another task of the sweep"):
        sweep.train(edited, listed=job())
    assert sweep.outcome["outcome"]["status"] == "failed"
    assert not list(sweep.folder.glob("runs/*"))


def test_a_job_on_a_node_with_another_folder_of_state_is_told(tmp_path: Path) -> None:
    """It would begin anew where it moves to, and no plan would know."""
    decision = restarting.RestartDecision(Definition.of(job()))
    (tmp_path / "mlflow").mkdir()
    assert list(beginning.warnings("a", tmp_path / "a", decision)) == []
    (tmp_path / "mlflow").rmdir()
    (told,) = beginning.warnings("a", tmp_path / "a", decision)
    assert f"{tmp_path} has nothing of what the sweep's first task wrote there" in told
