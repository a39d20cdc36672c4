"""What a technique's ``search`` may return."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.training.driving import _checked
from saturn_airflow.training.session import Session


def test_parameters_are_plain_data() -> None:
    assert _checked(({"stages": (1, 2), "share": 0.5}, 2), "own") == ({"stages": [1, 2], "share": 0.5}, 2.0)


@pytest.mark.parametrize(
    "found",
    [None, ({}, 0.0), ({}, math.nan), ({"limit": math.inf}, 1.0), ({"limit": [math.nan]}, 1.0), ([1], 1.0)],
)
def test_what_would_not_come_out_of_an_xcom_as_it_was_is_refused(found: object) -> None:
    """A technique that measured without a limit would have trained with None."""
    with pytest.raises(
        TypeError, match=r"technique 'own': search returned .*; it must return the parameters"
    ):
        _checked(found, "own")


@pytest.mark.parametrize("candidates", [{"recompute": True}, [{"dtype": object()}], [{"limit": math.inf}]])
def test_what_is_no_candidate_is_named(candidates: Any, tmp_path: Path) -> None:
    nobody: Any = None
    session = Session(nobody, spec_for(tmp_path, small_job(), "picky", mode="trial"), math.inf)
    with pytest.raises(TypeError, match=r"technique 'picky': .* is no candidate; each is a mapping"):
        session.fastest(candidates)
