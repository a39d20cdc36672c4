"""One `saturn demo` for the tests of this folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_demo import left_of


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, wheel_bin: Path) -> Any:
    """What `saturn demo --keep` printed, what its UIs answered, and its exit status after Ctrl-C."""
    folder = tmp_path_factory.mktemp("demo")
    state = folder / ".saturn"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SATURN"))}
    process = subprocess.Popen(
        [str(wheel_bin / "saturn"), "demo", "--keep"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, "COLUMNS": "120"},
    )
    watchdog = threading.Timer(720, process.kill)
    watchdog.start()
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if "stay up" in line:
            break
    printed = "".join(lines)
    answers = {}
    alive = left_of(state)
    if process.poll() is None:
        urls = dict(re.findall(r"^(Airflow|MLflow) +(http://[\d.:]+)/", printed, re.MULTILINE))
        answers = {name: httpx.get(url, follow_redirects=True).status_code for name, url in urls.items()}
        process.send_signal(signal.SIGINT)
    printed += process.stdout.read()
    status = process.wait()
    watchdog.cancel()
    return {"state": state, "printed": printed, "status": status, "answers": answers, "alive": alive}
