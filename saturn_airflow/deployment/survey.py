"""What a machine of the deployment says of itself, for `saturn doctor`. Quick, and changes nothing but marks.

Whether storage is shared can only be seen by writing on one machine and reading on another: each machine
leaves a mark, a small file, in the folder of checkpoints, and says which marks it sees there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.folders import slug
from saturn_airflow.model.printable import without_login

PACKAGES = ("saturn-airflow", "apache-airflow", "celery", "mlflow", "torch")
#: Seconds within which an address answers, or counts as out of reach.
_ANSWER_SECONDS = 3.0
_HEALTH = "/health"
_CUDA_SECONDS = 5.0
_TORCH_SECONDS = 6.0
# Asks the driver to begin, as the first to use a GPU in a process does. In a process of its own: who has
# asked can't fork any more.
_BEGIN_CUDA = """
import ctypes
cuda, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
code = cuda.cuInit(0)
cuda.cuGetErrorString(code, ctypes.byref(name))
print(f"error {code} ({(name.value or b'unknown').decode()})" if code else "")
"""


def survey(name: str, mark: str = "by hand", mlflow: str | None = None) -> dict[str, Any]:
    """What this machine has and can reach.

    :param name: what its mark is called: the Celery worker's name, or the node's.
    :param mark: the mark's contents.
    :param mlflow: an address of the MLflow server to try, as :func:`addresses` has it; empty for the one that
        this machine's environment names, None for the one that Airflow's connections may name, too.
    :returns: ``name``, ``versions``, ``home`` (folder, its file system, free bytes, an error where it can't
        be written), ``marks`` (names whose marks are seen, with their contents), ``leases`` (the folder of
        device locks, its file system, which ``file`` it is, an error where it can't be read), ``devices``,
        ``waiters`` and ``ignored`` (as `saturn devices` has them), ``gpus`` and ``gpu_uuids`` (product names
        and UUIDs of those it may use), ``orphans`` (devices held for a process that is gone), ``cuda`` (the
        version that torch was built for, and the newest that the driver runs; None where there is none; and
        where there are GPUs the error with which CUDA does not begin, and why torch can't use them),
        ``reach`` (an error, or None, by address),
        ``has_mlflow_uri`` (whether MLFLOW_TRACKING_URI is set here), ``time`` (by this machine's clock).
        Times are seconds since the epoch.
    """
    from saturn_airflow.deployment import torch_on_gpus
    from saturn_airflow.deployment.device_use import device_use
    from saturn_airflow.launch import devices
    from saturn_airflow.operators import context

    leases, began = Path(context.leases_folder()), time.monotonic()
    kinds, built = devices.gpus(), torch_cuda()
    # Beside all else: it takes a few seconds.
    asked = torch_on_gpus.ask() if kinds and built else None
    found: dict[str, Any] = {"name": name, "versions": versions()}
    found["home"] = _home(context.home(), name, mark)
    found["marks"] = marks(context.home())
    found["leases"] = {"folder": str(leases), "storage": storage(leases)}
    try:
        shown = device_use(leases)
        found["leases"]["file"] = _file(leases)
        found["devices"], found["waiters"] = shown["devices"], shown["waiters"]
        found["ignored"], found["orphans"] = shown["ignored"], _orphans(shown["devices"], leases)
    except Exception as error:
        found["leases"]["error"] = str(error)
        found["devices"], found["waiters"], found["orphans"] = [], [], []
    found["gpu_uuids"] = devices.gpu_uuids()
    found["gpus"] = [kinds.get(uuid, "gpu") for uuid in found["gpu_uuids"]]
    driver = devices.driver_cuda()
    found["cuda"] = {"torch": built, "driver": driver and f"{driver[0]}.{driver[1]}"}
    found["cuda"]["error"] = cuda_error() if found["gpus"] else None
    to_reach = addresses(ask_airflow=mlflow is None) | ({"MLflow": mlflow} if mlflow else {})
    ask = {"MLflow": reach_mlflow}
    found["reach"] = {what: ask.get(what, reach)(url) for what, url in to_reach.items()}
    left = max(0.0, began + _TORCH_SECONDS - time.monotonic())
    found["cuda"]["unusable"] = None if asked is None else torch_on_gpus.why_not(asked, left)
    found["has_mlflow_uri"] = bool(os.environ.get("MLFLOW_TRACKING_URI"))
    found["time"] = time.time()
    return found


def versions() -> dict[str, str]:
    """Versions of what matters, by name; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built for, without importing it; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        if told := re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE):
            return told[1]
    return None


def cuda_error() -> str | None:
    """Why no process here can use a GPU, though NVML may see some; None where it can.

    As where a container was given the driver's tools alone, a machine of several GPUs lacks its fabric
    manager, or the driver was updated and not loaded anew.
    """
    try:
        asked = [sys.executable, "-c", _BEGIN_CUDA]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_CUDA_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CUDA_SECONDS:.0f} s; nvidia-persistenced keeps a driver ready"
    said = done.stdout if done.returncode == 0 else done.stderr
    return said.strip().rpartition("\n")[2] or None


def leave_mark(home: Path, name: str, text: str) -> None:
    """Leave a mark with these contents in ``home``."""
    folder = home / "doctor"
    folder.mkdir(parents=True, exist_ok=True)
    # It is on the disk then: a full one shows here, not when a checkpoint is written.
    write_whole(folder / f"{slug(name)}.mark", text)


def marks(home: Path) -> dict[str, str]:
    """The contents of all marks that are seen in ``home``, by the names they were left under."""
    found = {}
    for path in sorted((home / "doctor").glob("*.mark")):
        with suppress(OSError):
            found[path.stem] = path.read_text(errors="replace")
    return found


def addresses(ask_airflow: bool = True) -> dict[str, str]:
    """What a node must reach, by name: Airflow's API, and MLflow where it is a server.

    :param ask_airflow: look for MLflow's address in Airflow's connections, not in the environment alone.
    """
    from airflow.sdk import conf

    from saturn_airflow.operators.context import mlflow_uri

    found = {}
    execution = conf.get("core", "execution_api_server_url", fallback="") or ""
    base = execution.rstrip("/").removesuffix("/execution") or conf.get("api", "base_url", fallback="")
    if base:
        found["Airflow's API"] = f"{base.rstrip('/')}/api/v2/version"
    uri = mlflow_uri() if ask_airflow else os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith("http"):
        found["MLflow"] = f"{uri.rstrip('/')}{_HEALTH}"
    return found


def mlflow_of_all() -> str:
    """MLflow's address as a connection names it, the same for all machines; empty where each has its own.

    In a network of containers, for instance, the head calls it otherwise than nodes on other machines do.
    """
    from saturn_airflow import tracking
    from saturn_airflow.operators import context

    own = tracking.resolve_uri(context.home())
    return "" if context.mlflow_uri() == own else addresses().get("MLflow", "")


def reach_mlflow(url: str) -> str | None:
    """Why the MLflow server, of which ``url`` asks how it is, does not answer; None when it does.

    How it is, it tells whoever asks; all else only where it is called by a name that it is to answer to.
    """
    if error := reach(url):
        return error
    address = url.removesuffix(_HEALTH)
    with suppress(httpx.HTTPError):
        answer = httpx.get(
            f"{address}/api/2.0/mlflow/experiments/search",
            params={"max_results": 1},
            timeout=_ANSWER_SECONDS,
            trust_env=False,
        )
        if answer.status_code == 403 and "host" in answer.text.lower():
            host = httpx.URL(address).host
            return (
                f"{without_login(address)} answers to no such name: add {host}:* to what MLflow is called "
                "(mlflow server --allowed-hosts, MLFLOW_ALLOWED_HOSTS in docker/.env)"
            )
    return None


def reach(url: str) -> str | None:
    """Why ``url`` does not answer, or None when it does. A login in it is not told."""
    shown = without_login(url)
    try:
        answer = httpx.get(url, timeout=_ANSWER_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{shown}: {without_login(str(error)) or type(error).__name__}"
    return None if answer.is_success else f"{shown} answers {answer.status_code}"


def storage(path: Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4`` or ``nfs4``; empty if unknown."""
    resolved = path.resolve()
    best = ("", "")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind = line.split()[:3]
            mount = mount.replace("\\040", " ")
            if resolved.is_relative_to(mount) and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]


def _file(path: Path) -> list[int]:
    """What is the same for all names and mounts of a file or folder of one machine."""
    facts = path.stat()
    return [facts.st_dev, facts.st_ino]


def _home(home: Path, name: str, mark: str) -> dict[str, Any]:
    """What :func:`survey` says of the folder of checkpoints, once the mark is left there."""
    found: dict[str, Any] = {"folder": str(home), "storage": storage(home), "error": None, "mark": None}
    try:
        leave_mark(home, name, mark)
        found["mark"] = mark
    except OSError as error:
        found["error"] = error.strerror or str(error)
    there = next((path for path in (home, *home.parents) if path.exists()), Path("/"))
    found["free"] = shutil.disk_usage(there).free
    return found


def _orphans(devices: list[dict[str, Any]], leases: Path) -> list[dict[str, Any]]:
    """Devices whose holder is gone while something it started still has them, with the ids of that."""
    found = []
    for device in devices:
        holder = device["holder"]
        if holder and holder["pid"] and not Path(f"/proc/{holder['pid']}").exists():
            keepers = _having_open(leases / "devices" / device["name"])
            found.append({"device": device["name"], "who": holder["who"], "pids": keepers})
    return found


def _having_open(path: Path) -> list[int]:
    """Ids of the processes that have a file open, as far as this user may look."""
    target = os.stat(path)
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                for entry in (process / "fd").iterdir():
                    with suppress(OSError):
                        if os.path.samestat(entry.stat(), target):
                            found.append(int(process.name))
                            break
    return sorted(found)
