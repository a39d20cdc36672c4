"""Measures ``saturn plan`` against CP-SAT (OR-tools): same problems, same seconds, same cores, same run.

    python benchmarks/planner.py [--instances NAME ...] [--limits 5 30] [--processes 2]
    python benchmarks/planner.py --random 1024 128     # jobs, nodes of 8; results in planner_random.json
    python benchmarks/planner.py --busy                # half of all devices have jobs of others at first;
                                                       # results in planner_busy.json
    python benchmarks/planner.py --unusual             # kinds of problems that the instances don't have, see
                                                       # unusual_problems; results in planner_unusual.json
    python benchmarks/planner.py --by-processes 1 2    # saturn alone, with one process and with two;
                                                       # results in planner_processes.json

Both get whole processes: starting Python, importing and building the model count in the time. Every plan
goes through ``plan_checker``. Results are merged into ``benchmarks/results/planner.json``, so that it can be
run in parts; ``--table`` prints them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import unusual_problems

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "planner.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--instances", nargs="*", help="names of files in benchmarks/instances; all if not given"
    )
    parser.add_argument("--limits", nargs="*", type=float, default=[5.0, 30.0], help="seconds")
    parser.add_argument("--processes", type=int, default=2, help="processes of saturn, workers of CP-SAT")
    parser.add_argument("--note", default="", help="what to say of the machine")
    parser.add_argument("--table", action="store_true", help="print the results there are, run nothing")
    parser.add_argument(
        "--random", nargs=2, type=int, metavar=("JOBS", "NODES"), help="a problem drawn with a seed"
    )
    parser.add_argument("--busy", action="store_true", help="other jobs run on half of all devices at first")
    parser.add_argument("--unusual", action="store_true", help="other kinds of problems")
    parser.add_argument("--by-processes", nargs="*", type=int, help="compare saturn with itself")
    parser.add_argument("--cp-sat", nargs=3, metavar=("FILE", "SECONDS", "WORKERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cp_sat:
        print(json.dumps(cp_sat(json.loads(Path(args.cp_sat[0]).read_text()), *map(float, args.cp_sat[1:]))))
        return 0
    found: dict[str, Any]
    if args.by_processes:
        names = args.instances or sorted(path.stem for path in (HERE / "instances").glob("*.json"))
        found = {"machine": machine(args.note), "rows": by_processes(names, args.limits, args.by_processes)}
        RESULTS.with_name("planner_processes.json").write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if args.random or args.unusual:
        drawn = unusual_problems.problems() if args.unusual else [random_problem(*args.random)]
        found = {"machine": machine(args.note), "rows": []}
        for problem in drawn:
            for limit in args.limits:
                found["rows"].append(measure_problem(problem, limit, args.processes))
                print(json.dumps(found["rows"][-1]), flush=True)
        name = "planner_unusual.json" if args.unusual else "planner_random.json"
        RESULTS.with_name(name).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    path = RESULTS.with_name("planner_busy.json") if args.busy else RESULTS
    results = json.loads(path.read_text()) if path.exists() else {"machine": {}, "rows": []}
    if args.table:
        print(table(results))
        return 0
    results["machine"] = machine(args.note or results["machine"].get("note", ""))
    for name in args.instances or sorted(path.stem for path in (HERE / "instances").glob("*.json")):
        for limit in args.limits:
            row = measure_instance(name, limit, args.processes, busy=args.busy)
            print(json.dumps(row), flush=True)
            same = (name, limit, args.processes)
            rows = [r for r in results["rows"] if (r["instance"], r["limit"], r["processes"]) != same]
            results["rows"] = sorted([*rows, row], key=lambda r: (r["instance"], r["limit"]))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def random_problem(jobs: int, nodes: int) -> dict[str, Any]:
    """Jobs of 2,000 to 20,000 seconds on one device, and k^0.7 to k^0.95 times as fast on k."""
    chance = random.Random(5)
    drawn = []
    for number in range(jobs):
        alone = chance.uniform(2000, 20000)
        strategies = [
            {
                "technique": "fsdp",
                "devices": devices,
                "seconds": {"a100": round(alone / devices ** chance.uniform(0.7, 0.95))},
            }
            for devices in (1, 2, 4, 8)
        ]
        drawn.append({"name": f"job{number}", "strategies": strategies})
    on = [{"name": f"node{number}", "devices": 8, "kind": "a100"} for number in range(nodes)]
    return {"name": f"random{jobs}-{nodes}x8", "nodes": on, "jobs": drawn}


def with_others(problem: dict[str, Any]) -> dict[str, Any]:
    """``problem`` where about every second device has a job of others first, for up to half of what all
    devices would be busy with the thriftiest strategies."""
    chance = random.Random(problem["name"])
    least = [
        min(s["devices"] * seconds for s in job["strategies"] for seconds in s["seconds"].values())
        for job in problem["jobs"]
    ]
    longest = sum(least) / sum(node["devices"] for node in problem["nodes"]) / 2
    nodes = [
        {
            **node,
            "free": [chance.choice([0, chance.randint(1, int(longest))]) for _ in range(node["devices"])],
        }
        for node in problem["nodes"]
    ]
    return {**problem, "nodes": nodes}


def measure_instance(name: str, limit: float, processes: int, *, busy: bool) -> dict[str, Any]:
    """One of the instances under one limit, by both.

    :param busy: whether others have devices first.
    """
    file = HERE / "instances" / f"{name}.json"
    if not busy:
        return measure(file, limit, processes)
    return measure_problem({**with_others(json.loads(file.read_text())), "name": name}, limit, processes)


def measure_problem(problem: dict[str, Any], limit: float, processes: int) -> dict[str, Any]:
    """A problem that is in no file, likewise."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{problem['name']}.json"
        file.write_text(json.dumps(problem))
        return measure(file, limit, processes)


def by_processes(names: list[str], limits: list[float], counts: list[int]) -> list[dict[str, Any]]:
    """Each instance under each limit by saturn alone, with each of these counts of processes in turn."""
    rows: list[dict[str, Any]] = []
    for name in names:
        file = HERE / "instances" / f"{name}.json"
        for limit in limits:
            found = {str(count): run(saturn_command(file, limit, count), file) for count in counts}
            rows.append({"instance": name, "limit": limit, "by_processes": found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def saturn_command(file: Path, limit: float, processes: int) -> list[str]:
    """The command that plans ``file`` within ``limit`` seconds."""
    command = [sys.executable, "-m", "saturn_airflow.cli", "plan", str(file), "--json"]
    return [*command, "--time-limit", str(limit), "--processes", str(processes)]


def measure(file: Path, limit: float, processes: int) -> dict[str, Any]:
    """One problem under one limit, by both."""
    saturn = saturn_command(file, limit, processes)
    other = [sys.executable, __file__, "--cp-sat", str(file), str(limit), str(processes)]
    return {
        "instance": file.stem,
        "limit": limit,
        "processes": processes,
        "saturn": run(saturn, file),
        "cp_sat": run(other, file),
    }


def run(command: list[str], file: Path) -> dict[str, Any]:
    """Run one planner and check its plan."""
    from plan_checker import faults

    with tempfile.TemporaryFile() as out:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    assert process.returncode == 0, f"{command} failed"
    plan = json.loads(text)
    found = {"wall_seconds": round(wall, 2), "peak_mib": round(usage.ru_maxrss / 1024)}
    if plan is None:
        return {**found, "makespan": None, "lower_bound": None, "gap": None}
    wrong = faults(json.loads(file.read_text()), plan)
    assert not wrong, wrong
    return {**found, **{key: round(plan[key], 6) for key in ("makespan", "lower_bound", "gap")}}


def cp_sat(problem: dict[str, Any], limit: float, workers: float) -> dict[str, Any] | None:
    """Optional intervals, one cumulative resource per node, area cuts: the plan, in the format of plans."""
    started = time.monotonic()
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    nodes, jobs = problem["nodes"], problem["jobs"]
    choices = []
    for j, job in enumerate(jobs):
        for n, node in enumerate(nodes):
            for s in job["strategies"]:
                if node["name"] not in job.get("nodes", [node["name"]]):
                    continue
                if s["devices"] <= node["devices"] and node["kind"] in s["seconds"]:
                    choices.append((j, n, s, int(s["seconds"][node["kind"]])))
    others = [node.get("free", [0] * node["devices"]) for node in nodes]
    releases = [job.get("release", 0) for job in jobs]
    horizon = sum(max(r for j_, _, _, r in choices if j_ == j) for j in range(len(jobs))) + max(
        *map(max, others), *releases
    )
    makespan = model.new_int_var(0, horizon, "makespan")
    starts = [model.new_int_var(releases[j], horizon, f"start{j}") for j in range(len(jobs))]
    present: list[Any] = []
    intervals: list[list[Any]] = [[] for _ in nodes]
    demands: list[list[int]] = [[] for _ in nodes]
    for j, n, s, seconds in choices:
        chosen = model.new_bool_var("")
        present.append(chosen)
        intervals[n].append(model.new_optional_fixed_size_interval_var(starts[j], seconds, chosen, ""))
        demands[n].append(s["devices"])
        model.add(makespan >= starts[j] + seconds).only_enforce_if(chosen)
    for j in range(len(jobs)):
        model.add_exactly_one(p for p, c in zip(present, choices, strict=True) if c[0] == j)
    for n, node in enumerate(nodes):
        intervals[n] += [model.new_fixed_size_interval_var(0, at, "") for at in others[n] if at]
        demands[n] += [1 for at in others[n] if at]
        model.add_cumulative(intervals[n], demands[n], node["devices"])
        area = sum(c[2]["devices"] * c[3] * p for p, c in zip(present, choices, strict=True) if c[1] == n)
        # Others have left before any plan ends, see `with_others`.
        model.add(area + sum(others[n]) <= node["devices"] * makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = int(workers)
    solver.parameters.max_time_in_seconds = max(0.1, limit - (time.monotonic() - started) - 0.3)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    taken = [
        (solver.value(starts[c[0]]), c) for p, c in zip(present, choices, strict=True) if solver.value(p)
    ]
    assignments = on_devices(problem, sorted(taken, key=lambda t: t[0]), others)
    end, bound = max(a["end"] for a in assignments), solver.best_objective_bound
    return {"makespan": end, "lower_bound": bound, "gap": end / bound - 1, "assignments": assignments}


def on_devices(
    problem: dict[str, Any],
    taken: list[tuple[int, tuple[int, int, dict[str, Any], int]]],
    others: list[list[int]],
) -> list[dict[str, Any]]:
    """The assignments of a plan, each job on the first devices that are free.

    :param taken: the start, the job, the node, the strategy and the seconds of each, in order of start.
    :param others: until when other jobs have each node's devices.
    """
    free = [list(at) for at in others]
    assignments: list[dict[str, Any]] = []
    for start, (j, n, s, seconds) in taken:
        ids = [d for d, at in enumerate(free[n]) if at <= start][: s["devices"]]
        for d in ids:
            free[n][d] = start + seconds
        assignments.append(
            {
                "job": problem["jobs"][j]["name"],
                "technique": s["technique"],
                "devices": s["devices"],
                "node": problem["nodes"][n]["name"],
                "device_ids": ids,
                "start": start,
                "end": start + seconds,
            }
        )
    return assignments


def machine(note: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import highspy
    import pyomo

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        processor = models[0] if models else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "pyomo": pyomo.version.version,
        "highs": ".".join(
            str(v)
            for v in (highspy.HIGHS_VERSION_MAJOR, highspy.HIGHS_VERSION_MINOR, highspy.HIGHS_VERSION_PATCH)
        ),
        "ortools": importlib.metadata.version("ortools"),
        "note": note,
    }


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| instance | limit (s) | makespan | bound | gap | wall (s) | MiB "
        "| CP-SAT makespan | its bound | its gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        own, other = row["saturn"], row["cp_sat"]
        theirs = (
            f"{other['makespan']:.0f} | {other['lower_bound']:.0f} | {other['gap']:.2%}"
            if other["makespan"]
            else "no plan | - | -"
        )
        lines.append(
            f"| {row['instance']} | {row['limit']:g} | {own['makespan']:.0f} | {own['lower_bound']:.0f} "
            f"| {own['gap']:.2%} | {own['wall_seconds']} | {own['peak_mib']} | {theirs} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
