"""Run a command with emulated GPUs, on a machine without: ``python tests/emulated_gpu COUNT COMMAND...``.

In the command, and in what it starts, torch has COUNT CUDA devices of 8 GiB, or of ``CUDA_EMULATED_BYTES``.
Needs g++ and a torch that was built without CUDA.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Build the devices where they are not, and become the command."""
    count, *command = sys.argv[1:]
    os.environ |= environment(int(count))
    os.execvp(command[0], command)


def environment(count: int) -> dict[str, str]:
    """The variables with which what is run has ``count`` emulated GPUs."""
    paths = [str(HERE / "on_path"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        "CUDA_EMULATED_GPUS": str(count),
        "CUDA_EMULATED_LIBRARY": str(built()),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def built() -> Path:
    """The library of the devices, compiled once for each version of it and of torch.

    :raises subprocess.CalledProcessError: where it can't be compiled.
    """
    sources = b"".join((HERE / name).read_bytes() for name in ("device.cpp", "operators.inc"))
    digest = hashlib.sha256(sources + version("torch").encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"saturn-emulated-gpu-{os.getuid()}-{digest}.so"
    if not library.exists():
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        torch = Path(spec.origin).parent
        made = library.with_suffix(f".{os.getpid()}")
        include = [f"-isystem{torch / 'include' / each}" for each in ("", "torch/csrc/api/include")]
        linked = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", *include, "-o", str(made)]
        subprocess.run(["g++", *flags, str(HERE / "device.cpp"), *linked], check=True)
        made.replace(library)
    return library


if __name__ == "__main__":
    main()
