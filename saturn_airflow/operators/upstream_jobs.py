"""Jobs from XComs: data, so they may name less than the author of the DAG file may."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import Context, conf

from saturn_airflow.launch.handed_over import HandedOver
from saturn_airflow.model import allowed_modules, references, secrets
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators import connections
from saturn_airflow.operators.context import limit_users_code, user_path

_REFERENCE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(jobs: Sequence[Job], dag_file: str) -> None:
    """Check what jobs from upstream refer to, as that of jobs in the file is checked when it is parsed.

    :param dag_file: the file of the DAG: what it imports by name, or refers to, may be referred to.
    :raises InvalidSweepError: naming the job, the reference and the fix.
    """
    named, texts = references_in(Path(dag_file)), texts_in(Path(dag_file))
    for job in jobs:
        _check(job, named, texts, "an upstream task")
        if conf.getboolean("saturn", "check_references", fallback=True):
            job.check_references()


def handed_on(job: Job, task: Any, context: Context) -> HandedOver:
    """The secrets of a job that another task handed on, once it is known that it may be run.

    Whoever may edit XComs may have changed it. It may refer to what the sweep's jobs in the DAG's file do,
    and else to what jobs from upstream may.

    :param task: of the sweep; its DAG was read from the file, and from no XCom.
    :raises InvalidSweepError: naming the job, the reference and the fix; or as :func:`connections.handed_to`.
    """
    trials = task.dag.get_task(task.settings.trials_task)
    listed = [] if trials.from_upstream else trials.jobs
    named, conn_ids = _referred_to(job)
    known = _all_of([data for data in listed if data["name"] == job.name], trials, context)
    if not (named <= known[0] and conn_ids <= known[1]):
        file, every = Path(task.dag.fileloc), _all_of(listed, trials, context)
        known = references_in(file) | every[0], texts_in(file) | every[1]
    _check(job, *known, "another task of the sweep")
    return connections.handed_to(job)


def _all_of(listed: Sequence[Mapping[str, Any]], trials: Any, context: Context) -> tuple[set[str], set[str]]:
    """The references, and the ids of connections, that jobs of the DAG's file have in this DAG run."""
    named, conn_ids = set[str](), set[str]()
    for data in listed:
        own = _referred_to(Job.from_dict(data))
        named |= own[0]
        conn_ids |= own[1]
    return named, set(trials.render_template(sorted(conn_ids), context, trials.get_template_env()))


def _referred_to(job: Job) -> tuple[set[str], set[str]]:
    """The references and the ids of connections of a job."""
    return {name for _, name in job.named_references()}, {conn_id for _, conn_id in _connections_of(job)}


def _check(job: Job, named: set[str], texts: set[str], source: str) -> None:
    """Check that a job refers to nothing but what is ``named``, the user's own, or allowed for all.

    :param texts: among them the ids of connections that it may refer to.
    :param source: where it comes from, for the message.
    """
    limit_users_code()
    job.check_allowed()
    if not allowed_modules.configured():
        for what, reference in job.named_references():
            _check_known(reference, f"{what} {reference!r} comes from {source}", named)
    for what, conn_id in _connections_of(job):
        if conn_id not in texts:
            raise InvalidSweepError(
                f"job {job.name!r}: {what} is of connection {conn_id!r}, and jobs from {source} "
                f"may have those alone that the DAG's file names; write {conn_id!r} there"
            )


def check_stored(reference: str, what: str, named: set[str]) -> None:
    """Check a reference that comes from MLflow, whose artifacts others may write.

    :param what: how messages name it.
    :param named: references that the sweep's own jobs have, too.
    :raises InvalidSweepError: naming the reference and the fix.
    """
    if reference in named:
        return
    limit_users_code()
    references.check_allowed(reference, what)
    if not allowed_modules.configured():
        _check_known(reference, f"{what} {reference!r} comes from MLflow", named)


def _connections_of(job: Job) -> Iterator[tuple[str, str]]:
    for place, (conn_id, _) in secrets.fields(job):
        yield place, conn_id
    for conn_id in job.connections:
        yield "connections", conn_id


def texts_in(file: Path) -> set[str]:
    """The texts that stand in a Python file; none where it can't be read."""
    nodes = _nodes(file)
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def references_in(file: Path) -> set[str]:
    """What a Python file imports by name, or writes as a reference; none where it can't be read.

    Not what lies in the modules that it imports: ``import pandas`` names none of its functions.
    """
    found = set[str]()
    for node in _nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and _REFERENCE.fullmatch(str(node.value)):
            found.add(str(node.value))
    return found


def _nodes(file: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return []


def _is_own(path: Path) -> bool:
    """Whether a file lies where DAGs find modules, and was not installed there."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    own = [Path(entry).resolve() for entry in user_path()]
    return any(map(path.is_relative_to, own)) and not any(map(path.is_relative_to, installed))


def _check_known(reference: str, what: str, named: set[str], seen: frozenset[str] = frozenset()) -> None:
    """Refuse a function that is neither the user's own nor ``named`` in the DAG's file.

    :param seen: references that led to this one: modules of the user's own import it from each other.
    """
    module = reference.partition(":")[0]
    if reference in named or reference in seen or allowed_modules.covers(allowed_modules.ALWAYS, module):
        return
    spec = references.find_spec(module)
    if spec is None:  # that it is missing is told by the check of references, or on the nodes
        return
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if places and all(_is_own(Path(place).resolve()) for place in places):
        for imported in references.imported_by(reference):
            _check_known(imported, what, named, seen | {reference})
        return
    raise InvalidSweepError(
        f"{what}, and {reference!r} neither lies beside the DAG files nor is "
        f"named in the DAG's file: allow {module!r} with [saturn] allowed_modules, or write that there"
    )
