"""Techniques of Saturn's, called in the supervisor itself: what ends the run passes them by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import forked, technique_call
from saturn_airflow.launch.failures import Failure, RanksFailedError
from saturn_airflow.model.status import Status

NO_MEMORY = Failure(status=Status.OUT_OF_MEMORY, reason="no room")
#: How often each call asked for ranks.
asked: list[int] = []


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(forked, "may_fork", True)

    def call(poll: Callable[[], bool], **settings: Any) -> dict[str, Any]:
        asked.append(0)
        spec = spec_for(tmp_path, small_job(), **{"mode": "trial", **settings})

        def launch_ranks(what: Any, asker_is_alive: Callable[[], bool]) -> Failure:
            assert asker_is_alive()
            asked[-1] += 1
            return NO_MEMORY

        return technique_call.call(
            spec,
            [0],
            float("inf"),
            on_event=lambda event: None,
            launch_ranks=launch_ranks,
            poll=poll,
            keep_open=[],
        )

    asked.clear()
    return call


@pytest.mark.slow
def test_where_ranks_fail_it_goes_on_with_what_else_it_has(call: Callable[..., Any]) -> None:
    with pytest.raises(RanksFailedError, match="no room"):
        call(lambda: False)
    assert asked == [2], "single recomputes where the rest does not fit"


@pytest.mark.parametrize(
    "error", [RanksFailedError(Failure(status=Status.HUNG, reason="late")), OSError("late")]
)
def test_it_can_not_go_on_where_the_run_ends(call: Callable[..., Any], error: Exception) -> None:
    def poll() -> bool:
        raise error

    with pytest.raises(type(error), match="late"):
        call(poll)
    assert asked == [1]


def test_what_it_raises_is_told_as_of_any_other(call: Callable[..., Any]) -> None:
    with pytest.raises(RanksFailedError) as raised:
        call(lambda: False, technique="fsdp")
    assert (raised.value.failure.status, raised.value.failure.whose) == ("does_not_fit", "technique")
