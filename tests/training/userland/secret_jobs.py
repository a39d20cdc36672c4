"""Jobs whose functions take secrets, and write down where these can be seen."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import small_jobs
from torch import nn


def linear(write_to: str, secret: str, fail: bool = False, kill_once: bool = False) -> nn.Module:
    """The model, after a look at what this process and those above it show of ``secret``."""
    found, pid = [], os.getpid()
    while pid > 1 and os.getsid(pid) == os.getsid(0):
        for name in ("environ", "cmdline"):
            found.append(Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace"))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    seen = {
        "digest": digest(secret),
        "in_processes": [text for text in found if secret in text],
        "connections": {name: digest(text) for name, text in os.environ.items() if "AIRFLOW_CONN" in name},
    }
    with open(write_to, "a") as file:
        file.write(json.dumps(seen) + "\n")
    print(f"printed: {secret}")
    print(f"of an error: {secret}", file=sys.stderr)
    if kill_once and not Path(f"{write_to}.killed").exists():
        Path(f"{write_to}.killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if fail:
        raise ConnectionError(f"can't log in with {secret!r}")
    model: nn.Module = small_jobs.linear()
    return model


def noise(secret: str, **arguments: Any) -> Any:
    """The data, for those who have a secret."""
    assert secret
    return small_jobs.noise(**arguments)


def digest(text: str) -> str:
    """What shows that it is the right one, without showing it."""
    return hashlib.sha256(text.encode()).hexdigest()
