"""Overlapping sweeps, and faults of every kind at random: `python benchmarks/soak.py --minutes 20 --seed 1`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), two nodes of
two CPU devices. Some sweeps go first (`priority=`), some give way at a checkpoint (`preempt=`); `--at-once 5`
has five of them meet. When the time is up nothing more is disturbed, and what runs may end. Then every job
must be right to the last digit against a training that nothing disturbed, no device may ever have been held
by two, MLflow must have everything once, and no process, lease or file may be left. Services that end are
started again as `saturn cluster` does it. Upgrades go from one version to another with the same code and
back, of a node or of the head.

Printed: faults by kind; the seconds from a fault until the job trained again (a step done), or until its task
followed it again where training went on; where training ended, the seconds until the job's next run asked for
its devices, which other sweeps may have by then; and the steps that were trained again. What needs a try of
Airflow's waits for Airflow, too, where that was away: such seconds are told again of those faults from a
minute before which to their end no service of the head was ended. Exit status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from machine import describe
from releases import HEAD_SERVICES, UpgradableCluster, lay_out
from soak_checks import References, events, left_behind, wrong_in_mlflow, wrong_results
from soak_faults import ENDS_TASK, LOST, OF_JOBS, OF_NODES, OF_SERVICES, PLANNER, Fault, outcome_of, table
from stays import shared, stays_of

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.launch import runs
from saturn_airflow.model.errors import SaturnError

ROOT = Path(__file__).resolve().parents[1]
#: Copied out of this repository: what changes in it meanwhile is no change of the jobs' code.
DAGS = ROOT / "benchmarks" / "soak"
DAGS_OF_SWEEPS = ("soaked", "soaked_urgent", "soaked_patient")
JOBS = ("a-single", "b-single", "c-single", "d-ddp")
NODES = ("gpu-a", "gpu-b")
NO_ANSWER = (httpx.HTTPError, SaturnError)


class Soak:
    """One soak on one cluster."""

    def __init__(
        self, cluster: UpgradableCluster, versions: tuple[Path, Path], args: argparse.Namespace
    ) -> None:
        self.cluster, self.versions = cluster, versions
        self.batches, self.at_once = args.batches, args.at_once
        self.chance = random.Random(args.seed)
        self.airflow = Airflow(cluster.airflow_url, cluster.login)
        self.restarts = cluster.restarts(self._say)
        self.sweeps: dict[str, str | None] = {}
        self.faults: list[Fault] = []
        self.due: list[tuple[float, str]] = []

    def run(self, minutes: float) -> None:
        """Disturb for so long, then wait until all sweeps have ended."""
        for dag in DAGS_OF_SWEEPS:
            self.airflow.wait_for_dag(dag)
            self.airflow.send("PATCH", f"/dags/{dag}", {"is_paused": False})
        end, next_fault = float("inf"), float("inf")
        while time.monotonic() < end or None in self.sweeps.values():
            now = time.monotonic()
            if end == float("inf") and self._training():
                # What is known of these jobs is measured once, undisturbed: it is about training.
                end, next_fault = now + 60 * minutes, now
            if now < end and list(self.sweeps.values()).count(None) < self.at_once:
                self._trigger()
            if next_fault < now < end:
                next_fault = now + self.chance.uniform(8, 16)
                self._disturb()
            if now > end + 900:
                break
            self._look()
            time.sleep(0.2)

    def _trigger(self) -> str | None:
        """Start one more sweep; its name, or None where Airflow does not answer."""
        dag = DAGS_OF_SWEEPS[len(self.sweeps) % len(DAGS_OF_SWEEPS)]
        run_id = f"sweep-{len(self.sweeps)}"
        body = {"logical_date": None, "dag_run_id": run_id}
        try:
            self.airflow.send("POST", f"/dags/{dag}/dagRuns", body)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 409:  # it is there already: nobody heard the first answer
                return None
        except NO_ANSWER:
            return None
        sweep = f"{dag}/{run_id}"
        self.sweeps[sweep] = None
        self._say(f"{sweep} started")
        return sweep

    def _look(self) -> None:
        self.restarts.look()
        for due in [due for due in self.due if due[0] <= time.monotonic()]:
            self.due.remove(due)
            self.cluster.processes.start_again(due[1])
        for fault in self.faults:
            if fault.folder and fault.kind in ENDS_TASK and fault.followed_after is None:
                followed = _is_locked(fault.folder / "follower")
                fault.was_let_go |= not followed
                if fault.was_let_go and followed:
                    fault.followed_after = time.time() - fault.time
        for sweep in [name for name, state in self.sweeps.items() if state is None]:
            try:
                state = self.airflow.state(*sweep.split("/"))
            except NO_ANSWER:
                continue
            if state in ("success", "failed"):
                self.sweeps[sweep] = state
                self._say(f"{sweep}: {state}")

    def folders(self) -> list[Path]:
        """Those of all jobs."""
        return [self.cluster.home / "sweeps" / sweep / "sweep" / job for sweep in self.sweeps for job in JOBS]

    def _training(self) -> list[tuple[Path, runs.Run, int]]:
        """Jobs that train right now, have a checkpoint, and are not near their end: with their last step."""
        found = []
        for folder in self.folders():
            run = runs.attach(folder) if folder.exists() else None
            if run is None:
                continue
            said = [e for e in events(folder) if e["run"] == run.folder.name]
            if said and said[-1]["event"] in ("step", "checkpoint") and time.time() - said[-1]["time"] < 2:
                saved, step = [e for e in said if e["event"] == "checkpoint"], said[-1]["step"]
                if saved and step < self.batches - 30:
                    found.append((folder, run, step))
        return found

    def _disturb(self) -> None:
        training = self._training()
        if self.chance.random() < 0.1:
            self._end_planner()
            return
        of_jobs = training and self.chance.random() < 0.65
        kind = self.chance.choice(OF_JOBS + OF_NODES if of_jobs else tuple(OF_SERVICES))
        if kind in OF_SERVICES:
            name = kind
            if name == "head upgraded":
                if not set(HEAD_SERVICES) <= set(self.cluster.processes.running()):
                    return
                self.faults.append(Fault(name, time.time(), *(training[0][::2] if training else (None, 0))))
                self._say(f"fault {len(self.faults)}: {name}")
                self._upgrade(HEAD_SERVICES)
                return
            if name not in self.cluster.processes.running() or self.cluster.processes.ended(name) is not None:
                return
            somebody = training[0] if training else (None, None, 0)
            self.faults.append(Fault(f"{name} killed", time.time(), somebody[0], somebody[2]))
            self._kill(name, OF_SERVICES[name])
            self._say(f"fault {len(self.faults)}: {name} killed")
            return
        folder, run, step = self.chance.choice(training)
        fault = Fault(kind, time.time(), folder, step)
        try:
            if kind == LOST:
                self._lose_a_message(run)
                fault.time, fault.was_let_go = time.time(), True
            else:
                self._harm(kind, run)
        except (
            psutil.Error,
            redis.RedisError,
            OSError,
            LookupError,
            ValueError,
            StopIteration,
            *NO_ANSWER,
        ) as error:
            self._say(f"no {kind}: {type(error).__name__} {error}")
            return
        self.faults.append(fault)
        if kind == "node lost for 3 s":
            node = run.spec.node
            others = [t for t in training if t[0] != folder and t[1].spec.node == node]
            self.faults += [Fault(kind, fault.time, f, s) for f, _, s in others]
        self._say(f"fault {len(self.faults)}: {kind}, {folder.parents[1].name} {folder.name} at step {step}")

    def _end_planner(self) -> None:
        """Start one more sweep, and end the task that plans it in the middle of its work."""
        sweep = self._trigger()
        if sweep is None:
            return
        try:
            planning = self._look_until(lambda: self._planning(sweep), 30)
            time.sleep(self.chance.uniform(0, 3))
            psutil.Process(planning["pid"]).kill()
        except (psutil.Error, ValueError, *NO_ANSWER) as error:
            self._say(f"no {PLANNER}: {type(error).__name__} {error}")
            return
        self.faults.append(Fault(PLANNER, time.time(), None, 0))
        self._say(f"fault {len(self.faults)}: {PLANNER}, {sweep}")

    def _planning(self, sweep: str) -> dict[str, Any] | None:
        """The sweep's plan task while it runs."""
        tasks = self.airflow.tasks(*sweep.split("/"))
        return next(
            (t for t in tasks if t["task_id"] == "sweep.plan" and t["state"] == "running" and t["pid"]), None
        )

    def _lose_a_message(self, run: runs.Run) -> None:
        """End a job's task, and the node's worker as Redis has handed it the message of the next try.

        :raises ValueError: where no such message comes.
        """
        node, queue = run.spec.node, f"saturn.{run.spec.node}"
        broker = redis.Redis.from_url(self.cluster.environment(node)["AIRFLOW__CELERY__BROKER_URL"])
        task = self._task(run)
        psutil.Process(int(task["pid"])).kill()
        self._look_until(lambda: self._task(run)["state"] != "running", 30)
        if node not in self.cluster.processes.running():
            raise ValueError("its worker is gone")
        self.cluster.processes.pause(node)

        def taken() -> bool:
            texts = [text for text in broker.lrange(queue, 0, -1) if _is_of(text, task)]
            return bool(texts) and broker.lrem(queue, 1, texts[0]) == 1

        try:
            self._look_until(taken, 45)
        except (ValueError, redis.RedisError):
            self.cluster.processes.resume(node)
            raise
        self.cluster.processes.kill(node)
        self.due.append((time.monotonic() + 0.5, node))

    def _look_until(self, ask: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not (answer := ask()):
            if time.monotonic() > deadline:
                raise ValueError("it did not come about")
            self._look()
            time.sleep(0.2)
        return answer

    def _upgrade(self, names: tuple[str, ...]) -> None:
        """From one version to the other."""
        old, new = self.versions
        self.cluster.upgrade(names, old if self.cluster.code.get(names[0], old) == new else new)

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%X')} {text}", flush=True)

    def _harm(self, kind: str, run: runs.Run) -> None:
        node = run.spec.node
        if kind in ("worker killed", "node lost for 3 s"):
            self.cluster.processes.kill(node, everything=kind.startswith("node"))
            self.due.append((time.monotonic() + (3 if kind.startswith("node") else 0.5), node))
        elif kind == "node upgraded":
            if node not in self.cluster.processes.running():
                raise ValueError("its worker is gone")
            self._upgrade((node,))
        elif kind == "worker's main process killed":
            os.kill(self.cluster.processes.pid(node), 9)
        elif kind == "fork server killed":
            next(_with_words("saturn_airflow.launch.fork_server", self.cluster)).kill()
        elif kind == "task cleared":
            self.airflow.clear(*_sweep_of(run), self._task(run))
        elif kind == "task killed":
            psutil.Process(int(self._task(run)["pid"])).kill()
        else:
            supervisor = psutil.Process(int((run.folder / "alive").read_text()))
            if kind == "supervisor killed":
                supervisor.kill()
                return
            self.chance.choice(supervisor.children()).kill()

    def _kill(self, name: str, seconds: float) -> None:
        """Kill a service; it is started again after a while, or by the restart policy."""
        if seconds:
            self.cluster.processes.kill(name)
            self.due.append((time.monotonic() + seconds, name))
        else:
            os.killpg(self.cluster.processes.pid(name), 3 if name == "postgres" else 9)

    def _task(self, run: runs.Run) -> dict[str, Any]:
        name, tasks = run.spec.job.name, self.airflow.tasks(*_sweep_of(run))
        return next(t for t in tasks if ".train" in t["task_id"] and t["rendered_map_index"] == name)


def _sweep_of(run: runs.Run) -> tuple[str, str]:
    """The DAG and the DAG run that it belongs to."""
    dag, run_id, *_ = run.spec.holder.split("/")
    return dag, run_id


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_of(message: bytes, task: dict[str, Any]) -> bool:
    """Whether a message of Celery's hands out a try of this task."""
    (workload,), *_ = json.loads(base64.b64decode(json.loads(message)["body"]))
    instance = json.loads(workload)["ti"]
    names = {"run_id": "dag_run_id", "task_id": "task_id", "map_index": "map_index"}
    return all(instance[own] == task[of_api] for own, of_api in names.items())


def _with_words(words: str, cluster: UpgradableCluster) -> Any:
    for name in NODES:
        for pid in cluster.processes.marked(name):
            process = psutil.Process(pid)
            if words in " ".join(process.cmdline()):
                yield process


def main() -> None:
    """Disturb, check, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults happen (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="how many sweeps run (%(default)s)")
    parser.add_argument("--batches", type=int, default=400, help="of each job, 0.1 s each (%(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the cluster, which is then kept")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    args.out = args.out and args.out.resolve()
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        results = soak((args.keep or Path(folder)).resolve(), args)
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(1 if results["wrong"] else 0)


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One soak in ``folder``; its results."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # `python -m` finds first what is in its folder, which must not be another version
    dags = folder / "dags"
    shutil.copytree(DAGS, dags, ignore=shutil.ignore_patterns("__pycache__"))
    cluster = UpgradableCluster(
        folder / "cluster",
        ROOT / "docker" / "compose.yaml",
        dags,
        variables={"NODE_CONCURRENCY": "6", "WORKER_CONCURRENCY": "4", "AIRFLOW_HEARTBEAT_TIMEOUT": "120"},
        environment={"SOAK_BATCHES": str(args.batches), "TMPDIR": str(temporary)},
    )
    versions = lay_out(folder / "before", "0.1.0"), lay_out(folder / "after", "0.2.0")
    cluster.code = dict.fromkeys((*HEAD_SERVICES, *NODES), versions[0])
    os.environ["SOAK_BATCHES"] = str(args.batches)
    load, began = os.getloadavg()[0], time.monotonic()
    with cluster:
        soaking = Soak(cluster, versions, args)
        soaking.run(args.minutes)
        took = time.monotonic() - began
        wrong = [f"{sweep} ended as {state}" for sweep, state in soaking.sweeps.items() if state != "success"]
        references = References(dags)
        for job in soaking.folders():
            wrong += wrong_results(job, references)
        wrong += shared([stay for job in soaking.folders() for stay in stays_of(job, 0.0)])
        wrong += wrong_in_mlflow(cluster, len(soaking.sweeps), len(JOBS), args.batches)
        wrong += left_behind(cluster, temporary)
        rows = table(soaking.faults)
        gave_way = [e for job in soaking.folders() for e in events(job) if e["event"] == "gave_way"]
    again = [outcome["steps"] for fault in soaking.faults if (outcome := outcome_of(fault))["steps"]]
    return {
        "machine": {**describe(), "load_average_before": round(load, 1)},
        "seed": args.seed,
        "minutes": args.minutes,
        "sweeps_at_once": args.at_once,
        "seconds_in_all": round(took),
        "faults": len(soaking.faults),
        "sweeps": len(soaking.sweeps),
        "jobs": len(soaking.sweeps) * len(JOBS),
        "steps": len(soaking.sweeps) * len(JOBS) * args.batches,
        "steps_trained_again": sum(again),
        "gave_way": len(gave_way),
        "by_kind": rows,
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
