"""Models in MLflow: loaded by MLflow's own means, and registered only when they beat the champion."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from saturn_airflow import tracking
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.tracking import models
from saturn_airflow.tracking.mlflow_runs import SweepRun


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def name() -> str:
    return f"digits-{uuid.uuid4().hex[:8]}"


def sweep_of(uri: str, folder: Path, with_model: bool = True, **losses: float) -> SweepRun:
    """A sweep whose jobs ended with these losses, each with a model."""
    tags = {"saturn.sweep": f"dag/{uuid.uuid4()}/sweep"}
    sweep = tracking.open_sweep(uri, "registered", "sweep", tags, {}, folder / "sweep", 0)
    for job, loss in losses.items():
        run = tracking.open_job(uri, sweep, job, {}, {}, folder / "sweep" / job)
        run.follow({"event": "eval", "step": 1, "eval_loss": loss})
        if with_model:
            exported = folder / f"exported-{job}"
            exported.mkdir()
            (exported / "model.safetensors").write_bytes(job.encode())
            run.log_model_folder(exported)
        run.close()
    return sweep


def best(job: str, value: float) -> dict[str, Any]:
    return {"job": job, "metric": "eval_loss", "value": value}


@pytest.mark.slow
def test_only_what_beats_the_champion_is_registered(uri: str, name: str, tmp_path: Path) -> None:
    first = sweep_of(uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5))
    assert (first["version"], first["champion"]) == ("1", None)
    for number, loss in (("2", 0.5), ("3", 0.7)):
        kept = sweep_of(uri, tmp_path / number, a=loss).register(name, best("a", loss))
        assert kept["version"] is None
        assert kept["champion"] == {"version": "1", "value": 0.5, "scored": False}
        assert "does not beat version 1" in kept["reason"]
    better = sweep_of(uri, tmp_path / "4", b=0.4)
    assert better.register(name, best("b", 0.4))["version"] == "2"
    assert better.register(name, best("b", 0.4))["version"] == "2"  # as when a report runs again
    mlflow = client(uri)
    champion = mlflow.get_model_version_by_alias(name, "champion")
    assert (str(champion.version), champion.tags["saturn.job"]) == ("2", "b")
    assert len(mlflow.search_model_versions(f"name = '{name}'")) == 2
    run = mlflow.get_run(champion.run_id)
    assert run.data.metrics["eval_loss"] == 0.4


@pytest.mark.slow
def test_of_a_job_that_was_trained_anew_the_new_model_is_registered(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep = sweep_of(embedded_uri, tmp_path / "1", a=0.5)
    assert sweep.register(name, best("a", 0.5))["version"] == "1"
    # As when its task was cleared: what was trained before is set aside, and has a run of its own.
    anew = tracking.open_job(embedded_uri, sweep, "a", {}, {}, tmp_path / "anew", 2)
    exported = tmp_path / "exported-anew"
    exported.mkdir()
    (exported / "model.safetensors").write_bytes(b"anew")
    anew.follow({"event": "eval", "step": 1, "eval_loss": 0.4})
    anew.log_model_folder(exported)
    assert anew.close()
    found = sweep.register(name, best("a", 0.4), training=2)
    champion = client(embedded_uri).get_model_version_by_alias(name, "champion")
    assert (found["version"], str(champion.version)) == ("2", "2")
    assert champion.run_id == anew.id
    folder = client(embedded_uri).download_artifacts(champion.run_id, "model", str(tmp_path))
    assert Path(folder, "model.safetensors").read_bytes() == b"anew"


@pytest.mark.slow
def test_where_larger_is_better_the_larger_wins(embedded_uri: str, name: str, tmp_path: Path) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5), "max")
    assert (
        sweep_of(embedded_uri, tmp_path / "2", a=0.4).register(name, best("a", 0.4), "max")["version"] is None
    )
    assert (
        sweep_of(embedded_uri, tmp_path / "3", a=0.6).register(name, best("a", 0.6), "max")["version"] == "2"
    )


@pytest.mark.slow
def test_a_challenger_is_measured_against_the_champion_and_leaves_it(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5))
    assert (
        sweep_of(embedded_uri, tmp_path / "2", a=0.6).register(f"{name}@challenger", best("a", 0.6))[
            "version"
        ]
        is None
    )
    found = sweep_of(embedded_uri, tmp_path / "3", a=0.3).register(f"{name}@challenger", best("a", 0.3))
    assert (found["alias"], found["version"]) == ("challenger", "2")
    aliases = client(embedded_uri).get_registered_model(name).aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"champion": "1", "challenger": "2"}


def test_a_champion_without_the_metric_stays(embedded_uri: str, name: str, tmp_path: Path) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5))
    other = sweep_of(embedded_uri, tmp_path / "2", a=0.1).register(
        name, {**best("a", 0.1), "metric": "epoch_loss"}
    )
    assert other["version"] is None
    assert "has no epoch_loss" in other["reason"]


@pytest.mark.slow
def test_what_counts_is_the_champions_score_on_tonights_data(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5))
    against: dict[str, Any] = {"version": "1", "value": 0.3, "why": None}
    # Tonight's data are easier: 0.4 is less than 0.5 was, and worse than the champion.
    kept = sweep_of(embedded_uri, tmp_path / "2", a=0.4).register(name, best("a", 0.4), "min", against)
    assert (kept["version"], kept["champion"]) == (None, {"version": "1", "value": 0.3, "scored": True})
    assert kept["beaten_by"] == pytest.approx(-0.1)
    # They are harder: 0.6 is more than 0.5 was, and better than the champion.
    against["value"] = 0.7
    taken = sweep_of(embedded_uri, tmp_path / "3", a=0.6).register(name, best("a", 0.6), "min", against)
    assert (taken["version"], taken["beaten_by"]) == ("2", pytest.approx(0.1))
    tags = client(embedded_uri).get_model_version(name, "2").tags
    assert (tags["saturn.champion"], tags["saturn.champion_value"]) == ("1", "0.7")

    for why in ({"version": "2", "value": None, "why": "out of memory"}, {"version": None, "why": "away"}):
        another = sweep_of(embedded_uri, tmp_path / str(why["why"]), a=0.1)
        stays = another.register(name, best("a", 0.1), "min", why)
        assert stays["version"] is None
        assert stays["reason"] == f"version 2 (champion) stays: {why['why']}"
    # Who became champion since has the value it was registered with.
    late = sweep_of(embedded_uri, tmp_path / "4", a=0.5).register(name, best("a", 0.5), "min", against)
    assert (late["version"], late["champion"]) == ("3", {"version": "2", "value": 0.6, "scored": False})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_champion_without_a_number_is_beaten_by_every_number(
    mode: str, embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5), mode)
    against: dict[str, Any] = {"version": "1", "value": None, "why": None, "no_number": True}
    taken = sweep_of(embedded_uri, tmp_path / "2", a=9.0).register(name, best("a", 9.0), mode, against)
    assert (taken["version"], taken["champion"]) == ("2", {"version": "1", "value": None, "scored": True})
    assert "beaten_by" not in taken
    assert "beats version 1 (champion), which has nan on the same data" in taken["reason"]
    for night, lost in enumerate((math.nan, math.inf, -math.inf), start=3):
        # As a run of an earlier version, whose last value nobody looked at.
        version = client(embedded_uri).get_model_version_by_alias(name, "champion")
        client(embedded_uri).log_metric(version.run_id, "eval_loss", lost, step=night)
        more = sweep_of(embedded_uri, tmp_path / str(night), a=8.0).register(name, best("a", 8.0), mode)
        assert more["version"] == str(night), more


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["with a lock", "of two deployments"])
def test_of_two_that_register_at_once_the_better_is_the_champion(
    embedded_uri: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    sweeps = {"worse": sweep_of(embedded_uri, tmp_path / "w", worse=0.5)}
    sweeps["better"] = sweep_of(embedded_uri, tmp_path / "b", better=0.4)
    decided, measured = threading.Barrier(2), models._measured
    turns: dict[str, int] = {}

    def slowly(mlflow: Any, record: Any, *others: Any) -> Any:
        found = measured(mlflow, record, *others)
        turns[record["job"]] = turns.get(record["job"], 0) + 1
        if turns[record["job"]] == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                decided.wait(1.0)  # both have seen that there is no champion, unless they take turns
            time.sleep(1.5 * (record["job"] == "worse"))  # and the worse is the last to say it is it
        return found

    monkeypatch.setattr(models, "_measured", slowly)
    found: dict[str, Any] = {}

    def register(job: str, value: float) -> None:
        locks = tmp_path / ("locks" if shared else f"locks-{job}")
        found[job] = sweeps[job].register(name, best(job, value), locks=locks)

    threads = [threading.Thread(target=register, args=one) for one in (("worse", 0.5), ("better", 0.4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    champion = client(embedded_uri).get_model_version_by_alias(name, "champion")
    assert champion.tags["saturn.job"] == "better", found
    if not shared:
        assert "does not beat" in found["worse"]["reason"]
        assert len(client(embedded_uri).search_model_versions(f"name = '{name}'")) == 1


@pytest.mark.slow
def test_a_champion_whose_run_is_gone_is_measured_by_its_tags(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep_of(embedded_uri, tmp_path / "1", a=0.5).register(name, best("a", 0.5))
    champion = client(embedded_uri).get_model_version_by_alias(name, "champion")
    client(embedded_uri).delete_run(champion.run_id)
    assert sweep_of(embedded_uri, tmp_path / "2", a=0.6).register(name, best("a", 0.6))["version"] is None
    assert sweep_of(embedded_uri, tmp_path / "3", a=0.4).register(name, best("a", 0.4))["version"] == "2"


def test_a_run_without_a_model_is_never_registered_and_blocks_nothing(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep = sweep_of(embedded_uri, tmp_path, with_model=False, a=0.5)
    assert sweep.register(name, best("a", 0.5))["reason"].endswith("ended without a model")
    assert sweep.close()


def test_what_could_not_be_registered_is_when_mlflow_is_back(
    embedded_uri: str, name: str, tmp_path: Path
) -> None:
    sweep = sweep_of("http://127.0.0.1:9", tmp_path, a=0.5)
    found = sweep.register(name, best("a", 0.5))
    assert found["version"] is None
    assert "has not answered" in found["reason"]
    assert not sweep.close()
    assert tracking.send_outbox(embedded_uri, tmp_path / "sweep")
    assert str(client(embedded_uri).get_model_version_by_alias(name, "champion").version) == "1"


@pytest.mark.parametrize(
    "text", ["", "a/b", "a:b", "a@", "a@b c", "a@latest", "a@v3", "a@b@c", "\x00", 3, None]
)
def test_a_name_that_mlflow_would_refuse_is_refused_first(text: object) -> None:
    with pytest.raises(InvalidSweepError, match="register_as"):
        models.parse_name(text)


class Doubled(nn.Module):
    """Twice its input, and one more output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x * self.weight, "sum": x.sum(-1)}


def test_mlflow_loads_a_registered_model_and_it_predicts(
    uri: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from safetensors.torch import save_file

    job = Job("a", f"{__name__}:Doubled", f"{__name__}:name", model_args={"width": 3})
    exported = tmp_path / "exported-model"
    exported.mkdir()
    save_file({"weight": torch.tensor([1.0, 2.0, 3.0])}, exported / "model.safetensors")
    (exported / "job.json").write_text(json.dumps(job.to_dict()))
    sweep = sweep_of(uri, tmp_path / "1", with_model=False)
    run = tracking.open_job(uri, sweep, "a", {}, {}, tmp_path / "a")
    run.wait(30)
    inputs = [{"name": "x", "dtype": "float32", "shape": [-1, 3]}]
    run.follow({"event": "end", "status": "finished", "result": {"inputs": inputs}})
    model_uri = run.log_model_folder(exported)
    assert run.close()
    assert sweep.register(name, best("a", 0.5))["version"] == "1"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        for address in (model_uri, f"models:/{name}@champion"):
            outputs = mlflow.pyfunc.load_model(address).predict({"x": np.ones((2, 3), dtype=np.float32)})
            assert outputs["logits"].tolist() == [[1.0, 2.0, 3.0]] * 2
            assert outputs["sum"].tolist() == [3.0, 3.0]
        signature = mlflow.models.get_model_info(model_uri).signature  # type: ignore[arg-type]
        assert signature.inputs.to_dict()[0]["tensor-spec"] == {"dtype": "float32", "shape": (-1, 3)}
    finally:
        mlflow.set_tracking_uri(before)
