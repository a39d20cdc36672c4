"""Where a job's first weights come from: what ``init_from`` may say, and where a sweep keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import slug

#: The folder, in a sweep's own, of the weights that its jobs start from.
FOLDER = "init"
#: The file that holds them, here and in an exported model.
WEIGHTS = "model.safetensors"
#: What a job does whose ``init_from`` names something that is not there.
FAIL, SCRATCH = "fail", "scratch"

_MODEL = re.compile(r"models:/(?P<name>[^/:@]+)(@(?P<alias>[\w-]+)|/(?P<version>\d+|latest))")
_RUN = re.compile(r"runs:/(?P<run>[0-9A-Za-z]+)(/(?P<path>[^#]+))?")
_DIGEST = re.compile(r"(?P<path>.*?)(#sha256=(?P<digest>[0-9a-f]{16}))?")


@dataclass(frozen=True)
class Source:
    """What ``init_from`` names: a version of a registered model, a model of a run, or a file or folder.

    :ivar version: a number or ``latest``; None with an alias.
    :ivar path: of a model among the artifacts of ``run``, or, without a run, in the file system.
    :ivar digest: the first 16 hexadecimal digits of a file's SHA-256, where it is known which file is meant.
    """

    name: str | None = None
    alias: str | None = None
    version: str | None = None
    run: str | None = None
    path: str = ""
    digest: str | None = None


def parse(init_from: str, what: str = "init_from") -> Source:
    """What ``init_from`` names.

    :param what: how messages name it.
    :raises InvalidSweepError: when it names nothing that weights could come from.
    """
    if found := _MODEL.fullmatch(init_from):
        return Source(name=found["name"], alias=found["alias"], version=found["version"])
    if found := _RUN.fullmatch(init_from):
        return Source(run=found["run"], path=(found["path"] or "model").rstrip("/"))
    found = _DIGEST.fullmatch(init_from.removeprefix("file://"))
    if found and found["path"].startswith("/"):
        return Source(path=found["path"], digest=found["digest"])
    raise InvalidSweepError(
        f"{what} is {init_from!r}; give 'models:/name@alias' or 'models:/name/3' (a registered model), "
        "'runs:/<run id>/model', or the absolute path of a .safetensors file or of an exported model's folder"
    )


def check(init_from: object, what: str) -> None:
    """Check what a job says; a template is checked when it is rendered.

    :raises InvalidSweepError: when it can't be right.
    """
    if not isinstance(init_from, str):
        raise InvalidSweepError(f"{what} is {init_from!r:.80}; give 'models:/digits@champion' or the like")
    if "{{" not in init_from:
        parse(init_from, what)


def file_of(sweep_folder: Path, init_from: str | None) -> str:
    """The file with the weights that ``init_from`` means in a sweep; empty where it is None.

    :param init_from: of a job whose version was settled when the sweep began.
    """
    return "" if init_from is None else str(sweep_folder / FOLDER / slug(init_from) / WEIGHTS)
