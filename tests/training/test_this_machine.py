"""A process's number is one on its own machine alone, though others may be called like it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from saturn_airflow.launch import followers, runs, this_machine


@pytest.mark.parametrize(
    ("told", "here"),
    [
        (this_machine.name(), True),
        (socket.gethostname(), True),  # as earlier versions told it
        (f"{socket.gethostname()}/another-boot/4026531836", False),
        (f"elsewhere/{this_machine.name().partition('/')[2]}", False),
    ],
)
def test_no_process_of_a_machine_of_the_same_name_is_meant(told: str, here: bool, tmp_path: Path) -> None:
    """It would be signalled, and ended, in the place of one that trains elsewhere, or follows there."""
    (tmp_path / "host").write_text(told)
    with open(tmp_path / "alive", "w") as alive, open(tmp_path / "follower", "w") as follower:
        for file, text in ((alive, str(os.getpid())), (follower, f"{told} {os.getpid()}")):
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
        assert runs.Run(tmp_path)._pid() == (os.getpid() if here else None)
        assert followers.follower(tmp_path) == (os.getpid() if here else None)
