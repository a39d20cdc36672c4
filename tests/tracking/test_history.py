"""Estimates kept in MLflow."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.tracking import estimate_observations, estimate_store, server


def estimate(fingerprint: str, **changes: Any) -> Estimate:
    plain = Estimate(
        fingerprint=fingerprint,
        technique="ddp",
        devices=2,
        kind="cpu",
        parameters={"micro_batches": 4},
        setup_seconds=2.0,
        seconds_per_batch=0.5,
        spread=0.1,
        batches=5,
        batches_per_epoch=100,
        peak_device_bytes=1000,
        peak_host_bytes=2000,
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex[:16]


def runs(uri: str, fingerprint: str) -> list[Any]:
    experiment = server.experiment_id(uri, estimate_observations.EXPERIMENT)
    return list(server.client(uri).search_runs([experiment], f"params.fingerprint = '{fingerprint}'"))


@pytest.mark.slow
def test_what_was_measured_is_found_again(uri: str, mark: str, tmp_path: Path) -> None:
    began = time.time()
    measured = [
        estimate(mark),
        estimate(mark, devices=1, seconds_per_batch=0.9),
        estimate(mark, technique="fsdp", reason="out of memory", seconds_per_batch=0.0, batches=0),
        estimate(mark[::-1]),
    ]
    assert estimate_store.record(uri, measured, tmp_path)
    found = estimate_store.find(uri, [mark])
    assert all(began - 0.001 <= e.observed_at <= time.time() for e in found)
    assert {e.key: dataclasses.replace(e, observed_at=0) for e in found} == {
        e.key: dataclasses.replace(e, source="history") for e in measured[:3]
    }
    assert len(estimate_store.find(uri, [mark, mark[::-1], mark])) == 4
    assert estimate_store.find(uri, ["unknown"]) == []


def test_people_can_compare_estimates(uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(uri, [estimate(mark)], tmp_path)
    (run,) = runs(uri, mark)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"fingerprint": mark, "technique": "ddp", "devices": "2", "kind": "cpu"}
    assert run.data.metrics["seconds_per_batch"] == 0.5
    assert run.data.metrics["peak_device_bytes"] == 1000
    assert run.data.tags["source"] == "measured"


def test_only_what_was_measured_is_recorded(uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(
        uri, [estimate(mark, source="interpolated"), estimate(mark, source="history")], tmp_path
    )
    assert estimate_store.find(uri, [mark]) == []


def test_the_actual_speed_weighs_by_how_many_batches_it_was_seen_over(
    uri: str, mark: str, tmp_path: Path
) -> None:
    estimate_store.record(uri, [estimate(mark)], tmp_path)
    estimate_store.record(
        uri,
        [estimate(mark, seconds_per_batch=0.6, setup_seconds=4.0, batches=95)],
        tmp_path,
        source="trained",
    )
    (found,) = estimate_store.find(uri, [mark])
    assert found.seconds_per_batch == pytest.approx((0.5 * 5 + 0.6 * 95) / 100, rel=1e-3)
    assert found.setup_seconds == pytest.approx(3.0, rel=1e-3)
    assert found.batches == 100
    assert len(runs(uri, mark)) == 1
    assert runs(uri, mark)[0].data.tags["source"] == "trained"


def test_what_was_only_tried_is_as_much_slower_as_training_made_the_others(
    embedded_uri: str, mark: str, tmp_path: Path
) -> None:
    fsdp = {"technique": "fsdp", "seconds_per_batch": 0.4}
    estimate_store.record(embedded_uri, [estimate(mark, batches=10), estimate(mark, **fsdp)], tmp_path)
    estimate_store.record(embedded_uri, [estimate(mark, kind="a100", **fsdp)], tmp_path)
    estimate_store.record(
        embedded_uri, [estimate(mark, seconds_per_batch=0.6, batches=90)], tmp_path, source="trained"
    )
    found = {(e.technique, e.kind): e.seconds_per_batch for e in estimate_store.find(embedded_uri, [mark])}
    assert found["ddp", "cpu"] == pytest.approx(0.59, rel=1e-3)
    assert found["fsdp", "cpu"] == pytest.approx(0.4 * 0.59 / 0.5, rel=1e-3)
    assert found["fsdp", "a100"] == 0.4, "another kind of device may have no such neighbours"


def test_old_observations_count_less() -> None:
    day = 86400 * 1000
    seen = [
        {"time": 0, "estimate": estimate("f", seconds_per_batch=1.0)},
        {"time": 28 * day, "estimate": estimate("f", seconds_per_batch=2.0)},
    ]
    found = estimate_store._combined(seen)
    assert found is not None
    assert found.seconds_per_batch == pytest.approx((1.0 * 0.25 + 2.0) / 1.25)


def test_other_parameters_or_a_new_reason_replace_what_was_known(uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(uri, [estimate(mark, seconds_per_batch=9.0)], tmp_path)
    estimate_store.record(uri, [estimate(mark, parameters={"micro_batches": 8})], tmp_path)
    (found,) = estimate_store.find(uri, [mark])
    assert (found.seconds_per_batch, found.parameters) == (0.5, {"micro_batches": 8})
    estimate_store.record(uri, [estimate(mark, reason="out of memory")], tmp_path)
    (found,) = estimate_store.find(uri, [mark])
    assert found.reason == "out of memory"
    estimate_store.record(uri, [estimate(mark)], tmp_path)
    (found,) = estimate_store.find(uri, [mark])
    assert found.reason is None


def test_estimates_of_other_versions_are_ignored_with_a_note(
    uri: str, mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    estimate_store.record(uri, [estimate(mark)], tmp_path, {"torch": "2.13"})
    assert len(estimate_store.find(uri, [mark], {"torch": "2.13"})) == 1
    assert estimate_store.find(uri, [mark], {"torch": "2.14"}) == []
    assert "'torch': '2.13'} is ignored" in caplog.text


ANOTHER_FORMAT = {
    "format": 99,
    "source": "measured",
    "time": 1e15,
    "versions": {},
    "estimate": estimate("x").to_dict(),
}
ANOTHER_FIELD = {**ANOTHER_FORMAT, "format": estimate_observations.FORMAT, "estimate": {"colour": "red"}}


@pytest.mark.parametrize("other", [json.dumps(ANOTHER_FORMAT), json.dumps(ANOTHER_FIELD), "not json", "3"])
def test_records_in_another_format_are_ignored_with_a_note(
    embedded_uri: str, mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    caplog.set_level(logging.INFO)
    estimate_store.record(embedded_uri, [estimate(mark)], tmp_path)
    (run,) = runs(embedded_uri, mark)
    server.client(embedded_uri).set_tag(run.info.run_id, "saturn.observation.other", other)
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert found.fingerprint == mark
    assert "ignored" in caplog.text
    assert estimate_store.record(embedded_uri, [estimate(mark)], tmp_path)


def test_sending_an_estimate_again_changes_nothing(uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(uri, [estimate(mark)], tmp_path)
    before = runs(uri, mark)[0].data.tags
    (tmp_path / "mlflow" / "sent.json").unlink()
    assert estimate_store.record(uri, [], tmp_path)
    assert runs(uri, mark)[0].data.tags == before


def test_the_retry_of_a_task_adds_nothing(embedded_uri: str, mark: str, tmp_path: Path) -> None:
    for sweep in ("one", "one", "two"):
        estimate_store.record(embedded_uri, [estimate(mark, batches=10)], tmp_path / sweep, source="trained")
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert found.batches == 20


@pytest.mark.slow
def test_the_oldest_observations_make_room(embedded_uri: str, mark: str, tmp_path: Path) -> None:
    for n in range(estimate_observations.KEPT + 3):
        estimate_store.record(embedded_uri, [estimate(mark, batches=1, seconds_per_batch=float(n))], tmp_path)
    (run,) = runs(embedded_uri, mark)
    seconds = [
        json.loads(value)["estimate"]["seconds_per_batch"]
        for key, value in run.data.tags.items()
        if key.startswith("saturn.observation.")
    ]
    assert sorted(seconds) == [float(n) for n in range(3, estimate_observations.KEPT + 3)]


def update_again_and_again(uri: str, fingerprint: str, folder: Path) -> None:
    for n in range(4):
        seen = estimate(fingerprint, batches=10, setup_seconds=float(n))
        assert estimate_store.record(uri, [seen], folder, patience=60, source="trained")


@pytest.mark.slow
def test_two_sweeps_that_update_the_same_estimate_lose_nothing(uri: str, mark: str, tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["mlflow", "mlflow.store.tracking.sqlalchemy_store"])
    sweeps = [
        processes.Process(target=update_again_and_again, args=(uri, mark, tmp_path / name))
        for name in ("one", "two")
    ]
    for sweep in sweeps:
        sweep.start()
    for sweep in sweeps:
        sweep.join()
        assert sweep.exitcode == 0
    (found,) = estimate_store.find(uri, [mark])
    assert found.batches == 80
    assert len(runs(uri, mark)) == 1


def test_without_mlflow_nothing_is_known_and_estimates_are_kept_for_later(
    embedded_uri: str, mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = "http://127.0.0.1:9"
    assert estimate_store.find(nobody, [mark]) == []
    assert "does not answer" in caplog.text
    assert not estimate_store.record(nobody, [estimate(mark)], tmp_path, patience=0)
    from saturn_airflow import tracking

    assert tracking.send_outbox(embedded_uri, tmp_path)
    assert len(estimate_store.find(embedded_uri, [mark])) == 1


def test_what_could_not_run_is_forgotten_after_a_week() -> None:
    now = 1000 * time.time()
    ran = {"time": now - 30 * 86400e3, "estimate": estimate("f")}
    for days, known in ((1, True), (6, True), (8, False)):
        failed = {"time": now - days * 86400e3, "estimate": estimate("f", reason="out of memory")}
        assert (estimate_store._combined([ran, failed]) is not None) == known


def test_what_a_clock_that_was_wrong_told_does_not_stand_for_what_comes_after() -> None:
    now = 1000 * time.time()
    wrong = {"time": now + 365 * 86400e3, "estimate": estimate("f", seconds_per_batch=9.0)}
    right = [{"time": now - n * 86400e3, "estimate": estimate("f", seconds_per_batch=2.0)} for n in (2, 1)]
    found = estimate_store._combined([wrong, *right])
    assert found is not None
    assert found.seconds_per_batch == pytest.approx(2.0)
    failed = {"time": wrong["time"], "estimate": estimate("f", reason="out of memory")}
    found = estimate_store._combined([*right, failed])
    assert found is not None
    assert found.works
    found = estimate_store._combined([wrong])
    assert found is not None, "there is nothing else"
    assert found.seconds_per_batch == 9.0


def test_another_version_of_a_technique_starts_anew(embedded_uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(embedded_uri, [estimate(mark, seconds_per_batch=9.0)], tmp_path)
    estimate_store.record(embedded_uri, [estimate(mark, version="2")], tmp_path)
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert (found.version, found.seconds_per_batch) == ("2", 0.5)


def test_what_drifted_is_stale_until_it_is_measured_again(
    embedded_uri: str, mark: str, tmp_path: Path
) -> None:
    estimate_store.record(embedded_uri, [estimate(mark)], tmp_path)
    estimate_store.record(
        embedded_uri, [estimate(mark, seconds_per_batch=0.7, stale="off by 40%")], tmp_path, source="trained"
    )
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert found.stale == "off by 40%"
    estimate_store.record(embedded_uri, [estimate(mark, seconds_per_batch=0.69)], tmp_path)
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert found.stale is None
    assert 0.5 < found.seconds_per_batch < 0.7


def test_how_training_ends_is_learned_from_training_alone(
    embedded_uri: str, mark: str, tmp_path: Path
) -> None:
    estimate_store.record(embedded_uri, [estimate(mark, launch_seconds=4.0)], tmp_path)
    estimate_store.record(embedded_uri, [estimate(mark, ending_seconds=3.0)], tmp_path, source="trained")
    (found,) = estimate_store.find(embedded_uri, [mark])
    assert (found.launch_seconds, found.ending_seconds) == (4.0, 3.0)


def test_what_mlflow_has_not_taken_is_known_all_the_same(
    embedded_uri: str, mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = "http://127.0.0.1:9"
    assert not estimate_store.record(nobody, [estimate(mark)], tmp_path, {"torch": "2"}, patience=0)
    (found,) = estimate_store.find(nobody, [mark], {"torch": "2"}, [tmp_path])
    assert found.seconds_per_batch == 0.5
    assert estimate_store.find(nobody, [mark], {"torch": "3"}, [tmp_path]) == []
    assert estimate_store.find(nobody, [mark[::-1]], {"torch": "2"}, [tmp_path]) == []
    estimate_store.record(embedded_uri, [], tmp_path)
    (found,) = estimate_store.find(embedded_uri, [mark], {"torch": "2"}, [tmp_path])
    assert found.batches == 5, "what was sent does not count twice"


def test_everything_there_is(embedded_uri: str, mark: str, tmp_path: Path) -> None:
    estimate_store.record(embedded_uri, [estimate(mark)], tmp_path, {"torch": "1"}, jobs={mark: "gpt2-small"})
    estimate_store.record(
        embedded_uri,
        [estimate(mark, seconds_per_batch=0.6)],
        tmp_path,
        {"torch": "2"},
        jobs={mark: "gpt2-small"},
        source="trained",
    )
    (known,) = [k for k in estimate_store.everything(embedded_uri) if k.estimate.fingerprint == mark]
    assert (known.job, known.source, known.versions) == ("gpt2-small", "trained", {"torch": "2"})
    assert known.estimate.seconds_per_batch == 0.6, "what another torch did says nothing of this one"
    (run,) = runs(embedded_uri, mark)
    assert run.data.tags["job"] == "gpt2-small"
    assert run.data.tags["observed"].endswith("+00:00")
    assert run.info.run_name.startswith("gpt2-small")


@pytest.mark.parametrize(("days", "known"), [(1, True), (6, True), (8, False)])
def test_what_ran_out_of_memory_in_training_is_known_for_a_week(days: int, known: bool) -> None:
    said = {"a": guards.ran_out("no room"), "b": "refused: it differs"}
    at = time.time() * 1000 - days * 86400e3
    seen = [{"time": at, "source": "trained", "estimate": estimate("f", verdicts=said)}]
    found = estimate_store._combined(seen)
    assert found is not None
    assert found.verdicts == (said if known else {"b": "refused: it differs"})


def test_verdicts_of_the_guard_add_up_under_the_parameters_that_were_chosen_last(
    uri: str, mark: str, tmp_path: Path
) -> None:
    for number, (changes, source) in enumerate(
        [
            ({"verdicts": {"a": "exact"}, "parameters": {"old": 1}}, "measured"),
            ({"verdicts": {"b": "exact"}}, "measured"),
            ({"verdicts": {"c": "refused: no"}, "batches": 0, "setup_seconds": 99.0}, "trained"),
            ({"verdicts": {"b": "distribution"}}, "trained"),
        ]
    ):
        found_in = tmp_path / str(number)
        estimate_store.record(uri, [estimate(mark, **changes)], found_in, source=source)  # type: ignore[arg-type]
    (found,) = estimate_store.find(uri, [mark])
    assert found.verdicts == {"b": "distribution", "c": "refused: no"}
    assert found.setup_seconds == 2.0, "what saw no batch says nothing of the speed"
