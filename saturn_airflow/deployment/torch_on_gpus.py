"""Whether torch, as it is installed here, can compute on this machine's GPUs; for `saturn doctor`.

Torch itself is asked, in a process of its own: to import it takes seconds, and who has asked can't fork any
more. Nothing is computed, and no GPU's memory taken.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

_ASK = """
import json, torch
gpus = range(torch.cuda.device_count())
told = [[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in gpus]
print(json.dumps([torch.cuda.get_arch_list(), told]))
"""


def ask() -> subprocess.Popen[str]:
    """Begin to ask."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _ASK], stdout=pipe, stderr=pipe, text=True)


def why_not(asked: subprocess.Popen[str], seconds: float) -> str | None:
    """Why torch can't use the GPUs; None where it can, or has not said within ``seconds``."""
    try:
        said, errors = asked.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:  # a slow disk says nothing of torch
        asked.kill()
        asked.communicate()
        return None
    if asked.returncode:
        return errors.strip().rpartition("\n")[2] or f"it ends with {asked.returncode}"
    built_for, gpus = json.loads(said.strip().rpartition("\n")[2])
    for name, major, minor in gpus:
        if not has_kernels(built_for, major, minor):
            return f"it has kernels for {' '.join(built_for)}, and {name} is of sm_{major}{minor}"
    return None


def has_kernels(built_for: Sequence[str], major: int, minor: int) -> bool:
    """Whether one of these architectures, such as ``sm_90``, runs on a GPU of this compute capability.

    Machine code (``sm``) runs where the major number is the same and the minor no smaller; what is to be
    translated by the driver (``compute``) on all that came later. An "a" at the end ties either to one
    capability, an "f" to one major number.
    """
    known = [told for name in built_for if (told := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name))]
    for kind, of_major, of_minor, tied in (told.groups() for told in known):
        of = int(of_major), int(of_minor)
        if of == (major, minor):
            return True
        if tied != "a" and of < (major, minor) and (of[0] == major or (kind == "compute" and not tied)):
            return True
    return not known
