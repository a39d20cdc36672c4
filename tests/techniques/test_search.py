"""Searching: the fastest parameters that fit, and a reason where a technique makes no sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cells import job

from saturn_airflow import library
from saturn_airflow.launch import devices, event_file
from saturn_airflow.launch.failures import Failure, RanksFailedError
from saturn_airflow.launch.request import Measure
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.estimates import Trial
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling.measure import measure

TECHNIQUES = ["ddp", "fsdp", "pipeline", "single", "spill", "tensor"]


class Timed:
    """A session that knows how fast parameters are, or why they fail."""

    def __init__(self, seconds: Callable[[dict[str, Any]], float | str]) -> None:
        self._seconds = seconds
        self.tried: list[dict[str, Any]] = []

    def fastest(self, candidates: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], float]:
        found, failed = [], ""
        for parameters in candidates:
            self.tried.append(dict(parameters))
            seconds = self._seconds(parameters)
            if isinstance(seconds, str):
                failed = seconds
            else:
                found.append((dict(parameters), seconds))
        if not found:
            raise RanksFailedError(Failure(status=failed, reason=failed))  # type: ignore[arg-type]
        return min(found, key=lambda pair: pair[1])


def search(
    technique: str, devices: int, seconds: Callable[[dict[str, Any]], float | str]
) -> tuple[Any, Timed]:
    session: Any = Timed(seconds)
    a_job = job(hparams=HParams(batch_size=16))
    return library.get(technique).search(a_job, list(range(devices)), session), session


def test_the_library_has_the_techniques_that_come_with_it() -> None:
    assert [name for name in library.names() if name in TECHNIQUES] == TECHNIQUES


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_technique_says_where_it_makes_no_sense(technique: str) -> None:
    one_device = technique in ("single", "spill")
    reasons = {devices: library.get(technique).why_not(job(), devices) for devices in (1, 2, 8)}
    assert (reasons[1] is None) == one_device
    assert (reasons[2] is None) == (reasons[8] is None) == (not one_device)
    assert all(technique in reason for reason in reasons.values() if reason)


@pytest.mark.parametrize(("technique", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)])
def test_saving_memory_is_tried_only_where_nothing_else_fits(technique: str, devices: int) -> None:
    (parameters, _), session = search(technique, devices, lambda p: 1.0)
    assert not parameters.get("recompute")
    assert not any(p.get("recompute") or p.get("offload") for p in session.tried)
    (parameters, seconds), _ = search(
        technique, devices, lambda p: 2.0 if p.get("recompute") else "out_of_memory"
    )
    assert parameters["recompute"]
    assert seconds == 2.0
    with pytest.raises(RanksFailedError, match="out_of_memory"):
        search(technique, devices, lambda p: "out_of_memory")


class Roomy(Timed):
    """And knows what they take of a GPU's memory: 10 GiB, and the model has 6 blocks of 8 GiB each."""

    def measured(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"peak_device_bytes": 10 * 2**30}

    def launch(self, function: str, *arguments: Any) -> list[Any]:
        assert function == "saturn_airflow.training.memory_prediction:blocks"
        return [(6, 8 * 2**30)]


@pytest.mark.parametrize(
    ("gib", "seconds", "stay"),
    [
        (None, lambda p: 1.0, None),
        (16, lambda p: 1.0, None),
        (40, lambda p: 1.0 - 0.1 * p.get("stay", 0), 3),
        (140, lambda p: 1.0 - 0.1 * p.get("stay", 0), 5),
        (40, lambda p: "out_of_memory" if p.get("stay") else 1.0, None),
        (40, lambda p: 1.0 + 0.1 * p.get("stay", 0), None),
    ],
)
def test_blocks_stay_where_the_memory_has_room(
    gib: int | None, seconds: Any, stay: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "smallest_gpu_bytes", lambda: gib and gib * 2**30)
    session: Any = Roomy(seconds)
    parameters, _ = library.get("spill").search(job(), [0], session)
    assert parameters == {"resident": 2, **({"stay": stay} if stay else {})}


def test_offloading_comes_last() -> None:
    (parameters, _), session = search("fsdp", 2, lambda p: 9.0 if p.get("offload") else "lost")
    assert parameters == {"recompute": True, "offload": True}
    assert session.tried == [
        {},
        {"keep_gathered": True},
        {"recompute": True},
        {"recompute": True, "offload": True},
    ]


def test_other_failures_are_not_taken_for_lack_of_memory() -> None:
    with pytest.raises(RanksFailedError, match="failed"):
        search("fsdp", 2, lambda p: "failed")


@pytest.mark.parametrize(("technique", "devices"), [("fsdp", 2), ("pipeline", 4), ("spill", 1)])
def test_the_fastest_is_chosen_not_the_first(technique: str, devices: int) -> None:
    candidates = list(library.get(technique).candidates(job(hparams=HParams(batch_size=16)), devices))
    assert len(candidates) > 1
    for wanted in candidates:
        (parameters, _), _ = search(technique, devices, lambda p, wanted=wanted: 1.0 if p == wanted else 2.0)  # type: ignore[misc]
        assert parameters == wanted


@pytest.mark.parametrize("batch_size", [1, 3, 16, None])
def test_a_pipeline_has_no_more_micro_batches_than_samples(batch_size: int | None) -> None:
    candidates = library.get("pipeline").candidates(
        job(hparams=HParams(batch_size=batch_size, accumulate=1)), 4
    )
    assert all(1 <= c["micro_batches"] <= (batch_size or 16) for c in candidates)
    assert len({str(c) for c in candidates}) == len(candidates)


@pytest.mark.ranks
@pytest.mark.parametrize(("technique", "devices"), [("pipeline", 2), ("spill", 1), ("tensor", 2)])
def test_a_real_trial_finds_parameters_or_a_reason(technique: str, devices: int, tmp_path: Path) -> None:
    a_job: Job = job(hparams=HParams(batch_size=6))
    trial = Trial(
        job=a_job, technique=technique, devices=devices, node="here", covers=("cell",), fingerprint="f"
    )
    estimate = measure(
        trial,
        Node("here", devices=2, kind="cpu"),
        folder=tmp_path,
        leases_folder=str(tmp_path / "leases"),
        path=(str(Path(__file__).parent),),
        how=Measure(warmups=1, batches=2),
    )
    if technique == "tensor":
        assert estimate.reason is not None
        assert "its attention weights are fused in one matrix" in estimate.reason
        return
    assert estimate.reason is None
    assert estimate.seconds_per_batch > 0
    assert estimate.batches_per_epoch == 4
    parameters = dict(estimate.parameters)
    assert parameters.pop("cuts", None) == ([2] if technique == "pipeline" else None)
    assert parameters in list(library.get(technique).candidates(a_job, devices))


BY_ITSELF = """
from saturn_airflow import BaseTechnique


class ByItself(BaseTechnique):
    def search(self, job, devices, session):
        return {}, 0.25

    def execute(self, job, devices, session, parameters, batch_count=None):
        pass
"""


@pytest.mark.ranks
def test_one_device_counts_the_batches_for_a_technique_that_measures_by_itself(tmp_path: Path) -> None:
    (tmp_path / "techniques").mkdir()
    (tmp_path / "techniques" / "by_itself.py").write_text(BY_ITSELF)
    trial = Trial(
        job=job(hparams=HParams(batch_size=6)),
        technique="by_itself",
        devices=2,
        node="here",
        covers=("cell",),
        fingerprint="f",
    )
    estimate = measure(
        trial,
        Node("here", devices=2, kind="cpu"),
        folder=tmp_path / "trial",
        leases_folder=str(tmp_path / "leases"),
        technique_folders=(str(tmp_path / "techniques"),),
        path=(str(Path(__file__).parent),),
    )
    assert (estimate.seconds_per_batch, estimate.batches_per_epoch) == (0.25, 4)
    (events,) = (tmp_path / "trial").rglob("events.jsonl")
    assert [event["ranks"] for event in event_file.every(events.parent, "launched")] == [1]
