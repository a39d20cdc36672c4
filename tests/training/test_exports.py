"""A trained model comes back from its export as it was."""

from __future__ import annotations

import glob
import json
import site
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from saturn_airflow import HParams, Job, SaturnError
from saturn_airflow.launch import runs
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.training import model_code, pyfunc
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.exports import export_model, export_trained, load_exported
from saturn_airflow.training.loading import made_model

DAGS = Path(__file__).parents[2] / "dags"


@pytest.mark.ranks
def test_a_finished_jobs_model_is_exported_and_loads_with_its_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(
        "gpt2",
        "shop.models:gpt2",
        "shop.data:python_text",
        "shop.models:lm_loss",
        HParams(batches=3, batch_size=8),
        model_args={"n_embd": 32},
        data_args={"samples": 64},
    )
    spec = runs.RunSpec(
        job=job,
        technique="fsdp",
        folder=str(tmp_path / "job"),
        node="a",
        kind="cpu",
        slots=2,
        devices=2,
        leases_folder=str(tmp_path / "leases"),
        path=(str(DAGS),),
    )
    end = runs.start(spec).wait()
    assert end["status"] == "finished", end
    monkeypatch.syspath_prepend(DAGS)
    model = load_exported(end["result"]["model"])
    (checkpoint,) = glob.glob(str(tmp_path / "job" / "checkpoints" / "step-*"))
    for name, weight in read_weights(checkpoint).items():
        assert torch.equal(model.get_parameter(name), weight), name
    assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]
    assert not model.training
    exported = Path(end["result"]["model"])
    assert Job.from_dict(json.loads((exported / "job.json").read_text())) == job
    assert export_model(checkpoint, job, exported) == exported  # a second export replaces the first


def test_all_of_an_export_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, synced: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    job = Job("a", "loop_jobs:line", "loop_jobs:points", "loop_jobs:loss")
    folder = export_trained(made_model(job), job, tmp_path / "model")
    assert {path.stat().st_ino for path in (folder, *folder.rglob("*"))} <= synced


@pytest.mark.parametrize("around", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_the_weights_of_a_module_around_the_model_are_its_own(
    around: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A technique exports at the end of a training: that is not lost for a name."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    job = Job("a", "loop_jobs:line", "loop_jobs:points", "loop_jobs:loss")
    trained = {f"{around}{name}": weight + 1 for name, weight in made_model(job).state_dict().items()}
    state = load_exported(export_trained(trained, job, tmp_path / "model")).state_dict()
    assert all(torch.equal(state[name], trained[f"{around}{name}"]) for name in state)
    with pytest.raises(ValueError, match=r"is not the model that load_model .* gives: .*Unexpected key"):
        export_trained({"other.weight": torch.ones(1)}, job, tmp_path / "model")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaturnError, match=r"holds no trained model: model.safetensors and job.json"):
        load_exported(tmp_path)


def looping(folder: str) -> torch.nn.Module:
    return load_exported(folder)


def test_a_load_model_that_loads_its_own_champion_is_told_of_init_from(tmp_path: Path) -> None:
    job = Job("a", f"{__name__}:looping", "shop.data:digits", model_args={"folder": str(tmp_path)})
    (tmp_path / "job.json").write_text(json.dumps(job.to_dict()))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SaturnError, match=r"loads a model that it made itself.*init_from"):
        load_exported(tmp_path)


@pytest.mark.parametrize("load_model", ["os:system", "shop.models:gpt2"])
def test_a_models_file_does_not_choose_what_is_imported(
    load_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "name": "a",
        "load_model": load_model,
        "load_dataloader": "shop.data:x",
        "model_args": {"command": "false"},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    save_file({}, tmp_path / "model.safetensors")
    monkeypatch.delitem(sys.modules, "shop.models", raising=False)
    monkeypatch.setenv("SATURN_ALLOWED_MODULES", "my_models")
    with pytest.raises(InvalidSweepError, match=r"standard library|is not among"):
        load_exported(tmp_path)
    with pytest.raises(InvalidSweepError, match=r"standard library|is not among"):
        load_exported(tmp_path, allowed_modules=["my_models"])
    with pytest.raises(ValueError, match="not among SATURN_ALLOWED_MODULES"):
        pyfunc._load_pyfunc(str(tmp_path))
    assert "shop.models" not in sys.modules


@pytest.mark.parametrize("name", ["run", "feed", "load"])
def test_nor_what_an_allowed_module_only_imports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without the setting: functions that start processes, and one that unpickles."""
    (tmp_path / "its_models.py").write_text(
        "from subprocess import run\nfrom torch import load\n"
        "from saturn_airflow.deployment.local import _feed as feed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = {"name": "a", "load_model": f"its_models:{name}", "load_dataloader": "shop.data:x"}
    (tmp_path / "job.json").write_text(json.dumps({**fields, "model_args": {"args": "false"}}))
    save_file({}, tmp_path / "model.safetensors")
    for setting in ("", "its_models"):
        monkeypatch.setenv("SATURN_ALLOWED_MODULES", setting)
        if name == "load" and not setting:
            continue
        with pytest.raises(InvalidSweepError, match=r"which jobs can't name|Saturn's own|is not among"):
            load_exported(tmp_path)
        with pytest.raises(ValueError, match="not among SATURN_ALLOWED_MODULES"):
            pyfunc._load_pyfunc(str(tmp_path))


class OddBuffers(torch.nn.Linear):
    """A sparse buffer, and one whose elements lie in the same place."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("adjacent", torch.eye(3).to_sparse())
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())
        self.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
        self.register_buffer("count", torch.tensor(0))


def test_sparse_buffers_and_those_whose_elements_share_memory_are_loaded(tmp_path: Path) -> None:
    trained = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "count": torch.tensor([3])}
    trained |= {
        "adjacent": 2 * torch.eye(3),
        "rows": 3 * torch.eye(3),
        "wide": torch.arange(12.0).reshape(4, 3),
    }
    save_file(trained, tmp_path / "model.safetensors")
    model = OddBuffers()
    pyfunc.load_weights(model, tmp_path / "model.safetensors")
    assert (model.adjacent.layout, model.rows.layout) == (torch.sparse_coo, torch.sparse_csr)
    for name, value in trained.items():
        found = getattr(model, name).detach()
        found = found.to_dense() if found.layout != torch.strided else found
        assert torch.equal(found.reshape(value.shape), value), name


def test_a_package_that_an_installer_links_from_its_cache_is_no_code_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "package").mkdir(parents=True)
    (tmp_path / "site" / "package-1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "package-1.dist-info" / "METADATA").write_text("Name: package\nVersion: 1\n")
    (tmp_path / "site" / "package-1.dist-info" / "RECORD").write_text("package/__init__.py,,\n")
    for name in ("package", "worked_on"):
        (tmp_path / "site" / name).symlink_to(tmp_path / "cache" / "package")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
    assert model_code._is_installed(tmp_path / "site" / "package")
    assert not model_code._is_installed(tmp_path / "cache" / "package")
    assert not model_code._is_installed(tmp_path / "site" / "worked_on"), "somebody linked it to work on it"


def test_a_package_on_any_other_path_that_an_installer_recorded_there_is_no_code_of_the_job(
    tmp_path: Path,
) -> None:
    # As PYTHONPATH and .pth files have it: else each model would carry the whole of torch.
    for name in ("package", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "package-1.dist-info").mkdir()
    (tmp_path / "package-1.dist-info" / "METADATA").write_text("Name: package\nVersion: 1\n")
    (tmp_path / "package-1.dist-info" / "RECORD").write_text("package/__init__.py,,\n")
    assert model_code._is_installed(tmp_path / "package")
    assert not model_code._is_installed(tmp_path / "own")
