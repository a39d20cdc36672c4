"""Metrics of a job's own come to what a plain loop finds, whatever trains the job."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import measured
import pytest
import tiny
from cells import Strategy, job, weights_in
from cells import request as train_request

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

ALL = {name: f"measured:{name}" for name in measured.FUNCTIONS} | {
    "in_order": "measured:InOrder",
    "median": "measured:median",
}
#: Pairs that add up are computed in the shares of a batch; with anything else batches are left whole.
METRICS = {
    "pairs": {"token_accuracy": "measured:token_accuracy"},
    "two": {"needs_two": "measured:needs_two"},
    "all": ALL,
}
STRATEGIES = [
    Strategy("single"),
    Strategy("spill"),
    *(Strategy(technique, 2) for technique in ("ddp", "fsdp", "tensor")),
    Strategy("pipeline", 2, {"micro_batches": 3}),
    Strategy("pipeline", 2, {"micro_batches": 1}),
    Strategy("fsdp", 4),
]
#: 26 samples are five batches, of which the last has two samples; 5 are one, for two ranks.


def a_job(metrics: str, samples: int, accumulate: int, stream: bool = False) -> Job:
    hparams = HParams(batches=2, batch_size=6, precision="float64", lr=1e-2, accumulate=accumulate)
    return job(
        load_model="tiny:llama",
        model_args={"n_layer": 2},
        hparams=hparams,
        data_args={"samples": samples},
        load_eval_dataloader="measured:held_out_stream" if stream else "measured:held_out",
        metrics=METRICS[metrics],
    )


CELLS = [
    ("pairs", 26, 1, False),
    ("pairs", 26, 3, True),
    ("two", 26, 1, False),
    ("all", 26, 1, False),
    ("all", 26, 3, True),
    ("all", 5, 1, False),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[Any, str], tuple[Any, Any, dict[str, float]]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({strategy.devices for strategy in STRATEGIES}):
            keys = [(cell, s) for cell in CELLS for s in STRATEGIES if s.devices == size]
            requests = [
                train_request(a_job(*cell), strategy, Path(folder, f"{size}-{number}"))
                for number, (cell, strategy) in enumerate(keys)
            ]
            results = ranks_module.launch(measured.eval_all, requests, size=size)[0]
            for (cell, strategy), one, (events, result) in zip(keys, requests, results, strict=True):
                assert not isinstance(result, str), (cell, strategy, result)
                model = tiny.llama(2).double()
                model.load_state_dict(weights_in(one))
                found[cell, str(strategy)] = events, result, measured.plain(model, cell[1])
    return found


@pytest.mark.parametrize("strategy", [str(s) for s in STRATEGIES])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_metrics_are_those_of_a_plain_loop(outcomes: Any, cell: Any, strategy: str) -> None:
    events, result, truth = outcomes[cell, strategy]
    told = events[-1]["metrics"]
    assert {key.partition("/")[0] for key in told} == METRICS[cell[0]].keys()
    assert told == pytest.approx({key: truth[key] for key in told}, rel=1e-12, abs=1e-12)
    assert result["metrics"] == told


@pytest.mark.parametrize("strategy", [str(s) for s in STRATEGIES[1:]])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_loss_is_the_same_however_batches_are_dealt(outcomes: Any, cell: Any, strategy: str) -> None:
    one, other = (outcomes[cell, name][0][-1]["eval_loss"] for name in ("single@1", strategy))
    assert one == pytest.approx(other, abs=1e-12)


def test_a_loss_of_several_means_is_evaluated_whole_where_batches_are(tmp_path: Path) -> None:
    """Ranks that have the same batch, or nothing of one, add nothing to what the means are over."""
    two = job(
        load_model="tiny:plain",
        load_dataloader="tiny:vectors",
        load_eval_dataloader="tiny:vectors",
        loss_function="measured:two_means",
        hparams=HParams(batches=1, precision="float64"),
    )
    found = []
    for strategy in (
        Strategy("single"),
        Strategy("tensor", 2),
        Strategy("pipeline", 2, {"micro_batches": 1}),
    ):
        one = train_request(two, strategy, tmp_path / str(strategy))
        ((events, _),) = ranks_module.launch(measured.eval_all, [one], size=strategy.devices)[0]
        found.append(events[-1]["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, abs=1e-12)


def test_whole_batches_are_normalised_by_themselves(tmp_path: Path) -> None:
    """No rank's BatchNorm looks at what another rank evaluates at the same time."""
    normed = job(
        load_model="measured:untracked",
        load_dataloader="tiny:vectors",
        load_eval_dataloader="tiny:vectors",
        loss_function="tiny:vector_loss",
        hparams=HParams(batches=1, precision="float64", lr=0.0),
        metrics={"certainty": "measured:certainty"},
    )
    found = []
    for strategy in (Strategy("single"), Strategy("ddp", 2)):
        one = train_request(normed, strategy, tmp_path / str(strategy))
        ((events, _),) = ranks_module.launch(measured.eval_all, [one], size=strategy.devices)[0]
        found.append({"eval_loss": events[-1]["eval_loss"], **events[-1]["metrics"]})
    assert found[1] == pytest.approx(found[0], abs=1e-12)
