"""How a run, a trial or a job of a sweep ended, or how it stands: one word for each. Plain data."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """A word that is written as itself in JSON and in texts, and equals it.

    Runs end as the first ten. Jobs of a sweep may also be the others: dropped by a selection, left to a later
    round, or without a place in the plan.
    """

    FINISHED = "finished"
    #: It was told to, and wrote a checkpoint.
    STOPPED = "stopped"
    #: An exception.
    FAILED = "failed"
    #: It had its devices for as long as it may.
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    NOT_A_NUMBER = "not_a_number"
    #: The technique can't train the job.
    DOES_NOT_FIT = "does_not_fit"
    #: It would train it otherwise than one device does.
    CHANGES_RESULT = "changes_result"
    #: Nothing moved for too long.
    HUNG = "hung"
    #: A process was killed, or nobody knows what became of it.
    LOST = "lost"

    PRUNED = "pruned"
    #: At the end of a round: it trains on.
    GOING_ON = "going_on"
    #: At the end of a round: it has come to its rung of the selection.
    PAUSED = "paused"
    #: At the end of a round: its turn has not come.
    WAITING = "waiting"
    NOT_PLANNED = "not_planned"

    # As enum.StrEnum has them, which Python 3.10 lacks.
    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @property
    def in_words(self) -> str:
        """The status as people read it."""
        return self.replace("_", " ")


#: What a further try may mend, from the last checkpoint on. The job's own code is given another try too: data
#: that can't be reached for a moment is the commonest failure of a long training.
WORTH_A_RETRY = frozenset({Status.STOPPED, Status.LOST, Status.HUNG, Status.FAILED})
#: What a job ended with that a later round goes on with.
GOES_ON = frozenset({Status.GOING_ON, Status.WAITING, Status.PAUSED})
#: What a job ended with that no further round takes up.
OVER = frozenset(
    {
        *(Status.FAILED, Status.TIMED_OUT, Status.NOT_A_NUMBER, Status.OUT_OF_MEMORY, Status.PRUNED),
        *(Status.DOES_NOT_FIT, Status.CHANGES_RESULT),
    }
)
