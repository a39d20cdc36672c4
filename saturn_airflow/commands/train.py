"""``saturn train``: one job of a DAG in this process, to see what it does."""

from __future__ import annotations

import argparse
import bdb
import contextlib
import os
import pdb  # noqa: T100 - this is what --pdb is for
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model import json_text
from saturn_airflow.model.errors import JobError, SaturnError
from saturn_airflow.model.status import Status

if TYPE_CHECKING:
    from saturn_airflow.launch.request import TrainRequest
    from saturn_airflow.model.cluster import Cluster
    from saturn_airflow.model.jobs import Job
    from saturn_airflow.tracking import JobRun

Event = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dag", metavar="DAG", help="the DAG's id, or its file")
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument("--dags", type=Path, help="the folder of DAG files (default: Airflow's)")
    parser.add_argument("--sweep", metavar="ID", help="the sweep's task id, where several have such a job")
    parser.add_argument("--date", default="", help="the logical date for templates (default: now)")
    parser.add_argument("--technique", default="single", help="train under this technique (single)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="on so many devices (1, or 2 where it needs)"
    )
    parser.add_argument(
        "--parameters", metavar="JSON", default="{}", help="the technique's, as a plan has them"
    )
    parser.add_argument("--cpu", action="store_true", help="on CPUs, though there are GPUs")
    parser.add_argument("--batches", type=int, metavar="N", help="stop after so many batches (default: all)")
    parser.add_argument(
        "--folder", type=Path, help="keep checkpoints here, and go on from them (default: none)"
    )
    parser.add_argument("--experiment", metavar="NAME", help="record it in MLflow, in this experiment")
    parser.add_argument("--pdb", action="store_true", help="start the debugger where the job's code raises")
    parser.add_argument("--uri", help="MLflow's tracking URI (default: the sweeps')")


def run(args: argparse.Namespace) -> int:
    """Train."""
    # Of parsing, Airflow is to say no more than what is raised here.
    os.environ.setdefault("AIRFLOW__LOGGING__NAMESPACE_LEVELS", "airflow.dag_processing=FATAL")
    from saturn_airflow.launch import failures, handed_over, job_log
    from saturn_airflow.launch.request import DoesNotFit, TrainRequest
    from saturn_airflow.operators import connections, context, dag_files

    context.use_techniques_folder()
    context.limit_users_code()
    job, cluster = dag_files.job_of(args.dag, args.job, args.dags, args.sweep, args.date)
    devices = _checked_devices(args, job)
    with contextlib.ExitStack() as stack:
        job, weights = _first_weights(stack, args, job)
        handed_over.receive(connections.handed_to(job))
        request = TrainRequest(
            job=job,
            technique=args.technique,
            parameters=_parameters(args.parameters),
            folder=str(args.folder.absolute()) if args.folder else "",
            batch_count=args.batches,
            initial_weights=weights,
            here=True,
        )
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ[job_log.VARIABLE] = str(folder / job_log.FILES)
        tell = _event_handler(stack, args, job, devices, folder)
        try:
            result = _train(stack, request, devices, cluster, args.cpu, tell)
        except (DoesNotFit, JobError) as error:
            failure, cause = failures.describe(error), error.__cause__
            if isinstance(cause, bdb.BdbQuit):
                raise KeyboardInterrupt from None  # the debugger was left
            tell({"event": "end", **failure.to_dict()})
            if failure.traceback:
                print(failure.traceback, file=sys.stderr)
            if args.pdb and cause is not None:
                pdb.post_mortem(cause.__traceback__)
            print(f"saturn train: {job.name}: {failure.reason}", file=sys.stderr)
            return 1
        tell({"event": "end", "status": result["status"], "reason": result["reason"], "result": result})
    return 0


def _first_weights(stack: contextlib.ExitStack, args: argparse.Namespace, job: Job) -> tuple[Job, str]:
    """The job with the version that its ``init_from`` means, and the file of its weights."""
    from saturn_airflow.model import initial_weights
    from saturn_airflow.operators import context, first_weights

    if job.init_from is None:
        return job, ""
    folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (job,) = first_weights.settled([job], lambda: args.uri or context.mlflow_uri(), folder.absolute(), print)
    return job, initial_weights.file_of(folder.absolute(), job.init_from)


def _checked_devices(args: argparse.Namespace, job: Job) -> int:
    """How many devices to train on.

    :raises SaturnError: when the technique can't train the job by hand on so many, or a number is below 1.
    """
    from saturn_airflow import library

    technique = library.get(args.technique)
    command_line.check_number("--batches", args.batches, 1)
    command_line.check_number("--devices", args.devices, 1)
    if type(technique).execute is not library.BaseTechnique.execute:
        raise SaturnError(
            f"technique {args.technique!r} trains by itself, in its execute, which can't be run by hand; "
            "train the job under another one to look at its code"
        )
    devices: int = args.devices or (1 if library.why_not(technique, job, 1) is None else 2)
    if reason := library.why_not(technique, job, devices):
        raise SaturnError(f"{args.technique} x {devices} can't train {job.name!r}: {reason}")
    return devices


def _parameters(text: str) -> dict[str, Any]:
    """``--parameters`` as an object; another value is refused."""
    try:
        found = json_text.parse(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SaturnError(f"--parameters {text!r}: give a JSON object, such as '{{\"micro_batches\": 4}}'")
    return found


def _train(
    stack: contextlib.ExitStack,
    request: TrainRequest,
    count: int,
    cluster: Cluster,
    on_cpu: bool,
    tell: Callable[[Event], object],
) -> dict[str, Any]:
    """Train on GPUs that nobody holds, or on CPUs where there are none; what the ranks' end event says.

    :param stack: the GPUs stay leased until it is closed.
    """
    from saturn_airflow.launch import devices, leases
    from saturn_airflow.operators import context

    gpus = [] if on_cpu else devices.gpu_uuids()
    if gpus:
        # As all who train on this machine do, wait until nobody holds them.
        found = {device.name: device for device in devices.find("this machine", "gpu", len(gpus))}
        lease = stack.enter_context(
            leases.acquire(
                list(found),
                f"saturn train {request.job.name}",
                count=count,
                priority=(time.time(), 0),
                folder=Path(context.leases_folder()),
                on_wait=lambda holders: print(f"waiting for GPUs held by {'; '.join(holders)}", flush=True),
            )
        )
        os.environ.update(devices.environment([found[name] for name in lease.devices]))
    from saturn_airflow.training import by_hand

    threads = _threads(count, cluster, on_gpus=bool(gpus))
    return by_hand.train(request, count, "cuda" if gpus else "cpu", threads, tell)


def _threads(count: int, cluster: Cluster, on_gpus: bool) -> int:
    """CPU threads of each of ``count`` ranks: those of a device on the sweep's first node of such devices.

    How sums are rounded follows from the number of threads, and so do losses.
    """
    from saturn_airflow.launch import devices

    node = next((node for node in cluster if node.is_cpu is not on_gpus), None)
    if node is None or node.devices <= count:
        return devices.threads_per_device(count)
    threads = devices.threads_per_device(node.devices)
    print(f"{threads} CPU thread{'s' * (threads > 1)} per device, as on node {node.name}", flush=True)
    return threads


def _event_handler(
    stack: contextlib.ExitStack, args: argparse.Namespace, job: Job, devices: int, folder: Path
) -> Callable[[Event], object]:
    """What is called with each event: it prints it, and records it in MLflow where that was asked for."""
    from saturn_airflow.launch import handed_over

    recorded = _job_run(args, job, devices, folder) if args.experiment else None

    def tell(event: Event) -> None:
        event = handed_over.hidden_event(event)
        print_event(event)
        if recorded is not None:
            recorded.follow({**event, "time": time.time()})
            if event["event"] == "end":
                recorded.close(event["status"], event["reason"])
                print(f"MLflow: {recorded.url or 'recorded'}")

    return tell


def _job_run(args: argparse.Namespace, job: Job, devices: int, folder: Path) -> JobRun:
    """A new run of the job in MLflow, below a sweep's run of its own."""
    from saturn_airflow import tracking
    from saturn_airflow.operators.context import hide_secrets, mlflow_uri

    uri = args.uri or mlflow_uri()
    key = f"by hand/{args.dag}/{time.time():.3f}"
    sweep = tracking.open_sweep(
        uri, args.experiment, f"{job.name} by hand", {"saturn.sweep": key}, {"jobs": 1}, folder / "sweep"
    )
    sweep.close()
    params = hide_secrets(tracking.job_params(job, technique=args.technique, devices=devices))
    return tracking.open_job(uri, sweep, job.name, params, {}, folder)


def print_event(event: Event) -> None:
    """One line for what happened."""
    from saturn_airflow.model import metrics

    kind = event["event"]
    if kind == "start":
        begin = f"from step {event['step']}" if event["step"] else "from the beginning"
        total = event.get("total_batches") or "an unknown number of"
        print(f"training {begin}, {total} batches in all", flush=True)
    elif kind == "step":
        lr = "" if event.get("lr") is None else f"lr {event['lr']:.3g}  "
        print(
            f"step {event['step']:>5}  epoch {event['epoch']}  loss {event['loss']:.6f}  "
            f"{lr}{1000 * event['seconds']:.1f} ms",
            flush=True,
        )
    elif kind == "logged":
        _print_logged(event)
    elif kind == "eval":
        print(f"epoch {event['epoch']} evaluated: {metrics.in_words(event, 6)}", flush=True)
    elif kind == "warning":
        print(f"warning: {event['message']}", file=sys.stderr, flush=True)
    elif kind == "checkpoint":
        print(f"checkpoint {event['path']}", flush=True)
    elif kind == "end" and event["status"] == Status.FINISHED and event["reason"]:
        print(event["reason"], flush=True)


def _print_logged(event: Event) -> None:
    told = [f"{name} {value:g} (step {step})" for name, value, _, step in event.get("metrics", ())]
    for what in ("params", "tags"):
        told += [f"{name}={value}" for name, value in event.get(what, {}).items()]
    if path := event.get("artifact"):
        told.append(f"file {Path(event.get('to', ''), Path(path).name)}")
    print(f"logged {', '.join(told)}", flush=True)
