"""What happens when a DAG file with a sweep is parsed: its shape, its cost, and its mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "mlflow", "pyomo", "highspy", "numpy", "pandas", "transformers"]
PREAMBLE = """
import json, sys
from airflow.sdk import DAG, Asset, dag, task
from saturn_airflow import *
ONE = Cluster(Node("local", devices=2, kind="cpu"))
TWO = Cluster(Node("gpu-a", devices=8), Node("gpu-b", devices=8, queue="big"))
def job(name="a", **fields):
    needed = {"load_model": "shop.models:gpt2", "load_dataloader": "shop.data:python_text"}
    return Job(name, **{**needed, **fields})
def measured(name="a", **fields):
    metrics = {"accuracy": "shop.metrics:accuracy"}
    return job(name, **{"load_eval_dataloader": "shop.data:python_text_eval", "metrics": metrics, **fields})
def build(**arguments):
    @dag(schedule=None)
    def nightly():
        sweep = SaturnSweepOperator(**{"task_id": "sweep", "jobs": [job()], "cluster": ONE, **arguments})
        @task
        def use(result): ...
        use(sweep.output)
    return nightly()
"""


def run_python(code: str, tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "dags"), str(ROOT)]),
        **settings,
    }
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_sweep_of_a_hundred_jobs_imports_nothing_heavy(tmp_path: Path) -> None:
    done = run_python(
        f"""
        build(jobs=grid(job("a-{{lr}}"), lr=[i / 1000 for i in range(100)]), register_as="best")
        print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_tasks_of_a_sweep(tmp_path: Path) -> None:
    done = run_python(
        """
        for cluster in (ONE, TWO):
            tasks = build(cluster=cluster).tasks
            print(json.dumps({t.task_id: sorted(t.upstream_task_ids) for t in tasks}))
        print(json.dumps({t.task_id: t.queue for t in tasks if "." in t.task_id[6:]}))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    one, two, queues = map(json.loads, done.stdout.splitlines()[-3:])
    assert one == {
        "sweep.trials": [],
        "sweep.profile.wave_1": ["sweep.trials"],
        "sweep.profile.choose_2": ["sweep.profile.wave_1"],
        "sweep.profile.wave_2": ["sweep.profile.choose_2"],
        "sweep.profile.choose_3": ["sweep.profile.wave_2"],
        "sweep.profile.wave_3": ["sweep.profile.choose_3"],
        "sweep.profile.choose_4": ["sweep.profile.wave_3"],
        "sweep.profile.wave_4": ["sweep.profile.choose_4"],
        "sweep.plan": [f"sweep.profile.wave_{n}" for n in (1, 2, 3, 4)],
        "sweep.train": ["sweep.plan"],
        "sweep.report": ["sweep.plan", "sweep.train"],
        "use": ["sweep.report"],
    }
    assert two["sweep.train.gpu-a"] == ["sweep.train.gpu-a_jobs"]
    assert two["sweep.train.gpu-a_jobs"] == ["sweep.plan"]
    waves = [f"sweep.profile.wave_{n}.gpu-{node}" for n in (1, 2, 3, 4) for node in "ab"]
    assert two["sweep.plan"] == waves
    assert two["sweep.profile.choose_2"] == waves[:2]
    assert two["sweep.profile.wave_2.gpu-a_trials"] == ["sweep.profile.choose_2"]
    again = [f"sweep.round_2.train.gpu-{node}" for node in "ab"]
    trained = ["sweep.train.gpu-a", "sweep.train.gpu-b"]
    assert two["sweep.report"] == ["sweep.plan", "sweep.round_2.plan", *again, *trained, "sweep.watch"]
    assert queues["sweep.train.gpu-a"] == "saturn.gpu-a"
    assert queues["sweep.train.gpu-b"] == "big"


def test_the_asset_of_a_sweep_is_one_that_airflow_stores(tmp_path: Path) -> None:
    """Else its DAG processor drops the whole file, and tells nobody but its own log."""
    done = run_python(
        """
        from airflow.models.asset import AssetModel
        names = ("plain-1.2_3", "größe", "日" * 250)
        def sweep():
            SaturnSweepOperator(task_id="sweep", jobs=[job()], cluster=ONE)
        for one in [dag(name, schedule=None)(sweep)() for name in names]:
            (asset,) = one.task_dict["sweep.report"].outlets
            AssetModel(name=asset.name, uri=asset.uri)
            print(json.dumps([asset.name, asset.uri]))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plain, other, long = map(json.loads, done.stdout.splitlines()[-3:])
    assert plain == ["plain-1.2_3.sweep", "saturn://plain-1.2_3/sweep"]
    assert other == ["größe.sweep", "saturn://gr%C3%B6%C3%9Fe/sweep"]
    assert len(long[1]) < 100


def test_a_sweep_takes_part_in_a_dag_as_an_operator_does(tmp_path: Path) -> None:
    done = run_python(
        """
        @dag(schedule=None)
        def arrows():
            @task
            def before(): ...
            @task
            def after(): ...
            before() >> SaturnSweepOperator(task_id="sweep", jobs=[job()], cluster=ONE) >> after()
        tasks = {t.task_id: t for t in arrows().tasks}
        ends = [tasks["sweep.trials"], tasks["after"]]
        print(json.dumps([sorted(task.upstream_task_ids) for task in ends]))
        by_name = DAG("by_name")
        SaturnSweepOperator(task_id="sweep", jobs=[job()], cluster=ONE, dag=by_name)
        print(by_name.task_dict["sweep.report"].dag.dag_id)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    *_, arrows, by_name = done.stdout.splitlines()
    assert json.loads(arrows) == [["before"], ["sweep.report"]]
    assert by_name == "by_name"


def test_jobs_may_come_from_an_upstream_task(tmp_path: Path) -> None:
    done = run_python(
        """
        @dag(schedule=None)
        def runtime():
            @task
            def jobs(): return [job().to_dict()]
            SaturnSweepOperator(task_id="sweep", jobs=jobs(), cluster=ONE)
        tasks = {t.task_id: t for t in runtime().tasks}
        print(json.dumps(sorted(tasks["sweep.trials"].upstream_task_ids)))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["jobs"]


MISTAKES = [
    ("jobs=[]", "sweep 'sweep': the sweep has no jobs"),
    ("jobs=job()", "jobs is the job 'a' alone; give a list: jobs=[Job(...)]"),
    ("jobs='a'", "give a list of jobs"),
    ("jobs=[1]", "jobs holds 1 of type int; give Job objects, or grid(...)"),
    ("jobs=[job(load_dataloader='sized:rows')]", "load_dataloader: module 'sized' has no 'rows'"),
    ("jobs=[job(), job()]", "two jobs are named 'a'"),
    ("jobs=[job(load_model='shop.modles:gpt2')]", "job 'a': load_model: there is no module 'shop.modles'"),
    ("jobs=[job(load_model='shop.models:gpt3')]", "job 'a': load_model: module 'shop.models' has no 'gpt3'"),
    (
        "jobs=[job(hparams=HParams(optimizer='torch.optim:AdamX'))]",
        "optimizer: module 'torch.optim' has no 'AdamX'",
    ),
    ("jobs=[job(techniques=['dpp'])]", "job 'a': technique 'dpp' is not in the library; it has"),
    ("techniques=['dpp']", "technique 'dpp' is not in the library; it has"),
    ("techniques=[]", "techniques is []; give a list of names"),
    (
        "jobs=[job(nodes=['gpu-c'])], cluster=TWO",
        "job 'a' is bound to node 'gpu-c'; the cluster has gpu-a, gpu-b",
    ),
    ("cluster=None", "no nodes are known; give the sweep a cluster=Cluster(Node("),
    ("cluster=Cluster(Node('a', 0))", "node 'a': devices is 0"),
    ("profile='always'", "profile is 'always'; it is 'auto' or 'fresh' or 'never'"),
    (
        "jobs=[job(data_args={'day': 1}, neutral=['dya'])]",
        "job 'a': neutral names 'dya', which is no hyper-parameter and no key of its model_args or data_args",
    ),
    ("mode='least'", "mode is 'least'; it is 'min' or 'max'"),
    ("mode='max'", "mode is 'max', but of no metric: without one jobs are compared by their losses"),
    ("register_as='digits/v2'", "register_as is 'digits/v2'; give the name of a registered model"),
    ("planning_seconds=0", "planning_seconds is 0"),
    ("objective='cost'", "objective is 'cost'; it is 'makespan' or 'mean-completion' or 'device-time'"),
    ("objective='device-time'", "objective is 'device-time', which needs a deadline: give deadline="),
    ("deadline='06:00'", "deadline goes with objective='device-time', not with 'makespan'"),
    ("confidence=0.9", "confidence says how surely a deadline is to be kept, and there is none"),
    (
        "objective='device-time', deadline='06:00', confidence=90",
        "confidence is 90; give the odds with which the deadline is to be kept, from 0.5 to 0.99",
    ),
    ("objective='device-time', deadline='06:00', confidence=1.0", "confidence is 1.0; give the odds"),
    ("objective='device-time', deadline='06:00', confidence=0.4", "confidence is 0.4; give the odds"),
    ("objective='device-time', deadline='06:00', confidence='high'", "confidence is 'high'; give the odds"),
    ("objective='device-time', deadline=3600", "deadline is 3600; give the time a sweep may take"),
    (
        "metric='los'",
        "metric is 'los', which job 'a' does not have (it has eval_loss, epoch_loss, loss); "
        "did you mean 'loss'?",
    ),
    (
        "metric='acuracy', jobs=[measured()]",
        "metric is 'acuracy', which job 'a' does not have (it has accuracy, eval_loss, epoch_loss, loss); "
        "did you mean 'accuracy'?",
    ),
    (
        "metric='accuracy', mode='max', jobs=[measured(), job('b')]",
        "metric is 'accuracy', which job 'b' does not have",
    ),
    ("metric='accuracy', jobs=[measured()]", "is 'accuracy' better small or large? Say mode='min' or"),
    (
        "jobs=[measured(metrics={'f1': 'shop.metrics:f1'})]",
        "job 'a': metrics['f1']: module 'shop.metrics' has no 'f1'",
    ),
    (
        "jobs=[measured()], rounds=2, selection=SuccessiveHalving('f1', mode='max')",
        "selection: its metric is 'f1', which job 'a' does not have",
    ),
    ("metric='eval_loss'", "metric is 'eval_loss', but job 'a' has no load_eval_dataloader"),
    ("keep_checkpoints=0", "keep_checkpoints is 0; give a whole number of at least 1"),
    ("allowed_failures='2'", "allowed_failures is '2'"),
    ("retries=-1", "retries is -1"),
    ("tecniques=['ddp']", "there is no 'tecniques'; did you mean 'techniques'?"),
    ("pool='gpus'", "'pool' is for tasks: write train_args={'pool': ...}, or default_args for all tasks"),
    ("asset='s3://x'", "asset is 's3://x'; give an airflow.sdk.Asset"),
    ("experiment=3", "experiment is 3; give the name of an MLflow experiment"),
    ("jobs=[job('a-{lr}')]", "job 'a-{lr}': grid(...) fills {lr} in a name; this job is in none"),
    ("jobs=[{'nome': 'a'}]", "job None: there is no 'nome'; did you mean 'name'?"),
    (
        "jobs=[job(model_args={'n_leyer': 2})]",
        "job 'a': model_args of 'shop.models:gpt2': there is no 'n_leyer'; did you mean 'n_layer'?",
    ),
    (
        "jobs=[job(data_args={'window_size': 2})]",
        "job 'a': data_args of 'shop.data:python_text': there is no 'window_size'; did you mean 'window'?",
    ),
    (
        "jobs=[job(load_dataloader='shop.data:package_text')]",
        "job 'a': data_args of 'shop.data:package_text': it needs 'package'; give it there",
    ),
    (
        "jobs=[job(load_dataloader='sized:data')]",
        "data_args of 'sized:data': it needs 'batch_size'; give it there, or as HParams(batch_size=...)",
    ),
    (
        "jobs=[job(load_model='sized:Model', model_args={'widht': 2})]",
        "job 'a': model_args of 'sized:Model': there is no 'widht'; did you mean 'width'?",
    ),
    (
        "jobs=[job(load_model='sized:Model')]",
        "job 'a': model_args of 'sized:Model': it needs 'width'; give it there",
    ),
    (
        "jobs=[job(hparams=HParams(optimizer_args={'weight_decy': 0.1}))]",
        "optimizer_args of 'torch.optim:AdamW': there is no 'weight_decy'; did you mean 'weight_decay'?",
    ),
    (
        "jobs=[job(hparams=HParams(lr_scheduler='torch.optim.lr_scheduler:StepLR'))]",
        "lr_scheduler_args of 'torch.optim.lr_scheduler:StepLR': it needs 'step_size'; give it there",
    ),
    (
        "jobs=[job(load_model='sized:Stepping', own_step=True, hparams=HParams(lr=0.1))]",
        "job 'a': hparams: lr is 0.1, which changes nothing where the model has configure_optimizers",
    ),
    ("selection=SuccessiveHalving, rounds=2", "selection is the class SuccessiveHalving; write Succ"),
    ("jobs=[job(hparams=HParams(optimizer_args={'lr': 1}))]", "optimizer_args has 'lr'; give it as HParams("),
    (
        "jobs=[job(hparams=HParams(lr_scheduler_args={'T_max': 1}))]",
        "lr_scheduler_args are of no lr_scheduler",
    ),
    ("preempt=True, rounds=2", "preempt=True goes with one round"),
    ("mlflow_conn_id=3", "mlflow_conn_id is 3; give the id of an Airflow connection"),
    ("jobs=[job(trust=['tensr'])]", "job 'a': trust: technique 'tensr' is not in the library"),
    ("selection='halving', rounds=2", "selection is 'halving'; give SuccessiveHalving(...)"),
    (
        "jobs=[measured()], rounds=2, selection=SuccessiveHalving(min_epochs=5)",
        "selection: min_epochs is 5, but no job trains so long",
    ),
    ("jobs=[job(techniques=['ddp'])], techniques=['fsdp']", "job 'a' may use ddp, the sweep fsdp"),
    ("checkpoint_every='1h'", "checkpoint_every is '1h'"),
    (
        "planning_seconds=__import__('datetime').timedelta(0)",
        "planning_seconds is 0.0; give a number of seconds or a timedelta, above 0",
    ),
    ("jobs=[job('a%d' % i) for i in range(1025)]", "the sweep has 1025 jobs, more than Airflow maps over"),
]


SIZED = """
class Model:
    def __init__(self, width, depth=2): ...
class Stepping:
    def configure_optimizers(self): ...
def data(batch_size):
    rows = batch_size
"""


def test_every_mistake_has_one_message(tmp_path: Path) -> None:
    (tmp_path / "sized.py").write_text(SIZED)
    lines = "\n".join(f"lambda: build({arguments})," for arguments, _ in MISTAKES)
    done = run_python(
        f"""
sys.path.append({str(tmp_path)!r})
messages = []
for mistake in [
{lines}
]:
    try:
        mistake()
    except InvalidSweepError as error:
        messages.append(str(error))
    else:
        messages.append("nothing was said")
print(json.dumps(messages))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for (arguments, expected), message in zip(MISTAKES, said, strict=True):
        assert expected in message, arguments
        assert "\n" not in message, arguments


def test_the_objective_and_the_deadline_reach_every_plan(tmp_path: Path) -> None:
    done = run_python(
        """
        from datetime import timedelta
        for more in ({"deadline": "06:00"}, {"deadline": timedelta(hours=6), "rounds": 2}):
            more |= {"checkpoint_every": timedelta(minutes=2), "planning_seconds": timedelta(seconds=3)}
            tasks = build(objective="device-time", **more).tasks
            plans = [t.settings for t in tasks if t.task_id.endswith("plan")]
            times = lambda s: [s.checkpoint_every, s.planning_seconds]
            print(json.dumps([[s.objective, vars(s.deadline), times(s)] for s in plans]))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    clock, span = map(json.loads, done.stdout.splitlines()[-2:])
    assert clock == [["device-time", {"seconds": None, "clock": "06:00"}, [120, 3]]]
    assert span == [["device-time", {"seconds": 21600, "clock": None}, [120, 3]]] * 2


def test_references_may_be_left_to_the_nodes(tmp_path: Path) -> None:
    done = run_python(
        "build(jobs=[job(load_model='only.there:gpt2')])", tmp_path, AIRFLOW__SATURN__CHECK_REFERENCES="False"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["nightly_retrain"])
def test_the_example_dags_parse(name: str, tmp_path: Path) -> None:
    done = run_python(f"import {name}", tmp_path)
    assert done.returncode == 0, done.stderr
