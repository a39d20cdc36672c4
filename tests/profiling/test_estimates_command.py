"""`saturn estimates`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import cli
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.tracking import estimate_store


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("estimates")
    uri = f"sqlite:///{folder}/mlflow.db"
    with (folder / "before").open("w") as before, contextlib.redirect_stdout(before):
        assert cli.main(["estimates", "--uri", uri]) == 0
    usual: dict[str, Any] = {
        "kind": "cpu",
        "seconds_per_batch": 0.25,
        "spread": 0.5,
        "batches": 5,
        "setup_seconds": 2.0,
    }
    found = [
        Estimate(
            fingerprint="a" * 16,
            technique="ddp",
            devices=2,
            peak_device_bytes=3 << 30,
            verdicts={"1": "exact", "2": "refused: the loss is off"},
            **usual,
        ),
        Estimate(fingerprint="a" * 16, technique="fsdp", devices=2, kind="cpu", reason="out of memory [x]"),
        Estimate(fingerprint="b" * 16, technique="ddp", devices=1, stale="off by 40%", **usual),
    ]
    estimate_store.record(
        uri, found, folder, {"torch": "2"}, jobs={"a" * 16: "gpt2", "b" * 16: "vit [small]"}
    )
    return uri


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["estimates", *words]) == 0
    return capsys.readouterr().out


def test_a_table_for_people(
    uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(capsys, monkeypatch, "--uri", uri)
    lines = [line.split() for line in shown.splitlines()]
    assert ["gpt2", "ddp", "2", "x", "cpu", "0.25", "50%", "2.0", "s", "3.00", "GiB", "measured"] in [
        line[:12] for line in lines
    ]
    assert "out of memory [x]" in shown
    assert "vit [small]" in shown
    (compared,) = (line for line in shown.splitlines() if "3.00 GiB" in line)
    assert "exact, refused" in compared
    assert "refused: the loss is off" in compared
    assert "off by 40%" in shown
    assert "3 of 3 estimates" in shown


@pytest.mark.parametrize(
    ("words", "count"),
    [(["gpt2"], 2), (["vit*"], 1), (["--failed"], 1), (["--technique", "ddp"], 2), (["--kind", "a100"], 0)],
)
def test_some_of_them_as_json(
    uri: str,
    words: list[str],
    count: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = json.loads(run(capsys, monkeypatch, "--uri", uri, "--json", *words))
    assert len(rows) == count
    for row in rows:
        assert {"job", "technique", "devices", "seconds_per_batch", "spread", "source"} <= row.keys()
        assert 0 <= row["age_seconds"] < 600
        assert row["versions"] == {"torch": "2"}


def test_before_the_first_sweep(uri: str) -> None:
    assert "No estimates yet" in (Path(uri.removeprefix("sqlite:///")).parent / "before").read_text()


def test_mlflow_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimates", "--uri", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("saturn estimates: ")
