"""The environment of processes that run users' code."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import spec_for

from saturn_airflow import HParams, Job
from saturn_airflow.launch import environment, fork_server, runs

KEYS = {
    "AIRFLOW__CORE__FERNET_KEY": "key-of-connections",
    "AIRFLOW__API_AUTH__JWT_SECRET": "key-of-tokens",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://saturn:password-of-database@db/airflow",
    "AIRFLOW_CONN_SHOP": "password-of-shop",
    "POSTGRES_PASSWORD": "password-of-postgres",
}
NEEDED = {
    "HF_HOME": "/models",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_DEBUG": "INFO",
    "AWS_ACCESS_KEY_ID": "id",
    "https_proxy": "http://proxy",
    "SMALL_JOBS_MARK": "of one's own",
}


@pytest.mark.ranks
@pytest.mark.parametrize("forked", [True, False])
def test_a_rank_does_not_have_the_keys_of_the_deployment(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {**KEYS, **NEEDED}.items():
        monkeypatch.setenv(name, value)
    runs._say_kept_back.cache_clear()
    if not forked:
        monkeypatch.setattr(fork_server, "start", lambda *_: None)
    job = Job(
        "looks",
        load_model="environment_jobs:linear",
        load_dataloader="small_jobs:noise",
        loss_function="small_jobs:squared",
        model_args={"write_to": str(tmp_path / "seen")},
        hparams=HParams(batches=1),
    )
    with caplog.at_level(logging.INFO):
        run = runs.start(spec_for(tmp_path, job))
    assert run.wait()["status"] == "finished"
    seen = json.loads((tmp_path / "seen").read_text())
    assert len(seen["of_processes"]) >= 2, "the rank and its supervisor, at least"
    for secret in ("key-of", "password-of"):
        assert [name for name, value in seen["own"].items() if secret in value] == []
        assert [text for text in seen["of_processes"] if secret in text] == []
    assert {name: seen["own"].get(name) for name in NEEDED} == NEEDED
    # By which jobs number words and classes: a run that goes on does it as the one before.
    code = "import json; print(json.dumps(list(set('red green blue black'.split()))))"
    variables = {**os.environ, "PYTHONHASHSEED": "0"}
    assert seen["order"] == json.loads(subprocess.check_output([sys.executable, "-c", code], env=variables))
    assert "POSTGRES_PASSWORD" in caplog.text
    assert max(record.levelno for record in caplog.records) == logging.INFO, "there is nothing to do"
    assert "AIRFLOW_CONN_SHOP" in caplog.text
    assert "password-of" not in caplog.text


def test_what_is_passed_on_and_what_is_told() -> None:
    worker = {
        **KEYS,
        **NEEDED,
        "LD_LIBRARY_PATH": "/lib",
        "SHOP_URL": "u",
        "FEATURES": "f",
        "SHLVL": "1",
        environment.VARIABLE: "SHOP_*, SMALL_JOBS_MARK",
    }
    passed, kept_back = environment.for_users_code(worker)
    assert set(passed) == {*NEEDED, "LD_LIBRARY_PATH", "SHOP_URL", environment.VARIABLE}
    assert kept_back == ["AIRFLOW_CONN_SHOP", "FEATURES", "POSTGRES_PASSWORD"]
    assert "pass_environment" in environment.told(kept_back)
    assert environment.told([]) == ""
    assert environment.for_users_code({**worker, environment.VARIABLE: "*"}) == (
        {**worker, environment.VARIABLE: "*"},
        [],
    )
