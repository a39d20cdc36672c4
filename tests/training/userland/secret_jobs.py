"""Jobs whose functions take secrets, and write down where these can be seen."""

from __future__ import annotations

import hashlib
import json
import logging
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


class Client:
    """Something that a model asks, with what it was given."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.calls = 0


LAST: dict[str, Any] = {"calls": 0}


class Asking(nn.Module):
    """Holds a secret in objects that change, in each way that checkpoints keep; dies once, and goes on."""

    def __init__(self, write_to: str, secret: str) -> None:
        super().__init__()
        self.net = small_jobs.linear()
        self.client = Client(secret)
        self.settings = {"url": f"db://ann:{secret}@host", "calls": 0}
        self.asked: list[str] = []
        self.write_to = write_to

    def forward(self, inputs: Any) -> Any:
        if self.training:
            self.client.calls += 1
            self.settings["calls"] += 1
            self.asked.append(f"{self.client.password} again")
            LAST.update(calls=LAST["calls"] + 1, password=self.client.password)
            seen = [self.client.calls, self.settings["calls"], len(self.asked), digest(self.client.password)]
            seen += [digest(str(self.settings["url"])), digest(self.asked[0]), LAST["calls"]]
            with open(self.write_to, "a") as file:
                file.write(json.dumps(seen) + "\n")
            logging.getLogger("secret_jobs.early").error("asked with %s", self.client.password)
            if len(self.asked) == 30 and not Path(f"{self.write_to}.killed").exists():
                Path(f"{self.write_to}.killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.net(inputs)


def asking(write_to: str, secret: str) -> nn.Module:
    return Asking(write_to, secret)
