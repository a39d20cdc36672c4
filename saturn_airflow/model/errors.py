"""The errors a user can meet. Each message names the thing, says what is wrong and how to mend it."""

from __future__ import annotations


class SaturnError(Exception):
    """Anything Saturn tells its user; the message stands by itself, without a traceback."""

    #: Whether every job would meet it that differs in nothing but what the optimizer and its schedule see.
    common = False


class InvalidSweepError(SaturnError, ValueError):
    """A sweep, job, cluster or planning problem that can't be right as it is written."""


class MissedDeadlineError(InvalidSweepError):
    """No plan ends by the deadline, or none was found that does."""


class DiskError(SaturnError):
    """A disk is full, or can't be written: a fault of the machine, which may be mended; no job failed."""


class DeviceError(SaturnError):
    """A GPU can't be used, whatever was to run on it: a fault of the machine, which may be mended."""


class JobError(SaturnError):
    """The job's own code raised, or its loss is not a number: this job fails, the others go on."""


def message_of(error: BaseException) -> str:
    """``str(error)``, whatever a job's own class of exceptions does there."""
    try:
        return str(error)
    except Exception:
        return "<its message can't be told: its __str__ raises>"
