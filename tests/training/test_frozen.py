"""What training leaves of a model as it was: written once, and never silently another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from running import USERLAND, save_pretrained_gpt2
from torch import nn
from torch.overrides import TorchFunctionMode

from saturn_airflow import HParams, Job
from saturn_airflow.launch import checkpoint_files
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import checkpoints
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.checkpoints import CheckpointError, Checkpoints, read_weights
from saturn_airflow.training.frozen import digest
from saturn_airflow.training.loop import train
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import State, aliases


class Adapted(nn.Module):
    """A large base that stays, a small adapter that is trained, and a teacher that follows it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.late = nn.Linear(16, 16).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)


class Training:
    def __init__(self, folder: Path, ranks: Ranks, seed: int = 0, keep: int = 2) -> None:
        self.folder, self.model, self.warnings = folder, Adapted(seed), list[str]()
        parallel, hparams = Parallel(self.model, ranks), HParams(lr=0.1)
        groups = optimizers.parameter_groups(hparams, self.model)
        self.optimizer = optimizers.make_optimizer(hparams, groups, parallel)
        state = GroupState(self.optimizer), OwnState(self.optimizer)
        self.state = State(parallel, self.optimizer, aliases(self.model), *state)
        self.checkpoints = Checkpoints(folder, ranks, keep, self.warnings.append, beside=False)
        self.found = self.checkpoints.load(self.state)

    def step(self, number: int) -> Path:
        """Train a step, and write a checkpoint."""
        self.model.adapter(torch.ones(4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for one, other in zip(
                self.model.teacher.parameters(), self.model.adapter.parameters(), strict=True
            ):
                one.data.lerp_(other, 0.1)  # which the version counter of a parameter does not tell
        return self.save(number)

    def save(self, number: int) -> Path:
        self.checkpoints.save(number, self.state, {})
        self.checkpoints.finish()
        return self.folder / f"step-{number:08d}"

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def base_of(folder: Path) -> Path:
    (base,) = folder.glob("frozen-*")
    return base


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_what_stays_is_written_once_and_read_whatever_the_base_is_by_then(
    tmp_path: Path, ranks: Ranks
) -> None:
    training = Training(tmp_path, ranks)
    first = training.step(1)
    base = base_of(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in base.iterdir()}
    last = training.step(2)
    assert {path.name: path.stat().st_mtime_ns for path in base_of(tmp_path).iterdir()} == written
    least = 64 * 65 * 4
    assert checkpoint_files.bytes_of(base) > least > 4 * checkpoint_files.bytes_of(last) > 0
    for path in (first, last):
        assert checkpoint_files.manifest_of(path)["format"] == 3
        assert checkpoint_files.damage(path) is checkpoint_files.damage_of_base(path) is None
    # The teacher needs no gradient, and changes.
    names = checkpoint_files.manifest_of(last)["frozen"]["names"]
    assert {name.split(".")[1] for name in names} == {"base", "late"}
    assert same(read_weights(last), training.weights())
    # Pretrained weights that are others by now are not what training goes on with.
    resumed = Training(tmp_path, ranks, seed=5)
    assert resumed.found == (last, {})
    assert same(resumed.weights(), training.weights())
    training.step(3)
    assert same(read_weights(resumed.step(3)), training.weights())
    assert base_of(tmp_path) == base


def test_what_changes_after_all_is_in_the_checkpoints_from_then_on(tmp_path: Path, ranks: Ranks) -> None:
    training = Training(tmp_path, ranks)
    before = training.step(1), training.weights()
    with torch.no_grad():
        training.model.late.weight[3, 3] += 1e-6
    after = training.step(2), training.weights()
    for path, weights in (before, after):
        assert same(read_weights(path), weights)
    assert "model.late.weight" not in checkpoint_files.manifest_of(after[0])["frozen"]["names"]
    resumed = Training(tmp_path, ranks, seed=5)
    assert same(resumed.weights(), after[1])
    with torch.no_grad():
        resumed.model.base.weight.zero_()
        resumed.model.base.bias.zero_()
        resumed.model.late.bias.zero_()
    assert same(read_weights(resumed.step(3)), resumed.weights())
    resumed.step(4)
    assert not list(tmp_path.glob("frozen-*")), "which nothing needs any more"


@pytest.mark.parametrize("how", ["deleted", "another", "flipped"])
def test_a_base_that_is_gone_or_another_is_an_error_until_it_is_back(
    how: str, tmp_path: Path, ranks: Ranks
) -> None:
    folder = tmp_path / "checkpoints"
    training = Training(folder, ranks)
    path = training.step(1)
    base, copy = base_of(folder), tmp_path / "copy"
    shutil.copytree(base, copy)
    shutil.rmtree(base)
    if how == "another":
        other = Training(tmp_path / "other", ranks, seed=9)
        other.step(1)
        shutil.copytree(base_of(tmp_path / "other"), base)
    elif how == "flipped":
        shutil.copytree(copy, base)
        (file,) = base.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{base.name}.*Put that folder back, or train"):
        Training(folder, ranks)
    with pytest.raises(CheckpointError, match=r"Put that folder back"):
        read_weights(path)
    assert checkpoint_files.damage(path) is None, "what was trained is still there"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(copy, base)
    assert same(Training(folder, ranks, seed=5).weights(), training.weights())


def test_a_base_that_is_deleted_while_training_goes_on_is_written_again(tmp_path: Path, ranks: Ranks) -> None:
    training = Training(tmp_path, ranks)
    training.step(1)
    shutil.rmtree(base_of(tmp_path))
    training.step(2)
    assert same(Training(tmp_path, ranks, seed=5).weights(), training.weights())


def test_checkpoints_of_earlier_versions_are_gone_on_from(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "worth_a_folder", lambda *_: False)
        before = Training(tmp_path, ranks)
        path = before.step(1)
    assert not list(tmp_path.glob("frozen-*"))
    assert checkpoint_files.manifest_of(path)["format"] == 1
    resumed = Training(tmp_path, ranks, seed=5)
    assert same(resumed.weights(), before.weights())
    resumed.step(2)
    assert same(Training(tmp_path, ranks, seed=6).weights(), resumed.weights())
    assert base_of(tmp_path)


_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one bit": lambda t: t.view(torch.uint8).reshape(-1)[-1].bitwise_xor_(1),
    "all signs": lambda t: t.neg_(),
    "the order": lambda t: t.copy_(t.flip(0)),
    "two swapped": lambda t: t.copy_(torch.cat([t[1:2], t[:1], t[2:]])),
    "a millionth": lambda t: t.mul_(1.000001 if t.dtype != torch.bfloat16 else 1.01),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(2, 700),
    st.integers(1, 900),
    st.sampled_from(sorted(_CHANGES)),
)
def test_every_change_is_seen(dtype: torch.dtype, rows: int, columns: int, change: str) -> None:
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before == digest(tensor.T.contiguous().T)
    whole = torch.cat([torch.zeros(1, columns, dtype=dtype), tensor])
    assert digest(whole[1:]) == before, "wherever in memory it lies"
    _CHANGES[change](tensor)
    assert digest(tensor) != before


class _Reads(TorchFunctionMode):
    """Counts what has the host wait for a device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in ("tolist", "item", "__int__", "cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [0, 3, 2**18, 3 * 2**18 + 1])
def test_a_device_is_waited_for_once(size: int) -> None:
    tensor = torch.arange(size, dtype=torch.float64)
    with _Reads() as reads:
        digest(tensor)
    assert reads.count == 1


CHAIN: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {}),
    ("fsdp", 2, {}),
    ("pipeline", 2, {}),
    ("spill", 1, {}),
    ("ddp", 2, {}),
]


def all_in_one(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    losses: list[float] = []
    emit = ranks.emit

    def told(event: str, **fields: Any) -> None:
        if event == "step":
            losses.append(fields["loss"])
        emit(event, **fields)

    object.__setattr__(ranks, "emit", told)
    return {**train(request, ranks), "losses": losses}


@pytest.mark.ranks
def test_adapters_move_from_technique_to_technique_beside_one_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(USERLAND))
    save_pretrained_gpt2(tmp_path / "pretrained")
    job = Job(
        "tuned",
        load_model="adapter_jobs:adapted",
        load_dataloader="adapter_jobs:table",
        model_args={"folder": str(tmp_path / "pretrained")},
        hparams=HParams(batches=2 * len(CHAIN), batch_size=4, lr=0.05, precision="float64"),
    )
    moved, straight = tmp_path / "moved", tmp_path / "straight"
    losses: list[float] = []
    for technique, devices, parameters in CHAIN:
        asked = TrainRequest(
            job=job, technique=technique, parameters=parameters, folder=str(moved), batch_count=2
        )
        losses += ranks_module.launch(all_in_one, asked, size=devices)[0]["losses"]
        (base,) = (moved / "checkpoints").glob("frozen-*")
        newest = max((moved / "checkpoints").glob("step-*"))
        assert checkpoint_files.bytes_of(base) > checkpoint_files.bytes_of(newest)
    alone = TrainRequest(job=job, technique="single", folder=str(straight))
    uninterrupted = ranks_module.launch(all_in_one, alone, size=1)[0]
    assert losses == pytest.approx(uninterrupted["losses"], abs=1e-6)  # which the model returns as float32
    mine, others = (read_weights(max((f / "checkpoints").glob("step-*"))) for f in (moved, straight))
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-6 if "lora" in name else 0)
