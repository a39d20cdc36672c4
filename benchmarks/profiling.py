"""What profiling costs and what its estimates are worth: `python benchmarks/profiling.py [--case NAME]`.

``waves``: 24 jobs with 8 fingerprints on 8 CPU slots, under three techniques that sleep by a known law of
speed instead of training. Every strategy of the full grid is measured once by a real trial, in processes of
its own and behind a lease; then the waves choose among these trials. Compared are device-seconds and plans.

``short``: eight such jobs, longer and shorter, with trials computed from the law: what the waves after the
first cost of one night, and by how much they shorten each night's plan.

``nightly``: the example DAG on a real Airflow and MLflow, twice: estimates against what training took, what
measuring took of the sweep, and how good the second plan was for the speeds that training then had.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow import Cluster, HParams, Job, Node, planning
from saturn_airflow.launch import past_runs
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.profiling import waves
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.measure import measure
from saturn_airflow.profiling.trials import trials_of

ROOT = Path(__file__).resolve().parents[1]
SLOTS, JOBS, FINGERPRINTS = 8, 24, 8
#: What a trial takes besides its batches, where it is not run.
START_SECONDS = 1.5
NODE = Node("slots", SLOTS, kind="cpu")
CLUSTER = Cluster(NODE)
TECHNIQUES = ("direct", "sharded", "piped")
#: A technique that sleeps: what it costs on one device, what share of that does not get faster on several,
#: and the seconds that each doubling of devices adds.
LAW = """
import math, time
from saturn_airflow import BaseTechnique
LAWS = {"direct": (1.0, 0.05, 0.004), "sharded": (1.12, 0.02, 0.006), "piped": (1.05, 0.12, 0.001)}
def seconds(size, technique, devices):
    factor, serial, message = LAWS[technique]
    one = (0.02 + 0.01 * (size % 4)) * (1 + size / 8) * factor
    serial = min(1.0, serial * (1 + size * 7 % 5 / 2))
    return one * (serial + (1 - serial) / devices) + message / 4 * math.log2(devices)
class Sleeping(BaseTechnique):
    def search(self, job, devices, session):
        each = seconds(job.model_args["size"], self.name, len(devices))
        began = time.perf_counter()
        for _ in range(7):
            time.sleep(each)
        return {}, (time.perf_counter() - began) / 7
"""


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("waves", "short", "nightly"), help="only this one")
    parser.add_argument("--note", help="what else the machine did, kept with the figures")
    parser.add_argument("--state", type=Path, help="keep what the cases write in this folder")
    parser.add_argument("--out", type=Path, help="write the figures to this file, beside those it has")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    figures: dict[str, Any] = {}
    if args.out and args.out.exists():
        figures = json.loads(args.out.read_text())
    for name, case in (("waves", waves_case), ("short", short_case), ("nightly", nightly_case)):
        if args.case in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                found = case(args.state / name if args.state else Path(folder))
            doing = {"load_average": round(os.getloadavg()[0], 1), "note": args.note}
            found = found if isinstance(found, dict) else {"sweeps": found}
            figures[name] = {**found, "machine": {**describe(), **doing}}
            print(json.dumps({name: found}, indent=2), flush=True)
            if args.out:
                args.out.write_text(json.dumps(figures, indent=2) + "\n")


def waves_case(folder: Path) -> dict[str, Any]:
    """What the waves measure, against measuring everything."""
    _write_techniques(folder)
    jobs = _jobs(JOBS)
    long = dataclasses.replace(jobs[0].hparams, batches=100_000)
    began = time.monotonic()
    trials = _run_trials(Knowledge.of(jobs, CLUSTER, TECHNIQUES), folder)
    sweeps = {
        "24 jobs": jobs,
        "24 jobs, one of them long": [dataclasses.replace(jobs[0], hparams=long), *jobs[1:]],
        "8 jobs": jobs[:FINGERPRINTS],
    }
    return {
        "jobs": JOBS,
        "fingerprints": FINGERPRINTS,
        "slots": SLOTS,
        "techniques": "three that sleep by a law of speed",
        "full_grid": {
            "trials": len(trials),
            "device_seconds": sum(cost for _, cost in trials.values()),
            "wall_seconds": time.monotonic() - began,
        },
        **{name: _in_waves(chosen, trials, folder) for name, chosen in sweeps.items()},
    }


def _write_techniques(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in TECHNIQUES:
        (folder / f"{name}.py").write_text(LAW)
    os.environ[TECHNIQUES_VARIABLE] = str(folder)


def _jobs(number: int, share: float = 1.0) -> list[Job]:
    """:param share: of the batches that they have in the case ``waves``."""
    return [
        Job(
            f"job-{n}",
            "nothing:model",
            "nothing:data",
            model_args={"size": n % FINGERPRINTS},
            hparams=HParams(batches=int(share * (1000 + 7919 * n % 9000)), lr=0.001 * (n + 1)),
        )
        for n in range(number)
    ]


def short_case(folder: Path) -> list[dict[str, Any]]:
    """What further waves cost once, and what they save each night, by the length of the sweep."""
    _write_techniques(folder)

    def quick(problem: Problem | None) -> Plan:
        assert problem is not None
        return planning.solve(problem, time_limit=2.0, gap=0.003)

    found = []
    for share in (1.0, 0.3, 0.1, 0.03):
        known: list[Estimate] = []
        costs, makespans = list[float](), list[float]()
        for number in range(1, waves.WAVES + 1):
            knowledge = Knowledge.of(_jobs(FINGERPRINTS, share), CLUSTER, TECHNIQUES, known)
            last = number == waves.WAVES
            keys = waves.first_wave(knowledge) or waves.next_wave(knowledge, quick, last=last)
            new = [_by_law(key, knowledge) for key in keys]
            if not new:
                break
            costs.append(sum(e.devices * (START_SECONDS + 7 * e.seconds_per_batch) for e in new) / SLOTS)
            known += new
            knowledge = Knowledge.of(knowledge.jobs, CLUSTER, TECHNIQUES, known)
            estimates = waves.estimates_for_plan(knowledge, quick)
            makespans.append(quick(knowledge.problem(estimates)).makespan)
        found.append(
            {
                "trials": len(known),
                "first_wave_seconds": costs[0],
                "further_waves_seconds": sum(costs[1:]),
                "makespan_after_the_first_wave": makespans[0],
                "makespan": makespans[-1],
            }
        )
    return found


def _by_law(key: Key, knowledge: Knowledge) -> Estimate:
    """What a trial would find."""
    law: dict[str, Any] = {}
    exec(LAW.partition("class ")[0], law)
    size = next(iter(knowledge.strategies[key].jobs.values())).model_args["size"]
    return Estimate(
        fingerprint=key.fingerprint,
        technique=key.technique,
        devices=key.devices,
        kind=key.kind,
        version="1",
        seconds_per_batch=law["seconds"](size, key.technique, key.devices),
        launch_seconds=START_SECONDS,
        batches=7,
    )


def _in_waves(
    jobs: Sequence[Job], grid: Mapping[Key, tuple[Estimate, float]], folder: Path
) -> dict[str, Any]:
    """What the waves choose of trials that were run, what these cost, and the plan that comes of it."""

    def quick(problem: Problem) -> Plan:
        return planning.solve(problem, time_limit=2.0, gap=0.003)

    def makespan(problem: Problem | None) -> float:
        assert problem is not None
        return planning.solve(problem, time_limit=20.0, gap=0.0005).makespan

    trials = dict(grid)
    known: list[Estimate] = []
    spent: list[dict[str, Any]] = []
    for number in range(1, waves.WAVES + 1):
        knowledge = Knowledge.of(jobs, CLUSTER, TECHNIQUES, known)
        began = time.monotonic()
        last = number == waves.WAVES
        chosen = waves.first_wave(knowledge) if number == 1 else waves.next_wave(knowledge, quick, last=last)
        choosing = time.monotonic() - began
        trials |= _run_trials(knowledge, folder, [key for key in chosen if key not in trials])
        known += [trials[key][0] for key in chosen]
        cost = sum(trials[key][1] for key in chosen)
        spent.append({"trials": len(chosen), "device_seconds": cost, "choosing_seconds": choosing})
        if not chosen:
            break
    knowledge = Knowledge.of(jobs, CLUSTER, TECHNIQUES, known)
    full = Knowledge.of(jobs, CLUSTER, TECHNIQUES, [estimate for estimate, _ in grid.values()])
    found = makespan(knowledge.problem(waves.estimates_for_plan(knowledge, quick)))
    best = makespan(full.problem(full.known))
    return {
        "waves": spent,
        "trials": len(known),
        "cost_of_full_grid": sum(wave["device_seconds"] for wave in spent)
        / sum(grid[key][1] for key in full.grid),
        "makespan": found,
        "makespan_from_full_grid": best,
        "longer": found / best - 1,
    }


def _run_trials(
    knowledge: Knowledge, folder: Path, keys: Iterable[Key] | None = None
) -> dict[Key, tuple[Estimate, float]]:
    """Each strategy's estimate, and the device-seconds that its trial took."""
    trials = trials_of(list(knowledge.grid if keys is None else keys), knowledge.strategies)

    def run(numbered: tuple[int, Any]) -> tuple[Key, tuple[Estimate, float]]:
        position, trial = numbered
        own = folder / f"trial-{trial.fingerprint}-{trial.technique}-{trial.devices}"
        estimate = measure(
            trial,
            NODE,
            folder=own,
            priority=(0.0, position),
            leases_folder=str(folder / "leases"),
            technique_folders=(str(folder),),
        )
        assert estimate.works, estimate.reason
        estimate = dataclasses.replace(estimate, setup_seconds=0.0)
        return estimate.key, (estimate, trial.devices * past_runs.time_on_devices(own)["actual_seconds"])

    with ThreadPoolExecutor(SLOTS) as pool:
        return dict(pool.map(run, enumerate(trials)))


def nightly_case(folder: Path) -> dict[str, Any]:
    """The nightly DAG, twice."""
    from saturn_airflow.demo.airflow import Airflow
    from saturn_airflow.demo.demo_services import Services

    dags = folder / "dags"
    shutil.copytree(ROOT / "dags", dags)
    with Services(folder / "state", dags) as services:
        airflow = Airflow(services.airflow_url)
        airflow.wait_for_dag("nightly_retrain", 300)
        return {night: _night(airflow) for night in ("first", "second")}


def _night(airflow: Any) -> dict[str, Any]:
    dag = "nightly_retrain"
    run_id = airflow.trigger(dag)
    while (state := airflow.state(dag, run_id)) not in ("success", "failed"):
        time.sleep(1)
    assert state == "success", run_id
    report = airflow.xcom(dag, run_id, "sweep.report")
    plan, choices = (airflow.xcom(dag, run_id, "sweep.plan", key) for key in ("plan", "choices"))
    names = ("estimate_error_median", "estimate_error_p90", "trials", "profile_seconds", "profile_share")
    return {
        **{name: report[name] for name in (*names, "sweep_seconds", "planned_seconds", "actual_seconds")},
        "longer_than_the_best_plan_for_the_actual_speeds": _regret(plan, choices, report["jobs"]),
        "jobs": [
            {name: job[name] for name in ("job", "technique", "devices", "planned_seconds", "actual_seconds")}
            for job in report["jobs"]
        ],
        "drifted": len(report["drifted"]),
    }


def _regret(
    plan: Mapping[str, Any], choices: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]]
) -> float:
    """By how much the plan was longer than one made from the actual speeds, both at these speeds."""
    actual = {outcome["job"]: outcome["actual_seconds"] for outcome in outcomes}
    free: dict[int, float] = {}
    for a in sorted(plan["assignments"], key=lambda a: (a["start"], a["job"])):
        start = max((free.get(device, 0.0) for device in a["device_ids"]), default=0.0)
        free.update(dict.fromkeys(a["device_ids"], start + actual[a["job"]]))
    jobs = []
    for name, choice in choices.items():
        options = tuple(
            Option(o["technique"], o["devices"], {"cpu": actual[name] if o["chosen"] else o["seconds"]})
            for o in choice["options"]
            if o["seconds"]
        )
        jobs.append(PlannedJob(name, options))
    best = planning.solve(Problem("actual", (Node("local", 2, kind="cpu"),), tuple(jobs)), time_limit=10.0)
    return max(free.values()) / best.makespan - 1


if __name__ == "__main__":
    main()
