"""The library of techniques: where they come from, and the class they share.

A technique is found in one of four places; its name is the file's stem, the entry point's name, or what
it was registered as:

1. the files that come with Saturn (``techniques/``),
2. the files of the folders named by ``[saturn] techniques_folder`` (or ``SATURN_TECHNIQUES_FOLDER``),
3. entry points of the group ``saturn_airflow.techniques``,
4. :func:`register`.

Names are known without importing anything, so that a DAG file can be checked without torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE
from saturn_airflow.model.jobs import Job

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session

ENTRY_POINT_GROUP = "saturn_airflow.techniques"

Parameters = Mapping[str, Any]

# Where processes find a technique's file that it starts in a fresh interpreter: they get this one's sys.path.
_PACKAGE_OF_FILES = "saturn_airflow_technique_files"
# What the module of a technique's file has of the file as it was imported.
_DIGEST = "_saturn_digest"


class BaseTechnique:
    """A way to train a job on a number of devices.

    Write either :meth:`parallelize`, and Saturn's ranks and training loop do the rest, or both
    :meth:`search` and :meth:`execute`, which then may do as they like with the devices they are given.
    """

    name: ClassVar[str] = ""
    #: Raise it when the technique trains otherwise than before; what was measured and compared then no longer
    #: counts. A file of a user's own is another version once it is edited, but not when what it imports is.
    version: ClassVar[str] = "1"
    #: Whether it can train jobs that have a training step of their own: :meth:`parallelize` then gets
    #: ``own_step=True`` for them, and returns the model on its device or a ``Parallel``.
    holds_own_steps: ClassVar[bool] = False
    #: Whether it runs the loop of a ``Trainer`` of transformers as it is (``trainer=True``).
    holds_trainers: ClassVar[bool] = False

    def why_not(self, job: Job, devices: int) -> str | None:
        """Say why ``job`` can't run on this many devices, or None. Called without loading the model."""
        return None

    @property
    def trains_by_itself(self) -> bool:
        """Whether it has an :meth:`execute` of its own, instead of Saturn's training loop."""
        return type(self).execute is not BaseTechnique.execute

    def why_not_initial_weights(self, job: Job) -> str | None:
        """Say why ``job`` can't start from its ``init_from`` under this technique, or None."""
        if job.init_from is None or not self.trains_by_itself:
            return None
        return (
            f"{self.name} trains by itself, in its execute, and would not start from "
            f"init_from={job.init_from!r}"
        )

    def spares_memory(self, parameters: Parameters) -> bool:
        """Whether it gives speed for memory under these parameters, so that others may be much faster."""
        return bool(parameters.get("recompute") or parameters.get("offload"))

    def candidates(self, job: Job, devices: int) -> Sequence[Parameters]:
        """Parameters worth measuring, the likeliest first; each is passed on to :meth:`parallelize`."""
        return [{}]

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> Any:
        """Make ``model`` train on ``ranks.size`` devices; called on every rank.

        :param model: the job's model, whole, on the CPU, the same on all ranks.
        :param ranks: this rank's number, the device, the process group.
        :returns: the module to call, usually ``model`` itself.
        """
        raise NotImplementedError(f"technique {self.name!r} has neither parallelize nor search and execute")

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Find the fastest parameters that fit.

        :param devices: ids of the node's devices, held by this process; ``CUDA_VISIBLE_DEVICES`` is set.
        :param session: where files go, and Saturn's own ranks for those who want them.
        :returns: the parameters and the seconds of one global batch under them.
        :raises DoesNotFit: (``saturn_airflow.DoesNotFit``) when the technique can't train this job; its
            message is the reason. When nothing fits in memory, the ranks' own failure says so.
        """
        return session.fastest(self.candidates(job, len(devices)))

    def execute(
        self,
        job: Job,
        devices: Sequence[int],
        session: Session,
        parameters: Parameters,
        batch_count: int | None = None,
    ) -> None:
        """Train from the last checkpoint in ``session.folder``, if there is one.

        :param batch_count: global batches to train for in this call; None for all that are left.
        """
        session.train(parameters, batch_count)


_registered: dict[str, type[BaseTechnique]] = {}


def register(name: str, technique: type[BaseTechnique]) -> None:
    """Put ``technique`` in the library of this process under ``name``.

    :raises InvalidSweepError: when it is no :class:`BaseTechnique`.
    """
    if not (isinstance(technique, type) and issubclass(technique, BaseTechnique)):
        raise InvalidSweepError(f"technique {name!r}: {technique!r} is not a subclass of BaseTechnique")
    _registered[name] = technique


def folders() -> list[Path]:
    """Folders whose files are techniques: the user's first, then those that come with Saturn."""
    own = [Path(part) for part in os.environ.get(TECHNIQUES_VARIABLE, "").split(os.pathsep) if part]
    package = Path(__file__).parent
    shipped = package / "techniques"
    return [*own, shipped if shipped.is_dir() else package.parent / "techniques"]


def names() -> list[str]:
    """Names of all techniques, sorted; nothing is imported."""
    found = set(_registered) | set(_files())
    found.update(point.name for point in _entry_points())
    return sorted(found)


def is_saturns(name: str) -> bool:
    """Whether the technique called ``name`` here is one that comes with Saturn."""
    path = _files().get(name)
    return name not in _registered and path is not None and path.parent == folders()[-1]


def says_what_it_trains(name: str) -> bool:
    """Whether the technique is to be tried where nobody names it.

    A file of the user's own may be meant for a few jobs alone: it is tried with others where it has a
    ``why_not``, which says which it can't train.
    """
    if name in _registered or name not in _files() or is_saturns(name):
        return True
    return type(get(name)).why_not is not BaseTechnique.why_not


def check_names(wanted: Sequence[str], what: str, known: Sequence[str] | None = None) -> None:
    """Check that techniques are in the library.

    :param known: what :func:`names` returned, for those who check often.
    :raises InvalidSweepError: naming the first that is not, and those that are.
    """
    known = names() if known is None else known
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidSweepError(
            f"{what}: technique {unknown[0]!r} is not in the library; it has {', '.join(known)}; "
            f"{_own_files()}"
        )


def get(name: str) -> BaseTechnique:
    """The technique called ``name``; its file is imported now.

    :raises InvalidSweepError: when there is none, or what is found is not one technique.
    """
    if name in _registered:
        return _instance(_registered[name], name)
    if path := _files().get(name):
        made = _instance(_class_in(path), name)
        if path.parent != folders()[-1]:
            digest = vars(sys.modules[type(made).__module__])[_DIGEST]
            made.version = f"{made.version} {digest}"  # type: ignore[misc]
        return made
    for point in _entry_points():
        if point.name != name:
            continue
        try:
            technique = point.load()
        except Exception as error:
            raise InvalidSweepError(f"technique {name!r}: {point.value} can't be loaded: {error}") from error
        register(name, technique)
        return _instance(technique, name)
    known = ", ".join(names())
    raise InvalidSweepError(f"technique {name!r} is not in the library; it has {known}; {_own_files()}")


def _own_files() -> str:
    """Where files of the user's own are looked for, which may be set otherwise on another machine."""
    own = ", ".join(str(folder) for folder in folders()[:-1]) or "none"
    return f"files of your own are found in the folders of [saturn] techniques_folder (here: {own})"


def why_not(technique: BaseTechnique, job: Job, devices: int) -> str | None:
    """Why ``job`` can't run under ``technique`` on this many devices, or None; the model is not loaded."""
    trains_itself = type(technique).execute is not BaseTechnique.execute
    if job.trainer and not (technique.holds_trainers or trains_itself):
        return (
            f"{technique.name} does not run the loop of a Trainer (trainer=True), which trains on one device"
        )
    if job.own_step and not (technique.holds_own_steps or trains_itself):
        return (
            f"{technique.name} takes a model's forward and backward pass apart, and this job has a training "
            "step of its own (own_step=True)"
        )
    return technique.why_not(job, devices) or technique.why_not_initial_weights(job)


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    """The techniques of installed packages; of two of one name, those of the first on ``sys.path``."""
    seen = set[str]()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            packages = _entry_points_in(folder, os.stat(folder or ".").st_mtime_ns)
            for package, points in packages.items():
                yield from () if package in seen else points
            seen |= packages.keys()


@functools.cache
def _entry_points_in(folder: str, changed: int) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Those of the packages in ``folder``, by its name; the same until it has ``changed`` (nanoseconds).

    Each package's own list is read for that, several hundred as a rule, and DAG files are parsed often.
    """
    return {
        package.name: [point for point in package.entry_points if point.group == ENTRY_POINT_GROUP]
        for package in importlib.metadata.distributions(path=[folder])
    }


def _files() -> dict[str, Path]:
    """The files of techniques by name; of two with one name, that of the folder named first.

    :raises InvalidSweepError: when this user may not look into a folder: its techniques would not be tried.
    """
    files: dict[str, Path] = {}
    for folder in reversed(folders()):
        try:
            found = [Path(folder, name) for name in os.listdir(folder)]
        except PermissionError as error:
            raise InvalidSweepError(
                f"the folder of techniques {folder} can't be read ({error.strerror}): let the user that "
                f"parses DAGs, plans and trains read it (chmod -R a+rX {folder})"
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            continue
        files.update({path.stem: path for path in found if path.suffix == ".py" and path.name[0] != "_"})
    return files


def _class_in(path: Path) -> type[BaseTechnique]:
    """The technique that a file defines; the file is imported once in a process.

    :raises InvalidSweepError: when it can't be imported, or does not define exactly one.
    """
    if (importable := str(Path(__file__).parent / "importable")) not in sys.path:
        sys.path.append(importable)
    module_name = f"{_PACKAGE_OF_FILES}.{path.stem}"
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            _note_digest(module, path)
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            reason = f"{type(error).__name__}: {error}"
            raise InvalidSweepError(f"technique {path.stem!r}: {path} can't be imported: {reason}") from error
    _note_digest(module, path)  # where another file has imported it
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseTechnique)
        and value.__module__ == module_name
        and not value.__name__.startswith("_")
    ]
    if len(classes) != 1:
        raise InvalidSweepError(
            f"{path} defines {len(classes)} techniques; a technique's file defines exactly one "
            "(names of base classes start with an underscore)"
        )
    return classes[0]


def _note_digest(module: ModuleType, path: Path) -> None:
    if not hasattr(module, _DIGEST):
        setattr(module, _DIGEST, hashlib.sha256(path.read_bytes()).hexdigest()[:8])


def _instance(technique: type[BaseTechnique], name: str) -> BaseTechnique:
    """A new instance that knows the name it was found by."""
    made = technique()
    made.name = name  # type: ignore[misc]
    return made
