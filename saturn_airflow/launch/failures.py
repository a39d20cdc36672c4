"""How training ends badly: told apart, and told so that the user sees their own code first."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, NotANumberError
from saturn_airflow.model import disks
from saturn_airflow.model.errors import (
    DeviceError,
    DiskError,
    InvalidSweepError,
    JobError,
    SaturnError,
    message_of,
)
from saturn_airflow.model.printable import printable
from saturn_airflow.model.status import Status

Whose = Literal["", "job", "technique", "node", "device"]

#: Methods by which torch tells what is called of it.
_WATCHING = ("__torch_function__", "__torch_dispatch__")
_PACKAGE = str(Path(__file__).parent.parent)
_NO_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    # cuBLAS, cuDNN (from 9.0 on the second), cuFFT, cuSOLVER and cuSPARSE say so of their workspaces.
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)
# What torch fails with where memory does not suffice and NVML does not say who has it, as on parts of GPUs.
_NO_MEMORY_NOR_WHY = re.compile(r"NVML_SUCCESS == .*CUDACachingAllocator")
# What a GPU says when its driver, its memory or its neighbours failed (cudaError in CUDA's driver_types.h):
# the process can't go on, another one may. That the code asked for the impossible is not among them.
_DEVICE_FAILED = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "busy or unavailable",
    "no CUDA-capable device is detected",
    "No CUDA GPUs are available",
    "initialization error",
    "driver shutting down",
    "system not yet initialized",
    "forward compatibility was attempted",
    "driver version is insufficient",
    "driver on your system is too old",
    "no NVIDIA driver on your system",
    "driver initialization failed",
    "unsupported display driver / cuda driver combination",
    "GPU is lost",
    # Of the service through which several processes share a GPU.
    "MPS client",
    "MPS server",
    "resources required to support device connections",
)
# The same, where kernels of the job's own or of a library may be to blame as well.
_DEVICE_OR_CODE_FAILED = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "no kernel image is available",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "unknown error",
    "_STATUS_NOT_INITIALIZED",
    "_STATUS_INTERNAL_ERROR",
    "_STATUS_EXECUTION_FAILED",
    "_STATUS_MAPPING_ERROR",
)
# What a kernel says of an index out of range. A GPU tells it late, when none of the job's code is called.
_ASSERTION = "device-side assert triggered"
_ASSERTION_HINT = (
    "; an index is out of range, such as a label that is no class or a token beyond the vocabulary: with "
    "CUDA_LAUNCH_BLOCKING=1 in the worker's environment the traceback says where"
)
_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "NCCL",
    "Gloo connect",
    "TCPStore",
    "another process",
)

#: Characters of what is told: it goes into events, XComs, MLflow's tags and pages.
_MOST = {"reason": 4000, "traceback": 100_000}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why processes ended badly.

    :param status: ``failed``: an exception; ``out_of_memory``; ``not_a_number``; ``does_not_fit``: the
        technique can't train this job; ``changes_result``: it would train it otherwise than one device does;
        ``hung``: nothing moved for too long; ``lost``: a process was killed,
        or its GPU failed.
    :param reason: one sentence.
    :param traceback: of the exception, or where a hung process stood; empty where there is none.
    :param whose: whose code raised, where that is known; of the ``node`` it is the disk, of the ``device``
        its hardware or its driver, which no code can break.
    :param rank: the rank that failed first.
    :param peer_lost: it failed because another rank was gone.
    :param signal: the name of the signal that ended it; empty where none did.
    :param common: jobs that differ in nothing but what the optimizer and its schedule see would fail alike.
    """

    status: Status
    reason: str
    traceback: str = ""
    whose: Whose = ""
    rank: int = 0
    peer_lost: bool = False
    signal: str = ""
    common: bool = False

    def __post_init__(self) -> None:
        # Logs, terminals and pages show them, and a job's code has chosen the words.
        for name, most in _MOST.items():
            object.__setattr__(self, name, printable(_without_middle(getattr(self, name), most)))

    def to_dict(self) -> dict[str, Any]:
        """This failure as JSON-ready data."""
        return asdict(self)


class RanksFailedError(SaturnError):
    """Launched processes ended badly; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def describe(error: BaseException, rank: int = 0) -> Failure:
    """What ``error`` means for the job."""
    if isinstance(error, RanksFailedError):
        return error.failure
    behind = _behind(error)
    if isinstance(error, DoesNotFit) and not is_of_the_machine(error):
        status = Status.CHANGES_RESULT if isinstance(error, ChangesResultError) else Status.DOES_NOT_FIT
        return Failure(status=status, reason=str(error), whose="technique", rank=rank)
    cause = behind[-1]
    failed = partial(Failure, traceback=_text(error), rank=rank)
    if any(map(is_out_of_memory, behind)):
        return failed(status=Status.OUT_OF_MEMORY, reason=_one_line(cause))
    if isinstance(error, DeviceError):
        return failed(status=Status.LOST, reason=str(error), whose="device")
    if any(map(is_device_failure, behind)):
        of_itself = any(is_device_failure(e, _DEVICE_FAILED) for e in behind)
        reason = f"the GPU failed: {_one_line(cause)}"
        return failed(status=Status.LOST, reason=reason, whose="device" if of_itself else "")
    if isinstance(error, NotANumberError):
        common = error.common
        return Failure(status=Status.NOT_A_NUMBER, reason=str(error), whose="job", rank=rank, common=common)
    if isinstance(error, DiskError) or any(map(_is_of_a_disk, behind)):
        return failed(status=Status.LOST, reason=_of_a_disk(error, cause), whose="node")
    hint = _ASSERTION_HINT if _ASSERTION in message_of(cause) else ""
    if isinstance(error, InvalidSweepError | JobError):
        if error.__cause__ is None:  # the message says it all
            failed = partial(failed, traceback="")
        return failed(status=Status.FAILED, reason=f"{error}{hint}", whose="job", common=error.common)
    if not isinstance(error, Exception):
        # Nothing of Saturn's does that, and techniques hardly would.
        what = exits(error) if isinstance(error, SystemExit) else _raised(error)
        return failed(status=Status.FAILED, reason=f"the job's code {what}", whose="job")
    return failed(
        status=Status.FAILED,
        reason=f"{_one_line(error)}{hint}",
        whose="job" if hint else "technique",
        peer_lost=any(words in message_of(error) for words in _LOST_PEER),
    )


def before_launch(error: SaturnError) -> Failure:
    """The failure of a run that could not begin, such as for want of its devices."""
    if isinstance(error, DiskError):
        return describe(error)
    whose: Whose = "device" if isinstance(error, DeviceError) else ""
    return Failure(status=Status.FAILED, reason=str(error), whose=whose)


def of_a_death(rank: int, code: int | None, kernel_killed: bool) -> Failure:
    """The failure of a process that ended without a word.

    :param code: as of ``multiprocessing.Process.exitcode``.
    :param kernel_killed: whether the kernel killed anything on this machine meanwhile for want of memory.
    """
    what = f"rank {rank}"
    if code is None or code >= 0:
        reason = f"{what} exited with code {code}: the job's code, or a library, has ended it (os._exit)"
        return Failure(status=Status.LOST, reason=reason, rank=rank)
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and kernel_killed:
        reason = (
            f"{what} was killed by the kernel because the memory of its machine, or of its container, ran out"
        )
        return Failure(status=Status.OUT_OF_MEMORY, reason=reason, rank=rank, signal=name)
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return Failure(status=Status.LOST, reason=f"{what} was killed by {name}{hint}", rank=rank, signal=name)


def _is_of_a_disk(error: BaseException) -> bool:
    """Whether a disk failed under what a job or a technique does, and it is not where nobody may write."""
    of_this_package = isinstance(error, SaturnError)
    return not of_this_package and disks.is_fault(error) and not disks.is_read_only(error)


def _of_a_disk(error: BaseException, cause: BaseException) -> str:
    """What is said of such a failure."""
    if isinstance(error, OSError) and error.filename:
        return str(disks.fault(Path(os.fsdecode(error.filename)), error))
    reason = str(error) if isinstance(error, SaturnError) else _one_line(error)
    if error is not cause and disks.is_full(reason):  # most often of temporary files
        return f"{reason}; {disks.left(Path(tempfile.gettempdir()))}"
    return reason


def _behind(error: BaseException) -> list[BaseException]:
    """``error``, and what it says in Saturn's words."""
    found = [error]
    while isinstance(found[-1], SaturnError | DoesNotFit) and found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def is_of_the_machine(error: BaseException) -> bool:
    """Whether ``error``, or what it says in Saturn's words, is that memory did not suffice or a GPU failed:
    it tells nothing else of what was tried."""
    return any(is_out_of_memory(e) or is_device_failure(e) for e in _behind(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory did not suffice, on whatever device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = message_of(error)  # on a CPU torch raises a plain RuntimeError
    return any(words in message for words in _NO_MEMORY) or bool(_NO_MEMORY_NOR_WHY.search(message))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what raised it, says so."""
    return any(is_out_of_memory(e) for e in (error, error.__cause__) if e is not None)


def is_device_failure(
    error: BaseException, texts: tuple[str, ...] = _DEVICE_FAILED + _DEVICE_OR_CODE_FAILED
) -> bool:
    """Whether ``error`` says, by one of ``texts``, that the GPU or its driver failed.

    A device-side assertion is the code's own.
    """
    message = message_of(error)
    told = isinstance(error, RuntimeError) and re.search(
        r"\bCUDA\b|\bcu[A-Z]\w+ error|_STATUS_|\bNVIDIA\b", message
    )
    return bool(told) and any(words in message for words in texts)


def exits(error: SystemExit) -> str:
    """What is said of code that ends the process it was called in."""
    code = "" if error.code is None else repr(error.code)
    return f"called sys.exit({code}); return, or raise an exception that says what is wrong"


def said(error: BaseException) -> str:
    """What ``error`` says, without torch's list of everything that could have run an operation."""
    return message_of(error).partition(" This could be because the operator doesn't exist")[0].strip()


def _raised(error: BaseException) -> str:
    """What is said of code that raised what no ``except Exception`` takes for an error."""
    or_not = " (or somebody sent it SIGINT)" if isinstance(error, KeyboardInterrupt) else ""
    return f"raised {_one_line(error)}{or_not}; let it raise an Exception that says what is wrong"


def _without_middle(text: str, most: int) -> str:
    """``text``, of at most about so many characters: an exception may have whole tensors in its message."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _one_line(error: BaseException) -> str:
    message = said(error)
    first = message.splitlines()[0] if message else ""
    # NCCL says what it met at the end, under a line of its own.
    if met := message.partition("\nLast error:\n")[2].strip():
        first = f"{first}: {met.splitlines()[0]}"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _text(error: BaseException) -> str:
    """The traceback, without frames of Saturn that led to the user's, or watch what is called of torch."""
    if isinstance(error, SaturnError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(_PACKAGE):
        frames.pop(0)
    frames[:] = [f for f in frames if not (f.filename.startswith(_PACKAGE) and f.name in _WATCHING)]
    kept = ["Traceback (most recent call last):\n", *frames.format()] if frames else []
    return "".join([*kept, *traceback.format_exception_only(error)]).rstrip()
