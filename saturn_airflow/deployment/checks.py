"""The checks of `saturn doctor`: each looks at one thing, says what is wrong with it and how to mend it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import Requirement
from packaging.version import Version

from saturn_airflow.deployment import survey as surveys
from saturn_airflow.deployment.alike import check_alike
from saturn_airflow.deployment.budgets import check_budgets
from saturn_airflow.deployment.findings import Deployment, Finding, Level, Question
from saturn_airflow.deployment.limits import check_limits
from saturn_airflow.deployment.pools import check_pools
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.folders import slug
from saturn_airflow.model.printable import without_login

#: Less free disk than this is a warning, or a problem (bytes).
LITTLE_DISK, NO_DISK = 20 * 2**30, 2 * 2**30
#: Locks of these file systems do not end with the process, or end at other times.
NETWORK_STORAGE = ("nfs", "cifs", "smb", "fuse.", "ceph", "lustre", "glusterfs", "9p")


def examine() -> Iterator[Finding]:
    """Look at the deployment that this machine's Airflow configuration describes."""
    # As Airflow's own `airflow connections` does, to see the connections that its database holds.
    os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"
    deployment = Deployment()
    for check in (
        check_versions,
        check_airflow,
        check_workers,
        check_nodes,
        check_alike,
        check_limits,
        check_pools,
        check_storage,
        check_budgets,
        check_leases,
        check_mlflow,
    ):
        name = check.__name__.removeprefix("check_")
        try:
            yield from check(deployment)
        except Exception as error:  # one check that can't be made must not hide the others
            yield Finding(name, "problem", f"could not be checked: {type(error).__name__}: {error}")


def examine_node(name: str) -> Iterator[Finding]:
    """Look at this machine alone, as the node ``name``.

    For a deployment whose workers do not answer `saturn doctor`.
    """
    from saturn_airflow.operators.inventory import deployed_cluster

    deployment = Deployment(celery=False)
    try:
        deployment.cluster = deployed_cluster()
    except SaturnError as error:
        yield Finding("nodes", "warning", str(error), "a sweep then has to name its cluster itself")
    known = [node.name for node in deployment.cluster or ()]
    if known and name not in known:
        text = f"{name!r} is no node of this deployment, which has {', '.join(known)}"
        yield Finding("nodes", "problem", text, "correct --node, or add the node to [saturn] nodes")
        return
    deployment.nodes[name] = surveys.survey(name)
    for check in (check_versions, check_nodes, check_storage, check_leases, check_mlflow):
        yield from check(deployment)


def check_versions(deployment: Deployment) -> Iterator[Finding]:
    """What is installed here is what Saturn was made for."""
    wrong = list(unmet_requirements())
    for text, fix in wrong:
        yield Finding("versions", "problem", text, fix)
    found = surveys.versions()
    if "torch" not in found:
        text = "torch is not installed: this machine can plan and schedule, but not train"
        yield Finding("versions", "warning", text, "on a node: pip install 'saturn-airflow[torch]'")
    if not wrong:
        yield Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def unmet_requirements() -> Iterator[tuple[str, str]]:
    """What of Saturn's own requirements this environment does not meet, with the command that mends it."""
    for text in metadata.requires("saturn-airflow") or ():
        requirement = Requirement(text)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if requirement.marker and not optional and not requirement.marker.evaluate():
            continue
        if not requirement.specifier:
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not optional:
                yield f"{requirement.name} is not installed", f"pip install '{requirement.name}'"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield f"{requirement.name} is {version}, not {requirement.specifier}", f"pip install '{wanted}'"
    try:
        celery = Version(metadata.version("celery"))
        provider = Version(metadata.version("apache-airflow-providers-celery"))
    except metadata.PackageNotFoundError:
        return
    if celery >= Version("5.7") and provider <= Version("3.26.0"):
        text = f"celery is {celery}, with which Airflow's provider {provider} can't be imported"
        yield text, "pip install 'celery<5.7', or install with constraints.txt"


def check_airflow(deployment: Deployment) -> Iterator[Finding]:
    """Airflow's API answers, and its services are alive."""
    url = surveys.addresses().get("Airflow's API")
    if url is None:
        text = "no address of Airflow's API is configured"
        yield Finding("airflow", "problem", text, "set [core] execution_api_server_url")
        return
    if error := surveys.reach(url):
        fix = "start `airflow api-server`, or correct [core] execution_api_server_url"
        yield Finding("airflow", "problem", error, fix)
        return
    health = httpx.get(url.replace("/version", "/monitor/health"), timeout=10, trust_env=False).json()
    commands = {
        "metadatabase": "start Postgres, or correct [database] sql_alchemy_conn",
        "scheduler": "start `airflow scheduler`",
        "dag_processor": "start `airflow dag-processor`",
        "triggerer": "start `airflow triggerer`",
    }
    sick = [name for name in commands if (health.get(name) or {}).get("status") != "healthy"]
    for name in sick:
        seen = (health.get(name) or {}).get(f"latest_{name}_heartbeat") or "never"
        # Nothing of Saturn's waits in the triggerer.
        level: Level = "warning" if name == "triggerer" else "problem"
        text = f"{name} is not healthy (last sign of life: {seen})"
        yield Finding("airflow", level, text, commands[name])
    if not sick:
        address = url.removesuffix("/api/v2/version")
        yield Finding("airflow", "ok", f"{address} answers; {', '.join(commands)} are healthy")


def check_workers(deployment: Deployment) -> Iterator[Finding]:
    """Somebody listens on every queue."""
    from airflow.sdk import conf

    from saturn_airflow.operators.inventory import default_queue, deployed_cluster

    try:
        deployment.cluster = deployed_cluster()
    except SaturnError as error:
        yield Finding("queues", "warning", str(error), "a sweep then has to name its cluster itself")
    executor = conf.get("core", "executor", fallback="")
    deployment.celery = "Celery" in executor
    if not deployment.celery:
        text = f"[core] executor is {executor}: tasks run on the scheduler's machine, queues mean nothing"
        level: Level = "ok" if len(deployment.cluster or ()) <= 1 else "problem"
        yield Finding("queues", level, text, "" if level == "ok" else "several nodes need the CeleryExecutor")
        if deployment.cluster is not None and level == "ok":
            name = deployment.cluster.nodes[0].name
            deployment.nodes[name] = surveys.survey(name)
        return
    try:
        _ask_workers(deployment)
    except Exception as error:
        fix = "start Redis, or correct [celery] broker_url"
        yield Finding("queues", "problem", f"the broker does not answer: {without_login(str(error))}", fix)
        return
    wanted = {default_queue(): "short tasks"}
    for node in deployment.cluster or ():
        wanted[node.queue] = f"node {node.name}"
    heard = set[str]().union(*deployment.workers.values())
    for queue, what in wanted.items():
        if queue not in heard:
            text = f"no worker listens on {queue!r} ({what}); its tasks would wait for ever"
            yield Finding("queues", "problem", text, f"airflow celery worker --queues {queue}")
    for queue in sorted(heard - set(wanted)):
        if queue.startswith("saturn."):
            text = f"a worker listens on {queue!r}, which is no queue of a known node"
            fix = "add the node to [saturn] nodes, or `saturn devices --announce` it"
            yield Finding("queues", "warning", text, fix)
    if heard >= set(wanted):
        yield Finding("queues", "ok", f"workers listen on {', '.join(sorted(heard))}")


def _ask_workers(deployment: Deployment) -> None:
    """Fill in what Celery's workers say: their queues, their slots, and the surveys of nodes.

    Raises whatever the broker's client does where the broker does not answer.
    """
    from saturn_airflow.deployment.remote import COMMAND
    from saturn_airflow.operators.airflow_internals import celery_app

    app = celery_app()

    with app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, timeout=5)
    inspect = app.control.inspect(timeout=2.0)
    for worker, queues in (inspect.active_queues() or {}).items():
        deployment.workers[worker] = {str(queue["name"]) for queue in queues}
    if not deployment.workers:
        return
    for worker, stats in (inspect.stats() or {}).items():
        pool = stats.get("pool") or {}
        deployment.pools[worker] = int(pool.get("max-concurrency") or 0)
        deployment.kinds[worker] = str(pool.get("implementation", "")).partition(":")[0].rpartition(".")[2]
    nodes = {
        worker: node.name
        for worker, queues in deployment.workers.items()
        for node in deployment.cluster or ()
        if node.queue in queues
    }
    if not nodes:
        return
    # Twice: the first to answer can't see the marks of the others yet.
    mark = f"{socket.gethostname()} {time.time():.3f}"
    inspect = app.control.inspect(list(nodes), timeout=10.0, limit=len(nodes))
    mlflow = surveys.mlflow_of_all()
    for _ in range(2):
        asked = time.time()
        answers = inspect._request(COMMAND, mark=mark, mlflow=mlflow) or {}
        deployment.question = Question(asked, time.time())
        deployment.nodes = {nodes[worker]: answer for worker, answer in answers.items()}


def _several_machines(deployment: Deployment) -> Iterator[Finding]:
    """Nodes that are several machines: their workers have the same queue."""
    for node in deployment.cluster or ():
        workers = sorted(name for name, queues in deployment.workers.items() if node.queue in queues)
        if len({name.rpartition("@")[2] for name in workers}) > 1:
            text = f"{node.name}: workers of several machines listen on {node.queue!r}: {', '.join(workers)}"
            fix = "a node is one machine, whose devices are planned: name each in [saturn] nodes"
            yield Finding("nodes", "problem", text, fix)


def check_nodes(deployment: Deployment) -> Iterator[Finding]:
    """Each node has the devices it is said to have, reaches what it needs, and runs what the others run."""
    from saturn_airflow.operators.drains import drained

    own = surveys.versions()
    for name, why in drained().items():
        yield Finding("nodes", "warning", f"{name}: {why}; no new plan uses it", f"saturn undrain {name}")
    yield from _several_machines(deployment)
    for node in deployment.cluster or ():
        said = deployment.nodes.get(node.name)
        if said is None:
            if any(node.queue in queues for queues in deployment.workers.values()):
                text = f"{node.name}: its worker does not answer questions of Saturn's"
                fix = (
                    "set [celery] extra_celery_config on the nodes (docs/cluster.md), "
                    f"or run `saturn doctor --node {node.name}` there"
                )
                yield Finding("nodes", "warning", text, fix)
            continue
        if error := said.get("error"):
            fix = "look at the node, and at its worker's log"
            yield Finding("nodes", "problem", f"{node.name}: {error}", fix)
            continue
        there = said["versions"]
        wrong = [
            f"{package} {there[package]} (here {own[package]})"
            for package in ("python", "saturn-airflow", "apache-airflow", "torch")
            # A GPU's build of torch differs from a CPU's in what stands behind the "+".
            if package in own and package in there and _public(there[package]) != _public(own[package])
        ]
        if wrong:
            text = f"{node.name}: runs {', '.join(wrong)}"
            yield Finding("nodes", "warning", text, "install the same versions on all machines")
        trains = "torch" in there
        if not trains:
            text = f"{node.name}: torch is not installed"
            yield Finding("nodes", "problem", text, "pip install 'saturn-airflow[torch]' there")
        elif not node.is_cpu and (unusable := _no_cuda(there["torch"], said.get("cuda", {}))):
            trains = False
            yield Finding("nodes", "problem", f"{node.name}: {unusable[0]}", unusable[1])
        away = [f"{what}: {error}" for what, error in said["reach"].items() if error]
        for text in away:
            fix = "open the port to this node, or correct its address in the node's configuration"
            yield Finding("nodes", "problem", f"{node.name} does not reach {text}", fix)
        enough = node.is_cpu or len(said["gpus"]) >= node.devices
        if not enough:
            text = f"{node.name}: {node.devices} devices are configured, {len(said['gpus'])} GPUs are visible"
            fix = "correct [saturn] nodes, or what the worker may see (CUDA_VISIBLE_DEVICES, the container)"
            yield Finding("nodes", "problem", text, fix)
        strangers = [d["name"] for d in said["devices"] if d["strangers"]]
        if strangers:
            text = f"{node.name}: processes that are not Saturn's use {', '.join(strangers)}"
            yield Finding("nodes", "warning", text, f"`saturn devices` on {node.name} lists them")
        if trains and enough and not wrong and not away:
            gpus = ", ".join(sorted(set(said["gpus"]))) or "CPU slots"
            yield Finding("nodes", "ok", f"{node.name}: {node.devices} x {node.kind} ({gpus})")


def _public(version: str) -> str:
    """The public part of a version (PEP 440), without the build's local label."""
    return version.partition("+")[0]


def _no_cuda(torch: str, cuda: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Why this build of torch can't use the GPUs there, and the fix; None where it can.

    :param cuda: of a survey: ``torch``, the version it was built for, ``driver``, the newest that runs,
        ``error``, with which CUDA does not begin, and ``unusable``, why torch can't use the GPUs.
    """
    if not cuda:
        return None
    built, driver = cuda["torch"], cuda["driver"]
    if built is None:
        return f"torch {torch} is built without CUDA", "install torch's wheel for the driver's CUDA there"
    if driver is not None and int(driver.partition(".")[0]) < int(built.partition(".")[0]):
        text = f"torch {torch} is built for CUDA {built}, the driver runs no newer than {driver}"
        return text, "update the driver, or install torch's wheel for an older CUDA"
    if error := cuda.get("error"):
        fix = (
            "look at dmesg and nvidia-smi there; a container needs the capability compute of the NVIDIA "
            "toolkit, GPUs behind NVSwitches their fabric manager, a new driver a reboot"
        )
        return f"CUDA does not begin: {error}", fix
    if why := cuda.get("unusable"):
        fix = "install a wheel of torch for these GPUs and their driver, such as one for another CUDA"
        return f"torch {torch} can't use the GPUs: {why}", fix
    return None


def check_storage(deployment: Deployment) -> Iterator[Finding]:
    """All nodes write to the folder of checkpoints, see each other's files there, and have room."""
    answered = {name: said for name, said in deployment.nodes.items() if "home" in said}
    yield from list(_bad_storage(answered)) or _good_storage(answered)


def _bad_storage(answered: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name, said in answered.items():
        home = said["home"]
        if home["error"]:
            text = f"{name} can't write to {home['folder']}: {home['error']}"
            fix = "let the worker's user write there, or set [saturn] home"
            yield Finding("storage", "problem", text, fix)
        if home["free"] < LITTLE_DISK:
            level: Level = "problem" if home["free"] < NO_DISK else "warning"
            text = f"{name}: {home['free'] / 2**30:.1f} GB are free for checkpoints in {home['folder']}"
            yield Finding("storage", level, text, "remove old sweeps there, or give it a larger disk")
    for name, said in answered.items():
        for other, theirs in answered.items():
            mark = theirs["home"]["mark"]
            if mark and other != name and said["marks"].get(slug(theirs["name"])) != mark:
                text = f"{name} does not see what {other} writes to {theirs['home']['folder']}"
                fix = "mount one shared folder on all nodes, or jobs can't move between them ([saturn] home)"
                yield Finding("storage", "problem", text, fix)


def _good_storage(answered: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    if len(answered) == 1:
        (name, said), *_ = answered.items()
        others = ", ".join(sorted(set(said["marks"]) - {slug(said["name"])})) or "none"
        text = f"{said['home']['folder']} can be written by {name}, which sees the marks of: {others}"
        yield Finding("storage", "ok", text)
    elif answered:
        free = min(said["home"]["free"] for said in answered.values()) / 2**30
        folder = next(iter(answered.values()))["home"]["folder"]
        yield Finding("storage", "ok", f"{folder} is shared by {', '.join(answered)}; {free:.0f} GB free")


def check_leases(deployment: Deployment) -> Iterator[Finding]:
    """Device locks lie on each node's own disk, and are held by live processes only."""
    for name, said in deployment.nodes.items():
        if "leases" not in said:
            continue
        leases = said["leases"]
        if error := leases.get("error"):
            fix = "set [saturn] leases_folder to a folder on the node's own disk"
            yield Finding("leases", "problem", f"{name}: {error}", fix)
            continue
        if leases["storage"].startswith(NETWORK_STORAGE):
            text = f"{name}: the device locks in {leases['folder']} are on {leases['storage']}"
            fix = "set [saturn] leases_folder to a folder on the node's own disk"
            yield Finding("leases", "problem", text, fix)
            continue
        for what in said.get("ignored", ()):
            fix = f"on {name}: find out who put it into {leases['folder']}, and remove it"
            yield Finding("leases", "warning", f"{name}: {what}", fix)
        for orphan in said["orphans"]:
            pids = " ".join(map(str, orphan["pids"]))
            text = f"{name}: {orphan['device']} is held for {orphan['who']}, whose process is gone"
            yield Finding("leases", "problem", text, f"on {name}: kill {pids}")
        held = sum(1 for device in said["devices"] if device["holder"])
        if not said["orphans"]:
            waiting = len(said["waiters"])
            yield Finding("leases", "ok", f"{name}: {held} devices held, {waiting} waiting for some")


def check_mlflow(deployment: Deployment) -> Iterator[Finding]:
    """MLflow takes a run, a metric and a file."""
    from saturn_airflow.operators.context import mlflow_uri
    from saturn_airflow.tracking import server

    uri = mlflow_uri()
    shown = without_login(uri)
    fix = "start the MLflow server, or correct the connection mlflow_default (or MLFLOW_TRACKING_URI)"
    begin = time.monotonic()
    if uri.startswith("http") and (error := surveys.reach(f"{uri.rstrip('/')}/health")):
        yield Finding("mlflow", "problem", error, fix)
        return
    try:
        client = server.client(uri)
        with server.translated_errors(), tempfile.TemporaryDirectory() as folder:
            experiment = server.experiment_id(uri, "saturn-doctor")
            run = client.create_run(experiment, run_name=f"doctor-{uuid.uuid4().hex[:8]}").info.run_id
            client.log_metric(run, "seconds", time.monotonic() - begin)
            note = Path(folder) / "note.txt"
            note.write_text("written by saturn doctor")
            try:
                client.log_artifact(run, str(note))
            except Exception as error:
                text = f"{shown} takes runs, but no files: {without_login(str(error))}"
                fix = "serve artifacts (mlflow server --serve-artifacts), or mend the artifact store"
                yield Finding("mlflow", "problem", text, fix)
                return
            finally:
                client.delete_run(run)
    except SaturnError as error:
        yield Finding("mlflow", "problem", f"{shown}: {error}", fix)
        return
    if uri.startswith("sqlite") and deployment.cluster is not None and len(deployment.cluster) > 1:
        text = f"{shown} is a file, and there are several nodes"
        yield Finding("mlflow", "warning", text, "start an MLflow server, and set MLFLOW_TRACKING_URI to it")
        return
    yield Finding("mlflow", "ok", f"{shown} takes runs and files")


def summary(findings: list[Finding]) -> Mapping[str, int]:
    """How many findings there are of each level."""
    return {level: sum(f.level == level for f in findings) for level in ("ok", "warning", "problem")}
