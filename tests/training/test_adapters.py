"""Fine-tuning a pretrained model: whole or by PEFT's adapters, on a table or on a stream with epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import USERLAND, save_pretrained_gpt2, spec_for

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.training.exports import load_exported
from saturn_airflow.training.loading import load_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.ranks


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a pretrained model."""
    monkeypatch.syspath_prepend(str(USERLAND))
    save_pretrained_gpt2(tmp_path / "base")
    return str(tmp_path / "base")


def plain_losses(job: Job) -> list[float]:
    """What a loop that anybody would write gives."""
    import adapter_jobs  # type: ignore[import-not-found]

    model = load_model(job).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=job.hparams.lr)
    losses = []
    for _ in range(job.hparams.epochs or 0):
        for batch in getattr(adapter_jobs, str(job.load_dataloader).partition(":")[2])(4):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("model", "data", "technique"),
    [("adapted", "table", "single"), ("adapted", "table", "ddp"), ("pretrained", "stream", "ddp")],
)
def test_it_trains_as_a_plain_loop_does(
    model: str, data: str, technique: str, base: str, tmp_path: Path
) -> None:
    hparams = HParams(epochs=2, batch_size=4, lr=0.05, optimizer="torch.optim:SGD")
    loads: dict[str, Any] = {"load_model": f"adapter_jobs:{model}", "load_dataloader": f"adapter_jobs:{data}"}
    job = Job("tuned", **loads, model_args={"folder": base}, hparams=hparams)
    devices = 1 if technique == "single" else 2
    events = list(runs.start(spec_for(tmp_path, job, technique, devices)).events(poll=0.02))
    end = events[-1]
    assert end["status"] == "finished", end
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert losses == pytest.approx(plain_losses(job), abs=2e-5)

    batch = {"input_ids": torch.arange(8)[None]}
    trained = load_exported(end["result"]["model"])(**batch).logits
    adapters = Path(end["result"]["model"], "adapter")
    assert adapters.exists() == (model == "adapted")
    if model == "adapted":
        # As anybody loads PEFT's adapters, without Saturn.
        import adapter_jobs

        assert {path.name for path in adapters.iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        loaded = peft.PeftModel.from_pretrained(adapter_jobs.pretrained(base), adapters).eval()
        torch.testing.assert_close(loaded(**batch).logits, trained)
        untrained = adapter_jobs.adapted(base).eval()(**batch).logits
        assert not torch.allclose(untrained, trained)
