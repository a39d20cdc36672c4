"""BatchNorm looks at the whole batch, wherever its samples are: against a loop of plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import normed
import pytest
from cells import Outcome, Strategy, job, run
from cells import request as train_request

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.ranks import launch

Record = Callable[[str, float, float], None]
pytestmark = pytest.mark.ranks

EPOCHS, LR = 2, 0.05
STRATEGIES = [
    Strategy("single"),
    Strategy("single", 1, {"recompute": True}),
    Strategy("spill"),
    *[Strategy("ddp", k) for k in (1, 2, 3)],
    *[Strategy("fsdp", k) for k in (2, 3)],
    Strategy("ddp", 3, {"recompute": True}),
    Strategy("fsdp", 3, {"recompute": True, "offload": True}),
]
#: Of each model that is refused: under what, accumulating how often, and why.
REFUSED = {
    "own_statistics": (
        Strategy("fsdp", 2),
        1,
        "is a OwnStatistics, which computes its statistics itself",
    ),
    "averaging": (Strategy("ddp", 2), 1, "buffer '1.seen' comes out otherwise on each device"),
    "teacher": (Strategy("single"), 2, "parameter '1.teacher.weight' is changed in every forward pass"),
    "spectral": (
        Strategy("single"),
        2,
        "_u' changes in every forward pass, of which accumulate",
    ),
}
#: What is not refused, though buffers change: each device changes them alike, or the first pass fills them.
ALLOWED = {
    "synced": (Strategy("fsdp", 2), 1),
    "spectral": (Strategy("ddp", 2), 1),
    "teacher": (Strategy("ddp", 2), 1),
    "caching": (Strategy("ddp", 2), 2),
}


def normed_job(model: str, accumulate: int = 1) -> Job:
    hparams = HParams(
        epochs=EPOCHS,
        accumulate=accumulate,
        precision="float64",
        lr=LR,
        optimizer="torch.optim:SGD",
        optimizer_args={"momentum": 0.9},
    )
    return job(
        load_model=f"normed:{model}",
        load_dataloader="normed:pictures",
        load_eval_dataloader="normed:pictures",
        loss_function="normed:loss",
        hparams=hparams,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("normed")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    requests = {str(s): (train_request(normed_job("cnn"), s, folder / str(s)), s.devices) for s in STRATEGIES}
    for kind, cells in (("allowed", ALLOWED), ("refused", REFUSED)):
        for model, (strategy, accumulate, *_) in cells.items():
            name = f"{kind} {model}"
            one = train_request(normed_job(model, accumulate), strategy, folder / name)
            requests[name] = (one, strategy.devices)
    return dict(zip(requests, run(list(requests.values())), strict=True))


@pytest.mark.parametrize("cell", [*map(str, STRATEGIES), "allowed synced"])
def test_statistics_are_those_of_the_whole_batch(
    outcomes: dict[str, Outcome], folder: Path, cell: str, record_deviation: Record
) -> None:
    losses, evaluations, state = normed.plain(EPOCHS, LR)
    outcome = outcomes[cell]
    assert not outcome.refused
    off = max(abs(one - other) for one, other in zip(outcome.losses.values(), losses, strict=True))
    assert outcome.weights.keys() == state.keys()
    weights = max(
        float((value.reshape(-1).double() - state[name].reshape(-1).double()).abs().max())
        for name, value in outcome.weights.items()
    )
    record_deviation("batch norm", off, weights)
    saved = max((folder / cell / "checkpoints").glob("step-*")) / "manifest.json"
    assert json.loads(saved.read_text())["extra"]["metrics"]["eval_loss"] == pytest.approx(
        evaluations[-1], abs=1e-12
    )
    assert off <= 1e-12
    assert weights <= 1e-11


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_shared_is_refused(outcomes: dict[str, Outcome], model: str) -> None:
    *_, reason = REFUSED[model]
    assert reason in str(outcomes[f"refused {model}"].refused)


@pytest.mark.parametrize("model", ALLOWED)
def test_buffers_that_are_alike_everywhere_are_not_refused(outcomes: dict[str, Outcome], model: str) -> None:
    assert not outcomes[f"allowed {model}"].refused


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_devices_at_different_norms_are_told_apart(technique: str, tmp_path: Path) -> None:
    """Each would wait for the others in its own, and mix statistics of two where they were of one size."""
    one = train_request(normed_job("by_domain"), Strategy(technique, 2), tmp_path)
    with pytest.raises(RanksFailedError, match="computes BatchNorm") as raised:
        launch("saturn_airflow.training.loop:train", one, size=2, hang_seconds=60)
    assert raised.value.failure.status == "does_not_fit"
