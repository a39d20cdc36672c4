"""Jobs from upstream tasks are data: they pass the checks of jobs in the file, and may name less."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.definitions.xcom_arg import XComArg

from saturn_airflow import Cluster, Node
from saturn_airflow.model import allowed_modules
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.secrets import Secret
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import upstream_jobs
from saturn_airflow.operators.trials_task import TrialsOperator


@pytest.fixture
def dag_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DAG file with a module of the user's beside it."""
    monkeypatch.delenv(allowed_modules.VARIABLE, raising=False)
    monkeypatch.delenv("AIRFLOW__SATURN__ALLOWED_MODULES", raising=False)
    (tmp_path / "beside_dags.py").write_text(
        "import torch\nfrom joblib import load, dump as put\nfrom sklearn.metrics import *\n"
        "from sklearn.svm import SVC\ntry:\n    from joblib import hash\nexcept ImportError: hash = None\n"
        "def model():\n    from joblib import data\ndef data(): ...\ndef accuracy_score(): ...\n"
        "half = load\n"
    )
    (tmp_path / "kept_apart").mkdir()
    (tmp_path / "kept_apart" / "__init__.py").write_text(
        "from .models import net\nfrom .models import loads\n"
    )
    (tmp_path / "kept_apart" / "models.py").write_text("from joblib import load as loads\ndef net(): ...\n")
    file = tmp_path / "dag.py"
    file.write_text(
        "import joblib, sklearn.linear_model\nfrom sklearn.datasets import load_digits\n"
        "model = 'sklearn.svm:SVC'\ndb = 'shop_db'\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return file


def job(**changed: object) -> Job:
    fields = {"load_model": "beside_dags:model", "load_dataloader": "beside_dags:data", **changed}
    return Job("a", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"load_dataloader": "sklearn.datasets:load_digits"},
        {"load_model": "sklearn.svm:SVC"},
        {"load_model": "kept_apart:net"},
        {"load_model": "beside_dags:SVC"},  # which the DAG's file names
        {"metrics": {"right": "beside_dags:accuracy_score"}, "load_eval_dataloader": "beside_dags:data"},
        {"connections": ["shop_db"]},
        {
            "hparams": HParams(
                lr_scheduler="torch.optim.lr_scheduler:StepLR", lr_scheduler_args={"step_size": 1}
            )
        },
    ],
)
def test_what_the_dag_knows_may_be_named(changed: dict[str, object], dag_file: Path) -> None:
    upstream_jobs.check([job(**changed)], str(dag_file))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"load_model": "os:system"}, "load_model 'os:system': 'os' is of Python's standard library"),
        ({"load_model": "builtins:exec"}, "standard library"),
        ({"loss_function": "joblib:load"}, "loss_function 'joblib:load' comes from an upstream task"),
        (
            {"load_model": "sklearn.linear_model:Ridge"},
            "allow 'sklearn.linear_model' with .saturn. allowed_mod",
        ),
        # What a module of the user's own imports is not its own.
        (
            {"load_model": "beside_dags:load"},
            "'beside_dags:load' comes from an upstream task, and 'joblib:load'",
        ),
        ({"load_model": "beside_dags:put"}, "'joblib:dump' neither lies beside"),
        ({"load_model": "beside_dags:hash"}, "'joblib:hash' neither lies beside"),
        ({"load_model": "beside_dags:log_loss"}, "'sklearn.metrics:log_loss' neither lies beside"),
        ({"load_model": "kept_apart:loads"}, "'joblib:load' neither lies beside"),
        (
            {"metrics": {"x": "joblib:load"}, "load_eval_dataloader": "beside_dags:data"},
            r"metrics\['x'\] 'joblib:load' comes from an upstream task",
        ),
        ({"on_epoch": "joblib:load"}, "on_epoch 'joblib:load' comes from an upstream task"),
        # This package starts processes.
        (
            {"load_model": "saturn_airflow.deployment.local:_feed"},
            "'saturn_airflow.deployment.local' is Saturn's own, which jobs can't name",
        ),
        ({"hparams": HParams(parameter_groups="joblib:load")}, "parameter_groups 'joblib:load'"),
        ({"load_model": "kept_apart:nothing"}, "module 'kept_apart' has no 'nothing'"),
        ({"load_model": "not_there:model"}, "there is no module 'not_there'"),
        ({"model_args": {"depth": 3}}, "takes no|depth"),
        (
            {"connections": ["prod_db"]},
            "connections is of connection 'prod_db', and jobs",
        ),
        (
            {"model_args": {"x": Secret("prod_db", "password")}},
            r"model_args.x is of connection 'prod_db', and",
        ),
    ],
)
def test_the_rest_is_refused_by_name(changed: dict[str, object], told: str, dag_file: Path) -> None:
    with pytest.raises(InvalidSweepError, match=told):
        upstream_jobs.check([job(**changed)], str(dag_file))


def test_the_setting_decides_where_it_is_set(dag_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__ALLOWED_MODULES", "beside_dags, joblib")
    monkeypatch.setenv(allowed_modules.VARIABLE, "to be set anew, and put back after the test")
    upstream_jobs.check([job(loss_function="joblib:load")], str(dag_file))
    with pytest.raises(InvalidSweepError, match=r"'sklearn.svm' is not among \[saturn\] allowed_modules"):
        upstream_jobs.check([job(load_model="sklearn.svm:SVC")], str(dag_file))


# --- What another task of the sweep handed on, which whoever may edit XComs can change ---


def task_of(dag_file: Path, *listed: Job, from_upstream: bool = False) -> BaseOperator:
    """A task that is about to run a job of a sweep; ``listed`` are those in the DAG's file."""
    settings = SweepSettings(cluster=Cluster(Node("a", 1, "cpu")), group="sweep")
    with DAG("d", schedule=None) as dag:
        dag.fileloc = str(dag_file)
        jobs = XComArg(BaseOperator(task_id="upstream")) if from_upstream else [j.to_dict() for j in listed]
        TrialsOperator(task_id=settings.trials_task, jobs=jobs, settings=settings)
        task = BaseOperator(task_id="train")
    task.settings = settings
    return task


OF_A_LIBRARY = job(load_model="sklearn.linear_model:Ridge", connections=["shop_of_north"])
TEMPLATED = job(model_args={"x": Secret("shop_of_{{ where }}", "password")})


@pytest.fixture
def shop_db(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOP_DB", "SHOP_OF_NORTH", "PROD_DB"):
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", "postgres://ann:a-password@host/db")


@pytest.mark.parametrize(
    ("listed", "handed_on"),
    [
        ([OF_A_LIBRARY], OF_A_LIBRARY),  # the text of the file need not have it: a loop may have made it
        ([job(), replace(OF_A_LIBRARY, name="b")], OF_A_LIBRARY),  # as a champion of another job
        ([TEMPLATED], job(model_args={"x": Secret("shop_of_north", "password")})),
        ([replace(OF_A_LIBRARY, name="{{ where }}")], OF_A_LIBRARY),
        ([job()], job(connections=["shop_db"])),  # which the DAG's file names
        (None, job(connections=["shop_db"])),
    ],
    ids=["listed", "of another job", "of a template", "under a template's name", "of the file", "upstream"],
)
def test_what_the_sweeps_jobs_name_is_run(
    listed: list[Job] | None, handed_on: Job, dag_file: Path, shop_db: None
) -> None:
    task = task_of(dag_file, *listed or (), from_upstream=listed is None)
    handed = upstream_jobs.handed_on(handed_on, task, {"where": "north"})  # type: ignore[typeddict-unknown-key]
    assert bool(handed) == bool(handed_on.connections or handed_on.model_args)


@pytest.mark.parametrize("from_upstream", [False, True])
@pytest.mark.parametrize(
    ("edited", "told"),
    [
        ({"load_model": "os:system"}, "load_model 'os:system': 'os' is of Python's standard library"),
        ({"load_model": "builtins:exec"}, "standard library"),
        ({"load_model": "subprocess:call"}, "standard library"),
        (
            {"load_dataloader": "joblib:load"},
            "load_dataloader 'joblib:load' comes from another task of the sweep",
        ),
        ({"load_model": "beside_dags:load"}, "'joblib:load' neither lies beside"),
        ({"hparams": HParams(optimizer="joblib:load")}, "optimizer 'joblib:load'"),
        ({"load_model": "saturn_airflow.deployment.local:_feed"}, "is Saturn's own"),
        ({"connections": ["prod_db"]}, "connections is of connection 'prod_db', and jobs from another task"),
        ({"data_args": {"x": Secret("prod_db", "password")}}, "data_args.x is of connection 'prod_db'"),
    ],
)
def test_what_an_edited_xcom_names_is_refused(
    edited: dict[str, object], told: str, from_upstream: bool, dag_file: Path, shop_db: None
) -> None:
    task = task_of(dag_file, job(), from_upstream=from_upstream)
    with pytest.raises(InvalidSweepError, match=told):
        upstream_jobs.handed_on(job(**edited), task, {})


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (5, r"jobs is 5; the upstream task has to return a list of what Job\.to_dict\(\) returns"),
        ("abc", "jobs is 'abc'; the upstream task has to return a list"),
        ({"name": "a"}, "jobs is {'name': 'a'}; the upstream task has to return a list"),
        ([job().to_dict(), 7], "a job is a Job or what its to_dict.. returned, not 7"),
        (
            [{**job().to_dict(), "name": "two", "hparams": {"lr": "fast"}}],
            "job 'two': hparams: lr is 'fast'; it must be a number of at least 0",
        ),
        (None, "the sweep has no jobs"),
    ],
)
def test_an_upstream_task_that_returns_no_jobs_is_told_so(
    returned: object, told: str, dag_file: Path
) -> None:
    task = task_of(dag_file, from_upstream=True)
    trials: Any = task.dag.get_task("sweep.trials")
    trials.jobs = returned
    with pytest.raises(InvalidSweepError, match=told):
        trials._checked_jobs({})
