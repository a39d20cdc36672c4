"""What the docs say runs, runs."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import Strategy, deviation, job, run
from cells import request as train_request

from saturn_airflow import library
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks
from saturn_airflow.training.exports import export_trained, load_exported

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.ranks


def test_spill_trains_beyond_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.setattr(sys, "argv", ["spill_beyond_memory.py", "--memory-mib", "4"])
    # Here, where the server that ranks are forked from is warm.
    importlib.import_module("spill_beyond_memory").main()
    spilled, alone = capsys.readouterr().out.strip().splitlines()
    assert re.match(r"spill: 16 MiB of weights trained in 4 MiB; loss 1\.\d+ to 0\.\d+ in 10 steps", spilled)
    assert alone == "single: out of memory in 4 MiB"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The techniques of the page, as files of the user's folder."""
    folder = tmp_path_factory.mktemp("techniques")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "own_technique.md").read_text(), re.DOTALL)
    names = ["half_gradients", "hf_trainer"]
    for name, block in zip(names, blocks, strict=True):
        (folder / f"{name}.py").write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SATURN_TECHNIQUES_FOLDER", str(folder))
        # Ranks have the environment of the server that they are forked from, as it was when that started.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        yield names
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def test_the_one_method_example_trains(examples: list[str], tmp_path: Path) -> None:
    assert set(examples) <= set(library.names())
    a_job = job(hparams=HParams(lr=1e-2))
    strategies = [Strategy("ddp", 2), Strategy("half_gradients", 2)]
    requests = [(train_request(a_job, s, tmp_path / s.technique), 2) for s in strategies]
    ddp, own = run(requests)
    losses, _ = deviation(ddp, own)
    assert 0 < losses < 0.05


class DirectSession:
    """Launches ranks as a session does."""

    def __init__(self, folder: Path, job: Job, size: int = 2) -> None:
        self.folder, self._job, self._size = folder, job, size
        self.events: list[dict[str, Any]] = []

    def export(self, model: Any) -> None:
        export_trained(model, self._job, self.folder / "model")

    def launch(self, function: Any, *arguments: Any) -> list[Any]:
        events = self.events.append
        return ranks.launch(function, *arguments, size=self._size, technique="hf_trainer", on_event=events)

    def losses(self) -> list[float]:
        return [float(event["loss"]) for event in self.events if event["event"] == "step"]


def test_the_two_method_example_trains(examples: list[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    technique = library.get("hf_trainer")
    a_job = job(loss_function=None, hparams=HParams(batches=6, batch_size=6))
    session: Any = DirectSession(tmp_path, a_job)
    parameters, seconds = technique.search(a_job, [0, 1], session)
    assert seconds > 0
    technique.execute(a_job, [0, 1], session, parameters, 2)
    technique.execute(a_job, [0, 1], session, parameters)
    assert (tmp_path / "hf" / "checkpoint-6").is_dir()
    assert load_exported(tmp_path / "model") is not None


def test_the_two_method_example_shares_each_batch_among_its_devices(
    examples: list[str], tmp_path: Path
) -> None:
    """As one device trains it, and not each device by itself on batches of its own.

    Of a last batch that is smaller Trainer would have some samples twice.
    """
    pytest.importorskip("accelerate")
    a_job = job(loss_function=None, hparams=HParams(batches=3, batch_size=6))
    sessions: list[Any] = [DirectSession(tmp_path / str(size), a_job, size) for size in (1, 2)]
    for session in sessions:
        library.get("hf_trainer").execute(a_job, [0, 1], session, {})
    alone, shared = (session.losses() for session in sessions)
    assert len(alone) == 3
    assert shared == pytest.approx(alone, abs=2e-3)  # Trainer rounds them
    assert _apart(*sessions) < 1e-5


def test_the_two_method_example_trains_in_parts_as_in_one(examples: list[str], tmp_path: Path) -> None:
    """Its learning rate falls over the whole job, and each step is told to be of its epoch."""
    pytest.importorskip("accelerate")
    a_job = job(loss_function=None, hparams=HParams(epochs=2, batch_size=6), data_args={"samples": 24})
    sessions: list[Any] = [DirectSession(tmp_path / name, a_job) for name in ("parts", "one")]
    for count, done in ((3, 3), (None, 8), (None, 8)):
        library.get("hf_trainer").execute(a_job, [0, 1], sessions[0], {}, count)
        assert len(sessions[0].losses()) == done
    library.get("hf_trainer").execute(a_job, [0, 1], sessions[1], {})
    assert sessions[0].losses() == pytest.approx(sessions[1].losses(), abs=2e-4)  # Trainer rounds them
    assert _apart(*sessions) < 1e-5
    for session in sessions:
        assert [event["epoch"] for event in session.events if event["event"] == "step"] == [0] * 4 + [1] * 4


def _apart(one: DirectSession, other: DirectSession) -> float:
    weights = [torch.load(session.folder / "hf" / "weights.pt") for session in (one, other)]
    return max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
