"""A job's code that is edited while it trains: who goes on from a checkpoint is told."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.code_files import CodeFiles
from saturn_airflow.training.loop import train
from saturn_airflow.training.optim import own_classes
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.used_modules import python_modules

MODEL = """
from helper_of_edited import P
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(P), nn.Linear(8, 3))
"""
HELPER = "P = 0.1\n"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "edited_model.py").write_text(MODEL)
    (folder / "helper_of_edited.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(folder))
    return folder


class LazyModule(types.ModuleType):
    """Imports another when it is asked for what it lacks, as speechbrain's do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("package_that_is_not_there"), name)


def test_no_module_is_asked_for_what_it_would_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy_module", LazyModule("lazy_module"))
    assert "lazy_module" not in CodeFiles().digests()
    assert own_classes.is_own("lazy_module")
    lazy = Job("lazy", load_model="lazy_module:net", load_dataloader="d:d", loss_function="l:l")
    assert "lazy_module" in python_modules(lazy, torch.nn.Linear(1, 1))


def test_what_counts_is_the_file_that_was_imported(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("edited_model")
    importlib.import_module("sysconfig").get_config_vars()
    # What a supervisor that is started anew has there is another file than what one that is forked has.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(code / "edited_model.py"), raising=False)
    try:
        files = CodeFiles()
        before = dict(files.digests())
        assert {"edited_model", "helper_of_edited"} <= before.keys()
        others = ("saturn_airflow.", "torch", "json", "__main__", "__mp_main__", "_sysconfigdata")
        assert not {name for name in before if name.startswith(others)}
        (code / "helper_of_edited.py").write_text("P = 0.25\n")
        assert files.digests() == before, "this process has the code of before"
        assert files.why_mixed(before, "step-3") is None
        told = CodeFiles().why_mixed(before, "step-3")
        assert told is not None
        assert "the code of helper_of_edited has changed since step-3 was written" in told
    finally:
        for name in (module.__name__, "helper_of_edited"):
            del sys.modules[name]


def _train(path: str, requests: list[TrainRequest], ranks: Ranks) -> list[str]:
    sys.path.insert(0, path)
    said: list[dict[str, Any]] = []
    for request in requests:
        train(request, dataclasses.replace(ranks, _emit=said.append))
    return [event["message"] for event in said if event["event"] == "warning" and event.get("mixed")]


@pytest.mark.ranks
def test_who_goes_on_by_other_code_is_told(code: Path, tmp_path: Path) -> None:
    names = ("edited_model:net", "loop_jobs:points", "loop_jobs:loss")
    job = Job("j", *names, hparams=HParams(batches=6, batch_size=8))
    part = TrainRequest(job=job, technique="single", folder=str(tmp_path / "job"), batch_count=2)
    (same,) = ranks_module.launch(_train, str(code), [part, part], size=1)
    assert same == []
    (code / "helper_of_edited.py").write_text("P = 0.25\n")
    ((told,),) = ranks_module.launch(_train, str(code), [part], size=1)
    assert "the code of helper_of_edited has changed since" in told
