"""Whatever a tensor is and however it lies in memory, a checkpoint gives back the same numbers."""

from __future__ import annotations

import copy
import json
import math
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from saturn_airflow.model.errors import JobError
from saturn_airflow.training import storing
from saturn_airflow.training.optim import plain_values

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, whole, turned, a part of another, expanded or sparse."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(0, 2, [*shape, 2], generator=generator).to(dtype)
    how = draw(st.sampled_from(["part", "turned", "expanded", "sparse", "whole"]))
    if how == "whole":
        return tensor
    if how == "turned":
        return tensor.movedim(-1, 0)
    if how == "part":
        return tensor[..., 0]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor.to_sparse() if dtype in (torch.float32, torch.complex64) else tensor


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_what_is_restored_is_what_was_stored(tensor: torch.Tensor) -> None:
    kept = storing.stored(tensor)
    assert kept.is_contiguous()
    assert kept.ndim > 0
    assert kept.layout == torch.strided
    kept = kept.clone()
    assert kept.dtype == storing.room(list(kept.shape), tensor.dtype, tensor.device).dtype
    other = torch.zeros_like(tensor)
    if tensor.layout == torch.strided and tensor.stride() != other.stride():
        other = torch.zeros_like(tensor[:1]).expand(tensor.shape)
    storing.restore(other, kept)
    assert other.layout == tensor.layout
    assert torch.equal(other.to_dense(), tensor.to_dense())


def test_what_shares_memory_is_kept_apart() -> None:
    whole = torch.arange(6.0)
    kept = storing.apart({"whole": whole, "part": whole[:3], "other": torch.ones(2)})
    assert kept["whole"] is whole
    assert kept["part"].data_ptr() != whole.data_ptr()
    assert torch.equal(kept["part"], whole[:3])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.lists(st.floats(allow_nan=False), min_size=1, max_size=3).map(
            lambda numbers: torch.tensor(numbers, dtype=torch.float64)
        )
    ),
    max_leaves=6,
)


@given(VALUES)
@example({"": torch.zeros(2)})
@example({"none": float("nan")})
def test_plain_values_come_back_as_they_were(value: object) -> None:
    back = plain_values.decode(json.loads(json.dumps(plain_values.encode(value, "it"))))
    assert plain_values.equal(back, value) or repr(back) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4), (), (3,), (70, 70)])
def test_tensors_come_back_in_their_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    back = plain_values.decode(json.loads(json.dumps(plain_values.encode(tensor, "it"))))
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(back, tensor)


def test_tensors_come_back_to_the_kind_of_device_they_were_on() -> None:
    large = plain_values.encode(torch.zeros(5000), "it")
    for encoded in (plain_values.encode(torch.zeros(2), "it"), large):
        assert plain_values.decode(encoded).device.type == "cpu"
        assert plain_values.decode({**encoded, "device": "meta"}).device.type == "meta"
        if not torch.cuda.is_available():
            assert plain_values.decode({**encoded, "device": "cuda"}).device.type == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tensors_in_containers_come_back_to_the_gpu() -> None:
    kept = {"hidden": (torch.ones(2, 3).cuda(), torch.zeros(5000).cuda()), "count": torch.ones(1)}
    chance = torch.Generator("cuda").manual_seed(3)
    back = plain_values.decode(plain_values.encode({**kept, "chance": chance}, "it"))
    assert [one.device.type for one in (*back["hidden"], back["count"])] == ["cuda", "cuda", "cpu"]
    assert torch.equal(back["chance"].get_state(), chance.get_state())


def test_generators_are_made_for_the_device_that_they_drew_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    own = torch.Generator

    def make(device: str = "cpu") -> torch.Generator:
        made.append(device)
        return own()

    encoded = plain_values.encode(own(), "it")
    monkeypatch.setattr(torch, "Generator", make)
    for place in ({}, {"device": "cuda"}):
        plain_values.decode({**encoded, **place})
    assert made == ["cpu", "cuda"]


def test_an_enumeration_that_is_not_found_again_is_told() -> None:
    class Inside(Enum):
        ONE = 1

    with pytest.raises(JobError, match="is of type Inside, which no checkpoint can hold"):
        plain_values.encode(Inside.ONE, "it")


def test_what_a_container_holds_is_of_classes_that_are_found_again() -> None:
    class Inside:
        def __init__(self) -> None:
            self.count = 3

    class Pair(NamedTuple):
        one: int

    for value in ([Inside()], {"a": (Inside(),)}, Pair(1), [Pair(1)]):
        with pytest.raises(JobError, match=r"to be made anew, which .*<locals>.* can.t be imported; define"):
            plain_values.encode(value, "it")
    # One that is there already when it is read is not made, and gets what it held.
    there = Inside()
    encoded = plain_values.encode(there, "it")
    there.count = 0
    assert plain_values.restored(there, encoded) is there
    assert there.count == 3


def test_what_json_cannot_hold_is_told() -> None:
    with pytest.raises(JobError, match="the optimizer's notes is of type object, which"):
        plain_values.encode(object(), "the optimizer's notes")


@pytest.mark.parametrize(
    ("value", "another"),
    [
        (math.nan, 1.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (np.array([math.nan, 2.0]), np.array([math.nan, 3.0])),
    ],
)
def test_what_is_no_number_has_not_changed(value: Any, another: Any) -> None:
    assert plain_values.equal([value], [copy.deepcopy(value)])
    assert not plain_values.equal([value], [another])
