"""What the job's own code remembers outside of its model is put back, and nothing else."""

from __future__ import annotations

import odd_models
import pytest
import torch
from checking import job

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
