"""Who looks after ranks and was held up itself, as in a frozen container, takes none of them to hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow.launch import launching
from saturn_airflow.launch.failures import RanksFailedError


class Group(launching._Group):
    """Of one rank, which has said nothing for half a second; it ends after three looks."""

    def __init__(self, *_: Any) -> None:
        member = SimpleNamespace(
            number=0,
            ended=False,
            alive_at=time.monotonic() - 0.5,
            process=SimpleNamespace(pid=os.getpid()),
            where=lambda: "",
            result=None,
        )
        self.members: list[Any] = [member]
        self._left = 3

    def ended(self) -> bool:
        self._left -= 1
        return self._left < 0

    def messages(self, timeout: float) -> Iterator[Any]:
        return iter(())

    def held_up(self) -> Iterator[str]:
        return iter(())

    def first_failure(self, kernel_killed: bool) -> None:
        return None

    def end(self) -> None:
        self.members.clear()


@pytest.mark.parametrize("slept", [0.0, 0.3])
def test_a_rank_is_given_its_time_anew(slept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_Group", Group)
    monkeypatch.setattr(launching, "_ASLEEP_SECONDS", 0.2)

    def poll() -> bool:
        nonlocal slept
        time.sleep(slept)
        slept = 0.0
        return False

    if slept:
        launching.launch("m:f", [()], poll=poll, hang_seconds=0.6)
        return
    with pytest.raises(RanksFailedError):
        launching.launch("m:f", [()], poll=poll, hang_seconds=0.4)
