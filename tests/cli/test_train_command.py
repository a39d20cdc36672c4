"""``saturn train``: a job of a DAG file by hand, as the sweep trains it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from saturn_airflow import library
from saturn_airflow.launch.devices import threads_per_device
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

DAG = """
from airflow.sdk import dag, task
from saturn_airflow import Cluster, EarlyStopping, HParams, Job, Node, SaturnSweepOperator

@dag(schedule=None)
def mine():
    def job(name, **fields):
        return Job(name, **{"load_model": "by_hand:model", "load_dataloader": "by_hand:data",
                            "loss_function": "by_hand:loss", "load_eval_dataloader": "by_hand:data",
                            "metrics": {"error": "by_hand:error"}, "data_args": {"day": "{{ ds }}"},
                            "hparams": HParams(epochs=2), **fields})
    stop = EarlyStopping(metric="error", mode="min", patience=1, min_delta=9)
    cluster = Cluster(Node("local", devices=2, kind="cpu"))
    jobs = [job("good"), job("stops", loss_function="by_hand:stops"), job("bad", loss_function="by_hand:bad"),
            job("logs", loss_function="by_hand:logs"), job("runs", data_args={"day": "{{ ti.run_id }}"}),
            job("ends", hparams=HParams(epochs=4, early_stopping=stop))]
    SaturnSweepOperator(task_id="sweep", cluster=cluster, jobs=jobs)
    SaturnSweepOperator(task_id="other", cluster=cluster, jobs=[job("twice"), job("once")])
    SaturnSweepOperator(task_id="third", cluster=cluster, jobs=[job("twice")])

@dag(schedule=None)
def later():
    @task
    def jobs(): ...
    SaturnSweepOperator(task_id="sweep", cluster=Cluster(Node("local", devices=2, kind="cpu")), jobs=jobs())

mine()
later()
"""
MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

class Points(TensorDataset):
    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is None, "a breakpoint would not work here"
        return super().__getitem__(index)

def data(day):
    print("the data of", day)
    print("threads:", torch.get_num_threads())
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(Points(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True, num_workers=WORKERS,
                      prefetch_factor=PREFETCH)

def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()

def error(outputs, targets):
    return (outputs - targets).abs().mean()

def stops(outputs, targets):
    breakpoint()
    return loss(outputs, targets)

def logs(outputs, targets):
    import mlflow

    mlflow.log_metric("bias", 0.5)
    mlflow.log_text("words", "words.txt")
    return loss(outputs, targets)

def bad(outputs, targets):
    wanted = {"targets": 3}
    return wanted["labels"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "mine.py").write_text(DAG)
    module = MODULE.replace("WORKERS", "2").replace("PREFETCH", "3")
    (tmp_path / "by_hand.py").write_text(module)
    return tmp_path


def by_hand(folder: Path, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "saturn_airflow.cli", "train", *words]
    return subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True, check=False)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ .* loss ([\d.]+)", printed, re.MULTILINE)]


def in_the_sweep(request: TrainRequest, module_folder: str, ranks: Ranks) -> list[float]:
    """The losses by step of a launched training."""
    import dataclasses

    sys.path.append(module_folder)
    found: list[float] = []

    def note(event: dict[str, object]) -> None:
        if event["event"] == "step":
            found.append(float(str(event["loss"])))

    train(request, dataclasses.replace(ranks, _emit=note))
    return found


def test_it_trains_as_the_sweep_does_and_writes_nothing(folder: Path, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    whole = by_hand(folder, "mine", "good", "--dags", str(folder), "--date", "2026-01-02")
    assert whole.returncode == 0, whole.stderr
    assert "the data of 2026-01-02" in whole.stdout
    assert f"threads: {threads_per_device(2)}\n" in whole.stdout, "as on the sweep's node, of two devices"
    assert len(re.findall(r"^epoch \d evaluated: eval_loss [\d.]+, error [\d.]+$", whole.stdout, re.M)) == 2
    assert {path.name for path in folder.iterdir()} <= {"mine.py", "by_hand.py", "airflow", "__pycache__"}

    elsewhere = tmp_path_factory.mktemp("launched")
    (elsewhere / "by_hand_too.py").write_text(MODULE.replace("WORKERS", "0").replace("PREFETCH", "None"))
    job = Job(
        "good",
        load_model="by_hand_too:model",
        load_dataloader="by_hand_too:data",
        loss_function="by_hand_too:loss",
        data_args={"day": "2026-01-02"},
        hparams=HParams(epochs=2),
    )
    request = TrainRequest(job=job, technique="single", folder=str(elsewhere))
    (expected,) = ranks.launch(in_the_sweep, request, str(elsewhere), size=1)
    assert losses(whole.stdout) == pytest.approx(expected, abs=1e-6)


NOWHERE = """
from airflow.sdk import dag
from saturn_airflow import Job, SaturnSweepOperator

@dag(schedule=None)
def nowhere():
    def job(name, **fields):
        return Job(name, load_model="by_hand:model", load_dataloader="by_hand:data",
                   loss_function="by_hand:loss", data_args={"day": "{{ ds }}"}, **fields)
    SaturnSweepOperator(task_id="sweep", jobs=[job("free"), job("bound", nodes=["gpu-a"])])

nowhere()
"""


@pytest.mark.parametrize("name", ["free", "bound"])
def test_no_node_need_be_known(folder: Path, name: str) -> None:
    (folder / "nowhere.py").write_text(NOWHERE)
    done = by_hand(folder, "nowhere.py", name, "--batches", "2")
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 2


def test_why_a_job_ended_early_is_its_last_line(folder: Path) -> None:
    done = by_hand(folder, "mine", "ends", "--dags", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ended early in epoch 1: error was ")


def test_several_ranks_and_checkpoints_that_are_asked_for(folder: Path) -> None:
    words = ("mine", "good", "--dags", str(folder), "--technique", "ddp")
    first = by_hand(folder, *words, "--batches", "2", "--folder", "kept")
    assert first.returncode == 0, first.stderr
    assert len(losses(first.stdout)) == 2
    rest = by_hand(folder, *words, "--folder", "kept")
    assert rest.stdout.count("training from step 2, 6 batches in all") == 1
    assert len(losses(rest.stdout)) == 4


def test_the_debugger_stops_in_the_jobs_code(folder: Path) -> None:
    # The loss is computed more often than in steps: Saturn looks at how parts make it up, too.
    typed = "p type(outputs)\n" + "c\n" * 20
    stopped = by_hand(folder, "mine", "stops", "--dags", str(folder), "--batches", "1", typed=typed)
    assert stopped.returncode == 0, stopped.stderr
    assert "<class 'torch.Tensor'>" in stopped.stdout
    assert len(re.findall(r"step +\d+  epoch 0  loss [\d.]+", stopped.stdout)) == 1
    left = by_hand(folder, "mine", "stops", "--dags", str(folder), typed="q\n")
    assert left.returncode == 130
    fallen = by_hand(folder, "mine", "bad", "--dags", str(folder), "--pdb", typed="p wanted\nq\n")
    assert fallen.returncode == 1
    assert "{'targets': 3}" in fallen.stdout
    assert 'return wanted["labels"]' in fallen.stderr, "the user's own traceback"
    assert "saturn train: bad: loss_function 'by_hand:bad' raised KeyError: 'labels'" in fallen.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine", "god"], "DAG 'mine' has no job 'god'; did you mean 'good'?"),
        (["mine", "twice"], "several sweeps have a job 'twice': name one of other, third with --sweep"),
        (["mine", "good", "--sweep", "other"], "DAG 'mine' has no job 'good' in 'other'"),
        (["yours", "good"], "has no DAG 'yours'; it has later, mine"),
        (["by_hand.py", "good"], "by_hand.py has no DAG"),
        (["mine.py", "once"], "has 2 DAGs; name one of later, mine"),
        (["later", "good"], "the jobs of sweep 'sweep' come from another task"),
        (["mine", "runs"], "job 'runs': a template of it needs a DAG run ('ti' is undefined)"),
        (["mine", "good", "--technique", "dpp"], "technique 'dpp' is not in the library"),
        (["mine", "good", "--devices", "2"], "single x 2 can't train 'good': single uses one device"),
        (["mine", "good", "--parameters", "3"], "--parameters '3': give a JSON object"),
        (["mine", "good", "--batches", "0"], "--batches 0: give a number of at least 1"),
        (["mine", "good", "--date", "today"], "--date 'today': write it like 2026-11-22"),
    ],
)
def test_what_can_not_be_trained_is_one_line(
    folder: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from saturn_airflow.cli import main

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", *words, "--dags", str(folder)]) == 2
    complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("saturn train:")]
    assert len(complaints) == 1
    assert said in complaints[0]


def test_a_technique_that_trains_by_itself_is_not_run_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from saturn_airflow.cli import main

    class Alone(library.BaseTechnique):
        def execute(self, *args: object, **named: object) -> None:
            raise AssertionError

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(library, "_registered", {"alone": Alone})
    assert main(["train", "mine", "good", "--dags", str(folder), "--technique", "alone"]) == 2
    assert "technique 'alone' trains by itself, in its execute" in capsys.readouterr().err


def test_mlflow_has_it_where_that_is_asked_for(folder: Path) -> None:
    uri = f"sqlite:///{folder}/tries.db"
    words = ("--dags", str(folder), "--batches", "2", "--experiment", "tries", "--uri", uri)
    done = by_hand(folder, "mine", "logs", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("logged bias 0.5 (step 0)\nlogged file words.txt\n") == 2
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tries")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.`mlflow.parentRunId` != ''")
    assert run.data.metrics["loss"] == pytest.approx(losses(done.stdout)[-1], abs=1e-6)
    assert run.data.params["technique"] == "single"
    assert run.data.metrics["bias"] == 0.5
    assert "words.txt" in {file.path for file in client.list_artifacts(run.info.run_id)}


SECRETIVE = """
def data(day):
    import mlflow

    global told
    told = day
    mlflow.log_param("day", day)
    mlflow.set_tag("of", f"<{day}>")
    print("the data of", day)
    return DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=8)

def loss(outputs, targets):
    raise ConnectionError(f"no login with {told!r}")
"""


def test_secrets_go_neither_to_mlflow_nor_to_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = 'open sesame "\u00fc" 4711'
    connection = json.dumps({"conn_type": "generic", "password": password})
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", connection)
    secretive = DAG.replace("Job, Node", "Job, Node, Secret")
    secretive = secretive.replace('{"day": "{{ ds }}"}', '{"day": Secret("shop_db", "password")}')
    (folder / "mine.py").write_text(secretive)
    (folder / "by_hand.py").write_text((folder / "by_hand.py").read_text() + SECRETIVE)
    uri = f"sqlite:///{folder}/mlflow.db"
    place = ("--dags", str(folder), "--folder", str(folder / "kept"), "--uri", uri)
    told = by_hand(folder, "mine", "good", *place, "--experiment", "by hand")
    assert told.returncode == 1, told.stderr
    assert "no login with '***'" in told.stderr
    assert "logged day=***" in told.stdout
    (experiment,) = MlflowClient(uri).search_experiments(filter_string="name = 'by hand'")
    (run,) = MlflowClient(uri).search_runs([experiment.experiment_id], "params.day != ''")
    assert (run.data.params["day"], run.data.tags["of"]) == ("***", "<***>")
    forms = [form.encode() for form in (password, repr(password)[1:-1], json.dumps(password)[1:-1])]
    said = [told.stdout.encode(), told.stderr.encode()]
    said += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in said for form in forms if form in text]
