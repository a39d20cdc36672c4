"""What the job's own code remembers outside of its model is put back, and nothing else."""

from __future__ import annotations

from unittest import mock

import odd_models
import pytest
import torch
from checking import job

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.guarding import users_state
from saturn_airflow.training.guarding.users_state import UsersState


@pytest.mark.slow
def test_what_torch_compile_keeps_in_a_module_stays() -> None:
    model = odd_models.Blocks(odd_models.CompilesAPart())
    vectors = torch.ones(2, 6)
    with UsersState(job(), model).put_back():
        expected = model(vectors)
    assert torch.equal(model(vectors), expected)


def test_what_a_class_counts_is_put_back() -> None:
    model = odd_models.Blocks(odd_models.CountsInClass())
    before = odd_models.CountsInClass.passes
    with UsersState(job(), model).put_back():
        model(torch.ones(2, 6))
        assert odd_models.CountsInClass.passes == before + 1
    assert odd_models.CountsInClass.passes == before


def test_a_model_that_no_code_refers_to_may_be_copied() -> None:
    """The guard loads one that code refers to anew instead, and who loads may do more than that."""
    model = odd_models.plain()
    assert odd_models.plain in vars(odd_models).values(), "functions, which are looked at, are no model"
    assert not UsersState(job(), model).holds_model
    with mock.patch.object(odd_models, "KNOWN", [*model.children()], create=True):
        assert UsersState(job(), model).holds_model


def test_what_is_too_large_to_be_put_back_may_not_change() -> None:
    model = odd_models.plain()
    with mock.patch.object(users_state, "_MOST_NUMBERS", 5000):
        with mock.patch.object(odd_models, "TABLE", torch.zeros(5000), create=True):
            with UsersState(job(), model).put_back():
                odd_models.TABLE[0] = 1.0  # type: ignore[attr-defined]
            assert not odd_models.TABLE.any()  # type: ignore[attr-defined]
        with mock.patch.object(odd_models, "TABLE", torch.zeros(5001), create=True):
            with UsersState(job(), model).put_back():
                assert not odd_models.TABLE.any()  # type: ignore[attr-defined]
            with (
                pytest.raises(JobError, match="too large to be put back"),
                UsersState(job(), model).put_back(),
            ):
                odd_models.TABLE[0] = 1.0  # type: ignore[attr-defined]
