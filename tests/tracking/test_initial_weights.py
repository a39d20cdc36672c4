"""What ``init_from`` means is settled once: in MLflow, or in files, and kept when an alias moves on."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from saturn_airflow import tracking
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.initial_weights import file_of
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators.first_weights import settled
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.tracking.server import MlflowAwayError


def registered(uri: str, name: str, folder: Path, content: bytes) -> str:
    """One more version, which becomes the champion; the id of its run."""
    tags = {"saturn.sweep": f"dag/{uuid.uuid4()}/sweep"}
    sweep = tracking.open_sweep(uri, "initial", "sweep", tags, {}, folder / "sweep", 0)
    run = tracking.open_job(uri, sweep, "a", {}, {}, folder / "sweep" / "a")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(weights(content))
    run.log_model_folder(folder / "model")
    run.close()
    assert sweep.register(name, {"job": "a", "metric": "loss", "value": -len(content)})["version"]
    return str(run.id)


def weights(name: bytes) -> bytes:
    """A safetensors file that says ``name``."""
    header = json.dumps({"__metadata__": {"name": name.decode()}}).encode()
    return len(header).to_bytes(8, "little") + header


def job(init_from: str | None, **fields: Any) -> Job:
    return Job("a", "shop:model", "shop:data", init_from=init_from, **fields)


def weights_of(a_job: Job, folder: Path) -> bytes:
    return Path(file_of(folder, a_job.init_from)).read_bytes()


@pytest.mark.slow
def test_the_version_is_settled_once_for_a_sweep(uri: str, tmp_path: Path) -> None:
    name = f"digits-{uuid.uuid4().hex[:8]}"
    asked = [job(f"models:/{name}@champion", init_missing="scratch")]
    lines: list[str] = []
    cold = settled(asked, lambda: uri, tmp_path / "night-0", lines.append)
    assert (cold[0].init_from, len(lines)) == (None, 1)
    with pytest.raises(InvalidSweepError, match=r"job 'a'.*no such model.*init_missing='scratch'"):
        settled([job(f"models:/{name}@champion")], lambda: uri, tmp_path / "strict", lines.append)

    run_id = registered(uri, name, tmp_path / "1", b"1")
    (warm,) = settled(asked, lambda: uri, tmp_path / "night-1", lines.append)
    assert warm.init_from == f"models:/{name}/1"
    assert weights_of(warm, tmp_path / "night-1") == weights(b"1")
    registered(uri, name, tmp_path / "2", b"22")
    # Cleared, retried: each night has what it began with; the night without a champion none. The next has it.
    assert settled(asked, lambda: uri, tmp_path / "night-0", lines.append) == cold
    assert settled(asked, lambda: uri, tmp_path / "night-1", lines.append) == [warm]
    (latest,) = settled(asked, lambda: uri, tmp_path / "night-2", lines.append)
    assert (latest.init_from, weights_of(latest, tmp_path / "night-2")) == (
        f"models:/{name}/2",
        weights(b"22"),
    )

    for place in (f"models:/{name}/1", f"runs:/{run_id}/model"):
        (one,) = settled([job(place)], lambda: uri, tmp_path / "others", lines.append)
        assert (one.init_from, weights_of(one, tmp_path / "others")) == (place, weights(b"1"))
    for nowhere in (f"models:/{name}/9", f"runs:/{uuid.uuid4().hex}/model", f"{tmp_path}/none.safetensors"):
        with pytest.raises(InvalidSweepError, match="no such model"):
            settled([job(nowhere)], lambda: uri, tmp_path / "others", lines.append)

    MlflowClient(uri).log_text(run_id, "{}", "empty/readme")
    with pytest.raises(InvalidSweepError, match=r"holds no model\.safetensors"):
        settled([job(f"runs:/{run_id}/empty")], lambda: uri, tmp_path / "others", lines.append)


def test_nothing_is_settled_while_mlflow_is_away(tmp_path: Path) -> None:
    asked = [job("models:/digits@champion", init_missing="scratch")]
    with pytest.raises(MlflowAwayError):
        settled(asked, lambda: "http://127.0.0.1:9", tmp_path, print)
    assert not (tmp_path / "init" / "settled.json").exists()


def test_weights_are_on_the_disk_before_they_count(
    embedded_uri: str, tmp_path: Path, synced: set[int]
) -> None:
    name = f"digits-{uuid.uuid4().hex[:8]}"
    registered(embedded_uri, name, tmp_path / "model", b"1")
    (tmp_path / "model.safetensors").write_bytes(weights(b"1"))
    for asked in (f"models:/{name}/1", str(tmp_path / "model.safetensors")):
        (found,) = settled([job(asked)], lambda: embedded_uri, tmp_path, print)
        assert Path(file_of(tmp_path, found.init_from)).stat().st_ino in synced


def test_a_file_that_is_written_anew_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, copy = tmp_path / "model.safetensors", shutil.copyfile
    file.write_bytes(weights(b"first"))

    def written_anew(source: Path, to: Path) -> Path:
        file.write_bytes(weights(b"second"))
        return Path(copy(source, to))

    monkeypatch.setattr(shutil, "copyfile", written_anew)
    with pytest.raises(InvalidSweepError, match="has changed since"):
        settled([job(str(file))], str, tmp_path, print)


def test_a_file_that_changes_is_another_definition_and_the_sweep_keeps_the_first(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(weights(b"first"))
    (first,) = settled([job(str(file))], str, tmp_path / "1", print)
    (of_folder,) = settled([job(str(tmp_path))], str, tmp_path / "f", print)
    assert weights_of(of_folder, tmp_path / "f") == weights(b"first")
    file.write_bytes(weights(b"second"))
    assert settled([job(str(file))], str, tmp_path / "1", print) == [first]
    assert weights_of(first, tmp_path / "1") == weights(b"first")
    (second,) = settled([job(str(file))], str, tmp_path / "2", print)
    (change,) = Definition.of(first).changes(Definition.of(second))
    assert change.field == "init_from"
    assert fingerprint(first) == fingerprint(second) == fingerprint(job(None))


@pytest.mark.parametrize(
    "content",
    [b"", b"root:x:0:0", bytes(8), (5).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"[]"],
)
def test_what_is_no_weights_is_not_copied(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(InvalidSweepError, match=r"job 'a'.*file is not in the safetensors format.*save_file"):
        settled([job(str(file))], str, tmp_path / "sweep", print)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "sweep", "init"}


@pytest.mark.parametrize(
    "text",
    ["digits", "models:/digits", "models:/digits/Production", "runs:/", "s3://a/b", "./a", 3],
)
def test_what_names_no_weights_is_refused_when_it_is_written(text: str) -> None:
    with pytest.raises(InvalidSweepError, match="job 'a': init_from"):
        job(text)
    assert job("models:/digits@{{ ds }}").init_from
    with pytest.raises(InvalidSweepError, match="init_missing is 'skip'"):
        job(None, init_missing="skip")
