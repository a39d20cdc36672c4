"""What a job's own code logs with MLflow, on its way out of the processes that train.

Nothing here knows MLflow: it is told where to report once the job's code imports it
(``saturn_airflow.tracking.job_store``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

#: The folder that logged files are kept in, for launched processes; empty where nothing is to be logged.
VARIABLE = "SATURN_LOGGED_FILES"
#: Where they lie in the folder of a job.
FILES = "mlflow/logged"
#: The event that tells of what was logged.
EVENT = "logged"
_STORE = "saturn_airflow.tracking.job_store:install"


class _Log:
    """What this process logs, and when.

    :ivar told_by: who speaks, by where in the job's code something is logged: in its loss function
        (``loss``), or anywhere else (empty).
    """

    def __init__(self, emit: Callable[[dict[str, Any]], object], folder: str, first: bool) -> None:
        self.emit, self.folder = emit, Path(folder)
        self.process = os.getpid()
        self.told_by = {"": first, "loss": first}
        self.source = ""
        self.muted = False
        self.sets_up = False
        self.step: int | None = None
        self.counts: dict[str, tuple[int, int]] = {}
        self.lock = threading.Lock()


_log: _Log | None = None


def redirect(emit: Callable[[dict[str, Any]], object], *, first: bool) -> None:
    """From now on, what this process logs with MLflow goes to the run of its job, if anywhere.

    Without the variable :data:`VARIABLE`, MLflow is left as it is.

    :param emit: takes the events.
    :param first: whether this process speaks for all that train the job.
    """
    global _log
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    _log = _Log(emit, folder, first) if folder else None
    if "mlflow" in sys.modules:
        _install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_heard() -> bool:
    """Whether what is logged now goes anywhere."""
    log = _log
    if log is None or log.process != os.getpid() or log.muted or log.sets_up:
        return False
    return log.told_by[log.source]


def put(metrics: Sequence[tuple[str, float, int, int]] = (), **fields: Any) -> None:
    """Report what was logged.

    :param metrics: of each its name, value, time (ms) and step.
    """
    log = _log
    if log is None or not is_heard():
        return
    with log.lock:
        at = _place(log, metrics) if metrics else None
        told = {"metrics": [list(metric) for metric in metrics], "at": at, "source": log.source}
        log.emit({"event": EVENT, **(told if metrics else {}), **fields})


def _place(log: _Log, metrics: Sequence[tuple[str, float, int, int]]) -> list[int] | None:
    """When in the training it is logged: in which step, and as which of what is logged there."""
    step = log.step
    if step is None:  # nobody counts but the job's code
        step = max(metric[3] for metric in metrics)
        if not step:
            return None
    before, count = log.counts.get(log.source, (step, -1))
    count = count + 1 if before == step else 0
    log.counts[log.source] = (step, count)
    return [step, count]


def folder() -> Path | None:
    """Where logged files are to lie; None where what is logged now goes nowhere."""
    return _log.folder if _log is not None and is_heard() else None


def warn(message: str) -> None:
    """Tell the user, as often as it happens anew."""
    if _log is not None and is_heard():
        _log.emit({"event": "warning", "message": message})


def set_up(*, heard: bool) -> None:
    """A training is set up: until its first step, only what loads the model and the data is heard.

    :param heard: whether anything is.
    """
    global _log
    if not heard:
        _log = None
    if _log is not None:
        _log.step, _log.sets_up = 0, True


def at(step: int) -> None:
    """The training is at its ``step``, from 1."""
    if _log is not None:
        _log.step, _log.sets_up = step, False


def current_step() -> int:
    """The step that a job's code is called in, from 1; 0 before the first, and where no job is trained."""
    return (_log.step or 0) if _log is not None else 0


def tell_losses(here: bool) -> None:
    """Say whether this process speaks for what the loss function logs."""
    if _log is not None:
        _log.told_by["loss"] = here


def muted() -> AbstractContextManager[None]:
    """Around calls of the job's code that a plain loop would not make."""
    return _for_now("muted", True)


def loading() -> AbstractContextManager[None]:
    """Around what loads the model and the data of a training that is set up."""
    return _for_now("sets_up", False)


def in_loss() -> AbstractContextManager[None]:
    """Around calls of the job's loss function."""
    return _for_now("source", "loss")


@contextmanager
def _for_now(name: str, value: Any) -> Iterator[None]:
    if (log := _log) is None:
        yield
        return
    before = getattr(log, name)
    setattr(log, name, value)
    try:
        yield
    finally:
        setattr(log, name, before)


def _install() -> None:
    module, _, name = _STORE.partition(":")
    getattr(importlib.import_module(module), name)()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MLflow as all others do, and has it told where to report once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "mlflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It was found through here only; what asks for its loader is to have its own.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _install()
