"""What `saturn doctor` says of nodes, from what they say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from saturn_airflow.deployment import alike, pools, survey, torch_on_gpus
from saturn_airflow.deployment.checks import check_nodes, examine_node
from saturn_airflow.deployment.findings import Deployment, Finding, Question
from saturn_airflow.deployment.limits import check_limits
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.operators import context, drains
from saturn_airflow.operators.inventory import record_pools

COMPOSE = Path(__file__).parents[2] / "docker" / "compose.yaml"
NODE = Node("gpu-a", 2, kind="cpu")


def said(**versions: str) -> dict[str, Any]:
    """What a whole node says, in these versions."""
    return {"versions": versions, "reach": {"MLflow": None}, "gpus": [], "devices": []}


def nodes(**versions: str) -> list[Finding]:
    deployment = Deployment(Cluster(NODE), nodes={NODE.name: said(**versions)})
    return list(check_nodes(deployment))


def test_a_whole_node_is_one_line() -> None:
    (found,) = nodes(**survey.versions())
    assert (found.level, found.text) == ("ok", "gpu-a: 2 x cpu (CPU slots)")


@pytest.mark.parametrize(("other", "problem"), [("gpu-a@b", True), ("second@a", False)])
def test_two_machines_as_one_node_are_a_problem(other: str, problem: bool) -> None:
    """A job that is planned on the devices of one would run on those of the other, too."""
    workers = {"gpu-a@a": {NODE.queue}, other: {NODE.queue}, "default@c": {"default"}}
    deployment = Deployment(Cluster(NODE), nodes={NODE.name: said(**survey.versions())}, workers=workers)
    told = [found.text for found in check_nodes(deployment) if found.level == "problem"]
    text = "gpu-a: workers of several machines listen on 'saturn.gpu-a': gpu-a@a, gpu-a@b"
    assert told == ([text] if problem else [])


@pytest.mark.parametrize("here", [True, False])
def test_a_node_without_torch_is_one_problem(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: version for name, version in survey.versions().items() if name != "torch"}
    if not here:
        monkeypatch.setattr(survey, "PACKAGES", tuple(name for name in survey.PACKAGES if name != "torch"))
    (found,) = nodes(**there)
    assert (found.level, found.text) == ("problem", "gpu-a: torch is not installed")


@pytest.fixture
def strict_mlflow() -> Iterator[int]:
    """The port of what answers as MLflow does that is to be called by other names (``--allowed-hosts``)."""

    class Strict(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.path == "/health" or self.headers["Host"].startswith("localhost:")
            self.send_response(200 if allowed else 403)
            self.end_headers()
            self.wfile.write(
                b"{}" if allowed else b"Invalid Host header - possible DNS rebinding attack detected"
            )

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Strict)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_an_mlflow_that_does_not_answer_to_its_name_is_told_with_the_fix(strict_mlflow: int) -> None:
    assert survey.reach_mlflow(f"http://localhost:{strict_mlflow}/health") is None
    told = survey.reach_mlflow(f"http://ann:secret@127.0.0.1:{strict_mlflow}/health")
    assert told is not None
    assert told.startswith(f"http://127.0.0.1:{strict_mlflow} answers to no such name: add 127.0.0.1:* to")


def test_nodes_are_asked_for_the_mlflow_that_each_has_unless_a_connection_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine of its own a node calls MLflow by another name than the head's containers do."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setattr(context, "mlflow_uri", lambda: "http://mlflow:5000")
    assert survey.mlflow_of_all() == ""
    assert survey.addresses(ask_airflow=False)["MLflow"] == "http://mlflow:5000/health"
    monkeypatch.setattr(context, "mlflow_uri", lambda: "https://mlflow.example.com/")
    assert survey.mlflow_of_all() == "https://mlflow.example.com/health"


def test_other_versions_are_a_warning() -> None:
    (found,) = nodes(**{**survey.versions(), "torch": "2.0"})
    assert found.level == "warning"
    assert found.text.startswith("gpu-a: runs torch 2.0 (here ")


@pytest.mark.parametrize(
    ("torch", "driver", "error", "told"),
    [
        (None, "12.4", None, "is built without CUDA"),
        ("13.0", "12.8", None, "is built for CUDA 13.0, the driver runs no newer than 12.8"),
        ("12.8", "12.4", None, None),  # minor versions are compatible
        ("12.8", "13.0", None, None),
        ("12.8", "13.0", "error 802 (system not yet initialized)", "CUDA does not begin: error 802 (system"),
    ],
)
def test_torch_and_the_driver_of_a_gpu_node(
    torch: str | None, driver: str, error: str | None, told: str | None
) -> None:
    node = Node("gpu-a", 1, kind="h100")
    here = survey.versions()
    versions = {**here, "torch": f"{here['torch'].partition('+')[0]}+cu128"}
    cuda = {"torch": torch, "driver": driver, "error": error}
    answer = {**said(**versions), "gpus": ["H100"], "cuda": cuda}
    (found,) = check_nodes(Deployment(Cluster(node), nodes={"gpu-a": answer}))
    assert found.level == ("problem" if told else "ok")
    assert told is None or told in found.text


@pytest.mark.parametrize(
    ("built_for", "capability", "has"),
    [
        ("sm_75 sm_80 sm_86 sm_90", (9, 0), True),
        ("sm_75 sm_80 sm_86 sm_90", (8, 9), True),  # as its smaller minor
        ("sm_75 sm_80 sm_86 sm_90", (7, 0), False),
        ("sm_75 sm_80 sm_86 sm_90", (12, 0), False),
        ("sm_75 sm_80 sm_86 sm_90 compute_90", (12, 0), True),  # which the driver translates
        ("sm_80 compute_90", (7, 5), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a compute_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("gfx90a", (9, 0), True),  # nothing is known of these
        ("", (9, 0), True),
    ],
)
def test_which_gpus_a_wheel_has_kernels_for(built_for: str, capability: tuple[int, int], has: bool) -> None:
    assert torch_on_gpus.has_kernels(built_for.split(), *capability) is has


_TORCH = """
class cuda:
    device_count = lambda: 2
    get_device_name = lambda i: ["H100", "V100"][i]
    get_device_capability = lambda i: [(9, 0), (7, 0)][i]
    get_arch_list = lambda: ["sm_80", "sm_90"]
"""


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (_TORCH, "it has kernels for sm_80 sm_90, and V100 is of sm_70"),
        (_TORCH.replace("(7, 0)", "(8, 6)"), None),
        (
            "raise RuntimeError('The NVIDIA driver on your system is too old')",
            "RuntimeError: The NVIDIA driver",
        ),
        ("import time\ntime.sleep(60)", None),
    ],
    ids=["an old GPU", "fits", "an old driver", "a slow disk"],
)
def test_torch_is_asked_in_a_process_of_its_own(
    torch: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = torch_on_gpus.ask()
    why = torch_on_gpus.why_not(asked, 0.5 if "sleep" in torch else 30)
    assert why == told if told is None else str(why).startswith(told)
    assert asked.poll() is not None


def test_a_wheel_without_kernels_is_a_problem() -> None:
    cuda = {"torch": "13.0", "driver": "13.0", "error": None, "unusable": "it has kernels for sm_90 alone"}
    answer = {**said(**survey.versions()), "gpus": ["V100"], "cuda": cuda}
    (found,) = check_nodes(Deployment(Cluster(Node("gpu-a", 1, kind="v100")), nodes={"gpu-a": answer}))
    assert found.level == "problem"
    assert "can't use the GPUs: it has kernels for sm_90 alone" in found.text
    assert "a wheel of torch for these GPUs" in found.fix


def test_the_cuda_that_torch_was_built_for_is_known_without_importing_it() -> None:
    import torch

    assert survey.torch_cuda() == torch.version.cuda


def test_cuda_is_asked_to_begin_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = (
        "class CDLL:\n    def __init__(self, name): {}\n"
        "    def __getattr__(self, name): return lambda *_: 802\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def told(loads: str) -> str | None:
        code = fake.format(loads) + "c_char_p, byref = type('', (), {'value': b'not yet'}), id\n"
        (tmp_path / "ctypes.py").write_text(code)
        return survey.cuda_error()

    assert told("pass") == "error 802 (not yet)"
    assert told("raise OSError(name + ' is not there')") == "OSError: libcuda.so.1 is not there"
    monkeypatch.setattr(survey, "_CUDA_SECONDS", 0.001)
    assert "no answer within 0 s; nvidia-persistenced" in str(survey.cuda_error())


def test_a_name_that_is_no_nodes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__NODES", "gpu-a:2:cpu, gpu-b:2:cpu")
    (found,) = examine_node("gpu-x")
    assert found.level == "problem"
    assert found.text == "'gpu-x' is no node of this deployment, which has gpu-a, gpu-b"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("pool", "recorded", "slots", "level", "words"),
    [
        (None, False, 10, "problem", "gpu-a has no pool: tasks may be lost in its queue"),
        (None, True, 10, "problem", "gpu-a has no pool: its tasks name one, and never start"),
        (10, False, 10, "problem", "gpu-a has a pool that no sweep knows of"),
        (10, True, 4, "problem", "the pool of gpu-a has 10 slots, its worker 4"),
        (3, True, 4, "warning", "the pool of gpu-a has 3 slots; one sweep uses 4"),
        (4, True, 4, "ok", "nodes have pools: saturn.gpu-a (4); short tasks have saturn (4)"),
        (10, True, 0, "ok", "nodes have pools: saturn.gpu-a (10); short tasks have saturn (4)"),
    ],
)
def test_each_node_needs_a_pool_no_larger_than_its_worker(
    pool: int | None, recorded: bool, slots: int, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"saturn": 4} if pool is None else {"saturn.gpu-a": pool, "saturn": 4}
    monkeypatch.setattr(pools, "existing", lambda: there)
    record_pools({"saturn.gpu-a": 10, "saturn": 4} if recorded else {"saturn": 4})
    deployment = Deployment(Cluster(NODE), workers={"w": {"saturn.gpu-a"}}, pools={"w": slots})
    (found,) = pools.check_pools(deployment)
    assert found.level == level
    assert found.text.startswith(words)


@pytest.mark.usefixtures("home")
def test_a_drained_node_is_not_forgotten() -> None:
    drains.drain("gpu-a", "new disks")
    (found,) = check_nodes(Deployment(Cluster(NODE)))
    assert (found.level, found.fix) == ("warning", "saturn undrain gpu-a")
    assert found.text == "gpu-a: it is drained (new disks); no new plan uses it"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("size", "recorded", "slots", "words"),
    [
        (None, False, 4, "tasks of sweeps that need no device have no pool"),
        (4, False, 4, "tasks of sweeps that need no device have no pool"),
        (8, True, 4, "the pool saturn has 8 slots, the worker of 'default' 4"),
    ],
)
def test_short_tasks_need_a_pool_no_larger_than_their_worker(
    size: int | None, recorded: bool, slots: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"saturn.gpu-a": 4} | ({} if size is None else {"saturn": size})
    monkeypatch.setattr(pools, "existing", lambda: there)
    record_pools({"saturn.gpu-a": 4} | ({"saturn": 4} if recorded else {}))
    workers = {"w": {"default"}, "a": {"saturn.gpu-a"}}
    (found,) = pools.check_pools(Deployment(Cluster(NODE), workers=workers, pools={"w": slots, "a": 4}))
    assert found.level == "problem"
    assert found.text.startswith(words)


def test_a_worker_with_fewer_slots_than_a_sweep_uses_is_a_problem() -> None:
    deployment = Deployment(Cluster(NODE), False, {"w": {"saturn.gpu-a"}}, {"w": 3})
    found = [f for f in check_limits(deployment) if "gpu-a" in f.text]
    assert [f.level for f in found] == ["problem"]
    assert "--concurrency 4 (or more), and then `saturn pools`" in found[0].fix


@pytest.mark.parametrize(("kind", "problems"), [("prefork", 0), ("thread", 1), ("solo", 1)])
def test_a_worker_without_processes_for_its_tasks_is_a_problem(kind: str, problems: int) -> None:
    deployment = Deployment(Cluster(NODE), False, {"w": {"saturn.gpu-a"}}, {"w": 4}, {"w": kind})
    found = [f for f in check_limits(deployment) if f.text.startswith("w runs tasks by")]
    assert [f.level for f in found] == ["problem"] * problems
    assert all(f.fix == "set [celery] pool to prefork there" for f in found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "a task whose message is lost with its killed worker is queued again after 720 s"),
        (
            {"TASK_QUEUED_TIMEOUT": "60", "TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "10"},
            "a task fails after 180 s in queues, such as while its node starts anew",
        ),
        ("those of the compose file", None),
    ],
)
def test_how_long_a_lost_message_is_waited_for(
    settings: dict[str, str] | str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CELERY__BROKER_URL", "redis://127.0.0.1:9/0")
    if isinstance(settings, str):
        given = yaml.safe_load(COMPOSE.read_text())["services"]["scheduler"]["environment"]
        start = "AIRFLOW__SCHEDULER__"
        settings = {name.removeprefix(start): given[name] for name in given if name.startswith(start)}
    for name, value in settings.items():
        monkeypatch.setenv(f"AIRFLOW__SCHEDULER__{name}", value)
    found = [f.text for f in check_limits(Deployment(Cluster(NODE))) if f.fix.startswith("set [scheduler]")]
    assert found == ([words] if words else [])
    monkeypatch.setenv("AIRFLOW__CELERY__BROKER_URL", "amqp://127.0.0.1:9")
    assert not [f for f in check_limits(Deployment(Cluster(NODE))) if f.fix.startswith("set [scheduler]")]


def test_workers_that_do_not_wait_for_the_database_of_results_are_named() -> None:
    surveys = {"gpu-a": {"waits_for_results": False}, "gpu-b": {"waits_for_results": True}}
    (found,) = (f for f in check_limits(Deployment(Cluster(NODE), nodes=surveys)) if "results" in f.text)
    assert (found.level, found.text.partition(":")[0]) == ("warning", "gpu-a")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, []),
        ({"time": 1009.0}, []),
        ({"time": 4610.0}, ["gpu-a: its clock is 3600 s ahead of this machine's"]),
        ({"time": 940.0}, ["gpu-a: its clock is 60 s behind this machine's"]),
        (
            {"home": {"folder": "/there", "mark": "another"}},
            ["this machine does not see in {} what gpu-a writes to /there"],
        ),
        (
            {"has_mlflow_uri": False},
            ["gpu-a: MLFLOW_TRACKING_URI is not set there, and its jobs' runs go into a file of its own"],
        ),
    ],
)
def test_a_node_with_another_clock_home_or_mlflow_is_named(
    answer: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    survey.leave_mark(tmp_path, "gpu-a@a", "now")
    own = {"folder": "/", "mark": "now"}
    usual = {"name": "gpu-a@a", "time": 1005.0, "has_mlflow_uri": True, "home": own}
    question = Question(asked=1000.0, answered=1010.0)
    asked = Deployment(Cluster(NODE), nodes={"gpu-a": {**usual, **answer}}, question=question)
    monkeypatch.setattr(survey, "addresses", lambda: {"MLflow": "http://127.0.0.1:9/health"})
    words = [text.format(tmp_path) for text in words]
    assert [found.text for found in alike.check_alike(asked) if found.level == "problem"] == words
    # It has the connection, as all nodes have.
    monkeypatch.setattr(survey, "addresses", lambda: {"MLflow": "http://mlflow:5000/health"})
    assert len(list(alike.check_alike(asked))) == len([w for w in words if "MLFLOW" not in w])


@pytest.mark.parametrize("same", ["folder", "GPUs", "neither"])
def test_nodes_that_lock_the_same_gpus_in_different_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str
) -> None:
    """As two workers of one machine, each with leases in the home folder of its user or container."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("gpu-a", "gpu-b")):
        leases = tmp_path / name
        leases.mkdir()
        if same == "folder" and number:
            leases = tmp_path / "gpu-a" / "." / ".." / "gpu-a"
        found[name] = {
            "name": name,
            "home": {"folder": str(tmp_path), "mark": None},
            "leases": {"folder": str(leases), "storage": "ext4", "file": survey._file(leases)},
            "gpu_uuids": ["GPU-0", f"GPU-{number + 1}"] if same != "neither" else [f"GPU-{number}"],
        }
    asked = Deployment(nodes=found, question=Question(asked=0.0, answered=1.0))
    texts = [f.text for f in alike.check_alike(asked) if f.level == "problem"]
    if same != "GPUs":
        assert texts == []
        return
    (text,) = texts
    assert text.startswith("gpu-a and gpu-b share GPUs (GPU-0), and lock them in different folders")
    assert f"{tmp_path / 'gpu-a'} and {tmp_path / 'gpu-b'}" in text
