"""A job that starts from other weights has exactly these, under every technique."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from cells import EACH_TECHNIQUE, Strategy, job, request, run, weights_in
from safetensors.torch import save_file
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams
from saturn_airflow.training import loading_weights, storing
from saturn_airflow.training.loading import load_model

pytestmark = pytest.mark.ranks

STILL = HParams(batches=1, precision="float64", lr=0.0, optimizer_args={"weight_decay": 0.0})


def test_every_technique_starts_from_these_weights(tmp_path: Path) -> None:
    other = job(load_model="tiny:tied_llama", hparams=dataclasses.replace(STILL, seed=7))
    source = request(other, Strategy("single"), tmp_path / "source")
    run([(source, 1)])
    weights = weights_in(source)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in weights.items()}, file)

    warm = job(load_model="tiny:tied_llama", hparams=STILL, init_from=str(file))
    cold = job(load_model="tiny:tied_llama", hparams=STILL)
    requests = [
        (request(warm, strategy, tmp_path / str(strategy), initial_weights=str(file)), strategy.devices)
        for strategy in EACH_TECHNIQUE
    ]
    *outcomes, from_scratch = run([*requests, (request(cold, EACH_TECHNIQUE[0], tmp_path / "cold"), 1)])
    for strategy, outcome in zip(EACH_TECHNIQUE, outcomes, strict=True):
        assert outcome.refused is None, strategy
        for name, tensor in weights.items():
            assert torch.equal(outcome.weights[name], tensor.float().double()), (strategy, name)
        assert outcome.losses[1] == pytest.approx(outcomes[0].losses[1], abs=1e-9), strategy
        assert abs(outcome.losses[1] - from_scratch.losses[1]) > 1e-4


def odd_tensors(value: float) -> nn.Module:
    """A model with numbers without a dimension, as a BatchNorm counts in, and buffers of odd layouts."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.scale = nn.Parameter(torch.tensor(value))
    model.register_buffer("shared", torch.full((1,), value).expand(4))
    model.register_buffer("few", torch.full((2, 2), value).to_sparse())
    model.register_buffer("chosen", torch.tensor([value > 0, True]))
    with torch.no_grad():
        model[1].num_batches_tracked.fill_(int(value))  # type: ignore[operator]
    return model


def test_tensors_of_any_layout_are_started_from(tmp_path: Path) -> None:
    source, model, file = odd_tensors(5.0), odd_tensors(0.0), tmp_path / "model.safetensors"
    # As exported models have them.
    kept = {n: storing.original(storing.stored(t), t.dtype).clone() for n, t in source.state_dict().items()}
    assert kept["1.num_batches_tracked"].shape == (1,)
    save_file(kept, file)
    loading_weights.start_from(model, job(init_from=str(file)), str(file))
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert (tensor.shape, tensor.layout) == (expected[name].shape, expected[name].layout), name
        assert torch.equal(tensor.to_dense(), expected[name].to_dense()), name


def test_weights_of_another_model_are_one_message_that_names_what_differs(tmp_path: Path) -> None:
    warm = job(hparams=STILL, init_from="models:/digits/3")
    own = {name: p.detach().clone() for name, p in load_model(warm).state_dict().items()}
    del own["lm_head.weight"]  # tied
    first, second, third, *_ = own
    wrong = {name: tensor for name, tensor in own.items() if name != first}
    wrong[second] = wrong[second][:-1].clone()
    file = tmp_path / "wrong.safetensors"
    save_file({**wrong, "classifier.bias": torch.zeros(2)}, file)
    with pytest.raises(JobError) as refused:
        loading_weights.start_from(load_model(warm), warm, str(file))
    message = str(refused.value)
    assert message.startswith("job 'cell' starts from models:/digits/3, whose weights are not those of its")
    shapes = f"{second!r} {list(wrong[second].shape)} there and {list(own[second].shape)} here"
    for part in (f"it lacks {first!r}", "the model has no 'classifier.bias'", shapes):
        assert part in message
    assert repr(third) not in message

    save_file({**own, third: own[third].long()}, file)
    with pytest.raises(JobError, match=f"{third!r} is torch.int64; here it is torch.float64"):
        loading_weights.start_from(load_model(warm), warm, str(file))
    with pytest.raises(JobError, match="can't be read"):
        loading_weights.start_from(load_model(warm), warm, "")
