"""A model that writes down the environment that it finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import small_jobs
from torch import nn


def linear(write_to: str) -> nn.Module:
    """The model, after a look at the variables of this process and those above it in its session."""
    found, pid = [], os.getpid()
    while pid > 1 and os.getsid(pid) == os.getsid(0):
        found.append(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    colours = list(set("red green blue black".split()))  # noqa: SIM905 - as a set of words of a text
    told = {"own": dict(os.environ), "of_processes": found, "order": colours}
    Path(write_to).write_text(json.dumps(told))
    model: nn.Module = small_jobs.linear()
    return model
