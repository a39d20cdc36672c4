"""Jobs from upstream tasks are data: they pass the checks of jobs in the file, and may name less."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saturn_airflow.model import allowed_modules
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.secrets import Secret
from saturn_airflow.operators import upstream_jobs


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
